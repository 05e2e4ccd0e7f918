"""One run as one self-contained HTML page: opens offline, asks nobody for anything.

The page is a template, a style sheet and a script from ``templates/`` with the data of the run embedded as JSON. All
that comes from a run is text: the template escapes it, and in the JSON ``<`` is written as an escape, so no name, path
or message can become markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json, write_atomically
from alignment.numerics.verdict import Measure, Outcome, Verdict
from alignment.report.night import NIGHT, NightRecord, read_night
from alignment.report.provenance_view import both_sides
from alignment.report.run_directory import PROVENANCE, STACK, VERDICTS, read_verdicts
from alignment.report.terminal import GRAVITY, grouped, headline, percent_of_budget
from alignment.rl.tracking import METRICS, RUN, read_series

PAGE = "report.html"
CURVES = (
    "reward/before_filter",
    "acc/before_filter",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "student/loss",
)
"""Shown first where a run has them; every other metric is one choice away."""

GAP = "training/rollout_log_probs_abs_diff_mean"
SIDE_FILES = {"audit": "audit.json", "memory": "memory.json", "triage": "triage.json", "comparison": "comparison.json"}
_COMMANDS = {"comparison": "compare"}
_TEMPLATES = Path(__file__).parent / "templates"


def write_page(runs: Sequence[Path], target: Path, *, baselines: Path | None = None) -> Path:
    """The page of one run, or of several beside each other.

    Args:
        runs: directories of runs: of ``alignment run`` (verdicts), of a training run (metrics), or both.
        target: the file to write; whole or not at all.
        baselines: folder of the stored baselines, for the band behind the reward curve and for their provenance.

    Raises:
        InputError: a directory with nothing in it that a page could show.
    """
    parts = [gather(Path(run), baselines=baselines) for run in runs]
    if not parts:
        raise InputError("no run is named", where="report", expected="at least one directory of a run")
    text = render(parts)
    write_atomically(target, lambda beside: beside.write_text(text, encoding="utf-8"))
    return target


def gather(run: Path, *, baselines: Path | None = None, night: NightRecord | None = None) -> dict[str, Any]:
    """What a page shows of a run, as plain data; ``night`` is its record where it is one that is not written yet.

    Raises:
        InputError: the directory does not exist or holds no run, or a file in it is damaged.
    """
    if not run.is_dir():
        raise InputError("there is no such directory", where=run, next_step="name the directory of a run")
    verdicts = read_verdicts(run) if (run / VERDICTS).is_file() else []
    if night is None and (run / NIGHT).is_file():
        night = read_night(run)
    folders = [path.parent for path in sorted((*run.glob(METRICS), *run.glob(f"*/{METRICS}")))]
    if night is not None:  # what its phases left may be damaged, which they say
        folders = [run / path for phase in night.phases for path in phase.trainings]
    trainings = [_training(path, run) for path in folders]
    side = {name: read_json(run / file) for name, file in SIDE_FILES.items() if (run / file).is_file()}
    if not (verdicts or trainings or side or night):
        raise InputError(
            "the directory holds no run",
            where=run,
            expected=f"{VERDICTS} or {METRICS}",
            next_step="name another directory",
        )
    provenance = _provenance(run / PROVENANCE) if (run / PROVENANCE).is_file() else None
    part = {
        "name": run.name,
        "night": None,
        "headline": headline(verdicts) if verdicts else f"{len(trainings)} training runs, not judged",
        "outcome": _overall(verdicts),
        "layers": _heat(verdicts),
        "findings": [_finding(v) for v in verdicts if v.outcome in (Outcome.FAIL, Outcome.ERROR, Outcome.INCONCLUSIVE)],
        "checks": [_row(v) for v in verdicts],
        "unavailable": sorted({(v.subject, v.reason) for v in verdicts if v.outcome is Outcome.UNAVAILABLE}),
        "next": list(dict.fromkeys(v.next_command for v in verdicts if v.next_command)),
        "baselines": sorted({v.baseline for v in verdicts if v.baseline}),
        "trainings": trainings,
        "band": _band(run, baselines) if baselines else None,
        "gate": [_gate(v) for v in verdicts if v.check.startswith("e2e/curve-")],
        "sides": both_sides(verdicts, provenance, baselines),
        "provenance": provenance,
        "stack": (run / STACK).read_text(encoding="utf-8") if (run / STACK).is_file() else "",
        "audit": _audit(side.get("audit")),
        "memory": _memory(side.get("memory"), run / SIDE_FILES["memory"]),
        "triage": _triage(side["triage"], run / SIDE_FILES["triage"]) if "triage" in side else None,
        "comparison": _comparison(side["comparison"], run / SIDE_FILES["comparison"]) if "comparison" in side else None,
    }
    if night is not None:
        from alignment.report.night_page import night_part

        part |= night_part(night, run)
    return part


def render(parts: Sequence[Mapping[str, Any]]) -> str:
    """The page of what :func:`gather` returned."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    charts = [{"trainings": part["trainings"], "band": part["band"]} for part in parts]
    return environment.get_template("report.html.j2").render(
        parts=parts,
        css=_verbatim("report.css"),
        js=_verbatim("report.js"),
        data=_Markup(embedded(charts)),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        first_curves=CURVES,
        gap=GAP,
    )


def embedded(data: Any) -> str:
    """``data`` as JSON that cannot end the script element it stands in; what is not finite becomes null."""
    text = json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")


class _Markup(str):
    """Text that is already markup: jinja2 asks for this method."""

    def __html__(self) -> str:
        return str(self)


def _verbatim(name: str) -> _Markup:
    return _Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def _worst(verdicts: Iterable[Verdict]) -> Outcome:
    return min((v.outcome for v in verdicts), key=GRAVITY.index)


def _overall(verdicts: list[Verdict]) -> str:
    """The colour of the headline: what could not be run does not turn a pass into something else."""
    ran = [v for v in verdicts if v.outcome is not Outcome.UNAVAILABLE]
    return _worst(ran or verdicts).value if verdicts else ""


def _heat(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """Per layer the checks by subject: outcome and share of the budget used, worst member first."""
    layers: dict[str, dict[str, Any]] = {}
    for (layer, check, subject), members in grouped(verdicts).items():
        table = layers.setdefault(layer, {"layer": layer, "subjects": [], "rows": {}})
        if subject not in table["subjects"]:
            table["subjects"].append(subject)
        worst = max(
            (v.worst for v in members if v.worst),
            key=lambda m: math.inf if math.isnan(m.value) else m.used,
            default=None,
        )
        outcome = _worst(members)
        table["rows"].setdefault(check, {})[subject] = {
            "outcome": outcome.value,
            "checks": len(members),
            "budget": percent_of_budget(worst),
            "used": None if worst is None or worst.used is None else min(worst.used, 1.0),
            "worst": _measured(worst) if worst else members[0].reason,
        }
    return list(layers.values())


def _finding(verdict: Verdict) -> dict[str, Any]:
    worst = verdict.worst
    return {
        **_row(verdict),
        "device": verdict.device,
        "stage": verdict.stage,
        "path": _path(verdict),
        "detail": verdict.where.detail if verdict.where else "",
        "how_far": f"{_measured(worst)}, bound {worst.bound:.6g} ({_times(worst)})" if worst else "",
        "origin": worst.origin if worst else "",
        "baseline": verdict.baseline or "",
        "next": verdict.next_command or "",
    }


def _measured(measure: Measure) -> str:
    return f"{measure.name} = {measure.value:.6g} {measure.unit}".strip()


def _times(measure: Measure) -> str:
    """How much of its budget a measure used, behind its bound."""
    budget = percent_of_budget(measure)
    return f"{budget} of the budget" if budget.endswith("%") else budget


def _path(verdict: Verdict) -> list[str]:
    return [] if verdict.where is None else _trail(verdict.where.stage, verdict.where.module, verdict.where.quantity)


def _trail(stage: str, module: str, quantity: str) -> list[str]:
    """Stage, every step of the module's path, and the quantity unless it is the module's own output, named after it."""
    own = not quantity or f".{module}".endswith(f".{quantity}")
    return [stage, *filter(None, module.split(".")), *([] if own else [quantity])]


def _row(verdict: Verdict) -> dict[str, Any]:
    return {
        "check": verdict.check,
        "subject": verdict.subject,
        "outcome": verdict.outcome.value,
        "budget": percent_of_budget(verdict.worst),
        "reason": verdict.reason,
    }


def _gate(verdict: Verdict) -> dict[str, Any]:
    """What a gate found on a curve: the deficit and its bound, what it would have found, the chance of it."""

    def said(ending: str) -> str:
        found = next((m for m in verdict.measures if m.name.endswith(ending)), None)
        return "not measured" if found is None else f"{found.value:.4g} {found.unit}".strip()

    deficit = next((m for m in verdict.measures if m.name.endswith(" deficit") and m.bound is not None), None)
    return {
        **_row(verdict),
        "deficit": "not measured" if deficit is None else f"{deficit.value:.4g} {deficit.unit}".strip(),
        "bound": "" if deficit is None else f"{deficit.bound:.4g} {deficit.unit}".strip(),
        "origin": "" if deficit is None else deficit.origin,
        "detectable": said(" detectable deficit"),
        "p_value": said(" p-value"),
    }


def _training(directory: Path, run: Path) -> dict[str, Any]:
    series = read_series(directory / METRICS)
    names = sorted({name for line in series for name in line if name != "step"})
    return {
        "name": str(directory.relative_to(run)) if directory != run else "training",
        "steps": [line["step"] for line in series],
        "metrics": {name: [line.get(name) for line in series] for name in names},
    }


def _band(run: Path, baselines: Path) -> dict[str, Any] | None:
    """Lowest and highest reward of the stored runs of the same experiment, step by step."""
    from alignment.baseline.runs import load_curves

    fingerprints = {
        read_json(path)["config"] for path in (*run.glob(RUN), *run.glob(f"*/{RUN}"))
        if isinstance(read_json(path), dict) and "config" in read_json(path)
    }  # fmt: skip
    for path in sorted(baselines.glob("*/*/e2e/*.curves.json")):
        stored = load_curves(path)
        if not fingerprints & {curve.config for curve in stored.runs}:
            continue
        if not all("reward" in step.groups for curve in stored.runs for step in curve.steps):
            continue  # a distillation has none
        rows: dict[int, list[float]] = {}
        for curve in stored.runs:
            for step in curve.steps:
                rewards = step.groups["reward"].mean
                rows.setdefault(step.step, []).append(sum(map(float, rewards)) / len(rewards))
        steps = sorted(rows)
        return {
            "metric": CURVES[0],
            "label": f"{len(stored.runs)} runs of {stored.preset}, {stored.provenance.stack}",
            "steps": steps,
            "low": [min(rows[s]) for s in steps],
            "high": [max(rows[s]) for s in steps],
        }
    return None


def _audit(found: Any) -> dict[str, Any] | None:
    """The matrix of ``alignment audit --json``, by name of its columns."""
    if not isinstance(found, Mapping) or not isinstance(found.get("matrix"), list):
        return None
    rows = [row for row in found["matrix"] if isinstance(row, Mapping)]
    columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], (dict, list))))
    totals = {key: found[key] for key in found if isinstance(found[key], (int, float, str))}
    return {"totals": totals, "columns": columns, "rows": [[row.get(c, "") for c in columns] for row in rows]}


def _memory(found: Any, path: Path) -> list[dict[str, Any]] | None:
    """The phases of ``alignment memory profile --json``; the record of a profiler (``--trace``) has none."""
    phases = found.get("phases") if isinstance(found, Mapping) else None
    if phases is None:
        return None
    rows = _rows(phases, path, {"phase": str, "peak": (int, float), "modelled": (int, float)}, "memory profile")
    for row in rows:
        if not isinstance(row.setdefault("outside", None), (int, float, type(None))):
            raise _other_shape(path, "a number or null as outside", "memory profile")
    highest = max((row["peak"] for row in rows), default=0) or 1
    return [{**row, "share": row["peak"] / highest} for row in rows]


def _triage(found: Any, path: Path) -> dict[str, Any]:
    """The axes of ``alignment triage --json``."""
    axes = found.get("axes") if isinstance(found, Mapping) else None
    return {"axes": _rows(axes, path, {"axis": str, "outcome": str, "reason": str}, "triage")}


def _comparison(found: Any, path: Path) -> list[dict[str, Any]]:
    """The stages of ``alignment compare --json``, of two captures or of two runs, each with its first divergence."""
    found = found if isinstance(found, Mapping) else {}
    rows = _stages(found.get("stages"), path)
    capture = found.get("capture")
    return rows + (_stages(capture.get("stages"), path) if isinstance(capture, Mapping) else [])


def _stages(found: Any, path: Path) -> list[dict[str, Any]]:
    """A divergence is ``where`` in the stages of runs, ``first_forward`` or ``first_backward`` in those of captures."""
    rows = _rows(found, path, {"stage": str, "outcome": str, "reason": str}, "comparison")
    shown = []
    for row in rows:
        where = next((row[key] for key in ("where", "first_forward", "first_backward") if row.get(key)), None)
        if where is not None and not _named(where, "module", "quantity"):
            raise _other_shape(path, "module and quantity of every divergence", "comparison")
        name = f"step {row['step']} {row['stage']}" if "step" in row else str(row.get("check", row["stage"]))
        trail = _trail(row["stage"], where["module"], where["quantity"]) if where else []
        shown.append({"name": name, "outcome": row["outcome"], "reason": row["reason"], "path": trail})
    return shown


def _named(found: Any, *names: str) -> bool:
    return isinstance(found, Mapping) and all(isinstance(found.get(name), str) for name in names)


def _provenance(path: Path) -> dict[str, Any]:
    """What made the run; sections that are none are left out."""
    found = read_json(path)
    if not isinstance(found, Mapping):
        raise InputError("not the provenance of a run", where=path, expected="a mapping", found=type(found).__name__)
    sections = ("fingerprint", "determinism", "packages")
    return {key: value for key, value in found.items() if key not in sections or isinstance(value, Mapping)}


def _rows(found: Any, path: Path, fields: Mapping[str, Any], command: str) -> list[dict[str, Any]]:
    """``found`` as a list of mappings that have ``fields``: a page is not made of what another tool wrote."""
    if not isinstance(found, list):
        raise _other_shape(path, f"a list of rows with {', '.join(fields)}", command)
    for row in found:
        wrong = [
            name for name, kind in fields.items() if not isinstance(row, Mapping) or not isinstance(row.get(name), kind)
        ]
        if wrong:
            raise _other_shape(path, f"{', '.join(wrong)} in every row", command)
    return [dict(row) for row in found]


def _other_shape(path: Path, expected: str, command: str) -> InputError:
    return InputError(
        f"not what alignment {_COMMANDS.get(command, command)} --json prints",
        where=path,
        expected=expected,
        next_step="write it again, or move it out of the directory of the run",
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
