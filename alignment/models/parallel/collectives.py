"""The collectives of a process group, on a list with one tensor per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.errors import InputError


def all_reduce(parts: Sequence[Tensor]) -> list[Tensor]:
    """The sum of all parts, on every rank."""
    total = torch.stack(list(parts)).sum(0)
    return [total] * len(parts)


def all_gather(parts: Sequence[Tensor], *, dim: int = 0) -> list[Tensor]:
    """All parts joined in the order of the ranks along ``dim``, on every rank."""
    whole = torch.cat(list(parts), dim=dim)
    return [whole] * len(parts)


def reduce_scatter(wholes: Sequence[Tensor], *, dim: int = 0) -> list[Tensor]:
    """Rank r keeps part r of the sum.

    Raises:
        InputError: the dimension does not divide by the number of ranks.
    """
    total = torch.stack(list(wholes)).sum(0)
    return split_evenly(total, len(wholes), dim=dim)


def all_to_all(parts: Sequence[Tensor], *, split_dim: int, concat_dim: int) -> list[Tensor]:
    """Rank s cuts its tensor along ``split_dim`` and sends piece r to rank r, which joins them along ``concat_dim``."""
    pieces = [split_evenly(part, len(parts), dim=split_dim) for part in parts]
    return [torch.cat([sent[r] for sent in pieces], dim=concat_dim) for r in range(len(parts))]


def split_evenly(whole: Tensor, ranks: int, *, dim: int = 0) -> list[Tensor]:
    """``ranks`` equal consecutive pieces along ``dim``.

    Raises:
        InputError: the dimension does not divide.
    """
    size = whole.shape[dim]
    if ranks < 1 or size % ranks:
        raise InputError(
            "a dimension is cut into equal parts",
            where=f"dimension {dim}",
            expected=f"a multiple of {ranks}",
            found=size,
        )
    return list(whole.split(size // ranks, dim=dim))


def nested_gather(parts: Sequence[Tensor], *, inner: int) -> list[Tensor]:
    """All tokens on every rank of a grid, by two gathers: first over the inner groups, then over the outer ones.

    Rank o · inner + i is member i of its inner group o. The result is in the order of the ranks.

    Args:
        parts: ``[n, …]`` per rank, equal n.
        inner: ranks per inner group (tensor parallel); the outer ones are data parallel.
    """
    return _gather_outer(_gather_inner(parts, inner), inner)


def nested_reduce_scatter(wholes: Sequence[Tensor], *, inner: int) -> list[Tensor]:
    """The inverse of :func:`nested_gather`, summing: what was gathered last is scattered first.

    In the order of the gathers the sizes fit as well, but every rank gets the tokens of another one.
    """
    return _scatter_inner(_scatter_outer(wholes, inner), inner)


def _inner_groups(ranks: int, inner: int) -> list[list[int]]:
    if inner < 1 or ranks % inner:
        raise InputError("a grid of ranks has whole rows", where="inner", expected=f"a divisor of {ranks}", found=inner)
    return [list(range(start, start + inner)) for start in range(0, ranks, inner)]


def _outer_groups(ranks: int, inner: int) -> list[list[int]]:
    return [list(column) for column in zip(*_inner_groups(ranks, inner))]


def _per_group(tensors: Sequence[Tensor], groups: Sequence[Sequence[int]], collective) -> list[Tensor]:
    result: list[Tensor | None] = [None] * len(tensors)
    for group in groups:
        for rank, tensor in zip(group, collective([tensors[r] for r in group])):
            result[rank] = tensor
    return result


def _gather_inner(tensors: Sequence[Tensor], inner: int) -> list[Tensor]:
    return _per_group(tensors, _inner_groups(len(tensors), inner), all_gather)


def _gather_outer(tensors: Sequence[Tensor], inner: int) -> list[Tensor]:
    return _per_group(tensors, _outer_groups(len(tensors), inner), all_gather)


def _scatter_inner(tensors: Sequence[Tensor], inner: int) -> list[Tensor]:
    return _per_group(tensors, _inner_groups(len(tensors), inner), reduce_scatter)


def _scatter_outer(tensors: Sequence[Tensor], inner: int) -> list[Tensor]:
    return _per_group(tensors, _outer_groups(len(tensors), inner), reduce_scatter)
