"""Ranks that hold parts of a tensor, put together before they are compared with the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from alignment.capture.record import Shard, TensorRow
from alignment.diagnose.pairing import merged
from alignment.errors import InputError


def same_layout(golden: Iterable[TensorRow], target: Iterable[TensorRow]) -> bool:
    """Whether one rank of both captures holds the same part: as many ranks can cut tensors or samples otherwise."""
    return _part(golden) == _part(target)


def _part(rows: Iterable[TensorRow]) -> tuple[set[Shard], set[str]]:
    shards, keys = set(), set()
    for row in rows:
        if row.shard is not None and row.kind == "module":
            shards.add(row.shard)
        if row.by_key:
            keys.update(row.keys)
    return shards, keys


def whole_rows(ranks: Sequence[Sequence[TensorRow]], *, where: object) -> list[TensorRow]:
    """The rows of one rank, every sharded tensor completed from the other ranks.

    Sketches of shards add up to the sketch of the whole, tensors are joined along the dimension that is cut, statistics
    merge. A tensor that no shard information says to be cut is taken from the first rank that has it; samples that are
    spread over ranks are told apart by their keys and joined.

    Raises:
        InputError: shards do not fill the whole.
    """
    if len(ranks) == 1 and not any(row.shard for row in ranks[0]):
        return list(ranks[0])
    groups: dict[tuple, list[TensorRow]] = {}
    for rows in ranks:
        for row in rows:
            if row.kind == "setting" and type(row.value) is int:
                continue  # whole numbers are as often as not the size of one rank's part
            key = (row.module, row.kind, row.direction, row.call, row.role, row.path, row.parent)
            groups.setdefault(key, []).append(row)
    return [_whole(rows, where) for rows in groups.values()]


def _whole(rows: list[TensorRow], where: object) -> TensorRow:
    first = rows[0]
    if first.shard is None:
        keyed = [row for row in rows if row.keys is not None]
        if len(keyed) > 1 and len({key for row in keyed for key in row.keys}) > len(first.keys or ()):
            return _spread_samples(keyed)
        return first
    parts = {row.shard.pieces: row for row in rows if row.shard is not None}
    ordered = [parts[pieces] for pieces in sorted(parts)]
    at = 0
    for start, length in sorted(piece for row in ordered for piece in row.shard.pieces):
        if start != at:
            break
        at += length
    if at != first.shard.whole:
        raise InputError(
            "the ranks do not hold the whole tensor",
            where=f"{where}: {first.module} {first.path}",
            expected=f"{first.shard.whole} elements along dimension {first.shard.dim}",
            found=", ".join(f"{start}…{start + length}" for row in ordered for start, length in row.shard.pieces),
            next_step="add the captures of the missing ranks to the folder",
        )
    dim = first.shard.dim
    shape = list(first.shape)
    shape[dim] = first.shard.whole

    def sketch() -> np.ndarray:
        return np.sum([row.sketch() for row in ordered], axis=0, dtype=np.float32)

    def tensor() -> np.ndarray:
        pieces = {}
        for row in ordered:
            held = row.tensor()
            for at, start, length in row.shard.cuts():
                pieces[start] = held[(slice(None),) * dim + (slice(at, at + length),)]
        return np.concatenate([pieces[start] for start in sorted(pieces)], axis=dim)

    # a rank that holds some of the tokens knows its samples by these alone
    one = all(row.keys == first.keys for row in ordered)
    return replace(
        first,
        shape=tuple(shape),
        shard=None,
        keys=first.keys if one else None,
        by_key=first.by_key and one,
        bounds=first.bounds if one else None,
        statistics=merged(ordered),
        load_sketch=sketch if all(row.load_sketch is not None for row in ordered) else None,
        load_tensor=tensor if all(row.load_tensor is not None for row in ordered) else None,
    )


def _spread_samples(rows: list[TensorRow]) -> TensorRow:
    """Data parallel ranks: each sample once, in the order of the ranks."""
    from alignment.diagnose.pairing import join

    seen: set[str] = set()
    fresh = []
    for row in rows:
        if not seen.intersection(row.keys):
            fresh.append(row)
            seen.update(row.keys)
    return join(fresh) if all(row.shape and math.prod(row.shape) for row in fresh) else fresh[0]
