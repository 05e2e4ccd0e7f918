"""The losses of a router, and what a layout multiplies their gradient with."""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_loss(
    scores: Tensor, chosen: Tensor, *, tokens: int | None = None, load: Tensor | None = None
) -> Tensor:
    """E · Σ_e f_e · P_e with f_e the share of choices of expert e and P_e its mean normalised score (Fedus et al. 2021,
    arXiv:2101.03961, equation 4, for k choices per token).

    Args:
        scores: ``[n, E]``, ≥ 0.
        chosen: int64 ``[n, k]``.
        tokens: of the whole batch, where ``scores`` holds a part of it (a rank's or a micro-batch's share).
        load: choices of every expert in the whole batch ``[E]``; those of ``chosen`` by default.

    Returns:
        A scalar; the parts of a batch add up to its loss.
    """
    experts, total = scores.shape[1], tokens if tokens is not None else scores.shape[0]
    if load is None:
        load = torch.nn.functional.one_hot(chosen.flatten(), experts).sum(0)
    share = load.to(scores.dtype) / (total * chosen.shape[1])
    mean_score = (scores / scores.sum(-1, keepdim=True)).sum(0) / total
    return experts * (share * mean_score).sum()


def z_loss(logits: Tensor, *, tokens: int | None = None) -> Tensor:
    """Mean over tokens of logsumexp(z)² of the router's *logits* ``[n, E]`` (Zoph et al. 2022, arXiv:2202.08906,
    equation 5). ``tokens`` as in :func:`load_balancing_loss`.
    """
    return torch.logsumexp(logits, dim=-1).square().sum() / (tokens if tokens is not None else logits.shape[0])


def side_scale(*, micro_batches: int = 1, tensor_parallel: int = 1) -> float:
    """The gradient a router's loss gets where the main loss has 1 (:meth:`SideLoss.set_scale`).

    Every micro-batch's loss is a mean over its own tokens and their gradients are summed: 1/micro-batches. Every tensor
    parallel rank computes the same router on the same tokens and the gradients of the replicas are summed: 1/TP. Over
    data and context parallel ranks gradients are averaged, as means should be: no factor.
    """
    return 1.0 / (micro_batches * tensor_parallel)
