"""The most likely tokens of a vocabulary whose logits are split over tensor-parallel ranks.

Every rank holds the logits of a consecutive range of token ids. Each picks its own k candidates, moves their ids by the
start of its range, and the k best of all candidates are the k best of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.errors import InputError


def local_top_k(logits: Tensor, k: int, *, start: int) -> tuple[Tensor, Tensor]:
    """One rank's candidates: values and *global* ids [...,min(k, v_local)] of logits [...,v_local] from id ``start`` on."""
    values, indices = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return values, indices + start


def merge_top_k(candidates: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k best of all ranks' candidates, most likely first.

    Raises:
        InputError: fewer than k candidates, or an id that two ranks claim: their ids were left local.
    """
    values = torch.cat([v for v, _ in candidates], -1)
    ids = torch.cat([i for _, i in candidates], -1)
    if values.shape[-1] < k:
        raise InputError(
            "there are fewer tokens than asked for", where="gkd_logits_topk", expected=f"≤ {values.shape[-1]}", found=k
        )
    ordered = ids.sort(-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise InputError(
            "two ranks claim the same token id",
            where="top-k over a split vocabulary",
            expected="ids of the whole vocabulary (local id + start of the range)",
            found="local ids",
        )
    values, chosen = values.topk(k, dim=-1)
    return values, ids.gather(-1, chosen)


def vocab_parallel_top_k(shards: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Values and ids [...,k] of the k most likely tokens, from the logits [...,v_rank] of every rank in order."""
    starts = [sum(s.shape[-1] for s in shards[:rank]) for rank in range(len(shards))]
    return merge_top_k([local_top_k(shard, k, start=start) for shard, start in zip(shards, starts)], k)
