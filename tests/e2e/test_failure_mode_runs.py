"""Failure modes of real runs: each is made by running it so, and triage calls it by its name."""

from __future__ import annotations

import contextlib
from unittest import mock

import dapo_world
import pytest
import torch

from alignment.backends.training import OptimizerConfig
from alignment.diagnose.failure_modes import LEAST, find_failure_modes
from alignment.diagnose.run_stages import open_run
from alignment.diagnose.triage import triage
from alignment.errors import InputError
from alignment.rl import driver, stages, trainer
from alignment.rl.batch import Batch
from alignment.rl.run import run_dapo


def run(world, directory, fault=contextlib.nullcontext, **changes):
    settings = dapo_world.config(world, trainer__record_batches=True, **changes)
    with fault():
        run_dapo(settings, run_dir=directory)
    return directory


@contextlib.contextmanager
def without_contracts():
    """A stack that does not check its batches between the stages, as others are."""
    with (
        mock.patch.object(driver, "check", lambda *arguments, **keywords: None),
        mock.patch.object(trainer, "check", lambda *arguments, **keywords: None),
    ):
        yield


@contextlib.contextmanager
def reference_of_one_token_more():
    """The reference's log-probs begin with the last token of the prompt: a slice without its −1."""
    honest = stages.forward

    def wrong(engine, batch, cut, *, stage):
        outputs = honest(engine, batch, cut, stage=stage)
        if stage == "ref_log_prob":
            outputs["log_probs"] = torch.nn.functional.pad(outputs["log_probs"], (1, 0))
        return outputs

    with mock.patch.object(stages, "forward", wrong):
        yield


@contextlib.contextmanager
def second_token_masked():
    """A token inside a response is taken for padding."""
    honest = stages.generate

    def wrong(engine, batch, config):
        made = honest(engine, batch, config)
        mask = made["response_mask"].clone()
        mask[mask.sum(1) > 2, 1] = 0
        return Batch({**made.tensors, "response_mask": mask}, meta=made.meta, info=made.info)

    with mock.patch.object(stages, "generate", wrong):
        yield


@contextlib.contextmanager
def one_large_step():
    """One update has a thousand times the learning rate: from the next step on the policy is far from its reference."""
    honest = OptimizerConfig.learning_rate

    def wrong(self, update):
        return honest(self, update) * (1000.0 if update == LEAST else 1.0)

    with mock.patch.object(OptimizerConfig, "learning_rate", wrong):
        yield


@contextlib.contextmanager
def reference_of_the_next_token():
    """The reference's log-probs are sliced one token off: the classic mistake of two conventions."""
    honest = stages.forward

    def wrong(engine, batch, cut, *, stage):
        outputs = honest(engine, batch, cut, stage=stage)
        if stage == "ref_log_prob":
            moved = torch.roll(outputs["log_probs"], 1, dims=1)
            outputs["log_probs"] = moved * (batch["response_mask"] != 0)
        return outputs

    with mock.patch.object(stages, "forward", wrong):
        yield


@contextlib.contextmanager
def one_large_loss():
    """One step's loss is a thousand times what it should be: its gradient stands out of all before."""
    honest, calls = stages.actor_loss, []

    def wrong(config, counts):
        calls.append(counts)
        loss, late = honest(config, counts), len(calls) == LEAST + 2

        def scaled(outputs, micro_batch):
            value, metrics = loss(outputs, micro_batch)
            return (1000.0 * value if late else value), metrics

        return scaled

    with mock.patch.object(stages, "actor_loss", wrong):
        yield


@contextlib.contextmanager
def no_end_of_text():
    """The engine never says the end of a text, so every response runs to the limit, as garbled ones do."""
    honest = stages.generate

    def wrong(engine, batch, config):
        end = batch.info["eos_token_id"]
        made = honest(engine, batch.add(info={"eos_token_id": -1}), config)
        changed = {name: torch.where(made[name] == end, end + 1, made[name]) for name in ("responses", "input_ids")}
        return batch.add({**{n: t for n, t in made.tensors.items() if n not in batch.tensors}, **changed})

    with mock.patch.object(stages, "generate", wrong):
        yield


REFERENCE = {"actor_rollout_ref__actor__use_kl_loss": True, "actor_rollout_ref__actor__kl_loss_coef": 1e-3}
LONG = {
    "data__max_response_length": 48,
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 64,
    "actor_rollout_ref__rollout__temperature": 4.0,
    "trainer__total_training_steps": 1,
}
MODES = {
    "KL spike": (
        one_large_step,
        {**REFERENCE, "trainer__total_training_steps": LEAST + 2, "actor_rollout_ref__actor__optim__lr": 1e-5},
    ),
    "actor/reference misalignment": (reference_of_the_next_token, {**REFERENCE, "trainer__total_training_steps": 2}),
    "grad-norm spike": (
        one_large_loss,
        {"trainer__total_training_steps": LEAST + 3, "actor_rollout_ref__actor__optim__lr": 1e-6},
    ),
    "dynamic-batch memory peak": (no_end_of_text, LONG),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_of_a_real_run_is_named_in_the_triage(world, tmp_path, name):
    fault, changes = MODES[name]
    baseline = run(world, tmp_path / "baseline", **changes)
    assert name not in [mode.name for mode in find_failure_modes(open_run(baseline))]
    found = triage(run(world, tmp_path / "run", fault, **changes), baseline)
    assert name in [mode.name for mode in found.modes], found.modes
    assert found.exit_code == 1


UNCHECKED = {
    "shape mismatch": (reference_of_one_token_more, "ref_log_prob, ref_log_prob"),
    "wrong response mask": (second_token_masked, "rollout, response_mask"),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_the_contracts_refuse_is_named_in_a_run_without_them(world, tmp_path, name):
    """A run of ours stops at the stage; a stack that checks nothing trains on, and its records show it."""
    fault, where = UNCHECKED[name]
    settings = {**REFERENCE, "trainer__total_training_steps": 2}
    with pytest.raises(InputError, match=where):
        run(world, tmp_path / "refused", fault, **settings)
    with without_contracts():
        baseline = run(world, tmp_path / "baseline", **settings)
        dut = run(world, tmp_path / "run", fault, **settings)
    assert name not in [mode.name for mode in find_failure_modes(open_run(baseline))]
    found = triage(dut, baseline)
    assert name in [mode.name for mode in found.modes], found.modes
    assert found.exit_code == 1
