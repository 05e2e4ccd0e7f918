"""Cutting a batch into mini batches, ranks and micro batches, and putting results back in order.

One convention serves training and inference (``use_dynamic_bsz``): a micro batch holds at most ``max_token_len`` *real*
tokens (prompt and response, padding not counted), there are as few micro batches as that allows, and they are balanced
by length. What a sample computes does not depend on its micro batch, so only memory and speed follow from the choice.

A step is cut into mini batches first and each mini batch then into ranks, so the samples of an optimizer step are the
same for every number of ranks. (verl cuts into ranks first: there another number of ranks regroups the mini batches.)
Everything here is a pure function of lengths: ties are broken by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.rl.batch import Batch


def token_counts(batch: Batch) -> list[int]:
    """Real tokens of each sample, prompt and response."""
    return (batch["attention_mask"] != 0).sum(-1).tolist()


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which samples each part holds. Every sample is in exactly one part; within a part the order is ascending."""

    parts: tuple[tuple[int, ...], ...]

    def split(self, batch: Batch) -> list[Batch]:
        """The parts of a batch."""
        self._check(len(batch), "split")
        return [batch[list(rows)] for rows in self.parts]

    def restore(self, results: Sequence[Tensor]) -> Tensor:
        """Results of the parts, in the original order of the samples: the exact inverse of :meth:`split`.

        Raises:
            InputError: another number of parts or of samples than the partition has.
        """
        sizes, found = [len(rows) for rows in self.parts], [len(t) for t in results]
        if sizes != found:
            raise InputError("the results do not fit the partition", where="restore", expected=sizes, found=found)
        joined = torch.cat(list(results))
        order = torch.tensor([i for rows in self.parts for i in rows], dtype=torch.int64, device=joined.device)
        return torch.empty_like(joined).index_copy_(0, order, joined)

    def _check(self, samples: int, where: str) -> None:
        expected = sum(map(len, self.parts))
        if samples != expected:
            raise InputError("the batch does not fit the partition", where=where, expected=expected, found=samples)


def balanced_partition(lengths: Sequence[int], parts: int, *, equal_size: bool = False) -> Partition:
    """Samples over `parts` parts so that the largest sum of lengths is small (longest first, to the lightest part).

    Args:
        lengths: tokens of each sample.
        parts: at most one per sample; none is empty.
        equal_size: all parts get the same number of samples, as data parallel ranks do.

    Raises:
        InputError: more parts than samples, or a number of samples that does not divide when `equal_size`.
    """
    n = len(lengths)
    if not 1 <= parts <= n:
        raise InputError(
            "every part holds at least one sample", where="balanced_partition", expected=f"1 … {n}", found=parts
        )
    if equal_size and n % parts:
        raise InputError(
            "equal parts need a number of samples that divides",
            where="balanced_partition",
            expected=f"a multiple of {parts}",
            found=n,
        )
    members: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for position, i in enumerate(sorted(range(n), key=lambda i: (-lengths[i], i))):
        empty = [p for p in range(parts) if not members[p]]
        if len(empty) == n - position:
            open_parts = empty
        else:
            open_parts = [p for p in range(parts) if not equal_size or len(members[p]) < n // parts]
        lightest = min(open_parts, key=lambda p: (loads[p], len(members[p]), p))
        members[lightest].append(i)
        loads[lightest] += lengths[i]
    return Partition(parts=tuple(sorted(tuple(sorted(m)) for m in members)))


def micro_batches(
    lengths: Sequence[int],
    *,
    use_dynamic_bsz: bool,
    micro_batch_size: int | None = None,
    max_token_len: int | None = None,
    at_least: int = 1,
) -> Partition:
    """The micro batches of one rank's samples, for training and inference alike.

    Args:
        lengths: real tokens of each sample (:func:`token_counts`).
        use_dynamic_bsz: cut by `max_token_len` tokens, else into consecutive pieces of `micro_batch_size` samples (all
            samples in one piece when that is None).
        micro_batch_size, max_token_len: as above.
        at_least: smallest number of micro batches, for engines whose ranks must make equally many; give every rank the
            largest number of any rank.

    Raises:
        InputError: no samples, a sample longer than the budget, or a setting that is missing or not positive.
    """
    n = len(lengths)
    if n == 0:
        raise InputError("there are no samples", where="micro_batches", expected="at least one", found=0)
    if not use_dynamic_bsz:
        size = n if micro_batch_size is None else micro_batch_size
        if size < 1:
            raise InputError("a micro batch has at least one sample", where="ppo_micro_batch_size_per_gpu", found=size)
        return Partition(parts=tuple(tuple(range(i, min(i + size, n))) for i in range(0, n, size)))
    if max_token_len is None or max_token_len < 1:
        raise InputError(
            "dynamic batching needs a token budget",
            where="ppo_max_token_len_per_gpu",
            expected="> 0",
            found=max_token_len,
        )
    longest = max(range(n), key=lambda i: (lengths[i], -i))
    if lengths[longest] > max_token_len:
        raise InputError(
            "a sample exceeds the token budget of a micro batch",
            where=f"ppo_max_token_len_per_gpu, sample {longest}",
            expected=f"at most {max_token_len} tokens",
            found=lengths[longest],
        )
    for parts in range(min(n, max(at_least, -(-sum(lengths) // max_token_len))), n + 1):
        partition = balanced_partition(lengths, parts)
        if all(sum(lengths[i] for i in rows) <= max_token_len for rows in partition.parts):
            return partition
    raise AssertionError("one sample per micro batch always fits")


def mini_batches(samples: int, size: int, *, order: Sequence[int] | None = None) -> Partition:
    """The mini batches of a step: consecutive pieces of `size` samples, in `order` where one is given.

    Raises:
        InputError: a number of samples that does not divide, or an order that is no permutation.
    """
    if size < 1 or samples % size:
        raise InputError(
            "a step consists of whole mini batches",
            where="ppo_mini_batch_size",
            expected=f"a divisor of {samples} samples",
            found=size,
        )
    rows = list(range(samples)) if order is None else list(order)
    if sorted(rows) != list(range(samples)):
        raise InputError(
            "the order of the samples is no permutation", where="mini_batches", expected=f"0 … {samples - 1}, once each"
        )
    return Partition(parts=tuple(tuple(sorted(rows[i : i + size])) for i in range(0, samples, size)))


def rank_shares(lengths: Sequence[int], dp_size: int, *, balance: bool = False) -> Partition:
    """The samples of each data parallel rank: equally many, consecutive or balanced by length.

    Raises:
        InputError: the number of samples does not divide by the number of ranks.
    """
    n = len(lengths)
    if dp_size < 1 or n == 0 or n % dp_size:
        raise InputError(
            "the samples are shared out evenly over the data parallel ranks",
            where="trainer.n_gpus_per_node",
            expected=f"a number of samples that divides by {dp_size}",
            found=n,
        )
    if balance:
        return balanced_partition(lengths, dp_size, equal_size=True)
    size = n // dp_size
    return Partition(parts=tuple(tuple(range(i, i + size)) for i in range(0, n, size)))
