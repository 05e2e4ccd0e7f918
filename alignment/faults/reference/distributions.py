"""Log-probs, entropies and their derivatives from logits, from the definitions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """``log_probs`` and ``entropy`` [n] of labels, and their derivatives by the logits [n, v]."""

    log_probs: Tensor
    entropy: Tensor
    log_prob_gradient: Tensor
    entropy_gradient: Tensor


def of_labels(logits: Tensor, labels: Tensor, *, temperature: float) -> Chosen:
    """p = softmax(z / T) in float64: log p_y, H = −Σ p log p, ∂log p_y/∂z = (1_y − p)/T, ∂H/∂z = −p (log p + H)/T."""
    z = logits.detach().double() / temperature
    log_p = z - z.amax(-1, keepdim=True)
    log_p = log_p - log_p.exp().sum(-1, keepdim=True).log()
    p = log_p.exp()
    terms = torch.where(p > 0, p * torch.where(p > 0, log_p, 0.0), 0.0)
    entropy = -terms.sum(-1)
    hot = torch.zeros_like(p).scatter_(-1, labels.unsqueeze(-1), 1.0)
    inside = torch.where(p > 0, log_p + entropy.unsqueeze(-1), 0.0)
    return Chosen(
        (log_p * hot).masked_fill(hot == 0, 0.0).sum(-1), entropy, (hot - p) / temperature, -p * inside / temperature
    )
