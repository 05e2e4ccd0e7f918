"""The six axes along which a run is brought into line, each in a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from alignment.numerics.verdict import Outcome

AXES = ("hyper-parameters", "data", "hardware", "software stack", "model and weights", "scoring")
"""In the order in which the method checks them."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause that an axis names, and what shows it. ``weight`` orders findings by how much they can move a curve."""

    axis: str
    cause: str
    evidence: str
    weight: int = 3
    next_command: str = ""


@dataclass(frozen=True, kw_only=True)
class AxisReport:
    """What one axis says: PASS (compared, nothing found), FAIL (findings) or UNAVAILABLE (nothing to look at)."""

    axis: str
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()
    next_command: str = ""

    def to_dict(self) -> dict:
        return {**asdict(self), "outcome": self.outcome.value}


def report(
    axis: str,
    findings: Sequence[Finding],
    *,
    compared: str,
    remarks: Sequence[str] = (),
    unseen: str = "",
    next_command: str = "",
) -> AxisReport:
    """The report of an axis that compared ``compared``; ``unseen`` is why there was nothing to compare."""
    ordered = tuple(sorted(findings, key=lambda finding: -finding.weight))
    if ordered:
        outcome, reason = Outcome.FAIL, f"{ordered[0].cause}: {ordered[0].evidence}"
    elif unseen:
        outcome, reason = Outcome.UNAVAILABLE, unseen
    else:
        outcome, reason = Outcome.PASS, compared
    command = next((finding.next_command for finding in ordered if finding.next_command), next_command)
    return AxisReport(
        axis=axis, outcome=outcome, reason=reason, findings=ordered, remarks=tuple(remarks), next_command=command
    )
