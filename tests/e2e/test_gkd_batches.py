"""What a distillation trained on, kept for whoever compares runs."""

from __future__ import annotations

from unittest import mock

import gkd_world
import numpy as np
import pytest

from alignment.diagnose.failure_modes import find_failure_modes
from alignment.diagnose.run_stages import open_run
from alignment.diagnose.triage import triage
from alignment.numerics.verdict import Outcome
from alignment.rl.batch_record import batch_path, read_batch, recorded_steps
from alignment.rl.gkd_run import run_gkd
from alignment.rl.multi_turn import SCHEDULERS, MultiTurnScheduler, register

STEPS = 4


@pytest.fixture(scope="module")
def pupils(world, tmp_path_factory):
    return gkd_world.build(tmp_path_factory.mktemp("gkd"), world)


@pytest.fixture(scope="module")
def distil(world, pupils):
    def run(directory, **changes):
        asked = {"trainer__record_batches": True, "trainer__total_training_steps": STEPS, "gkd__lmbda": 0.5, **changes}
        return run_gkd(gkd_world.config(world, pupils, **asked), run_dir=directory)

    return run


@pytest.fixture(scope="module")
def recorded(distil, tmp_path_factory):
    directory = tmp_path_factory.mktemp("recorded")
    return directory, distil(directory)


def test_every_step_is_kept_as_prompts_and_responses(recorded):
    directory, result = recorded
    assert recorded_steps(directory) == list(range(1, STEPS + 1))
    sources = set()
    for step, row in enumerate(result.metrics, 1):
        batch = read_batch(batch_path(directory, step))
        mask = batch.tensors["response_mask"] != 0
        assert mask.sum() == row["student/tokens"] and mask[:, 0].all()
        # The teacher is asked about exactly these tokens.
        said = batch.tensors["teacher_log_prob"]
        assert (said[mask] < 0).all() and (said[~mask] == 0).all()
        prompts = batch.tensors["prompt_mask"] != 0
        assert (np.diff(prompts.astype(int), axis=1) >= 0).all()
        on_policy = batch.tensors["dataset_response"] == 0
        assert set(on_policy.tolist()) == {bool(row["student/on_policy"])}
        sources |= set(on_policy.tolist())
    assert sources == {True, False}


def test_recording_changes_nothing(distil, recorded, tmp_path):
    assert distil(tmp_path, trainer__record_batches=False).metrics == recorded[1].metrics
    assert recorded_steps(tmp_path) == []


def test_a_prompt_and_its_response_are_what_was_trained_on(recorded):
    """Put together again they are the sequences that were collated, token by token."""
    from alignment.rl import gkd_trainer

    directory, _ = recorded
    seen = []
    honest = gkd_trainer.collate

    def keeping(*arguments, **keywords):
        seen.append(honest(*arguments, **keywords))
        return seen[-1]

    config = gkd_world_of(directory)
    with mock.patch.object(gkd_trainer, "collate", keeping):
        run_gkd(config, run_dir=directory.parent / "again")
    for step, batch in enumerate(seen, 1):
        kept = read_batch(batch_path(directory, step))
        for row in range(len(kept)):
            prompt = kept.tensors["prompts"][row][kept.tensors["prompt_mask"][row] != 0].tolist()
            response = kept.tensors["responses"][row][kept.tensors["response_mask"][row] != 0].tolist()
            length = len(prompt) + len(response)
            assert prompt + response == batch["input_ids"][row, :length].tolist()
            assert int((batch["labels"][row] != -100).sum()) == len(response)
            assert kept.prompt_ids[row] == batch["prompt_id"][row]


def gkd_world_of(directory):
    from alignment.files import read_json
    from alignment.rl.gkd_config import GkdConfig

    tree = read_json(directory / "config.json")
    tree["trainer"]["record_batches"] = False
    return GkdConfig.from_dict(tree)


def test_triage_compares_two_distillations_token_by_token(distil, recorded, tmp_path):
    directory, _ = recorded
    distil(tmp_path / "same")
    aligned = triage(tmp_path / "same", directory)
    assert (aligned.causes, aligned.modes, aligned.exit_code) == ((), (), 0)
    stack = aligned.axes[3]
    assert stack.outcome is Outcome.PASS and f"of {STEPS} steps agree" in stack.reason


def test_a_wrong_divergence_is_found_where_it_acts(distil, recorded, tmp_path):
    """Tokens and teacher agree, the student's loss does not: the update is what computes differently."""
    from alignment.rl import gkd_stages

    directory, _ = recorded
    honest = gkd_stages.token_divergence

    def doubled(*arguments, **keywords):
        divergence, agreement = honest(*arguments, **keywords)
        return 2 * divergence, agreement

    with mock.patch.object(gkd_stages, "token_divergence", doubled):
        distil(tmp_path / "wrong")
    found = triage(tmp_path / "wrong", directory)
    assert found.exit_code == 1
    assert found.causes[0].cause == "update_actor computes differently from equal inputs"
    assert found.first.step == 1 and "student/loss" in found.first.reason


def test_what_a_user_says_between_turns_is_no_wrong_mask(distil, tmp_path):
    class Repeating(MultiTurnScheduler):
        def check_finished(self, conversation, *, hit_limit):
            return False

        def step(self, conversation):
            return [{"role": "user", "content": "1"}]

    register("talking")(Repeating)
    try:
        distil(
            tmp_path,
            gkd__multi_turn_scheduler="talking",
            gkd__max_turns=2,
            gkd__lmbda=1.0,
            gkd__max_length=40,
            trainer__total_training_steps=2,
        )
    finally:
        del SCHEDULERS["talking"]
    mask = read_batch(batch_path(tmp_path, 1)).tensors["response_mask"] != 0
    assert (np.diff(mask.astype(int), axis=1) > 0).any()
    assert find_failure_modes(open_run(tmp_path)) == []


def test_a_resumed_run_forgets_what_came_after(distil, recorded, tmp_path):
    directory, _ = recorded
    distil(tmp_path, trainer__total_training_steps=2, trainer__save_freq=2)
    stale = batch_path(tmp_path, 3)
    stale.write_bytes(batch_path(directory, 3).read_bytes()[:10])
    distil(tmp_path, trainer__save_freq=2, trainer__resume_mode="auto")
    for step in range(1, STEPS + 1):
        assert batch_path(tmp_path, step).read_bytes() == batch_path(directory, step).read_bytes()
