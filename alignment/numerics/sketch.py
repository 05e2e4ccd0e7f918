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
2. **A rotation** of every m consecutive buckets by an orthonormal Hadamard matrix, and random signs over the 16 results
   that are added: s = Σ_k D_k·H·z_k (Ailon and Chazelle, STOC 2006). A difference of very few elements is spread over
   all m numbers, so it is estimated like any other.

The square of the norm is unbiased over the signs and varies by at most (2/m + 2/P + 2/P)·‖d‖⁴ whatever the difference d, so
the estimated norm has a relative standard deviation of about 1/√(2m): 2.2 % for m = 1024. Four of those are 9 %.

σ(i) = w(j)·T[o(j) + i mod 4P] with j = ⌊i / 4P⌋: T and w are bits of an integer hash of their index, and o(j) = j·g mod P
shifts the table for every group of 4P elements, so a table that fits a processor's cache serves a tensor of any size.

Everything but the sums is integer arithmetic, the same on every machine; the sums are float32 or better.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alignment.errors import InputError

if TYPE_CHECKING:
    import torch

SKETCH_SIZE = 1024
SKETCH_SEED = 0
_ROWS = 4
_SPREAD = 16
_FOLD = 64
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
class _Tables:
    size: int
    prime: int
    step: int
    seed: int
    signs: np.ndarray
    mixing: np.ndarray
    left: np.ndarray
    right: np.ndarray

    @property
    def group(self) -> int:
        """Elements that one slice of the sign table serves."""
        return _ROWS * self.prime

    def offset(self, group: int) -> int:
        """Where in the sign table a group begins."""
        return group * self.step % self.prime

    def flips(self, group: int) -> bool:
        """Whether the signs of a whole group are turned."""
        return bool(_hash(np.array([group & 0xFFFFFFFF]), self.seed, 3)[0] >> 31)


@functools.lru_cache(maxsize=8)
def _tables(size: int, seed: int) -> _Tables:
    if size < 4 or size & (size - 1):
        raise InputError("the size of a sketch is a power of two", where="sketch size", expected="4, 8, …, 1024, …", found=size)
    if not 0 <= seed < 1 << 32:
        raise InputError("the seed of a sketch has 32 bits", where="sketch seed", expected="0 ≤ seed < 2³²", found=seed)
    prime = _prime_below(_SPREAD * size)
    # The golden section spreads the offsets of neighbouring groups; any step is coprime to a prime.
    step = round(prime * 0.6180339887498949)
    signs = _signs(_hash(np.arange((_ROWS + 1) * prime), seed, 1))
    mixing = _signs(_hash(np.arange(_SPREAD * size), seed, 2)).reshape(_SPREAD, size)
    bits = size.bit_length() - 1
    left, right = _hadamard(1 << bits // 2), _hadamard(1 << (bits - bits // 2))
    scale = np.float32(1 / math.sqrt(size))
    return _Tables(size, prime, step, seed, signs, mixing * scale, left, right)


def sketch_array(
    x: np.ndarray, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED, place: Place | None = None
) -> np.ndarray:
    """The sketch of ``x``: float32 [size]. Elements that are not finite count as 0.

    Args:
        x: any shape and any real dtype; read in row-major order, as float32.
        size: a power of two.
        seed: of the signs; sketches of different seeds cannot be compared.
        place: of the elements of ``x`` in the whole tensor; None where ``x`` is the whole.

    Raises:
        InputError: the size is no power of two, or ``place`` has another number of elements.
    """
    tables = _tables(size, seed)
    flat = np.asarray(x).reshape(-1)
    total = np.zeros(tables.prime)
    for group, piece in _pieces(flat, place, tables, np.zeros):
        piece = piece.astype(np.float32)
        finite = np.isfinite(piece)
        if not finite.all():
            piece = np.where(finite, piece, np.float32(0))
        signed = piece * tables.signs[tables.offset(group) : tables.offset(group) + len(piece)]
        if tables.flips(group):
            signed = -signed
        whole = len(signed) // tables.prime * tables.prime
        total += signed[:whole].reshape(-1, tables.prime).sum(0, dtype=np.float64)
        total[: len(signed) - whole] += signed[whole:]
    spread = np.zeros(_SPREAD * size, np.float32)
    spread[: tables.prime] = total
    mixed = tables.left @ spread.reshape(_SPREAD, len(tables.left), len(tables.right)) @ tables.right
    return (mixed.reshape(_SPREAD, size) * tables.mixing).sum(0, dtype=np.float32)


def sketch_tensor(
    x: torch.Tensor, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED, place: Place | None = None
) -> torch.Tensor:
    """The sketch of a torch tensor, on its device: float32 [size]. See :func:`sketch_array`, which it equals up to the
    rounding of float32 sums."""
    return mix(bucket_sums(x, size=size, seed=seed, place=place), size=size, seed=seed)


def bucket_sums(
    x: torch.Tensor, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED, place: Place | None = None
) -> torch.Tensor:
    """The first half of a sketch: float32 [16·size] sums, additive over shards. Elements must be finite."""
    import torch

    tables = _tables(size, seed)
    signs = _signs_on(size, seed, str(x.device))
    flat = x.detach().reshape(-1)
    prime, spread = tables.prime, torch.zeros(_SPREAD * size, dtype=torch.float32, device=x.device)
    total = spread[:prime]
    high = None
    for count, (group, piece) in enumerate(_pieces(flat, place, tables, flat.new_zeros), 1):
        offset, n = tables.offset(group), len(piece)
        if piece.dtype != torch.float32:
            piece = piece.float()
        signed = piece * signs[offset : offset + n]
        whole = n // prime * prime
        alpha = -1 if tables.flips(group) else 1
        if whole:
            total.add_(signed[:whole].view(-1, prime).sum(0), alpha=alpha)
        if n > whole:
            total[: n - whole].add_(signed[whole:], alpha=alpha)
        if count % _FOLD == 0:
            high = total.double() if high is None else high.add_(total)
            total.zero_()
    if high is not None:
        total.copy_(high.add_(total))
    return spread


def mix(sums: torch.Tensor, *, size: int = SKETCH_SIZE, seed: int = SKETCH_SEED) -> torch.Tensor:
    """The second half of a sketch: [..., 16·size] bucket sums to [..., size]."""
    left, right, mixing = _mixing_on(size, seed, str(sums.device))
    mixed = left @ sums.view(*sums.shape[:-1], _SPREAD, len(left), len(right)) @ right
    return (mixed.view(*sums.shape[:-1], _SPREAD, size) * mixing).sum(-2)


def _pieces(flat, place: Place | None, tables: _Tables, zeros):
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
    if place is None or (place.start == 0 and (place.outer == 1 or place.run == place.stride)):
        for i in range(0, n, group):
            yield i // group, flat[i : i + group]
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

    return torch.from_numpy(_tables(size, seed).signs).to(device)


@functools.lru_cache(maxsize=16)
def _mixing_on(size: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    tables = _tables(size, seed)
    return tuple(torch.from_numpy(t).to(device) for t in (tables.left, tables.right, tables.mixing))


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
