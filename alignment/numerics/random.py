"""Random numbers that every machine draws bit for bit the same: Philox counters, and arithmetic that IEEE 754 fixes.

A GPU box and an NPU box build the same inputs without shipping them. Three things make that hold:

* the bits are Philox4x64-10 (Salmon, Moraes, Dror, Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011), read
  raw from NumPy's bit generator, whose stream is guaranteed; the streams of ``numpy.random.Generator`` methods are not;
* the 128-bit key is the SHA-256 of seed and stream name, so tensors do not depend on the order they are drawn in;
* everything after the bits uses only +, −, ×, ÷ and √ in float64, which IEEE 754 rounds one way. ``log``, ``sin`` and
  ``cos`` differ in the last bit between libm, SVML and Arm's library, so normals come from an inverse distribution
  function with its own logarithm.

A longer draw from one (seed, stream) starts with the shorter one.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence

import numpy as np
import torch

from alignment.errors import InputError

_CHUNK = 1 << 20
_WORD = 1 << 64

Shape = int | Sequence[int]


def portable_uniform(shape: Shape, *, seed: int, stream: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Uniform draws in [0, 1) on the CPU.

    u = ⌊x / 2¹¹⌋ · 2⁻⁵³ for the raw 64-bit x, then cut (not rounded) to the significand of ``dtype``, so that 1.0 never
    occurs in a low precision either.

    Args:
        shape: an int or a sequence of ints.
        seed: any integer.
        stream: name of the tensor or purpose; different names are independent.
        dtype: a floating-point dtype.

    Raises:
        InputError: ``seed`` is no integer, ``shape`` is negative or ``dtype`` is not floating point.
    """
    size = _shape(shape)
    bits = _significand_bits(dtype)
    raw = _raw(math.prod(size), seed, stream)
    raw >>= np.uint64(64 - bits)
    return torch.from_numpy(raw.astype(np.float64) * 2.0**-bits).reshape(size).to(dtype)


def portable_normal(shape: Shape, *, seed: int, stream: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal draws on the CPU: float64, then rounded to ``dtype``.

    z = Φ⁻¹((k + ½) · 2⁻⁵²) with k the top 52 bits of the raw draw; Φ⁻¹ is PPND16 of Wichura, *Algorithm AS 241: the
    percentage points of the normal distribution*, Applied Statistics 37 (1988), relative accuracy 1e-16; |z| ≤ 8.2.

    Args and errors are those of :func:`portable_uniform`.
    """
    size = _shape(shape)
    _significand_bits(dtype)
    raw = _raw(math.prod(size), seed, stream)
    out = np.empty(raw.size)
    for start in range(0, raw.size, _CHUNK):
        part = raw[start : start + _CHUNK] >> np.uint64(12)
        out[start : start + _CHUNK] = _normal_quantile((part.astype(np.float64) + 0.5) * 2.0**-52)
    return torch.from_numpy(out).reshape(size).to(dtype)


def portable_integers(
    low: int, high: int, shape: Shape, *, seed: int, stream: str, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Integers uniform on low … high − 1, free of modulo bias: raw draws beyond the last whole range are skipped.

    Raises:
        InputError: the range is empty, leaves int64 or does not fit ``dtype``; else as :func:`portable_uniform`.
    """
    size = _shape(shape)
    low, high = _integer(low, "low"), _integer(high, "high")
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise InputError(
            "portable_integers needs an integer dtype", expected="torch.int64, torch.int32, …", found=dtype
        )
    info = torch.iinfo(dtype)
    if not (info.min <= low < high <= info.max + 1):
        raise InputError(
            "the range of integers is empty or leaves the dtype",
            where="portable_integers",
            expected=f"{info.min} ≤ low < high ≤ {info.max + 1}",
            found=f"low={low}, high={high}, dtype={dtype}",
        )
    span, count = high - low, math.prod(size)
    last = _WORD - _WORD % span - 1
    source, parts, have = _philox(seed, stream), [], 0
    while have < count:
        raw = np.atleast_1d(source.random_raw(count - have))
        parts.append(raw[raw <= np.uint64(last)])
        have += parts[-1].size
    raw = np.concatenate(parts) if parts else np.empty(0, np.uint64)
    offsets = raw if span == _WORD else raw % np.uint64(span)
    # uint64 wraps modulo 2⁶⁴, which is two's complement addition of a negative low
    values = (offsets + np.uint64(low % _WORD)).view(np.int64)
    return torch.from_numpy(values).reshape(size).to(dtype)


def portable_permutation(n: int, *, seed: int, stream: str) -> torch.Tensor:
    """A random order of 0 … n − 1 (int64): the stable sort order of n raw draws."""
    (count,) = _shape(n)
    return torch.from_numpy(np.argsort(_raw(count, seed, stream), kind="stable"))


def portable_key(*parts: object) -> int:
    """A non-negative int64 key from the SHA-256 of ``parts``, e.g. a sample's prompt id and its index in the group."""
    text = "\x1f".join(f"{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def portable_uniform_grid(
    seed: int, stream: str, rows: Sequence[int] | np.ndarray | torch.Tensor, columns: int | Sequence[int] | np.ndarray
) -> torch.Tensor:
    """Uniform draws in [0, 1) keyed by (row key, column), so that sampling does not depend on the layout of the batch.

    Entry [i, j] is a pure function of (seed, stream, rows[i], columns[j]): lane c mod 4 of the Philox block with
    counter (⌊c/4⌋, row key, 0, 0). Splitting, permuting or padding a batch leaves every sample's draws as they are.

    Args:
        rows: int64 keys [b], one per sample (see :func:`portable_key`).
        columns: a count n for the positions 0 … n − 1, or the positions themselves [n], each ≥ 0.

    Returns:
        float64 tensor [b, n].
    """
    keys = _int64_vector(rows, "rows").view(np.uint64)
    positions = _positions(columns)
    blocks, place = np.unique(positions // 4, return_inverse=True)
    counter = np.zeros((4, keys.size, blocks.size), np.uint64)
    counter[0] = blocks.astype(np.uint64)[None, :]
    counter[1] = keys[:, None]
    words = _philox4x64(counter, _key(seed, f"grid\x1f{stream}"))
    raw = words[(positions % 4)[None, :], np.arange(keys.size)[:, None], place.reshape(-1)[None, :]]
    return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _philox4x64(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x64-10 of counters [4, …] under one key [2], all uint64; the function NumPy's bit generator applies."""
    c0, c1, c2, c3 = (word.copy() for word in counter)
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        high0, low0 = _multiply(0xD2E7470EE14C6C93, c0)
        high1, low1 = _multiply(0xCA5A826395121157, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % _WORD, (k1 + 0xBB67AE8584CAA73B) % _WORD
    return np.stack([c0, c1, c2, c3])


def _multiply(constant: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """High and low 64 bits of constant · x, through 32-bit halves."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high = np.uint64(constant & 0xFFFFFFFF), np.uint64(constant >> 32)
    b_low, b_high = x & mask, x >> half
    middle = a_high * b_low + ((a_low * b_low) >> half)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (other >> half), np.uint64(constant) * x


def _key(seed: int, stream: str) -> np.ndarray:
    if not isinstance(stream, str):
        raise InputError("a stream is named by a string", where="stream", expected="str", found=repr(stream))
    text = f"{_integer(seed, 'seed')}\x1f{stream}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], "<u8").astype(np.uint64)


def _philox(seed: int, stream: str) -> np.random.Philox:
    return np.random.Philox(key=_key(seed, stream))


def _raw(count: int, seed: int, stream: str) -> np.ndarray:
    return np.atleast_1d(_philox(seed, stream).random_raw(count))


def _integer(value: object, name: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be an integer", where=name, expected="int", found=repr(value)) from None


def _shape(shape: Shape) -> tuple[int, ...]:
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    size = tuple(_integer(n, "shape") for n in size)
    if any(n < 0 for n in size):
        raise InputError("a shape has no negative size", where="shape", expected="sizes ≥ 0", found=size)
    return size


def _significand_bits(dtype: torch.dtype) -> int:
    if not dtype.is_floating_point:
        raise InputError("random reals need a floating-point dtype", where="dtype", found=dtype)
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _int64_vector(values: object, name: str) -> np.ndarray:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype == np.uint64 and (array >= 1 << 63).any()):
        found = f"{array.dtype} of shape {array.shape}"
        raise InputError(f"{name} must be one row of int64 values", where=name, expected="int64 [n]", found=found)
    return np.ascontiguousarray(array, np.int64)


def _positions(columns: object) -> np.ndarray:
    if isinstance(columns, int) and not isinstance(columns, bool):
        return np.arange(_shape(columns)[0])
    positions = _int64_vector(columns, "columns")
    if (positions < 0).any():
        raise InputError("a column is a position", where="columns", expected="values ≥ 0", found=int(positions.min()))
    return positions


# Wichura 1988, PPND16: numerators and denominators, lowest power first, for the centre and the two tails
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_FAR_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


def _normal_quantile(p: np.ndarray) -> np.ndarray:
    q = p - 0.5
    out = q * _ratio(_CENTRE, 0.180625 - q * q)
    outer = np.abs(q) > 0.425
    if outer.any():
        tail = q[outer]
        r = np.sqrt(-_log(np.where(tail < 0, p[outer], 1.0 - p[outer])))
        near = _ratio(_TAIL, np.minimum(r, 5.0) - 1.6)
        far = _ratio(_FAR_TAIL, np.maximum(r, 5.0) - 5.0)
        out[outer] = np.copysign(np.where(r <= 5.0, near, far), tail)
    return out


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: np.ndarray) -> np.ndarray:
    return _polynomial(coefficients[0], x) / _polynomial(coefficients[1], x)


def _polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value *= x
        value += coefficient
    return value


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm from IEEE operations only: x = 2ᵉ·m, ln m = 2·artanh((m − 1)/(m + 1)) by its series."""
    m, e = np.frexp(x)
    small = m < math.sqrt(0.5)
    m, e = np.where(small, 2.0 * m, m), np.where(small, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    series = _polynomial([2.0 / (2 * k + 1) for k in range(13)], s * s)
    return e.astype(np.float64) * 0.6931471805599453 + s * series
