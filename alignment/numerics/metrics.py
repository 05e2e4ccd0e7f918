"""How far a tensor is from its reference: errors, ULPs, divergences of distributions and flips that matter.

All metrics share one contract:

* ``x`` is the tensor under test, ``ref`` the reference (golden or baseline). Shapes are equal, dtypes may differ (a
  bfloat16 result against a float64 golden) except for :func:`ulp_distance`; devices may differ.
* Work is done in float64 on the host, chunk by chunk, so that no float64 copy of a large tensor is made.
* NaN or infinity in ``x`` is a finding, not a usage error: the metric returns NaN or infinity, and
  :attr:`alignment.numerics.verdict.Measure.within` is False for both. NaN is never equal to NaN.
* NaN or infinity in ``ref``, unequal shapes, a dtype that is not real, and empty tensors (nothing was compared)
  raise :class:`alignment.errors.InputError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from alignment.errors import InputError

_CHUNK = 1 << 20

Values = torch.Tensor | np.ndarray | Sequence[float]


class SignedDifference(NamedTuple):
    """Mean of x − ref, its standard error s/√n, and n. Rounding has mean ≈ 0; faults have a sign."""

    mean: float
    standard_error: float
    count: int

    @property
    def z(self) -> float:
        """Mean in standard errors: 0 for no difference at all, ±inf for one difference everywhere, NaN for n = 1."""
        if self.standard_error == 0.0:
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.standard_error


class Flips(NamedTuple):
    """Rows whose top-k choice changed: ``decided`` ones by more than the margin, ``near_ties`` within it.

    ``worst`` is the largest loss of reference score over all rows (0 when no row flipped, inf for a NaN row).
    """

    decided: int
    near_ties: int
    rows: int
    worst: float

    @property
    def decided_rate(self) -> float:
        """Share of rows with a decided flip."""
        return self.decided / self.rows


def relative_l2(x: Values, ref: Values) -> float:
    """‖x − ref‖₂ / ‖ref‖₂. For a zero reference: 0 if x is zero too, else inf."""
    difference, size = 0.0, 0.0
    for a, b in _pairs(x, ref, "relative_l2"):
        difference, size = _hypot(difference, _norm(a - b)), _hypot(size, _norm(b))
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.nan if math.isnan(difference) else math.inf
    return difference / size


def max_abs(x: Values, ref: Values) -> float:
    """max |x − ref|, in the unit of the tensors."""
    return _worst(float((a - b).abs().max()) for a, b in _pairs(x, ref, "max_abs"))


def mean_abs(x: Values, ref: Values) -> float:
    """mean |x − ref|, in the unit of the tensors."""
    parts = [(float((a - b).abs().sum()), a.numel()) for a, b in _pairs(x, ref, "mean_abs")]
    return _fsum(total for total, _ in parts) / sum(n for _, n in parts)


def ulp_distance(x: Values, ref: Values) -> float:
    """Largest number of representable values between x and ref, both of one dtype (bf16, fp16, fp32, fp64, fp8).

    Bit patterns are mapped to integers that are monotone over sign (−0 and +0 coincide), so 1 is the next value, across
    binades and across zero. A non-finite x is infinitely far. Round a float64 golden into the dtype first:
    ``ulp_distance(x, ref.to(x.dtype))``.

    Raises:
        InputError: the dtypes differ; else see the module.
    """
    x, ref = _tensor(x), _tensor(ref)
    if x.dtype != ref.dtype:
        raise InputError(
            "ulp_distance counts in one dtype",
            where="ulp_distance",
            expected=x.dtype,
            found=ref.dtype,
            next_step="round the reference with ref.to(x.dtype)",
        )
    worst = 0
    for a, b in _chunks(x, ref, "ulp_distance"):
        _require_finite(b.to(torch.float64), "ulp_distance")
        if not bool(torch.isfinite(a.to(torch.float64)).all()):
            return math.inf
        first, second = _ordered(a), _ordered(b)
        high, low = np.maximum(first, second), np.minimum(first, second)
        # the distance of two float64 values can exceed int64; unsigned subtraction is exact
        worst = max(worst, int((high.view(np.uint64) - low.view(np.uint64)).max()))
    return float(worst)


def cosine(x: Values, ref: Values) -> float:
    """x·ref / (‖x‖‖ref‖) in [−1, 1]; two zero vectors give 1, one zero vector gives 0.

    1 − cosine resolves angles down to about 1e-8 only; use :func:`relative_l2` for small differences.
    """
    scale_x, scale_ref = _extent(x, ref, "cosine")
    if not math.isfinite(scale_x):
        return math.nan
    if scale_x == 0.0 or scale_ref == 0.0:
        return 1.0 if scale_x == scale_ref else 0.0
    dots, xs, refs = [], [], []
    for a, b in _pairs(x, ref, "cosine"):
        a, b = a / scale_x, b / scale_ref
        dots.append(float(a @ b))
        xs.append(float(a @ a))
        refs.append(float(b @ b))
    return max(-1.0, min(1.0, math.fsum(dots) / math.sqrt(math.fsum(xs)) / math.sqrt(math.fsum(refs))))


def kl_divergence(p_log: Values, q_log: Values, *, reduction: str = "mean") -> float:
    """KL(P‖Q) in nats between distributions over the last dimension, given as log-probabilities [..., v].

    Per row Σ p·(ln p − ln q) − p + q, the generalised (I-)divergence: equal to KL for normalised rows, ≥ 0 always,
    exactly 0 only for equal rows, and free of cancellation for close ones (Csiszár, Annals of Statistics 19, 1991).
    −inf is a probability of 0; NaN on either side gives NaN.

    Args:
        reduction: ``mean`` or ``max`` over rows.
    """
    return _over_rows(p_log, q_log, "kl_divergence", reduction, _kl_rows)


def total_variation(p_log: Values, q_log: Values, *, reduction: str = "mean") -> float:
    """½ Σ |p − q| over the last dimension, from log-probabilities [..., v]; arguments as :func:`kl_divergence`."""
    return _over_rows(p_log, q_log, "total_variation", reduction, lambda p, q: 0.5 * (p.exp() - q.exp()).abs().sum(-1))


def signed_mean_difference(x: Values, ref: Values) -> SignedDifference:
    """Mean of x − ref with its standard error s/√n; correlated elements make it a lower bound."""
    count, mean, squares = 0, 0.0, 0.0
    for a, b in _pairs(x, ref, "signed_mean_difference"):
        d = a - b
        n, m = d.numel(), float(d.mean())
        s = float(((d - m) ** 2).sum())
        # Chan, Golub, LeVeque 1983: merging of means and sums of squares
        total, shift = count + n, m - mean
        squares += s + shift * shift * count * n / total
        mean += shift * n / total
        count = total
    error = math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan
    return SignedDifference(mean, error, count)


def decided_flips(scores_x: Values, scores_ref: Values, *, k: int = 1, margin: float) -> Flips:
    """Rows whose top-k set over the last dimension changed, near-ties told apart from decisions.

    The loss of a row is max ref over what left the set − min ref over what entered it (for k = 1: the reference score
    of the reference's choice minus that of x's choice). A flip counts as decided if the loss exceeds ``margin``, which
    callers derive from the error of the scores. Equal scores are taken in index order on both sides; −inf marks
    entries that cannot be chosen; a row with NaN or +inf in x is a decided flip.

    Args:
        scores_x, scores_ref: [..., n] logits, router scores or probabilities.
        k: size of the choice, 1 ≤ k ≤ n.
        margin: ≥ 0, in the unit of the scores.
    """
    if not (isinstance(margin, (int, float)) and math.isfinite(margin) and margin >= 0):
        raise InputError("a margin is a finite score difference", where="decided_flips", expected="≥ 0", found=margin)
    x, ref = _tensor(scores_x), _tensor(scores_ref)
    if x.ndim and not 1 <= k <= x.shape[-1]:
        expected = f"1 ≤ k ≤ {x.shape[-1]}"
        raise InputError("k exceeds the number of scores", where="decided_flips", expected=expected, found=k)
    decided = near = rows = 0
    worst = 0.0
    for a, b in _row_chunks(x, ref, "decided_flips"):
        best = b.amax(-1)
        if bool((torch.isnan(best) | (best == math.inf)).any()):
            _not_finite("decided_flips")
        loss = _loss_of_choice(a, b, k)
        decided += int((loss > margin).sum())
        # a changed set with loss 0 (equal reference scores) is a near-tie as well: -1 marks an unchanged set
        near += int(((loss >= 0) & (loss <= margin)).sum())
        rows += loss.numel()
        worst = max(worst, float(loss.max()))
    return Flips(decided, near, rows, worst)


def _loss_of_choice(x: torch.Tensor, ref: torch.Tensor, k: int) -> torch.Tensor:
    top_x, top_ref = _top(x, k), _top(ref, k)
    loss = torch.full((x.shape[0],), -1.0, dtype=torch.float64)
    changed = (top_x != top_ref).any(-1)
    if bool(changed.any()):
        scores = ref[changed]
        chosen_x, chosen_ref = (
            torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, top[changed], True) for top in (top_x, top_ref)
        )
        lost = scores.masked_fill(~chosen_ref | chosen_x, -math.inf).amax(-1)
        gained = scores.masked_fill(~chosen_x | chosen_ref, math.inf).amin(-1)
        # equal infinities are two entries that could not be chosen
        loss[changed] = torch.where(lost == gained, 0.0, lost - gained).clamp(min=0.0)
    # the maximum of a row is NaN or inf exactly if one of its scores is
    best = x.amax(-1)
    return torch.where(torch.isnan(best) | (best == math.inf), math.inf, loss)


def _top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest scores per row, ascending; equal scores are taken in index order."""
    if k == 1:
        return scores.argmax(-1, keepdim=True)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(dim=-1).values


def _kl_rows(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    d = p - q
    prob, other = p.exp(), q.exp()
    # e^-d − 1 + d cancels for small d, where its series is exact to float64 rounding
    series = 0.5 * d * d * (1.0 - d / 3.0 * (1.0 - d / 4.0 * (1.0 - d / 5.0 * (1.0 - d / 6.0))))
    close = prob * torch.where(d.abs() < 0.01, series, torch.expm1(-d.clamp(-1.0, 1.0)) + d)
    far = other - prob + torch.where(prob == 0, 0.0, prob * d)
    terms = torch.where(d.abs() < 1.0, close, far)
    return torch.where(torch.isnan(p) | torch.isnan(q), math.nan, terms).sum(-1)


def _over_rows(p_log: Values, q_log: Values, metric: str, reduction: str, rows) -> float:
    if reduction not in ("mean", "max"):
        raise InputError("unknown reduction", where=metric, expected="mean or max", found=reduction)
    parts = [rows(p, q) for p, q in _row_chunks(_tensor(p_log), _tensor(q_log), metric)]
    values = torch.cat(parts)
    return float(values.max() if reduction == "max" else values.mean())


def _tensor(values: Values) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach()
    return torch.as_tensor(np.asarray(values, dtype=None if isinstance(values, np.ndarray) else np.float64))


def _check(x: torch.Tensor, ref: torch.Tensor, metric: str) -> None:
    if x.shape != ref.shape:
        expected, found = tuple(ref.shape), tuple(x.shape)
        raise InputError("shape differs from the reference", where=metric, expected=expected, found=found)
    for name, tensor in (("x", x), ("ref", ref)):
        if not tensor.dtype.is_floating_point:
            found = f"{tensor.dtype} for {name}"
            raise InputError("metrics compare real floating-point tensors", where=metric, found=found)
    if x.numel() == 0:
        raise InputError(
            "an empty tensor compares nothing", where=metric, expected="at least one element", found=tuple(x.shape)
        )


def _chunks(x: torch.Tensor, ref: torch.Tensor, metric: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    _check(x, ref, metric)
    x, ref = x.reshape(-1), ref.reshape(-1)
    for start in range(0, x.numel(), _CHUNK):
        yield x[start : start + _CHUNK].cpu(), ref[start : start + _CHUNK].cpu()


def _pairs(x: Values, ref: Values, metric: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for a, b in _chunks(_tensor(x), _tensor(ref), metric):
        b = b.to(torch.float64)
        _require_finite(b, metric)
        yield a.to(torch.float64), b


def _row_chunks(x: torch.Tensor, ref: torch.Tensor, metric: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    _check(x, ref, metric)
    if x.ndim == 0:
        raise InputError("a distribution needs a last dimension", where=metric, expected="[..., n]", found="a scalar")
    width = x.shape[-1]
    x, ref = x.reshape(-1, width), ref.reshape(-1, width)
    step = max(1, _CHUNK // width)
    for start in range(0, x.shape[0], step):
        a, b = x[start : start + step].cpu(), ref[start : start + step].cpu()
        yield a.to(torch.float64), b.to(torch.float64)


def _require_finite(ref: torch.Tensor, metric: str) -> None:
    if not bool(torch.isfinite(ref).all()):
        _not_finite(metric)


def _not_finite(metric: str) -> None:
    raise InputError(
        "the reference is not finite, so nothing can be judged against it",
        where=metric,
        expected="finite values in ref",
        found="NaN or infinity",
        next_step="record the reference again, or mask the entries that are undefined",
    )


def _extent(x: Values, ref: Values, metric: str) -> tuple[float, float]:
    extents = [(float(a.abs().max()), float(b.abs().max())) for a, b in _pairs(x, ref, metric)]
    return _worst(e[0] for e in extents), _worst(e[1] for e in extents)


def _worst(values: Iterator[float]) -> float:
    worst = 0.0
    for value in values:
        # Python's max would drop a NaN that comes second
        if math.isnan(value):
            return math.nan
        worst = max(worst, value)
    return worst


def _fsum(values: Iterator[float]) -> float:
    values = list(values)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _norm(v: torch.Tensor) -> float:
    scale = float(v.abs().max())
    if scale == 0.0 or not math.isfinite(scale):
        return scale
    return scale * float(torch.linalg.vector_norm(v / scale))


def _hypot(a: float, b: float) -> float:
    # math.hypot(inf, nan) is inf; here NaN must win as it does in torch
    return math.nan if math.isnan(a) or math.isnan(b) else math.hypot(a, b)


def _ordered(values: torch.Tensor) -> np.ndarray:
    """int64 that grow with the value: two's complement of sign and magnitude."""
    width = values.element_size() * 8
    if width == 64:
        bits = values.contiguous().view(torch.int64)
    else:
        bits = values.contiguous().view({8: torch.int8, 16: torch.int16, 32: torch.int32}[width]).to(torch.int64)
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude).numpy()
