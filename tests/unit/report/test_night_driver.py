"""Driving a night: what ends a phase, how failures are classified, what is kept, and what is refused."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml
from page_reader import BROWSER, violations
from typer.testing import CliRunner

from alignment.cli import app
from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.report import night_driver, night_page
from alignment.report.history import History
from alignment.report.night import NightRecord, PhaseRecord, cause_of, gravest, read_night, told, write_night
from alignment.report.night_driver import NightSetting, run_night
from alignment.report.night_machine import write_provenance
from alignment.report.night_matrix import read_matrix
from alignment.report.night_nodes import Node, Watch, with_withheld
from alignment.report.night_process import Ended, _machine, _runs, _started, adopting, clear_up, run_command
from alignment.report.progress import night_progress
from alignment.report.run_directory import read_verdicts

OK = "print('{\"fine\": true}')"
TODAY = date.today()


def phase(code: str, **more) -> dict:
    return {"command": ["python", "-c", code], "timeout_minutes": 5, "leaves": {"document": "stdout.txt"}, **more}


def judged(*outcomes: str) -> dict:
    """A phase that leaves a JUnit file: ``test_0`` … with these outcomes."""
    cases = "".join(
        f"<testcase classname='tests.unit.rope' name='test_{i}'>"
        + ("<failure message='off by 0.3'/>" if outcome == "fail" else "")
        + "</testcase>"
        for i, outcome in enumerate(outcomes)
    )
    text = f"<testsuite tests='{len(outcomes)}'>{cases}</testsuite>"
    code = f"open('{{out}}/junit.xml', 'w').write(\"{text}\"); raise SystemExit({int('fail' in outcomes)})"
    return {"command": ["python", "-c", code], "timeout_minutes": 5, "leaves": {"junit": "junit.xml"}}


@pytest.fixture
def quick_provenance(monkeypatch):
    """What the night is of, without a process that looks at this machine."""

    def provenance(self) -> PhaseRecord:
        chip = f"{self.setting.row.chip} ({self.setting.row.name})"
        about = {"date": self.began, "commit": "c0ffee", "fingerprint": {"chip": chip}, "night": self.identity}
        write_json(self.setting.out / "provenance.json", about)
        self.commit = os.environ.get("ALIGNMENT_COMMIT", "c0ffee")
        return PhaseRecord(name="provenance", outcome="pass")

    monkeypatch.setattr(night_driver._Night, "_provenance", provenance)


@pytest.fixture
def drive(tmp_path, quick_provenance):
    """Runs a night of some phases in ``tmp_path/<out>``; ``known`` are entries of the known failures."""

    def drive(
        phases: dict, *, out: str = "night", known=(), ray=None, resume: bool = False, listeners=None, **row
    ) -> NightRecord:
        (tmp_path / "known.yaml").write_text(yaml.safe_dump({"version": 1, "entries": list(known)}))
        row = {"name": "cpu", "chip": "CPU", "device": "cpu", "phases": list(phases), **row}
        codes = {0: "ignore", 1: "page", 2: "warn", 3: "page"}
        matrix = {"version": 1, "rows": [row], "phases": phases, "exit_codes": codes, "known_failures": "known.yaml"}
        (tmp_path / "m.yaml").write_text(yaml.safe_dump(matrix))
        read = read_matrix(tmp_path / "m.yaml")
        setting = NightSetting(
            matrix=read, row=read.row("cpu"), out=tmp_path / out, history=tmp_path / "h.sqlite", resume=resume, ray=ray
        )
        return run_night(setting, **(listeners or {}))

    return drive


def only(night: NightRecord) -> PhaseRecord:
    (record,) = night.phases[1:]
    return record


# How a phase ends.


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise SystemExit(7)", "exit code 7: "),
        ("raise SystemExit('no card')", "exit code 1, and nothing in its evidence says why: no card"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL (out of memory?)"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("pass", "stdout.txt: the file is truncated or not JSON"),
        ("print('{\"a\": ')", "stdout.txt: the file is truncated or not JSON"),
        ("print('{\"error\": \"no such device\"}'); raise SystemExit(2)", "the command says: no such device"),
    ],
)  # fmt: skip
def test_a_phase_that_was_not_carried_out_is_an_error_of_the_environment(drive, code, cause):
    night = drive({"it": phase(code)})
    record = only(night)
    assert (record.outcome, record.stage) == ("error", "environment") and cause in record.cause
    assert (night.outcome, night.exit_code, night.action) == ("error", 3, "page")
    assert night.line.startswith("ERROR  cpu  ")
    assert f"1 of 2 phases green; it: environment: {record.cause}" in night.line


def test_a_phase_that_was_carried_out_is_green(drive, tmp_path):
    night = drive({"it": phase(OK), "tests": judged("pass", "pass")})
    assert (night.outcome, night.exit_code, night.action) == ("pass", 0, "ignore")
    kept = replace(night, phases=tuple(replace(record, verdicts=()) for record in night.phases))
    assert read_night(tmp_path / "night") == kept
    assert "3 of 3 phases green" in night.line
    assert any("tests" in line and "2 tests" in line for line in told(night))


def test_a_phase_that_takes_too_long_is_ended_with_all_it_started(drive, tmp_path):
    """Its child in a session of its own is none of its process group."""
    child = "import subprocess, sys, time; "
    child += "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    record = only(drive({"it": phase(child, timeout_minutes=0.05)}))
    assert (record.outcome, record.cause) == ("error", "no end within 0.05 minutes")
    assert not _runs(int((tmp_path / "pid").read_text()))


def test_what_a_dead_command_leaves_behind_is_ended(tmp_path):
    """A daemon: its parent is gone before anybody looked."""
    code = "import os, subprocess, sys; "
    code += "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
    code += "print(p.pid, flush=True); os._exit(0)"
    with adopting():
        ended = run_command(
            ["python", "-c", code], folder=tmp_path, cwd=tmp_path, env=dict(os.environ), timeout=60
        )
    assert (ended.code, ended.cut) == (0, "")
    assert not _runs(int((tmp_path / "stdout.txt").read_text()))


STARTS = """
import subprocess, sys, time
p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], {more})
print(p.pid, flush=True)
time.sleep(600)
"""
DRIVER = """
import os, sys
from pathlib import Path
from alignment.report.night_process import adopting, run_command
with adopting():
    folder = Path(sys.argv[1])
    run_command(["python", "-c", sys.argv[2]], folder=folder, cwd=folder, env=dict(os.environ), timeout=600)
"""


@pytest.mark.parametrize("more", ["start_new_session=True", "env={}"], ids=["another session", "no environment"])
def test_what_a_killed_driver_left_of_a_dead_command_is_ended(tmp_path, more):
    """The command dies with its driver, what it had started does not; and it may hide from one way of finding it."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), STARTS.format(more=more)])
    told = tmp_path / "stdout.txt"
    while not (told.is_file() and told.read_text().endswith("\n") and read_json(tmp_path / "running.json")["pid"]):
        assert driver.poll() is None
        time.sleep(0.02)
    command, left = read_json(tmp_path / "running.json")["pid"], int(told.read_text())
    driver.kill()
    driver.wait()
    while _runs(command):
        time.sleep(0.02)
    assert _runs(left)
    assert clear_up(tmp_path) and not _runs(left)
    assert not (tmp_path / "running.json").exists() and not clear_up(tmp_path)


@pytest.mark.parametrize("about", [{"started": 1}, {"machine": "another"}], ids=["another start", "another machine"])
def test_a_process_that_only_has_the_number_is_left_alone(tmp_path, about):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        own = {"mark": "0a1b", "pid": other.pid, "started": _started(other.pid), "machine": _machine()}
        write_json(tmp_path / "running.json", {**own, **about})
        assert not clear_up(tmp_path) and _runs(other.pid)
        write_json(tmp_path / "running.json", own)
        assert clear_up(tmp_path) and not _runs(other.pid)
    finally:
        other.kill()
        other.wait()


def test_a_command_that_does_not_exist_is_named(drive):
    broken = {"command": ["no-such-program"], "timeout_minutes": 1, "leaves": {"document": "stdout.txt"}}
    assert only(drive({"it": broken})).cause == "cannot be started: No such file or directory: no-such-program"


def test_nothing_that_breaks_in_the_driver_ends_the_night(drive, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(night_driver, "gather_evidence", broken)
    night = drive({"it": phase(OK)})
    assert (night.outcome, only(night).cause) == ("error", "RuntimeError: a mistake of ours")


# What is found, and who knows about it.


SOON = TODAY + timedelta(days=9)
ENTRY = {"match": "tests/*test_1: off*", "owner": "wei", "reason": "driver bug 12", "expires": SOON}


def test_a_new_failure_pages(drive):
    night = drive({"tests": judged("pass", "fail")}, known=[{**ENTRY, "match": "tests/*test_0*"}])
    record = only(night)
    assert (night.outcome, night.exit_code, night.action, record.stage) == ("fail", 1, "page", "new")
    assert record.cause == "tests/tests.unit.rope::test_1: test_1: off by 0.3"


def test_a_known_failure_does_not_page_and_is_never_green(drive):
    night = drive({"it": phase(OK), "tests": judged("pass", "fail")}, known=[{**ENTRY, "match": "*test_1*off by*"}])
    record = night.phases[2]
    assert (night.outcome, night.exit_code, night.action) == ("known", 4, "warn")
    assert (record.outcome, record.stage, record.findings[0].known) == (
        "known", "known", f"wei, until {ENTRY['expires']}: driver bug 12"
    )  # fmt: skip
    assert night.line.startswith("KNOWN FAILURES  cpu") and "2 of 3 phases green" in night.line


def test_a_failure_whose_entry_has_expired_is_new(drive):
    entry = {**ENTRY, "match": "*test_1*", "expires": TODAY - timedelta(days=1)}
    night = drive({"tests": judged("fail", "fail")}, known=[entry])
    first, second = only(night).findings
    assert (night.outcome, first.stage, second.stage) == ("fail", "new", "new")
    assert (first.expired, second.expired) == ("", f"{entry['expires']}, wei")
    assert any("was known until it expired" in line for line in told(night))


def test_an_error_is_known_to_nobody(drive):
    entry = {**ENTRY, "match": "it*"}
    night = drive({"it": phase("raise SystemExit(3)")}, known=[entry])
    assert (night.outcome, only(night).stage) == ("error", "environment")


def test_a_check_in_quarantine_is_known_until_that_ends(drive, tmp_path):
    check = "tests/tests.unit.rope::test_0"
    assert drive({"tests": judged("fail")}, out="first").outcome == "fail"
    History(tmp_path / "h.sqlite").quarantine(check, until=TODAY + timedelta(days=3), reason="driver bug 12, Wei")
    night = drive({"tests": judged("fail")}, out="second")
    assert (night.outcome, night.exit_code, night.action) == ("known", 4, "warn")
    assert only(night).findings[0].known.startswith("in quarantine: driver bug 12, Wei")


def test_another_verdict_of_the_same_code_is_flaky_and_never_green(drive):
    assert drive({"tests": judged("fail")}, out="first").outcome == "fail"
    # The night itself is all green; beside the one before it is not.
    night = drive({"tests": judged("pass")}, out="second")
    assert (night.outcome, night.exit_code, night.action) == ("flaky", 4, "warn")
    assert night.cause.startswith("flaky: tests/tests.unit.rope::test_0 [pytest on cpu]: pass tonight, fail in first")


def test_a_check_that_stopped_running_warns(drive):
    assert drive({"tests": judged("pass", "pass")}, out="first").action == "ignore"
    night = drive({"tests": judged("pass")}, out="second")
    assert (night.outcome, night.exit_code, night.action) == ("pass", 0, "warn")
    assert [c["kind"] for c in night.concerns] == ["missing"] and "beside earlier nights: missing (1)" in night.line


# What a machine lacks.


@pytest.mark.parametrize(
    ("require", "others", "outcome"),
    [(True, True, "error"), (False, True, "pass"), (False, False, "error")],
    ids=["required", "not required", "nothing else"],
)
def test_what_a_phase_needs_is_there_or_the_row_does_not_require_it(drive, monkeypatch, require, others, outcome):
    monkeypatch.delenv("ALIGNMENT_EMULATE_NPU", raising=False)
    answer = {"command": ["python", "-c", "print('{\"npu\": \"torch_npu is not installed\"}')"]}
    here = night_driver._Night._here
    monkeypatch.setattr(
        night_driver._Night, "_here",
        lambda self, argv, *rest, **more: here(self, answer["command"] if "devices" in argv else argv, *rest, **more),
    )  # fmt: skip
    night = drive({"it": phase(OK, needs=["npu"]), **({"other": phase(OK)} if others else {})}, require=require)
    record = night.phases[1]
    assert record.cause.startswith("npu is unavailable: torch_npu is not installed")
    assert record.outcome == ("error" if require else "unavailable")
    assert night.outcome == outcome


def test_a_night_without_provenance_is_an_error(drive, monkeypatch):
    def absent(self):
        raise InputError("not installed", where="provenance")

    monkeypatch.setattr(night_driver._Night, "_provenance", absent)
    night = drive({"it": phase(OK)})
    assert night.phases[1].outcome == "pass"
    assert (night.outcome, night.exit_code) == ("error", 3) and "provenance" in night.cause


def test_the_stack_of_the_night_is_that_of_the_row(tmp_path):
    import torch

    stack = tmp_path / "row.yaml"
    stack.write_text(f"schema: 1\nname: row\ncomponents: {{torch: '{torch.__version__}'}}\n")
    write_provenance(tmp_path / "same", stack)
    assert json.loads((tmp_path / "same" / "provenance.json").read_text())["commit"]
    stack.write_text("schema: 1\nname: row\ncomponents: {torch: '2.0.0'}\n")
    with pytest.raises(InputError, match="row.yaml: the stack here is not the one of the row; found torch.*2.0.0"):
        write_provenance(tmp_path / "other", stack)


# What is kept.


def test_a_resumed_night_keeps_what_was_finished_and_repeats_what_was_not(drive, tmp_path):
    flag = tmp_path / "flag"
    phases = {
        "green": phase(OK), "red": judged("fail"),
        "broken": phase(f"import os; {OK} if os.path.exists({str(flag)!r}) else os._exit(9)"),
    }  # fmt: skip
    first = drive(phases)
    assert [p.outcome for p in first.phases[1:]] == ["pass", "fail", "error"]
    flag.touch()
    second = drive(phases, resume=True)
    assert [(p.outcome, p.kept, p.attempt) for p in second.phases[1:]] == [
        ("pass", True, 1), ("fail", True, 1), ("pass", False, 2),
    ]  # fmt: skip
    assert (second.identity, second.began, second.outcome) == (first.identity, first.began, "fail")
    assert second.phases[3].earlier == ("broken.attempt-1",) and (tmp_path / "night" / "broken.attempt-1").is_dir()
    assert len(History(tmp_path / "h.sqlite").nights()) == 1
    third = drive(phases, resume=True)
    assert [p.kept for p in third.phases[1:]] == [True] * 3


def test_nothing_is_kept_of_a_commit_that_does_not_name_its_code(drive, monkeypatch):
    phases = {"it": phase(OK)}
    monkeypatch.setenv("ALIGNMENT_COMMIT", "c0ffee-dirty")
    drive(phases)
    assert (only(drive(phases, resume=True)).kept, only(drive(phases, resume=True)).attempt) == (False, 3)
    monkeypatch.setenv("ALIGNMENT_COMMIT", "c0ffee")
    assert only(drive(phases, resume=True)).kept


def test_a_night_is_resumed_on_its_own_packages_alone(tmp_path, monkeypatch):
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({
        "version": 1, "phases": {"it": phase(OK)},
        "rows": [{"name": "cpu", "chip": "CPU", "device": "cpu", "phases": ["it"]}],
    }))  # fmt: skip
    matrix, installed, real = read_matrix(tmp_path / "m.yaml"), {"torch": "2.8.0", "numpy": "2.0"}, run_command

    def command(argv, *, folder, **more):
        if "provenance" not in argv:
            return real(argv, folder=folder, **more)
        about = {"commit": "c0ffee", "packages": installed, "fingerprint": {"chip": "CPU"}}
        write_json(folder / "provenance.json", about)
        return Ended(code=0, seconds=0.0)

    def night(resume: bool) -> NightRecord:
        return run_night(NightSetting(matrix=matrix, row=matrix.row("cpu"), out=tmp_path / "night", resume=resume))

    monkeypatch.setattr(night_driver, "run_command", command)
    night(False)
    assert only(night(True)).kept
    before = read_night(tmp_path / "night")
    installed["torch"] = "2.9.0"
    said = r"the night was begun with other packages; expected .*; found .* \(torch 2.8.0 → 2.9.0\)"
    with pytest.raises(InputError, match=said):
        night(True)
    assert read_night(tmp_path / "night") == before and before.outcome == "pass"


def test_what_a_finished_phase_left_has_to_be_there_still(drive, tmp_path):
    phases = {"tests": judged("pass"), "it": phase(OK)}
    drive(phases)
    (tmp_path / "night" / "tests" / "junit.xml").unlink()
    assert [(p.kept, p.attempt) for p in drive(phases, resume=True).phases[1:]] == [(False, 2), (True, 1)]


def test_a_driver_that_is_killed_before_the_history_left_no_green(drive, monkeypatch, tmp_path):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(night_driver._Night, "_remember", killed)
    with pytest.raises(KeyboardInterrupt):
        drive({"it": phase(OK)})
    night = read_night(tmp_path / "night")
    assert (night.outcome, night.exit_code, night.action) == ("error", 3, "page")
    assert "the driver ended before it took the night into the history" in night.cause


def test_a_green_night_is_not_green_while_it_is_resumed(drive, monkeypatch, tmp_path):
    phases = {"tests": judged("pass"), "it": phase(OK)}
    assert drive(phases).outcome == "pass"
    (tmp_path / "night" / "tests" / "junit.xml").unlink()
    resumed, seen = night_driver._Night._attempt, []

    def attempt(self, *given):
        seen.append(read_night(tmp_path / "night"))
        if len(seen) == 1:
            raise KeyboardInterrupt
        return resumed(self, *given)

    monkeypatch.setattr(night_driver._Night, "_attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        drive(phases, resume=True)
    assert seen[0].outcome == "error" and "the night is still running" in seen[0].cause
    assert "the driver of the night was killed before its verdict" in read_night(tmp_path / "night").cause
    assert drive(phases, resume=True).outcome == "pass" and read_night(tmp_path / "night").outcome == "pass"


def test_a_damaged_record_of_a_phase_is_no_finished_phase(drive, tmp_path):
    phases = {"it": phase(OK)}
    drive(phases)
    record = tmp_path / "night" / "it" / "phase.json"
    record.write_text(record.read_text()[:40])
    assert only(drive(phases, resume=True)).attempt == 2


def test_wrong_calls_run_nothing(drive, tmp_path):
    phases = {"it": phase(OK)}
    with pytest.raises(InputError, match="there is no night to resume"):
        drive(phases, resume=True)
    with pytest.raises(InputError, match="the row runs on a Ray cluster; expected --ray-address ADDRESS"):
        drive(phases, nodes=4)
    with pytest.raises(InputError, match="every night begins with this phase"):
        drive({"provenance": phase(OK)})
    assert not (tmp_path / "night").exists()
    drive(phases)
    with pytest.raises(InputError, match="a night lies here already. Next: --resume, or another --out"):
        drive(phases)
    with pytest.raises(InputError, match="the night was begun with another matrix"):
        drive({"it": phase(OK + " ")}, resume=True)


def test_one_driver_at_a_time(drive, tmp_path):
    with night_driver._lock(tmp_path / "night"), pytest.raises(InputError, match="another driver is at work"):
        drive({"it": phase(OK)})


def test_a_page_that_cannot_be_written_costs_no_verdict(drive, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr(night_page, "write_atomically", full)
    night = drive({"tests": judged("pass")})
    assert (night.outcome, night.exit_code) == ("error", 3)
    assert night.cause == "environment: the page was not written: report.html: No space left on device"
    assert read_night(tmp_path / "night").remarks == night.remarks == (night.cause.removeprefix("environment: "),)


def test_a_verdict_that_fits_nowhere_is_told(tmp_path, monkeypatch, capsys):
    record = NightRecord(identity="0a1b", row="cpu", chip="CPU", outcome="fail", action="page", began="2026-11-30")
    assert write_night(record, tmp_path / "night") == tmp_path / "night" / "night.json"
    (tmp_path / "file").write_text("no folder")
    elsewhere = write_night(record, tmp_path / "file" / "night", elsewhere=[tmp_path / "file", tmp_path])
    assert elsewhere == tmp_path / "night-cpu-0a1b.json"
    assert f"the verdict lies in {elsewhere}" in capsys.readouterr().err
    assert write_night(record, tmp_path / "file" / "night", elsewhere=[]) is None
    said = capsys.readouterr().err
    assert "could not be written anywhere" in said
    assert NightRecord.from_dict(json.loads(said[said.index("{") :])) == record


def test_the_gravest_outcome_counts():
    assert gravest(["pass", "unavailable"]) == "pass" and gravest([]) == "error"
    assert gravest(["pass", "known", "flaky", "inconclusive", "error", "fail"]) == "fail"
    assert gravest(["pass", "known", "error"]) == "error" and gravest(["unavailable"]) == "unavailable"


def test_the_page_shows_the_phases_and_links_what_they_left(drive, tmp_path):
    night = drive({"it": phase(OK), "tests": judged("pass", "fail")})
    page = (tmp_path / "night" / night.page).read_text()
    assert "MISALIGNED: cpu, " in page and 'href="tests/junit.xml"' in page and 'href="night.json"' in page
    assert "new: tests/tests.unit.rope::test_1: test_1: off by 0.3" in page
    again = CliRunner().invoke(app, ["report", str(tmp_path / "night"), "--output", str(tmp_path / "again.html")])
    assert again.exit_code == 0 and "MISALIGNED: cpu, " in (tmp_path / "again.html").read_text()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")
def test_the_page_is_valid_and_can_be_read_by_everybody(drive, tmp_path):
    import html5lib

    drive({"it": phase(OK), "tests": judged("pass")}, out="first")
    phases = {"tests": judged("fail"), "broken": phase("raise SystemExit(7)")}
    night = drive(phases, known=[{**ENTRY, "match": "*test_0*"}], out="second")
    assert night.concerns and night.phases[1].findings
    page = tmp_path / "second" / night.page
    html5lib.HTMLParser(strict=True).parse(page.read_text())
    assert [violations(page, tmp_path, theme) for theme in ("light", "dark")] == [[], []]


def test_the_commands(drive, tmp_path):
    drive({"it": phase(OK), "tests": judged("fail")})
    shown = CliRunner().invoke(app, ["nightly", "show", str(tmp_path / "night")])
    assert shown.exit_code == 1 and shown.output.startswith("MISALIGNED  cpu  ")
    as_json = CliRunner().invoke(app, ["nightly", "show", str(tmp_path / "night"), "--json"])
    document = json.loads(as_json.output)
    assert (document["exit_code"], document["action"], document["phases"][2]["stage"]) == (1, "page", "new")
    nothing = CliRunner().invoke(app, ["nightly", "show", str(tmp_path)])
    assert isinstance(nothing.exception, InputError) and "no night was run here" in str(nothing.exception)
    argv = ["nightly", "run", str(tmp_path / "m.yaml"), "--row", "gpu", "--out", str(tmp_path / "other")]
    wrong = CliRunner().invoke(app, argv)
    assert isinstance(wrong.exception, InputError) and "there is no such row" in str(wrong.exception)
    assert not (tmp_path / "other").exists()


# Nodes.


def test_a_node_is_lost_when_nobody_answers_there_any_more():
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        node = Node(name="a", identity="1", host="127.0.0.1", port=port, resources={"NPU": 8.0})
        watch = Watch([node])
        assert watch.lost() == [] and (node.cards("npu"), node.cards("cuda"), node.cards("cpu")) == (8, 0, None)
    assert watch.lost() == [node]
    # Whoever comes up on the same port later is another node.
    assert watch.lost() == [node]


def test_a_secret_reaches_the_nodes_and_no_file(drive, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    seen = []

    def census(self, folder):
        self.nodes = [Node(name="a", identity="1", host="", port=1, resources={})]
        return []

    def here(self, argv, folder, timeout, *_):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", self._environment())
            seen.append(with_withheld(read_json(Path(argv[-2])))["env"])
        return Ended(code=0, seconds=0.0)

    monkeypatch.setattr(night_driver._Night, "_take_census", census)
    monkeypatch.setattr(night_driver._Night, "_here", here)
    drive({"it": phase(OK, where="every-node")}, ray="auto", env={"HF_TOKEN": "hunter3", "VLLM_PORT": "7"})
    (env,) = seen
    assert (env["VLLM_API_KEY"], env["HF_TOKEN"]) == ("hunter2", "hunter3")
    plan = tmp_path / "night" / "it" / "_driver" / "plan.json"
    assert stat.S_IMODE(plan.stat().st_mode) == 0o600
    assert {"VLLM_USE_V1", "VLLM_PORT"} <= set(read_json(plan)["env"]) and "hunter" not in plan.read_text()


def test_several_nodes_of_one_machine_keep_their_numbers(tmp_path):
    night = night_driver._Night.__new__(night_driver._Night)
    night.names = {}
    node = Node(name="host", identity="1", host="", port=1, resources={})
    first = [replace(node, name=f"host.{i}", identity=str(i)) for i in (1, 2, 3)]
    assert [night._name(n) for n in first] == ["host.1", "host.2", "host.3"]
    after = [replace(node, name=f"host.{i + 1}", identity=identity) for i, identity in enumerate(("1", "3", "4"))]
    assert [night._name(n) for n in after] == ["host.1", "host.3", "host.4"]


NOT_BELIEVED = {
    "tests": ({"counts": {"tests": 0}}, "checks is said to have passed with no tests; expected at least one; found 0"),
    "steps": ({"counts": {"tests": 3, "steps": -1}}, "checks is said to have passed with no steps"),
    "text": ({"counts": {"tests": "many"}}, "not the record of a phase ("),
    "list": ({"counts": [1]}, "not the record of a phase ("),
    "red": ({"outcome": "error"}, "the night is said to have passed, and its phases have not; expected a phase that "
            "passed; found checks error"),
    "absent": ({"outcome": "unavailable"}, "found checks unavailable"),
}  # fmt: skip


@pytest.mark.parametrize("change", NOT_BELIEVED)
def test_a_green_record_that_says_nothing_is_not_believed(tmp_path, change):
    phase = {"name": "checks", "outcome": "pass", "counts": {"tests": 3}}
    night = {"schema": 1, "identity": "a", "row": "cpu", "chip": "CPU", "outcome": "pass", "action": "ignore"}
    write_json(tmp_path / "night.json", {**night, "phases": [phase]})
    shown = CliRunner().invoke(app, ["nightly", "show", str(tmp_path)])
    assert shown.exit_code == 0 and shown.output.startswith("ALIGNED")
    changed, problem = NOT_BELIEVED[change]
    write_json(tmp_path / "night.json", {**night, "phases": [{**phase, **changed}]})
    with pytest.raises(InputError) as refused:
        read_night(tmp_path)
    assert problem in str(refused.value)


def test_a_green_night_without_a_phase_is_not_believed(tmp_path):
    night = {"schema": 1, "identity": "a", "row": "cpu", "chip": "CPU", "outcome": "pass", "action": "ignore"}
    write_json(tmp_path / "night.json", {**night, "phases": []})
    with pytest.raises(InputError, match="the night is said to have passed, and its phases have not.*found no phase"):
        read_night(tmp_path)


class Gone(io.StringIO):
    """A terminal that was closed while the night ran."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


def shown(drive, phases: dict, *, terminal: bool, quiet: bool = False, leave: bool = False) -> tuple[str, str]:
    """A night's outcome, and what was written while it ran."""
    from rich.console import Console

    file = Gone()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)

    def begin(phase: str, minutes: float) -> None:
        progress.begin(phase, minutes)
        file.gone = leave and phase == "second"

    with night_progress(console, len(phases), quiet=quiet) as progress:
        night = drive(phases, listeners={"begin": begin, "tell": progress.tell})
    return night.outcome, file.getvalue()


def test_a_terminal_shows_the_phase_that_runs_and_its_time(drive):
    outcome, text = shown(drive, {"first": phase(OK), "second": phase(OK)}, terminal=True)
    assert outcome == "pass"
    assert re.search(r"night .* 0/2 \d:\d\d:\d\d first, at most 5 min", text)
    assert re.search(r"night .* 1/2 \d:\d\d:\d\d second, at most 5 min", text)
    assert re.search(r"first: pass \d+\.\d s *\n", text) and text.endswith("\x1b[2K")  # the bar is gone, the line stays


def test_without_a_terminal_a_line_tells_when_a_phase_begins_and_ends(drive):
    outcome, text = shown(drive, {"first": phase(OK)}, terminal=False)
    assert outcome == "pass" and re.fullmatch(r"first …\nfirst: pass \d+\.\d s\n", text)


def test_json_is_quiet(drive):
    assert shown(drive, {"first": phase(OK)}, terminal=True, quiet=True) == ("pass", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread that draws
def test_a_terminal_that_goes_away_takes_nothing_along(drive):
    outcome, text = shown(drive, {"first": phase(OK), "second": phase(OK)}, terminal=True, leave=True)
    assert outcome == "pass" and "second: pass" not in text


def test_the_cause_names_what_ended_the_night_before_what_was_not_run():
    ended = {"outcome": "error", "stage": "environment"}
    idle = [PhaseRecord(name=name, cause="not run: interrupted by SIGTERM", **ended) for name in ("dapo", "gkd")]
    lost = PhaseRecord(name="stress", cause="no end within 5 minutes", **ended)
    flaky = PhaseRecord(name="checks", outcome="flaky", stage="new", cause="test_a passed and failed in one run")
    found = PhaseRecord(name="units", outcome="fail", stage="new", cause="off by 0.3")
    assert cause_of([*idle, flaky, lost]) == (
        "stress: environment: no end within 5 minutes (also checks flaky); not run: dapo, gkd"
    )
    assert cause_of([*idle, flaky, lost, found]) == (
        "units: new: off by 0.3 (also stress error, checks flaky); not run: dapo, gkd"
    )
    assert cause_of([*idle, flaky]) == (
        "dapo: environment: not run: interrupted by SIGTERM (also checks flaky); not run: gkd"
    )
    assert cause_of([flaky]) == "checks: new: test_a passed and failed in one run"


def test_a_night_says_how_to_go_on_with_it_and_that_is_a_command(drive, tmp_path):
    broken = f"import os; os.path.exists({str(tmp_path / 'repaired')!r}) or 1/0; {OK}"
    night = drive({"first": phase(OK), "second": phase(broken)})
    again = f"alignment nightly run {tmp_path}/m.yaml --row cpu --out {tmp_path}/night"
    again += f" --history {tmp_path}/h.sqlite --resume"
    assert night.outcome == "error" and told(night)[-2:] == [f"  page: {night.page}", f"  next: {again}"]
    (stopped,) = [v for v in read_verdicts(tmp_path / "night") if v.check == "night/second"]
    assert stopped.next_command == again
    (tmp_path / "repaired").touch()
    done = CliRunner().invoke(app, [*again.split()[1:], "--json"])
    assert done.exit_code == 0, done.output
    assert not any("next:" in line for line in told(read_night(tmp_path / "night")))


def test_the_command_that_goes_on_names_all_that_was_given_wherever_it_is_typed(drive, monkeypatch, tmp_path):
    drive({"it": phase(OK)})  # writes the matrix
    monkeypatch.chdir(tmp_path)
    matrix = read_matrix(Path("m.yaml"))
    setting = NightSetting(
        matrix=matrix, row=matrix.row("cpu"), out=Path("a night"), ray="auto", history=Path("h.sqlite"),
        baselines=Path("stored"),
    )  # fmt: skip
    assert setting.again == (
        f"alignment nightly run {tmp_path}/m.yaml --row cpu --out '{tmp_path}/a night' --ray-address auto "
        f"--history {tmp_path}/h.sqlite --baseline {tmp_path}/stored --resume"
    )
    bare = replace(setting, ray=None, history=None, baselines=None).again
    assert bare == f"alignment nightly run {tmp_path}/m.yaml --row cpu --out '{tmp_path}/a night' --no-history --resume"


@pytest.mark.parametrize("killed_at", ["_attempt", "_conclude"])
def test_a_killed_night_says_how_to_go_on_with_it(drive, monkeypatch, tmp_path, killed_at):
    phases, running = {"it": phase(OK)}, []

    def killed(*_):
        running.append(told(read_night(tmp_path / "night")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(night_driver._Night, killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            drive(phases)
    # Who is at work needs nobody to go on for him.
    assert "the night is still running" in running[0][0] and not any("next:" in line for line in running[0])
    again = f"alignment nightly run {tmp_path}/m.yaml --row cpu --out {tmp_path}/night"
    again += f" --history {tmp_path}/h.sqlite --resume"
    assert told(read_night(tmp_path / "night"))[-1] == f"  next: {again}"
    begun = tmp_path / "night" / "begun.json"
    about = read_json(begun)
    del about["resume"]  # as nights before this were begun
    write_json(begun, about)
    assert read_night(tmp_path / "night").resume == ""
    done = CliRunner().invoke(app, [*again.split()[1:], "--json"])
    assert done.exit_code == 0, done.output
