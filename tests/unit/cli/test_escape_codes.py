"""Colours and spinners are for a terminal that wants them: a pipe and NO_COLOR get plain text."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest
import typer

from alignment.cli import app
from alignment.diagnose import triage as module
from alignment.diagnose.axes import AXES, AxisReport
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome

ESCAPE, ERASE = "\x1b", "\x1b[2K"
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")
SPINNER = "comparing [bold]run with base"


def examined(dut: Path, baseline: Path, repeats: tuple[Path, ...] = ()) -> module.Triage:
    axes = (AxisReport(axis=AXES[0], outcome=Outcome.PASS, reason="the same [red]configuration"),)
    return module.Triage(dut=dut, baseline=baseline, axes=axes, causes=(), modes=(), first=None)


@pytest.fixture
def run(monkeypatch):
    """Runs ``alignment triage`` with both streams on a terminal or a pipe each: what came out of stdout and stderr."""
    monkeypatch.setattr(module, "triage", examined)
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def call(*arguments: str, terminal: bool, no_color: bool = False) -> tuple[str, str]:
        if no_color:
            monkeypatch.setenv("NO_COLOR", "1")
        streams = [pty.openpty() if terminal else os.pipe() for _ in range(2)]
        with monkeypatch.context() as patch:
            for name, (_, end) in zip(("stdout", "stderr"), streams):
                patch.setattr(sys, name, os.fdopen(end, "w", encoding="utf-8"))
            try:
                app(["triage", "[bold]run", "base", *arguments], standalone_mode=False)
            except typer.Exit as left:
                assert left.exit_code == 0
            except InputError:
                pass  # what a refused command leaves on the terminal is looked at, too
            # Read before the writers go: a terminal without any is an error to read.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            read = [whole(source) for source, _ in streams]
            for stream in (sys.stdout, sys.stderr):
                stream.close()
            for source, _ in streams:
                os.close(source)
        return read[0], read[1]

    return call


def whole(source: int) -> str:
    os.set_blocking(source, False)
    found = b""
    while True:
        try:
            found += os.read(source, 65536)
        except BlockingIOError:
            return found.decode()


@pytest.mark.parametrize("no_color", [False, True], ids=["color", "no color"])
def test_a_pipe_gets_plain_text_and_no_spinner(run, no_color):
    out, err = run(terminal=False, no_color=no_color)
    assert "the same [red]configuration" in out and ESCAPE not in out
    assert err == ""


def test_a_terminal_gets_a_spinner_on_stderr_that_is_gone_afterwards(run):
    out, err = run(terminal=True)
    assert SPINNER in err and COLOUR.search(err) and err.rstrip().endswith(ERASE)
    assert "the same [red]configuration" in out and SPINNER not in out


def test_a_terminal_without_colour_gets_none(run):
    out, err = run(terminal=True, no_color=True)
    assert SPINNER in err
    assert not COLOUR.search(out + err)


def test_a_document_comes_alone(run):
    out, err = run("--json", terminal=True)
    assert json.loads(out)["baseline"] == "base" and err == "" and ESCAPE not in out


def test_the_spinner_is_gone_when_the_runs_cannot_be_read(run, monkeypatch):
    def refused(*runs, **options):
        raise InputError("there is no such run")

    monkeypatch.setattr(module, "triage", refused)
    out, err = run(terminal=True)
    assert out == "" and SPINNER in err and err.rstrip().endswith(ERASE)
