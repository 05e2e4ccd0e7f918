"""Random-projection sketches: 1024 numbers per tensor whose distance estimates the distance of the tensors.

‖sketch(x) − sketch(y)‖ ≈ ‖x − y‖, because the sketch is linear and keeps norms: a swap, a rotation, a sign or one
token shows at its full size, where statistics see nothing. The sketch of a whole is the sum of the sketches of its
shards, each taken at the place of its elements in the whole.

How it is made, for ``size`` = m (a power of two), from a flat index i that counts over the *whole* tensor in row-major
order:

1. **Signed bucket sums** (the count sketch of Charikar, Chen and Farach-Colton, ICALP 2002): z[i mod P] += σ(i)·x[i] in
   P buckets, P the largest prime below 16·m. P is prime and larger than m for two reasons. A stride (one column, one
   head) meets every bucket alike unless it is a multiple of P, which no layout of a model is; and two elements of a
   sparse difference fall into one bucket with probability 1/P instead of 1/m. What is left in a bucket is kept apart by
   random signs.
2. **A rotation** of every m consecutive buckets by an orthonormal Hadamard matrix H between random signs, and the sum
   of the 16 results: s = Σ_k D'_k·H·D_k·z_k (Ailon and Chazelle, STOC 2006). A difference of very few elements is
   spread over all m numbers, so it is estimated like any other.

The square of the norm is unbiased over the signs and its variance is about (2/m + 4/P)·‖d‖⁴ whatever the difference d
(unless all its elements lie multiples of P apart), so the estimated norm has a relative standard deviation of about
1/√(2m): 2.2 % for m = 1024. Four of those are 9 %. Between few elements the tail is longer: of ten equal ones, two meet
in a bucket once in 360 draws, and then their norm is off by 10 %.

Several tensors may share a sketch, each from a group and a bucket of its own on (a *slot* names the bucket): element i
is then added to bucket (i + shift) mod P. Without a shift the same elements of equal tensors would meet in the same
buckets, and a difference that all have alike would be estimated like one of as few elements as one of them has.

σ(i) = w(j)·T[o(j) + i mod 8P] with j = ⌊i / 8P⌋: T and w are bits of an integer hash of their index, and
o(j) = j·g mod P shifts the table for every group of 8P elements, so a table that fits a processor's cache serves a
tensor of any size.

Everything but the sums is integer arithmetic, the same on every machine; the sums are float32 or better.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alignment.errors import InputError

if TYPE_CHECKING:
    import torch

SKETCH_SIZE = 1024
SKETCH_SEED = 0
LARGEST = 1e30
"""Larger elements (the fill of a mask, say) count as this, so that sums of float32 stay finite."""
_ROWS = 8
_SPREAD = 16
SLOT = 16
"""Buckets from one slot to the next."""
FOLD = 64
"""Groups that are added in float32 before the sum moves to float64: rounding stays far below 1e-6 of the sum."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a shard's elements lie in the whole, flat and row-major.

    ``outer`` runs of ``run`` consecutive elements each, run r beginning at ``start + r·stride``.
    """

    start: int
    run: int
    stride: int
    outer: int

    @classmethod
    def of(cls, shape: tuple[int, ...], *, dim: int, start: int, whole: int) -> Place:
        """The place of a shard of ``shape`` that begins at ``start`` of ``whole`` elements along ``dim``.

        Raises:
            InputError: it does not lie inside the whole.
        """
        if not 0 <= dim < len(shape) or not 0 <= start <= whole - shape[dim]:
            raise InputError(
                "the shard does not lie inside the whole",
                where="shard",
                expected=f"0 ≤ dim < {len(shape)}, 0 ≤ start ≤ whole − length",
                found=f"dim={dim}, start={start}, shape={list(shape)}, whole={whole}",
            )
        inner = math.prod(shape[dim + 1 :])
        return cls(start=start * inner, run=shape[dim] * inner, stride=whole * inner, outer=math.prod(shape[:dim]))


@dataclass(frozen=True)
class SketchTables:
    """The fixed random numbers of a sketch.

    Attributes:
        size, seed: of the sketch.
        prime: number of buckets.
        rows: so many times ``prime`` elements are a group, which one slice of the sign table serves.
        step: by which the slice moves from group to group.
        signs: the sign table, float32 [(rows + 1)·prime].
        before, after: signs around the rotation, float32 [16, size]; ``after`` carries the rotation's scale.
        left, right: the rotation is ``left @ block @ right`` on a block as a matrix.
    """

    size: int
    prime: int
    rows: int
    step: int
    seed: int
    signs: np.ndarray
    before: np.ndarray
    after: np.ndarray
    left: np.ndarray
    right: np.ndarray

    @property
    def group(self) -> int:
        """Elements that one slice of the sign table serves."""
        return self.rows * self.prime

    def offset(self, group: int) -> int:
        """Where in the sign table a group begins."""
        return group * self.step % self.prime

    def shift(self, slot: int) -> int:
        """The bucket that a slot names: a multiple of :data:`SLOT`, so that sums stay on lines of the cache."""
        return slot % (self.prime // SLOT) * SLOT if self.prime >= SLOT else 0

    def flips(self, group: int) -> bool:
        """Whether the signs of a whole group are turned."""
        return bool(_flips(self.seed, group >> 8)[group & 0xFF])


@functools.lru_cache(maxsize=8)
def sketch_tables(size: int, seed: int) -> SketchTables:
    """The tables of a size and a seed, built once.

    Raises:
        InputError: the size is no power of two ≥ 4, or the seed has more than 32 bits.
    """
    if size < 4 or size & (size - 1):
        raise InputError(
            "the size of a sketch is a power of two", where="sketch size", expected="4, 8, …, 1024, …", found=size
        )
    if not 0 <= seed < 1 << 32:
        raise InputError("the seed of a sketch has 32 bits", where="sketch seed", expected="0 ≤ seed < 2³²", found=seed)
    prime = _prime_below(_SPREAD * size)
    # The golden section spreads the offsets of neighbouring groups; any step is coprime to a prime.
    step = round(prime * 0.6180339887498949)
    signs = _signs(_hash(np.arange((_ROWS + 1) * prime), seed, 1))
    before, after = _signs(_hash(np.arange(2 * _SPREAD * size), seed, 2)).reshape(2, _SPREAD, size)
    bits = size.bit_length() - 1
    left, right = _hadamard(1 << bits // 2), _hadamard(1 << (bits - bits // 2))
    scale = np.float32(1 / math.sqrt(size))
    return SketchTables(size, prime, _ROWS, step, seed, signs, before, after * scale, left, right)


@functools.lru_cache(maxsize=4096)
def _flips(seed: int, block: int) -> bytes:
    """The turns of 256 groups."""
    return (_hash(np.arange(block << 8, (block + 1) << 8), seed, 3) >> np.uint64(31)).astype(np.uint8).tobytes()


def sketch_array(
    x: np.ndarray, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED, place: Place | None = None
) -> np.ndarray:
    """The sketch of ``x``: float32 [size]. Elements that are not finite count as 0, those beyond ±1e30 as ±1e30.

    Args:
        x: any shape and any real dtype; read in row-major order, as float32.
        size: a power of two.
        seed: of the signs; sketches of different seeds cannot be compared.
        place: of the elements of ``x`` in the whole tensor; None where ``x`` is the whole.

    Raises:
        InputError: the size is no power of two, or ``place`` has another number of elements.
    """
    tables = sketch_tables(size, seed)
    flat = np.asarray(x).reshape(-1)
    total = np.zeros(tables.prime)
    for group, piece in _pieces(flat, place, tables, np.zeros):
        piece = piece.astype(np.float32)
        finite = np.isfinite(piece)
        if not finite.all():
            piece = np.where(finite, piece, np.float32(0))
        piece = np.clip(piece, np.float32(-LARGEST), np.float32(LARGEST))
        signed = piece * tables.signs[tables.offset(group) : tables.offset(group) + len(piece)]
        if tables.flips(group):
            signed = -signed
        whole = len(signed) // tables.prime * tables.prime
        total += signed[:whole].reshape(-1, tables.prime).sum(0, dtype=np.float64)
        total[: len(signed) - whole] += signed[whole:]
    spread = np.zeros(_SPREAD * size, np.float32)
    spread[: tables.prime] = total
    blocks = (spread.reshape(_SPREAD, size) * tables.before).reshape(_SPREAD, len(tables.left), len(tables.right))
    rotated = (tables.left @ blocks @ tables.right).reshape(_SPREAD, size)
    return (rotated * tables.after).sum(0, dtype=np.float32)


def sketch_tensor(
    x: torch.Tensor, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED, place: Place | None = None
) -> torch.Tensor:
    """The sketch of a torch tensor, on its device: float32 [size]. See :func:`sketch_array`, which it equals up to the
    rounding of float32 sums."""
    return mix(bucket_sums(x, size=size, seed=seed, place=place), size=size, seed=seed)


def bucket_sums(
    x: torch.Tensor, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED, place: Place | None = None
) -> torch.Tensor:
    """The first half of a sketch: float32 [16·size] sums, additive over shards. Elements that are not finite count as 0
    and those beyond ±1e30 as ±1e30."""
    flat = x.detach().reshape(-1)
    buckets = Buckets(size=size, seed=seed, device=x.device)
    sums = buckets.zeros()
    fill = buckets.filling(sums)
    for group, piece in buckets.pieces(flat, place):
        fill.add(group, bounded(piece.float()))
    fill.finish()
    return sums


def bounded(piece: torch.Tensor) -> torch.Tensor:
    """Float32 elements as a sketch takes them: 0 for what is not finite, ±1e30 for what lies beyond."""
    import torch

    if piece.device.type == "cpu" and len(piece):
        # A look costs a tenth of a copy; on an accelerator it would stop the queue.
        low, high = torch.aminmax(piece)
        if -LARGEST <= low.item() and high.item() <= LARGEST:
            return piece
    return torch.where(piece.isfinite(), piece.clamp(-LARGEST, LARGEST), 0.0)


class Buckets:
    """The signed bucket sums of a sketch on one device, for those who have the elements in hand piece by piece."""

    def __init__(self, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED, device: torch.device | str = "cpu") -> None:
        self.tables = sketch_tables(size, seed)
        self.size, self.seed, self.device = size, seed, str(device)
        self.signs = _signs_on(size, seed, self.device)
        self.group = self.tables.group
        self.scratch: torch.Tensor | None = None

    def zeros(self, *lead: int) -> torch.Tensor:
        """Empty sums, float32 [*lead, 16·size]."""
        import torch

        return torch.zeros(*lead, _SPREAD * self.size, dtype=torch.float32, device=self.device)

    def pieces(self, flat: torch.Tensor, place: Place | None) -> Iterator[tuple[int, torch.Tensor]]:
        """(group, elements) of a flat tensor at its place; each piece begins where its group does."""
        return _pieces(flat, place, self.tables, flat.new_zeros)

    def filling(self, sums: torch.Tensor) -> Filling:
        """What adds pieces into ``sums``, which are zero."""
        return Filling(self, sums)

    def mix(self, sums: torch.Tensor) -> torch.Tensor:
        """The second half of the sketches: [..., 16·size] to [..., size]."""
        return mix(sums, size=self.size, seed=self.seed)


class Filling:
    """One tensor on its way into its sums."""

    def __init__(self, buckets: Buckets, sums: torch.Tensor) -> None:
        self.buckets, self._total = buckets, sums[: buckets.tables.prime]
        self._high: torch.Tensor | None = None
        self._count = 0
        self.shift = 0
        """The bucket that the first element of a group is added to."""

    def add(self, group: int, piece: torch.Tensor) -> None:
        """Adds float32 elements, the first ones of a group."""
        import torch

        buckets, tables, total = self.buckets, self.buckets.tables, self._total
        offset, n, prime = tables.offset(group), len(piece), tables.prime
        signs = buckets.signs[offset : offset + n]
        alpha = -1 if tables.flips(group) else 1
        self._count += 1
        if n <= prime:
            last = min(n, prime - self.shift)
            total[self.shift : self.shift + last].addcmul_(piece[:last], signs[:last], value=alpha)
            if last < n:
                total[: n - last].addcmul_(piece[last:], signs[last:], value=alpha)
            return
        if buckets.scratch is None:
            # Signed elements are added while they are in the cache, from one scratch for all tensors.
            with torch.inference_mode(False):
                buckets.scratch = torch.empty(tables.group, dtype=torch.float32, device=buckets.device)
        product = torch.mul(piece, signs, out=buckets.scratch[:n])
        # Turned back, so that the first bucket is the first element's, and forth again below.
        total = total.roll(-self.shift) if self.shift else total
        whole = n // prime * prime
        rows = product[:whole].view(-1, prime)
        # A matrix-vector product would be faster on a CPU, where its precision is not lowered.
        total.add_(rows.sum(0), alpha=alpha)
        if n > whole:
            total[: n - whole].add_(product[whole:], alpha=alpha)
        if self.shift:
            self._total.copy_(total.roll(self.shift))
            total = self._total
        if self._count % FOLD == 0:
            self._high = total.double() if self._high is None else self._high.add_(total)
            total.zero_()

    def finish(self) -> None:
        """Completes the sums."""
        if self._high is not None:
            self._total.copy_(self._high.add_(self._total))
            self._high = None


def mix(sums: torch.Tensor, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED) -> torch.Tensor:
    """The second half of a sketch: [..., 16·size] bucket sums to [..., size].

    The rotation is made of sums and differences: what a run does to the precision of products (autocast, TF32, HF32)
    does not reach it.
    """
    import torch

    before, after = _mixing_on(size, seed, str(sums.device))
    x = sums.view(*sums.shape[:-1], _SPREAD, size) * before
    half = size // 2
    while half:
        pairs = x.view(-1, 2, half)
        a, b = pairs.unbind(1)
        x = torch.empty_like(pairs)
        torch.add(a, b, out=x.select(1, 0))
        torch.sub(a, b, out=x.select(1, 1))
        half //= 2
    return x.view(*sums.shape[:-1], _SPREAD, size).mul_(after).sum(-2)


def _pieces(flat, place: Place | None, tables: SketchTables, zeros):
    """(group, elements) in the order of the whole; each piece begins at the first element of its group, and what a
    shard does not hold is zero."""
    group = tables.group
    n = len(flat)
    if place is not None and place.run * place.outer != n:
        raise InputError(
            "the place has another number of elements than the tensor", where="place", expected=n,
            found=place.run * place.outer,
        )  # fmt: skip
    if n == 0:
        return
    whole = place is None or place.outer == 1 or place.run == place.stride
    first, inside = divmod(0 if place is None else place.start, group)
    if whole and not inside:
        for i in range(0, n, group):
            yield first + i // group, flat[i : i + group]
        return
    # Runs are laid into zeros one group after the other.
    rows = flat.reshape(place.outer, place.run)
    end = place.start + (place.outer - 1) * place.stride + place.run
    for g in range(place.start // group, (end - 1) // group + 1):
        begin, stop = g * group, min((g + 1) * group, end)
        first = max(0, (begin - place.start - place.run + 1 + place.stride - 1) // place.stride)
        last = min(place.outer, (stop - place.start + place.stride - 1) // place.stride)
        if first >= last:
            continue
        piece = zeros(stop - begin, dtype=flat.dtype)
        if last - first > 2:
            # Runs that lie inside the group as a whole are laid by one strided copy.
            inner_first = first + (place.start + first * place.stride < begin)
            inner_last = last - (place.start + (last - 1) * place.stride + place.run > stop)
        else:
            inner_first = inner_last = first
        for r in [*range(first, inner_first), *range(inner_last, last)]:
            low, high = place.start + r * place.stride, place.start + r * place.stride + place.run
            a, b = max(low, begin), min(high, stop)
            piece[a - begin : b - begin] = rows[r, a - low : b - low]
        if inner_last > inner_first:
            at = place.start + inner_first * place.stride - begin
            count = inner_last - inner_first
            span = piece[at : at + (count - 1) * place.stride]
            span.reshape(count - 1, place.stride)[:, : place.run] = rows[inner_first : inner_last - 1]
            tail = at + (count - 1) * place.stride
            piece[tail : tail + place.run] = rows[inner_last - 1]
        yield g, piece


@functools.lru_cache(maxsize=16)
def _signs_on(size: int, seed: int, device: str) -> torch.Tensor:
    import torch

    # The tables outlive the inference mode that they may first be asked for in.
    with torch.inference_mode(False):
        return torch.from_numpy(sketch_tables(size, seed).signs).to(device)


@functools.lru_cache(maxsize=16)
def _mixing_on(size: int, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    import torch

    tables = sketch_tables(size, seed)
    with torch.inference_mode(False):
        return tuple(torch.from_numpy(t).to(device) for t in (tables.before, tables.after))


def _hash(index: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """32 well mixed bits per index: the finaliser of MurmurHash3 (Appleby, public domain) applied to index and key."""
    key = _finalised(np.array([(seed ^ 0x9E3779B9 * stream) & 0xFFFFFFFF], np.uint64))
    return _finalised(_finalised(index.astype(np.uint64)) ^ key)


def _finalised(h: np.ndarray) -> np.ndarray:
    mask = np.uint64(0xFFFFFFFF)
    h = (h + np.uint64(0x9E3779B9)) & mask
    h ^= h >> np.uint64(16)
    h = h * np.uint64(0x85EBCA6B) & mask
    h ^= h >> np.uint64(13)
    h = h * np.uint64(0xC2B2AE35) & mask
    h ^= h >> np.uint64(16)
    return h


def _signs(bits: np.ndarray) -> np.ndarray:
    return np.where(bits >> np.uint64(31), np.float32(-1), np.float32(1)).astype(np.float32)


def _hadamard(n: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _prime_below(n: int) -> int:
    return next(p for p in range(n - 1, 1, -1) if all(p % q for q in range(2, math.isqrt(p) + 1)))
