"""End-to-end baselines: curves and replays come back bit for bit, damage is told, and a replay is judged by stage."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from alignment.baseline import runs as module
from alignment.baseline.provenance import provenance_of
from alignment.baseline.runs import (
    MICRO_BATCHES,
    ONE_ULP,
    REPLAY_METRICS,
    REPLAY_SEED,
    envelopes_of,
    judge_replay,
    load_curves,
    load_replay,
    recording_config,
    select_curves,
    select_replay,
    write_curves,
    write_replay,
)
from alignment.baseline.select import MissingBaseline
from alignment.baseline.store import BaselineStore
from alignment.baseline.verify import verify
from alignment.errors import InputError
from alignment.numerics.curve_run import CurveRun, CurveStep
from alignment.numerics.precision import unit_roundoff
from alignment.numerics.verdict import Outcome
from alignment.rl.run import RunResult

IDENTITIES = [(seed, ONE_ULP) for seed in (102, 103, 104)] + [(parts, MICRO_BATCHES) for parts in (2, 3, 5)]
U = unit_roundoff("float32")


def curve(seed, *, steps=3, config="f" * 64):
    made = [
        CurveStep.from_samples(
            step=step,
            prompt_ids=["p0", "p0", "p1", "p1"],
            values={"reward": [0.1 * seed, 0.3, 1 / 3, math.pi], "response_length": [3, 4, 5, 6]},
            scalars={"kept_fraction": 1.0},
        )
        for step in range(1, steps + 1)
    ]
    return CurveRun(seed=seed, device="cpu", config=config, total_steps=steps, filtered=False, steps=tuple(made))


def metrics(scale=1.0, **changed):
    rows = []
    for step in (1, 2):
        row = {"step": step, "actor/pg_scale": 0.8}
        row |= {m.name: 0.5 * step * scale for m in REPLAY_METRICS}
        rows.append(row | {k.replace("__", "/"): v for k, v in changed.items() if step == 2})
    return rows


def result(rows, tmp_path, *, seed=REPLAY_SEED):
    return RunResult(directory=tmp_path, metrics=rows, curve=curve(seed, steps=2))


@pytest.fixture
def provenance(commit, cpu):
    return provenance_of(cpu)


@pytest.fixture
def replay(tmp_path, cpu, provenance):
    """A stored replay baseline of two steps whose perturbed replays moved by 8 roundoffs."""
    config = recording_config("dapo-tiny", seed=REPLAY_SEED)
    base = result(metrics(), tmp_path)
    perturbed = [result(metrics(1 + 8 * U), tmp_path) for _ in IDENTITIES]
    record = tmp_path / "rollouts"
    record.mkdir()
    save_file({"responses": torch.zeros(2, 2)}, record / "step_000001_00.safetensors")
    (record / "key.json").write_text("{}")
    path = tmp_path / "store" / "cpu" / "chip" / "e2e" / "dapo-tiny.replay" / "replay.json"
    envelopes = envelopes_of(base, perturbed, IDENTITIES, config=config, device=cpu)
    write_replay(
        path, record, preset="dapo-tiny", config=base.curve.config, steps=2, envelopes=envelopes, provenance=provenance
    )
    return path


def test_curves_come_back_bit_for_bit(tmp_path, provenance):
    path = tmp_path / "cpu" / "chip" / "e2e" / "dapo-tiny.curves.json"
    stored = [curve(seed) for seed in (101, 102, 103, 104, 105)]
    write_curves(path, "dapo-tiny", stored, provenance)
    found = load_curves(path)
    assert list(found.runs) == stored
    assert len(json.loads(path.read_text())["prompts"]) == 1, "equal prompts are stored once"


def test_damaged_curves_are_refused(tmp_path, provenance):
    path = tmp_path / "cpu" / "chip" / "e2e" / "dapo-tiny.curves.json"
    write_curves(path, "dapo-tiny", [curve(1)], provenance)
    whole = path.read_text()
    path.write_text(whole.replace('"seed": 1', '"seed": 2'))
    with pytest.raises(InputError, match="the curves file is damaged or was edited.*alignment baseline record --layer e2e"):
        load_curves(path)
    path.write_text(whole)
    tensors = path.with_suffix(".safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="the tensors of the curves are missing or damaged"):
        load_curves(path)
    path.write_text('{"what": "replay", "schema": 1}')
    with pytest.raises(InputError, match="the file holds no curves of this schema"):
        load_curves(path)


def test_curves_are_selected_by_the_fallback_order(tmp_path, provenance):
    for kind, chip in (("cpu", "epyc"), ("cuda", "h200")):
        write_curves(tmp_path / kind / chip / "e2e" / "dapo-tiny.curves.json", "dapo-tiny", [curve(1)], provenance)
    found = select_curves(tmp_path, "dapo-tiny", kind="npu", chip="910B3")
    assert found.step == "gpu" and found.title.startswith("cuda/h200/e2e/dapo-tiny.curves.json, recorded ")
    assert select_curves(tmp_path, "dapo-tiny", kind="cpu", chip="EPYC").step == "same chip"
    with pytest.raises(MissingBaseline, match="no end-to-end baseline.*alignment baseline record --layer e2e --case ppo"):
        select_curves(tmp_path, "ppo", kind="npu", chip="910B3")


def test_a_replay_comes_back_with_its_rollouts(replay):
    found = load_replay(replay)
    assert found.steps == 2 and set(found.envelopes) == {m.name for m in REPLAY_METRICS}
    assert (found.record / "step_000001_00.safetensors").is_file()
    assert select_replay(replay.parents[4], "dapo-tiny", kind="cpu", chip="chip").step == "same chip"


def test_a_damaged_rollout_is_refused(replay):
    rollout = replay.parent / "step_000001_00.safetensors"
    rollout.write_bytes(rollout.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="step_000001_00.safetensors: a recorded rollout is missing or damaged"):
        load_replay(replay)


def test_verify_reads_the_runs_too(replay):
    store = BaselineStore(replay.parents[4])
    missing = [f for f in verify(store) if "no unit baseline" not in f.problem]
    assert missing == []
    (replay.parent / "key.json").unlink()
    assert any("key.json: a recorded rollout is missing" in f.problem for f in verify(store))


def test_a_replay_inside_the_envelope_passes(replay, tmp_path, cpu):
    verdict = judge_replay(load_replay(replay), result(metrics(1 + 4 * U), tmp_path), subject="golden", device=cpu)
    assert verdict.outcome is Outcome.PASS
    assert "2 replayed steps inside their envelopes" in verdict.reason


@pytest.mark.parametrize("metric", REPLAY_METRICS, ids=lambda m: m.name)
def test_each_metric_outside_its_envelope_accuses_its_stage(replay, tmp_path, cpu, metric):
    rows = metrics()
    rows[1][metric.name] *= 1.01
    verdict = judge_replay(load_replay(replay), result(rows, tmp_path), subject="golden", device=cpu)
    assert verdict.outcome is Outcome.FAIL
    assert (verdict.where.stage, verdict.where.quantity, verdict.where.detail) == (metric.stage, metric.name, "step 2")
    assert verdict.next_command == "alignment run --only replay --config dapo-tiny --device cpu"


def test_the_first_step_and_in_it_the_first_stage_is_named(replay, tmp_path, cpu):
    rows = metrics(1.5)
    rows[0]["response_length/mean"] = 0.5
    verdict = judge_replay(load_replay(replay), result(rows, tmp_path), subject="golden", device=cpu)
    assert (verdict.where.quantity, verdict.where.detail) == ("reward/before_filter", "step 1")


def test_another_configuration_missing_steps_and_missing_metrics_are_no_pass(replay, tmp_path, cpu):
    stored = load_replay(replay)
    other = dataclasses.replace(result(metrics(), tmp_path), curve=curve(REPLAY_SEED, config="0" * 64))
    assert judge_replay(stored, other, subject="golden", device=cpu).outcome is Outcome.ERROR
    short = result(metrics()[:1], tmp_path)
    assert "has other steps" in judge_replay(stored, short, subject="golden", device=cpu).reason
    rows = metrics()
    del rows[0]["actor/grad_norm"]
    verdict = judge_replay(stored, result(rows, tmp_path), subject="golden", device=cpu)
    assert verdict.outcome is Outcome.FAIL and verdict.where.quantity == "actor/grad_norm"


def test_the_policy_loss_is_bounded_by_the_size_of_its_terms(replay):
    envelope = load_replay(replay).envelopes["actor/loss"]
    entropy = load_replay(replay).envelopes["actor/entropy"]
    assert envelope.floor[0] / entropy.floor[0] == pytest.approx(0.8 / 0.5)


def test_recorded_runs_have_their_own_seeds_and_leave_no_checkpoints():
    config = recording_config("dapo-tiny", seed=101, steps=2, dump="rollouts")
    assert (config.trainer.seed, config.trainer.save_freq, config.trainer.resume_mode) == (101, -1, "disable")
    assert config.trainer.total_training_steps == 2 and config.actor_rollout_ref.rollout.skip.enable
    assert len(set(module.CURVE_SEEDS)) >= 5


def test_an_emulated_device_records_no_run(commit, tmp_path, cpu):
    emulated = dataclasses.replace(cpu, kind="npu", emulated=True)
    for record in (module.record_curves, module.record_replay):
        with pytest.raises(InputError, match="emulated device are never a baseline"):
            record(tmp_path, "dapo-tiny", emulated, work=tmp_path / "work")
    assert list(tmp_path.iterdir()) == []
