"""The golden operators: the model's own functions, run on float64, and the plain formula where the model has none.

Each takes the inputs of its case by name and the case's attributes, and returns the outputs by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch.nn import functional as F

from alignment.backends.case import Tensors
from alignment.models.attention import attention_mask_from, scaled_dot_product
from alignment.models.config import ModelConfig, YarnScaling, preset
from alignment.models.mla import softmax_scale
from alignment.models.moe import select_experts
from alignment.models.norm import rms_norm as model_rms_norm
from alignment.models.rope import RotaryTable, rotate_interleaved

Attributes = Mapping[str, object]


def config_of(attributes: Attributes, **more) -> ModelConfig:
    """A model configuration with the widths, rope and routing of a case; its other fields take no part."""
    scaling = None
    if attributes.get("factor"):
        fields = {f.name for f in dataclasses.fields(YarnScaling)}
        scaling = YarnScaling(**{k: v for k, v in attributes.items() if k in fields})
    names = {f.name for f in dataclasses.fields(ModelConfig)}
    given = {k: v for k, v in attributes.items() if k in names}
    return dataclasses.replace(preset("tiny-moonlight"), rope_scaling=scaling, **{**given, **more})


def rms_norm(t: Tensors, a: Attributes) -> Tensors:
    """y = w · x / √(mean x² + ε), arXiv:1910.07467."""
    return {"output": model_rms_norm(t["x"], t["weight"], eps=a["eps"])}


def add_rms_norm(t: Tensors, a: Attributes) -> Tensors:
    """r = x + residual and its RMSNorm, the pair that Ascend fuses as ``npu_add_rms_norm``."""
    residual = t["x"] + t["residual"]
    return {"residual_out": residual, "output": model_rms_norm(residual, t["weight"], eps=a["eps"])}


def rope(t: Tensors, a: Attributes) -> Tensors:
    """Rotary embedding of x [b, h, s, r] at ``position_ids`` [b, s], plain or YaRN (arXiv:2309.00071).

    ``half`` pairs (i, i + r/2). ``interleave`` pairs (2i, 2i + 1) and gathers the first members of all pairs before the
    second ones, as DeepSeek's published code does.
    """
    table = RotaryTable(config_of(a, rope_theta=a["theta"], qk_rope_head_dim=a["rope_dim"], max_position_embeddings=5000))
    cos, sin = table(t["position_ids"], t["x"].dtype)
    x = t["x"]
    if a["mode"] == "half":
        x = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
    return {"output": rotate_interleaved(x, cos, sin)}


def attention(t: Tensors, a: Attributes) -> Tensors:
    """softmax(scale · q kᵀ) v under a causal mask inside segments; scale = (nope + rope)^-½ · mscale² (DeepSeek-V3)."""
    segments = t["segment_ids"]
    real = segments > 0
    mask = attention_mask_from(real, segment_ids=segments)
    out = scaled_dot_product(t["q"], t["k"], t["v"], scale=softmax_scale(config_of(a, **_lengths(a))), mask=mask)
    return {"output": out * real[:, None, :, None]}


def _lengths(a: Attributes) -> dict:
    return {} if not a["factor"] else {"max_position_embeddings": int(a["original_max_position_embeddings"] * a["factor"])}


def swiglu(t: Tensors, a: Attributes) -> Tensors:
    """silu(gate) · up with x = [gate ; up], arXiv:2002.05202."""
    gate, up = t["x"].chunk(2, dim=-1)
    return {"output": F.silu(gate) * up}


def router(t: Tensors, a: Attributes) -> Tensors:
    """Bias-corrected sigmoid routing in groups (DeepSeek-V3, arXiv:2412.19437), with the weights spread over all experts."""
    config = router_config(t["weight"].shape[0], a)
    scores = torch.sigmoid(F.linear(t["x"], t["weight"]))
    chosen, weights = select_experts(scores, t["bias"], config)
    return {
        "scores_for_choice": scores.detach() + t["bias"],
        "selected": torch.zeros_like(scores).scatter(-1, chosen, 1.0),
        "weights": torch.zeros_like(scores).scatter(-1, chosen, weights),
    }


def router_config(experts: int, a: Attributes) -> ModelConfig:
    """The routing of a case as the model's configuration."""
    return config_of(a, n_routed_experts=experts, num_experts_per_tok=a["top_k"])


def grouped_matmul(t: Tensors, a: Attributes) -> Tensors:
    """Rows of x [n, k] in consecutive groups, each times its own weight [k, m]; a group may be empty."""
    rows = t["x"].split(list(a["group_sizes"]))
    return {"output": torch.cat([part @ weight for part, weight in zip(rows, t["weight"], strict=True)])}


def token_permute(t: Tensors, a: Attributes) -> Tensors:
    """Tokens copied in the order of their experts (stable), and expert outputs weighted and summed back to their tokens."""
    tokens, k = t["expert_ids"].shape
    order = t["expert_ids"].flatten().argsort(stable=True)
    place = order.argsort()
    back = t["expert_output"][place].view(tokens, k, -1)
    return {"permuted": t["x"][order // k], "output": (back * t["probs"][..., None]).sum(1)}


def log_prob(t: Tensors, a: Attributes) -> Tensors:
    """log p(label) = z_label − logsumexp z, entropy −Σ p log p in nats, and the mean negative log-likelihood."""
    log_p = torch.log_softmax(t["logits"], dim=-1)
    chosen = log_p.gather(-1, t["labels"][..., None]).squeeze(-1)
    return {"log_prob": chosen, "entropy": -(log_p.exp() * log_p).sum(-1), "cross_entropy": -chosen.mean()}


def matmul(t: Tensors, a: Attributes) -> Tensors:
    """x wᵀ: a linear layer without bias."""
    return {"output": t["x"] @ t["weight"].T}


def embedding(t: Tensors, a: Attributes) -> Tensors:
    """Rows of the table; its gradient adds up over repeated ids."""
    return {"output": t["weight"][t["input_ids"]]}
