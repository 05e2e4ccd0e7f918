"""Long commands say that they live: on a terminal alone, on standard error, and not where a document is printed."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from alignment.cli import app
from alignment.errors import InputError

ELAPSED = re.compile(r"\d:\d\d:\d\d")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7](;[0-9]+)*m")
WORK = "three of seven"


class Enough(InputError):
    """What ends a command once it has told its progress."""


def lines(*arguments, progress=None, say=None, **others):
    (progress or say)(WORK)
    raise Enough("enough")


def steps(*arguments, progress, **others):
    progress.on_stage(3, 7, WORK)
    raise Enough("enough")


def parts(setting, progress):
    progress.begin("training", 7)
    progress.note(WORK)
    raise Enough("enough")


def sizes(*arguments, progress, **others):
    progress(WORK, 3, 7)
    raise Enough("enough")


LONG = {
    "run": ("alignment.baseline.suite.run_suite", parts, ("run",)),
    "dapo": ("alignment.rl.run.run_dapo", steps, ("dapo",)),
    "dapo engine=verl": ("alignment.rl.verl_run.run_verl", steps, ("dapo", "engine=verl")),
    "gkd": ("alignment.rl.gkd_run.run_gkd", steps, ("gkd",)),
    "ablate": ("alignment.rl.run.run_dapo", steps, ("ablate", "--factor", "nondeterministic")),
    "replay": ("alignment.rl.run.run_dapo", steps, ("replay", "--steps", "3")),
    "communication": ("alignment.diagnose.communication.one_against_many", lines, ("communication",)),
    "memory profile": (
        "alignment.diagnose.memory_profile.profile_step", lines, ("memory", "profile", "tiny-moonlight")
    ),
    "checkpoint cut": (
        "alignment.weights.cut.cut_checkpoint", sizes, ("checkpoint", "cut", "SOURCE", "TARGET", "--layers", "0")
    ),
    "checkpoint fp8-to-bf16": (
        "alignment.weights.fp8.convert_fp8_checkpoint", sizes, ("checkpoint", "fp8-to-bf16", "SOURCE", "TARGET")
    ),
    "bisect": ("alignment.bisect.bisection.carry_out", lines, ("bisect", "run")),
    "compare": ("alignment.diagnose.capture_comparison.compare_captures", lines, ("compare", "GOLDEN", "TARGET")),
    "compare runs": ("alignment.diagnose.whole_runs.compare_whole_runs", lines, ("compare", "GOLDEN", "TARGET")),
    "baseline record": (
        "alignment.baseline.record.record", lines, ("baseline", "record", "--layer", "unit", "--subject", "torch")
    ),
}  # fmt: skip


def begun(*arguments, **others):
    raise Enough("enough")


WAITING = {
    "compare-engines": (
        "alignment.backends.engine_comparison.compare_engines", ("compare-engines", "--engine", "golden"),
        "a step of golden",
    ),
    "baseline verify": ("alignment.baseline.verify.verify", ("baseline", "verify"), "verifying "),
    "rollout": ("alignment.report.rollout_view.rollout_command", ("rollout", "--device", "cpu"), "answering 4 prompts"),
    "doctor": ("alignment.report.doctor.examine", ("doctor",), "looking at devices, engines and baselines"),
    "read-verl": ("alignment.rl.verl_record.record_verl_run", ("read-verl", "FOLDER"), "reading FOLDER"),
    "stress": (
        "alignment.diagnose.stress_cards.on_this_machine", ("stress", "--device", "cpu", "--workers", "1"),
        "the same job on every card",
    ),
    "compare --save-noise": (
        "alignment.diagnose.capture_comparison.learn_noise", ("compare", "GOLDEN", "TARGET", "--save-noise", "NOISE"),
        "learning noise",
    ),
}  # fmt: skip
"""Commands that cannot say how far they are: a spinner with what they do, and the time."""


def invoked(name: str, monkeypatch, arguments, **environment: str):
    for variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    if name.startswith("compare") and name != "compare-engines":
        monkeypatch.setattr("alignment.capture.readers.open_capture", lambda path, format=None: path)
        monkeypatch.setattr("alignment.cli.compare._is_run", lambda path: name == "compare runs")
    shown = CliRunner().invoke(app, list(arguments), env={"TERM": "xterm-256color", **environment})
    assert isinstance(shown.exception, Enough), shown.exception
    return shown


def told(name, monkeypatch, tmp_path, *more: str, **environment: str) -> str:
    place, stub, arguments = LONG[name]
    monkeypatch.setattr(place, stub)
    own = {
        "bisect": ("--state", str(tmp_path / "state")),
        "checkpoint cut": (),
        "checkpoint fp8-to-bf16": (),
        "memory profile": ("--device", "cpu"),
        "compare": (),
        "compare runs": (),
        "baseline record": ("--device", "cpu"),
    }
    arguments = [*arguments, *own.get(name, ("--device", "cpu", "--run-dir", str(tmp_path / "run"))), *more]
    shown = invoked(name, monkeypatch, arguments, **environment)
    assert "to do" not in shown.stdout
    # What is recorded is said as a line too, which is part of the answer.
    assert WORK not in shown.stdout or name == "baseline record"
    return shown.stderr


@pytest.mark.parametrize("name", LONG)
def test_a_long_command_shows_its_progress_on_a_terminal_only(name, monkeypatch, tmp_path):
    live = told(name, monkeypatch, tmp_path, FORCE_COLOR="1")
    assert WORK in live and ELAPSED.search(live) and COLOUR.search(live)
    assert not ELAPSED.search(told(name, monkeypatch, tmp_path))


@pytest.mark.parametrize("name", ["run", "dapo", "dapo engine=verl", "gkd"])
def test_what_a_log_is_told_of_a_training_is_not_part_of_the_answer(name, monkeypatch, tmp_path):
    """``told`` reads standard error; standard output has the table and nothing above it."""
    assert "training: 7 to do" in told(name, monkeypatch, tmp_path)
    assert "to do" not in told(name, monkeypatch, tmp_path, "--json")


@pytest.mark.parametrize("name", LONG)
def test_no_color_takes_the_colours_and_json_the_progress(name, monkeypatch, tmp_path):
    plain = told(name, monkeypatch, tmp_path, FORCE_COLOR="1", NO_COLOR="1")
    assert WORK in plain and ELAPSED.search(plain) and not COLOUR.search(plain)
    assert not ELAPSED.search(told(name, monkeypatch, tmp_path, "--json", FORCE_COLOR="1"))


@pytest.mark.parametrize("name", WAITING)
def test_a_command_of_unknown_length_shows_that_it_lives_on_a_terminal_only(name, monkeypatch):
    place, arguments, doing = WAITING[name]
    monkeypatch.setattr(place, begun)
    live = invoked(name, monkeypatch, arguments, FORCE_COLOR="1")
    assert doing in live.stderr and ELAPSED.search(live.stderr) and doing not in live.stdout
    for more, environment in (([], {}), (["--json"], {"FORCE_COLOR": "1"})):
        silent = invoked(name, monkeypatch, [*arguments, *more], **environment)
        assert not ELAPSED.search(silent.stderr) and doing not in silent.output


def test_what_is_printed_under_a_spinner_reaches_the_file_that_output_is(capsys):
    from rich.console import Console

    from alignment.report.progress import waiting

    with waiting(Console(stderr=True, force_terminal=True), "at work", quiet=False):
        print("a line of the answer")
    out, error = capsys.readouterr()
    assert out == "a line of the answer\n" and "at work" in error and "a line" not in error
