"""Every rule of every contract: the valid batch passes, and each deliberate violation is named."""

from __future__ import annotations

import math

import pytest
import torch
from rl_cases import build_distill_batch

from alignment.errors import InputError
from alignment.rl.contracts import CONTRACTS, FIELDS, STAGES, check, check_untouched


def changed(batch, name, edit):
    """The batch with a copy of one field edited in place."""
    value = batch[name].clone() if name in batch.tensors else list(batch[name])
    edit(value)
    return batch.add({name: value}) if name in batch.tensors else batch.add(meta={name: value})


def valid(make_batch, stage):
    return build_distill_batch() if stage in ("teacher_log_prob", "update_student") else make_batch()


def put(place, value):
    def edit(target):
        target[place] = value

    return edit


def test_stages_in_the_order_of_a_step():
    assert STAGES == (
        "rollout",
        "reward",
        "old_log_prob",
        "ref_log_prob",
        "values",
        "advantage",
        "update_critic",
        "update_actor",
        "teacher_log_prob",
        "update_student",
    )


def test_the_table_names_known_fields_only():
    for contract in CONTRACTS.values():
        assert set(contract.reads + contract.adds + contract.optional + contract.may_add) <= set(FIELDS), contract.stage


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_valid_batch_passes(make_batch, stage, moment):
    check(stage, valid(make_batch, stage), moment=moment)


@pytest.mark.parametrize("stage", STAGES)
def test_each_field_of_each_stage_is_needed(make_batch, stage):
    contract = CONTRACTS[stage]
    for name in contract.reads + contract.adds + contract.meta_reads + contract.meta_adds:
        role = "reads" if name in contract.reads + contract.meta_reads else "adds"
        with pytest.raises(InputError, match=f"{stage}, {name}: the batch lacks a field that the stage {role}"):
            check(stage, valid(make_batch, stage).drop([name]))
    for name in contract.adds + contract.meta_adds:
        if name not in contract.reads + contract.meta_reads:
            check(stage, valid(make_batch, stage).drop([name]), moment="before")


VIOLATIONS = {
    # name: (stage, field, edit, message)
    "a prompt that is right padded": (
        "rollout",
        "prompt_mask",
        put((0, slice(None)), torch.tensor([1, 1, 0, 0])),
        "rollout, prompt_mask, sample 0, token 1: the prompt is not left padded",
    ),
    "an attention mask that skips a prompt token": (
        "rollout",
        "prompt_mask",
        put((0, 1), 1),
        "rollout, attention_mask, sample 0, token 1: the attention mask differs from the prompt's mask; expected "
        "prompt_mask; found 0",
    ),
    "a prompt without tokens": (
        "rollout",
        "prompt_mask",
        put((1, slice(None)), 0),
        "prompt_mask, sample 1: the prompt has no tokens",
    ),
    "a token in the prompt's padding": (
        "rollout",
        "prompts",
        put((0, 0), 7),
        "rollout, prompts, sample 0, token 0: prompt padding holds a token",
    ),
    "a mask with a 2": (
        "old_log_prob",
        "response_mask",
        put((0, 0), 2),
        "response_mask, sample 0, token 0: a mask holds 0 and 1 only; expected 0 or 1; found 2",
    ),
    "the EOS token outside the mask": (
        "old_log_prob",
        "response_mask",
        put((0, 2), 0),
        "response_mask, sample 0, token 2: the mask stops before the end of the response; expected 1 up to the "
        "first EOS; found 0",
    ),
    "a token after EOS inside the mask": (
        "old_log_prob",
        "response_mask",
        put((0, 3), 1),
        "response_mask, sample 0, token 3: the mask goes on after the end of the response",
    ),
    "a hole in the response mask": (
        "update_actor",
        "response_mask",
        put((1, 1), 0),
        "update_actor, response_mask, sample 1, token 2: the mask is not one run from the first response token",
    ),
    "a response mask that starts late": (
        "update_actor",
        "response_mask",
        put((1, 0), 0),
        "response_mask, sample 1, token 0: the mask is not one run",
    ),
    "an empty response": (
        "reward",
        "response_mask",
        put((2, slice(None)), 0),
        "reward, response_mask, sample 2: the response has no tokens; expected at least one; found 0",
    ),
    "a token in the response's padding": (
        "reward",
        "responses",
        put((2, 3), 9),
        "reward, responses, sample 2, token 3: response padding holds a token; expected pad_token_id 0; found 9",
    ),
    "an attention mask that ends early": (
        "ref_log_prob",
        "attention_mask",
        put((1, 8), 0),
        "ref_log_prob, response_mask, sample 1, token 4: the attention mask differs from the response mask; "
        "expected 0; found 1",
    ),
    "positions that count the padding": (
        "values",
        "position_ids",
        put((0, slice(None)), torch.arange(9)),
        "values, position_ids, sample 0, token 2: a token has the wrong position; expected 0; found 2",
    ),
    "input ids of other responses": (
        "update_actor",
        "input_ids",
        put((3, 4), 22),
        "update_actor, input_ids, sample 3, token 4: input_ids is not the prompt followed by the response",
    ),
    "a positive log-prob": (
        "old_log_prob",
        "old_log_probs",
        put((0, 1), 0.5),
        "old_log_prob, old_log_probs, sample 0, token 1: a log-prob is positive; expected at most 0; found 0.5",
    ),
    "a NaN log-prob": (
        "ref_log_prob",
        "ref_log_prob",
        put((0, 1), math.nan),
        "ref_log_prob, ref_log_prob, sample 0, token 1: a log-prob is not finite; expected a finite number; found nan",
    ),
    "an infinite rollout log-prob": (
        "rollout",
        "rollout_log_probs",
        put((1, 0), -math.inf),
        "rollout, rollout_log_probs, sample 1, token 0: a log-prob is not finite",
    ),
    "a negative entropy": (
        "old_log_prob",
        "entropys",
        put((1, 0), -1.0),
        "entropys, sample 1, token 0: an entropy is negative",
    ),
    "a NaN entropy": (
        "old_log_prob",
        "entropys",
        put((1, 0), math.nan),
        "entropys, sample 1, token 0: an entropy is not finite",
    ),
    "a NaN value": (
        "values",
        "values",
        put((3, 0), math.nan),
        "values, values, sample 3, token 0: a value is not finite",
    ),
    "a NaN advantage": (
        "update_actor",
        "advantages",
        put((3, 0), math.nan),
        "update_actor, advantages, sample 3, token 0: a value is not finite",
    ),
    "an advantage on padding": (
        "update_actor",
        "advantages",
        put((2, 4), 1.0),
        "advantages, sample 2, token 4: padding carries a value; expected 0; found 1.0",
    ),
    "a reward on the first token": (
        "reward",
        "token_level_scores",
        put((0, 0), 1.0),
        "reward, token_level_scores, sample 0, token 0: the reward is not on the last response token; expected 0 "
        "here, the reward on token 2; found 1.0",
    ),
    "a reward on the last column": (
        "reward",
        "token_level_scores",
        put((0, 4), 1.0),
        "token_level_scores, sample 0, token 4: the reward is not on the last response token",
    ),
    "a reward that is not the score": (
        "reward",
        "token_level_scores",
        put((0, 2), 0.25),
        r"token_level_scores, sample 0: the token-level reward is not the sample's score \(plus its overlong_reward\)",
    ),
    "a group of the wrong size": (
        "rollout",
        "uid",
        put(1, "u9"),
        "rollout, uid, sample 0: the group of uid 'u0' has the wrong size; expected 2 samples; found 1",
    ),
    "samples tiled instead of interleaved": (
        "rollout",
        "uid",
        put(slice(None), ["u0", "u1", "u0", "u1"]),
        "the samples of uid 'u0' are not adjacent",
    ),
    "a group with two prompts": (
        "reward",
        "uid",
        put(slice(None), ["u0", "u1", "u1", "u0"]),
        "reward, prompts, sample 3: samples of uid 'u0' have different prompts; expected the prompt of sample 0",
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_violation_is_named(make_batch, case):
    stage, name, edit, message = case
    with pytest.raises(InputError, match=message):
        check(stage, changed(make_batch(), name, edit))


@pytest.mark.parametrize("stage", STAGES)
def test_shape_and_dtype_of_every_field(make_batch, stage):
    contract = CONTRACTS[stage]
    batch = valid(make_batch, stage)
    for name in contract.reads + contract.adds:
        axes = "×".join(FIELDS[name].axes)
        with pytest.raises(InputError, match=f"{stage}, {name}: the field has the wrong shape; expected {axes} = "):
            check(stage, batch.add({name: batch[name].unsqueeze(-1)}))
        with pytest.raises(
            InputError, match=f"{stage}, {name}: the field has the wrong dtype; expected .*; found float16"
        ):
            check(stage, batch.add({name: batch[name].half()}))


def test_width_that_disagrees(make_batch):
    batch = make_batch()
    with pytest.raises(InputError, match=r"update_actor, advantages: .* expected b×r = \[4, 5\]; found \[4, 4\]"):
        check("update_actor", batch.add({"advantages": batch["advantages"][:, :4]}))


def test_adjacent_groups_are_asked_of_the_rollout_only(make_batch):
    mixed = make_batch()[[0, 2, 1, 3]]
    check("advantage", mixed)
    with pytest.raises(InputError, match="not adjacent"):
        check("rollout", mixed)


def test_n_is_checked_against_the_configuration(make_batch):
    with pytest.raises(InputError, match="wrong size; expected 4 samples; found 2"):
        check("rollout", make_batch(), n=4)


def test_eos_inside_a_multi_eos_response(make_batch):
    batch = make_batch()
    with pytest.raises(InputError, match="goes on after the end"):
        check("rollout", batch, eos_token_id=[1, int(batch["responses"][1, 0])])


def test_facts_nobody_gave_are_not_checked(make_batch):
    batch = changed(make_batch(), "responses", put((2, 3), 9))
    batch = batch.add({"input_ids": torch.cat([batch["prompts"], batch["responses"]], 1)})
    with pytest.raises(InputError, match="response padding holds a token"):
        check("reward", batch)
    check("reward", batch.add(info={"eos_token_id": None, "pad_token_id": None}))


def test_overlong_reward_is_part_of_the_score(make_batch):
    batch = make_batch()
    scores = batch["token_level_scores"].clone()
    scores[1, 4] -= 0.5
    batch = batch.add({"token_level_scores": scores})
    with pytest.raises(InputError, match="not the sample's score"):
        check("reward", batch)
    check("reward", batch.add(meta={"overlong_reward": [0.0, -0.5, 0.0, 0.0]}))


def test_optional_fields_can_be_required(make_batch):
    batch = make_batch().drop(["ref_log_prob"])
    check("update_actor", batch)
    with pytest.raises(InputError, match="update_actor, ref_log_prob: the batch lacks a field that the stage reads"):
        check("update_actor", batch, require=["ref_log_prob"])


def test_unknown_stage_and_moment(make_batch):
    with pytest.raises(InputError, match="there is no such stage; expected one of rollout, reward"):
        check("train", make_batch())
    with pytest.raises(InputError, match="checked before or after a stage; found during"):
        check("reward", make_batch(), moment="during")
    with pytest.raises(InputError, match="reward: the batch has no samples"):
        check("reward", make_batch()[[]])


def test_a_stage_changes_only_what_it_adds(make_batch):
    batch = make_batch()
    before = batch.drop(["old_log_probs", "entropys"])
    check_untouched("old_log_prob", before, batch)
    check_untouched("old_log_prob", batch, changed(batch, "old_log_probs", put((0, 0), -1.0)))
    with pytest.raises(
        InputError, match="old_log_prob, responses, sample 0: the stage changed a field that it only reads"
    ):
        check_untouched("old_log_prob", before, batch[[1, 0, 2, 3]])
    with pytest.raises(InputError, match="old_log_prob, uid, sample 1: the stage changed"):
        check_untouched("old_log_prob", before, changed(batch, "uid", put(1, "x")))
    with pytest.raises(InputError, match="ref_log_prob, values: the stage lost a field"):
        check_untouched("ref_log_prob", batch, batch.drop(["values"]))
    with pytest.raises(InputError, match="advantage, values, sample 0: the stage changed a field that it only reads"):
        check_untouched("advantage", batch, changed(batch, "values", put((0, 0), -1.0)))
    with pytest.raises(InputError, match="changed the number of samples; expected 4; found 3"):
        check_untouched("ref_log_prob", batch, batch[:3])


def test_untouched_means_bytes(make_batch):
    batch = changed(make_batch(), "values", put((0, 0), 0.0))
    with pytest.raises(InputError, match="reward, values, sample 0"):
        check_untouched("reward", batch, changed(batch, "values", put((0, 0), -0.0)))
    nan = changed(batch, "values", put((0, 0), math.nan))
    check_untouched("reward", nan, changed(nan, "values", put((0, 1), nan["values"][0, 1])))
