"""What a page shows of ``alignment ablate``: the convicted factor first, every effect, settings × seeds, both arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.report.answer import NUMBER, listed, mapping, number, rows, shown
from alignment.report.chart import chart, least, mean, most

ABLATION = "ablation.json"
COMMAND = "ablate --json"
_ORDER = ("fail", "inconclusive", "pass")
_WORDS = {"fail": "decided", "inconclusive": "not decided", "pass": "none"}


def ablation_part(found: Any, source: Path | str) -> dict[str, Any]:
    """``found`` as ``alignment ablate`` leaves it in ``ablation.json``.

    Raises:
        InputError: it is something else.
    """
    found = mapping(found, source, {"metric": str, "effects": list, "levels": list}, COMMAND)
    fields = {"name": str, "value": (*NUMBER, str), "low": (*NUMBER, str), "high": (*NUMBER, str), "seeds": int}
    effects = [_effect(row) for row in rows(found["effects"], source, fields, COMMAND)]
    effects.sort(key=lambda effect: (_ORDER.index(effect["outcome"]), -abs(number(effect["value"]) or 0.0)))
    levels = rows(found["levels"], source, {"factors": list, "seed": int, "level": (*NUMBER, str)}, COMMAND)
    fields = {"factors": list, "seed": int, "steps": list, "values": list}
    curves = rows(found.get("curves", []), source, fields, COMMAND)
    for curve in curves:
        listed(curve["steps"], source, int, "numbers of steps", COMMAND)
    changes = found.get("factors") if isinstance(found.get("factors"), Mapping) else {}
    others = found.get("other_prompts") if isinstance(found.get("other_prompts"), Mapping) else {}
    for effect in effects:
        told = changes.get(effect["name"])
        effect["changes"] = [str(change) for change in told] if isinstance(told, list) else []
        effect["other_prompts"] = others.get(effect["name"])
    metric = found["metric"]
    return {
        "headline": _headline(effects, metric),
        "outcome": effects[0]["outcome"] if effects else "unavailable",
        "metric": metric,
        "effects": effects,
        "heat": _heat(levels, effects),
        "charts": [chart for effect in effects for chart in _arms(effect["name"], metric, curves)],
    }


def _effect(row: Mapping[str, Any]) -> dict[str, Any]:
    """An effect is decided where its interval leaves zero out, and none where every seed says exactly that."""
    value, low, high = (number(row[key]) for key in ("value", "low", "high"))
    if row.get("decided") is True:
        outcome = "fail"
    else:
        outcome = "pass" if value == low == high == 0.0 else "inconclusive"
    unknown = low is None or high is None
    return {
        "name": row["name"],
        "value": row["value"],
        "outcome": outcome,
        "word": _WORDS[outcome],
        "effect": shown(row["value"], "+.4g"),
        "interval": "one seed" if unknown else f"{low:+.4g} … {high:+.4g}",
        "seeds": row["seeds"],
    }


def _headline(effects: Sequence[Mapping[str, Any]], metric: str) -> str:
    if not effects:
        return "NOT CARRIED OUT: no factor was judged"
    first = effects[0]
    if first["outcome"] == "fail":
        return f"DECIDED: {first['name']} moves {metric} by {first['effect']} (95 % interval {first['interval']})"
    if first["outcome"] == "pass":
        return f"NO EFFECT: {metric} is the same in every setting and seed"
    if first["interval"] == "one seed":
        return f"NOT DECIDED: one seed gives no interval; {first['name']} moves {metric} by {first['effect']}"
    return f"NOT DECIDED: every interval of an effect on {metric} has zero in it"


def _heat(levels: Sequence[Mapping[str, Any]], effects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings × seeds: the level, and how far it is from the base's of the same seed beside the farthest."""
    by = {(frozenset(map(str, row["factors"])), row["seed"]): number(row["level"]) for row in levels}
    seeds = list(dict.fromkeys(seed for _, seed in by))
    moved = {}
    for (setting, seed), level in by.items():
        base = by.get((frozenset(), seed))
        moved[setting, seed] = None if level is None or base is None else level - base
    farthest = max((abs(change) for change in moved.values() if change is not None), default=0.0) or 1.0
    outcomes = {effect["name"]: effect["outcome"] for effect in effects}
    table = []
    for setting in dict.fromkeys(setting for setting, _ in by):
        # A setting of several factors has no verdict of its own: their interaction has.
        outcome = outcomes.get(next(iter(setting)), "") if len(setting) == 1 else ""
        cells = []
        for seed in seeds:
            level, change = by.get((setting, seed)), moved.get((setting, seed))
            told = "" if change is None or not setting else f" ({change:+.3g})"
            cells.append(
                {
                    "text": f"{shown(level)}{told}" if (setting, seed) in by else "",
                    "used": 0.0 if change is None else abs(change) / farthest,
                }
            )
        table.append({"setting": " + ".join(sorted(setting)) or "base", "outcome": outcome, "cells": cells})
    return {"seeds": seeds, "rows": table}


def _arms(factor: str, metric: str, curves: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The curve with the factor alone, over the base's of the same seeds; none where one of them is not there."""
    base = [row for row in curves if not row["factors"]]
    arm = [row for row in curves if row["factors"] == [factor]]
    if not base or not arm:
        return []
    steps = sorted({step for row in (*base, *arm) for step in row["steps"] if number(step) is not None})
    of_base, of_arm = ([_at(row, steps) for row in many] for many in (base, arm))
    name = f"{metric} with {factor}"
    line, beside = (list(map(mean, zip(*many))) for many in (of_arm, of_base))
    low, high = (list(map(edge, zip(*of_base))) for edge in (least, most))
    return [
        chart(
            name,
            steps,
            line,
            caption=f"mean of {len(arm)} seeds; dashed: base, mean of {len(base)}",
            band=("base", f"lowest and highest of {len(base)} seeds of the base", low, high) if len(base) > 1 else None,
            beside=("base", beside),
        )
    ]


def _at(row: Mapping[str, Any], steps: Sequence[Any]) -> list[float | None]:
    values = dict(zip(row["steps"], row["values"]))
    return [number(values.get(step)) for step in steps]
