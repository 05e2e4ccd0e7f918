"""Where tokens, heads and layers are in a parallel layout, by counting; and attention of packs, query by query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def zigzag(lengths: Sequence[int], cp: int, rank: int) -> list[int]:
    """Tokens of a rank: of every sequence the ``rank``-th chunk of 2·cp from the front and the one from the back."""
    tokens, start = [], 0
    for length in lengths:
        size = length // (2 * cp)
        tokens += [start + rank * size + i for i in range(size)]
        tokens += [start + length - (rank + 1) * size + i for i in range(size)]
        start += length
    return tokens


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each sequence begins, and the end."""
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def next_tokens(tokens: Sequence[int], lengths: Sequence[int]) -> list[int | None]:
    """The next token of the same sequence, None at its last."""
    following: list[int | None] = []
    for begin, end in zip(starts(lengths), starts(lengths)[1:]):
        following += [*tokens[begin + 1 : end], None]
    return following


def packed_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, lengths: Sequence[int]) -> Tensor:
    """Causal attention ``[b, h, T, v]`` of each sequence of a pack for itself, one query after the other."""
    rows = []
    for begin, end in zip(starts(lengths), starts(lengths)[1:]):
        for i in range(begin, end):
            scores = scale * torch.einsum("bhd,bhtd->bht", query[:, :, i], key[:, :, begin : i + 1])
            weight = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
            weight = weight / weight.sum(-1, keepdim=True)
            rows.append(torch.einsum("bht,bhtv->bhv", weight, value[:, :, begin : i + 1]))
    return torch.stack(rows, dim=2)
