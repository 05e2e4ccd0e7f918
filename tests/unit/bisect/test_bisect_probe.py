"""What each exit code and each kind of failure of a probe is taken for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from alignment.bisect.observation import Observation, Result, Signature
from alignment.bisect.probe import Probe, exit_code, order_by_cost, parse_probe
from alignment.bisect.process import Finished, run_process, without_addresses
from alignment.bisect.providers.base import Environment
from alignment.bisect.stack import Stack
from alignment.errors import InputError

HERE = Environment(stack=Stack(pins={}), python=sys.executable)


def finished(code, out="", err=""):
    return Finished(code=code, stdout=out, stderr=err, seconds=0.1)


def shell(code, out="", **options):
    return Probe(kind="shell", text="x", **options).translate(finished(code, out))


def row(outcome, *, exception="", message="", when="call", properties=None, verdicts=()):
    return {
        "outcome": outcome, "exception": exception, "message": message, "when": when, "properties": properties or {},
        "verdicts": list(verdicts),
    }  # fmt: skip


def pytest_said(code, tests=None, **record):
    return Probe(kind="pytest", text="t").translate(
        finished(code, "", "said"), {"tests": tests or {}, **record} if tests is not None or record else None
    )


@pytest.mark.parametrize(
    ("code", "result"),
    [
        (0, Result.GOOD), (1, Result.BAD), (125, Result.SKIP), (75, Result.INFRASTRUCTURE), (2, Result.INFRASTRUCTURE),
        (128, Result.ABORT), (137, Result.ABORT), (127, Result.ABORT), (3, Result.ABORT), (None, Result.SKIP),
        (-9, Result.INFRASTRUCTURE),
    ],
)  # fmt: skip
def test_the_codes_of_a_shell_probe(code, result):
    assert shell(code).result is result


def test_a_shell_probe_tells_its_metric_and_signature():
    line = json.dumps({"metric": 0.25, "check": "scale", "where": "attention", "sign": 1})
    seen = shell(1, f"noise\n{line}\n")
    assert seen.value == 0.25 and seen.failures == (Signature(check="scale", where="attention", sign=1),)
    assert shell(0, line).values == {"scale": 0.25}
    assert shell(125, '{"reason": "data"}').reason == "data"
    assert shell(0, line, by_value=True).result is Result.MEASURED
    assert shell(0, '{"metric": "nan"}').value != shell(0, '{"metric": "nan"}').value


def test_a_time_out_is_a_skip_with_its_class():
    seen = shell(None, timeout=3.0)
    assert (seen.reason, seen.detail) == ("time-out", "not finished after 3 s")


@pytest.mark.parametrize(
    ("code", "result", "reason"),
    [
        (2, Result.INFRASTRUCTURE, "infrastructure"),
        (3, Result.ABORT, "probe"),
        (4, Result.ABORT, "probe"),
        (5, Result.ABORT, "nothing-collected"),
    ],
)
def test_the_codes_of_pytest(code, result, reason):
    seen = pytest_said(code, tests={})
    assert (seen.result, seen.reason) == (result, reason)


def test_pytest_that_finds_no_such_node_collects_nothing():
    seen = Probe(kind="pytest", text="t").translate(finished(4, "", "ERROR: not found: t.py::x"), None)
    assert (seen.result, seen.reason) == (Result.ABORT, "nothing-collected")


def test_a_passing_test_is_good_with_its_metric():
    seen = pytest_said(0, {"t::a": row("passed", properties={"metric": 0.5})})
    assert seen.result is Result.GOOD and seen.values == {"t::a": 0.5}


def test_only_skipped_tests_are_no_pass():
    seen = pytest_said(0, {"t::a": row("skipped", message="no NPU here")})
    assert (seen.result, seen.reason, seen.detail) == (Result.SKIP, "nothing-measured", "no NPU here")


def test_a_failed_assertion_is_bad_and_places_itself_by_the_verdict():
    place = {"stage": "layer", "module": "layers.0.self_attn", "quantity": "core"}
    measure = {"name": "core", "value": 0.3, "bound": 0.1}
    verdict = {"outcome": "fail", "where": place, "measures": [measure]}
    seen = pytest_said(1, {"t::a": row("failed", exception="Failed", verdicts=[verdict]), "t::b": row("passed")})
    assert seen.result is Result.BAD and seen.passed == ("t::b",)
    assert seen.failures == (Signature(check="t::a", where="layer · layers.0.self_attn · core"),)
    assert seen.value == 0.3


@pytest.mark.parametrize(
    ("exception", "message", "when", "reason"),
    [
        ("ModuleNotFoundError", "no module", "call", "import"),
        ("OutOfMemoryError", "NPU out of memory", "call", "out-of-memory"),
        ("RuntimeError", "the device is lost", "call", "device"),
        ("FileNotFoundError", "weights", "call", "data"),
        ("ValueError", "anything", "setup", "environment"),
    ],
)
def test_what_is_no_measurement_is_never_bad(exception, message, when, reason):
    seen = pytest_said(1, {"t::a": row("failed", exception=exception, message=message, when=when)})
    assert (seen.result, seen.reason) == (Result.SKIP, reason)


def test_imports_that_fail_while_collecting_are_a_skip():
    seen = pytest_said(2, tests={}, collect_errors=["E   ImportError: cannot import name 'x'"])
    assert (seen.result, seen.reason) == (Result.SKIP, "import")


def test_exit_1_without_a_record_is_never_bad():
    missing = Probe(kind="pytest", text="t").translate(finished(1, "", "/usr/bin/python: No module named pytest"), None)
    assert (missing.result, missing.reason) == (Result.SKIP, "import")
    assert Probe(kind="pytest", text="t").translate(finished(1, "", "odd"), None).result is Result.INFRASTRUCTURE


def verdict(outcome, **rest):
    return {
        "check": "rms_norm",
        "subject": "torch",
        "outcome": outcome,
        "measures": [{"name": "m", "value": 2.0, "bound": 1.0}],
        **rest,
    }


def alignment_said(code, document):
    out = "log line\n" + json.dumps(document, indent=1)
    return Probe(kind="alignment", text="alignment run").translate(finished(code, out))


def test_the_verdicts_of_an_alignment_command():
    seen = alignment_said(1, {"verdicts": [verdict("fail", where={"stage": "s", "module": "m", "quantity": "q"})]})
    assert seen.failures == (Signature(check="rms_norm [torch]", where="s · m · q"),) and seen.value == 2.0
    assert alignment_said(0, {"verdicts": [verdict("pass")]}).result is Result.GOOD
    assert alignment_said(1, {"verdicts": [verdict("inconclusive")]}).reason == "nothing-measured"


def test_alignments_exit_2_is_infrastructure_and_never_bad():
    seen = alignment_said(2, {"error": "there is no such subject"})
    assert (seen.result, seen.detail) == (Result.INFRASTRUCTURE, "there is no such subject")


def test_commands_by_kind(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").touch()

    def parse(text):
        return parse_probe(text, suite=tmp_path)

    assert parse("tests/test_a.py::test_x").kind == parse("tests -k x").kind == "pytest"
    assert parse("alignment run --only unit").command("py")[-1] == "--json"
    assert parse("alignment run --json").command("py").count("--json") == 1
    assert parse("python check.py").kind == "shell" and parse("shell: true").text == "true"
    assert parse("pytest:tests/test_a.py -x").text == "tests/test_a.py -x"
    with pytest.raises(InputError, match="there is no such test file in the suite"):
        parse("tests/test_b.py")
    with pytest.raises(InputError, match="no probe is given"):
        parse(" ")


def test_the_cheapest_layer_comes_first():
    texts = ["alignment run", "tests/layer/test_x.py", "alignment run --only replay", "tests/unit/test_y.py"]
    ordered = order_by_cost([Probe(kind="shell", text=t) for t in texts])
    assert [p.layer for p in ordered] == ["unit", "layer", "replay", "e2e"]


def test_a_real_pytest_run_is_recorded(tmp_path):
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_a.py").write_text(
        "def test_good(record_property):\n    record_property('metric', 0.125)\n\n\n"
        "def test_bad(record_property):\n    record_property('metric', 2.0)\n    assert False, 'off'\n"
    )
    probe = parse_probe("test_a.py", suite=suite)
    seen = probe.run(HERE, suite=suite, scratch=tmp_path / "scratch")
    assert seen.result is Result.BAD
    assert seen.values == {"test_a.py::test_good": 0.125, "test_a.py::test_bad": 2.0}
    assert seen.failures == (Signature(check="test_a.py::test_bad", where="AssertionError"),)
    nothing = parse_probe("test_a.py -k nothing", suite=suite).run(HERE, suite=suite, scratch=tmp_path / "scratch")
    assert nothing.reason == "nothing-collected"


def test_a_time_limit_takes_the_children_down(tmp_path):
    marker = tmp_path / "marker"
    done = run_process(["bash", "-c", f"(sleep 2; touch {marker}) & sleep 30"], timeout=0.3)
    assert done.code is None
    run_process(["sleep", "2.2"])
    assert not marker.exists()


def test_addresses_are_left_out_of_what_is_kept():
    assert (
        without_addresses("from https://user:pw@index.example.org/simple/x and http://h:80/y")
        == "from https://…/simple/x and http://…/y"
    )


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        (Observation(result=Result.GOOD), 0),
        (Observation(result=Result.BAD, failures=(Signature(check="a"),)), 1),
        (Observation(result=Result.BAD, failures=(Signature(check="b"),)), 125),
        (Observation(result=Result.SKIP), 125),
        (Observation(result=Result.INFRASTRUCTURE), 125),
        (Observation(result=Result.ABORT), 128),
    ],
)
def test_the_codes_for_git_bisect_run(seen, code):
    assert exit_code(seen, Signature(check="a")) == code


def test_an_observation_goes_round_through_json():
    seen = Observation(
        result=Result.BAD,
        value=float("inf"),
        values={"a": float("inf")},
        failures=(Signature(check="a", sign=1),),
        passed=("b",),
    )
    assert Observation.from_data(json.loads(json.dumps(seen.to_data()))) == seen


def test_the_record_plugin_needs_only_pytest():
    text = (Path(__file__).parents[3] / "alignment" / "bisect" / "pytest_record.py").read_text()
    imports = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imports <= {"__future__", "json", "os", "pathlib", "pytest"}
