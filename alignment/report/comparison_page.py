"""What a page shows of a comparison: the first divergence with its path, stages × steps, the findings, every stage."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.numerics.verdict import Outcome
from alignment.report.answer import listed, named, number, other_shape, rows, shown, trail

COMMAND = "compare --json"
SHOWN = 40
"""Findings of the first stage that is not aligned; ``--json`` has all."""
_OPEN = {
    Outcome.FAIL.value: "MISALIGNED",
    Outcome.ERROR.value: "NOT CARRIED OUT",
    Outcome.INCONCLUSIVE.value: "INCONCLUSIVE",
}
_GRAVITY = (*_OPEN, Outcome.UNAVAILABLE.value, Outcome.PASS.value)
_STEP = re.compile(r"run_stages\.step(\d+)\.")


def comparison_part(found: Any, source: Path | str) -> dict[str, Any]:
    """``found`` as ``alignment compare --json`` prints it, of two captures or of two runs with the captures they have.

    Raises:
        InputError: it is something else.
    """
    found = found if isinstance(found, Mapping) else {}
    capture = found.get("capture")
    documents = [found, *([capture] if isinstance(capture, Mapping) else [])]
    stages = [_stages(document.get("stages"), source) for document in documents]
    missing = [
        gap
        for document in documents
        for gap in listed(document.get("missing") or [], source, str, "what is missing, in words", COMMAND)
    ]
    firsts = [first for part in stages for first in [_first(part)] if first is not None]
    for first in firsts[1:]:  # of the captures of the two runs
        first["name"] = f"captures, {first['name']}"
    every = [stage for part in stages for stage in part]
    outcome = _worst([stage["outcome"] for stage in every] + ["fail"] * bool(missing))
    return {
        "headline": _headline(outcome, every, firsts, missing),
        "outcome": outcome,
        "sides": [str(found[side]) for side in ("golden", "target") if isinstance(found.get(side), str)],
        "firsts": firsts,
        "grids": [grid for grid in map(_grid, stages) if grid["steps"]],
        "missing": missing,
        "rows": [{key: stage[key] for key in ("name", "outcome", "reason", "path")} for stage in every],
    }


def _stages(found: Any, source: Path | str) -> list[dict[str, Any]]:
    """A divergence is ``where`` in the stages of runs, ``first_forward`` or ``first_backward`` in those of captures."""
    read = []
    for row in rows(found, source, {"stage": str, "outcome": str, "reason": str}, COMMAND):
        places = [row[key] for key in ("where", "first_forward", "first_backward") if row.get(key)]
        if any(not named(place, "module", "quantity") for place in places):
            raise other_shape(source, "module and quantity of every divergence", COMMAND)
        if row["outcome"] not in _GRAVITY:
            raise other_shape(source, f"an outcome of {', '.join(_GRAVITY)} in every row", COMMAND)
        if not isinstance(row.get("step"), (int, str, type(None))):
            raise other_shape(source, "a number as the step of every row", COMMAND)
        of_run = _STEP.match(str(row.get("check", "")))
        step = int(of_run[1]) if of_run else row.get("step")
        name = row["stage"] if step is None else f"step {step} {row['stage']}"
        where = places[0] if places else None
        read.append(
            {
                **row,
                "name": name,
                "at": step,
                "rank": row.get("rank"),
                "path": trail(row["stage"], where["module"], where["quantity"]) if where else [],
            }
        )
    return read


def _first(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first stage that is not aligned in full: one that fails before one that cannot be told."""
    fails = [stage for stage in stages if stage["outcome"] in ("fail", "error")]
    unlike = fails or [stage for stage in stages if stage["outcome"] == "inconclusive"]
    if not unlike:
        return None
    stage = unlike[0]
    facts = [("how far", line) for line in map(_measured, _list(stage.get("measures"))) if line]
    for direction in ("forward", "backward"):
        finding = stage.get(f"first_{direction}")
        if finding:
            facts += [
                (direction, f"{finding['module'] or '(root)'}, {finding['quantity']}"),
                ("how far", _size(finding)),
                ("sources", f"differ by {shown(finding.get('sources'), '.3g')}"),
                ("limit", str(finding.get("origin", ""))),
            ]
    findings = [row for row in _list(stage.get("findings")) if named(row, "module", "quantity", "status")]
    gaps = [gap for gap in _list(stage.get("unpaired")) if isinstance(gap, Mapping) and gap.get("fails")]
    return {
        "name": stage["name"],
        "outcome": stage["outcome"],
        "reason": stage["reason"],
        "path": stage["path"],
        "facts": facts,
        "next": str(stage.get("next_command") or ""),
        "gaps": [f"{gap.get('what')} {gap.get('name')} only in {gap.get('side')}" for gap in gaps[:SHOWN]],
        "findings": [
            {
                "module": row["module"] or "(root)",
                "quantity": row["quantity"],
                "status": row["status"],
                "direction": str(row.get("direction", "")),
                "size": _size(row),
            }
            for row in findings[:SHOWN]
        ],
        "more": max(len(findings) - SHOWN, 0) + max(len(gaps) - SHOWN, 0),
    }


def _grid(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stages × steps, in the order in which either first appears; of several ranks the worst."""
    placed = [stage for stage in stages if stage["at"] is not None]
    steps = list(dict.fromkeys(stage["at"] for stage in placed))
    table: dict[str, dict[Any, dict[str, Any]]] = {}
    for stage in placed:
        cells = table.setdefault(stage["stage"], {})
        before = cells.get(stage["at"])
        if before is None or _GRAVITY.index(stage["outcome"]) < _GRAVITY.index(before["outcome"]):
            rank = "" if stage["rank"] is None else f"rank {stage['rank']}: "
            cells[stage["at"]] = {"outcome": stage["outcome"], "reason": f"{rank}{stage['reason']}"}
    of_runs = any(stage.get("check") for stage in placed)
    return {"title": "Stages of both runs" if of_runs else "Captures", "steps": steps, "rows": table}


def _headline(outcome: str, stages: Sequence[Mapping], firsts: Sequence[Mapping], missing: Sequence[str]) -> str:
    if not stages:
        return f"MISALIGNED: {missing[0]}" if missing else "NOT CARRIED OUT: no stage was compared"
    if outcome in _OPEN:
        what = f"first in {firsts[0]['name']}: {firsts[0]['reason']}" if firsts else missing[0]
        return f"{_OPEN[outcome]}: {what}"
    return f"ALIGNED: {len(stages)} stages"


def _worst(outcomes: Sequence[str]) -> str:
    return min(outcomes, key=_GRAVITY.index, default=Outcome.ERROR.value)


def _measured(measure: Any) -> str:
    """A judged measure of a stage of runs, with its bound and where that comes from."""
    if not isinstance(measure, Mapping) or "name" not in measure or "value" not in measure:
        return ""
    line = f"{measure['name']} = {shown(measure['value'])} {measure.get('unit') or ''}".rstrip()
    if measure.get("bound") is not None:
        line += f", bound {shown(measure['bound'])}"
    return line + (f" ({measure['origin']})" if measure.get("origin") else "")


def _size(finding: Mapping[str, Any]) -> str:
    """How far a finding of captures is from what its sources explain."""
    if number(finding.get("value")) is None:
        return str(finding.get("reason", ""))
    times = number(finding.get("excess"))
    told = "exact values expected" if times is None else f"{times:.3g} times its limit"
    return f"{finding.get('reason', '')} {shown(finding['value'], '.3g')}, {told}"


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []
