"""DAPO with the policy on megatron-core: replayed rollouts against the golden engine, and runs killed and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import dapo_world
import pytest

from alignment.diagnose.failure_modes import find_failure_modes
from alignment.diagnose.resume_doctor import examine_checkpoint
from alignment.diagnose.run_stages import open_run
from alignment.diagnose.triage import triage
from alignment.errors import InputError
from alignment.rl.run import run_dapo
from alignment.rl.tokenizer import train_tokenizer
from alignment.rl.tracking import GROUPS, METRICS, RANKS, read_series

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron_core")]

STEPS = 4
LIMIT_SECONDS = 400
MEGATRON = "actor_rollout_ref__actor__megatron__"
SETTINGS = {
    "trainer__total_training_steps": STEPS, "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    "actor_rollout_ref__actor__optim__lr_warmup_steps": 3, "actor_rollout_ref__rollout__skip__enable": True,
}  # fmt: skip
# Three optimizer steps' losses within 1e-5 of the golden in float32 is the project's bar; gradient norms likewise.
BAR = 1e-5
SPREAD = {
    "trainer__n_gpus_per_node": 2, "trainer__save_freq": 1, f"{MEGATRON}tensor_model_parallel_size": 2,
    f"{MEGATRON}expert_model_parallel_size": 2, f"{MEGATRON}expert_tensor_parallel_size": 1,
    f"{MEGATRON}optimizer_cpu_offload": True, "engine__train": "megatron",
    "actor_rollout_ref__model__dtype": "bfloat16",
}  # fmt: skip

ACTOR = "actor_rollout_ref__actor__"
PIPELINE = {
    "trainer__n_gpus_per_node": 2, "trainer__total_training_steps": 1, "engine__train": "megatron",
    f"{MEGATRON}pipeline_model_parallel_size": 2, f"{ACTOR}use_dynamic_bsz": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def even_world(megatron_core, tmp_path_factory):
    """The tiny world with a vocabulary that two tensor parallel ranks can share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dapo_world,
            "train_tokenizer",
            lambda texts, directory, vocab_size: train_tokenizer(texts, directory, vocab_size=104),
        )
        return dapo_world.build(tmp_path_factory.mktemp("even_world"))


@pytest.fixture(scope="module")
def rollouts(even_world, tmp_path_factory):
    """Rollouts recorded once, so that every run trains on the same tokens; and the golden run that recorded them."""
    directory = tmp_path_factory.mktemp("record")
    return directory / "rollouts", run_dapo(settings(even_world, directory / "rollouts"), run_dir=directory / "run")


def settings(world, record, **changes):
    return dapo_world.config(world, actor_rollout_ref__rollout__skip__dump_dir=str(record), **{**SETTINGS, **changes})


def test_replayed_losses_and_gradient_norms_are_those_of_the_golden_engine(even_world, rollouts, tmp_path):
    record, golden = rollouts
    ours = run_dapo(settings(even_world, record, engine__train="megatron"), run_dir=tmp_path)
    assert len(ours.metrics) == STEPS
    for mine, theirs in zip(ours.metrics, golden.metrics, strict=True):
        scale = theirs["actor/pg_scale"]
        assert abs(mine["actor/loss"] - theirs["actor/loss"]) <= BAR * max(scale, abs(theirs["actor/loss"]))
        assert abs(mine["actor/grad_norm"] - theirs["actor/grad_norm"]) <= BAR * theirs["actor/grad_norm"]
        assert abs(mine["actor/entropy"] - theirs["actor/entropy"]) <= BAR * theirs["actor/entropy"]
    assert ours.curve.config == golden.curve.config


def test_another_learning_rate_is_seen(even_world, rollouts, tmp_path):
    """The bar would not pass a run that trains otherwise."""
    record, golden = rollouts
    ours = run_dapo(
        settings(even_world, record, engine__train="megatron", actor_rollout_ref__actor__optim__lr=1.1e-3),
        run_dir=tmp_path,
    )
    mine, theirs = ours.metrics[-1], golden.metrics[-1]
    assert abs(mine["actor/grad_norm"] - theirs["actor/grad_norm"]) > BAR * theirs["actor/grad_norm"]


@pytest.mark.parametrize(("changes", "message"), [
    ({f"{MEGATRON}tensor_model_parallel_size": 2}, "the number of ranks.*expected a multiple of 2"),
    ({f"{MEGATRON}expert_model_parallel_size": 3}, "expert_model_parallel_size.*a divisor of n_routed_experts = 4"),
    ({f"{MEGATRON}pipeline_model_parallel_size": 4}, "pipeline_model_parallel_size.*2 layer"),
    ({"actor_rollout_ref__model__use_fused_kernels": True}, "use_fused_kernels.*False with engine.train=megatron"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_before_the_first_step(even_world, rollouts, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        run_dapo(settings(even_world, rollouts[0], engine__train="megatron", **changes), run_dir=tmp_path)
    assert not (tmp_path / METRICS).exists() or not (tmp_path / METRICS).read_text()


RUN = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import dapo_world
from alignment.rl.run import run_dapo

class Killer:
    def on_stage(self, step, total_steps, stage):
        if (step, stage) == ({step}, {stage!r}):
            os.kill(os.getpid(), signal.SIGKILL)
    def on_step(self, *arguments):
        pass

run_dapo(dapo_world.config(Path({world!r}), **{settings!r}), run_dir=Path({run_dir!r}), executor="ray",
progress=Killer())
"""


def run(world: Path, record: Path, run_dir: Path, *, die_in: tuple[int, str] = (0, "")) -> int:
    """A two-rank run in a process (and a Ray cluster) of its own; how it ended."""
    changes = {**SETTINGS, **SPREAD, "actor_rollout_ref__rollout__skip__dump_dir": str(record)}
    script = RUN.format(
        here=str(Path(__file__).parent),
        world=str(world),
        settings=changes,
        run_dir=str(run_dir),
        step=die_in[0],
        stage=die_in[1],
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    if ended.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(ended.stderr[-4000:])
    return ended.returncode


def series(directory: Path) -> bytes:
    return (directory / METRICS).read_bytes() + (directory / GROUPS).read_bytes()


@pytest.fixture(scope="module")
def straight(even_world, rollouts, tmp_path_factory):
    """The uninterrupted run on TP2 · EP2 with the distributed, offloaded optimizer, a checkpoint after every step."""
    directory = tmp_path_factory.mktemp("straight")
    assert run(even_world, rollouts[0], directory) == 0
    return directory


def test_killed_and_resumed_gives_the_uninterrupted_curve(even_world, rollouts, straight, tmp_path):
    assert run(even_world, rollouts[0], tmp_path, die_in=(3, "update_actor")) == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / "global_step_2").exists() and not (
        tmp_path / "checkpoints" / "global_step_3"
    ).exists()
    assert run(even_world, rollouts[0], tmp_path) == 0
    assert series(tmp_path) == series(straight)
    for ours in sorted((tmp_path / "checkpoints" / f"global_step_{STEPS}" / "actor").rglob("*.safetensors")):
        theirs = straight / ours.relative_to(tmp_path)
        assert ours.read_bytes() == theirs.read_bytes(), ours.name


def test_the_doctor_trusts_what_was_saved_and_sees_the_state_of_another_step(straight, tmp_path):
    saved = straight / "checkpoints"
    assert examine_checkpoint(saved) == ()
    copy = shutil.copytree(saved, tmp_path / "checkpoints")
    file = "actor/optimizer_rank_1.safetensors"
    shutil.copy(copy / "global_step_1" / file, copy / f"global_step_{STEPS}" / file)
    (found,) = examine_checkpoint(copy)
    assert found.where.startswith(str(copy / f"global_step_{STEPS}" / file))
    assert found.problem == "the optimizer has counted another number of steps: the file is another checkpoint's"


def test_the_optimizer_state_matters(even_world, rollouts, straight, tmp_path):
    """Resumed with the optimizer state of another step the curve differs: the test above would see it."""
    directory = shutil.copytree(straight, tmp_path / "run")
    for step in (3, 4):
        shutil.rmtree(directory / "checkpoints" / f"global_step_{step}")
    for rank in range(2):
        file = f"actor/optimizer_rank_{rank}.safetensors"
        shutil.copy(
            straight / "checkpoints" / "global_step_1" / file, directory / "checkpoints" / "global_step_2" / file
        )
    assert run(even_world, rollouts[0], directory) == 0
    assert series(directory) != series(straight)


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_micro_batches_for_a_pipeline_are_a_bubble(even_world, tmp_path):
    """Each of two ranks has 16 rows: as one micro batch they make two for the two stages, as four they make eight."""
    few, enough = (
        run_dapo(
            dapo_world.config(even_world, **PIPELINE, **{f"{ACTOR}ppo_micro_batch_size_per_gpu": size}),
            run_dir=tmp_path / str(size),
            executor="ray",
        ).directory
        for size in (16, 4)
    )
    for directory, count in ((few, 2), (enough, 8)):
        workload = {"micro_batches": count, "pipeline_stages": 2, "pipeline_chunks": 1}
        [by_rank] = read_series(directory / RANKS)[0]["update_actor"]
        assert [{**rank, **workload} for rank in by_rank] == by_rank
    assert find_failure_modes(open_run(enough)) == []
    found = triage(few, enough)
    assert [(mode.name, mode.evidence) for mode in found.modes] == [
        ("pipeline bubble", "2 stages and 2 micro batches: 33% of an update is ramp")
    ]
    assert found.causes[0].cause == "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
