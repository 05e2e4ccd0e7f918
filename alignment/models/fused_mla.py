"""MLA's pre-processing as one operator: projections, norm and rotation by halves on weights that were reordered
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.models.mla import AttentionContext, MultiHeadLatentAttention
from alignment.models.norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class FusedWeights:
    """What the fused operator holds: the last projection of the query and the joint one of latent and key, with their
    rotary rows in the split-halves order.
    """

    query: Tensor
    latent: Tensor


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + r/2) of ``x`` ``[b, h, s, r]``; cos, sin ``[b, s, r/2]``."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def fused_preprocess(
    attention: MultiHeadLatentAttention, weights: FusedWeights, hidden: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q_nope, rotated q_rope, latent and rotated key of ``hidden`` ``[b, s, hidden_size]``, shaped as
    :meth:`MultiHeadLatentAttention.project_query` and ``project_latent`` give them.
    """
    c = attention.config
    low = hidden if c.q_lora_rank is None else attention.q_a_layernorm(attention.q_a_proj(hidden))
    query = F.linear(low, weights.query).unflatten(-1, (c.num_attention_heads, c.q_head_dim)).transpose(1, 2)
    q_nope, q_rope = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    latent, k_rope = F.linear(hidden, weights.latent).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    latent = rms_norm(latent, attention.kv_a_layernorm.weight, eps=c.latent_norm_eps)
    k_rope = rotate_halves(k_rope.unsqueeze(1), context.cos, context.sin).squeeze(1)
    return q_nope, rotate_halves(q_rope, context.cos, context.sin), latent, k_rope
