"""Prompt log-probs as tables: what each position predicts, and every way in which a list can be wrong."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from rl_cases import philox

from alignment.errors import InputError
from alignment.rl.prompt_log_probs import entries_from_log_probs, parse_prompt_log_probs


def entry(**said: float) -> dict:
    """``entry(t5=-0.1, t7=-2.0)``, ranked in the order of the log-probs."""
    order = sorted(said, key=said.get, reverse=True)
    return {int(name[1:]): {"logprob": said[name], "rank": rank} for rank, name in enumerate(order, start=1)}


IDS = [4, 5, 6]


def test_row_i_is_what_position_i_predicts_and_the_last_one_is_open():
    tables = parse_prompt_log_probs([None, entry(t5=-0.5, t9=-1.0), entry(t9=-0.25, t6=-2.0)], IDS, k=2)
    assert tables.indices.tolist() == [[5, 9], [9, 6], [0, 0]]
    assert tables.log_probs.tolist() == [[-0.5, -1.0], [-0.25, -2.0], [-math.inf, -math.inf]]


def test_the_appended_token_is_dropped():
    """k = 2, and the token that stands there is the third entry."""
    tables = parse_prompt_log_probs([None, entry(t9=-0.2, t8=-1.5, t5=-7.0), entry(t6=-0.1, t5=-3.0)], IDS, k=2)
    assert tables.indices.tolist()[0] == [9, 8]


def test_a_ragged_row_and_a_silent_one():
    tables = parse_prompt_log_probs([None, entry(t5=-0.5), None], IDS, k=3)
    assert tables.log_probs.tolist()[0] == [-0.5, -math.inf, -math.inf]
    assert torch.isneginf(tables.log_probs[1]).all()


def test_equal_log_probs_are_taken_by_rank():
    said = {5: {"logprob": -1.0, "rank": 2}, 9: {"logprob": -1.0, "rank": 1}, 7: {"logprob": -1.0, "rank": 3}}
    assert parse_prompt_log_probs([None, said, entry(t6=-0.1)], IDS, k=2).indices[0].tolist() == [9, 5]


def test_objects_and_json_alike():
    objects = [None, {5: SimpleNamespace(logprob=-0.5, rank=1)}, {6: SimpleNamespace(logprob=-0.25, rank=1)}]
    json_like = [None, {"5": {"logprob": -0.5, "rank": 1}}, {"6": {"logprob": -0.25, "rank": 1}}]
    ours, theirs = (parse_prompt_log_probs(e, IDS, k=1) for e in (objects, json_like))
    assert torch.equal(ours.log_probs, theirs.log_probs) and torch.equal(ours.indices, theirs.indices)


REFUSED = {
    "one entry too few": (
        [None, entry(t5=-0.5)],
        "there is one prompt log-prob per token; expected 3 entries; found 2",
    ),
    "a first token with an entry": (
        [entry(t4=-0.1), entry(t5=-0.5), entry(t6=-0.5)],
        "prompt_logprobs, token 0: the first token has nothing before it",
    ),
    "shifted by one": (
        [None, entry(t6=-0.5), entry(t5=-0.5)],
        r"prompt_logprobs, token 1: .* do not know the token that stands there; expected an entry for token 5; found \[6\]",
    ),
    "tokenised anew": ([None, entry(t5=-0.5), entry(t8=-0.5, t9=-1.0)], r"token 2: .* expected an entry for token 6"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    entries, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        parse_prompt_log_probs(entries, IDS, k=2)


def test_no_columns():
    with pytest.raises(InputError, match="gkd_logits_topk: a table has at least one column"):
        parse_prompt_log_probs([None], [4], k=0)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_what_the_golden_teacher_says_comes_back(k):
    """Through the engine's language and back: the k most likely of every row, and every row but the last covered."""
    log_probs = torch.log_softmax(torch.from_numpy(philox(k).standard_normal((5, 7))), -1)
    ids = philox(k).integers(0, 7, 5).tolist()
    entries = entries_from_log_probs(log_probs, ids, k=k)
    assert all(int(t) in e for t, e in zip(ids[1:], entries[1:])) and {len(e) for e in entries[1:]} <= {k, k + 1}
    tables = parse_prompt_log_probs(entries, ids, k=k)
    values, indices = log_probs[:-1].topk(k)
    assert torch.equal(tables.indices[:-1], indices) and torch.equal(tables.log_probs[:-1], values.float())
