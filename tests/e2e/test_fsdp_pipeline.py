"""DAPO with its policy on FSDP2: recorded rollouts replayed against the golden engine, and runs that are killed and
resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import dapo_world
import pytest
import torch

from alignment.backends import fsdp_training
from alignment.errors import InputError
from alignment.numerics.budget import Budget, Noise
from alignment.rl.run import replay_steps, run_dapo
from alignment.rl.tracking import GROUPS, METRICS, RANKS, read_series

STEPS = 3
# Two updates a step, so that the second has ratios other than 1 and a loss other than the first's.
SETTINGS = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, "trainer__total_training_steps": STEPS}
FSDP = {**SETTINGS, "engine__train": "fsdp"}
PERTURBATIONS = (1, 2, 3, 4, 5)
JUDGED = 0


@pytest.fixture(scope="module")
def record(world, tmp_path_factory):
    """Recorded rollouts, the golden engine's replay of them, and the budgets that its perturbed replays give."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("fsdp_record")
    skip = {
        "actor_rollout_ref__rollout__skip__enable": True,
        "actor_rollout_ref__rollout__skip__dump_dir": str(directory / "rollouts"),
    }
    golden = run_dapo(dapo_world.config(world, **SETTINGS, **skip), run_dir=directory / "golden")
    shaken = [
        replay_steps(
            dapo_world.config(world, **SETTINGS),
            record=directory / "rollouts",
            run_dir=directory / str(seed),
            perturbation=seed,
        )
        for seed in PERTURBATIONS
    ]
    return directory / "rollouts", golden, [budgets(golden, shaken, step) for step in range(STEPS)]


def errors(ours: dict, theirs: dict) -> dict[str, float]:
    """Of one step: the gradient norm relative to itself, the loss relative to the scale of its terms."""
    return {
        "actor/grad_norm": abs(ours["actor/grad_norm"] - theirs["actor/grad_norm"]) / theirs["actor/grad_norm"],
        "actor/loss": abs(ours["actor/loss"] - theirs["actor/loss"]) / theirs["actor/pg_scale"],
    }


def budgets(golden, shaken, step: int) -> dict[str, Budget]:
    seen = [errors(run.metrics[step], golden.metrics[step]) for run in shaken]
    return {
        metric: Budget.from_noise(
            Noise(values=tuple(e[metric] for e in seen), seeds=PERTURBATIONS, perturbation="ulp", device="cpu"),
            metric=metric,
            dtype="float32",
            # The longest sum behind either: all tokens of a mini batch, each over the vocabulary.
            reduction_length=2 * 8 * dapo_world.RESPONSE * 105,
        )
        for metric in ("actor/grad_norm", "actor/loss")
    }


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
@pytest.mark.parametrize("model", ["transformers", "golden"])
def test_a_replay_agrees_with_the_golden_engine_step_by_step(world, record, tmp_path, model, fused):
    rollouts, golden, allowed = record
    settings = dapo_world.config(
        world,
        **FSDP,
        actor_rollout_ref__actor__fsdp_config__model=model,
        actor_rollout_ref__model__use_fused_kernels=fused,
    )
    ours = replay_steps(settings, record=rollouts, run_dir=tmp_path)
    for step in range(STEPS):
        for metric, error in errors(ours.metrics[step], golden.metrics[step]).items():
            measure = allowed[step][metric].judge(error, run_seed=JUDGED)
            assert measure.within, f"step {step + 1}: {measure}"
    assert read_series(tmp_path / RANKS) == read_series(golden.directory / RANKS) != []


def test_an_adapter_trains_like_the_golden_one(world, tmp_path):
    """The same adapter, the same base as reference; gradients are sums of the same float32 numbers."""
    lora = {**SETTINGS, "actor_rollout_ref__model__lora_rank": 2, "actor_rollout_ref__actor__use_kl_loss": True}
    golden = run_dapo(dapo_world.config(world, **lora), run_dir=tmp_path / "golden")
    settings = {**lora, "engine__train": "fsdp", "actor_rollout_ref__actor__fsdp_config__model": "golden"}
    ours = run_dapo(dapo_world.config(world, **settings), run_dir=tmp_path / "fsdp")
    plain = run_dapo(dapo_world.config(world, **SETTINGS), run_dir=tmp_path / "plain")
    eps = torch.finfo(torch.float32).eps
    for mine, theirs, other in zip(ours.metrics, golden.metrics, plain.metrics, strict=True):
        for metric, error in errors(mine, theirs).items():
            assert error <= 2 * 8 * dapo_world.RESPONSE * 105 * eps, metric
        assert mine["critic/score/mean"] == theirs["critic/score/mean"]
        assert errors(mine, other)["actor/grad_norm"] > 2 * 8 * dapo_world.RESPONSE * 105 * eps, "nothing was adapted"


@pytest.mark.slow
def test_two_ranks_train_one_adapter(world, tmp_path):
    pytest.importorskip("ray")
    lora = {**FSDP, "actor_rollout_ref__model__lora_rank": 2, "actor_rollout_ref__actor__use_kl_loss": True}
    one = run_dapo(dapo_world.config(world, **lora), run_dir=tmp_path / "one")
    two = run_dapo(
        dapo_world.config(world, **lora, trainer__n_gpus_per_node=2), run_dir=tmp_path / "two", executor="ray"
    )
    error = errors(two.metrics[0], one.metrics[0])["actor/grad_norm"]
    assert error <= 2 * 8 * dapo_world.RESPONSE * 105 * torch.finfo(torch.float32).eps


def test_gradients_of_twice_the_size_are_caught(world, record, tmp_path, monkeypatch):
    rollouts, golden, allowed = record
    monkeypatch.setattr(fsdp_training, "gradient_scale", lambda device: 2.0)
    ours = replay_steps(dapo_world.config(world, **FSDP), record=rollouts, run_dir=tmp_path)
    error = errors(ours.metrics[0], golden.metrics[0])["actor/grad_norm"]
    assert not allowed[0]["actor/grad_norm"].judge(error, run_seed=JUDGED).within


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import dapo_world
from alignment.rl.run import run_dapo

class Killer:
    def on_stage(self, step, total_steps, stage):
        if (step, stage) == (2, {stage!r}):
            os.kill(os.getpid(), signal.SIGKILL)
    def on_step(self, *arguments):
        pass

run_dapo(dapo_world.config(Path({world!r}), **{settings!r}), run_dir=Path({run_dir!r}), progress=Killer())
"""


def series(directory: Path) -> bytes:
    return (directory / METRICS).read_bytes() + (directory / GROUPS).read_bytes()


def test_killed_and_resumed_gives_the_uninterrupted_curve(world, tmp_path):
    settings = {**FSDP, "trainer__save_freq": 1, "actor_rollout_ref__actor__optim__lr_warmup_steps": 4}
    run_dapo(dapo_world.config(world, **settings), run_dir=tmp_path / "straight")
    script = KILLED.format(
        here=str(Path(__file__).parent),
        world=str(world),
        run_dir=str(tmp_path / "killed"),
        settings=settings,
        stage="update_actor",
    )
    ended = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, timeout=600)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert not (tmp_path / "killed" / "checkpoints" / "global_step_2").exists()
    run_dapo(dapo_world.config(world, **settings), run_dir=tmp_path / "killed")
    assert series(tmp_path / "killed") == series(tmp_path / "straight")
    ends = [d / "checkpoints" / f"global_step_{STEPS}" / "actor" for d in (tmp_path / "killed", tmp_path / "straight")]
    for file in ("model.safetensors", "shard_rank_0.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()


def test_a_checkpoint_of_another_engine_is_refused(world, tmp_path):
    changes = {**SETTINGS, "trainer__save_freq": 1, "trainer__total_training_steps": 1}
    run_dapo(dapo_world.config(world, **changes), run_dir=tmp_path / "golden")
    changes |= {
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": str(tmp_path / "golden" / "checkpoints" / "global_step_1"),
        "trainer__total_training_steps": 2,
        "engine__train": "fsdp",
    }
    with pytest.raises(InputError, match="belongs to another configuration.*engine.train=golden.*engine.train=fsdp"):
        run_dapo(dapo_world.config(world, **changes), run_dir=tmp_path / "fsdp")


@pytest.mark.slow
def test_two_ray_ranks_train_the_curve_of_one_and_resume(world, record, ray_cluster, tmp_path):
    """Sharded over two actors, which hold a half each: within the same budgets, and identical when a run is taken
    up."""
    rollouts, golden, allowed = record
    skip = {
        "actor_rollout_ref__rollout__skip__enable": True,
        "actor_rollout_ref__rollout__skip__dump_dir": str(rollouts),
    }
    settings = dapo_world.config(world, **FSDP, **skip, trainer__n_gpus_per_node=2, trainer__save_freq=1)
    ours = run_dapo(settings, run_dir=tmp_path / "straight", executor="ray")
    for step in range(STEPS):
        for metric, error in errors(ours.metrics[step], golden.metrics[step]).items():
            measure = allowed[step][metric].judge(error, run_seed=JUDGED)
            assert measure.within, f"step {step + 1}: {measure}"
    shutil.copytree(tmp_path / "straight", tmp_path / "killed")
    for step in range(2, STEPS + 1):
        shutil.rmtree(tmp_path / "killed" / "checkpoints" / f"global_step_{step}")
    run_dapo(settings, run_dir=tmp_path / "killed", executor="ray")
    assert series(tmp_path / "killed") == series(tmp_path / "straight")
    ends = [d / "checkpoints" / f"global_step_{STEPS}" / "actor" for d in (tmp_path / "killed", tmp_path / "straight")]
    for file in ("model.safetensors", "shard_rank_0.safetensors", "shard_rank_1.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()
