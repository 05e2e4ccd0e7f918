"""Block-scaled FP8, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST = 448.0


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Index of every block, and what it covers; those at the edges are smaller."""
    for i, row in enumerate(range(0, shape[0], block[0])):
        for j, column in enumerate(range(0, shape[1], block[1])):
            yield (i, j), (slice(row, min(row + block[0], shape[0])), slice(column, min(column + block[1], shape[1])))


def scales(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of every block over 448, 1 where it is zero; float64."""
    counts = [-(-size // edge) for size, edge in zip(weight.shape, block)]
    found = torch.zeros(counts, dtype=torch.float64)
    for index, cover in blocks(tuple(weight.shape), block):
        largest = float(weight[cover].double().abs().max())
        found[index] = largest / LARGEST if largest > 0 else 1.0
    return found


def scaled(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Codes times the scale of their block, float64."""
    out = torch.zeros(codes.shape, dtype=torch.float64)
    for index, cover in blocks(tuple(codes.shape), block):
        out[cover] = codes.float().double()[cover] * float(scale[index])
    return out
