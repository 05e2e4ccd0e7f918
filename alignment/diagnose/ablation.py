"""What each change does to the curve: one at a time, and all together, on the same prompts with the same seeds.

A factor is a set of overrides. Its effect is the difference of the curve's level (mean of the last quarter of the
steps) between runs that share prompts and seed, so what the draw of a seed does to both cancels; the interval is
Student's over the seeds. In the full factorial the main effect of a factor is its mean effect over all settings of the
others, and the interaction of two is how much the effect of one depends on the other (Box, Hunter and Hunter,
*Statistics for Experimenters*, chapter 5).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from alignment.errors import InputError

CONFIDENCE = 0.95
TAIL = 4
"""The level of a curve is the mean over its last ``1/TAIL``."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A named change: overrides that are applied together."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of a factor (or the interaction of two) on the level, with its interval over the seeds.

    ``low`` and ``high`` are infinite where there is one seed only. ``decided`` is whether the interval leaves zero out.
    """

    name: str
    value: float
    low: float
    high: float
    seeds: int

    @property
    def decided(self) -> bool:
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict:
        return {**asdict(self), "decided": self.decided}


def parse_factor(text: str) -> Factor:
    """``name:key=value[,key=value…]``.

    Raises:
        InputError: no name, or nothing that is an override.
    """
    name, separator, changes = text.partition(":")
    overrides = tuple(part.strip() for part in changes.split(",") if part.strip())
    if not separator or not name.strip() or not overrides or not all("=" in part for part in overrides):
        raise InputError("a factor is a name and overrides", where="--factor", expected="name:key=value", found=text)
    return Factor(name=name.strip(), overrides=overrides)


def designs(factors: Sequence[Factor], *, full: bool) -> list[frozenset[str]]:
    """The settings to run, by the factors that are on: the base first, then one at a time or every combination.

    Raises:
        InputError: no factor, two of one name, or more than can be crossed.
    """
    names = [factor.name for factor in factors]
    if not names or len(set(names)) != len(names):
        raise InputError("factors have names of their own", where="--factor", found=", ".join(names) or "none")
    if not full:
        return [frozenset(), *(frozenset({name}) for name in names)]
    if len(names) > 6:
        raise InputError("too many factors to cross", where="--full", expected="at most 6", found=len(names))
    return [
        frozenset(name for name, on in zip(names, setting) if on)
        for setting in sorted(itertools.product((False, True), repeat=len(names)), key=sum)
    ]


def run_designs(
    factors: Sequence[Factor],
    seeds: Sequence[int],
    *,
    full: bool,
    level: Callable[[frozenset[str], tuple[str, ...], int], float],
) -> dict[tuple[frozenset[str], int], float]:
    """The level of the curve of every setting and seed; ``level`` runs one, given the factors, overrides and seed."""
    by_name = {factor.name: factor for factor in factors}
    return {
        (setting, seed): level(setting, tuple(o for name in sorted(setting) for o in by_name[name].overrides), seed)
        for setting in designs(factors, full=full)
        for seed in seeds
    }


def effects(
    factors: Sequence[Factor], seeds: Sequence[int], levels: Mapping[tuple[frozenset[str], int], float], *, full: bool
) -> list[Effect]:
    """The effect of every factor, and in the full factorial of every pair's interaction."""
    names = [factor.name for factor in factors]
    settings = designs(factors, full=full)
    found = []
    for name in names:
        pairs = [(s, s | {name}) for s in settings if name not in s and s | {name} in settings]
        found.append(_effect(name, seeds, lambda seed: _mean(levels[b, seed] - levels[a, seed] for a, b in pairs)))
    if full:
        for one, other in itertools.combinations(names, 2):
            rest = [s for s in settings if not s & {one, other}]

            def interaction(seed: int) -> float:
                return _mean(
                    (
                        levels[s | {one, other}, seed]
                        - levels[s | {other}, seed]
                        - levels[s | {one}, seed]
                        + levels[s, seed]
                    )
                    / 2
                    for s in rest
                )

            found.append(_effect(f"{one} × {other}", seeds, interaction))
    return found


def curve_level(values: Sequence[float]) -> float:
    """The mean over the last quarter of a curve (its last value where there are fewer than four).

    Raises:
        InputError: an empty curve, or a value that is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise InputError("the curve is empty or not finite", where="ablation")
    return _mean(values[-max(1, len(values) // TAIL) :])


def _effect(name: str, seeds: Sequence[int], difference: Callable[[int], float]) -> Effect:
    from scipy import stats

    values = [difference(seed) for seed in seeds]
    mean, count = _mean(values), len(values)
    if count < 2:
        return Effect(name=name, value=mean, low=-math.inf, high=math.inf, seeds=count)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1) / count)
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * deviation
    return Effect(name=name, value=mean, low=mean - margin, high=mean + margin, seeds=count)


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)
