"""AdamW, clipping and schedules from their papers, in Python floats and float64 tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


def learning_rate(update: int, *, lr: float, warmup: int, kind: str, min_ratio: float = 0.0, total: int = 0) -> float:
    """Linear from lr/warmup to lr, then constant or half a cosine (arXiv:1608.03983 eq. 5) down to min_ratio · lr."""
    if update < warmup:
        return lr * (update + 1) / warmup
    if kind == "constant":
        return lr
    share = min(1.0, (update - warmup) / (total - warmup))
    low = min_ratio * lr
    return low + (lr - low) * (1 + math.cos(math.pi * share)) / 2


def norm(gradients: Mapping[str, Tensor]) -> float:
    """√Σ g² over everything."""
    return math.sqrt(math.fsum(float((g.double() ** 2).sum()) for g in gradients.values()))


@dataclass
class AdamW:
    """Algorithm 2 of arXiv:1711.05101 with bias correction, on copies of the weights in float64 (or ``dtype``)."""

    weights: dict[str, Tensor]
    betas: tuple[float, float]
    eps: float
    dtype: torch.dtype = torch.float64
    t: int = 0
    m: dict[str, Tensor] = field(default_factory=dict)
    v: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = {n: w.detach().clone().to(self.dtype) for n, w in self.weights.items()}

    def step(self, gradients: Mapping[str, Tensor], *, lr: float, decay: Mapping[str, float], max_norm: float) -> float:
        """One step; returns the norm before clipping. ``max_norm`` 0 clips nothing."""
        size = norm(gradients)
        factor = min(1.0, max_norm / (size + 1e-6)) if max_norm else 1.0
        self.t += 1
        b1, b2 = self.betas
        for name, weight in self.weights.items():
            g = gradients[name].detach().to(self.dtype) * factor
            self.m[name] = b1 * self.m.get(name, torch.zeros_like(g)) + (1 - b1) * g
            self.v[name] = b2 * self.v.get(name, torch.zeros_like(g)) + (1 - b2) * g * g
            m_hat, v_hat = self.m[name] / (1 - b1**self.t), self.v[name] / (1 - b2**self.t)
            self.weights[name] = weight - lr * decay[name] * weight - lr * m_hat / (v_hat.sqrt() + self.eps)
        return size
