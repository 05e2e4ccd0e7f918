"""``alignment rollout``: the rollout stage alone, on the golden engine; on vLLM in test_vllm_dapo."""

from __future__ import annotations

import dapo_world
import pytest

from alignment.backends.golden_rollout import GoldenRollout
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome
from alignment.report.rollout_view import rollout_command


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_responses_are_shown_and_both_paths_agree(world, load_format):
    emitted: list[str] = []
    config = dapo_world.config(world, actor_rollout_ref__rollout__load_format=load_format)
    result = rollout_command(config, prompts=2, emit=emitted.append)
    assert len(result.samples) == 2 * config.actor_rollout_ref.rollout.n
    assert emitted[0] == "16 responses of golden" and any("rollout.paths" in line for line in emitted)
    assert {v.check: v.outcome for v in result.verdicts}["rollout.paths"] is Outcome.PASS
    assert all(0 < s.tokens <= dapo_world.RESPONSE and s.prompt for s in result.samples)


def test_a_dummy_engine_that_is_synced_says_what_one_from_disk_says(world):
    said = [
        rollout_command(
            dapo_world.config(world, actor_rollout_ref__rollout__load_format=load_format), emit=lambda line: None
        ).samples
        for load_format in ("safetensors", "dummy")
    ]
    assert said[0] == said[1]


def test_stale_derived_weights_are_found_without_a_trainer(world, monkeypatch):
    whole = GoldenRollout.update_weights
    monkeypatch.setattr(GoldenRollout, "update_weights", lambda self, stream: whole(self, stream, post_process=False))
    result = rollout_command(
        dapo_world.config(world, actor_rollout_ref__rollout__load_format="dummy"), emit=lambda line: None
    )
    paths = next(v for v in result.verdicts if v.check == "rollout.paths")
    assert paths.outcome is Outcome.FAIL
    assert paths.reason == "prefill and decode disagree about the same tokens"


def test_no_prompts_is_an_error(world):
    with pytest.raises(InputError, match="prompts: there is nothing to generate; expected at least 1; found 0"):
        rollout_command(dapo_world.config(world), prompts=0)
