"""Who is in a micro batch, and where their real tokens lie in a tensor: found again in any order, batch and padding."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alignment.capture.record import Shard
from alignment.numerics.sketch import Place

BLOCK = 8
"""A sample's elements begin at a multiple of 2⁸ groups of a sketch; longer ones run on into the next block."""
_BLOCKS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Part:
    """The real tokens of one sample in a tensor.

    Attributes:
        t: a view of them.
        group, slot: group and slot of the sketch at which the sample's elements begin.
        place: of a shard's elements in the sample's, or None where they are all of them.
    """

    t: Tensor
    group: int
    slot: int = 0
    place: Place | None = None


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of the micro batch that is running.

    Attributes:
        keys: a content hash per sample.
        bounds: first and last + 1 real token of each.
        shape: (samples, tokens) of the padded micro batch.
    """

    keys: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    shape: tuple[int, int]
    _seen: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def groups(self) -> list[int]:
        """Where in a sketch each sample begins: a place of its own that its key names, the same in every batch."""
        if "groups" not in self._seen:
            self._seen["groups"] = [group_of(key) for key in self.keys]
        return self._seen["groups"]

    @property
    def slots(self) -> list[int]:
        """The slot of each sample, named by its key as well."""
        if "slots" not in self._seen:
            self._seen["slots"] = [slot_of(key) for key in self.keys]
        return self._seen["slots"]

    @property
    def full(self) -> bool:
        """Whether there is no padding."""
        if "full" not in self._seen:
            self._seen["full"] = all(bounds == (0, self.shape[1]) for bounds in self.bounds)
        return self._seen["full"]

    def counted(self, met: dict[str, int]) -> Samples:
        """The same with equal samples told apart over all micro batches; ``met`` counts them."""
        keys = tuple(numbered(key.partition("#")[0], met) for key in self.keys)
        return self if keys == self.keys else Samples(keys=keys, bounds=self.bounds, shape=self.shape)

    def parts(self, t: Tensor, shard: Shard | None = None) -> list[Part] | None:
        """The real tokens of every sample, or None where ``t`` is not made of samples and tokens.

        Known are [samples, tokens, …], megatron-core's [tokens, samples, …], [samples · tokens, …] in the order that
        was seen before, [samples, heads, tokens, …] and attention weights and masks [samples, heads, tokens, tokens];
        of shards those along another dimension, and pieces of a sequence.
        """
        b, s = self.shape
        n, shape = t.dim(), t.shape
        if n < 2:
            return None
        at, groups = list(enumerate(self.bounds)), self.groups
        if shard is not None and shard.whole == s and shape[shard.dim] < s and shard.dim < 2:
            return self._pieces(t, shard)
        if shard is not None and shard.dim < 2 and tuple(shape[:2]) == ((s, b), (b, s))[shard.dim]:
            return None  # under context parallelism these are some of the tokens of samples that nobody knows here
        if shape[0] == b and shape[1] == s:
            if n > 2:
                self._seen["tokens first"] = False
            views, lost = [t[i, low:high] for i, (low, high) in at], 1
        elif shape[1] == b and shape[0] == s:
            if n > 2:
                self._seen["tokens first"] = True
            views, lost = [t[low:high, i] for i, (low, high) in at], 1
        elif n == 4 and s > 1 and shape[0] == b and s in shape[2:]:
            views, lost = [], 1
            for i, (low, high) in at:
                view = t[i][:, low:high] if shape[2] == s else t[i]
                views.append(view[..., low:high] if shape[3] == s else view)
        elif shape[0] == b * s and s > 1 and tuple(shape) != (s, s):
            lost = 0
            if b > 1 and self._seen.get("tokens first", "megatron.core" in sys.modules):
                rows = t.unflatten(0, (s, b))
                views = [rows[low:high, i] for i, (low, high) in at]
            else:
                views = [t[i * s + low : i * s + high] for i, (low, high) in at]
        else:
            return None
        if shard is None:
            return [Part(t=view, group=group, slot=slot) for view, group, slot in zip(views, groups, self.slots)]
        dim = shard.dim - lost
        if dim < 0 or dim == 0 and lost == 0 or (shard.dim < 2 and n < 4):
            return None
        parts = []
        for view, group, slot in zip(views, groups, self.slots):
            for at, start, length in shard.cuts():
                piece = view.narrow(dim, at, length) if shard.runs else view
                place = Place.of(tuple(piece.shape), dim=dim, start=start, whole=shard.whole)
                parts.append(Part(t=piece, group=group, slot=slot, place=place))
        return parts

    def spans(self, t: Tensor) -> list[tuple[int, int, int, int]] | None:
        """Where the real tokens of every sample lie in a contiguous tensor [samples, tokens, …]: first element, number
        of elements, :attr:`Part.group` and :attr:`Part.slot`. None for any other layout, of which :meth:`parts` may
        know more."""
        b, s = self.shape
        n, shape = t.dim(), t.shape
        if n < 2 or shape[0] != b or not t.is_contiguous():
            return None
        if shape[1] != s:
            if not (self.full and n == 4 and s > 1 and s in shape[2:] and not (shape[1] == b and shape[0] == s)):
                return None
            # attention weights and heads without padding: each sample's are one run
            key = "runs", t.numel()
            if key not in self._seen:
                run = t.numel() // b
                self._seen[key] = [(i * run, run, *where) for i, where in enumerate(zip(self.groups, self.slots))]
            return self._seen[key]
        if n > 2:
            self._seen["tokens first"] = False
        inner = t.numel() // (b * s) if b * s else 0
        found = self._seen.get(inner)
        if found is None:
            found = self._seen[inner] = [
                ((i * s + low) * inner, (high - low) * inner, *where)
                for i, ((low, high), *where) in enumerate(zip(self.bounds, self.groups, self.slots))
            ]
        return found

    def _pieces(self, t: Tensor, shard: Shard) -> list[Part] | None:
        """Of tokens start … start + length of every sample, or of several such runs."""
        b = self.shape[0]
        if t.shape[1 - shard.dim] != b:
            return None
        parts = []
        for i, (low, high) in enumerate(self.bounds):
            for at, start, length in shard.cuts():
                end = start + length
                first = min(max(low, start), end)
                last = max(first, min(high, end))
                cut = slice(at + first - start, at + last - start)
                view = t[cut, i] if shard.dim == 0 else t[i, cut]
                run, inner = view.numel(), t[0, 0].numel()
                place = Place(start=(first - low) * inner, run=run, stride=max(run, 1), outer=1)
                parts.append(Part(t=view, group=self.groups[i], slot=self.slots[i], place=place))
        return parts


def group_of(key: str) -> int:
    """Group of a sketch at which the elements of the sample ``key`` begin.

    2²⁴ places: of 512 samples two share one once in 130 micro batches, and then the difference of these two is
    estimated as that of their sum.
    """
    digest, _, again = key.partition("#")
    return (int(digest[:6], 16) ^ int(again or 0) * 0x9E3779 % _BLOCKS) << BLOCK


def slot_of(key: str) -> int:
    """Slot of a sketch at which the elements of the sample ``key`` begin; equal samples have another one each."""
    digest, _, again = key.partition("#")
    return (int(digest[-8:], 16) + int(again or 0) * 0x9E3779B1) & 0xFFFFFFFF


def sample_keys(input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[str, ...]:
    """A hash of the real tokens of every row [b, s]; equal rows are told apart by their order (``…#1``)."""
    met: dict[str, int] = {}
    return tuple(numbered(key, met) for key in _hashes(input_ids, attention_mask))


def numbered(key: str, met: dict[str, int]) -> str:
    """``key``, with its number behind ``#`` from the second time on; ``met`` counts."""
    count = met.get(key, 0)
    met[key] = count + 1
    return f"{key}#{count}" if count else key


def _hashes(input_ids: Tensor, attention_mask: Tensor | None) -> list[str]:
    ids = input_ids.detach().to("cpu", torch.int64)
    mask = None if attention_mask is None else attention_mask.detach().to("cpu") != 0
    rows = (row if mask is None else row[mask[i]] for i, row in enumerate(ids))
    return [hashlib.sha256(real.contiguous().numpy().tobytes()).hexdigest()[:16] for real in rows]


def real_bounds(mask: Tensor | None, shape: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """First and last + 1 real token of every row of a mask [b, s]."""
    b, s = shape
    if mask is None:
        return ((0, s),) * b
    real = mask.detach().to("cpu") != 0
    positions = torch.arange(s)
    first = torch.where(real, positions, s).amin(1).tolist()
    last = torch.where(real, positions, -1).amax(1).tolist()
    return tuple((min(low, high + 1), high + 1) for low, high in zip(first, last))


def samples_of_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, mask: Tensor | None = None
) -> Samples | None:
    """The samples that a model was called with: ``input_ids`` by name, or the first matrix of integers.

    The mask is ``attention_mask`` where it has the same shape, else an attribute ``real_tokens`` that the engine gave the
    ids, else ``mask``. None where the call has no token ids.
    """
    ids = kwargs.get("input_ids")
    if not _is_ids(ids):
        ids = next((a for a in args if _is_ids(a)), None)
    if ids is None:
        return None
    given = kwargs.get("attention_mask")
    if not (isinstance(given, Tensor) and given.shape == ids.shape):
        given = next((a for a in args if isinstance(a, Tensor) and a is not ids and _is_mask(a, ids)), None)
    if given is None:
        known = (getattr(ids, "real_tokens", None), mask)
        given = next((m for m in known if m is not None and m.shape == ids.shape), None)
    shape = ids.shape[0], ids.shape[1]
    return Samples(keys=sample_keys(ids, given), bounds=real_bounds(given, shape), shape=shape)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32) and len(value) > 0
    )


def _is_mask(value: Tensor, ids: Tensor) -> bool:
    if value.shape != ids.shape or value.dtype not in (torch.bool, torch.int64, torch.int32):
        return False
    return value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())
