"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.linear import linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv:2002.05202), without biases: ``[..., hidden]`` to ``[...,
    hidden]``.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size, dtype=dtype, device=device)
        self.up_proj = linear(hidden_size, intermediate_size, dtype=dtype, device=device)
        self.down_proj = linear(intermediate_size, hidden_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
