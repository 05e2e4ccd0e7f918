"""The weights of the fused pre-processing of MLA, from those of the module."""

from __future__ import annotations

from alignment.models.fused_mla import FusedWeights
from alignment.models.mla import MultiHeadLatentAttention
from alignment.weights.rope_layout import reorder_query_rows, reorder_rope_rows


def fused_mla_weights(attention: MultiHeadLatentAttention) -> FusedWeights:
    """Copies with reordered rotary rows; stale after every weight update, like all derived weights."""
    c = attention.config
    query = attention.q_proj if c.q_lora_rank is None else attention.q_b_proj
    return FusedWeights(
        query=reorder_query_rows(query.weight.detach(), heads=c.num_attention_heads, rope_dim=c.qk_rope_head_dim),
        latent=reorder_rope_rows(attention.kv_a_proj_with_mqa.weight.detach(), rope_dim=c.qk_rope_head_dim),
    )
