"""What generation keeps of the past: one latent and one rotated key per token and layer."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.config import ModelConfig


class LatentCache:
    """The latent KV cache of MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    Per layer and token it holds the normalised latent ``[kv_lora_rank]`` and the rotated shared key
    ``[qk_rope_head_dim]``, in slots that all sequences of the batch fill together; ``mask`` says which slots hold
    real tokens.

    Attributes:
        latent: one tensor ``[b, capacity, kv_lora_rank]`` per layer.
        rope_key: one tensor ``[b, capacity, qk_rope_head_dim]`` per layer.
        mask: bool ``[b, capacity]``.
        length: slots filled so far.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        layers = range(config.num_hidden_layers)
        shape = (batch_size, capacity)
        self.latent = [torch.zeros(*shape, config.kv_lora_rank, dtype=dtype, device=device) for _ in layers]
        self.rope_key = [torch.zeros(*shape, config.qk_rope_head_dim, dtype=dtype, device=device) for _ in layers]
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.length = 0

    @property
    def batch_size(self) -> int:
        return self.mask.shape[0]

    @property
    def capacity(self) -> int:
        return self.mask.shape[1]

    def real_tokens(self) -> Tensor:
        """Real tokens so far, int64 ``[b]``: the position of the next one."""
        return self.mask[:, : self.length].sum(-1)

    def extend(self, mask: Tensor) -> None:
        """Open ``mask.shape[1]`` new slots, real where ``mask`` ``[b, n]`` is non-zero.

        Raises:
            InputError: another batch size, or no room left.
        """
        batch, new = mask.shape
        if batch != self.batch_size:
            raise InputError(
                "the cache holds another batch", where="LatentCache", expected=self.batch_size, found=batch
            )
        if self.length + new > self.capacity:
            raise InputError(
                "the cache is full",
                where="LatentCache",
                expected=f"at most {self.capacity} tokens",
                found=self.length + new,
            )
        self.mask[:, self.length : self.length + new] = mask.bool()
        self.length += new

    def write(self, layer: int, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Put one layer's ``[b, n, …]`` into the newest slots and return that layer's whole past ``[b, length, …]``."""
        newest = slice(self.length - latent.shape[1], self.length)
        self.latent[layer][:, newest] = latent
        self.rope_key[layer][:, newest] = rope_key
        return self.latent[layer][:, : self.length], self.rope_key[layer][:, : self.length]

    def select(self, rows: Tensor) -> LatentCache:
        """A cache of the sequences ``rows`` (int64 ``[n]``): drop finished ones, or repeat one per sample of its
        prompt.
        """
        chosen = object.__new__(LatentCache)
        chosen.latent = [part[rows] for part in self.latent]
        chosen.rope_key = [part[rows] for part in self.rope_key]
        chosen.mask = self.mask[rows]
        chosen.length = self.length
        return chosen
