"""How much difference an edge may add: unit roundoff, propagated error, and what a calibration pair measured.

See ``docs/compare.md`` for the model and its derivation. In short, with ε the relative difference of a result, ε_s the
largest one among its sources and u the rounding of the result's dtype on two sides::

    predicted scale   p = √(ε_s² + u²)
    amplification     α = ε / p            (log-normal over edges of one kind)
    signed share      γ = ⟨t−g, g⟩/‖g‖²/p  (gain), β = (mean t − mean g)/rms g/p (bias); centred on 0 for rounding
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import NormalDist

from alignment.diagnose.difference import RESOLUTION, rounding
from alignment.diagnose.module_graph import Edge

FALSE_ALARM = 1e-3
"""Probability that a comparison of two equal computations names a divergence, over all its tests together."""

DEFAULT_AMPLIFICATION = {"own": 4.0, "glue": 8.0, "gradient own": 8.0, "gradient glue": 8.0}
DEFAULT_AMPLIFICATION |= {"loss": 16.0, "parameter gradient": 16.0, "copy": 1.0, "value": 16.0}
"""Largest growth of the relative error over one edge that is taken for granted without a calibration."""

NOISE_FORMAT = "alignment-noise-1"

NEAR_TIES = 4.0
"""Share of choices that move per unit of relative error of the scores, without a calibration."""

PRIOR_SAMPLES = 4
"""Weight of the spread that all edges share against the one of edges of this key, in samples."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What ε, |gain| and |bias| may be at most at one edge, and where that comes from."""

    relative: float
    gain: float
    bias: float
    origin: str


def scale_of(edge: Edge) -> float:
    """p: what the sources' error and one rounding on each side predict for the result, before amplification."""
    detail = edge.result.difference.detail
    return math.hypot(edge.error, rounding(edge.result.dtype), RESOLUTION if detail == "sketch" else 0.0)


@dataclass
class _Samples:
    amplification: list[float] = field(default_factory=list)
    gain: list[float] = field(default_factory=list)
    bias: list[float] = field(default_factory=list)


class NoiseModel:
    """Limits for edges; without calibration from :data:`DEFAULT_AMPLIFICATION` and the number of samples."""

    def __init__(self, tests: int = 1) -> None:
        self.expect_tests(tests)
        self.samples: dict[tuple[str, ...], _Samples] = defaultdict(_Samples)
        self._spread: float | None = None
        self.choice_rates: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def expect_tests(self, tests: int) -> None:
        """Share the probability of a false alarm among this many tests (Bonferroni)."""
        self.z = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * max(tests, 1)))

    def to_dict(self) -> dict:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        edges = [
            {"key": list(key), "amplification": held.amplification, "gain": held.gain, "bias": held.bias}
            for key, held in self.samples.items()
        ]
        rates = [{"key": list(key), "moved": moved, "exposure": seen} for key, (moved, seen) in self.choice_rates.items()]
        return {"format": NOISE_FORMAT, "edges": edges, "choices": rates}

    @classmethod
    def from_dict(cls, data: dict) -> NoiseModel:
        """The inverse of :meth:`to_dict`; KeyError or ValueError for anything else."""
        if data["format"] != NOISE_FORMAT:
            raise ValueError(f"format {data['format']!r}, expected {NOISE_FORMAT!r}")
        model = cls()
        for edge in data["edges"]:
            parts = ([float(x) for x in edge[name]] for name in ("amplification", "gain", "bias"))
            model.samples[tuple(map(str, edge["key"]))] = _Samples(*parts)
        for rate in data["choices"]:
            model.choice_rates[tuple(map(str, rate["key"]))] = [float(rate["moved"]), float(rate["exposure"])]
        return model

    def add(self, other: NoiseModel) -> None:
        """Take what ``other`` learned as well."""
        for key, held in other.samples.items():
            mine = self.samples[key]
            mine.amplification += held.amplification
            mine.gain += held.gain
            mine.bias += held.bias
        for key, (moved, exposure) in other.choice_rates.items():
            self.choice_rates[key][0] += moved
            self.choice_rates[key][1] += exposure
        self._spread = None

    def learn(self, edge: Edge) -> None:
        """Take one edge of a benign pair into account."""
        difference = edge.result.difference
        if not math.isfinite(difference.relative) or edge.unusable:
            return
        if edge.unordered or edge.kind in ("parameter", "attribute", "input", "copy"):
            return
        if edge.result.discrete:
            if edge.error > 0.0:
                held = self.choice_rates[edge.key]
                held[0] += _moved(edge)
                held[1] += edge.error * _rows(edge)
            return
        p = scale_of(edge)
        if p == 0.0:
            return
        self._spread = None
        for key in _keys(edge):
            held = self.samples[key]
            if difference.relative > RESOLUTION:
                held.amplification.append(math.log(difference.relative / p))
            held.gain.append(abs(difference.gain) / p)
            held.bias.append(abs(difference.bias) / p)

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
        most = mean + self.z * math.sqrt(mean) + self.z**2 / 2
        return math.sqrt(2.0 * min(1.0, most / _rows(edge)))

    def limits(self, edge: Edge) -> Limits:
        """The bounds of one edge."""
        if edge.twin is not None and not edge.unordered:
            p = math.hypot(rounding(edge.result.dtype), RESOLUTION)
            return Limits(relative=p, gain=p, bias=p, origin="a copy of a source")
        p = scale_of(edge)
        if edge.unordered:
            alpha = DEFAULT_AMPLIFICATION.get(edge.kind, 1.0)
            return Limits(relative=alpha * p, gain=math.inf, bias=math.inf, origin="rows in another order")
        for key in _keys(edge):
            held = self.samples.get(key)
            if held is not None and len(held.gain) >= 2:
                return self._calibrated(p, held)
        share = self.z / math.sqrt(max(1, math.prod(edge.result.shape[:-1])))
        alpha = DEFAULT_AMPLIFICATION.get(edge.kind, 1.0)
        return Limits(
            relative=alpha * p,
            gain=alpha * p * min(1.0, share) + (alpha * p) ** 2,
            bias=alpha * p * min(1.0, share) + (alpha * p) ** 2,
            origin=f"{alpha:g} × √(source² + rounding²)",
        )

    @property
    def spread(self) -> float:
        """Standard deviation of ln α within a key, over all keys: the prior of the spread of each."""
        if self._spread is None:
            squares = free = 0.0
            for held in self.samples.values():
                a = held.amplification
                if len(a) >= 2:
                    centre = sum(a) / len(a)
                    squares += sum((x - centre) ** 2 for x in a)
                    free += len(a) - 1
            self._spread = math.sqrt(squares / free) if free else 0.5
        return self._spread

    def _calibrated(self, p: float, held: _Samples) -> Limits:
        a = held.amplification
        n = len(a)
        centre = sum(a) / n if n else 0.0
        squares = sum((x - centre) ** 2 for x in a)
        spread = math.sqrt((squares + PRIOR_SAMPLES * self.spread**2) / (max(n - 1, 0) + PRIOR_SAMPLES))
        alpha = math.exp(centre + self.z * spread * math.sqrt(1 + 1 / max(n, 1)))
        gain = self._half_normal(held.gain)
        bias = self._half_normal(held.bias)
        return Limits(
            relative=alpha * p,
            gain=gain * p + (alpha * p) ** 2,
            bias=bias * p + (alpha * p) ** 2,
            origin=f"calibration, {n} samples",
        )

    def _half_normal(self, values: list[float]) -> float:
        return self.z * math.sqrt(sum(v * v for v in values) / len(values) * (1 + 1 / len(values)))


def _rows(edge: Edge) -> int:
    return max(1, math.prod(edge.result.shape))


def _moved(edge: Edge) -> float:
    return edge.result.difference.relative ** 2 / 2.0 * _rows(edge)


def _keys(edge: Edge) -> Iterable[tuple[str, ...]]:
    yield edge.key
