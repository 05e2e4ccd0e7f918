"""Query, key and value projections fused by key group, as Megatron keeps those of grouped-query attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fuse_qkv(query: Tensor, key: Tensor, value: Tensor, *, groups: int) -> Tensor:
    """``[groups · (r + 2) · d, h]``: for each group its r query heads, its key head, its value head.

    Args:
        query: ``[groups · r · d, h]``; key, value: ``[groups · d, h]``.
    """
    hidden = query.shape[1]
    parts = [part.view(groups, -1, hidden) for part in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, hidden)


def split_qkv(fused: Tensor, *, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`fuse_qkv`; the number of query heads per group follows from the rows."""
    hidden = fused.shape[1]
    by_group = fused.view(groups, -1, head_dim, hidden)
    query, key, value = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
    return query.reshape(-1, hidden), key.reshape(-1, hidden), value.reshape(-1, hidden)


def shard_qkv(fused: Tensor, *, ranks: int) -> list[Tensor]:
    """Tensor parallel ranks take whole groups, in order."""
    return list(fused.chunk(ranks, dim=0))


def merge_qkv(shards: Sequence[Tensor], *, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the checkpoint from what the ranks hold: split every rank's groups, then join."""
    split = [split_qkv(shard, groups=groups // len(shards), head_dim=head_dim) for shard in shards]
    return tuple(torch.cat(parts) for parts in zip(*split))
