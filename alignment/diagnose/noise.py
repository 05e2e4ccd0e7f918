"""How much difference an edge may add: unit roundoff, propagated error, and what a calibration pair measured.

See ``docs/compare.md`` for the model and its derivation. In short, with ε the relative difference of a result, ε_s the
largest one among its sources and u the rounding of the result's dtype on two sides::

    predicted scale   p = √(ε_s² + u²)
    amplification     α = ε / p, log-normal over the edges of one kind
    signed cosines    c_g = ⟨t − g, g⟩ / (‖t − g‖ ‖g‖),  c_b = ⟨t − g, 1⟩ / (‖t − g‖ √n)

For rounding noise the cosines are normal around what the sign of the sources' own differences and the curvature term
ε² explain; a systematic fault is far off, however small it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from alignment.diagnose.difference import RESOLUTION, Difference, rounding
from alignment.diagnose.module_graph import Edge

FALSE_ALARM = 1e-3
"""Probability that a comparison of two equal computations names a divergence, over all its tests together."""

DEFAULT_AMPLIFICATION = {"own": 4.0, "glue": 8.0, "gradient own": 8.0, "gradient glue": 8.0}
DEFAULT_AMPLIFICATION |= {"loss": 16.0, "parameter gradient": 16.0, "copy": 1.0, "value": 16.0}
"""Largest growth of the relative error over one edge that is taken for granted without a calibration."""

_DEFAULT_ORIGIN = {alpha: f"{alpha:g} × √(source² + rounding²)" for alpha in DEFAULT_AMPLIFICATION.values()}

NOISE_FORMAT = "alignment-noise-1"

NEAR_TIES = 4.0
"""Share of choices that move per unit of relative error of the scores, without a calibration."""

PRIOR_SAMPLES = 4
"""Weight of the spread that all edges share against the one of edges of this key, in samples."""

FEWEST = 4
"""Samples of a key below which the defaults are used."""

SUMS = 2.0**-20
"""What float32 sums over many elements, in another order on the other side, leave of the statistics of equal
tensors."""

TAIL = 0.3
"""Least deviation, in farthest samples: a limit of five deviations then lies half as far again, whatever the tail."""

OTHER_WEIGHTS = 1.25
"""Widening of single signed limits: coefficients depend on the weights, and in one of eight models that a calibration had
not seen a benign edge reached 1.05."""

_COPIED = ("parameter", "attribute", "input", "copy")


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


def scale_of(edge: Edge) -> float:
    """p: what the sources' error and one rounding on each side predict for the result, before amplification."""
    detail = edge.result.difference.detail
    return math.hypot(edge.error, rounding(edge.result.dtype), RESOLUTION if detail == "sketch" else 0.0)


@dataclass
class _Samples:
    """Rows of (ln α, ε, gain, bias, gain and bias of the source, number of the pair), and the fit."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    fitted: tuple[_Fit, _Fit] | None = None


@dataclass(frozen=True)
class _Fit:
    coefficients: np.ndarray
    deviation: float
    freedom: int

    def left(self, value: float, regressors: tuple[float, float, float]) -> float:
        """``value`` without what the regressors explain."""
        return value - float(self.coefficients @ regressors)


class NoiseModel:
    """Limits for edges; without calibration from :data:`DEFAULT_AMPLIFICATION` and the number of samples."""

    def __init__(self, tests: int = 1) -> None:
        self.expect_tests(tests)
        self.samples: dict[tuple[str, ...], _Samples] = defaultdict(_Samples)
        self._spread: float | None = None
        self._pair = 0
        self.choice_rates: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def expect_tests(self, tests: int) -> None:
        """Share the probability of a false alarm among this many tests (Bonferroni)."""
        self.z = _quantile(tests)

    def to_dict(self) -> dict:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        edges = [{"key": list(key), "rows": [list(row) for row in held.rows]} for key, held in self.samples.items()]
        rates = [
            {"key": list(key), "moved": moved, "exposure": seen} for key, (moved, seen) in self.choice_rates.items()
        ]
        return {"format": NOISE_FORMAT, "edges": edges, "choices": rates}

    @classmethod
    def from_dict(cls, data: dict) -> NoiseModel:
        """The inverse of :meth:`to_dict`; KeyError, TypeError or ValueError for anything else."""
        if data["format"] != NOISE_FORMAT:
            raise ValueError(f"format {data['format']!r}, expected {NOISE_FORMAT!r}")
        model = cls()
        for edge in data["edges"]:
            rows = [tuple(float(x) for x in row) for row in edge["rows"]]
            if any(len(row) != 7 or not all(map(math.isfinite, row)) for row in rows):
                raise ValueError(f"a sample of {edge['key']} is not seven finite numbers")
            model.samples[tuple(map(str, edge["key"]))] = _Samples(rows)
        for rate in data["choices"]:
            model.choice_rates[tuple(map(str, rate["key"]))] = [float(rate["moved"]), float(rate["exposure"])]
        return model

    def add(self, other: NoiseModel) -> None:
        """Take what ``other`` learned as well."""
        self.begin_pair()
        for key, held in other.samples.items():
            self.samples[key].rows += [(*row[:6], row[6] + self._pair) for row in held.rows]
            self.samples[key].fitted = None
        for key, (moved, exposure) in other.choice_rates.items():
            self.choice_rates[key][0] += moved
            self.choice_rates[key][1] += exposure
        self._spread = None

    def begin_pair(self) -> None:
        """What is learned from here on is of another pair than before."""
        seen = (int(row[6]) for held in self.samples.values() for row in held.rows)
        self._pair = 1 + max([self._pair, *seen])

    def learn(self, edge: Edge) -> None:
        """Take one edge of a benign pair into account."""
        difference = edge.result.difference
        if edge.unordered or edge.unusable or edge.kind in _COPIED or not math.isfinite(difference.relative):
            return
        if edge.result.discrete:
            if edge.error > 0.0:
                held = self.choice_rates[edge.key]
                held[0] += _moved(edge)
                held[1] += edge.error * _rows(edge)
            return
        p = scale_of(edge)
        if p == 0.0 or difference.relative <= RESOLUTION:
            return
        self._spread = None
        held = self.samples[edge.key]
        held.fitted = None
        gain, bias = _signs(edge.source)
        held.rows.append(
            (
                math.log(difference.relative / p),
                difference.relative,
                difference.gain,
                difference.bias,
                gain,
                bias,
                float(self._pair),
            )
        )

    def choices(self, edge: Edge) -> float:
        """Largest difference of an index, in the unit of :func:`~alignment.diagnose.difference.from_tensors`.

        The number of moved choices is Poisson with a mean in proportion to the sources' error. The mean is taken from
        the calibration (one more choice than was seen, since none need have been) or from :data:`NEAR_TIES`.
        """
        if edge.error <= RESOLUTION:
            return 0.0
        moved, exposure = self.choice_rates.get(edge.key, (0.0, 0.0))
        rate = (moved + 1.0) / exposure if exposure > 0.0 else NEAR_TIES
        mean = rate * edge.error * _rows(edge)
        # the upper quantile of Poisson by the first term of its Cornish-Fisher expansion
        most = mean + self.z * math.sqrt(mean) + (self.z**2 - 1) / 6 + 1
        return math.sqrt(2.0 * min(1.0, most / _rows(edge)))

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
            share, origin = self.z / math.sqrt(max(1, math.prod(edge.result.shape[:-1]))), _DEFAULT_ORIGIN[alpha]
        signed = math.inf if share == math.inf else alpha * p * min(1.0, share) + (alpha * p) ** 2 + SUMS
        return Limits(
            relative=alpha * p,
            gain=signed,
            bias=signed,
            origin=origin,
            gain_left=difference.gain,
            bias_left=difference.bias,
        )

    @property
    def spread(self) -> float:
        """Standard deviation of ln α within a key, over all keys: the prior of the spread of each."""
        if self._spread is None:
            squares = free = 0.0
            for held in self.samples.values():
                a = [row[0] for row in held.rows]
                if len(a) >= 2:
                    centre = sum(a) / len(a)
                    squares += sum((x - centre) ** 2 for x in a)
                    free += len(a) - 1
            self._spread = math.sqrt(squares / free) if free else math.log(2.0)
        return self._spread

    def _calibrated(self, edge: Edge, p: float, held: _Samples) -> Limits:
        n = len(held.rows)
        centre = sum(row[0] for row in held.rows) / n
        squares = sum((row[0] - centre) ** 2 for row in held.rows)
        freedom = n - 1 + PRIOR_SAMPLES
        spread = math.sqrt((squares + PRIOR_SAMPLES * self.spread**2) / freedom)
        alpha = math.exp(centre + self.student(freedom) * spread * math.sqrt(1 + 1 / n))
        if held.fitted is None:
            held.fitted = _fit(held.rows, 2), _fit(held.rows, 3)
        difference = edge.result.difference
        size = max(difference.relative, RESOLUTION)
        regressors = (*_signs(edge.source), difference.relative**2)
        left, deviations, limits = [], [], []
        for fit, value in zip(held.fitted, (difference.gain, difference.bias)):
            left.append(fit.left(value, regressors))
            deviations.append(fit.deviation * size)
            # rows that an index moved are other rows of the same size, which is a gain of −ε²/2 on average
            curvature = difference.relative**2 if edge.moved else 0.0
            limits.append(OTHER_WEIGHTS * self.student(fit.freedom) * fit.deviation * size + curvature + SUMS)
        return Limits(
            relative=alpha * p, gain=limits[0], bias=limits[1], origin=f"calibration, {n} samples",
            gain_left=left[0], bias_left=left[1],
            gain_deviation=None if edge.moved else deviations[0], bias_deviation=None if edge.moved else deviations[1],
        )  # fmt: skip

    def together(self, key: tuple[str, ...], column: int) -> float:
        """How much more the rests of a key, added up over a pair, spread than independent ones would; at least 1.

        One layer's noise runs on into the next, and every model has coefficients of its own.
        """
        held = self.samples[key]
        if held.fitted is None:
            return 1.0
        fit = held.fitted[column - 2]
        sums: dict[float, list[float]] = {}
        for row in held.rows:
            rest = fit.left(row[column], (row[4], row[5], row[1] ** 2))
            deviation = fit.deviation * max(row[1], RESOLUTION)
            total = sums.setdefault(row[6], [0.0, 0.0])
            total[0] += rest / deviation**2
            total[1] += 1 / deviation**2
        squares = [total**2 / weight for total, weight in sums.values()]
        return max(1.0, math.sqrt(sum(squares) / len(squares)))

    def student(self, freedom: int, tests: int | None = None) -> float:
        """Quantile of Student's t at the level of :attr:`z` (or of ``tests`` tests), by the first term of its expansion
        in 1/freedom (Abramowitz and Stegun 26.7.5)."""
        z = self.z if tests is None else _quantile(tests)
        return z * (1 + (z**2 + 1) / (4 * max(freedom, 1)))


def _quantile(tests: int) -> float:
    """Two-sided; half of the probability goes to single edges, half to what several edges say together."""
    return NormalDist().inv_cdf(1 - 0.5 * FALSE_ALARM / (2 * max(tests, 1)))


def _fit(rows: list[tuple[float, ...]], column: int) -> _Fit:
    """Least squares of a signed measure on the source's gain and bias and on ε², each sample weighted by 1/ε.

    A ridge of one sample's weight keeps regressors that vary little from fitting noise.
    """
    data = np.array(rows)
    weight = 1.0 / data[:, 1]
    y = data[:, column] * weight
    x = np.column_stack([data[:, 4], data[:, 5], data[:, 1] ** 2]) * weight[:, None]
    size = np.sqrt((x**2).mean(0))
    used = size > 0.0
    coefficients = np.zeros(3)
    n = len(rows)
    if n >= 2 * FEWEST and used.any():
        scaled = x[:, used] / size[used]
        inner = scaled.T @ scaled + np.eye(int(used.sum()))
        coefficients[used] = np.linalg.solve(inner, scaled.T @ y) / size[used]
    fitted = int((coefficients != 0.0).sum())
    rest = y - x @ coefficients
    freedom = max(1, n - fitted)
    deviation = max(math.sqrt(float(rest @ rest) / freedom), TAIL * float(np.abs(rest).max()))
    return _Fit(coefficients, max(deviation, RESOLUTION), freedom)


def _signs(source: Difference | None) -> tuple[float, float]:
    return (0.0, 0.0) if source is None else (source.gain, source.bias)


def _rows(edge: Edge) -> int:
    return max(1, math.prod(edge.result.shape))


def _moved(edge: Edge) -> float:
    return edge.result.difference.relative**2 / 2.0 * _rows(edge)
