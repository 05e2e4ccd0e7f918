"""The two ends as clusters of values with one failure's signature: against them every other stack is judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from alignment.bisect.observation import Observation, Result, Signature, plain_number
from alignment.bisect.outcomes import BisectError, Ending
from alignment.bisect.zones import Judgement, Zone

# A value belongs to the end it is nearer to by three to one; the middle half of the gap is ambiguous.
NEAR = 0.25
# Where the ends lie more than a decade apart, and on one side of zero, distance is that of the logarithms.
DECADE = 10.0


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """What the ends measured: the range of values of each, the noise inside, and the signature of the bad one.

    ``verdicts`` is True where the probe itself says good or bad; then a pass is good wherever its value lies, and only
    failures are told apart.
    """

    good: tuple[float, float] | None = None
    bad: tuple[float, float] | None = None
    signature: Signature | None = None
    verdicts: bool = True

    def to_data(self) -> dict:
        data = asdict(self)
        for key in ("good", "bad"):
            data[key] = [plain_number(v) for v in data[key]] if data[key] is not None else None
        return data

    @classmethod
    def from_data(cls, data: Mapping) -> Clusters:
        data = dict(data)
        for key in ("good", "bad"):
            data[key] = tuple(float(v) for v in data[key]) if data.get(key) is not None else None
        data["signature"] = Signature(**data["signature"]) if data.get("signature") else None
        return cls(**data)

    def judge(self, seen: Observation) -> Judgement:
        """Where an observation belongs. Failures with another signature are skips, never bad."""
        if seen.result not in (Result.GOOD, Result.BAD, Result.MEASURED):
            return Judgement(zone=Zone.SKIP, reason=seen.reason or seen.result.value, detail=seen.detail)
        value = self._value(seen)
        if seen.result is Result.GOOD:
            return Judgement(zone=Zone.GOOD, value=value)
        place = self._place(value)
        if seen.result is Result.BAD and self.signature is not None:
            expected = next((f for f in seen.failures if f.check == self.signature.check), None)
            if expected is None and self.signature.check in seen.passed:
                return Judgement(zone=Zone.GOOD, value=value, detail="another check failed")
            if expected is None or not self.signature.matches(expected):
                other = expected or (seen.failures[0] if seen.failures else None)
                detail = f"failed as {other}, not as {self.signature}" if other else "the expected check did not run"
                return Judgement(zone=Zone.SKIP, value=value, reason="other-failure", detail=detail)
        if place is None:
            if seen.result is Result.MEASURED:
                return Judgement(
                    zone=Zone.SKIP, value=value, reason="nothing-measured", detail="the probe gave no value"
                )
            return Judgement(zone=Zone.BAD, value=value)
        if place < -1.0:
            detail = f"{value:.6g} lies on the other side of the good end"
            return Judgement(zone=Zone.SKIP, value=value, reason="other-failure", detail=detail)
        if place >= 1 - NEAR:
            return Judgement(zone=Zone.BAD, value=value)
        if place <= NEAR and seen.result is Result.MEASURED:
            return Judgement(zone=Zone.GOOD, value=value)
        return Judgement(zone=Zone.AMBIGUOUS, value=value)

    def _value(self, seen: Observation) -> float | None:
        if self.signature is not None and self.signature.check in seen.values:
            return seen.values[self.signature.check]
        return seen.value

    def _place(self, value: float | None) -> float | None:
        """0 at the good end, 1 at the bad one; None where there is no value to place. Not finite counts as bad."""
        if value is None or self.good is None or self.bad is None:
            return None
        if not math.isfinite(value):
            return 1.0
        rising = self.bad[0] >= self.good[1]
        near, far = (self.good[1], self.bad[0]) if rising else (self.good[0], self.bad[1])
        if not math.isfinite(far):
            return 0.0 if self.good[0] <= value <= self.good[1] else NEAR + 1e-9
        if far == near:
            return None
        if near > 0 and far > 0 and value > 0 and max(near, far) / min(near, far) > DECADE:
            return (math.log(value) - math.log(near)) / (math.log(far) - math.log(near))
        return (value - near) / (far - near)


def make_clusters(good: Sequence[Observation], bad: Sequence[Observation], *, check: str | None = None) -> Clusters:
    """The clusters of two ends whose runs agree.

    Raises:
        BisectError: the bad end is good, the good end is bad, or their values overlap.
    """
    verdicts = any(o.result in (Result.GOOD, Result.BAD) for o in (*good, *bad))
    signature = pin_signature(bad, check) if verdicts else None
    name = signature.check if signature else ""

    def values(seen: Sequence[Observation]) -> tuple[float, float] | None:
        found = [v for o in seen if (v := o.values.get(name, o.value)) is not None]
        return (min(found), max(found)) if found else None

    low, high = values(good), values(bad)
    made = Clusters(good=low, bad=high, signature=signature, verdicts=verdicts)
    if not verdicts:
        if low is None or high is None:
            raise BisectError(
                "the probe gives neither a verdict nor a value",
                ending=Ending.END_NOT_MEASURED,
                where="probe",
                next_step='print a last line {"metric": 0.12}, or exit with 0 and 1',
            )
        if low[0] <= high[1] and high[0] <= low[1]:
            raise BisectError(
                "the two ends cannot be told apart",
                ending=Ending.NOT_SEPARABLE,
                where="probe",
                expected="values of the two ends that do not overlap",
                found=f"good end {low[0]:.6g} to {low[1]:.6g}, bad end {high[0]:.6g} to {high[1]:.6g}",
                next_step="take a probe that separates them, or more runs of each end",
            )
    elif low is not None and high is not None and low[0] <= high[1] and high[0] <= low[1]:
        # The verdicts differ although the numbers do not: the bound decides, and no value can be called in between.
        made = Clusters(good=None, bad=None, signature=signature, verdicts=True)
    return made


def pin_signature(bad: Sequence[Observation], check: str | None = None) -> Signature | None:
    """The first failure that every failing run of the bad end shows; its place and side only where all agree."""
    runs = [o.failures for o in bad if o.result is Result.BAD and o.failures]
    if not runs:
        return None
    for first in runs[0]:
        if check is not None and first.check != check:
            continue
        same = [next((f for f in run if f.check == first.check), None) for run in runs]
        if all(same):
            places, signs = {f.where for f in same}, {f.sign for f in same}
            return Signature(
                check=first.check,
                where=first.where if len(places) == 1 else "",
                sign=first.sign if len(signs) == 1 else 0,
            )
    if check is not None:
        raise BisectError(
            "the check that was asked for does not fail on the bad end",
            ending=Ending.BAD_END_IS_GOOD,
            where="--check",
            found=check,
            expected=", ".join(str(f.check) for f in runs[0]),
        )
    return None
