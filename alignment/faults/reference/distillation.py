"""The generalised Jensen-Shannon divergence as probabilities, differentiable, in float64 (arXiv:2306.13649, eq. 1)."""

from __future__ import annotations

import torch
from torch import Tensor


def _normalised(logits: Tensor, temperature: float) -> Tensor:
    shifted = torch.exp((logits - logits.detach().amax(-1, keepdim=True)) / temperature)
    return shifted / shifted.sum(-1, keepdim=True)


def _relative(p: Tensor, q: Tensor) -> Tensor:
    """Σ p ln(p / q) over the places where p is not 0."""
    held = p > 0
    ratio = torch.where(held, p, torch.ones_like(p)) / torch.where(held, q, torch.ones_like(q))
    return (p * torch.log(ratio)).sum(-1)


def divergence(student: Tensor, teacher: Tensor, *, beta: float, temperature: float) -> Tensor:
    """Per row of logits over one support: β KL(T‖M) + (1 − β) KL(S‖M) with M = βT + (1 − β)S; KL(T‖S) and KL(S‖T) at
    β = 0 and 1."""
    s, t = _normalised(student, temperature), _normalised(teacher, temperature)
    if beta == 0:
        return _relative(t, s)
    if beta == 1:
        return _relative(s, t)
    mixed = beta * t + (1 - beta) * s
    return beta * _relative(t, mixed) + (1 - beta) * _relative(s, mixed)
