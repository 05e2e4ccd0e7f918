"""The page of a night: the page of a run, with its phases, their findings and links to what they left on top."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from alignment.files import write_atomically
from alignment.report.night import HEADLINES, NIGHT, NightRecord
from alignment.report.page import PAGE, gather, render

OPENED = (".xml", ".html", ".json", ".txt", ".jsonl")
ARTEFACTS = 60
"""Files of a phase that are linked by name; the folder itself always is."""


def write_night_page(record: NightRecord, folder: Path, *, baselines: Path | None = None) -> Path:
    """Writes ``report.html`` of a night.

    Raises:
        InputError: the verdicts of the night are damaged.
        OSError: it cannot be written.
    """
    text = render([gather(folder, baselines=baselines, night=record)])
    target = Path(folder) / PAGE
    write_atomically(target, lambda beside: beside.write_text(text, encoding="utf-8"))
    return target


def night_part(record: NightRecord, folder: Path) -> dict[str, Any]:
    """What the page of a run shows in addition, and in place of its own headline, where the run is a night."""
    return {
        "headline": f"{HEADLINES[record.outcome]}: {record.row}, {record.began[:10]}",
        "outcome": {"known": "inconclusive", "flaky": "inconclusive"}.get(record.outcome, record.outcome),
        "night": _night(record, folder),
    }


def _night(record: NightRecord, folder: Path) -> dict[str, Any]:
    return {
        "line": record.line,
        "action": record.action,
        "verdict": NIGHT,
        "phases": [
            {
                "name": phase.name,
                "outcome": phase.outcome,
                "stage": phase.stage,
                "cause": phase.cause,
                "counts": phase.counted,
                "seconds": phase.seconds,
                "again": phase.again,
                "findings": [
                    {"check": f.check, "stage": f.stage, "reason": f.reason, "note": f.known or f.expired}
                    for f in phase.findings
                ],
                "links": _links(phase.folders + phase.earlier, folder),
            }
            for phase in record.phases
        ],
        "concerns": [dict(concern) for concern in record.concerns],
        "remarks": list(record.remarks),
    }


def _links(folders: tuple[str, ...], night: Path) -> list[str]:
    """What a phase left, as paths relative to the page: its folders, and in them what people open first."""
    found = []
    for name in folders:
        with contextlib.suppress(OSError):
            found.append(f"{name}/")
            files = sorted(p for p in (night / name).rglob("*") if p.suffix in OPENED and p.is_file())
            found += [str(p.relative_to(night)) for p in files if p.stat().st_size][:ARTEFACTS]
    return found

