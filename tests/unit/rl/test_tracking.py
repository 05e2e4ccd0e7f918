from __future__ import annotations

import json
import math

import pytest

from alignment.errors import InputError
from alignment.rl.tracking import GROUPS, METRICS, RANKS, SERIES, TIMINGS, Tracker, keep_steps, read_series


def write_steps(directory, steps, *, resume_step=0, value=lambda step: 0.1 * step):
    tracker = Tracker(directory, resume_step=resume_step)
    for step in steps:
        tracker.log(
            step,
            metrics={"actor/pg_loss": value(step)},
            groups={"prompt_ids": ["a"]},
            timings={"rollout": step / 7, "step": 3},
            workloads={"update_actor": [[{"tokens": step}, {"tokens": 2}]]},
        )
    tracker.close()


def test_floats_keep_their_bits_and_timings_have_their_own_file(tmp_path):
    write_steps(tmp_path, range(1, 4), value=lambda step: math.pi / 3**step)
    lines = read_series(tmp_path / METRICS)
    assert lines == [{"step": s, "actor/pg_loss": math.pi / 3**s} for s in (1, 2, 3)]
    assert "rollout" not in (tmp_path / METRICS).read_text()
    assert read_series(tmp_path / TIMINGS)[0] == {"step": 1, "seconds": {"rollout": 1 / 7, "step": 3}}
    assert read_series(tmp_path / GROUPS)[2] == {"step": 3, "prompt_ids": ["a"]}
    assert read_series(tmp_path / RANKS)[1] == {"step": 2, "update_actor": [[{"tokens": 2}, {"tokens": 2}]]}


def test_every_step_is_on_disk_when_it_ends(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log(1, metrics={"a": 1.0}, groups={}, timings={})
    assert read_series(tmp_path / METRICS) == [{"step": 1, "a": 1.0}]
    assert read_series(tmp_path / RANKS) == []
    tracker.close()


def test_a_resumed_run_continues_the_bytes_of_an_uninterrupted_one(tmp_path):
    write_steps(tmp_path / "straight", range(1, 6))
    write_steps(tmp_path / "killed", range(1, 5))
    with open(tmp_path / "killed" / METRICS, "a") as file:
        file.write('{"step": 5, "actor/pg')
    write_steps(tmp_path / "killed", range(3, 6), resume_step=2)
    for name in SERIES:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_fresh_run_does_not_append_to_an_old_one(tmp_path):
    write_steps(tmp_path, range(1, 5))
    write_steps(tmp_path, range(1, 3))
    assert [line["step"] for line in read_series(tmp_path / METRICS)] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_refused_by_name(tmp_path, value):
    tracker = Tracker(tmp_path)
    with pytest.raises(InputError, match=r"step 2 · actor/entropy: a metric is not finite"):
        tracker.log(2, metrics={"actor/entropy": value}, groups={}, timings={})
    tracker.close()
    assert read_series(tmp_path / METRICS) == []


def test_a_torn_or_missing_series_is_an_error_when_read(tmp_path):
    with pytest.raises(InputError, match="metrics.jsonl: the run has no such series"):
        read_series(tmp_path / METRICS)
    (tmp_path / METRICS).write_text(json.dumps({"step": 1}) + '\n{"step"')
    with pytest.raises(InputError, match="the series ends in a torn line"):
        read_series(tmp_path / METRICS)
    (tmp_path / METRICS).write_text("nonsense\n")
    with pytest.raises(InputError, match="a line is not JSON"):
        keep_steps(tmp_path / METRICS, 1)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = Tracker(tmp_path, tensorboard=True)
    tracker.log(1, metrics={"actor/pg_loss": 0.25}, groups={}, timings={"rollout": 0.5})
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/pg_loss")] == [(1, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("timing/rollout")] == [(1, 0.5)]
