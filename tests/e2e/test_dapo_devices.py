"""The pipeline on every device present: deterministic, time-sliced, and the same run as on the CPU up to rounding."""

from __future__ import annotations

import json
import shutil

import dapo_world
import pytest
import torch

from alignment.capture.config import CaptureConfig
from alignment.capture.pipeline import capture_observer
from alignment.diagnose.localise import UPDATE, UPDATE_SIZE
from alignment.diagnose.whole_runs import compare_whole_runs
from alignment.numerics.verdict import Outcome, exit_code
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


def recorded(world, run_dir, device, **changes):
    """A run with its batches and sketches."""
    settings = dapo_world.config(
        world, trainer__record_batches=True, actor_rollout_ref__actor__ppo_mini_batch_size=2, **changes
    )
    run_dapo(settings, run_dir=run_dir, device=device, observers=[capture_observer(CaptureConfig(), run_dir)])
    return run_dir


@pytest.fixture(scope="module")
def on_the_cpu(world, tmp_path_factory):
    return recorded(world, tmp_path_factory.mktemp("cpu"), "cpu")


def test_a_free_run_is_aligned_to_its_last_step(on_the_cpu, world, tmp_path, device):
    """Nothing is replayed: from the second update on, rounding has set the weights apart."""
    found = compare_whole_runs(on_the_cpu, recorded(world, tmp_path / "there", name(device)))
    assert found.first is None and found.capture.stages[-1].step >= 2
    assert not [stage.reason() for stage in found.capture.stages if stage.outcome is not Outcome.PASS]
    assert exit_code(found.verdicts(subject="there", device=device.label, baseline="cpu")) == 0


def test_metrics_are_held_to_what_was_captured_and_a_step_that_is_missing_is_named(on_the_cpu, tmp_path):
    """The same run as if by another device, where no two numbers have to be equal to the bit."""
    copy = tmp_path / "copy"
    shutil.copytree(on_the_cpu, copy)
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**about, "device": "elsewhere"}))
    told: list[str] = []
    assert compare_whole_runs(on_the_cpu, copy, progress=told.append).first is None
    assert told[0] == "step 1 rollout" and "step 2 update_actor" in told
    steps = [json.loads(line) for line in (copy / METRICS).read_text().splitlines()]
    steps[1]["actor/grad_norm"] *= 1.01
    (copy / METRICS).write_text("".join(json.dumps(step) + "\n" for step in steps))
    [open_end] = [s for s in compare_whole_runs(on_the_cpu, copy).stages if s.outcome is not Outcome.PASS]
    assert (open_end.step, open_end.stage, open_end.outcome) == (2, "update_actor", Outcome.INCONCLUSIVE)
    shutil.rmtree(copy / "capture" / "step2")
    assert compare_whole_runs(on_the_cpu, copy).capture.missing == ["step 2 only in golden"]


def test_a_learning_rate_that_is_off_is_named_after_the_first_update(on_the_cpu, world, tmp_path, device):
    wrong = recorded(world, tmp_path / "wrong", name(device), actor_rollout_ref__actor__optim__lr=1.02e-3)
    first = compare_whole_runs(on_the_cpu, wrong).capture.first
    assert (first.step, first.stage) == (1, "update_actor")
    assert first.first.reason in (UPDATE, UPDATE_SIZE) and first.first.quantity.startswith("parameter")
