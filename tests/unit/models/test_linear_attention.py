"""The gated delta rule: each sequence of a pack for itself, an exact recall, and packs that do not fit."""

import pytest
import torch

from alignment.errors import InputError
from alignment.models.linear_attention import gated_delta_rule
from alignment.numerics.random import portable_normal, portable_uniform


def inputs(tokens=6):
    q, k, v = (portable_normal((2, tokens, 3), seed=0, stream=n) for n in "qkv")
    decay, beta = (portable_uniform((2, tokens), seed=0, stream=n) for n in ("decay", "beta"))
    return (q, k, v), {"decay": decay, "beta": beta}


def test_a_pack_is_its_sequences():
    tensors, gates = inputs()
    whole = gated_delta_rule(*tensors, **gates, cu_seqlens=torch.tensor([0, 2, 6]))
    for start, end in ((0, 2), (2, 6)):
        alone = gated_delta_rule(*(t[:, start:end] for t in tensors), **{n: g[:, start:end] for n, g in gates.items()})
        assert torch.equal(whole[:, start:end], alone)
    assert not torch.equal(whole[:, 2:], gated_delta_rule(*tensors, **gates)[:, 2:])


def test_what_was_written_under_a_key_is_read_with_it():
    key = torch.eye(3, dtype=torch.float64)[None]
    value = portable_normal((1, 3, 4), seed=0, stream="value")
    ones = torch.ones(1, 3, dtype=torch.float64)
    found = gated_delta_rule(key, key, value, decay=ones, beta=ones)
    assert torch.equal(found, value)


def test_sequences_that_do_not_fill_the_pack_are_refused():
    tensors, gates = inputs()
    with pytest.raises(InputError, match="the sequences do not fill the pack; expected rising from 0 to 6"):
        gated_delta_rule(*tensors, **gates, cu_seqlens=torch.tensor([0, 4]))
