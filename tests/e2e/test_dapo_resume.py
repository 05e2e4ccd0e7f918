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
from safetensors.torch import load_file, save_file

from alignment.errors import InputError
from alignment.rl.run import run_dapo
from alignment.rl.tracking import GROUPS, METRICS
from alignment.weights.checkpoint import load_model

STEPS = 5
# What a checkpoint has to carry shows only if it matters: several updates a step, a schedule, a filter, a controller.
SETTINGS = {
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 1,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    "actor_rollout_ref__actor__optim__lr_warmup_steps": 6,
    "actor_rollout_ref__actor__shuffle": True,
    "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__metric": "seq_reward",
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
}

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import dapo_world
from alignment.rl.run import run_dapo

class Killer:
    def on_stage(self, step, total_steps, stage):
        if (step, stage) == ({step}, {stage!r}):
            if {flushes} == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            count, real = [], os.fsync
            def fsync(handle):
                count.append(handle)
                if len(count) == {flushes}:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(handle)
            os.fsync = fsync
    def on_step(self, *arguments):
        pass

config = dapo_world.config(Path({world!r}), **{settings!r})
run_dapo(config, run_dir=Path({run_dir!r}), executor={executor!r}, progress=Killer())
"""


def run_and_kill(
    world: Path, run_dir: Path, *, step: int, stage: str, flushes: int = 0, executor: str = "inprocess"
) -> None:
    """A run in another process that dies by SIGKILL when ``stage`` of ``step`` begins, or at its n-th flush to disk."""
    script = KILLED.format(
        here=str(Path(__file__).parent),
        world=str(world),
        run_dir=str(run_dir),
        settings=SETTINGS,
        step=step,
        stage=stage,
        flushes=flushes,
        executor=executor,
    )
    ended = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]


def series(directory: Path) -> bytes:
    return (directory / METRICS).read_bytes() + (directory / GROUPS).read_bytes()


@pytest.fixture(scope="module")
def straight(world, tmp_path_factory):
    """The uninterrupted run, with a checkpoint after every step."""
    directory = tmp_path_factory.mktemp("straight")
    run_dapo(dapo_world.config(world, **SETTINGS), run_dir=directory)
    return directory


def copy_until(straight: Path, target: Path, step: int) -> Path:
    """The directory of a run that stopped after ``step``, with the series of the whole run still in it."""
    shutil.copytree(straight, target)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(target / "checkpoints" / f"global_step_{later}")
    return target


def test_killed_three_times_and_resumed_gives_the_uninterrupted_curve(world, straight, tmp_path):
    """In the middle of a step, in the middle of writing a checkpoint, and before the first checkpoint."""
    run_and_kill(world, tmp_path, step=1, stage="advantage")
    assert not (tmp_path / "checkpoints").exists()
    run_and_kill(world, tmp_path, step=3, stage="update_actor")
    assert (tmp_path / "checkpoints" / "global_step_2").exists()
    run_and_kill(world, tmp_path, step=4, stage="save", flushes=5)
    assert (tmp_path / "checkpoints" / ".unfinished_global_step_4").exists()
    assert not (tmp_path / "checkpoints" / "global_step_4").exists()
    run_dapo(dapo_world.config(world, **SETTINGS), run_dir=tmp_path)
    assert series(tmp_path) == series(straight)
    for role in ("actor", "critic"):
        for file in ("model.safetensors", "optimizer.safetensors"):
            ours, theirs = (d / "checkpoints" / f"global_step_{STEPS}" / role / file for d in (tmp_path, straight))
            assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("step", range(1, STEPS))
def test_every_checkpoint_continues_to_the_same_end(world, straight, tmp_path, step):
    directory = copy_until(straight, tmp_path / "run", step)
    run_dapo(dapo_world.config(world, **SETTINGS), run_dir=directory)
    assert series(directory) == series(straight)


@pytest.mark.parametrize("lost", ["critic/optimizer.safetensors", "actor/schedule.json"])
def test_what_a_checkpoint_carries_matters(world, straight, tmp_path, lost):
    """A checkpoint with the state of another step in one file gives another curve: the test above would see it."""
    directory = copy_until(straight, tmp_path / "run", 3)
    shutil.copy(straight / "checkpoints" / "global_step_1" / lost, directory / "checkpoints" / "global_step_3" / lost)
    run_dapo(dapo_world.config(world, **SETTINGS), run_dir=directory)
    assert series(directory) != series(straight)


def test_resume_path_starts_another_run_from_a_checkpoint(world, straight, tmp_path):
    path = straight / "checkpoints" / "global_step_3"
    changes = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(path)}
    result = run_dapo(dapo_world.config(world, **SETTINGS, **changes), run_dir=tmp_path)
    assert [line["step"] for line in result.metrics] == [4, 5]
    assert series(straight).endswith((tmp_path / GROUPS).read_bytes())


def test_disable_starts_anew(world, straight, tmp_path):
    directory = copy_until(straight, tmp_path / "run", 3)
    run_dapo(dapo_world.config(world, **SETTINGS, trainer__resume_mode="disable"), run_dir=directory)
    assert series(directory) == series(straight)


def test_a_finished_run_is_left_as_it_is(world, straight, tmp_path):
    directory = copy_until(straight, tmp_path / "run", STEPS)
    result = run_dapo(dapo_world.config(world, **SETTINGS), run_dir=directory)
    assert series(directory) == series(straight) and len(result.metrics) == STEPS


def test_a_longer_run_continues(world, straight, tmp_path):
    directory = copy_until(straight, tmp_path / "run", STEPS)
    longer = {**SETTINGS, "trainer__total_training_steps": STEPS + 1}
    result = run_dapo(dapo_world.config(world, **longer), run_dir=directory)
    assert [line["step"] for line in result.metrics] == list(range(1, STEPS + 2))


def test_another_configuration_is_refused_before_anything_is_written(world, straight, tmp_path):
    directory = copy_until(straight, tmp_path / "run", 3)
    other = {**SETTINGS, "actor_rollout_ref__actor__optim__lr_warmup_steps": 7}
    with pytest.raises(
        InputError, match="belongs to another configuration.*lr_warmup_steps=6; found.*lr_warmup_steps=7"
    ):
        run_dapo(dapo_world.config(world, **other), run_dir=directory)
    assert series(directory) == series(straight)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda tensors: tensors.pop("score.bias"), "lacks 1 tensor(s); expected score.bias"),
        (
            lambda tensors: tensors.update(stray=torch.zeros(1)),
            "has 1 tensor(s) too many; expected only known names; found stray",
        ),
    ],
)
def test_a_checkpoint_with_a_missing_or_extra_tensor_is_one_clear_error(world, straight, tmp_path, change, words):
    directory = copy_until(straight, tmp_path / "run", 3)
    path = directory / "checkpoints" / "global_step_3" / "critic" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(InputError) as error:
        run_dapo(dapo_world.config(world, **SETTINGS), run_dir=directory)
    assert words in str(error.value) and "global_step_3/critic/model.safetensors" in str(error.value)
    assert series(directory) == series(straight)


def test_the_actor_of_a_checkpoint_is_a_hugging_face_checkpoint(straight):
    directory = straight / "checkpoints" / f"global_step_{STEPS}" / "actor"
    model = load_model(directory, dtype=torch.float32, device="cpu")
    saved = load_file(directory / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_killed_under_ray_and_resumed_gives_the_uninterrupted_curve(world, straight, tmp_path, ray_cluster):
    run_and_kill(world, tmp_path, step=3, stage="update_critic", executor="ray")
    assert (tmp_path / "checkpoints" / "global_step_2").exists()
    run_dapo(dapo_world.config(world, **SETTINGS), run_dir=tmp_path, executor="ray")
    assert series(tmp_path) == series(straight)
