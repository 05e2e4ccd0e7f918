"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), expanded and absorbed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignment.errors import InputError
from alignment.models import attention
from alignment.models.cache import LatentCache
from alignment.models.config import ModelConfig
from alignment.models.linear import linear
from alignment.models.norm import RMSNorm
from alignment.models.rope import rotate_interleaved, softmax_mscale


def softmax_scale(config: ModelConfig) -> float:
    """1/sqrt(q_head_dim) · mscale²: the width is that of a whole query head, ``qk_nope_head_dim + qk_rope_head_dim``.

    128 + 64 = 192 for DeepSeek-V3, not the 128 of ``v_head_dim``; YaRN's mscale enters squared (DeepSeek-V3,
    ``modeling_deepseek.py``), once for the query and once for the key.
    """
    return config.q_head_dim**-0.5 * softmax_mscale(config.rope_scaling) ** 2


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What all layers of one forward share.

    Attributes:
        cos, sin: ``[b, s, qk_rope_head_dim / 2]``.
        mask: bool ``[b, 1, s, t]``, true where the query may attend.
        cache: where the past is kept, or None without one.
        absorbed: attend over the latents themselves instead of expanding them.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor
    cache: LatentCache | None = None
    absorbed: bool = False


class MultiHeadLatentAttention(nn.Module):
    """One layer's attention. Keys and values come from a latent of ``kv_lora_rank`` and one rotated key shared by all
    heads.

    Expanded: k = [W_UK c ; k_rope], v = W_UV c, with W_UK and W_UV the rows of ``kv_b_proj``. Absorbed: q is taken
    into the latent space, q' = W_UKᵀ q_nope, attends over c itself, and W_UV expands the result. The two are equal by
    associativity.

    Attributes:
        w_uk_t: ``[h, qk_nope_head_dim, kv_lora_rank]`` and ``w_uv``: ``[h, kv_lora_rank, v_head_dim]``, the derived
            weights of the
            absorbed form; None until :meth:`absorb`.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, rope = config.num_attention_heads, config.qk_rope_head_dim

        def project(inputs: int, outputs: int) -> nn.Linear:
            return linear(inputs, outputs, dtype=dtype, device=device)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, eps=config.latent_norm_eps, dtype=dtype, device=device)

        if config.q_lora_rank is None:
            self.q_proj = project(config.hidden_size, heads * config.q_head_dim)
        else:
            self.q_a_proj = project(config.hidden_size, config.q_lora_rank)
            self.q_a_layernorm = norm(config.q_lora_rank)
            self.q_b_proj = project(config.q_lora_rank, heads * config.q_head_dim)
        self.kv_a_proj_with_mqa = project(config.hidden_size, config.kv_lora_rank + rope)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = project(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = project(heads * config.v_head_dim, config.hidden_size)
        self.w_uk_t: Tensor | None = None
        self.w_uv: Tensor | None = None

    def absorb(self, *, contiguous: bool = False) -> tuple[Tensor, Tensor]:
        """(Re)compute ``w_uk_t`` and ``w_uv`` from ``kv_b_proj.weight`` and return them.

        By default both are *views* of the weight, so an in-place update of it reaches them. ``contiguous=True``
        copies them, as kernels that want packed operands do: from then on they are stale after every weight update
            until ``absorb`` runs again.
        """
        c = self.config
        weight = self.kv_b_proj.weight.detach()
        per_head = weight.view(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        w_uk_t, w_uv = per_head.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        w_uv = w_uv.transpose(1, 2)
        if contiguous:
            w_uk_t, w_uv = (
                w_uk_t.clone(memory_format=torch.contiguous_format),
                w_uv.clone(memory_format=torch.contiguous_format),
            )
        self.w_uk_t, self.w_uv = w_uk_t, w_uv
        return w_uk_t, w_uv

    def forward(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """``[b, s, hidden_size]`` to ``[b, s, hidden_size]``.

        Raises:
            InputError: the absorbed form is asked for before :meth:`absorb` made its weights.
        """
        q_nope, q_rope = self.project_query(hidden, context)
        latent, k_rope = self.project_latent(hidden, context)
        if context.cache is not None:
            latent, k_rope = context.cache.write(self.layer, latent, k_rope)
        attend = self._attend_absorbed if context.absorbed else self._attend_expanded
        out = attend(q_nope, q_rope, latent, k_rope, context.mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def project_query(self, hidden: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """The two parts of the query, ``[b, h, s, qk_nope_head_dim]`` and, rotated, ``[b, h, s, qk_rope_head_dim]``."""
        c = self.config
        if c.q_lora_rank is None:
            query = self.q_proj(hidden)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query = query.unflatten(-1, (c.num_attention_heads, c.q_head_dim)).transpose(1, 2)
        q_nope, q_rope = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return q_nope, rotate_interleaved(q_rope, context.cos, context.sin)

    def project_latent(self, hidden: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """What the cache keeps: the latent ``[b, s, kv_lora_rank]`` and the rotated key ``[b, s,
        qk_rope_head_dim]``.
        """
        c = self.config
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        k_rope = rotate_interleaved(k_rope.unsqueeze(1), context.cos, context.sin).squeeze(1)
        return self.kv_a_layernorm(latent), k_rope

    def _attend_expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        c = self.config
        heads = c.num_attention_heads
        kv = self.kv_b_proj(latent).unflatten(-1, (heads, c.qk_nope_head_dim + c.v_head_dim)).transpose(1, 2)
        k_nope, value = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        key = torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, heads, -1, -1)], dim=-1)
        query = torch.cat([q_nope, q_rope], dim=-1)
        return attention.scaled_dot_product(query, key, value, scale=softmax_scale(c), mask=mask)

    def _attend_absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        if self.w_uk_t is None or self.w_uv is None:
            raise InputError(
                "the absorbed projections do not exist yet",
                where=f"layer {self.layer} self_attn",
                expected="w_uk_t and w_uv",
                next_step="call absorb() after loading or updating the weights",
            )
        query = torch.cat([torch.einsum("bhsn,hnr->bhsr", q_nope, self.w_uk_t), q_rope], dim=-1)
        key = torch.cat([latent, k_rope], dim=-1).unsqueeze(1)
        out = attention.scaled_dot_product(query, key, latent.unsqueeze(1), scale=softmax_scale(self.config), mask=mask)
        return torch.einsum("bhsr,hrv->bhsv", out, self.w_uv)
