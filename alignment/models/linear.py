"""Layers whose weights are left as allocated."""

from __future__ import annotations

import torch
from torch import nn


def linear(
    inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device | str
) -> nn.Linear:
    """An uninitialised ``nn.Linear``: the default initialisation would draw from the global generator and be
    overwritten.
    """
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=dtype, device=device)


def embedding(entries: int, size: int, *, dtype: torch.dtype, device: torch.device | str) -> nn.Embedding:
    """An uninitialised ``nn.Embedding``."""
    return nn.utils.skip_init(nn.Embedding, entries, size, dtype=dtype, device=device)
