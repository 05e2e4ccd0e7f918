"""How much difference an edge may add: unit roundoff, propagated error, and what a calibration pair measured.

See ``docs/compare.md`` for the model and its derivation. In short, with ε the relative difference of a result, ε_s the
largest one among its sources and u the rounding of the result's dtype on two sides::

    predicted scale   p = √(ε_s² + u²)
    amplification     α = ε / p, log-normal over the edges of one kind
    signed parts      gain γ = ⟨t − g, g⟩ / ‖g‖², bias β = ⟨t − g, 1⟩ / (‖g‖ √n)
    their variance    σ² ε² / tokens + δ²

For rounding noise the signed parts scatter around what the sign of the sources' own differences and the curvature term
ε² explain; a systematic fault is far off, however small it is. Tokens are computed apart from one another, so what a
sum over all elements keeps of their noise falls with the square root of their number; δ is what the capture's own sums
lose. σ differs a little between layers and models, which is what makes tails heavier than normal: they are Student's.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from alignment.diagnose.difference import RESOLUTION, Difference, rounding, signed_resolution
from alignment.diagnose.module_graph import Edge

if TYPE_CHECKING:
    from alignment.diagnose.carried import Update

FALSE_ALARM = 1e-4
"""Probability that a comparison of two equal computations names a divergence, over all its tests together."""

FAMILIES = ("sizes", "signed parts", "signed parts over all layers", "choices", "loss")
"""What shares it equally. Within a family the kinds of edges share equally, and within a kind its edges (Bonferroni):
a model has one loss and many layers, and the loss is not held to more for their sake."""

DEFAULT_AMPLIFICATION = {"own": 4.0, "glue": 8.0, "gradient own": 8.0, "gradient glue": 8.0}
DEFAULT_AMPLIFICATION |= {"loss": 16.0, "parameter gradient": 16.0, "copy": 1.0, "value": 16.0}
"""Largest growth of the relative error over one edge that is taken for granted without a calibration."""

_DEFAULT_ORIGIN = {alpha: f"{alpha:g} × √(source² + rounding²)" for alpha in DEFAULT_AMPLIFICATION.values()}

NOISE_FORMAT = "alignment-noise-2"

NEAR_TIES = 4.0
"""Share of choices that move per unit of relative error of the scores, without a calibration."""

DISPERSION = 4.0
"""Variance over mean of the number of moved choices, in a calibration of few samples. Near ties move one choice, or
exchange two; and a sketch counts a move by its squared distance, whose mean square is 2.4 times its squared mean for
indices spread evenly. Half of either: (1 + 4) / (1 + 2) · 2.4 = 4."""

PRIOR_SAMPLES = 4
"""Weight of the spread that all edges share against the one of edges of this key, in samples."""

FEWEST = 4
"""Samples of a key below which the defaults are used."""

UPDATE_AMPLIFICATION = 4.0
"""Largest difference of two updates in units of √r, r the relative difference of their gradients, that is taken for
granted without a calibration. An adaptive optimizer steps by the sign of a gradient, and a sign turns where the
gradient is smaller than its noise: a share of r/π of normal ones, each by twice the step, so √(4 r/π) = 1.13 √r.
Measured over 83 weights and three steps in float32: 0.1 in the median, 1.2 at most."""

SUMS = 2.0**-20
"""What float32 sums over many elements, in another order on the other side, leave of the statistics of equal
tensors."""

EXCESS_KURTOSIS = {"parameter gradient": 2.0, "loss": 2.0}
"""Least excess kurtosis of signed parts in their own standard deviations, by kind of edge; 0.5 for others. Measured
pair by pair against the rest of a calibration, over 20 models each of the two of ``benchmarks/detection.py``, in
bfloat16: 0.2 to 1.1 for results and gradients of modules, 1.8 to 2.6 for gradients of parameters, whose sum over tokens
a few of them dominate."""

EXCESS_SAMPLES = 500
"""Weight of that against what a calibration shows, in samples."""

SUSPECT = 0.05
"""An index is named for the rows that it moved if it moved more than it would in this share of equal computations."""

ROUNDS = 5
"""Of a fit whose weights and ridge depend on what it leaves."""

NO_GRADIENTS = "gradients that no capture has"

COPIED = ("parameter", "attribute", "input", "copy")
"""Kinds of edges whose results are not computed."""


@dataclass(slots=True)
class Limits:
    """What ε, |gain| and |bias| may be at most at one edge, and where that comes from.

    ``gain_left`` and ``bias_left`` are what is left of the two after what their sources explain, ``gain_deviation`` and
    ``bias_deviation`` the standard deviations of that where the edge is calibrated, else None.
    """

    relative: float
    gain: float
    bias: float
    origin: str
    gain_left: float
    bias_left: float
    gain_deviation: float | None = None
    bias_deviation: float | None = None


class UpdateLimits(NamedTuple):
    """What e and the size of s of an :class:`~alignment.diagnose.carried.Update` may be at most; ``relative`` is infinite
    where that is not known."""

    relative: float
    size: float
    origin: str


def scale_of(edge: Edge) -> float:
    """p: what the sources' error and one rounding on each side predict for the result, before amplification."""
    detail = edge.result.difference.detail
    return math.hypot(edge.error, rounding(edge.result.dtype), RESOLUTION if detail == "sketch" else 0.0)


class Sample(NamedTuple):
    """One edge of a benign pair.

    Attributes:
        amplification: ln α.
        relative, gain, bias: of the result.
        source_gain, source_bias, source_relative: of the source whose sign carries over.
        pair: number of the pair.
        tokens: rows with independent errors.
        gain_resolution, bias_resolution: δ of the two.
    """

    amplification: float
    relative: float
    gain: float
    bias: float
    source_gain: float
    source_bias: float
    source_relative: float
    pair: float
    tokens: float
    gain_resolution: float
    bias_resolution: float

    @property
    def regressors(self) -> tuple[float, ...]:
        """What a signed part may follow."""
        return _regressors((self.source_gain, self.source_bias, self.source_relative), self.relative)


@dataclass
class _Samples:
    rows: list[Sample] = field(default_factory=list)
    fitted: tuple[_Fit, _Fit] | None = None

    def fits(self) -> tuple[_Fit, _Fit]:
        """Of the gain and the bias."""
        if self.fitted is None:
            self.fitted = _fit(self.rows, "gain"), _fit(self.rows, "bias")
        return self.fitted


@dataclass(frozen=True)
class _Fit:
    """What sources explain of a signed part, and how the rest scatters.

    Attributes:
        deviation: σ, of the rest per ε/√tokens.
        freedom: samples less coefficients.
        fourth: sum over the samples of (rest / its deviation)⁴, deviations less what the fit took up of each.
        drift: at least 1: how much more rests spread that are added up over a pair than independent ones would. One
            layer's noise runs on into the next, and every model has coefficients of its own.
        pairs: of the calibration.
    """

    coefficients: np.ndarray
    deviation: float
    freedom: int
    fourth: float
    drift: float
    pairs: int

    def left(self, value: float, regressors: tuple[float, ...]) -> float:
        """``value`` without what the regressors explain."""
        return value - float(self.coefficients @ regressors)

    def expected(self, size: float, tokens: float, resolution: float) -> float:
        """Standard deviation of the rest at one edge."""
        return math.hypot(self.deviation * size / math.sqrt(tokens), resolution)


class NoiseModel:
    """Limits for edges; without calibration from :data:`DEFAULT_AMPLIFICATION` and the number of samples."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, ...], _Samples] = defaultdict(_Samples)
        self._spread: float | None = None
        self._excess: dict[str, float] = {}
        self._pair = 0
        self.moves: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
        self.updates: list[float] = []
        """ln (e / √r) of updates."""
        self.expect_tests(1)

    def expect_tests(self, edges: int) -> None:
        """Share the probability of a false alarm equally among this many edges."""
        self._levels: dict[tuple[str, ...], float] = {}
        self._level = FALSE_ALARM / len(FAMILIES) / max(1, edges)

    def expect_edges(self, families: Mapping[str, Mapping[tuple[str, ...], int]]) -> None:
        """Share it among these families, in each among its keys, and within a key among its edges.

        Args:
            families: of :data:`FAMILIES`, ``sizes`` (whose signed parts are a family with the same keys), ``choices``
                and ``loss``.
        """
        for edges in families.values():
            for key, count in edges.items():
                self._levels[key] = FALSE_ALARM / len(FAMILIES) / len(edges) / count

    def level(self, key: tuple[str, ...]) -> float:
        """Probability of a false alarm that one test of one edge of ``key`` may have."""
        return self._levels.get(key, self._level)

    def to_dict(self) -> dict:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        edges = [{"key": list(key), "rows": [list(row) for row in held.rows]} for key, held in self.samples.items()]
        moves = [{"key": list(key), "rows": [list(row) for row in rows]} for key, rows in self.moves.items()]
        return {"format": NOISE_FORMAT, "edges": edges, "choices": moves, "updates": self.updates}

    @classmethod
    def from_dict(cls, data: dict) -> NoiseModel:
        """The inverse of :meth:`to_dict`; KeyError, TypeError or ValueError for anything else."""
        if data["format"] != NOISE_FORMAT:
            raise ValueError(f"format {data['format']!r}, expected {NOISE_FORMAT!r}")
        model = cls()
        for edge in data["edges"]:
            rows = [tuple(float(x) for x in row) for row in edge["rows"]]
            if any(len(row) != len(Sample._fields) or not all(map(math.isfinite, row)) for row in rows):
                raise ValueError(f"a sample of {edge['key']} is not {len(Sample._fields)} finite numbers")
            rows = [Sample(*row) for row in rows]
            model.samples[tuple(map(str, edge["key"]))] = _Samples(rows)
        for held in data["choices"]:
            moves = [(float(moved), float(exposure)) for moved, exposure in held["rows"]]
            model.moves[tuple(map(str, held["key"]))] = moves
        model.updates = [float(x) for x in data.get("updates", ())]
        if not all(map(math.isfinite, model.updates)):
            raise ValueError("a sample of the updates is not finite")
        return model

    def add(self, other: NoiseModel) -> None:
        """Take what ``other`` learned as well."""
        self.begin_pair()
        for key, held in other.samples.items():
            self.samples[key].rows += [row._replace(pair=row.pair + self._pair) for row in held.rows]
            self.samples[key].fitted = None
        for key, rows in other.moves.items():
            self.moves[key] += rows
        self.updates += other.updates
        self._spread, self._excess = None, {}

    def begin_pair(self) -> None:
        """What is learned from here on is of another pair than before."""
        seen = (int(row.pair) for held in self.samples.values() for row in held.rows)
        self._pair = 1 + max([self._pair, *seen])

    def learn(self, edge: Edge) -> None:
        """Take one edge of a benign pair into account."""
        difference = edge.result.difference
        if edge.unordered or edge.unusable or edge.kind in COPIED or not math.isfinite(difference.relative):
            return
        if edge.result.discrete:
            if edge.error > 0.0:
                self.moves[edge.key].append(moves_of(edge))
            return
        if edge.index is not None and edge.index.error > 0.0:
            self.moves[("rows", *edge.key)].append(rows_of(edge))
        p = scale_of(edge)
        if p == 0.0 or difference.relative <= RESOLUTION:
            return
        self._spread, self._excess = None, {}
        held = self.samples[edge.key]
        held.fitted = None
        held.rows.append(
            Sample(
                math.log(difference.relative / p), difference.relative, difference.gain, difference.bias,
                *_signs(edge.source), float(self._pair), float(edge.tokens), *_resolution(edge),
            )
        )  # fmt: skip

    def choices(self, edge: Edge) -> float:
        """Largest difference of an index, in the unit of :func:`~alignment.diagnose.difference.from_tensors`."""
        if edge.error <= RESOLUTION:
            return 0.0
        rows = _rows(edge)
        # the other half goes to the rows that they move
        most = self.moves_expected(edge.key, edge.error * rows, self.level(edge.key) / 2)
        return math.sqrt(2.0 * min(1.0, most / rows))

    def moves_expected(self, key: tuple[str, ...], exposure: float, level: float) -> float:
        """How many choices near ties move at most, but for probability ``level``.

        Their mean is in proportion to the exposure, the sources' error times the number of choices. They move in groups
        of φ, and groups are Poisson. The rate is that of :data:`NEAR_TIES`, or of the calibration: n groups at an
        exposure E leave the rate Gamma(n + 1, E), with which the number at another exposure is negative binomial.
        """
        held = self.moves.get(key, ())
        seen = sum(e for _, e in held)
        if not seen:
            return DISPERSION * (_most(math.inf, NEAR_TIES * exposure / DISPERSION, level) + 0.5)
        rate = max(1.0, sum(moved for moved, _ in held)) / seen
        squares = sum((moved - rate * e) ** 2 / (rate * e) for moved, e in held)
        groups = max(1.0, (squares + PRIOR_SAMPLES * DISPERSION) / (len(held) - 1 + PRIOR_SAMPLES))
        shape = rate * seen / groups + 1.0
        return groups * (_most(shape, shape * exposure / seen, level) + 0.5)

    def rows_moved(self, edge: Edge) -> tuple[float, float] | None:
        """Rows that are others because an index moved, and their limit; None if the limit holds.

        A choice between near ties moves little in the index or much, by how its numbers lie; the row that was computed
        by another choice is another row. So ε² times the tokens counts choices better than the index does, where the
        index agrees that more of it moved than is usual.
        """
        index = edge.index
        if index is None or ("rows", *edge.key) not in self.moves or index.error <= RESOLUTION:
            return None
        moved, exposure = moves_of(index)
        rows, at = rows_of(edge)
        limit = self.moves_expected(("rows", *edge.key), at, self.level(index.key) / 2)
        suspect = moved > self.moves_expected(index.key, exposure, SUSPECT)
        return (rows, limit) if suspect and rows > limit else None

    def limits(self, edge: Edge) -> Limits:
        """The bounds of one edge."""
        difference = edge.result.difference
        if edge.twin is not None and not edge.unordered:
            p, twin = math.hypot(rounding(edge.result.dtype), RESOLUTION), edge.twin.difference
            gain, bias = difference.gain - twin.gain, difference.bias - twin.bias
            return Limits(
                relative=twin.relative + p, gain=p + SUMS, bias=p + SUMS, origin="a copy of a source",
                gain_left=gain, bias_left=bias,
            )  # fmt: skip
        p = scale_of(edge)
        held = None if edge.unordered else self.samples.get(edge.key)
        if held is not None and len(held.rows) >= FEWEST:
            return self._calibrated(edge, p, held)
        alpha = DEFAULT_AMPLIFICATION.get(edge.kind, 1.0)
        if edge.unordered:
            share, origin = math.inf, "rows in another order"
        else:
            z = _normal(self.level(edge.key) / 4)
            share, origin = z / math.sqrt(max(1, math.prod(edge.result.shape[:-1]))), _DEFAULT_ORIGIN[alpha]
        signed = math.inf if share == math.inf else alpha * p * min(1.0, share) + (alpha * p) ** 2 + SUMS
        return Limits(
            relative=alpha * p,
            gain=signed,
            bias=signed,
            origin=origin,
            gain_left=difference.gain,
            bias_left=difference.bias,
        )

    def learn_update(self, update: Update) -> None:
        """Take a weight of a benign pair into account. What the sums of a capture lose tells nothing of it, and neither
        do a few roundings."""
        if update.gradients is None or not update.floor < update.relative < math.inf or self.few_roundings(update):
            return
        e = update.relative
        if update.roundings < math.inf:
            e = (math.sqrt(1.0 + 4.0 * e * e) - 1.0) / 2.0
        self.updates.append(math.log(e / math.sqrt(math.hypot(update.gradients, RESOLUTION))))

    def few_roundings(self, update: Update) -> bool:
        """Whether an update consists of so few roundings that there may as well be none: N of them are expected, and
        none is seen with probability exp(−N)."""
        return update.roundings <= -math.log(self._level)

    def update(self, update: Update) -> UpdateLimits:
        """How far apart two updates of a weight may be.

        With b = α √r: where a weight is stored in a format in which most updates round to nothing, a share b of the
        update turns a share b of these roundings, each as large as what it leaves of the update: b + b² of N roundings
        and what earlier ones left, which is a Poisson number.

        The sizes of two updates that noise alone sets apart differ by what their sketches and so many elements leave of
        e, and by a share of e², since one side may have less noise than the other: e²/2 where the two are stored in
        different formats, e²/4 (variances no more than three times as large) where they are not.
        """
        z, e = _normal(self._level / 2), max(update.relative, update.floor)
        sums, count = math.sqrt(2.0 / update.numbers), max(1.0, min(update.elements, update.roundings))
        square = e * e / (2 if update.mixed else 4)
        size = z * (e * math.hypot(1.0 / math.sqrt(count), sums) + square * sums) + square + update.floor
        if self.few_roundings(update):
            size = math.inf
        if update.gradients is None:
            return UpdateLimits(math.inf, size, NO_GRADIENTS)
        r = math.hypot(update.gradients, RESOLUTION)
        alpha, origin = UPDATE_AMPLIFICATION, f"{UPDATE_AMPLIFICATION:g}"
        if len(self.updates) >= FEWEST:
            n = len(self.updates)
            centre = sum(self.updates) / n
            spread = math.sqrt(sum((x - centre) ** 2 for x in self.updates) / (n - 1))
            alpha = math.exp(centre + student(self._level, n - 1) * spread * math.sqrt(1 + 1 / n))
            origin = f"{alpha:.2g} (calibration, {n} samples)"
        share = alpha * math.sqrt(r)
        if update.roundings < math.inf:
            mean = (share + share * share) * max(update.roundings, update.roundings_met) + update.owed
            share = math.sqrt(_largest_count(mean, self._level) / update.roundings)
        return UpdateLimits(share + update.floor, size + r, f"{origin} × √{r:.1e}, by which the gradients differ")

    @property
    def spread(self) -> float:
        """Standard deviation of ln α within a key, over all keys: the prior of the spread of each."""
        if self._spread is None:
            squares = free = 0.0
            for held in self.samples.values():
                a = [row.amplification for row in held.rows]
                if len(a) >= 2:
                    centre = sum(a) / len(a)
                    squares += sum((x - centre) ** 2 for x in a)
                    free += len(a) - 1
            self._spread = math.sqrt(squares / free) if free else math.log(2.0)
        return self._spread

    def excess(self, kind: str) -> float:
        """Excess kurtosis of signed parts in their own standard deviations, over all keys of a kind."""
        if kind not in self._excess:
            rows = [held for key, held in self.samples.items() if key[0] == kind and len(held.rows) >= 2 * FEWEST]
            count = 2 * sum(len(held.rows) for held in rows)
            above = sum(fit.fourth for held in rows for fit in held.fits()) - 3.0 * count
            least = EXCESS_KURTOSIS.get(kind, 0.5)
            self._excess[kind] = max(least, (above + least * EXCESS_SAMPLES) / (count + EXCESS_SAMPLES))
        return self._excess[kind]

    def _calibrated(self, edge: Edge, p: float, held: _Samples) -> Limits:
        n = len(held.rows)
        # behind the loss, size and signed parts are one family
        level = self.level(edge.key) / (2 if edge.kind == "loss" else 1)
        centre = sum(row.amplification for row in held.rows) / n
        squares = sum((row.amplification - centre) ** 2 for row in held.rows)
        freedom = n - 1 + PRIOR_SAMPLES
        spread = math.sqrt((squares + PRIOR_SAMPLES * self.spread**2) / freedom)
        alpha = math.exp(centre + student(level, freedom) * spread * math.sqrt(1 + 1 / n))
        # kernels have noise of their own: where sources agree better than in any benign pair, results need not
        p = max(p, min(row.relative / math.exp(row.amplification) for row in held.rows))
        difference = edge.result.difference
        size = max(difference.relative, RESOLUTION)
        regressors = _regressors(_signs(edge.source), difference.relative)
        left, deviations, limits = [], [], []
        # rows that an index moved are other rows of the same size, which is a gain of −ε²/2 on average
        curvature = difference.relative**2 if edge.moved else 0.0
        for fit, value, resolution in zip(held.fits(), (difference.gain, difference.bias), _resolution(edge)):
            left.append(fit.left(value, regressors))
            deviations.append(fit.expected(size, edge.tokens, resolution))
            quantile = student(level / 4, _freedom(_tail(self.excess(edge.key[0])), fit.freedom))
            limits.append(quantile * deviations[-1] + curvature)
        return Limits(
            relative=alpha * p, gain=limits[0], bias=limits[1], origin=f"calibration, {n} samples",
            gain_left=left[0], bias_left=left[1],
            gain_deviation=None if edge.moved else deviations[0], bias_deviation=None if edge.moved else deviations[1],
        )  # fmt: skip

    def together(self, key: tuple[str, ...], name: str, weights: list[float], sums: int) -> float:
        """Limit of the sum of the rests of one key, in standard deviations of a sum of independent ones.

        Args:
            name: ``gain`` or ``bias``.
            weights: 1 / variance of the rests that were added up.
            sums: how many such sums the comparison has.
        """
        held = self.samples[key]
        fit = held.fits()[("gain", "bias").index(name)]
        # the fourth cumulant of a weighted sum, with weights that make it a mean: Σw² σ⁴ κ / (Σw σ²)² for w = 1/σ²
        excess = self.excess(key[0]) / (sum(weights) ** 2 / sum(w * w for w in weights))
        shared = (1.0 - fit.drift**-2) ** 2
        freedom = _freedom(_tail(excess), fit.freedom, fit.pairs / shared if shared else math.inf)
        level = FALSE_ALARM / len(FAMILIES) / sums / 2
        return student(level, freedom) * fit.drift * math.sqrt(1 + len(weights) / len(held.rows))


@functools.lru_cache(maxsize=4096)
def _normal(level: float) -> float:
    """Quantile of the standard normal distribution that is exceeded with probability ``level``."""
    return -NormalDist().inv_cdf(level)


@functools.lru_cache(maxsize=4096)
def student(level: float, freedom: float) -> float:
    """Quantile of Student's t that is exceeded with probability ``level``.

    The transformation of Wallace, Annals of Mathematical Statistics 30 (1959), 1124: z (8ν + 1) / (8ν + 3) =
    √(ν ln(1 + t²/ν)). Within 1 % for ν ≥ 12 and any level down to 1e-7, and above the true value below that.
    """
    z = _normal(level) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(z * z / freedom))


def _tail(excess: float) -> float:
    """Degrees of freedom of the Student distribution with this excess kurtosis, 6 / (ν − 4)."""
    return 4.0 + 6.0 / excess


def _freedom(*freedoms: float) -> float:
    """Of a deviation that is uncertain for several reasons: their relative variances, 2/ν each, add up."""
    return 1.0 / sum(1.0 / freedom for freedom in freedoms)


def _largest_count(mean: float, level: float) -> float:
    """Of a Poisson number, but for probability ``level``; normal where that is all the same."""
    if mean > 1e4:
        return mean + _normal(level) * math.sqrt(mean)
    return float(_most(math.inf, max(mean, 1e-12), level))


def _most(shape: float, mean: float, level: float) -> int:
    """Largest count that is reached with probability ``level`` or more: negative binomial, Poisson for shape ∞.

    Behind the mean each term is less than the one before by a ratio that falls, so the rest is less than a geometric
    series.
    """
    poisson = shape == math.inf
    count = int(mean) + 1
    log_term = count * math.log(mean) - mean - math.lgamma(count + 1)
    if not poisson:
        log_term += mean - (shape + count) * math.log1p(mean / shape)
        log_term += math.lgamma(shape + count) - math.lgamma(shape) - count * math.log(shape)
    while True:
        ratio = mean / (count + 1) if poisson else (shape + count) / (count + 1) * mean / (shape + mean)
        if math.exp(log_term) < level * (1.0 - ratio):
            return count - 1
        log_term += math.log(ratio)
        count += 1


def _fit(rows: list[Sample], name: str) -> _Fit:
    """Least squares of a signed part on the source's gain and bias and on ε_s² and ε², weighted by 1/deviation.

    A ridge keeps regressors that vary little from fitting noise. Its weight is that of one sample times the share of
    the variance that is left unexplained, which is the prior that what each regressor explains is about as large as
    the whole. σ is found by moments: the rest squared is σ² ε²/tokens + δ² on average.
    """
    n = len(rows)
    y = np.array([getattr(row, name) for row in rows])
    x = np.array([row.regressors for row in rows])
    own = np.array([row.relative / math.sqrt(row.tokens) for row in rows])
    resolution = np.array([getattr(row, f"{name}_resolution") for row in rows])
    deviation, fitted, ridge = 1.0, 0, 1.0
    coefficients, leverage = np.zeros(x.shape[1]), np.zeros(n)
    for _ in range(ROUNDS):
        variance = (deviation * own) ** 2 + resolution**2
        weight = 1.0 / np.sqrt(variance)
        scaled = x * weight[:, None]
        size = np.sqrt((scaled**2).mean(0))
        used = size > 0.0
        fitted = int(used.sum()) if n >= 2 * FEWEST else 0
        if fitted:
            scaled = scaled[:, used] / size[used]
            inner = scaled.T @ scaled + ridge * np.eye(fitted)
            coefficients[used] = np.linalg.solve(inner, scaled.T @ (y * weight)) / size[used]
            leverage = np.einsum("ij,ji->i", scaled, np.linalg.solve(inner, scaled.T))
        rest = y - x @ coefficients
        whole = float((y * weight) @ (y * weight))
        ridge = min(1.0, float((rest * weight) @ (rest * weight)) / whole) if whole > 0.0 else 1.0
        above = rest**2 * n / max(1, n - fitted) - resolution**2
        squared = float((above / variance).sum() / (own**2 / variance).sum())
        deviation = math.sqrt(max(squared, RESOLUTION**2))
    variance = (deviation * own) ** 2 + resolution**2
    pairs = sorted({row.pair for row in rows})
    member = np.searchsorted(pairs, [row.pair for row in rows])
    totals = np.bincount(member, rest / variance) ** 2 / np.bincount(member, 1.0 / variance)
    drift = max(1.0, math.sqrt(float(totals.mean())))
    fourth = float((rest**4 / (variance * (1.0 - leverage).clip(min=1 / n)) ** 2).sum())
    return _Fit(coefficients, deviation, max(1, n - fitted), fourth, drift, len(pairs))


def _resolution(edge: Edge) -> tuple[float, float]:
    """δ of gain and bias: none where the difference was summed up itself."""
    pair = edge.result
    if pair.difference.detail == "tensor" or pair.identity is None:
        return 0.0, 0.0
    size, mean, _, _, count = pair.identity
    return signed_resolution(size, mean, count)


def _signs(source: Difference | None) -> tuple[float, float, float]:
    return (0.0, 0.0, 0.0) if source is None else (source.gain, source.bias, source.relative)


def _regressors(source: tuple[float, float, float], relative: float) -> tuple[float, ...]:
    gain, bias, error = source
    return gain, bias, error**2, relative**2


def _rows(edge: Edge) -> int:
    return max(1, math.prod(edge.result.shape))


def moves_of(edge: Edge) -> tuple[float, float]:
    """How many choices of an index moved, and its exposure: the sources' error times the number of choices."""
    return edge.result.difference.relative**2 / 2.0 * _rows(edge), edge.error * _rows(edge)


def rows_of(edge: Edge) -> tuple[float, float]:
    """How many rows of a result are others, as ε² times all of them, and the exposure of the index that picked them."""
    return edge.result.difference.relative**2 * edge.tokens, edge.index.error * edge.tokens
