"""Layers whose weights are left as allocated.

``torch.nn.utils.skip_init`` would do the same, but it initialises on the meta device first, and that imports the compiler:
more than a second of CPU time before the first model of a process.
"""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Leaves the memory as it is."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Leaves the memory as it is."""


def linear(
    inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device | str
) -> nn.Linear:
    """An uninitialised ``nn.Linear``: the default initialisation would draw from the global generator and be
    overwritten.
    """
    return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)


def embedding(entries: int, size: int, *, dtype: torch.dtype, device: torch.device | str) -> nn.Embedding:
    """An uninitialised ``nn.Embedding``."""
    return Embedding(entries, size, dtype=dtype, device=device)
