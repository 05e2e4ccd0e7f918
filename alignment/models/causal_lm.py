"""The language model: backbone and vocabulary head, whole sequences or step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alignment.models.backbone import Backbone, init_weights
from alignment.models.cache import LatentCache
from alignment.models.config import ModelConfig
from alignment.models.linear import linear


class CausalLM(nn.Module):
    """The golden model. ``state_dict()`` has the tensor names of published ``DeepseekV3ForCausalLM`` checkpoints, one
    per expert.

    Norms, rope, router and softmax compute in float32 at least (:func:`alignment.models.precision.at_least_float32`);
    everything else in ``dtype``. Weights are uninitialised until :meth:`init_weights` or ``load_state_dict``.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config, dtype=dtype, device=device)
        self.lm_head = linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def init_weights(self, seed: int) -> CausalLM:
        """See :func:`alignment.models.backbone.init_weights`; returns the model."""
        init_weights(self, self.config, seed)
        return self

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[b, s, vocab_size]`` of every token, in the dtype of the model.

        Args:
            input_ids: int64 ``[b, s]``.
            attention_mask: ``[b, s]``, non-zero for real tokens; padding may be left, right or both. Logits at padding
                are meaningless but finite.
            position_ids: int64 ``[b, s]``; by default the place among the real tokens of the row (and segment).
            segment_ids: integers ``[b, s]``; runs of equal ids are packed sequences that do not see each other.

        Raises:
            InputError: shapes that disagree, or a position beyond ``max_position_embeddings``.
        """
        hidden = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, segment_ids=segment_ids
        )
        return self.lm_head(hidden)

    def new_cache(self, batch_size: int, capacity: int) -> LatentCache:
        """An empty cache for ``batch_size`` sequences of up to ``capacity`` tokens, padding included."""
        return LatentCache(self.config, batch_size=batch_size, capacity=capacity, dtype=self.dtype, device=self.device)

    def absorb(self, *, contiguous: bool = False) -> None:
        """Make every layer's absorbed projections from the present weights; see
        :meth:`MultiHeadLatentAttention.absorb`.
        """
        for layer in self.model.layers:
            layer.self_attn.absorb(contiguous=contiguous)

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        cache: LatentCache,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        absorbed: bool = False,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Put prompts ``[b, s]`` (left or right padded) into ``cache`` and return their logits ``[b, s, vocab_size]``.

        Args:
            absorbed: the form of attention; prompts are expanded by default, as engines do.
            logits_to_keep: compute the logits of only the last so many slots; 0 means all.

        Raises:
            InputError: shapes that disagree, a full cache, or ``absorbed`` before :meth:`absorb`.
        """
        hidden = self.model.extend(
            input_ids, cache, attention_mask=attention_mask, position_ids=position_ids, absorbed=absorbed
        )
        return self.lm_head(hidden[:, -logits_to_keep:])

    @torch.no_grad()
    def decode(
        self,
        input_ids: Tensor,
        cache: LatentCache,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        absorbed: bool = True,
    ) -> Tensor:
        """Append the next tokens ``[b, 1]`` to ``cache`` and return their logits ``[b, 1, vocab_size]``.

        ``attention_mask`` ``[b, 1]`` is zero for sequences that have ended: their slot is then padding to what
        follows. Arguments and errors as :meth:`prefill`.
        """
        return self.prefill(
            input_ids, cache, attention_mask=attention_mask, position_ids=position_ids, absorbed=absorbed
        )
