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


def sizes(*arguments, progress, **others):
    progress(WORK, 3, 7)
    raise Enough("enough")


LONG = {
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
}  # fmt: skip


def told(name, monkeypatch, tmp_path, *more: str, **environment: str) -> str:
    place, stub, arguments = LONG[name]
    monkeypatch.setattr(place, stub)
    own = {
        "bisect": ("--state", str(tmp_path / "state")),
        "checkpoint cut": (),
        "checkpoint fp8-to-bf16": (),
        "memory profile": ("--device", "cpu"),
    }
    arguments = [*arguments, *own.get(name, ("--device", "cpu", "--run-dir", str(tmp_path / "run"))), *more]
    for variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    shown = CliRunner().invoke(app, arguments, env={"TERM": "xterm-256color", **environment})
    assert isinstance(shown.exception, Enough), shown.exception
    assert WORK not in shown.stdout
    return shown.stderr


@pytest.mark.parametrize("name", LONG)
def test_a_long_command_shows_its_progress_on_a_terminal_only(name, monkeypatch, tmp_path):
    live = told(name, monkeypatch, tmp_path, FORCE_COLOR="1")
    assert WORK in live and ELAPSED.search(live) and COLOUR.search(live)
    assert not ELAPSED.search(told(name, monkeypatch, tmp_path))


@pytest.mark.parametrize("name", LONG)
def test_no_color_takes_the_colours_and_json_the_progress(name, monkeypatch, tmp_path):
    plain = told(name, monkeypatch, tmp_path, FORCE_COLOR="1", NO_COLOR="1")
    assert WORK in plain and ELAPSED.search(plain) and not COLOUR.search(plain)
    assert not ELAPSED.search(told(name, monkeypatch, tmp_path, "--json", FORCE_COLOR="1"))
