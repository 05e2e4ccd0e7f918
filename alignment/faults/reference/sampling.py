"""Sampling rules by their definition, one distribution at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.faults.reference.language_model import log_softmax


def distribution(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities ``[v]``: logits over temperature, then the k most likely, then the smallest set of them that
    reaches ``top_p``, renormalised after each.
    """
    p = torch.exp(log_softmax(logits.double() / temperature)).tolist()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept = order if top_k == -1 else order[:top_k]
    total = sum(p[token] for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if nucleus and reached >= top_p:
            break
        nucleus.append(token)
        reached += p[token] / total
    left = torch.zeros(len(p), dtype=torch.float64)
    left[nucleus] = torch.tensor([p[token] for token in nucleus], dtype=torch.float64)
    return left / left.sum()


def drawn(probabilities: Tensor, uniform: float) -> tuple[int, float]:
    """The token of the inverse distribution function, and how far the draw is from choosing its neighbour."""
    cumulative = probabilities.cumsum(0)
    token = int((cumulative <= uniform).sum())
    below = float(cumulative[token - 1]) if token else -1.0
    return token, min(uniform - below, float(cumulative[token]) - uniform)
