from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.rl.shaping import overlong_reward, place_on_last_token


def paper(length, limit, buffer):
    """DAPO, equation 13: the three cases as printed, with L_max = limit and L_cache = buffer."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer
    return -1.0


@given(limit=st.integers(1, 64), data=st.data())
def test_overlong_reward_is_the_papers(limit, data):
    buffer, length = data.draw(st.integers(1, limit)), data.draw(st.integers(0, limit))
    assert overlong_reward(length, max_response_length=limit, buffer_len=buffer) == paper(length, limit, buffer)
    assert overlong_reward(length, max_response_length=limit, buffer_len=buffer, penalty_factor=2.0) == 2 * paper(
        length, limit, buffer
    )


def test_overlong_reward_by_hand():
    lengths = [0, 12, 13, 14, 16]
    assert [overlong_reward(n, max_response_length=16, buffer_len=4) for n in lengths] == [0.0, 0.0, -0.25, -0.5, -1.0]


def test_overlong_errors():
    with pytest.raises(
        InputError, match="overlong_buffer.len: the overlong buffer lies inside the response; expected 1 … 16; found 17"
    ):
        overlong_reward(3, max_response_length=16, buffer_len=17)
    with pytest.raises(InputError, match="a response is longer than the limit; expected 0 … 16; found 17"):
        overlong_reward(17, max_response_length=16, buffer_len=4)


def test_the_reward_sits_on_the_last_response_token():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    scores = place_on_last_token([0.5, -1.0, 2.0], mask)
    assert scores.tolist() == [[0.0, 0.5, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]
    assert scores.dtype == torch.float32
    wide = place_on_last_token([0.1, 0.2, 0.3], mask, dtype=torch.float64)
    assert wide.sum(1).tolist() == [0.1, 0.2, 0.3]


def test_placement_errors():
    mask = torch.tensor([[1, 1], [0, 0]])
    with pytest.raises(InputError, match="there is one reward per sample; expected 2; found 1"):
        place_on_last_token([1.0], mask)
    with pytest.raises(InputError, match="reward, sample 0: a reward is not finite; found nan"):
        place_on_last_token([float("nan"), 1.0], mask)
    with pytest.raises(
        InputError, match="reward, response_mask, sample 1: a response has no token to carry its reward"
    ):
        place_on_last_token([1.0, 1.0], mask)
