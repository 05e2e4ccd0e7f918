"""What a night shows only beside the nights before it: flaky checks, checks that stopped running, drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from alignment.numerics.verdict import Outcome

if TYPE_CHECKING:
    from alignment.report.history import Night

LEAST_SPREAD = 0.01
"""The spread of a budget's use is taken as one hundredth of the budget where it is less: deterministic kernels repeat
their error to the bit, and nobody has to know of a change of a thousandth."""

NOT_RUN = Outcome.UNAVAILABLE.value
_JUDGED = {o.value for o in (Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE)}


@dataclass(frozen=True, kw_only=True)
class Concern:
    """Something the last night shows only beside the nights before it."""

    kind: str
    check: str
    detail: str


def name_of(check: str, subject: str, device: str) -> str:
    return f"{check} [{subject} on {device}]"


def flaky(name: str, told: Mapping[str, str], nights: Sequence[Night]) -> list[Concern]:
    """Another judgement on the same stack, commit and chip. An error judges nothing; it pages by itself."""
    last = nights[-1]
    if told[last.run] not in _JUDGED or not names_its_code(last.commit):
        return []
    alike = [
        n for n in nights[:-1]
        if (n.stack, n.commit) == (last.stack, last.commit) and told.get(n.run, NOT_RUN) in _JUDGED
    ]  # fmt: skip
    others = [n for n in alike if told[n.run] != told[last.run]]
    if not others:
        return []
    other = others[-1]
    detail = f"{told[last.run]} tonight, {told[other.run]} in {other.among(nights)} of the same commit, stack and chip"
    return [Concern(kind="flaky", check=name, detail=detail)]


def names_its_code(commit: str) -> bool:
    """Two nights of one dirty commit may be of different code."""
    return commit not in ("", "unknown") and not commit.endswith("-dirty")


def missing(told: Mapping[tuple[str, str, str], Mapping[str, str]], nights: Sequence[Night]) -> list[Concern]:
    """Checks that ran some night before and not this one, until a person has accepted a night without them.

    A check that is skipped, or whose device or subject is unavailable, does not run, and one that was an error did not
    either: what its night did not come to is no check that was there.
    """
    last = nights[-1]
    found = []
    for key, of_check in sorted(told.items()):
        if of_check.get(last.run, NOT_RUN) != NOT_RUN:
            continue
        ran = [place for place, night in enumerate(nights) if of_check.get(night.run) in _JUDGED]
        if not ran:
            continue
        without = nights[ran[-1] + 1 :]
        if not any(night.accepted for night in without):
            ago = "the night before" if len(without) == 1 else f"{len(without)} nights ago"
            now = "is skipped or unavailable" if last.run in of_check else "not"
            found.append(Concern(kind="missing", check=name_of(*key), detail=f"ran {ago} and {now} this night"))
    errors = sum(of_check.get(last.run) == Outcome.ERROR.value for of_check in told.values())
    if errors and len(found) > 1:
        detail = f"did not run this night, in which {errors} were errors; the first is {found[0].check}"
        return [Concern(kind="missing", check=f"{len(found)} checks", detail=detail)]
    return found


def drift(values: Mapping[str, float], nights: Sequence[Night], *, two_sided: bool, alarm: float) -> str:
    """A CUSUM since the accepted nights that calibrate it (Page 1954, Biometrika 41); what it says, "" for nothing.

    ``values`` are by night: shares of a budget, of which more is worse, or values that are watched on both sides. The
    slack grows by the standard error of the calibrating mean and the spread by its own, so that ten nights alarm no
    more often than a hundred: of independent nights one series in ten alarms falsely within 190 nights. A person who
    accepts a night that drifted takes it as the new normal: what came before it calibrates no longer.
    """
    # A night that does not count is none of the drift; the last is judged whatever it said.
    last = nights[-1]
    counted = [n for n in nights[:-1] if n.counts and n.run in values]
    series = [values[n.run] for n in counted]
    start = 0
    for place, night in enumerate(counted):
        if night.accepted and _sum(series[start:place], series[place], two_sided=two_sided, alarm=alarm) is not None:
            start = place
    found = _sum(series[start:], values[last.run], two_sided=two_sided, alarm=alarm)
    if found is None:
        return ""
    middle, reached = found
    now = values[last.run]
    by = f"CUSUM {reached:.1f} σ, alarm at {alarm:.1f}"
    if two_sided:
        return f"moved from {middle:.4g} to {now:.4g}: {by}"
    return f"budget used rose from {middle:.0%} to {now:.0%}: {by}"


def _sum(series: Sequence[float], now: float, *, two_sided: bool, alarm: float) -> tuple[float, float] | None:
    """Mean of the calibration and the sum that was reached, where that is an alarm."""
    from alignment.numerics.curves import CUSUM_HISTORY, CUSUM_SLACK

    if len(series) < CUSUM_HISTORY:
        return None
    calibration = series[: max(CUSUM_HISTORY, len(series) // 2)]
    nights = len(calibration)
    middle, spread = fmean(calibration), stdev(calibration) * (1 + 1 / math.sqrt(2 * (nights - 1)))
    if not two_sided:
        spread = max(spread, LEAST_SPREAD)
    if spread == 0.0:
        return None  # a value that nothing bounds and that never moved: there is no measure for how far it did now
    slack = CUSUM_SLACK + 1 / math.sqrt(nights)
    up = down = 0.0
    for value in (*series[len(calibration) :], now):
        score = (value - middle) / spread
        up, down = max(0.0, up + score - slack), max(0.0, down - score - slack)
    reached = max(up, down) if two_sided else up
    return (middle, reached) if reached >= alarm else None
