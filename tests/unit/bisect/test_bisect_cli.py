"""`alignment bisect`: what it prints, and the exit code of every ending."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from alignment.cli.bisect import bisect_app
from alignment.errors import InputError


def invoke(*arguments):
    return CliRunner().invoke(bisect_app, [str(a) for a in arguments])


def write(path, **components):
    lines = [
        "schema: 1",
        f"name: {path.stem}",
        "define: {left: {external: true}, right: {external: true}}",
        "components:",
    ]
    path.write_text("\n".join([*lines, *(f'  {n}: "{v}"' for n, v in components.items())]) + "\n")
    return path


@pytest.fixture
def world(tmp_path):
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "readme").touch()
    good, bad = write(tmp_path / "good.yaml", left=1, right=1), write(tmp_path / "bad.yaml", left=9, right=9)
    common = ["--good", good, "--bad", bad, "--activate", "true", "--base", sys.executable, "--suite", suite]
    return tmp_path, [*common, "--state", tmp_path / "state", "--cache", tmp_path / "cache"]


PROBE = "shell: [ $ALIGNMENT_STACK_RIGHT -lt 5 ]"


def test_a_whole_bisection(world):
    tmp_path, arguments = world
    result = invoke("run", *arguments, "--probe", PROBE)
    assert result.exit_code == 0, result.output
    assert "right 1 → 9 turned the result from good to bad" in result.stdout
    assert "Confirmed both ways" in result.stdout and "report.html" in result.stdout
    for command in ("status", "log", "replay", "report"):
        assert invoke(command, "--state", tmp_path / "state").exit_code == 0
    assert "right 1 → 9" in invoke("status", "--state", tmp_path / "state").stdout
    events = json.loads(invoke("log", "--state", tmp_path / "state", "--json").stdout)
    assert len(events) > 6 and {"probe", "stage", "answer_found"} <= {event["event"] for event in events}
    again = invoke(
        "run", "--state", tmp_path / "state", "--json", "--suite", tmp_path / "suite", "--cache", tmp_path / "cache"
    )
    assert json.loads(again.stdout)["findings"][0]["edges"][0]["changes"][0]["component"] == "right"


def test_a_dry_run_prints_the_plan_and_leaves_nothing(world):
    tmp_path, arguments = world
    result = invoke("run", *arguments, "--probe", PROBE, "--dry-run")
    assert result.exit_code == 0
    assert "left: 1 → 9" in result.stdout
    assert "at most 7 probes: 2·2 at the ends + 0 + 1 + 0 in the search + 2 for the proof" in result.stdout
    assert not (tmp_path / "state").exists()
    told = json.loads(invoke("run", *arguments, "--probe", PROBE, "--dry-run", "--json").stdout)
    assert told["bound"] == 7


@pytest.mark.parametrize(
    ("probe", "code", "words"),
    [
        ("shell: false", 17, "the good end is bad"),
        ("shell: true", 18, "the bad end is good"),
        ("shell: exit 125", 19, "the bad end could not be measured"),
        ("shell: exit 130", 12, "the probe ended the bisection"),
        ("pytest: test_nothing.py", 16, "the probe collects nothing"),
    ],
)
def test_every_refusal_has_its_sentence_and_its_code(world, probe, code, words):
    tmp_path, arguments = world
    (tmp_path / "suite" / "test_nothing.py").write_text("")
    result = invoke("run", *arguments, "--probe", probe, "--json")
    assert result.exit_code == code, result.output
    told = json.loads(result.stdout)
    assert words in told["error"] and told["exit_code"] == code
    assert words in result.stderr


def test_values_that_overlap_are_11(world):
    _, arguments = world
    result = invoke("run", *arguments, "--probe", 'shell: echo "{\\"metric\\": 1}"', "--by-value")
    assert result.exit_code == 11 and "the two ends cannot be told apart" in result.stderr


def test_a_range_is_10(world):
    tmp_path, arguments = world
    write(tmp_path / "mid.yaml", left=1, right=1)
    probe = "shell: case $ALIGNMENT_STACK_LEFT$ALIGNMENT_STACK_RIGHT in 11) exit 0;; 99) exit 1;; *) exit 125;; esac"
    result = invoke("run", *arguments, "--probe", probe)
    assert result.exit_code == 10 and "so this is a range and no single step" in result.stdout


def test_equal_infeasible_and_unknown_ends(world):
    tmp_path, arguments = world
    same = [tmp_path / "bad.yaml" if a == tmp_path / "good.yaml" else a for a in arguments]
    result = invoke("run", *same, "--probe", PROBE)
    assert result.exit_code == 13 and "the two ends are the same stack" in result.stderr
    write(tmp_path / "good.yaml", left=1, torch="2.7.1", torch_npu="2.6.0")
    arguments = [tmp_path / "other" if a == tmp_path / "state" else a for a in arguments]
    result = invoke("run", *arguments, "--probe", PROBE)
    assert result.exit_code == 14 and "its versions do not go together" in result.stderr
    write(tmp_path / "good.yaml", lefd=1)
    result = invoke("run", *arguments, "--probe", PROBE)
    assert result.exit_code == 15 and "there is no such component; expected left?" in result.stderr


def test_usage_is_an_input_error_as_everywhere(world):
    _, arguments = world
    for given, message in (
        ([], "nothing to bisect"),
        (arguments, "no probe is given"),
        ([*arguments, "--probe", PROBE, "--provider", "vemv"], "there is no such provider"),
        ([*arguments, "--probe", PROBE, "--releases", "ray"], "not a pair"),
        ([*arguments, "--probe", PROBE, "--npus", "a"], "NPUs are numbers"),
    ):
        result = invoke("run", *given)
        assert isinstance(result.exception, InputError) and message in str(result.exception)


def test_freeze_prints_and_writes_a_stack_file(tmp_path):
    from alignment.bisect.stack import load_stack

    result = invoke("freeze", "--output", tmp_path / "here.yaml", "--also", "pytest")
    assert result.exit_code == 0
    stack = load_stack(tmp_path / "here.yaml")
    import numpy

    assert stack.pins["numpy"].version == numpy.__version__ and "pytest" in stack.pins and stack.name == "here"
    told = json.loads(invoke("freeze", "--json").stdout)
    assert told["stack"]["places"]["numpy"] == numpy.__file__ == stack.places["numpy"]


def test_an_editable_install_is_frozen_as_its_revision(tmp_path, monkeypatch):
    import subprocess

    from alignment.bisect.freeze import freeze_stack

    tree = tmp_path / "verl"
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    (tree / "f").write_text("1")
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    info = tmp_path / "site" / "verl-0.7.0.dev0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.7.0.dev0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": tree.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    frozen = freeze_stack()
    pin = frozen.stack.pins["verl"]
    assert (pin.kind, pin.revision, pin.version, pin.repository) == ("git", head, "0.7.0.dev0", str(tree))
    assert not [w for w in frozen.warnings if w.startswith("verl")]
    (tree / "f").write_text("2")
    assert any("verl: its work tree has changes that are not committed" in w for w in freeze_stack().warnings)


@pytest.mark.parametrize(
    ("script", "code"),
    [("true", 0), ("false", 1), ("exit 125", 125), ("exit 75", 125), ("exit 130", 128), ("exit 2", 125)],
)
def test_the_codes_for_git_bisect_run(script, code):
    assert invoke("probe", f"shell: {script}", "--retries", "1").exit_code == code
