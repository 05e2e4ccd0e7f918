"""The page of a bisection: the chain, every probe's value, the culprit, the proof, and what remains unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment.bisect.clusters import Clusters
from alignment.bisect.journal import Journal
from alignment.bisect.observation import Observation
from alignment.files import write_atomically

TEMPLATE = Path(__file__).resolve().parent / "templates" / "report.html.j2"
PAGE = "report.html"


def page_data(journal: Journal) -> dict[str, Any]:
    """What the page shows, out of the journal alone."""
    settings = journal.settings() or {}
    answer = (journal.last("answer_found") or {}).get("answer")
    clusters_event = journal.last("clusters")
    clusters = Clusters.from_data(clusters_event["clusters"]) if clusters_event else None
    probes = []
    for number, event in enumerate(journal.of("probe"), start=1):
        seen = Observation.from_data(event["observation"])
        judged = clusters.judge(seen) if clusters else None
        probes.append(
            {
                "number": number,
                "purpose": event["purpose"],
                "name": event["name"],
                "pins": event["pins"],
                "digest": event["stack"],
                "repeat": event["repeat"],
                "result": seen.result.value,
                "zone": judged.zone.value if judged else seen.result.value,
                "value": judged.value if judged else seen.value,
                "reason": (judged.reason if judged else "") or seen.reason,
                "detail": (judged.detail if judged else "") or seen.detail,
                "seconds": seen.seconds + seen.build_seconds,
                "at": event["at"],
            }
        )
    ends = [settings["stacks"][0]["components"], settings["stacks"][-1]["components"]] if settings else [{}, {}]
    return {
        "settings": settings,
        "answer": answer,
        "probes": probes,
        "clusters": clusters,
        "stages": [e["text"] for e in journal.of("stage")],
        "ends": ends,
        "components": list(dict.fromkeys([*ends[0], *ends[1]])),
        "ended": journal.last("ended"),
        "provider": journal.last("provider") or {},
        "dots": _dots(probes),
        "unknown": _unknown(answer, probes),
    }


def _dots(probes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every probe as a dot: time from left to right, its value (or its zone, where there is none) upwards."""
    values = [
        p["value"]
        for p in probes
        if isinstance(p["value"], float) and abs(p["value"]) != float("inf") and p["value"] == p["value"]
    ]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    heights = {"good": 0.05, "bad": 0.95, "ambiguous": 0.5, "skip": 0.5}
    dots = []
    for index, probe in enumerate(probes):
        usable = probe["value"] in values and high > low and probe["zone"] != "skip"
        share = (probe["value"] - low) / (high - low) if usable else heights.get(probe["zone"], 0.5)
        dots.append({"x": 30 + 900 * (index + 0.5) / max(len(probes), 1), "y": 170 - 150 * share, **probe})
    return dots


def _unknown(answer: dict | None, probes: list[dict[str, Any]]) -> list[str]:
    """What this bisection does not show."""
    unknown = []
    for finding in (answer or {}).get("findings", ()):
        unknown += finding["remarks"]
        for edge in finding["edges"]:
            names = ", ".join(c["component"] for c in edge["changes"])
            if edge["hidden"]:
                unknown.append(f"{names}: {edge['hidden']} candidates inside the range could not be measured")
            if edge["pinned_together"]:
                unknown.append(f"{names}: which of them it is, since they are pinned together")
        if finding["kind"] == "culprit" and len(finding["edges"][0]["changes"]) == 1:
            unknown.append(
                f"whether {finding['edges'][0]['changes'][0]['component']} has further faults after this step: "
                "they would be hidden behind it"
            )
    skipped = {p["name"]: p["reason"] for p in probes if p["zone"] == "skip"}
    unknown += [f"{name}: not measured ({reason})" for name, reason in skipped.items()]
    return unknown


def render(journal: Journal) -> str:
    """The page as HTML that needs nothing else."""
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(**page_data(journal))


def write_report(journal: Journal, path: Path | None = None) -> Path:
    """Writes the page beside the journal, whole or not at all."""
    path = path or journal.directory / PAGE
    text = render(journal)
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    return path
