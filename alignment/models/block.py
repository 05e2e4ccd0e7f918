"""One decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alignment.models.config import ModelConfig
from alignment.models.mla import AttentionContext, MultiHeadLatentAttention
from alignment.models.mlp import SwiGLU
from alignment.models.moe import MixtureOfExperts
from alignment.models.norm import RMSNorm


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the mlp is dense in the first ``first_k_dense_replace`` layers."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.self_attn = MultiHeadLatentAttention(config, layer, **place)
        if config.is_moe_layer(layer):
            self.mlp = MixtureOfExperts(config, **place)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, **place)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **place)

    def forward(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """``[b, s, hidden_size]`` to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
