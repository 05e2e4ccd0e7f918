"""Data and context parallel gradients: what a rank's loss is multiplied with, so that the averaged gradient is
right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from alignment.errors import InputError

TokenSum = Callable[[Mapping[str, Tensor]], tuple[Tensor, int]]
"""Σ of the loss over the tokens of one micro batch, and how many tokens that are."""


def rank_factor(dp: int, cp: int) -> int:
    """What each rank's share Σ/N of the loss is multiplied with where gradients are *averaged* over dp · cp ranks.

    The shares add up to the loss; an average divides by the ranks, which this undoes, once: a rank of context
    parallelism has part of the tokens just as one of data parallelism has (Megatron-LM multiplies by the context
    parallel size, verl by ``dp_size``).
    """
    return dp * cp


def average_over_ranks(gradients: Sequence[Tensor]) -> Tensor:
    """What the all-reduce of FSDP, DDP and Megatron's buffers leaves: the mean over ranks."""
    return torch.stack(list(gradients)).sum(0) / len(gradients)


def global_tokens(counts: Sequence[Sequence[int]]) -> int:
    """Tokens of the mini batch, over all micro batches of all ranks: what every share is divided by."""
    return sum(sum(of_rank) for of_rank in counts)


def token_mean_gradients(
    parameters: Mapping[str, Tensor],
    token_sum: TokenSum,
    ranks: Sequence[Sequence[Mapping[str, Tensor]]],
    *,
    cp: int = 1,
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over the tokens of a mini batch, and its gradients, as a layout of dp · cp ranks computes them.

    Args:
        parameters: leaves with ``requires_grad`` that ``token_sum`` reads.
        token_sum: see :data:`TokenSum`.
        ranks: the micro batches of each rank; for cp > 1 the cp ranks of one replica follow one another.
        cp: size of context parallelism.

    Raises:
        InputError: no tokens at all, or ranks that are no multiple of ``cp``.
    """
    if len(ranks) % cp:
        raise InputError("a replica has whole ranks", where="cp", expected=f"a divisor of {len(ranks)}", found=cp)
    with torch.no_grad():
        counts = [[token_sum(micro)[1] for micro in of_rank] for of_rank in ranks]
    tokens = global_tokens(counts)
    if not tokens:
        raise InputError("the mini batch has no tokens", where="token_mean_gradients", expected="at least one", found=0)
    factor = rank_factor(len(ranks) // cp, cp)
    total, per_rank = 0.0, {name: [] for name in parameters}
    for of_rank in ranks:
        gradients = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for micro in of_rank:
            share = token_sum(micro)[0] / tokens
            total += float(share.detach())
            found = torch.autograd.grad(share * factor, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, found):
                if gradient is not None:
                    gradients[name] += gradient
        for name, gradient in gradients.items():
            per_rank[name].append(gradient)
    return total, {name: average_over_ranks(parts) for name, parts in per_rank.items()}
