"""The global gradient norm of a layout: every element once, wherever its copies are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError

SHARDED, REPLICATED = "sharded", "replicated"


@dataclass(frozen=True, kw_only=True)
class RankGradients:
    """The reduced gradients of one weight on the ranks of the group.

    Attributes:
        parts: one tensor per rank: parts of the whole (``sharded``, an expert counts as sharded over its group), or
            copies of it (``replicated``).
        kind: which of the two.
    """

    parts: Sequence[Tensor]
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in (SHARDED, REPLICATED):
            raise InputError(
                "unknown kind of gradient", where="RankGradients", expected=f"{SHARDED} | {REPLICATED}", found=self.kind
            )


def counted(gradients: RankGradients, rank: int) -> bool:
    """Whether rank ``rank`` contributes this weight to the norm: of copies only the first one does."""
    return gradients.kind == SHARDED or rank == 0


def global_norm(gradients: Mapping[str, RankGradients]) -> float:
    """√Σ g² over all elements of all weights, each rank adding what it counts, then summed over ranks."""
    ranks = max(len(g.parts) for g in gradients.values())
    squares = [0.0] * ranks
    for each in gradients.values():
        for rank, part in enumerate(each.parts):
            if counted(each, rank):
                squares[rank] += float(part.double().square().sum())
    return math.sqrt(math.fsum(squares))


def clip(gradients: Mapping[str, RankGradients], *, max_norm: float) -> float:
    """Scales every part in place so that the global norm is at most ``max_norm``; returns the norm before."""
    norm = global_norm(gradients)
    # the constant of torch.nn.utils.clip_grad_norm_
    factor = min(1.0, max_norm / (norm + 1e-6))
    seen: set[int] = set()
    with torch.no_grad():
        for each in gradients.values():
            for part in each.parts:
                if part.data_ptr() not in seen:
                    seen.add(part.data_ptr())
                    part.mul_(factor)
    return norm
