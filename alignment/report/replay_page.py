"""What a page shows of ``alignment replay``: the verdict, each metric's error, and its drift step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.report.answer import NUMBER, listed, mapping, other_shape, rows, shown
from alignment.report.chart import chart, least, most, numbers

REPLAY = "replay.json"
COMMAND = "replay --json"
SERIES = ("steps", "reference", "replay", "drift", "noise", "so_far", "envelope")
_OUTCOMES = {True: "pass", False: "fail", None: "inconclusive"}
_DRIFT = {
    "metric": str, "error": (*NUMBER, str), "noise": list, "worst_step": int, "worst_error": (*NUMBER, str),
    "envelope": (*NUMBER, str, type(None)), "within": (bool, type(None)),
}  # fmt: skip


def replay_part(found: Any, source: Path | str) -> dict[str, Any]:
    """``found`` as ``alignment replay`` leaves it in ``replay.json``.

    Raises:
        InputError: it is something else.
    """
    fields = {"device": str, "steps": int, "bar": NUMBER, "outcome": str, "drifts": list}
    found = mapping(found, source, fields, COMMAND)
    curves = rows(found.get("curves", []), source, {"metric": str, **dict.fromkeys(SERIES, list)}, COMMAND)
    drifts = rows(found["drifts"], source, _DRIFT, COMMAND)
    if not drifts:
        raise other_shape(source, "the drift of a metric", COMMAND)
    for drift in drifts:
        drift["outcome"] = _OUTCOMES[drift["within"]]
    worst = min(drifts, key=lambda drift: ("fail", "inconclusive", "pass").index(drift["outcome"]))
    return {
        "headline": _headline(worst, found["steps"], found["device"]),
        "outcome": worst["outcome"],
        "steps": found["steps"],
        "device": found["device"],
        "bar": f"{found['bar']:.0%}",
        "drifts": [
            {
                "metric": drift["metric"],
                "outcome": drift["outcome"],
                "error": shown(drift["error"], ".2e"),
                "envelope": shown(drift["envelope"], ".2e"),
                "noise": ", ".join(shown(one, ".2e") for one in drift["noise"]) or "not measured",
                "worst": f"step {drift['worst_step']}: {shown(drift['worst_error'], '.2e')}",
                "drowned": drift.get("drowned") is True,
            }
            for drift in drifts
        ],
        "charts": [chart for row in curves for chart in _charts(row, source)],
    }


def _headline(worst: Mapping[str, Any], steps: int, device: str) -> str:
    error = f"{worst['metric']} of {steps} replayed steps on {device} is off by {shown(worst['error'], '.2e')}"
    if worst["outcome"] == "inconclusive":
        return f"INCONCLUSIVE: {error}, and no noise was measured to judge it by"
    envelope = "" if worst["envelope"] is None else f", envelope {shown(worst['envelope'], '.2e')}"
    if worst["outcome"] == "fail":
        return f"MISALIGNED: {error}{envelope}"
    return f"ALIGNED: {steps} replayed steps on {device} stay within their bounds"


def _charts(row: Mapping[str, Any], source: Path | str) -> list[dict[str, Any]]:
    """Drift of every step over its noise, error so far under its envelope, and the metric itself in both runs."""
    count = len(listed(row["steps"], source, int, "numbers of steps", COMMAND))
    lines = [row[name] for name in SERIES if name not in ("noise", "envelope")] + [*row["noise"]]
    lines += [row["envelope"]] if row["envelope"] else []
    if any(not isinstance(line, list) or len(line) != count for line in lines):
        raise other_shape(source, f"{count} values, one per step, in every series of {row['metric']}", COMMAND)
    noise = [numbers(line) for line in row["noise"]]
    name, steps = row["metric"], row["steps"]
    low, high = (list(map(edge, zip(*noise))) for edge in (least, most))
    floor = [0.0] * len(row["envelope"])
    return [
        chart(
            f"{name}: drift of every step",
            steps,
            row["drift"],
            band=("noise", f"{len(noise)} replays moved by one unit in the last place", low, high),
            log=True,
            caption="|Δ| over the mean |value|",
        ),
        chart(
            f"{name}: error so far",
            steps,
            row["so_far"],
            band=("envelope", "what noise explains", floor, row["envelope"]),
            log=True,
            caption="Σ|Δ| / Σ|value|; the last value is judged",
        ),
        chart(name, steps, row["replay"], beside=("record", row["reference"]), caption="replay; dashed: record"),
    ]
