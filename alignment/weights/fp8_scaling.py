"""Delayed scaling of FP8 training: the scale of a step comes from the magnitudes of the steps before."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_E4M3 = float(torch.finfo(torch.float8_e4m3fn).max)


class DelayedScaling:
    """Scale from the largest magnitude of the last ``history`` steps (NVIDIA Transformer Engine, ``DelayedScaling``).

    ``quantize`` first writes this step's magnitude into the history and then reads the scale, so the first step has
    one.
    """

    def __init__(self, *, history: int = 16) -> None:
        self.amax = torch.zeros(history, dtype=torch.float32)

    def record(self, values: Tensor) -> None:
        """Writes the magnitude of a step into the history."""
        self.amax = torch.roll(self.amax, 1)
        self.amax[0] = values.detach().abs().amax().float()

    def scale(self) -> Tensor:
        """What values are divided by, 1 while only zeros were seen."""
        largest = self.amax.amax()
        return torch.where(largest > 0, largest / LARGEST_E4M3, torch.ones_like(largest))

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """float8_e4m3fn codes and their scale."""
        self.record(values)
        scale = self.scale()
        return (values.float() / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn), scale
