"""What a page shows of a triage: the cause first, the first divergence, the six axes, what to run next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment.numerics.verdict import ALIGNED, MISALIGNED
from alignment.report.answer import mapping, rows

COMMAND = "triage --json"


def triage_part(found: Any, source: Path | str) -> dict[str, Any]:
    """``found`` as ``alignment triage --json`` prints it.

    Raises:
        InputError: it is something else.
    """
    found = found if isinstance(found, dict) else {}
    axes = rows(found.get("axes"), source, {"axis": str, "outcome": str, "reason": str}, COMMAND)
    causes = rows(found.get("causes", []), source, {"axis": str, "cause": str, "evidence": str}, COMMAND)
    modes = rows(found.get("failure_modes", []), source, {"name": str, "step": int, "evidence": str}, COMMAND)
    first = mapping(found, source, {"first_divergence": (str, type(None))}, COMMAND)["first_divergence"] if (
        "first_divergence" in found
    ) else None  # fmt: skip
    outcome, headline = _verdict(axes, causes, modes, first, found.get("exit_code"))
    for axis in axes:
        remarks = axis.get("remarks")
        axis["remarks"] = [str(remark) for remark in remarks] if isinstance(remarks, (list, tuple)) else []
    return {
        "headline": headline,
        "outcome": outcome,
        "sides": [str(found[side]) for side in ("dut", "baseline") if side in found],
        "causes": causes,
        "modes": modes,
        "first": first or "",
        "axes": axes,
        "next": _texts(found.get("next_commands")),
        "open": _texts(found.get("open_commands")),
    }


def _verdict(axes, causes, modes, first, code) -> tuple[str, str]:
    """Outcome and headline; a divergence that no axis explains is one all the same."""
    if causes:
        return "fail", f"MISALIGNED: {causes[0]['axis']}: {causes[0]['cause']}"
    if modes:
        return "fail", f"MISALIGNED: {modes[0]['name']} at step {modes[0]['step']}"
    failed = [axis for axis in axes if axis["outcome"] == "fail"]
    if failed:
        return "fail", f"MISALIGNED: {failed[0]['axis']}: {failed[0]['reason']}"
    if first or code == MISALIGNED:
        return "fail", f"MISALIGNED: {first}" if first else "MISALIGNED"
    compared = sum(axis["outcome"] == "pass" for axis in axes)
    if not compared:
        return "unavailable", "NOT CARRIED OUT: no axis had anything to compare"
    if code not in (None, ALIGNED):
        return "error", "NOT CARRIED OUT"
    return "pass", f"ALIGNED: {compared} of {len(axes)} axes were compared, and none finds anything"


def _texts(found: Any) -> list[str]:
    return [str(text) for text in found] if isinstance(found, (list, tuple)) else []
