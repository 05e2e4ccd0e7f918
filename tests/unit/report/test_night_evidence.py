"""What a phase left behind: believed when it is whole, and an error, never a pass, when it is not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from alignment.capture.own_format import RowColumns, write_about, write_rows
from alignment.files import write_json
from alignment.numerics.verdict import Measure, Outcome, Verdict
from alignment.report.night_evidence import gather_evidence, worst_of_each
from alignment.report.night_judgement import findings_of
from alignment.report.night_matrix import KnownFailure, Phase
from alignment.report.run_directory import write_verdicts

ABOUT = {"commit": "c0ffee", "fingerprint": {"chip": "910B"}, "packages": {"torch": "2.8.0"}}


def phase(kind: str, path: str = "it", **more) -> Phase:
    return Phase(name="checks", command=("x",), timeout_minutes=1.0, leaves=((kind, path),), **more)


def evidence(tmp_path, kind: str, *, require: bool = True, **more):
    return gather_evidence(phase(kind, **more), tmp_path, device="npu", require=require)


def outcomes(found) -> dict[str, str]:
    return {v.check: v.outcome.value for v in found.verdicts}


def verdict(check: str, outcome: Outcome = Outcome.PASS) -> Verdict:
    return Verdict(
        check=check, layer="unit", stage="operator", subject="torch", device="npu", outcome=outcome, reason="why",
        measures=(Measure(name="relative_l2", value=0.5, bound=1.0),),
    )  # fmt: skip


# Tests.


def junit(tmp_path, *cases: str, tests: int | None = None) -> None:
    count = len(cases) if tests is None else tests
    text = f'<testsuites><testsuite name="pytest" tests="{count}">{"".join(cases)}</testsuite></testsuites>'
    (tmp_path / "it").write_text(text)


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="tests.unit.rope" name="{name}" time="0.1">{inside}</testcase>'


FAILURE = '<failure message="off by 0.3">trace</failure>'
SKIPPED = '<skipped type="pytest.skip" message="unavailable: subject vllm: not installed">x</skipped>'
XFAIL = '<skipped type="pytest.xfail" message="driver bug 12"/>'
ROPE = "checks/tests.unit.rope::"


def test_tests_are_judged_by_function(tmp_path):
    junit(tmp_path, case("test_a[npu-1]"), case("test_a[npu-2]", FAILURE), case("test_b"), case("test_c", XFAIL),
          case("test_d", '<error message="no device">x</error>'))  # fmt: skip
    found = evidence(tmp_path, "junit")
    assert found.problems == [] and found.counts == {"tests": 5}
    assert outcomes(found) == {
        ROPE + "test_a": "fail", ROPE + "test_b": "pass", ROPE + "test_c": "pass", ROPE + "test_d": "error",
    }  # fmt: skip
    assert found.verdicts[0].reason == "test_a[npu-2]: off by 0.3" and found.verdicts[0].layer == "unit"


def test_skipped_is_failed_where_everything_is_required(tmp_path):
    junit(tmp_path, case("test_a", SKIPPED), case("test_b"))
    assert outcomes(evidence(tmp_path, "junit"))[ROPE + "test_a"] == "fail"
    assert outcomes(evidence(tmp_path, "junit", require=False))[ROPE + "test_a"] == "unavailable"
    (failed, _) = evidence(tmp_path, "junit").verdicts
    assert "skipped, and skipped is failed: unavailable: subject vllm: not installed" in failed.reason


def test_a_test_that_passes_and_fails_is_flaky(tmp_path):
    junit(tmp_path, case("test_a", FAILURE), case("test_a"), case("test_b", "<rerunFailure message='x'/>"))
    assert findings(tmp_path) == [
        ("test_a", "flaky", "new", "test_a passed and failed in one run"),
        ("test_b", "flaky", "new", "test_b was run again"),
    ]


def findings(tmp_path, **more) -> list[tuple[str, str, str, str]]:
    told = findings_of("checks", evidence(tmp_path, "junit"), today=date(2026, 11, 30), **more)
    return [(f.check.removeprefix(ROPE), f.outcome, f.stage, f.reason) for f in told]


def test_a_flaky_case_hides_no_failure_of_another(tmp_path):
    junit(tmp_path, case("test_a[fp32]", FAILURE), case("test_a[bf16]"), case("test_a[bf16]", FAILURE))
    assert findings(tmp_path) == [
        ("test_a", "fail", "new", "test_a[fp32]: off by 0.3"),
        ("test_a", "flaky", "new", "test_a[bf16] passed and failed in one run"),
    ]


def test_what_fails_each_time_it_is_run_is_no_flaky_test(tmp_path):
    junit(tmp_path, case("test_a", FAILURE + "<rerunFailure message='off by 0.3'/>"))
    assert findings(tmp_path) == [("test_a", "fail", "new", "test_a: off by 0.3")]


def test_a_known_case_hides_no_new_failure_of_another(tmp_path):
    match, expires = "checks/*test_a: test_a[[]fp??]*", date(2026, 12, 20)
    known = [KnownFailure(match=match, owner="wei", reason="driver bug 12", expires=expires)]
    junit(tmp_path, case("test_a[fp32]", FAILURE), case("test_a[bf16]", FAILURE), case("test_a[fp16]", FAILURE))
    assert findings(tmp_path, known=known) == [
        ("test_a", "known", "known", "test_a[fp32]: off by 0.3 (and 1 more)"),
        ("test_a", "fail", "new", "test_a[bf16]: off by 0.3"),
    ]
    assert [stage for _, _, stage, _ in findings(tmp_path, quarantined={ROPE + "test_a": "why"})] == ["known"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no JUnit file: the tests did not come to their end"),
        ("<testsuites><testsuite", "the JUnit file is truncated or not XML"),
        ('<testsuites><testsuite tests="0"/></testsuites>', "no test was run; expected at least one"),
        (f'<testsuite tests="9">{case("test_a")}</testsuite>', "1 of 9 tests are in the file"),
    ],
)
def test_a_file_of_tests_that_is_not_whole_is_a_problem(tmp_path, text, problem):
    if text is not None:
        (tmp_path / "it").write_text(text)
    (told,) = evidence(tmp_path, "junit").problems
    assert problem in told


# Runs.


def test_a_run_says_what_it_found_and_what_made_it(tmp_path):
    write_verdicts(tmp_path / "it", [verdict("unit/rope"), verdict("unit/router", Outcome.UNAVAILABLE)])
    (told,) = evidence(tmp_path, "run").problems
    assert "provenance.json: the file does not exist" in told
    write_json(tmp_path / "it" / "provenance.json", {**ABOUT, "commit": ""})
    (told,) = evidence(tmp_path, "run").problems
    assert "provenance.json: the run does not say what made it; expected commit" in told
    write_json(tmp_path / "it" / "provenance.json", ABOUT)
    found = evidence(tmp_path, "run")
    assert found.problems == [] and outcomes(found) == {"unit/rope": "pass", "unit/router": "error"}
    assert outcomes(evidence(tmp_path, "run", require=False))["unit/router"] == "unavailable"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "verdicts of another schema; expected schema 1; found list"),
        ("3", "verdicts of another schema; expected schema 1; found int"),
        ('{"schema": 1}', "not the verdicts of a run (KeyError: 'verdicts')"),
        ('{"schema": 1, "verdicts": 3}', "not the verdicts of a run (TypeError"),
        ('{"schema": 1, "verdicts": [[]]}', "not the verdicts of a run (TypeError"),
        ('{"schema": 1, "verdicts": [{"measures": [], "outcome": "green"}]}', "not the verdicts of a run (ValueError"),
        ('{"schema": 1, "verdicts": [{"measures": [], "outcome": "pass"}]}', "not the verdicts of a run (TypeError"),
    ],
)
def test_verdicts_of_another_shape_are_a_problem_of_the_phase(tmp_path, text, problem):
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "verdicts.json").write_text(text)
    (told,) = evidence(tmp_path, "run").problems
    assert "verdicts.json: " in told and problem in told


@pytest.mark.parametrize(
    ("verdicts", "problem"),
    [([], "no verdict: nothing was judged"), ([verdict("a", Outcome.UNAVAILABLE)], "everything was unavailable: why")],
)
def test_a_run_that_judged_nothing_is_a_problem(tmp_path, verdicts, problem):
    write_verdicts(tmp_path / "it", verdicts)
    write_json(tmp_path / "it" / "provenance.json", ABOUT)
    for require in (True, False):
        assert problem in evidence(tmp_path, "run", require=require).problems[0]


@pytest.mark.parametrize(
    ("lines", "outcome", "problem"),
    [
        ('{"step": 1, "loss": 0.5}\n', {"unit/rope": "pass"}, None),
        ('{"step": 1, "loss": null}\n', {"unit/rope": "pass", "checks/metrics are finite": "fail"}, None),
        ('{"loss": 0.5}\n', {"unit/rope": "pass"}, "a line of a series is about a step"),
        ('{"step": 1, "lo', {"unit/rope": "pass"}, "the series ends in a torn line"),
    ],
)
def test_the_trainings_of_a_run_are_on_the_page_if_they_are_whole(tmp_path, lines, outcome, problem):
    write_verdicts(tmp_path / "it", [verdict("unit/rope")])
    write_json(tmp_path / "it" / "provenance.json", ABOUT)
    (tmp_path / "it" / "dapo").mkdir()
    (tmp_path / "it" / "dapo" / "metrics.jsonl").write_text(lines)
    found = evidence(tmp_path, "run")
    whole = problem is None and "fail" not in outcome.values()
    assert found.trainings == ([tmp_path / "it" / "dapo"] if whole else [])
    assert outcomes(found) == outcome
    assert len(found.problems) == (problem is not None) and all(problem in told for told in found.problems)


RUN = {"config": "f1", "provenance": {"model_hash": "x"}, "total_steps": 3}


def training(tmp_path, *lines: dict, run: dict = RUN, torn: str = "") -> None:
    folder = tmp_path / "it"
    folder.mkdir(exist_ok=True)
    write_json(folder / "run.json", run)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def steps(count: int, **last) -> list[dict]:
    lines = [{"step": n + 1, "actor/loss": 0.5, "actor/grad_norm": 1.0 + n} for n in range(count)]
    lines[-1].update(last)
    return lines


def test_a_whole_training_is_believed_and_its_means_are_watched(tmp_path):
    training(tmp_path, *steps(3))
    found = evidence(tmp_path, "training")
    assert (found.problems, found.counts, found.trainings) == ([], {"steps": 3}, [tmp_path / "it"])
    (told,) = found.verdicts
    assert told.outcome is Outcome.PASS
    assert {m.name: m.value for m in told.measures} == {"actor/grad_norm": 2.0, "actor/loss": 0.5}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1.0", True])
def test_a_metric_that_is_no_number_is_a_failure_with_its_step(tmp_path, value):
    training(tmp_path, *steps(3, **{"actor/grad_norm": value}))
    (told,) = evidence(tmp_path, "training").verdicts
    assert told.outcome is Outcome.FAIL and f"actor/grad_norm is {value} in step 3 (1 values in all)" == told.reason
    assert (told.where.module, told.where.detail) == ("actor/grad_norm", f"step 3: {value}")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lines": steps(2)}, "2 of 3 steps: the run did not come to its end"),
        ({"lines": []}, "the metrics are empty; expected metrics of 3 steps; found 0"),
        ({"lines": [{"step": 1}, {"step": 2}, {"step": 3}]}, "the metrics are empty"),
        ({"lines": [*steps(2), steps(2)[1]]}, "steps are missing or twice: [1, 2, 2]"),
        ({"lines": steps(2), "torn": '{"step": 3, "act'}, "the series ends in a torn line"),
        ({"lines": steps(3), "run": {"config": "f1", "total_steps": 3}}, "the run does not say what made it"),
    ],
)  # fmt: skip
def test_a_training_that_is_not_whole_is_a_problem(tmp_path, given, problem):
    training(tmp_path, *given.pop("lines"), **given)
    found = evidence(tmp_path, "training")
    assert any(problem in told for told in found.problems), found.problems


def test_the_matrix_may_say_how_many_steps_a_training_has(tmp_path):
    training(tmp_path, *steps(3))
    assert "3 of 4 steps" in evidence(tmp_path, "training", steps=4).problems[0]


# Captures and documents.


def capture(root, stages=("rollout", "update_actor"), count: int = 2) -> None:
    write_about(root, {"detail": "statistics"})
    for step in range(1, count + 1):
        for stage in stages:
            rows = RowColumns()
            rows.append(
                module="layers.0", class_name="Linear", kind="module", direction="forward", call=0, role="output",
                path="", order=0, parent="", dtype="float32", shape=(2, 2), shard=None, keys=-1, statistics=0,
                sketch=-1, sketch_count=0, tensor=None,
            )  # fmt: skip
            write_rows(root, step, stage, 0, rows, statistics=np.ones((1, 7)), sketches=np.zeros((0, 8)))


def test_a_whole_capture_is_read_to_its_last_row(tmp_path):
    capture(tmp_path / "it")
    found = evidence(tmp_path, "capture")
    assert (found.problems, found.counts) == ([], {"captured rows": 4})


def test_a_capture_that_is_not_whole_is_a_problem(tmp_path):
    root = tmp_path / "it"
    assert "there is no such capture" in evidence(tmp_path, "capture").problems[0]
    write_about(root, {"detail": "statistics"})
    assert "the capture is empty" in evidence(tmp_path, "capture").problems[0]
    capture(root)
    rows = root / "step2" / "update_actor" / "rank0.json"
    kept = rows.read_bytes()
    rows.unlink()
    told = evidence(tmp_path, "capture").problems
    assert any("its rows are missing: the capture was cut off" in problem for problem in told)
    assert any("everything of step 2, update_actor is missing" in problem for problem in told)
    rows.write_bytes(kept[: len(kept) // 2])
    assert "rank0.json: the file is truncated or not JSON" in evidence(tmp_path, "capture").problems[0]
    rows.write_bytes(kept)
    assert evidence(tmp_path, "capture").problems == []
    data = root / "step1" / "rollout" / "rank0.safetensors"
    os.truncate(data, data.stat().st_size - 1)
    assert "rank0.safetensors" in evidence(tmp_path, "capture").problems[0]


def test_a_document_is_what_a_command_printed(tmp_path):
    path = tmp_path / "it"
    told = {"verdicts": [{**verdict("stress/host-0a1b2c/npu:3/7").to_dict(), "stage": "stress"}]}
    path.write_text("a banner\n" + json.dumps(told, indent=1))
    found = evidence(tmp_path, "document")
    # Named by where the card is, not by what Ray called its node this night.
    assert found.problems == [] and outcomes(found) == {"stress/host/npu:3": "pass"}
    path.write_text(json.dumps({"aligned": False, "first": {"reason": "layers.1 differs"}}))
    (only,) = evidence(tmp_path, "document").verdicts
    assert (only.outcome, only.reason) == (Outcome.FAIL, "layers.1 differs")
    for text, problem in (
        ("", "the file is truncated or not JSON"), ("{}", "the document is empty"), ('{"a": ', "truncated or not JSON"),
        ('{"error": "no such device"}', "the command says: no such device"), ('{"verdicts": []}', "no verdict"),
        ('{"verdicts": [{"check": 1}]}', "not the verdicts of a command"),
    ):  # fmt: skip
        path.write_text(text)
        assert any(problem in told for told in evidence(tmp_path, "document").problems), text


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (0, "the document is empty; expected what a command prints with --json; found 0"),
        ("aligned", "the document is empty"),
        ([], "the document is empty"),
        ([{}, {"stack": None}], "the document is empty"),
        ({"devices": [], "stack": {"torch": None}, "run": " "}, "the document is empty"),
        ({"aligned": None}, "the document does not say whether things are aligned; expected true or false"),
        ({"aligned": 1}, "the document does not say whether things are aligned"),
        ({"aligned": True, "first": {"reason": "layers.1 differs"}}, "aligned, and where they part first"),
        ({"run": "runs/a", "metrics": []}, "the metrics are empty; expected those of every step; found 0"),
        ({"run": "runs/a", "metrics": {}}, "the metrics are empty"),
        ({"run": "runs/a", "metrics": [{"loss": 0.5}, {}]}, "the metrics are empty"),
        ({"run": "runs/a", "metrics": None}, "the metrics are empty; expected those of every step"),
        ({"run": "runs/a", "exit_code": 1}, "the document says exit code 1, and nothing in it says why"),
        ({"run": "runs/a", "exit_code": "0"}, "the document says exit code 0, and nothing in it says why"),
        ({"verdicts": None}, "not the verdicts of a command"),
        ({"verdicts": {}}, "no verdict: nothing was judged"),
    ],
    ids=str,
)
@pytest.mark.parametrize("require", [True, False])
def test_a_document_that_means_nothing_is_a_problem(tmp_path, document, problem, require):
    write_json(tmp_path / "it", document)
    found = evidence(tmp_path, "document", require=require)
    assert len(found.problems) == 1 and problem in found.problems[0]


def test_a_document_that_means_something_is_none(tmp_path):
    for document, told in (
        ({"devices": [{"kind": "cpu", "available": True}]}, {}),
        ([{"match": 3}], {}),
        ({"aligned": True, "first": None}, {"checks/the command's word": "pass"}),
        ({"run": "runs/a", "metrics": [{"loss": 0.5}]}, {"checks/metrics are finite": "pass"}),
        ({"run": "runs/a", "metrics": [{"loss": "high"}]}, {"checks/metrics are finite": "fail"}),
        ({"exit_code": 0, "verdicts": [verdict("a").to_dict()]}, {"a": "pass"}),
        ({"exit_code": 1, "verdicts": [verdict("a", Outcome.FAIL).to_dict()]}, {"a": "fail"}),
    ):
        write_json(tmp_path / "it", document)
        found = evidence(tmp_path, "document")
        assert found.problems == [] and outcomes(found) == told, document


def test_a_pass_without_a_number_is_not_believed(tmp_path):
    write_json(tmp_path / "it" / "provenance.json", ABOUT)
    silent = replace(verdict("a"), measures=())
    wild = replace(verdict("b"), measures=(Measure(name="relative_l2", value=float("nan"), bound=1.0),))
    shown = replace(verdict("c"), measures=(Measure(name="skew", value=float("nan")),))
    for verdicts, problem in (
        ([silent, silent], "nothing was measured: a passed without a number, and so did all"),
        ([verdict("c"), wild], "b passed, and its relative_l2 is nan"),
    ):
        write_verdicts(tmp_path / "it", verdicts)
        (told,) = evidence(tmp_path, "run").problems
        assert told.endswith(problem)
    write_verdicts(tmp_path / "it", [silent, shown, replace(wild, outcome=Outcome.FAIL)])
    assert evidence(tmp_path, "run").problems == []


def test_tests_that_were_all_skipped_are_none_that_were_run(tmp_path):
    junit(tmp_path, case("test_a", SKIPPED), case("test_b", SKIPPED))
    (told,) = evidence(tmp_path, "junit", require=False).problems
    assert told.endswith("no test was run: 2 were skipped: unavailable: subject vllm: not installed")
    junit(tmp_path, case("test_a", SKIPPED), case("test_b", XFAIL))
    assert evidence(tmp_path, "junit", require=False).problems == []


def test_the_worst_of_one_name_stays():
    verdicts = [verdict("a"), verdict("a", Outcome.FAIL), verdict("a", Outcome.ERROR), verdict("b")]
    assert [(v.check, v.outcome) for v in worst_of_each(verdicts)] == [("a", Outcome.FAIL), ("b", Outcome.PASS)]
