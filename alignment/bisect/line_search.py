"""The step of a line of stacks that turns low into high: halves, keeps clear of what cannot be measured, any number
at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alignment.bisect.bayesian import Rates, search_noisy
from alignment.bisect.stack import Stack
from alignment.bisect.zones import Judgement, Zone

Judge = Callable[[Sequence[Stack]], Sequence[Judgement]]
# After so many unmeasurable stacks in a row the search keeps clear of the stretch they make, in place of walking
# through it.
STRETCH = 2
# So many places inside a stretch whose borders are known are tried before it is taken as unmeasurable.
INSIDE = 3


@dataclass
class Step:
    """Two neighbours on a line: the last low and the first high stack, and what lies between them unmeasured."""

    low: Stack
    high: Stack
    skipped: list[Stack] = field(default_factory=list)
    line: int = 0
    skips: int = 0
    held: float = 1.0

    def bound(self, parallel: int = 1) -> int:
        """The most results this search may have taken.

        ⌈log2 n⌉ for n candidate steps, and two for each unmeasurable stack: itself, and one step aside from the
        middle. With ``parallel`` probes at once it is that many rounds of a (parallel + 1)-fold division.
        """
        return rounds(self.line, parallel) * parallel + 2 * self.skips * parallel


def rounds(candidates: int, parallel: int = 1) -> int:
    """⌈log_{k+1} n⌉ without rounding errors."""
    count, reach = 0, 1
    while reach < candidates:
        reach *= parallel + 1
        count += 1
    return count


def search_line(
    points: list[Stack],
    judge: Judge,
    low_zones: frozenset[Zone],
    *,
    parallel: int = 1,
    patience: float = math.inf,
    rebuild: Callable[[Stack, Stack, frozenset[str]], list[Stack]] | None = None,
    weigh: Callable[[Stack, Stack], float] | None = None,
) -> Step:
    """Where a line that begins low and ends high turns.

    A stack that cannot be measured costs itself and at most one step aside of the middle. Where ``rebuild`` is given,
    another line between the same two stacks is taken instead, which avoids it. After ``patience`` unmeasurable ones
    in a row the search stops as it stands: where there is a finer line to follow, nothing is lost by it. ``weigh``
    says how much a step of the line holds (its commits): of the divisions that keep the bound the one that halves the
    weight is taken.
    """
    step = Step(low=points[0], high=points[-1], line=len(points) - 1)
    skipped: set[str] = set()
    in_a_row = inside = 0
    while in_a_row < patience:
        dead = [i for i in range(1, len(points) - 1) if points[i].digest in skipped]
        live = [i for i in range(1, len(points) - 1) if points[i].digest not in skipped]
        around = _around(live, dead)
        if not around:
            inside += 1
        if not live or inside > INSIDE:
            break
        stuck = parallel == 1 and in_a_row >= STRETCH and len(dead) >= STRETCH and around
        chosen = (
            _aside(around, dead) if stuck else choose(around or live, parallel, _weights(points, around or live, weigh))
        )
        answers = dict(zip(chosen, judge([points[i] for i in chosen])))
        fresh = [i for i, a in answers.items() if a.zone is Zone.SKIP]
        skipped.update(points[i].digest for i in fresh)
        step.skips += len(fresh)
        in_a_row = in_a_row + len(fresh) if len(fresh) == len(answers) else 0
        low, high = 0, len(points) - 1
        for i in sorted(set(answers) - set(fresh)):
            if answers[i].zone in low_zones:
                low = i
            else:
                high = i
                break
        points = points[low : high + 1]
        if rebuild is not None and fresh:
            points = rebuild(points[0], points[-1], frozenset(skipped))
    step.low, step.high = points[0], points[-1]
    step.skipped = points[1:-1]
    return step


def choose(live: Sequence[int], count: int, weights: Sequence[float] | None = None) -> list[int]:
    """The ``count`` places that divide the measurable places of a line evenly: the middle one, where it is one.

    ``weights`` are those of the ``len(live) + 1`` steps between the places. They move a single place off the middle
    only so far that neither part needs more halvings than the larger half does.
    """
    if count >= len(live):
        return list(live)
    if count > 1:
        return [live[(len(live) * s) // (count + 1)] for s in range(1, count + 1)]
    steps = len(live) + 1
    most = 1 << (rounds(steps) - 1)
    allowed = [r for r in range(len(live)) if r + 1 <= most and steps - r - 1 <= most]
    total = list(itertools.accumulate(weights or [1.0] * steps))
    return [live[min(allowed, key=lambda r: (abs(2 * total[r] - total[-1]), abs(2 * (r + 1) - steps)))]]


def _weights(points: Sequence[Stack], live: Sequence[int], weigh) -> list[float] | None:
    if weigh is None:
        return None
    places = [0, *live, len(points) - 1]
    return [sum(weigh(points[i], points[i + 1]) for i in range(a, b)) for a, b in zip(places, places[1:])]


def _around(live: Sequence[int], dead: Sequence[int]) -> list[int]:
    """Measurable places outside the stretch that unmeasurable ones span: what lies between two of those is taken as
    one too.
    """
    if len(dead) < STRETCH:
        return list(live)
    return [i for i in live if not dead[0] < i < dead[-1]]


def _aside(around: Sequence[int], dead: Sequence[int]) -> list[int]:
    """The middle of the longer way from the stretch to an end of the line."""
    below, above = [i for i in around if i < dead[0]], [i for i in around if i > dead[-1]]
    return choose(max(below, above, key=len), 1)


def search_line_noisy(
    points: list[Stack],
    sample: Judge,
    low_zones: frozenset[Zone],
    rates: Rates,
    *,
    parallel: int,
    confidence: float,
) -> Step:
    """The same where the test itself flips: measured until one step holds ``confidence`` of the posterior."""
    step = Step(low=points[0], high=points[-1], line=len(points) - 1)
    unmeasurable: set[str] = set()

    def results(stacks: list[Stack]) -> list[bool | None]:
        told: list[bool | None] = []
        for stack, answer in zip(stacks, sample(stacks)):
            if answer.zone is Zone.SKIP:
                unmeasurable.add(stack.digest)
                step.skips += 1
                told.append(None)
            else:
                told.append(answer.zone not in low_zones)
        return told

    low, high, step.held = search_noisy(points, results, rates, parallel=parallel, confidence=confidence)
    step.low, step.high = points[low], points[high]
    step.skipped = [p for p in points[low + 1 : high]]
    return step
