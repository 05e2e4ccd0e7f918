"""Rotary channels moved from pairs to halves once, in the weights, so that a fused kernel can rotate by halves."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.errors import InputError


def halves_order(rope_dim: int) -> Tensor:
    """Which interleaved channel stands where in the split-halves layout: 0, 2, 4, …, then 1, 3, 5, …"""
    return torch.cat([torch.arange(0, rope_dim, 2), torch.arange(1, rope_dim, 2)])


def reorder_rope_rows(weight: Tensor, *, rope_dim: int) -> Tensor:
    """``weight`` ``[out, in]`` with its last ``rope_dim`` *output rows* in the split-halves order.

    For ``kv_a_proj_with_mqa`` as stored. The vLLM-Ascend plugin's fused pre-processing of MLA expects it.

    Raises:
        InputError: fewer rows than ``rope_dim``.
    """
    rows = weight.shape[0]
    if rows < rope_dim:
        raise InputError("the rotary rows are the last ones", where="weight", expected=f"≥ {rope_dim} rows", found=rows)
    return torch.cat([weight[: rows - rope_dim], weight[rows - rope_dim :][halves_order(rope_dim)]])


def reorder_query_rows(weight: Tensor, *, heads: int, rope_dim: int) -> Tensor:
    """The same for the last ``rope_dim`` rows of every head of a query projection ``[heads · d, in]``."""
    by_head = weight.view(heads, -1, weight.shape[1])
    return torch.cat([reorder_rope_rows(head, rope_dim=rope_dim) for head in by_head])
