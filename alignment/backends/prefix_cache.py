"""A rollout engine that keeps the prefilled caches of its prompts, and forgets them when its weights change."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from alignment.backends.golden_rollout import GoldenRollout
from alignment.models.cache import LatentCache


class PrefixCachingRollout(GoldenRollout):
    """:class:`GoldenRollout` with a prefix cache: a prompt that comes again is not prefilled again.

    What is kept was computed by the weights of its time, so every weight update, and every sleep, empties it.
    """

    def __init__(self, *arguments, **options) -> None:
        self._prefixes: dict[tuple[int, ...], tuple[LatentCache, Tensor]] = {}
        super().__init__(*arguments, **options)

    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], *, post_process: bool = True, partial: bool = False
    ) -> None:
        """As :meth:`GoldenRollout.update_weights`; the prefix cache is emptied."""
        super().update_weights(stream, post_process=post_process, partial=partial)
        self.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """As :meth:`GoldenRollout.sleep`; the prefix cache is emptied."""
        super().sleep(level)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets every prompt."""
        self._prefixes.clear()

    @torch.no_grad()
    def forced_log_probs(self, prompt: Tensor, response: Tensor) -> Tensor:
        """Log-probs ``[r]`` of the tokens of ``response`` ``[r]`` after ``prompt`` ``[p]``, decoded one by one."""
        self._require_usable("forced_log_probs")
        key = tuple(prompt.tolist())
        if key not in self._prefixes:
            cache = self._model.new_cache(1, len(prompt))
            logits = self._model.prefill(prompt[None], cache, logits_to_keep=1)[:, -1]
            self._prefixes[key] = (cache, logits)
        kept, logits = self._prefixes[key]
        cache = self._model.new_cache(1, len(prompt) + len(response))
        for layer in range(len(kept.latent)):
            cache.latent[layer][:, : kept.length] = kept.latent[layer]
            cache.rope_key[layer][:, : kept.length] = kept.rope_key[layer]
        cache.mask[:, : kept.length], cache.length = kept.mask, kept.length
        found = []
        for token in response:
            found.append(torch.log_softmax(logits, dim=-1)[0, token])
            logits = self._model.decode(token.view(1, 1), cache)[:, -1]
        return torch.stack(found)
