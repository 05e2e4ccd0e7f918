"""Speculative decoding: which drafted tokens are kept, so that what comes out follows the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accept_token(p: Tensor, q: Tensor, token: int, uniform: float) -> bool:
    """Whether a drafted token is kept: with probability min(1, p / q) (Leviathan et al. 2022, arXiv:2211.17192,
    algorithm 1).

    Args:
        p, q: the target's and the draft's probabilities ``[v]``. A draft without probabilities (n-grams) proposed its
            token with certainty: q is one-hot.
    """
    return uniform * float(q[token]) < float(p[token])


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected token is drawn from anew: norm(max(0, p − q)) ``[v]``."""
    left = (p - q).clamp(min=0)
    return left / left.sum()


def verify(draft: Sequence[int], p: Tensor, q: Tensor | None, uniforms: Sequence[float]) -> tuple[list[int], Tensor]:
    """The kept tokens, and the distribution ``[v]`` the next one is drawn from.

    Args:
        draft: k drafted tokens.
        p: the target's probabilities ``[k + 1, v]`` after each prefix of the draft.
        q: the draft's ``[k, v]``, or None for a draft without probabilities.
        uniforms: k numbers in [0, 1).
    """
    kept: list[int] = []
    for step, token in enumerate(draft):
        drafted = one_hot(token, p.shape[-1], p.dtype) if q is None else q[step]
        if not accept_token(p[step], drafted, token, uniforms[step]):
            return kept, residual(p[step], drafted)
        kept.append(token)
    return kept, p[len(draft)]


def one_hot(token: int, size: int, dtype: torch.dtype) -> Tensor:
    """The distribution of a draft that proposes ``token`` with certainty."""
    distribution = torch.zeros(size, dtype=dtype)
    distribution[token] = 1
    return distribution


def drafted_first(has_draft: Tensor) -> Tensor:
    """The order of a batch's rows with those that have a draft first, each part in the order it came in.

    Args:
        has_draft: bool ``[b]``.

    Returns:
        int64 ``[b]``. The parts keep their order, so the k-th drafted row is the k-th one that the drafter saw.
    """
    return (~has_draft).to(torch.int8).argsort(stable=True)
