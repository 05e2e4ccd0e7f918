"""Conversations of several turns as token ids."""

from __future__ import annotations

import pytest
import torch

from alignment.errors import InputError
from alignment.rl import turns


def trajectory() -> turns.Trajectory:
    return turns.Trajectory(
        spans=(
            turns.Span(token_ids=(1, 2), role="user"),
            turns.Span(token_ids=(3,), role="assistant"),
            turns.Span(token_ids=(4,), role="user"),
            turns.Span(token_ids=(5, 6), role="assistant", generated=True, log_probs=(-0.5, -0.25)),
            turns.Span(token_ids=(7, 8, 9), role="tool"),
            turns.Span(token_ids=(10,), role="assistant", generated=True, log_probs=(-1.0,)),
        )
    )


def test_only_what_the_policy_drew_is_trained():
    one = trajectory()
    assert one.token_ids == tuple(range(1, 11)) and one.prompt_length == 4 and one.group_key == (1, 2, 3, 4)
    assert one.loss_mask() == (0, 0, 0, 0, 1, 1, 0, 0, 0, 1)
    assert one.rollout_log_probs() == (0.0,) * 4 + (-0.5, -0.25) + (0.0,) * 3 + (-1.0,)
    assert turns.next_input(one, [11]) == tuple(range(1, 12))
    with pytest.raises(InputError, match="every generated token has a log-prob; expected 2; found 0"):
        turns.Span(token_ids=(1, 2), role="assistant", generated=True)


def test_a_continued_rollout_spends_what_is_left():
    one = trajectory()
    assert one.budget_left(8) == 2
    longer = turns.continue_rollout(one, [(t, -0.1) for t in range(20, 25)], max_response_length=8)
    assert longer.token_ids[-2:] == (20, 21) and longer.budget_left(8) == 0
    assert turns.continue_rollout(longer, [(1, 0.0)], max_response_length=8).token_ids == longer.token_ids


def test_training_sees_the_text_of_inference():
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert turns.training_text(messages) == "<|user|>2+2?<eos>\n<|assistant|>4<eos>\n"
    following = turns.render([*messages, {"role": "user", "content": "sure?"}], answer_next=True)
    assert following.startswith(turns.training_text(messages)) and following.endswith("<|assistant|>")


def test_a_response_ends_at_any_of_the_end_tokens():
    responses = torch.tensor([[5, 2, 2, 0], [5, 9, 2, 0], [5, 6, 7, 8], [2, 9, 5, 5]])
    assert turns.mask_to_end(responses, eos_token_ids=(2, 9)).tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
    ]


@pytest.mark.parametrize("pad", [0, 2])
def test_the_mask_of_padding_comes_from_lengths(pad):
    ids, mask = turns.pad_responses([[5, 2], [6, 2, 2, 7]], width=5, pad_token_id=pad)
    assert mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert ids.tolist() == [[5, 2, pad, pad, pad], [6, 2, 2, 7, pad]]
    with pytest.raises(InputError, match="sample 0: the response does not fit; expected 1 … 2 tokens; found 3"):
        turns.pad_responses([[1, 2, 3]], width=2, pad_token_id=0)
