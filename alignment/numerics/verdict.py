"""What a check concludes: an outcome, the numbers it rests on, and the first place where things part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum


class Outcome(str, Enum):
    """The five things a check can say. A check that did not run is never PASS."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measured number against its bound.

    ``value`` and ``bound`` share ``unit``; ``origin`` says where the bound comes from (measured noise, unit roundoff,
    exactness, a statistical test). ``bound`` is None for a number that is shown and not judged.
    """

    name: str
    value: float
    bound: float | None = None
    unit: str = ""
    origin: str = ""

    @property
    def used(self) -> float | None:
        """Share of the budget that was used: 1.0 is exactly at the bound. None where nothing is judged."""
        if self.bound is None:
            return None
        if self.bound == 0.0:
            return 0.0 if self.value == 0.0 else math.inf
        return abs(self.value) / self.bound

    @property
    def within(self) -> bool:
        """True when nothing is judged or the value is finite and inside its bound (NaN never is)."""
        used = self.used
        return used is None or used <= 1.0


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where inputs agree and outputs do not."""

    stage: str
    module: str
    quantity: str
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.stage} · {self.module} · {self.quantity}"
        return f"{text} ({self.detail})" if self.detail else text


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The conclusion of one check of one subject on one device.

    ``check`` is the identifier of the check, ``layer`` one of unit, layer, e2e; ``stage`` a pipeline stage (rollout,
    old_log_prob, actor_update, weight_sync, …) or ``operator``; ``device`` the label of the device, which says
    ``npu (emulated)`` for the emulated one; ``baseline`` the identifier, date and stack of what it was compared with;
    ``next_command`` what to run next when it is not a pass.
    """

    check: str
    layer: str
    stage: str
    subject: str
    device: str
    outcome: Outcome
    reason: str
    measures: tuple[Measure, ...] = ()
    where: Divergence | None = None
    baseline: str | None = None
    next_command: str | None = None

    @property
    def worst(self) -> Measure | None:
        """The judged measure that used most of its budget."""
        judged = [m for m in self.measures if m.bound is not None]
        return max(judged, key=lambda m: math.inf if math.isnan(m.value) else m.used, default=None)

    def to_dict(self) -> dict:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        data = asdict(self)
        data["outcome"] = self.outcome.value
        data["measures"] = [asdict(m) for m in self.measures]
        return data

    @classmethod
    def from_dict(cls, data: dict) -> Verdict:
        """The inverse of :meth:`to_dict`. Where JSON has no number (NaN, infinity) its name stands, as ``finite`` of
        :mod:`alignment.report.run_directory` spells it.

        Raises:
            KeyError, TypeError, ValueError: these are not the fields of a verdict.
        """
        data = {**data}
        data["outcome"] = Outcome(data["outcome"])
        data["measures"] = tuple(Measure(**_numbers(m)) for m in data.get("measures", ()))
        data["where"] = Divergence(**data["where"]) if data.get("where") else None
        return cls(**data)


def _numbers(measure: dict) -> dict:
    spelled = [key for key in ("value", "bound") if isinstance(measure.get(key), str)]
    read = {**measure, **{key: float(measure[key]) for key in spelled}}
    for key in ("value", "bound"):
        number = read.get(key)
        if isinstance(number, bool) or not (isinstance(number, (int, float)) or (key == "bound" and number is None)):
            raise TypeError(f"the {key} of a measure is no number")
    return read


ALIGNED, MISALIGNED, USAGE = 0, 1, 2


def exit_code(verdicts: Iterable[Verdict], *, require: bool = False) -> int:
    """0 aligned, 1 misaligned or not shown to be aligned, 2 a check could not be carried out.

    A failure outweighs an error: what was found misaligned stays found. An empty list is 2, since nothing was shown.
    With ``require`` an unavailable device, subject or baseline counts as an error.
    """
    outcomes = [v.outcome for v in verdicts]
    if Outcome.FAIL in outcomes:
        return MISALIGNED
    if Outcome.ERROR in outcomes or (require and Outcome.UNAVAILABLE in outcomes):
        return USAGE
    if Outcome.INCONCLUSIVE in outcomes:
        return MISALIGNED
    return ALIGNED if Outcome.PASS in outcomes else USAGE
