"""The journal: append-only, on the disk before anything rests on it, and whole again after a kill."""

from __future__ import annotations

import json

import pytest

from alignment.bisect.journal import FILE, SCHEMA, Journal, probe_key
from alignment.bisect.observation import Observation, Result, skip
from alignment.errors import InputError


def begun(folder) -> Journal:
    journal = Journal(folder)
    journal.append("begin", schema=SCHEMA, settings={})
    return journal


def probe(journal, key, seen):
    journal.append("probe", key=key, observation=seen.to_data())


def test_finished_probes_are_answers_and_failures_of_infrastructure_are_not(tmp_path):
    journal = begun(tmp_path)
    probe(journal, "a", Observation(result=Result.GOOD, value=0.5))
    probe(journal, "b", skip("build"))
    probe(journal, "c", Observation(result=Result.INFRASTRUCTURE, reason="infrastructure"))
    probe(journal, "d", Observation(result=Result.ABORT))
    journal.close()
    assert set(Journal(tmp_path, write=False).observations()) == {"a", "b"}


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_cut_by_a_kill_is_dropped(tmp_path, cut):
    journal = begun(tmp_path)
    probe(journal, "a", Observation(result=Result.GOOD))
    probe(journal, "b", Observation(result=Result.GOOD))
    journal.close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(tmp_path)
    assert set(again.observations()) == {"a"}
    probe(again, "c", Observation(result=Result.GOOD))
    again.close()
    assert set(Journal(tmp_path, write=False).observations()) == {"a", "c"}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_damage_in_the_middle_is_an_error(tmp_path):
    journal = begun(tmp_path)
    journal.append("stage", text="x")
    journal.close()
    lines = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text(lines[0] + "{ half\n" + lines[1])
    with pytest.raises(InputError, match="the journal is damaged in the middle"):
        Journal(tmp_path, write=False)


def test_one_process_at_a_time(tmp_path):
    first = begun(tmp_path)
    with pytest.raises(InputError, match="another process is at work on this bisection"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


def test_a_journal_of_another_schema(tmp_path):
    (tmp_path / FILE).write_text('{"event": "begin", "schema": 99}\n')
    with pytest.raises(InputError, match="a journal of another schema; expected 1; found 99"):
        Journal(tmp_path, write=False)


def test_no_bisection_in_a_folder(tmp_path):
    with pytest.raises(InputError, match="there is no bisection in this folder"):
        Journal(tmp_path, write=False)


def test_answers_of_the_outside_are_remembered(tmp_path):
    journal = begun(tmp_path)
    assert journal.recall("releases of x") is None
    journal.remember("releases of x", ["1", "2"])
    assert journal.recall("releases of x") == ["1", "2"]


def test_everything_that_matters_is_in_the_key():
    base = dict(stack="s", suite="u", check="c", hardware="h", environment="e", data="d", repeat=0)
    keys = {probe_key(**base)} | {probe_key(**{**base, name: 1 if name == "repeat" else "other"}) for name in base}
    assert len(keys) == len(base) + 1
