"""What a phase of a night left behind, and what that says: findings, or why nothing can be said.

A phase is believed when its evidence is whole: an exit code of zero beside an empty file proves nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from alignment.errors import InputError
from alignment.files import read_json
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict
from alignment.report.night_matrix import Phase
from alignment.report.run_directory import PROVENANCE, read_verdicts
from alignment.report.terminal import GRAVITY


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case of a check: a test with its parameters. ``reason`` begins with its name, ``flaky`` says how it said two
    things ("" where it did not)."""

    outcome: Outcome
    reason: str
    flaky: str = ""


@dataclass
class Evidence:
    """``problems``: why the phase is not carried out. ``verdicts``: what it found. ``cases``: of the checks that have
    several. ``counts``: for people. ``trainings``: folders with whole metrics, for the page."""

    problems: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    cases: dict[str, list[Case]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    trainings: list[Path] = field(default_factory=list)

    def add(self, other: Evidence) -> None:
        """Takes in what another node or file left."""
        self.problems += other.problems
        self.verdicts += other.verdicts
        for check, cases in other.cases.items():
            self.cases.setdefault(check, []).extend(cases)
        self.trainings += other.trainings
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


def gather_evidence(phase: Phase, folder: Path, *, device: str, require: bool, place: str = "") -> Evidence:
    """Reads everything that ``phase`` has to leave in ``folder``.

    Args:
        device: label for findings whose files name none.
        require: whether what is skipped or unavailable counts as failed.
        place: node, where there are several.
    """
    found = Evidence()
    for kind, path in phase.leaves:
        at = folder / path
        try:
            if kind == "junit":
                found.add(_junit(at, phase, device=device, require=require, place=place))
            elif kind == "run":
                found.add(_run(at, phase, device=device, require=require, place=place))
            elif kind == "training":
                found.add(_training(at, phase, device=device, place=place))
            elif kind == "capture":
                found.add(_capture(at))
            else:
                found.add(_document(at, phase, device=device, require=require, place=place))
        except InputError as error:
            found.problems.append(str(error))
        except OSError as error:
            found.problems.append(f"{at}: cannot be read: {error.strerror or error}")
    if place:
        found.problems = [f"{place}: {problem}" for problem in found.problems]
    return found


# Tests.


def _junit(path: Path, phase: Phase, *, device: str, require: bool, place: str) -> Evidence:
    try:
        root = ElementTree.parse(path).getroot()
    except FileNotFoundError:
        raise InputError("no JUnit file: the tests did not come to their end", where=path) from None
    except ElementTree.ParseError as error:
        raise InputError(f"the JUnit file is truncated or not XML ({error})", where=path) from None
    suites = [root] if root.tag == "testsuite" else root.findall("testsuite")
    cases = [case for suite in suites for case in suite.iter("testcase")]
    skipped = [why for case in cases if (why := _skipped(case)) is not None]
    promised = sum(int(n) for suite in suites if (n := suite.get("tests", "")).isdigit())
    found = Evidence(counts={"tests": len(cases)})
    if not cases:
        raise InputError("no test was run", where=path, expected="at least one")
    if len(skipped) == len(cases) and not require:
        found.problems.append(f"{path}: no test was run: {len(cases)} were skipped: {skipped[0]}")
    if promised > len(cases):
        # pytest counts a test that passed and failed in its teardown twice, never a test that is not there.
        doubles = sum(bool(case.findall("error")) for case in cases)
        if promised > len(cases) + doubles:
            found.problems.append(f"{path}: {len(cases)} of {promised} tests are in the file")
    told: dict[tuple[str, str], list[ElementTree.Element]] = {}
    for case in cases:
        told.setdefault((case.get("classname", ""), case.get("name", "")), []).append(case)
    for (module, name), elements in told.items():
        check = f"{phase.name}/{module}::{name.partition('[')[0]}" + (f"@{place}" if place else "")
        answers = [_case(element, require) for element in elements]
        flaky = _flaky(name, elements, {outcome for outcome, _ in answers})
        found.cases.setdefault(check, []).extend(
            Case(outcome=outcome, reason=f"{name}: {reason}", flaky=flaky) for outcome, reason in answers
        )
    for check, of_check in found.cases.items():
        worst = min((case.outcome for case in of_check), key=GRAVITY.index)
        reason = f"{len(of_check)} passed"
        if worst is not Outcome.PASS:
            reason = in_one([case.reason for case in of_check if case.outcome is worst])
        layer = next((name for name in ("unit", "layer") if f".{name}." in check), "e2e")
        found.verdicts.append(
            Verdict(
                check=check, layer=layer, stage=phase.name, subject="pytest", device=device, outcome=worst,
                reason=reason,
            )
        )  # fmt: skip
    return found


def in_one(reasons: Sequence[str]) -> str:
    """The first of several reasons, and how many there are."""
    return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


def _flaky(name: str, elements: Sequence[ElementTree.Element], outcomes: set[Outcome]) -> str:
    """How a test with its parameters said two things. What failed each time it was run again said one."""
    if Outcome.PASS in outcomes and outcomes - {Outcome.PASS}:
        return f"{name} passed and failed in one run"
    again = any(element.find(tag) is not None for element in elements for tag in ("rerunFailure", "flakyFailure"))
    return f"{name} was run again" if again and outcomes == {Outcome.PASS} else ""


def _case(case: ElementTree.Element, require: bool) -> tuple[Outcome, str]:
    for tag, outcome in (("failure", Outcome.FAIL), ("error", Outcome.ERROR)):
        element = case.find(tag)
        if element is not None:
            return outcome, _line(element.get("message") or element.text or tag)
    why = _skipped(case)
    if why is None:
        failed = case.find("skipped")
        return Outcome.PASS, "" if failed is None else f"expected to fail: {_told(failed)}"
    # Where the row requires everything, a test that was skipped is one that failed.
    return (Outcome.FAIL, f"skipped, and skipped is failed: {why}") if require else (Outcome.UNAVAILABLE, why)


def _skipped(case: ElementTree.Element) -> str | None:
    """Why a test was not run; None for one that was, and for one that was expected to fail and did."""
    element = case.find("skipped")
    return None if element is None or element.get("type") == "pytest.xfail" else _told(element)


def _told(element: ElementTree.Element) -> str:
    return _line(element.get("message") or element.text or "no reason")


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


# Runs.


def _run(folder: Path, phase: Phase, *, device: str, require: bool, place: str) -> Evidence:
    from alignment.rl.tracking import METRICS, read_series

    found = Evidence(verdicts=read_verdicts(folder))
    found.counts["checks"] = len(found.verdicts)
    about = read_json(folder / PROVENANCE)
    for name in ("commit", "fingerprint", "packages"):
        if not isinstance(about, Mapping) or not about.get(name):
            raise InputError("the run does not say what made it", where=folder / PROVENANCE, expected=name)
    _something_judged(found, folder, require=require)
    for path in sorted(folder.glob(f"*/{METRICS}")):
        try:
            verdict = _metrics_are_finite(read_series(path), phase, device=device, place=place)
        except InputError as error:  # what the run found stays found
            found.problems.append(str(error))
            continue
        if verdict.outcome is Outcome.FAIL:
            found.verdicts.append(verdict)
        elif verdict.measures:
            found.trainings.append(path.parent)
    return found


def _something_judged(found: Evidence, where: Path, *, require: bool) -> None:
    judged = [v for v in found.verdicts if v.outcome is not Outcome.UNAVAILABLE]
    if not found.verdicts:
        found.problems.append(f"{where}: no verdict: nothing was judged")
    elif not judged:
        found.problems.append(f"{where}: everything was unavailable: {found.verdicts[0].reason}")
    elif require:
        found.verdicts = [
            replace(v, outcome=Outcome.ERROR, reason=f"unavailable, and required: {v.reason}")
            if v.outcome is Outcome.UNAVAILABLE
            else v
            for v in found.verdicts
        ]
    if judged and all(v.outcome is Outcome.PASS and not v.measures for v in judged):
        why = f"{judged[0].check} passed without a number, and so did all"
        found.problems.append(f"{where}: nothing was measured: {why}")
    for verdict in judged:
        for measure in verdict.measures:
            if verdict.outcome is Outcome.PASS and measure.bound is not None and not math.isfinite(measure.value):
                why = f"{verdict.check} passed, and its {measure.name} is {measure.value}"
                found.problems.append(f"{where}: {why}")


def _training(folder: Path, phase: Phase, *, device: str, place: str) -> Evidence:
    from alignment.rl.tracking import METRICS, RUN, read_series

    about = read_json(folder / RUN)
    if not isinstance(about, Mapping) or not about.get("provenance") or not about.get("config"):
        raise InputError("the run does not say what made it", where=folder / RUN, expected="config and provenance")
    expected = phase.steps or about.get("total_steps")
    series = read_series(folder / METRICS)
    if not series or not all(isinstance(line, Mapping) and set(line) - {"step"} for line in series):
        problem = "the metrics are empty"
        raise InputError(problem, where=folder / METRICS, expected=f"metrics of {expected} steps", found=len(series))
    found = Evidence(counts={"steps": len(series)})
    steps = [line.get("step") for line in series]
    if steps != list(range(1, len(steps) + 1)):
        found.problems.append(f"{folder / METRICS}: steps are missing or twice: {steps}")
    if len(series) != expected:
        found.problems.append(f"{folder / METRICS}: {len(series)} of {expected} steps: the run did not come to its end")
    verdict = _metrics_are_finite(series, phase, device=device, place=place)
    if verdict.outcome is Outcome.PASS:
        found.trainings.append(folder)
    found.verdicts.append(verdict)
    return found


def _metrics_are_finite(series: list[Mapping[str, Any]], phase: Phase, *, device: str, place: str) -> Verdict:
    wrong = [
        (line.get("step", at), name, value)
        for at, line in enumerate(series, 1)
        for name, value in line.items()
        if name != "step" and not _finite(value)
    ]
    verdict = Verdict(
        check=f"{phase.name}/metrics are finite" + (f"@{place}" if place else ""), layer="e2e", stage=phase.name,
        subject="training", device=device, outcome=Outcome.PASS,
        reason=f"{len(series)} steps, every metric finite", measures=_means(series) if not wrong else (),
    )  # fmt: skip
    if not wrong:
        return verdict
    step, name, value = wrong[0]
    return replace(
        verdict, outcome=Outcome.FAIL, reason=f"{name} is {value} in step {step} ({len(wrong)} values in all)",
        where=Divergence(stage=phase.name, module=name, quantity="metric", detail=f"step {step}: {value}"),
    )  # fmt: skip


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _means(series: list[Mapping[str, Any]]) -> tuple[Measure, ...]:
    """Every metric's mean over the run: shown and watched for drift, judged by nothing here."""
    names = sorted({name for line in series for name in line if name != "step"})
    means = {n: [line[n] for line in series if n in line] for n in names}
    return tuple(Measure(name=name, value=math.fsum(values) / len(values)) for name, values in means.items())


def _capture(folder: Path) -> Evidence:
    """Readable from the first row to the last, and as large as it says it is."""
    from alignment.capture.own_format import OwnCapture
    from alignment.capture.readers import open_capture
    from alignment.weights.tensor_file import read_header

    reader = open_capture(folder)
    rows, ranks = 0, {}
    for step in reader.steps():
        for stage in reader.stages(step):
            ranks[step, stage] = tuple(reader.ranks(step, stage))
            for rank in ranks[step, stage]:
                rows += sum(1 for _ in reader.rows(step, stage, rank))
    if not rows:
        raise InputError("the capture is empty", where=folder, expected="at least one row")
    found = Evidence(counts={"captured rows": rows})
    if isinstance(reader, OwnCapture):
        for path in sorted(folder.glob("step*/*/*.safetensors")):
            read_header(path)  # which holds the length of the file against what it says
            stem = re.sub(r"-\d+$", "", path.stem)
            if not (path.parent / f"{stem}.json").is_file():
                found.problems.append(f"{path}: its rows are missing: the capture was cut off")
        steps = reader.steps()
        stages = {stage for _, stage in ranks}
        for stage in sorted(stages):
            of_step = {step: ranks.get((step, stage), ()) for step in steps}
            widest = max(of_step.values(), key=len)
            for step, there in of_step.items():
                if there != widest:
                    what = f"ranks {', '.join(map(str, sorted(set(widest) - set(there))))}" if there else "everything"
                    found.problems.append(f"{folder}: {what} of step {step}, {stage} is missing")
        if steps != list(range(steps[0], steps[0] + len(steps))):
            found.problems.append(f"{folder}: steps are missing: {steps}")
    return found


_WORDS = ("error", "verdicts", "aligned", "metrics")
"""What a document of a command may say by which its phase is judged."""


def _document(path: Path, phase: Phase, *, device: str, require: bool, place: str) -> Evidence:
    found = Evidence()
    document = _read_document(path)
    if not (isinstance(document, Mapping) and set(_WORDS) & set(document)) and not _says_something(document):
        told = json.dumps(document)[:80]
        raise InputError("the document is empty", where=path, expected="what a command prints with --json", found=told)
    if not isinstance(document, Mapping):
        return found
    if "error" in document:
        raise InputError(f"the command says: {document['error']}", where=path)
    if "verdicts" in document:
        try:
            found.verdicts = [_steady(Verdict.from_dict(v)) for v in document["verdicts"]]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not the verdicts of a command ({error})", where=path) from None
        found.counts["checks"] = len(found.verdicts)
        _something_judged(found, path, require=require)
    elif "aligned" in document:
        if not isinstance(document["aligned"], bool):
            raise InputError(
                "the document does not say whether things are aligned", where=path, expected="true or false",
                found=document["aligned"],
            )  # fmt: skip
        if document["aligned"] and document.get("first"):
            problem = "the document says that things are aligned, and where they part first"
            raise InputError(problem, where=path, expected="one of the two")
        found.verdicts.append(says(phase, document, device=device, place=place, aligned=document["aligned"]))
    if "metrics" in document:
        series = document["metrics"]
        if not isinstance(series, list) or not series or not all(isinstance(at, Mapping) and at for at in series):
            told = len(series) if isinstance(series, (list, Mapping)) else series
            raise InputError("the metrics are empty", where=path, expected="those of every step", found=told)
        verdict = _metrics_are_finite(series, phase, device=device, place=place)
        if not any(kind == "training" for kind, _ in phase.leaves) or verdict.outcome is Outcome.FAIL:
            found.verdicts.append(verdict)  # of a training it is told by the files, in full precision
    code = document.get("exit_code", 0)
    if code != 0 and not is_red(found):
        found.problems.append(f"{path}: the document says exit code {code}, and nothing in it says why")
    return found


def is_red(evidence: Evidence) -> bool:
    """Whether it shows anything that is not well."""
    return any(v.outcome not in (Outcome.PASS, Outcome.UNAVAILABLE) for v in evidence.verdicts)


def _says_something(document: Any) -> bool:
    """Whether there is a word or a number in it, below mappings and lists: braces alone say nothing."""
    if not isinstance(document, (Mapping, list)):
        return False
    waiting = [document]
    for value in waiting:
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        waiting += inside
        if isinstance(value, (int, float)) or (isinstance(value, str) and value.strip()):
            return True
    return False


def says(phase: Phase, document: Any, *, device: str, place: str = "", aligned: bool) -> Verdict:
    """The verdict of a command that prints none but says, as ``alignment compare`` does, whether things are aligned."""
    first = document.get("first") if isinstance(document, Mapping) else None
    reason = _line(str(first.get("reason", ""))) if isinstance(first, Mapping) else ""
    return Verdict(
        check=f"{phase.name}/the command's word" + (f"@{place}" if place else ""), layer="e2e", stage=phase.name,
        subject="command", device=device, outcome=Outcome.PASS if aligned else Outcome.FAIL,
        reason=reason or ("aligned" if aligned else "it says that things are misaligned"),
    )  # fmt: skip


def _read_document(path: Path) -> Any:
    try:
        return read_json(path)
    except InputError:
        # A banner of a library may stand before the document; the document ends the output.
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for match in re.finditer(r"^[\[{]", text, re.MULTILINE):
            try:
                return json.loads(text[match.start() :])
            except (ValueError, RecursionError):
                continue
        raise


def _steady(verdict: Verdict) -> Verdict:
    """Cards are named by where they are, not by what Ray called their node this night."""
    if verdict.stage != "stress":
        return verdict
    stress, node, device, *_ = [*verdict.check.split("/"), "", ""]
    return replace(verdict, check=f"{stress}/{re.sub('-[0-9a-f]{6}$', '', node)}/{device}")


def worst_of_each(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """One verdict per check, subject and device: the worst, so that no pass hides a failure of the same name."""
    kept: dict[tuple[str, str, str], Verdict] = {}
    for verdict in verdicts:
        key = (verdict.check, verdict.subject, verdict.device)
        other = kept.get(key)
        if other is None or GRAVITY.index(verdict.outcome) < GRAVITY.index(other.outcome):
            kept[key] = verdict
    return list(kept.values())
