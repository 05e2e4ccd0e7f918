"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alignment.models.precision import at_least_float32


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """y = w · x / sqrt(mean(x²) + ε) over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    The quotient is computed in float32 at least and rounded to ``x.dtype`` before the weight multiplies it, as in the
    published DeepSeek-V3 code.

    Args:
        x: ``[..., n]``.
        weight: ``[n]``.
        eps: added to the mean square.

    Returns:
        ``[..., n]`` in the promoted dtype of ``x`` and ``weight``.
    """
    wide = x.to(at_least_float32(x.dtype))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class RMSNorm(nn.Module):
    """:func:`rms_norm` with a learned weight."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
