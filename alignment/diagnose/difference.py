"""How far one recorded tensor is from its partner, from whatever both sides hold: tensors, sketches or statistics.

NumPy only: comparing statistics and sketches must not cost the import of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from alignment.capture.record import CHAIN, Statistics

CHUNK = 1 << 16
"""Elements per pass over a pair of tensors: both sides and their difference stay in a core's cache."""

_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_ROUNDOFF |= {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}


@dataclass(slots=True)
class Difference:
    """What separates target t from golden g.

    Attributes:
        relative: ‖t − g‖₂ / ‖g‖₂: exact from tensors, an unbiased estimate from sketches, a lower bound from
            statistics (which cannot see a permutation).
        gain: ⟨t − g, g⟩ / ‖g‖², the part of the difference that scales golden; rounding leaves it near 0.
        bias: (mean t − mean g) / rms g.
        worst: max |t − g| / rms g, from tensors only; NaN otherwise.
        detail: ``tensor``, ``sketch``, ``statistics`` or ``none``.
        problem: why there is no number, or what is wrong beside it: NaN, another shape, a missing partner; or "".
    """

    relative: float
    gain: float = 0.0
    bias: float = 0.0
    worst: float = math.nan
    detail: str = "none"
    problem: str = ""


def rounding(dtype: str) -> float:
    """Root mean square of the relative difference of two values that were rounded to ``dtype`` on their own.

    Rounding to nearest leaves an error that is uniform in ± half a spacing. Relative to the value, and over a mantissa
    that is uniform in log scale, its root mean square is the unit roundoff times √(3 / (8 ln 2) / 3) = 0.425 (for
    bfloat16 1.66e-3, as measured). Two sides add in squares. 0 for integers and booleans, which are copied.
    """
    return _ROUNDING.get(dtype, 0.0)


# mean over a log-uniform mantissa m in [1, 2) of m⁻² is 3 / (8 ln 2); the error is u/√3 relative to the binade's start
_UNIFORM = math.sqrt(3.0 / (8.0 * math.log(2.0)) / 3.0)
_ROUNDING = {dtype: roundoff * _UNIFORM * math.sqrt(2.0) for dtype, roundoff in _ROUNDOFF.items()}


RESOLUTION = 2.0**-22
"""What is left of the difference of two equal tensors when their sketches, sums in float32, were made in another order:
2⁻²⁴ per addition, about sixteen additions deep in random directions."""


def signed_resolution(size: float, mean: float, count: int) -> tuple[float, float]:
    """Standard deviations of gain and bias that two captures of one tensor leave: rounding of their own sums.

    A chain of L float32 additions of elements with mean μ and root mean square r goes through partial sums of about
    √(j r² + j² μ²), j = 1 … L, and each addition loses 0.425 u of its result (:func:`rounding`). With n/L chains, and
    one more rounding where a sum is stored as float32, the mean is off by u √(L/2 + (μ/r)² L²/3) r/√n and by u |μ|, and
    the sum of squares, which only grows, by u L/√(3n) and u of itself. Both sides round on their own.

    Args:
        size: ‖g‖₂.
        mean: of the elements.
        count: n.
    """
    once = _ROUNDING["float32"]
    share = abs(mean) * math.sqrt(count) / size
    gain = once * (1.0 + CHAIN / math.sqrt(3.0 * count))
    return gain, once * (share + math.sqrt((CHAIN / 2 + share**2 * CHAIN**2 / 3) / count))


def roundoff(dtype: str) -> float:
    """Unit roundoff of a floating-point format; 0 for others."""
    return _ROUNDOFF.get(dtype, 0.0)


def coarser(first: str, second: str) -> str:
    """The dtype with the larger unit roundoff."""
    return first if _ROUNDOFF.get(first, 0.0) >= _ROUNDOFF.get(second, 0.0) else second


def from_statistics(golden: Statistics, target: Statistics) -> Difference:
    """A lower bound of the relative difference: |‖t‖ − ‖g‖| and √n |mean t − mean g| are both at most ‖t − g‖."""
    size, other = golden.l2, target.l2
    if size != size or other != other:
        # some tools keep no norm of integers: then the extremes are all there is
        spread = max(abs(golden.max), abs(golden.min)) or 1.0
        apart = max(abs(target.max - golden.max), abs(target.min - golden.min))
        return Difference(apart / spread, detail="statistics")
    if size == 0.0:
        return Difference(0.0 if other == 0.0 else math.inf, detail="statistics")
    bias = (target.mean - golden.mean) * math.sqrt(golden.count) / size
    gain = other / size - 1.0
    return Difference(max(abs(gain), abs(bias)), gain, bias, detail="statistics")


def from_sketches(
    golden: np.ndarray, target: np.ndarray, first: Statistics | None, second: Statistics | None
) -> Difference:
    """‖sketch t − sketch g‖ estimates ‖t − g‖; norms and means come from the statistics, which are exact.

    The gain needs no projection of sketches: 2⟨t − g, g⟩ = ‖t‖² − ‖g‖² − ‖t − g‖², where only the last, quadratic
    term is estimated.
    """
    difference = target.astype(np.float64) - golden
    squared = float(np.vdot(difference, difference))
    if not math.isfinite(squared) and first is not None and second is not None:
        # masks hold the smallest number of their dtype, whose sums overflow
        return from_statistics(first, second)
    size = first.l2 if first is not None else math.sqrt(float(np.vdot(golden.astype(np.float64), golden)))
    if size == 0.0 or not math.isfinite(size):
        return Difference(0.0 if squared == 0.0 else math.inf, detail="sketch")
    relative = math.sqrt(squared) / size
    gain = bias = 0.0
    if first is not None and second is not None:
        gain = 0.5 * ((second.l2 / size) ** 2 - 1.0 - relative**2)
        bias = (second.mean - first.mean) * math.sqrt(first.count) / size
    return Difference(relative, gain, bias, detail="sketch")


def from_tensors(golden: np.ndarray, target: np.ndarray) -> Difference:
    """Exact, in chunks of :data:`CHUNK`: float32 within a chunk, float64 between chunks.

    A dot product of 2¹⁶ float32 terms is summed in blocks by every BLAS and loses no more than √2¹⁶ · 2⁻²⁴ ≈ 1.5e-5
    of the size of what it measures, far below any difference of differences that is judged.
    """
    if golden.shape != target.shape:
        return Difference(math.inf, detail="tensor", problem=f"shape {list(golden.shape)} against {list(target.shape)}")
    if golden.dtype.kind in "biu" and target.dtype.kind in "biu":
        return _from_integers(golden, target)
    wide = np.float64 if np.float64 in (golden.dtype, target.dtype) else np.float32
    first, second = golden.reshape(-1), target.reshape(-1)
    buffer = np.empty(min(CHUNK, first.size), dtype=wide)
    with np.errstate(invalid="ignore", over="ignore"):
        size, squared, projection, sums, worst = _sums(first, second, wide, buffer)
    if not math.isfinite(size):
        return _without_nonfinite(first, second)
    count = first.size
    if size == 0.0 or not math.isfinite(squared):
        problem = "" if math.isfinite(squared) else "NaN or infinity in the target"
        return Difference(0.0 if squared == 0.0 else math.inf, worst=worst, detail="tensor", problem=problem)
    norm = math.sqrt(size)
    return Difference(
        math.sqrt(squared) / norm,
        projection / size,
        sums / math.sqrt(count) / norm,
        worst * math.sqrt(count) / norm,
        "tensor",
    )


def _sums(first: np.ndarray, second: np.ndarray, wide, buffer: np.ndarray) -> tuple[float, float, float, float, float]:
    """‖g‖², ‖d‖², ⟨d, g⟩, Σd and max |d|."""
    size = squared = projection = sums = worst = 0.0
    for start in range(0, first.size, CHUNK):
        g, t = first[start : start + CHUNK], second[start : start + CHUNK]
        if g.dtype != wide:
            g = g.astype(wide)
        if t.dtype != wide:
            t = t.astype(wide)
        d = np.subtract(t, g, out=buffer[: g.size])
        size += float(np.dot(g, g))
        squared += float(np.dot(d, d))
        projection += float(np.dot(d, g))
        sums += float(d.sum())
        worst = max(worst, float(d.max()), -float(d.min()))
    return size, squared, projection, sums, worst


def _from_integers(golden: np.ndarray, target: np.ndarray) -> Difference:
    """√(2 · share of elements that differ): the size of the difference of two codes that agree elsewhere."""
    share = float(np.count_nonzero(golden != target)) / max(golden.size, 1)
    return Difference(math.sqrt(2.0 * share), detail="tensor")


def _without_nonfinite(first: np.ndarray, second: np.ndarray) -> Difference:
    """Masks hold −inf, and golden may hold NaN at padding: equal there, the rest is judged; else a problem."""
    bad = ~np.isfinite(first)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    if not bool(same[bad].all()):
        return Difference(math.inf, detail="tensor", problem="NaN or infinity at other places")
    if bool(bad.all()):
        return Difference(0.0, detail="tensor")
    return from_tensors(first[~bad], second[~bad])
