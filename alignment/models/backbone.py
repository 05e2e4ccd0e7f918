"""The stack of decoder layers between token ids and final hidden states, shared by the policy and the critic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alignment.errors import InputError
from alignment.models.attention import attention_mask_from, default_positions
from alignment.models.block import DecoderLayer
from alignment.models.cache import LatentCache
from alignment.models.config import ModelConfig
from alignment.models.linear import embedding
from alignment.models.mla import AttentionContext
from alignment.models.norm import RMSNorm
from alignment.models.rope import RotaryTable
from alignment.numerics.random import portable_normal


class Backbone(nn.Module):
    """Embedding, ``num_hidden_layers`` decoder layers and the final norm."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        place = {"dtype": dtype, "device": device}
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size, **place)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, **place) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **place)
        self.rotary = RotaryTable(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states ``[b, s, hidden_size]`` of whole sequences; arguments as :meth:`CausalLM.forward`."""
        mask = self._token_mask(input_ids, attention_mask)
        if position_ids is None:
            position_ids = default_positions(mask, segment_ids)
        cos, sin = self.rotary(position_ids, self.dtype)
        context = AttentionContext(cos=cos, sin=sin, mask=attention_mask_from(mask, segment_ids=segment_ids))
        return self._run(input_ids, context)

    def extend(
        self,
        input_ids: Tensor,
        cache: LatentCache,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        absorbed: bool = False,
    ) -> Tensor:
        """Hidden states ``[b, s, hidden_size]`` of tokens that follow those in ``cache``, which they are added to."""
        mask = self._token_mask(input_ids, attention_mask)
        if position_ids is None:
            position_ids = cache.real_tokens()[:, None] + default_positions(mask)
        cos, sin = self.rotary(position_ids, self.dtype)
        cache.extend(mask)
        allowed = attention_mask_from(cache.mask[:, : cache.length], query_slots=input_ids.shape[1])
        context = AttentionContext(cos=cos, sin=sin, mask=allowed, cache=cache, absorbed=absorbed)
        return self._run(input_ids, context)

    def _run(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, context)
        return self.norm(hidden)

    def _token_mask(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if input_ids.ndim != 2:
            raise InputError(
                "token ids are a batch of rows", where="input_ids", expected="[b, s]", found=list(input_ids.shape)
            )
        if attention_mask is None:
            return torch.ones_like(input_ids)
        if attention_mask.shape != input_ids.shape:
            raise InputError(
                "the mask must have the shape of the tokens",
                where="attention_mask",
                expected=list(input_ids.shape),
                found=list(attention_mask.shape),
            )
        return attention_mask


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter and buffer from portable normals, each from a stream of its own name.

    Matrices are N(0, initializer_range²). Norm weights are 1 + N(0, initializer_range²) and the router's correction
    bias is N(0, initializer_range²) instead of the usual ones and zeros, under which a norm without weight or a
    router without bias would go unnoticed. Equal seeds give equal bits on every device (values are drawn in float64
    on the CPU, then rounded).
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = portable_normal(tuple(tensor.shape), seed=seed, stream=f"init/{name}") * config.initializer_range
        if name.endswith("norm.weight"):
            values = values + 1
        tensor.copy_(values)
