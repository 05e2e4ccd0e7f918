"""Axis 3: does every card compute the same, and the same again?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from alignment.diagnose.axes import AXES, AxisReport, Finding, report
from alignment.errors import InputError
from alignment.files import read_json

AXIS = AXES[2]
STRESS = "stress.json"
NEXT = f"alignment stress --json > RUN/{STRESS} on the nodes of the run"


def check(directory: Path) -> AxisReport:
    """What ``alignment stress --json`` said, where its answer lies in the run's folder as ``stress.json``.

    Raises:
        InputError: the file is no such answer.
    """
    path = directory / STRESS
    if not path.is_file():
        return report(AXIS, [], compared="", unseen="no card was stressed", next_command=NEXT)
    told = read_json(path)
    verdicts = told.get("verdicts") if isinstance(told, Mapping) else None
    if not isinstance(verdicts, list) or not all(
        isinstance(v, Mapping) and {"check", "outcome"} <= v.keys() for v in verdicts
    ):
        raise InputError("not an answer of alignment stress", where=path, next_step=NEXT)
    if not verdicts:
        return report(AXIS, [], compared="", unseen=f"{STRESS} names no card", next_command=NEXT)
    bad = [v for v in verdicts if v["outcome"] != "pass"]
    findings = [
        Finding(
            axis=AXIS,
            cause=f"the card {v['check'].removeprefix('stress/')}",
            evidence=str(v.get("reason", "")),
            next_command=str(v.get("next_command") or ""),
        )
        for v in bad
    ]
    return report(AXIS, findings, compared=f"{len(verdicts)} cards gave equal bits", next_command=NEXT if bad else "")
