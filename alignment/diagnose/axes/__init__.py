"""The six axes along which a run is brought into line, each in a file of its own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json
from alignment.numerics.verdict import Outcome, Verdict

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


def overrides(config: Mapping[str, Any], fields: Iterable[str]) -> str:
    """What to write on a command line for ``fields`` to be as in ``config``, those it has."""
    import yaml

    def written(value: Any) -> str:
        plain = isinstance(value, str) and yaml.safe_load(value) == value
        return value if plain else json.dumps(value, ensure_ascii=False)

    return " ".join(shlex.quote(f"{field}={written(config[field])}") for field in fields if field in config)


def read_answer(path: Path, *, command: str) -> list[Verdict]:
    """The verdicts of ``command``'s JSON where a run's folder has it; none where it has not.

    Raises:
        InputError: the file is no such answer.
    """
    if not path.is_file():
        return []
    told = read_json(path)
    try:
        return [Verdict.from_dict(verdict) for verdict in told["verdicts"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(
            f"not an answer of {' '.join(command.split()[:2])}", where=path, next_step=f"{command} > {path}"
        ) from None
