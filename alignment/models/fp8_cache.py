"""Keys and values kept in FP8 with one scale per layer, and where that scale comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.errors import InputError

LARGEST_E4M3 = float(torch.finfo(torch.float8_e4m3fn).max)


class Fp8KeyValues:
    """The keys (or values) of one layer as float8_e4m3fn.

    The scale is calibrated: the largest magnitude that was seen, over 448. It belongs to the weights that made the
    keys, so an engine that takes new weights takes new scales with them, or calibrates again.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def calibrate(self, values: Tensor) -> Tensor:
        """The scale for ``values``, 1 where they are all zero."""
        largest = values.detach().abs().amax().float()
        self.scale = torch.where(largest > 0, largest / LARGEST_E4M3, torch.ones_like(largest))
        return self.scale

    def load_scale(self, scale: Tensor) -> None:
        """Takes a scale that came with the weights."""
        self.scale = scale.detach().float().clone()

    def store(self, values: Tensor) -> Tensor:
        """``values`` as the cache keeps them; what is larger than 448 scales saturates.

        Raises:
            InputError: there is no scale yet.
        """
        if self.scale is None:
            raise InputError(
                "the cache has no scale", where="Fp8KeyValues", next_step="calibrate it, or load its scale"
            )
        return (values.float() / self.scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)

    def read(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """What attention sees of ``stored``."""
        return (stored.float() * self.scale).to(dtype)


def push_scales(scales: dict[str, Tensor], caches: dict[str, Fp8KeyValues]) -> None:
    """The scales of a weight update into the caches of an engine, by layer.

    Raises:
        InputError: a layer's scale is missing.
    """
    for name, cache in caches.items():
        if name not in scales:
            raise InputError("the update has no scale for a layer", where=name, expected="a scale per layer")
        cache.load_scale(scales[name])
