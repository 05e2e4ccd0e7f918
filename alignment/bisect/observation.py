"""What one probe of one stack gave: the raw record that is stored, and the signature of a failure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

# Exit codes of a probe (docs/bisect.md). The first and the fourth are also what `git bisect run` understands.
GOOD, BAD, INFRASTRUCTURE, SKIP, ABORT = 0, 1, 75, 125, 128


class Result(str, Enum):
    """What a probe says. Only a measured deviation is BAD; what could not be measured is SKIP or INFRASTRUCTURE.

    INFRASTRUCTURE may pass when tried again, SKIP will not. ABORT ends the whole bisection.
    """

    GOOD = "good"
    BAD = "bad"
    MEASURED = "measured"
    SKIP = "skip"
    INFRASTRUCTURE = "infrastructure"
    ABORT = "abort"


# The classes of what could not be measured.
CLASSES = (
    "build",
    "pins",
    "import",
    "environment",
    "out-of-memory",
    "data",
    "device",
    "time-out",
    "other-failure",
    "nothing-measured",
    "killed",
    "probe",
    "infrastructure",
)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Which failure it is: the check, the first place where things part, and to which side (+1, -1, 0 unknown)."""

    check: str
    where: str = ""
    sign: int = 0

    def __str__(self) -> str:
        return self.check + (f" at {self.where}" if self.where else "")

    def matches(self, other: Signature) -> bool:
        """The same check, and the same place and side where both tell one."""
        return (
            self.check == other.check
            and (not self.where or not other.where or self.where == other.where)
            and (not self.sign or not other.sign or self.sign == other.sign)
        )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One run of a probe. ``failures`` are the signatures of everything that failed, in order; ``values`` the metric
    of every check by its name, ``passed`` the checks that ran and passed.
    """

    result: Result
    value: float | None = None
    failures: tuple[Signature, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0
    build_seconds: float = 0.0
    output: str = ""

    def to_data(self) -> dict[str, Any]:
        data = asdict(self)
        data["result"] = self.result.value
        data["value"] = plain_number(self.value)
        data["values"] = {k: plain_number(v) for k, v in self.values.items()}
        return {k: v for k, v in data.items() if v not in (None, "", (), [], {})}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Observation:
        data = dict(data)
        data["result"] = Result(data["result"])
        data["failures"] = tuple(Signature(**s) for s in data.get("failures", ()))
        data["passed"] = tuple(data.get("passed", ()))
        data["values"] = {k: float(v) for k, v in data.get("values", {}).items()}
        if data.get("value") is not None:
            data["value"] = float(data["value"])
        return cls(**data)


def skip(reason: str, detail: str = "", **rest) -> Observation:
    """An observation that says why nothing was measured."""
    return Observation(result=Result.SKIP, reason=reason, detail=detail, **rest)


def plain_number(value: float | None) -> float | str | None:
    """A number as JSON can carry it: NaN and the infinities as text, which ``float`` reads back."""
    return repr(value) if value is not None and not math.isfinite(value) else value
