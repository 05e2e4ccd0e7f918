"""The plugin in runs of its own: what is marked, left out, unavailable, required, and how a run without a check ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis  # noqa: F401
import pytest

from alignment.devices.emulated_npu.build import cache_directory
from alignment.pytest_plugin import MarkExpression

# pytester gives every run an empty home; the emulated NPU must not be compiled anew for each.
CACHE = str(cache_directory())


@pytest.fixture(scope="module", autouse=True)
def imported():
    """A run inside this process forgets the modules it imported first, and torch cannot be imported twice."""
    import alignment.baseline.check
    import alignment.baseline.record
    import alignment.baseline.verify
    import alignment.report.terminal  # noqa: F401
    from alignment.backends.catalogue import cases
    from alignment.backends.subject import SUBJECTS

    cases()
    for entry in SUBJECTS:
        entry.load()


def outcomes(result):
    """What the run counted; warnings of pytest itself depend on what this process imported before."""
    return {name: count for name, count in result.parseoutcomes().items() if name != "warnings"}


@pytest.fixture
def machine(monkeypatch):
    """A machine of which a test says what it has."""
    from alignment.devices import base

    monkeypatch.delenv("ALIGNMENT_EMULATE_NPU", raising=False)
    present = {"cpu"}
    reasons = {"cuda": "torch was built without CUDA", "npu": "torch_npu is not installed"}

    def availability(kind):
        return base.Availability(kind=kind, available=kind in present, reason=reasons.get(kind, "always"), count=1)

    monkeypatch.setattr(base, "availability", availability)
    return present


@pytest.fixture
def project(pytester, machine):
    """A project with tests of every layer and marker."""
    pytester.mkpydir("tests").joinpath("__init__.py").unlink()
    for layer in ("unit", "layer", "e2e"):
        (pytester.path / "tests" / layer).mkdir()
    (pytester.path / "tests/unit/test_u.py").write_text(
        "import pytest\n"
        "def test_plain(): pass\n"
        "def test_generic(device): assert device.kind in ('cpu', 'npu', 'cuda')\n"
        "@pytest.mark.npu\n"
        "def test_npu(): pass\n"
        "@pytest.mark.slow\n"
        "def test_slow(): pass\n"
        "@pytest.mark.engine\n"
        "def test_engine(): pytest.importorskip('no_such_engine')\n"
    )
    (pytester.path / "tests/layer/test_l.py").write_text("def test_layer(): pass\n")
    (pytester.path / "tests/e2e/test_e.py").write_text("def test_run(): pass\n")
    return pytester


def lines(result, *patterns):
    result.stdout.fnmatch_lines(list(patterns))


def test_the_plain_run_leaves_out_what_is_by_name_only_and_says_what_was_not_run(project):
    result = project.runpytest()
    result.assert_outcomes(passed=4, skipped=1, deselected=2)
    assert result.ret == pytest.ExitCode.OK
    lines(
        result,
        "*= alignment =*",
        "npu: 1 check not run: torch_npu is not installed",
        "slow: 1 test not selected; add -m slow",
        "engine: 1 test not selected; add -m engine",
    )


@pytest.mark.parametrize(("expression", "count"), [("unit", 2), ("layer", 1), ("e2e", 1), ("slow", 1), ("unit and not npu", 2)])
def test_layers_are_marked_by_their_folder_and_slow_runs_when_named(project, expression, count):
    result = project.runpytest("-m", expression)
    assert outcomes(result)["passed"] == count


def test_markers_are_documented(project):
    result = project.runpytest("--markers")
    lines(result, "@pytest.mark.npu: runs on an Ascend NPU, real or emulated", "@pytest.mark.engine: needs an optional engine*")


def test_an_npu_run_without_an_npu_says_why_and_never_exits_0(project):
    for more in ((), ("--require",)):
        result = project.runpytest("-m", "npu", *more)
        assert result.ret != pytest.ExitCode.OK
        lines(
            result,
            "npu: no check was executed, so this run is not a pass: torch_npu is not installed "
            "(on a CPU machine: --emulate-npu)",
        )


def test_a_gpu_run_without_a_gpu_is_not_a_pass_either(project):
    result = project.runpytest("-m", "gpu")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines(result, "cuda: no check was executed, so this run is not a pass: torch was built without CUDA")


def test_an_npu_run_with_an_npu_runs_every_npu_check(project, machine):
    machine.add("npu")
    result = project.runpytest("-m", "npu", "-v")
    assert outcomes(result) == {"passed": 2, "deselected": 6}
    assert result.ret == pytest.ExitCode.OK
    lines(result, "*test_generic[[]npu[]] PASSED*", "*test_npu PASSED*")


def test_an_npu_run_that_selects_no_npu_test_is_not_a_pass_on_an_npu(project, machine):
    machine.add("npu")
    result = project.runpytest("-m", "npu", "tests/layer")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines(result, "npu: no check was executed, so this run is not a pass: no test of this selection runs on it")


def test_excluding_the_npu_is_no_demand_for_one(project):
    result = project.runpytest("-m", "not npu")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*no check was executed*")


def test_collecting_only_demands_nothing(project):
    assert project.runpytest("--collect-only", "-q", "-m", "npu").ret == pytest.ExitCode.OK


def test_a_named_device_restricts_generic_checks_and_must_be_there(project, machine):
    result = project.runpytest("--device", "npu", "tests/unit/test_u.py::test_generic")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines(result, "npu: 1 check not run: torch_npu is not installed", "npu: no check was executed*")
    machine.add("npu")
    result = project.runpytest("--device", "npu,cpu", "tests/unit/test_u.py::test_generic")
    result.assert_outcomes(passed=2)
    assert outcomes(project.runpytest("--device", "auto", "tests/unit/test_u.py::test_generic")) == {"passed": 1}


def test_an_unknown_device_or_subject_or_folder_is_a_usage_error(project):
    result = project.runpytest("--device", "tpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--device tpu: no such device; expected auto, cpu, cuda, npu or one like cuda:1"])
    result = project.runpytest("--subject", "torch_pnu")
    result.stderr.fnmatch_lines(["*--subject torch_pnu: no such subject; expected one of torch,*did you mean torch_npu?"])
    result = project.runpytest("--baseline", "nowhere")
    result.stderr.fnmatch_lines(["*--baseline nowhere: there is no such folder"])


def test_require_turns_an_absent_device_into_a_failure(project):
    result = project.runpytest("--require", "tests/unit/test_u.py")
    result.assert_outcomes(passed=2, failed=0, errors=1, deselected=2)
    lines(result, "*npu is unavailable and --require was given: torch_npu is not installed*")


def test_require_turns_a_skipped_engine_check_into_a_failure(project):
    assert outcomes(project.runpytest("-m", "engine")) == {"skipped": 1, "deselected": 6}
    result = project.runpytest("-m", "engine", "--require")
    assert outcomes(result) == {"failed": 1, "deselected": 6}
    lines(result, "*--require was given and this engine check was skipped:*no_such_engine*")


def test_what_a_test_finds_unavailable_is_skipped_with_its_reason_or_required(project):
    project.makepyfile(
        test_x="from alignment.errors import UnavailableError\n"
        "def test_u(): raise UnavailableError('it is not installed', where='subject vllm')\n"
    )
    result = project.runpytest("test_x.py", "-rs")
    result.assert_outcomes(skipped=1)
    lines(result, "subject vllm: 1 check not run: it is not installed")
    assert project.runpytest("test_x.py", "--require").ret == pytest.ExitCode.TESTS_FAILED


def check_file(project, case="swiglu-float32"):
    project.makepyfile(
        test_c="from alignment.pytest_plugin import check_params\n"
        "def pytest_generate_tests(metafunc):\n"
        "    if 'check' in metafunc.fixturenames:\n"
        "        metafunc.parametrize('check', check_params(metafunc.config, 'unit'), indirect=True)\n"
        "def test_operator(check):\n"
        "    check()\n"
    )
    return ("test_c.py", "-k", f"{case}-torch", "--baseline", str(project.path / "stored"))


def test_checks_are_recorded_then_judged_and_the_budget_is_shown(project, monkeypatch):
    chosen = check_file(project)
    monkeypatch.setenv("ALIGNMENT_COMMIT", "0123456789abcdef")
    result = project.runpytest(*chosen, "--record-baselines")
    result.assert_outcomes(passed=1, deselected=35)
    lines(result, "baselines recorded, 1 values changed; review them:", "swiglu-float32/torch: entry: none → * values")
    result = project.runpytest(*chosen)
    result.assert_outcomes(passed=1, deselected=35)
    lines(result, "torch on cpu: 1 checks against baselines (1 by same chip); most of a budget used: *% (unit/swiglu-float32: *")


def test_recording_from_a_dirty_tree_fails_with_the_reason(project, monkeypatch):
    monkeypatch.setenv("ALIGNMENT_COMMIT", "0123-dirty")
    result = project.runpytest(*check_file(project), "--record-baselines")
    result.assert_outcomes(failed=1, deselected=35)
    lines(result, "*a baseline is not recorded from a dirty tree*")


def test_a_missing_baseline_fails_with_the_command_that_records_it(project):
    (project.path / "stored").mkdir()
    result = project.runpytest(*check_file(project))
    result.assert_outcomes(failed=1, deselected=35)
    lines(result, "ERROR  unit/swiglu-float32  [[]torch on cpu, operator[]]", "*there is no baseline for this case*")
    lines(result, "*next      alignment baseline record --case swiglu-float32 --subject torch --device cpu")


def test_a_failing_check_prints_the_whole_finding(project, monkeypatch):
    from alignment.backends import torch_operators

    chosen = check_file(project)
    monkeypatch.setenv("ALIGNMENT_COMMIT", "0123456789abcdef")
    project.runpytest(*chosen, "--record-baselines")
    right = torch_operators.FORWARD["swiglu"]
    monkeypatch.setitem(torch_operators.FORWARD, "swiglu", lambda t, a: {"output": 1.01 * right(t, a)["output"]})
    result = project.runpytest(*chosen)
    result.assert_outcomes(failed=1, deselected=35)
    lines(
        result,
        "FAIL  unit/swiglu-float32  [[]torch on cpu, operator[]]",
        "*where     operator · swiglu · output (largest error at*",
        "*how far*bound*",
        "*baseline  cpu/*/unit/swiglu-float32/torch, recorded *",
        '*next      pytest tests/unit/backends/test_operator_baselines.py -k "swiglu-float32-torch" --device cpu',
    )


def test_a_subject_named_but_nowhere_run_is_told_and_required(project):
    chosen = (*check_file(project), "--subject", "torch_npu")
    (project.path / "stored").mkdir()
    result = project.runpytest(*chosen)
    lines(result, "subject torch_npu: no check was executed")
    assert project.runpytest(*chosen, "--require").ret != pytest.ExitCode.OK


def test_checks_by_an_optional_engine_carry_its_marker(pytestconfig):
    from alignment.pytest_plugin import LEDGER, check_params

    by_engine = {p.values[0].subject: "engine" in [m.name for m in p.marks] for p in check_params(pytestconfig, "layer")}
    assert pytestconfig.stash[LEDGER].subjects or by_engine == {"torch": False, "transformers": False, "megatron": True}


def test_the_emulated_npu_runs_npu_checks_in_a_process_of_its_own(project, monkeypatch):
    monkeypatch.setenv("ALIGNMENT_CACHE", CACHE)
    result = project.runpytest_subprocess("-m", "npu", "--emulate-npu", "--require", "-v")
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    lines(result, "alignment: npu (emulated): * devices on host memory*", "*test_generic[[]npu[]] PASSED*", "*test_npu PASSED*")


def test_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, alignment.pytest_plugin\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'ray', 'scipy', 'omegaconf', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "asks", "needs"),
    [
        ("npu", True, True),
        ("npu and unit", True, True),
        ("npu or gpu", True, False),
        ("not npu", False, False),
        ("unit and not npu", False, False),
        ("npu or unit", True, False),
        ("not (npu and unit)", False, False),
        ("", False, False),
        ("((", False, False),
    ],
)
def test_what_a_mark_expression_asks_for(text, asks, needs):
    expression = MarkExpression(text)
    assert expression.asks_for("npu") is asks
    assert expression.impossible_without(["npu"]) is needs
    if text == "npu or gpu":
        assert expression.impossible_without(["npu", "gpu"])


def test_a_listing_does_without_hypothesis_and_a_run_with_it(pytester):
    """Hypothesis reads the constants of every module at the end of a collection, which a listing has no use for."""
    root = Path(__file__).parents[2] / "conftest.py"
    told = """
def pytest_collection_finish(session):
    print("hypothesis:", session.config.pluginmanager.hasplugin("hypothesispytest"))
"""
    pytester.makeconftest(root.read_text(encoding="utf-8") + told)
    pytester.makepyfile("def test_one(): pass")
    for options, there in ((("--collect-only",), False), ((), True)):
        done = pytester.runpytest_subprocess("-s", *options)
        assert done.ret == 0 and f"hypothesis: {there}" in done.stdout.str()
