"""One run as one self-contained HTML page: opens offline, asks nobody for anything.

The page is a template, a style sheet and a script from ``templates/`` with the data of the run embedded as JSON. All
that comes from a run is text: the template escapes it, and in the JSON ``<`` is written as an escape, so no name, path
or message can become markup.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.errors import InputError
from alignment.files import read_json, write_atomically
from alignment.numerics.verdict import Measure, Outcome, Verdict
from alignment.report.ablation_page import ABLATION, ablation_part
from alignment.report.answer import NUMBER, other_shape, rows, trail
from alignment.report.audit_page import audit_part
from alignment.report.comparison_page import comparison_part
from alignment.report.night import NIGHT, NightRecord, read_night
from alignment.report.provenance_view import both_sides
from alignment.report.replay_page import REPLAY, replay_part
from alignment.report.run_directory import PROVENANCE, STACK, VERDICTS, read_verdicts, stored_fingerprint
from alignment.report.terminal import GRAVITY, grouped, headline, percent_of_budget
from alignment.report.triage_page import triage_part
from alignment.rl.tracking import METRICS, RUN, read_series

if TYPE_CHECKING:
    from alignment.baseline.runs import CurveBaseline

PAGE = "report.html"
CURVES = (
    "reward/before_filter",
    "acc/before_filter",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "student/agreement",
    "student/loss",
)
"""Shown first where a run has them; every other metric is one choice away."""

GAP = "training/rollout_log_probs_abs_diff_mean"
BAND_OF_GROUPS = {
    "reward": "reward/before_filter",
    "correctness": "acc/before_filter",
    "response_length": "response_length/before_filter",
}
BAND_OF_SCALARS = {
    "log_prob_gap": GAP, "kept_fraction": "filter/kept_fraction", "generation_batches": "filter/num_gen_batches",
}  # fmt: skip
"""The metric whose number of a step a stored curve holds under another name; a scalar may have the metric's own."""

MEMORY = "memory.json"
ANSWERS = {
    "replay": (REPLAY, replay_part),
    "ablation": (ABLATION, ablation_part),
    "comparison": ("comparison.json", comparison_part),
    "triage": ("triage.json", triage_part),
    "audit": ("audit.json", audit_part),
}
"""File beside a run and its reader, of the commands whose answer is a verdict; the first one stands above the page of a
run that has no verdicts of its own."""

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(runs: Sequence[Path], target: Path, *, baselines: Path | None = None) -> Path:
    """The page of one run, or of several beside each other.

    Args:
        runs: directories of runs: of ``alignment run`` (verdicts), of a training run (metrics), or both.
        target: the file to write; whole or not at all.
        baselines: folder of the stored baselines, for the bands behind the curves and for their provenance.

    Raises:
        InputError: a directory with nothing in it that a page could show.
    """
    parts = [gather(Path(run), baselines=baselines) for run in runs]
    if not parts:
        raise InputError("no run is named", where="report", expected="at least one directory of a run")
    return _written(parts, target)


def write_answer(name: str, target: Path, *, verdicts: Sequence[Verdict] = (), **answers: Any) -> Path:
    """The page of what a command answered without a directory of a run.

    Args:
        name: what was judged, for people.
        target: the file to write; whole or not at all.
        verdicts: of checks.
        answers: the documents by the names of :data:`ANSWERS`, as the commands print them with ``--json``.

    Raises:
        OSError: it cannot be written.
    """
    return _written([_part(name, list(verdicts), _read(answers, {key: name for key in answers}))], target)


def _written(parts: Sequence[Mapping[str, Any]], target: Path) -> Path:
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
    files = {name: run / file for name, (file, _) in ANSWERS.items() if (run / file).is_file()}
    answers = _read({name: read_json(file) for name, file in files.items()}, files)
    if "replay" in answers:  # its recording, the replay and every perturbed one: the drift between them is the answer
        folders = []
    stored = functools.cache(lambda: _stored_curves(baselines))
    trainings = [_training(path, run, stored) for path in folders]
    memory = _memory(read_json(run / MEMORY), run / MEMORY) if (run / MEMORY).is_file() else None
    if not (verdicts or trainings or (run / MEMORY).is_file() or answers or night):
        raise InputError(
            "the directory holds no run",
            where=run,
            expected=f"{VERDICTS} or {METRICS}",
            next_step="name another directory",
        )
    provenance = _provenance(run)
    part = _part(run.name, verdicts, answers, trainings) | {
        "sides": both_sides(verdicts, provenance, baselines),
        "provenance": provenance,
        "stack": (run / STACK).read_text(encoding="utf-8") if (run / STACK).is_file() else "",
        "memory": memory,
    }
    if night is not None:
        from alignment.report.night_page import night_part

        part |= night_part(night, run)
    return part


def _read(answers: Mapping[str, Any], sources: Mapping[str, Path | str]) -> dict[str, dict[str, Any]]:
    """What a page shows of each answer, in the order in which one of them is the headline."""
    return {name: read(answers[name], sources[name]) for name, (_, read) in ANSWERS.items() if name in answers}


def _part(
    name: str,
    verdicts: list[Verdict],
    answers: Mapping[str, Mapping[str, Any]],
    trainings: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """One section of a page, without what only the directory of a run has."""
    first = next(iter(answers.values()), None)
    if verdicts or first is None:
        title = headline(verdicts) if verdicts else f"{len(trainings)} training runs, not judged"
        outcome = _overall(verdicts)
    else:
        title, outcome = first["headline"], first["outcome"]
    asked = [v.next_command for v in verdicts if v.next_command] + answers.get("triage", {}).get("next", [])
    return {
        "name": name,
        "night": None,
        "headline": title,
        "outcome": outcome,
        "layers": _heat(verdicts),
        "findings": [_finding(v) for v in verdicts if v.outcome in (Outcome.FAIL, Outcome.ERROR, Outcome.INCONCLUSIVE)],
        "checks": [_row(v) for v in verdicts],
        "unavailable": sorted({(v.subject, v.reason) for v in verdicts if v.outcome is Outcome.UNAVAILABLE}),
        "next": list(dict.fromkeys(asked)),
        "baselines": sorted({v.baseline for v in verdicts if v.baseline}),
        "trainings": list(trainings),
        "gate": [_gate(v) for v in verdicts if v.check.startswith("e2e/curve-")],
        "sides": None,
        "provenance": None,
        "stack": "",
        "memory": None,
        **{key: answers.get(key) for key in ANSWERS},
    }


def render(parts: Sequence[Mapping[str, Any]]) -> str:
    """The page of what :func:`gather` returned."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    charts = [
        {
            "trainings": part["trainings"],
            **{name: part[name]["charts"] for name in ("replay", "ablation") if part[name]},
        }
        for part in parts
    ]
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
    return [] if verdict.where is None else trail(verdict.where.stage, verdict.where.module, verdict.where.quantity)


def _row(verdict: Verdict) -> dict[str, Any]:
    return {
        "check": verdict.check,
        "subject": verdict.subject,
        "device": verdict.device,
        "outcome": verdict.outcome.value,
        "budget": percent_of_budget(verdict.worst),
        "worst": _measured(verdict.worst) if verdict.worst else "",
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


def _training(directory: Path, run: Path, stored: Callable[[], Sequence[CurveBaseline]]) -> dict[str, Any]:
    series = read_series(directory / METRICS)
    names = sorted({name for line in series for name in line if name != "step"})
    about = read_json(directory / RUN) if (directory / RUN).is_file() else None
    config = about.get("config") if isinstance(about, Mapping) else None
    same = [curves for curves in stored() if config in {run.config for run in curves.runs}] if config else []
    return {
        "name": str(directory.relative_to(run)) if directory != run else "training",
        "steps": [line["step"] for line in series],
        "metrics": {name: [line.get(name) for line in series] for name in names},
        "bands": [band for band in _bands(same[0]) if band["metric"] in names] if same else [],
    }


def _stored_curves(baselines: Path | None) -> list[CurveBaseline]:
    from alignment.baseline.runs import load_curves

    return [load_curves(path) for path in sorted(baselines.glob("*/*/e2e/*.curves.json"))] if baselines else []


def _bands(stored: CurveBaseline) -> list[dict[str, Any]]:
    """Lowest and highest of the stored runs of one experiment, metric by metric and step by step."""
    rows: dict[str, dict[int, list[float]]] = {}
    for run in stored.runs:
        for step in run.steps:
            found = {BAND_OF_SCALARS.get(name, name): value for name, value in step.scalars.items()}
            means = {name: sum(map(float, group.mean)) / len(group.mean) for name, group in step.groups.items()}
            found |= {BAND_OF_GROUPS[name]: mean for name, mean in means.items() if name in BAND_OF_GROUPS}
            # A stored curve is of what was generated; without a filter that is what is trained on too.
            if "response_length" in means and not run.filtered:
                found["response_length/mean"] = means["response_length"]
            for metric, value in found.items():
                rows.setdefault(metric, {}).setdefault(step.step, []).append(value)
    label = f"{len(stored.runs)} runs of {stored.preset}, {stored.provenance.stack}"
    return [
        {
            "metric": metric,
            "label": label,
            "steps": sorted(of_steps),
            "low": [min(of_steps[s]) for s in sorted(of_steps)],
            "high": [max(of_steps[s]) for s in sorted(of_steps)],
        }
        for metric, of_steps in sorted(rows.items())
    ]


def _memory(found: Any, path: Path) -> list[dict[str, Any]] | None:
    """The phases of ``alignment memory profile --json``; the record of a profiler (``--trace``) has none."""
    phases = found.get("phases") if isinstance(found, Mapping) else None
    if phases is None:
        return None
    found = rows(phases, path, {"phase": str, "peak": NUMBER, "modelled": NUMBER}, "memory profile --json")
    for row in found:
        if not isinstance(row.setdefault("outside", None), (*NUMBER, type(None))):
            raise other_shape(path, "a number or null as outside", "memory profile --json")
    highest = max((row["peak"] for row in found), default=0) or 1
    return [{**row, "share": row["peak"] / highest} for row in found]


def _provenance(run: Path) -> dict[str, Any] | None:
    """What made the run; sections that are none are left out. Where it has no provenance of its own, the machine that
    the record of a training tells of."""
    path = run / PROVENANCE
    if not path.is_file():
        about = read_json(run / RUN) if (run / RUN).is_file() else None
        found = stored_fingerprint(about) if isinstance(about, Mapping) else {}
        return {"fingerprint": found} if found else None
    found = read_json(path)
    if not isinstance(found, Mapping):
        raise InputError("not the provenance of a run", where=path, expected="a mapping", found=type(found).__name__)
    sections = ("fingerprint", "determinism", "packages")
    return {key: value for key, value in found.items() if key not in sections or isinstance(value, Mapping)}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
