"""Search when the test itself flips: a posterior over the candidates, the next probe by expected information."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

# Stop when one candidate holds this much of the posterior: the level the design asks for.
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How often the test lies: ``false_bad`` on a good stack, ``false_good`` on a bad one."""

    false_bad: float
    false_good: float

    @classmethod
    def pessimistic(cls, bad_of_good: int, good_runs: int, good_of_bad: int, bad_runs: int) -> Rates:
        """Rates from counts at the ends, by the rule of succession (a Beta(1, 1) prior's mean): never 0, above what
        was seen.
        """
        return cls(false_bad=(bad_of_good + 1) / (good_runs + 2), false_good=(good_of_bad + 1) / (bad_runs + 2))

    @property
    def informative(self) -> bool:
        """False when a bad result is as likely on a good stack as on a bad one."""
        return self.false_bad + self.false_good < 1.0


class EdgePosterior:
    """Which of ``edges`` steps of a line turns good into bad, given results that lie at known rates.

    Point ``i`` (1 … edges - 1) lies between edge ``i - 1`` and edge ``i``; it is bad when the culprit edge is below it.
    """

    def __init__(self, edges: int, rates: Rates) -> None:
        self.rates = rates
        self._log = np.full(edges, -math.log(edges))
        self._dead: set[int] = set()

    @property
    def mass(self) -> np.ndarray:
        """The posterior of each edge."""
        weights = np.exp(self._log - self._log.max())
        return weights / weights.sum()

    def update(self, point: int, bad: bool) -> None:
        """Takes in one result."""
        a, b = self.rates.false_bad, self.rates.false_good
        below, above = (1 - b, a) if bad else (b, 1 - a)
        self._log[:point] += math.log(below)
        self._log[point:] += math.log(above)

    def skip(self, point: int) -> None:
        """The point cannot be measured."""
        self._dead.add(point)

    def groups(self) -> list[range]:
        """Runs of edges that no measurable point separates."""
        borders = [0, *(p for p in range(1, len(self._log)) if p not in self._dead), len(self._log)]
        return [range(a, b) for a, b in zip(borders, borders[1:])]

    def best(self) -> tuple[range, float]:
        """The group of edges with most of the posterior, and how much."""
        mass = self.mass
        return max(((g, float(mass[g.start : g.stop].sum())) for g in self.groups()), key=lambda pair: pair[1])

    def credible(self) -> tuple[range, float]:
        """The shortest run of edges that holds :data:`CONFIDENCE`."""
        total = np.concatenate([[0.0], np.cumsum(self.mass)])
        n = len(self._log)
        for length in range(1, n + 1):
            start = int(np.argmax(total[length:] - total[: n - length + 1]))
            held = float(total[start + length] - total[start])
            if held >= CONFIDENCE:
                return range(start, start + length), held
        return range(n), 1.0

    def choose(self, count: int = 1) -> list[int]:
        """The measurable points whose result is expected to tell most, best first and at most ``count``.

        Further ones are taken at even shares of the posterior, so that simultaneous results do not repeat each other.
        """
        n = len(self._log)
        live = np.array([p for p in range(1, n) if p not in self._dead], dtype=int)
        if not len(live):
            return []
        below = np.cumsum(self.mass)[live - 1]
        a, b = self.rates.false_bad, self.rates.false_good
        gain = _entropy(below * (1 - b) + (1 - below) * a) - below * _entropy(b) - (1 - below) * _entropy(a)
        chosen = [int(live[int(np.argmax(gain))])]
        for share in (s / (count + 1) for s in range(1, count + 1)):
            near = int(live[int(np.argmin(np.abs(below - share)))])
            if len(chosen) < count and near not in chosen:
                chosen.append(near)
        return chosen


def _entropy(p):
    q = np.clip(p, 1e-12, 1 - 1e-12)
    return -(q * np.log2(q) + (1 - q) * np.log2(1 - q))


def probe_limit(edges: int, rates: Rates) -> int:
    """How many results a noisy search may take: four times what the capacity of the channel asks for.

    Each result carries at most the capacity of the binary channel with those rates, the candidates and the confidence
    need log2(edges) + log2(1 / (1 - confidence)) bits.
    """
    worst = max(rates.false_bad, rates.false_good)
    capacity = max(1.0 - float(_entropy(worst)), 0.05)
    return math.ceil(4 * (math.log2(max(edges, 2)) + math.log2(1 / (1 - CONFIDENCE))) / capacity)


def search_noisy(
    points: Sequence,
    sample: Callable[[list], list[bool | None]],
    rates: Rates,
    *,
    parallel: int = 1,
    confidence: float = CONFIDENCE,
    dead: Collection[int] = (),
) -> tuple[int, int, float]:
    """The step of the line ``points`` (first one good, last one bad) that turns good into bad.

    ``sample`` measures some points once more each: True for bad, False for good, None where it cannot be measured.

    Returns:
        The indices around the step, and the posterior that it lies there. Where the limit of probes is met first, the
        shortest run that holds the confidence.
    """
    edges = len(points) - 1
    posterior = EdgePosterior(edges, rates)
    for point in dead:
        posterior.skip(point)
    for _ in range(probe_limit(edges, rates)):
        group, held = posterior.best()
        if held >= confidence:
            return group.start, group.stop, held
        chosen = posterior.choose(parallel)
        if not chosen:
            break
        for point, bad in zip(chosen, sample([points[p] for p in chosen])):
            posterior.skip(point) if bad is None else posterior.update(point, bad)
    run, held = posterior.credible()
    return run.start, run.stop, held


def settle(
    sample: Callable[[], bool | None], rates: Rates, *, confidence: float = CONFIDENCE, limit: int = 25
) -> bool | None:
    """Is one stack bad? Measured again until the likelihood ratio decides (Wald's sequential test), or None."""
    log_odds, bar = 0.0, math.log(confidence / (1 - confidence))
    for _ in range(limit):
        bad = sample()
        if bad is None:
            return None
        a, b = rates.false_bad, rates.false_good
        log_odds += math.log((1 - b) / a) if bad else math.log(b / (1 - a))
        if abs(log_odds) >= bar:
            return log_odds > 0
    return None
