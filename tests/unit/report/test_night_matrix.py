"""The matrix of the nightly: what it says, and what is refused with its place and the nearest name."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from alignment.errors import InputError
from alignment.report.night_matrix import LONGEST_KNOWN, read_matrix

TODAY = date(2026, 11, 30)
TEXT = """
version: 1
rows:
  - {name: atlas-a2, chip: A2, stack: stacks/a2.yaml, nodes: 4, cards: 8, schedule: "0 18 * * *",
     phases: [doctor, dapo], subjects: [torch, torch_npu], layers: [unit, layer], env: {HCCL_DETERMINISTIC: true-ish, N: 3}}
  - {name: cpu, chip: CPU, device: cpu, require: false, phases: [operators]}
phases:
  doctor: {command: [alignment, doctor, --json], timeout_minutes: 5, where: every-node}
  operators: {command: [pytest, -m, "npu and ({layers})", --require, --junitxml, "{out}/junit.xml"],
              timeout_minutes: 60, needs: [npu]}
  dapo: {command: [alignment, dapo, --run-dir, "{out}/run", trainer.total_training_steps=4], timeout_minutes: 30,
         where: cluster, leaves: {training: [run], capture: "{out}/run/capture"}, steps: 4}
exit_codes: {0: ignore, 1: page, 2: warn, 3: page}
known_failures: known.yaml
"""
KNOWN = """
version: 1
entries:
  - {match: "operators/*rope*", owner: wei, reason: driver bug 12, expires: 2026-12-24}
"""


@pytest.fixture
def write(tmp_path):
    """Writes the matrix beside its files, with one text replaced by another."""

    def write(old: str = "", new: str = "", *, known: str = KNOWN):
        assert old in TEXT + KNOWN
        (tmp_path / "ci" / "stacks").mkdir(parents=True, exist_ok=True)
        (tmp_path / "ci" / "stacks" / "a2.yaml").write_text("schema: 1\n")
        (tmp_path / "known.yaml").write_text(known.replace(old, new) if old else known)
        path = tmp_path / "ci" / "nightly.yaml"
        path.write_text(TEXT.replace(old, new) if old else TEXT)
        return path

    return write


def test_a_matrix_is_read_with_the_files_it_names(write):
    matrix = read_matrix(write(), today=TODAY)
    row = matrix.row("atlas-a2")
    assert (row.chip, row.device, row.nodes, row.cards, row.require) == ("A2", "npu", 4, 8, True)
    assert row.stack.name == "a2.yaml" and row.stack.is_file()
    assert row.env == {"HCCL_DETERMINISTIC": "true-ish", "N": "3"}
    doctor, dapo = matrix.phases_of(row)
    assert doctor.leaves == (("document", "stdout.txt"),)
    assert dapo.leaves == (("training", "run"), ("capture", "run/capture"))
    assert matrix.phases["operators"].leaves == (("junit", "junit.xml"),)
    assert dapo.argv(out="/o")[3] == "/o/run"
    assert [matrix.action(code) for code in (0, 1, 2, 3, 4, 139)] == ["ignore", "page", "warn", "page", "warn", "page"]
    (known,) = matrix.known_failures
    assert known.holds("operators/unit::test_rope: wrong", today=date(2026, 12, 24))
    assert not known.holds("operators/unit::test_rope: wrong", today=date(2026, 12, 25))
    assert not known.holds("layers/unit::test_rope: wrong", today=TODAY)


def test_a_matrix_need_not_say_whom_a_night_calls(write):
    """A known failure (exit code 1 of its phase, 4 of the night) warns without a word in the matrix, too."""
    matrix = read_matrix(write("exit_codes: {0: ignore, 1: page, 2: warn, 3: page}\n", ""), today=TODAY)
    assert matrix.exit_codes == {0: "ignore", 1: "page", 2: "page", 3: "page", 4: "warn"}


def test_rows_of_other_settings_are_other_nights(write):
    first = read_matrix(write(), today=TODAY)
    again = read_matrix(write(), today=TODAY)
    other = read_matrix(write("total_training_steps=4", "total_training_steps=5"), today=TODAY)
    digests = [m.digest(m.row("atlas-a2")) for m in (first, again, other)]
    assert digests[0] == digests[1] != digests[2]
    assert first.digest(first.row("cpu")) == other.digest(other.row("cpu"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1\nrows", "version: 2\nrows", "nightly.yaml: a matrix of another version; expected 1; found 2"),
        ("nodes: 4", "node: 4", r"rows\[0\].*: unknown key; expected nodes\?; found node"),
        ("where: cluster", "where: clusters", r"phases.dapo.where: not one of those known; expected cluster\?"),
        ("phases: [operators]", "phases: [operator]", r"\(cpu\).phases: there is no such phase; expected operators\?"),
        ("phases: [operators]", "phases: []", "a night without a phase says nothing"),
        ("phases: [operators]", "phases: [operators, operators]", "a name is used twice.*found operators"),
        ("name: cpu", "name: atlas-a2", "a name is used twice; expected once; found atlas-a2"),
        ("nodes: 4", "nodes: true", r"nodes: not a number of things; expected 1, 2, …; found True"),
        ("nodes: 4", "nodes: 0", "not a number of things"),
        ("require: false", 'require: "false"', "require: neither true nor false"),
        ("timeout_minutes: 30", "timeout_minutes: 0", "phases.dapo.timeout_minutes: not a time"),
        ("timeout_minutes: 30", "timeout_minutes: .nan", "phases.dapo.timeout_minutes: not a time"),
        ("timeout_minutes: 30,", "", "phases.dapo: a key is missing; expected timeout_minutes"),
        ("{out}/junit.xml", "{aut}/junit.xml", r"an unknown placeholder; expected out\?; found \{aut\}"),
        ("--json", "--jsun", "phases.doctor.leaves: nothing tells what the phase did"),
        ("capture: \"{out}/run/capture\"", "captures: run", r"phases.dapo.leaves: unknown key; expected capture\?"),
        ("capture: \"{out}/run/capture\"", "capture: ../other", "a path outside the folder of the phase"),
        ("stacks/a2.yaml", "stacks/a3.yaml", r"\(atlas-a2\).stack: there is no such file; expected a file in"),
        ("known.yaml", "unknown.yaml", "known_failures: there is no such file"),
        ("3: page", "3: ignore", "exit_codes.3: a night that failed cannot be ignored"),
        ("3: page", "three: page", "exit_codes: not an exit code; expected 0 … 255; found three"),
        ("0 18 * * *", "daily", 'schedule: not a schedule; expected five fields: "0 18'),
        ("steps: 4", "steps: 4, steps: 5", r"nightly.yaml: line \d+: a key is given twice; expected once; found steps"),
        ("rows:", "rows: [", "nightly.yaml: not YAML"),
        ("owner: wei", "owner: ''", r"known.yaml: entries\[0\].owner: not a text"),
        ("owner: wei,", "", r"known.yaml: entries\[0\]: a key is missing; expected owner"),
        ('"operators/*rope*"', '"*/*"', r"entries\[0\].match: the pattern matches everything"),
        ("2026-12-24", "soon", r"entries\[0\].expires: not a day; expected YYYY-MM-DD; found soon"),
        ("2026-12-24", "2099-01-01", r"entries\[0\].expires: a known failure ends; expected at most 92 days"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(write, old, new, message):
    with pytest.raises(InputError, match=message):
        read_matrix(write(old, new), today=TODAY)


def test_a_missing_row_names_the_nearest(write):
    matrix = read_matrix(write(), today=TODAY)
    with pytest.raises(InputError, match=r"there is no such row; expected atlas-a2\?.*; found atlas-a3"):
        matrix.row("atlas-a3")


def test_a_placeholder_needs_a_value_of_the_row(write):
    matrix = read_matrix(write(), today=TODAY)
    with pytest.raises(InputError, match=r"phases.operators.command: a placeholder without a value; found \{layers\}"):
        matrix.phases["operators"].argv(out="/o", layers="")


def test_a_failure_may_be_known_for_a_quarter(write):
    last = TODAY + timedelta(days=LONGEST_KNOWN)
    assert read_matrix(write("2026-12-24", str(last)), today=TODAY).known_failures[0].expires == last
    with pytest.raises(InputError, match="a known failure ends"):
        read_matrix(write("2026-12-24", str(last + timedelta(days=1))), today=TODAY)
