"""The language model of one unpadded sequence in float64, from its tensors by name: what every path must agree with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from alignment.faults.reference import rotary, routing
from alignment.models.config import ModelConfig


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / √(mean x² + ε)."""
    return weight * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps))


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """Σ_j softmax_j(scale · q·k_j) v_j over the allowed j, row by row; zeros for a row that may attend to nothing.

    Args:
        query ``[s, d]``, key ``[t, d]``, value ``[t, v]``, allowed bool ``[s, t]``.
    """
    scores = scale * (query @ key.T)
    weight = torch.where(allowed, torch.exp(scores - scores.detach().max()), torch.zeros_like(scores))
    total = weight.sum(-1, keepdim=True)
    return (weight / torch.where(total > 0, total, torch.ones_like(total))) @ value


def latent_attention(
    x: Tensor, weights: Mapping[str, Tensor], prefix: str, config: ModelConfig, positions: Tensor
) -> dict[str, Tensor]:
    """One layer's MLA on ``x`` ``[s, hidden]``, with what it makes on the way."""
    c = config

    def w(name: str) -> Tensor:
        return weights[f"{prefix}.{name}.weight"]

    if c.q_lora_rank is None:
        query = x @ w("q_proj").T
    else:
        query = normalised(x @ w("q_a_proj").T, w("q_a_layernorm"), c.latent_norm_eps) @ w("q_b_proj").T
    joint = x @ w("kv_a_proj_with_mqa").T
    latent = normalised(joint[:, : c.kv_lora_rank], w("kv_a_layernorm"), c.latent_norm_eps)
    angle, size = rotary.angles(positions, c), rotary.amplitude(c)
    shared_key = rotary.turned(joint[:, c.kv_lora_rank :], angle, size=size)
    expanded = latent @ w("kv_b_proj").T
    causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    width, inner = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_nope_head_dim + c.v_head_dim
    queries, keys, outputs = [], [], []
    for head in range(c.num_attention_heads):
        q = query[:, head * width : (head + 1) * width]
        q = torch.cat([q[:, : c.qk_nope_head_dim], rotary.turned(q[:, c.qk_nope_head_dim :], angle, size=size)], dim=-1)
        kv = expanded[:, head * inner : (head + 1) * inner]
        k = torch.cat([kv[:, : c.qk_nope_head_dim], shared_key], dim=-1)
        queries.append(q)
        keys.append(k)
        outputs.append(attend(q, k, kv[:, c.qk_nope_head_dim :], rotary.softmax_scale(c), causal))
    core = torch.cat(outputs, dim=-1)
    return {
        "query": torch.stack(queries), "key": torch.stack(keys), "latent": latent, "core": core,
        "output": core @ w("o_proj").T,
    }  # fmt: skip


def forward(
    ids: Tensor, weights: Mapping[str, Tensor], config: ModelConfig, *, positions: Tensor | None = None
) -> dict[str, Tensor]:
    """What every module gives on ``ids`` ``[s]``, by module path in the order of computation; ``lm_head`` are the
    logits ``[s, v]``.
    """
    positions = torch.arange(len(ids)) if positions is None else positions
    found: dict[str, Tensor] = {}
    x = found["model.embed_tokens"] = weights["model.embed_tokens.weight"][ids]
    for index in range(config.num_hidden_layers):
        at = f"model.layers.{index}"
        normed = found[f"{at}.input_layernorm"] = normalised(
            x, weights[f"{at}.input_layernorm.weight"], config.rms_norm_eps
        )
        attention = latent_attention(normed, weights, f"{at}.self_attn", config, positions)
        found[f"{at}.self_attn.kv_a_layernorm"] = attention["latent"]
        found[f"{at}.self_attn.query"] = attention["query"]
        found[f"{at}.self_attn.key"] = attention["key"]
        found[f"{at}.self_attn.core"] = attention["core"]
        found[f"{at}.self_attn"] = attention["output"]
        x = found[f"{at}.attention_residual"] = x + attention["output"]
        normed = normalised(x, weights[f"{at}.post_attention_layernorm.weight"], config.rms_norm_eps)
        found[f"{at}.post_attention_layernorm"] = normed
        if index >= config.first_k_dense_replace:
            mlp, found[f"{at}.mlp.gate"] = routing.mixture(normed, weights, f"{at}.mlp", config)
        else:
            mlp = routing.gated_mlp(normed, weights, f"{at}.mlp")
        found[f"{at}.mlp"] = mlp
        x = found[at] = x + mlp
    x = found["model.norm"] = normalised(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    found["lm_head"] = x @ head.T
    return found


def log_softmax(logits: Tensor) -> Tensor:
    """z − ln Σ e^z, with the largest z taken out."""
    largest = logits.detach().max(-1, keepdim=True).values
    return logits - largest - torch.log(torch.exp(logits - largest).sum(-1, keepdim=True))


def token_log_probs(
    ids: Tensor, weights: Mapping[str, Tensor], config: ModelConfig, *, temperature: float = 1.0
) -> Tensor:
    """log p(ids[t + 1] | ids[: t + 1]) for every t but the last, ``[s − 1]``."""
    logits = forward(ids, weights, config)["lm_head"][:-1] / temperature
    return log_softmax(logits)[torch.arange(len(ids) - 1), ids[1:]]
