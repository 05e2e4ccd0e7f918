from __future__ import annotations

import os
import signal

import dapo_world
import pytest
import torch

from alignment.diagnose.failure_modes import IMBALANCE, find_failure_modes
from alignment.diagnose.run_stages import open_run
from alignment.diagnose.triage import triage
from alignment.errors import InputError
from alignment.rl.ray_executor import RayExecutor
from alignment.rl.run import run_dapo
from alignment.rl.tracking import GROUPS, METRICS, RANKS, read_series

pytestmark = pytest.mark.usefixtures("ray_cluster")

TWO = {"trainer__n_gpus_per_node": 2}
DOUBLE = {"actor_rollout_ref__model__dtype": "float64"}
REFERENCE_AND_CRITIC = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
}


def series(result) -> bytes:
    return (result.directory / METRICS).read_bytes() + (result.directory / GROUPS).read_bytes()


@pytest.fixture(scope="module")
def in_process(world, tmp_path_factory):
    """The same configuration in this process."""
    return run_dapo(dapo_world.config(world, **REFERENCE_AND_CRITIC), run_dir=tmp_path_factory.mktemp("in_process"))


@pytest.fixture(scope="module")
def uneven(world, tmp_path_factory):
    """Changes of the configuration under which every update has a long prompt, which comes first, and a short one."""
    changes = dapo_world.every_second_long(world, tmp_path_factory.mktemp("uneven"))
    return {**changes, "actor_rollout_ref__actor__ppo_mini_batch_size": 2, "trainer__record_batches": True}


def modes(result) -> list[str]:
    return [mode.name for mode in find_failure_modes(open_run(result.directory))]


@pytest.mark.parametrize("colocate", [True, False], ids=["colocated", "separate"])
def test_workers_in_other_processes_write_the_same_bytes(world, in_process, tmp_path, colocate):
    settings = dapo_world.config(world, trainer__colocate=colocate, **REFERENCE_AND_CRITIC)
    result = run_dapo(settings, run_dir=tmp_path, executor="ray")
    assert series(result) == series(in_process)


def test_two_ranks_are_one_rank_with_two_micro_batches_bit_for_bit(world, uneven, tmp_path):
    """A rank's share is one micro batch: gradients meet as g₀ + g₁ either way, so not even rounding differs.

    Only the engine generates 16 rows in place of 32 at a time, so its own log-probs may round otherwise. The first rank
    has the long prompts, so it has more to do, and triage says so; nothing else is wrong with the run.
    """
    micro = {
        **uneven,
        "actor_rollout_ref__actor__use_dynamic_bsz": False,
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 8,
    }
    one = run_dapo(dapo_world.config(world, **micro), run_dir=tmp_path / "one")
    two = run_dapo(dapo_world.config(world, **micro, **TWO), run_dir=tmp_path / "two", executor="ray")
    for a, b in zip(one.metrics, two.metrics, strict=True):
        assert {k: v for k, v in a.items() if "rollout_" not in k} == {
            k: v for k, v in b.items() if "rollout_" not in k
        }
    assert one.curve.curve("reward") == two.curve.curve("reward")
    assert modes(one) == []
    found = triage(two.directory, one.directory)
    assert [(mode.name, mode.step) for mode in found.modes] == [("rank token imbalance", 1)]
    [[first, second], _] = read_series(two.directory / RANKS)[0]["update_actor"]
    mean = (first["tokens"] + second["tokens"]) / 2
    assert first["tokens"] > IMBALANCE * mean
    assert found.modes[0].evidence == (
        f"rank 0 has {first['tokens']} tokens, the mean is {mean:.0f}; "
        "trainer.balance_batch=true shares them out by length"
    )
    assert (found.causes, found.first, found.exit_code) == ((), None, 1)


def test_balanced_ranks_give_the_same_run_up_to_the_order_of_sums(world, uneven, tmp_path):
    one = run_dapo(dapo_world.config(world, **DOUBLE, **uneven), run_dir=tmp_path / "one")
    two = run_dapo(
        dapo_world.config(world, trainer__balance_batch=True, **DOUBLE, **uneven, **TWO),
        run_dir=tmp_path / "two",
        executor="ray",
    )
    # AdamW divides by √v: a relative error of eps in a gradient can grow by 1/√eps where the gradient is small.
    bound = torch.finfo(torch.float64).eps ** 0.5
    for a, b in zip(one.metrics, two.metrics, strict=True):
        assert a["reward/before_filter"] == b["reward/before_filter"]
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/pg_scale"):
            assert abs(a[name] - b[name]) <= bound * max(abs(a[name]), a["actor/pg_scale"]), name
    assert "rank token imbalance" not in modes(two)
    assert triage(two.directory, one.directory).modes == ()
    # Without the sum over ranks the second rank's samples are lost, which is no rounding.
    assert one.metrics[0]["actor/grad_norm"] > 0


def test_a_rank_count_that_does_not_divide_is_refused_before_anything_starts(world, tmp_path):
    with pytest.raises(InputError, match="ppo_mini_batch_size.*divisible by 3 ranks"):
        run_dapo(dapo_world.config(world, trainer__n_gpus_per_node=3), run_dir=tmp_path, executor="ray")


class Killer:
    """Kills one rank when the update of step 2 begins."""

    def __init__(self, executor: RayExecutor, rank: int) -> None:
        self.executor, self.rank = executor, rank

    def on_stage(self, step, total_steps, stage):
        if (step, stage) == (2, "update_actor"):
            os.kill(self.executor.pids()[self.rank], signal.SIGKILL)

    def on_step(self, *arguments):
        pass


def test_a_dead_worker_ends_the_run_with_one_clear_error(world, tmp_path):
    executor, rank = RayExecutor(), 1
    with pytest.raises(InputError) as error:
        run_dapo(dapo_world.config(world, **TWO), run_dir=tmp_path, executor=executor, progress=Killer(executor, rank))
    text = str(error.value)
    assert f"update_actor · actor, rollout, reward · rank {rank}: a worker process died" in text
    assert "Next: continue from the last checkpoint with trainer.resume_mode=auto" in text


def test_what_a_worker_refuses_is_said_as_if_it_were_here(world, tmp_path):
    executor = RayExecutor(worker_setup="dapo_world:poison_the_second_rank")
    with pytest.raises(InputError, match="^update_actor · log_probs: the logits are not finite"):
        run_dapo(dapo_world.config(world, **TWO), run_dir=tmp_path, executor=executor)


def test_a_worker_setup_reaches_every_worker_and_only_them(world, in_process, tmp_path):
    from alignment.models import mla

    before = mla.softmax_scale
    broken = run_dapo(
        dapo_world.config(world, **REFERENCE_AND_CRITIC),
        run_dir=tmp_path,
        executor="ray",
        worker_setup="dapo_world:halve_the_softmax_scale",
    )
    assert broken.metrics[0]["actor/entropy"] != in_process.metrics[0]["actor/entropy"]
    # Trainer and engine are broken alike: nothing between them shows it.
    assert broken.metrics[0]["training/rollout_log_probs_abs_diff_mean"] < torch.finfo(torch.float32).eps * 105
    assert mla.softmax_scale is before


def test_a_worker_that_cannot_start_says_why(world, tmp_path):
    with pytest.raises(InputError, match="^setup: this worker will not start"):
        run_dapo(dapo_world.config(world), run_dir=tmp_path, executor="ray", worker_setup="dapo_world:refuse")
    assert not (tmp_path / METRICS).exists()
