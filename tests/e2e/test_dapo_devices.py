"""The pipeline on every device present: deterministic, time-sliced, and the same run as on the CPU up to rounding."""

from __future__ import annotations

import dapo_world
import pytest
import torch

from alignment.rl.run import replay_steps, run_dapo
from alignment.rl.tracking import METRICS
from alignment.rl.worker import Worker


def name(device) -> str:
    return str(device.torch_device)


def test_twice_on_one_device_is_the_same_bytes(world, tmp_path, device):
    runs = [run_dapo(dapo_world.config(world), run_dir=tmp_path / str(i), device=name(device)) for i in range(2)]
    first, second = ((run.directory / METRICS).read_bytes() for run in runs)
    assert first == second
    assert runs[0].curve.device == device.label


def test_a_replay_of_the_cpu_run_stays_within_the_noise_of_its_perturbations(world, tmp_path, device):
    """Bound: the spread of one-ulp perturbations (not below roundoff), times 3, times the forward passes so far."""
    skip = {
        "actor_rollout_ref__rollout__skip__enable": True,
        "actor_rollout_ref__rollout__skip__dump_dir": str(tmp_path / "record"),
    }
    base = run_dapo(dapo_world.config(world, **skip), run_dir=tmp_path / "base", device="cpu")
    settings = dapo_world.config(world)
    shaken = [
        replay_steps(
            settings, record=tmp_path / "record", run_dir=tmp_path / f"ulp-{seed}", device="cpu", perturbation=seed
        )
        for seed in range(1, 6)
    ]
    there = replay_steps(settings, record=tmp_path / "record", run_dir=tmp_path / "there", device=name(device))
    for step, (ours, theirs) in enumerate(zip(base.metrics, there.metrics, strict=True)):
        for metric in ("actor/grad_norm", "actor/entropy", "actor/pg_scale"):
            envelope = max(abs(run.metrics[step][metric] - ours[metric]) for run in shaken)
            floor = torch.finfo(torch.float32).eps * abs(ours[metric])
            passes = 2 * (step + 1)
            assert abs(theirs[metric] - ours[metric]) <= 3 * passes * max(envelope, floor), (step, metric)
        assert theirs["reward/before_filter"] == ours["reward/before_filter"]


def test_the_rollout_finds_the_memory_of_training_given_back(world, tmp_path, device, monkeypatch):
    if device.kind == "cpu":
        pytest.skip("the host's memory is where offloaded tensors go")
    seen = {}
    honest_rollout, honest_update = Worker.rollout, Worker.update_actor

    def rollout(self, batch):
        answer = honest_rollout(self, batch)
        seen["rollout"] = self.device.memory_allocated(), sum(t.nbytes for t in self.actor._exp_avg.values())
        return answer

    def update(self, *arguments, **keywords):
        answer = honest_update(self, *arguments, **keywords)
        seen["update"] = self.device.memory_allocated()
        return answer

    rollout.dispatch, update.dispatch = honest_rollout.dispatch, honest_update.dispatch
    monkeypatch.setattr(Worker, "rollout", rollout)
    monkeypatch.setattr(Worker, "update_actor", update)
    run_dapo(dapo_world.config(world, trainer__total_training_steps=2), run_dir=tmp_path, device=name(device))
    after_rollout, moments = seen["rollout"]
    # While generating: the engine's weights. While training: weights and both moments of the optimizer.
    assert after_rollout + moments < seen["update"]
