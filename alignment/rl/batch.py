"""The batch that travels between the stages of a training step: named tensors, per-sample lists and run-wide facts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Union

import torch
from torch import Tensor

from alignment.errors import InputError

Rows = Union[int, slice, Sequence[int], Tensor]


class Batch:
    """Named tensors that share their first dimension, lists of per-sample values, and facts about the whole batch.

    Field names and shapes are verl's (``DataProto``), with b samples, p prompt tokens and r response tokens:
    ``prompts`` [b,p] left padded, ``responses`` [b,r] right padded, ``input_ids``, ``attention_mask`` and
    ``position_ids`` [b,p+r], everything per response token [b,r]. What each stage reads and adds is in
    :mod:`alignment.rl.contracts`.

    A batch is a value: every method returns a new batch and leaves this one as it was. Row selection by slice, `chunk`
    and `split` return views of the tensors; do not write into them in place.

    Args:
        tensors: field name to tensor, first dimension the sample.
        meta: name to a list with one entry per sample (``uid``, ``prompt_id``, ``ground_truth``, ``score``, …).
        info: facts about the whole batch (``n``, ``eos_token_id``, ``pad_token_id``, ``step``, …).

    Raises:
        InputError: fields of unequal length, a name used twice, or a field that is not a tensor or a list.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        meta: Mapping[str, Sequence[Any]] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors or {})
        self.meta: dict[str, list[Any]] = {}
        self.info: dict[str, Any] = dict(info or {})
        length: int | None = None
        first = ""
        for name, value in self.tensors.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                found = f"{type(value).__name__}" if not isinstance(value, Tensor) else "a tensor without dimensions"
                raise InputError(
                    "a batch field is a tensor whose first dimension is the sample",
                    where=f"batch[{name!r}]",
                    found=found,
                )
            length, first = _same_length(name, value.shape[0], length, first)
        for name, value in (meta or {}).items():
            if name in self.tensors:
                raise InputError("the name is used for a tensor and for a list", where=f"batch[{name!r}]")
            if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
                raise InputError(
                    "a per-sample list is a sequence with one entry per sample",
                    where=f"batch[{name!r}]",
                    found=type(value).__name__,
                )
            length, first = _same_length(name, len(value), length, first)
            self.meta[name] = list(value)
        self._length = length or 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.meta

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.meta

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}{list(v.shape)}:{str(v.dtype).removeprefix('torch.')}" for k, v in self.tensors.items())
        return f"Batch({len(self)} samples; {fields}; meta: {', '.join(self.meta) or 'none'})"

    def __getitem__(self, key: str | Rows) -> Any:
        """A field by its name, or a batch of the named rows (int, slice, list of ints, index or boolean tensor).

        Rows keep the order in which they are named; an int gives a batch of one sample.
        """
        if isinstance(key, str):
            if key in self.tensors:
                return self.tensors[key]
            if key in self.meta:
                return self.meta[key]
            near = difflib.get_close_matches(key, list(self), n=1)
            raise InputError(
                "the batch has no such field",
                where=f"batch[{key!r}]",
                expected=f"one of {sorted(self)}",
                next_step=f"did you mean {near[0]!r}?" if near else None,
            )
        if isinstance(key, slice):
            return Batch(
                {k: v[key] for k, v in self.tensors.items()}, {k: v[key] for k, v in self.meta.items()}, self.info
            )
        rows = _row_indices(key, len(self))
        index = torch.tensor(rows, dtype=torch.int64)
        tensors = {k: v.index_select(0, index.to(v.device)) for k, v in self.tensors.items()}
        return Batch(tensors, {k: [v[i] for i in rows] for k, v in self.meta.items()}, self.info)

    def select(self, names: Iterable[str]) -> Batch:
        """Only the named fields, in the order given; `info` is kept."""
        names = list(names)
        for name in names:
            self[name]
        return Batch(
            {k: self.tensors[k] for k in names if k in self.tensors},
            {k: self.meta[k] for k in names if k in self.meta},
            self.info,
        )

    def drop(self, names: Iterable[str]) -> Batch:
        """Everything but the named fields; names that are absent are ignored."""
        gone = set(names)
        return self.select(name for name in self if name not in gone)

    def add(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        meta: Mapping[str, Sequence[Any]] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Batch:
        """With further or replaced fields."""
        return Batch({**self.tensors, **(tensors or {})}, {**self.meta, **(meta or {})}, {**self.info, **(info or {})})

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        return Batch({k: v.to(device) for k, v in self.tensors.items()}, self.meta, self.info)

    def split(self, size: int) -> list[Batch]:
        """Consecutive pieces of `size` samples, the last one shorter where the length does not divide."""
        if size < 1:
            raise InputError("a piece has at least one sample", where="Batch.split", found=size)
        return [self[i : i + size] for i in range(0, len(self), size)]

    def chunk(self, n: int) -> list[Batch]:
        """`n` equal consecutive pieces.

        Raises:
            InputError: the length does not divide by `n`; padding or dropping samples would change the loss.
        """
        if n < 1 or len(self) % n:
            raise InputError(
                "the batch does not divide into equal pieces",
                where="Batch.chunk",
                expected=f"a number of samples that divides by {n}",
                found=f"{len(self)} samples",
            )
        size = len(self) // n
        return [self[i * size : (i + 1) * size] for i in range(n)]

    def repeat(self, n: int, interleave: bool = True) -> Batch:
        """Every sample `n` times: a a b b with `interleave` (group expansion), a b a b without."""
        if n < 1:
            raise InputError("a sample is repeated at least once", where="Batch.repeat", found=n)
        rows = range(len(self))
        return self[[i for i in rows for _ in range(n)] if interleave else list(rows) * n]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The samples of all batches, in order. `info` is the first batch's.

        Raises:
            InputError: no batches, or batches that differ in fields, widths or dtypes.
        """
        if not batches:
            raise InputError("there is nothing to concatenate", where="Batch.concat", expected="at least one batch")
        head = batches[0]
        for i, other in enumerate(batches[1:], start=1):
            if set(other) != set(head):
                raise InputError(
                    f"batch {i} has other fields than batch 0",
                    where="Batch.concat",
                    expected=sorted(head),
                    found=sorted(other),
                )
            for name, value in head.tensors.items():
                theirs = other.tensors.get(name)
                if theirs is None or theirs.shape[1:] != value.shape[1:] or theirs.dtype != value.dtype:
                    raise InputError(
                        f"batch {i} does not fit batch 0",
                        where=f"Batch.concat, {name}",
                        expected=f"{list(value.shape[1:])} {value.dtype}",
                        found="a list" if theirs is None else f"{list(theirs.shape[1:])} {theirs.dtype}",
                    )
        return Batch(
            {k: torch.cat([b.tensors[k] for b in batches]) for k in head.tensors},
            {k: [x for b in batches for x in b.meta[k]] for k in head.meta},
            head.info,
        )


def _same_length(name: str, found: int, length: int | None, first: str) -> tuple[int, str]:
    if length is not None and found != length:
        raise InputError(
            "every field has one entry per sample",
            where=f"batch[{name!r}]",
            expected=f"{length} samples, as in {first!r}",
            found=f"{found} samples",
        )
    return (found, first or name)


def _row_indices(key: int | Sequence[int] | Tensor, length: int) -> list[int]:
    if isinstance(key, Tensor):
        if key.ndim != 1:
            raise InputError("rows are named by a one-dimensional tensor", where="batch[rows]", found=list(key.shape))
        if key.dtype == torch.bool:
            if len(key) != length:
                raise InputError(
                    "a row mask has one entry per sample", where="batch[rows]", expected=length, found=len(key)
                )
            key = key.nonzero().flatten()
        key = key.tolist()
    rows = [key] if isinstance(key, int) else [int(i) for i in key]
    for i in rows:
        if not -length <= i < length:
            raise InputError("there is no such sample", where="batch[rows]", expected=f"0 … {length - 1}", found=i)
    return [i % length for i in rows]
