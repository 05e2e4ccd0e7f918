"""The verdict on generated text: each statistic calls garbled what is, and nothing else."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from alignment.backends.golden_rollout import GoldenRollout
from alignment.backends.sync_probe import probe_case
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.verdict import Outcome
from alignment.rl.rollout_only import Sample, check_paths, check_text, compression_ratio, unreadable

PROSE = (
    "The train leaves at nine and reaches the coast before noon. We counted forty boats in the harbour, most of them "
    "empty, and a grey dog that watched the water as if it owned it."
)
GOOD = Sample(
    prompt_id="p",
    prompt="?",
    text=PROSE,
    tokens=40,
    ended=True,
    compression_ratio=compression_ratio(PROSE),
    surprisal_ratio=0.2,
    unreadable=0.0,
)


def judge(*changed: dict, intact: int = 1):
    samples = [GOOD] * intact + [dataclasses.replace(GOOD, **c) for c in changed]
    return check_text(samples, subject="golden", device="cpu")


def test_prose_repeats_itself_less_than_a_loop_and_a_loop_more():
    verdict = judge()
    assert verdict.outcome is Outcome.PASS, verdict.reason
    loop = "and so on and so on " * 12
    assert compression_ratio(PROSE) < compression_ratio(loop)
    assert judge(*[{"compression_ratio": compression_ratio(loop)}] * 2).reason == "most text repeats itself"


def test_characters_no_text_has_are_counted_and_a_cut_one_is_not():
    assert unreadable(PROSE + "\n中文, κείμενο") == unreadable("") == 0
    assert unreadable("cut off \ufffd\ufffd") == 0
    assert unreadable("a\ufffdb\x00") == 0.5
    assert judge(*[{"unreadable": 0.01}] * 2).reason == "most text is no language"


def test_a_model_that_knows_nothing_is_near_uniform():
    assert judge(*[{"surprisal_ratio": 0.97}] * 2).reason == "most text is near uniform"


def test_one_garbled_response_of_many_is_not_said_of_the_rollout():
    verdict = judge({"unreadable": 1.0}, intact=3)
    assert verdict.outcome is Outcome.PASS
    assert [m.value for m in verdict.measures] == [0.0, 0.25, 0.0, 0.0]


def test_the_length_limit_alone_shows_nothing_either_way():
    verdict = judge(*[{"ended": False}] * 2)
    assert (verdict.outcome, verdict.reason) == (Outcome.INCONCLUSIVE, "most text is pinned at the length limit")
    assert verdict.where is None


def test_every_threshold_names_its_origin():
    assert [m.origin for m in judge().measures] == [
        "majority; raw/compressed bytes > 2.4 (Whisper)",
        "majority; characters that text does not have",
        "majority; -log p above 0.5 ln(vocabulary)",
        "majority; no end of text within max_response_length",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_paths_of_a_right_engine_agree_and_those_of_a_stale_one_do_not(dtype):
    config = preset("tiny-deepseek")
    case = probe_case(config, seed=3)
    engine = GoldenRollout(config, dtype=dtype, seed=1)
    right = engine.probe(case.input_ids, case.attention_mask, case.response_length)
    where = {"subject": "golden", "device": "cpu"}
    verdict = check_paths(right.prefill, right.decode, case.response_mask, engine, **where)
    assert verdict.outcome is Outcome.PASS, verdict.measures
    moved = CausalLM(config, dtype=dtype).init_weights(2).state_dict()
    engine.update_weights(moved.items(), post_process=False)
    stale = engine.probe(case.input_ids, case.attention_mask, case.response_length)
    verdict = check_paths(stale.prefill, stale.decode, case.response_mask, engine, **where)
    assert verdict.outcome is Outcome.FAIL
    assert "check derived tensors" in verdict.where.detail
    nan = check_paths(stale.prefill, torch.full_like(stale.decode, math.nan), case.response_mask, engine, **where)
    assert nan.outcome is Outcome.FAIL
