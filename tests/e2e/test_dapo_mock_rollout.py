from __future__ import annotations

import json

import dapo_world
import pytest
import torch

from alignment.errors import InputError
from alignment.rl.run import perturbed_checkpoint, replay_steps, run_dapo
from alignment.rl.worker import Worker
from alignment.weights.checkpoint import load_state

RECORD = {"actor_rollout_ref__rollout__skip__enable": True}


@pytest.fixture(scope="module")
def record(world, tmp_path_factory):
    """Recorded rollouts, and the run that recorded them."""
    directory = tmp_path_factory.mktemp("record")
    settings = dapo_world.config(
        world, actor_rollout_ref__rollout__skip__dump_dir=str(directory / "rollouts"), **RECORD
    )
    return directory / "rollouts", run_dapo(settings, run_dir=directory / "run")


def skipping(world, rollouts, **changes):
    return dapo_world.config(world, actor_rollout_ref__rollout__skip__dump_dir=str(rollouts), **RECORD, **changes)


def test_a_later_run_finds_the_record_needs_no_engine_and_is_the_same_run(world, record, tmp_path, monkeypatch):
    rollouts, first = record

    def no_engine(self):
        raise AssertionError("the inference engine was brought up")

    monkeypatch.setattr(Worker, "_build_rollout", no_engine)
    again = run_dapo(skipping(world, rollouts), run_dir=tmp_path)
    assert again.metrics == first.metrics and again.curve.steps == first.curve.steps


def test_recording_changes_nothing(world, record, tmp_path):
    _, first = record
    assert run_dapo(dapo_world.config(world), run_dir=tmp_path).metrics == first.metrics


def test_training_settings_may_differ_from_the_recording(world, record, tmp_path):
    rollouts, first = record
    other = run_dapo(skipping(world, rollouts, actor_rollout_ref__actor__optim__lr=5e-3), run_dir=tmp_path)
    assert other.curve.curve("reward") == first.curve.curve("reward")
    assert other.metrics[0]["actor/grad_norm"] == first.metrics[0]["actor/grad_norm"]
    assert other.metrics[1]["actor/grad_norm"] != first.metrics[1]["actor/grad_norm"]


def test_a_run_that_goes_on_beyond_the_record_generates_and_records_the_rest(world, record, tmp_path):
    settings = {"actor_rollout_ref__rollout__skip__dump_dir": str(tmp_path / "rollouts"), **RECORD}
    run_dapo(dapo_world.config(world, trainer__total_training_steps=1, **settings), run_dir=tmp_path / "short")
    longer = run_dapo(dapo_world.config(world, **settings), run_dir=tmp_path / "long")
    assert longer.metrics == record[1].metrics
    assert len(list((tmp_path / "rollouts").glob("step_*.safetensors"))) == 3


@pytest.mark.parametrize(
    "change, named",
    [
        ({"actor_rollout_ref__rollout__temperature": 0.7}, "temperature=0.7; found temperature=1.0"),
        ({"trainer__seed": 3}, "seed=3; found seed=1"),
    ],
)
def test_a_stale_record_is_refused(world, record, tmp_path, change, named):
    with pytest.raises(InputError) as error:
        run_dapo(skipping(world, record[0], **change), run_dir=tmp_path)
    assert "the recorded rollouts are stale" in str(error.value) and named in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_record_of_another_model_is_refused(world, record, tmp_path):
    key = record[0] / "key.json"
    before = key.read_text()
    key.write_text(json.dumps({**json.loads(before), "model": "0" * 64}))
    try:
        with pytest.raises(InputError, match="the recorded rollouts are stale.*model="):
            run_dapo(skipping(world, record[0]), run_dir=tmp_path)
    finally:
        key.write_text(before)


def test_a_missing_round_of_a_filtered_record_is_named(world, tmp_path):
    filtering = {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "seq_reward"}
    settings = dapo_world.config(
        world, actor_rollout_ref__rollout__skip__dump_dir=str(tmp_path / "rollouts"), **RECORD, **filtering
    )
    first = run_dapo(settings, run_dir=tmp_path / "first")
    assert run_dapo(settings, run_dir=tmp_path / "second").metrics == first.metrics
    second_rounds = sorted((tmp_path / "rollouts").glob("step_*_01.safetensors"))
    second_rounds[0].unlink()
    with pytest.raises(InputError, match="rollout: this generation round is not recorded"):
        run_dapo(settings, run_dir=tmp_path / "third")


def test_a_replay_is_exact_and_its_perturbations_spread(world, record, tmp_path):
    rollouts, first = record
    exact = replay_steps(dapo_world.config(world), record=rollouts, run_dir=tmp_path / "exact")
    assert exact.metrics == first.metrics
    shaken = [
        replay_steps(
            dapo_world.config(world), record=rollouts, run_dir=tmp_path / str(seed), perturbation=seed, steps=2
        )
        for seed in (1, 2)
    ]
    norms = [result.metrics[1]["actor/grad_norm"] for result in (exact, *shaken)]
    assert len(set(norms)) == 3
    # One-ulp weights move a gradient norm by a modest multiple of the unit roundoff: far less than the norm itself.
    assert max(norms) - min(norms) < torch.finfo(torch.float32).eps ** 0.5 * norms[0]
    assert all(result.curve.curve("reward") == exact.curve.curve("reward")[:2] for result in shaken)


def test_a_replay_of_nothing_says_so(world, record, tmp_path):
    with pytest.raises(InputError, match="not enough rollouts are recorded; expected 1 steps; found 0 steps"):
        replay_steps(dapo_world.config(world), record=tmp_path / "none", run_dir=tmp_path / "run")
    with pytest.raises(InputError, match="not enough rollouts are recorded; expected 9 steps; found 3 steps"):
        replay_steps(dapo_world.config(world), record=record[0], run_dir=tmp_path / "run", steps=9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_perturbation_moves_every_weight_by_at_most_one_ulp(world, tmp_path, dtype):
    perturbed_checkpoint(world / "model", tmp_path / "moved", seed=5, dtype=dtype)
    moved = 0
    for name, tensor in load_state(world / "model").items():
        there, now = tensor.to(dtype), load_state(tmp_path / "moved")[name].to(dtype)
        up, down = (torch.nextafter(there, torch.full_like(there, sign * float("inf"))) for sign in (1, -1))
        assert ((now == there) | (now == up) | (now == down)).all(), name
        moved += int((now != there).sum())
    assert moved > 0
