"""Masks: causal, padding, packed sequences; and that the model obeys them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.models import attention
from alignment.models.attention import attention_mask_from, default_positions, scaled_dot_product
from alignment.models.config import preset
from alignment.numerics.metrics import relative_l2
from alignment.numerics.random import portable_normal

LENGTH = 12
CONFIGS = ["tiny-moonlight", "tiny-deepseek"]


@settings(deadline=None)
@given(
    real=st.lists(st.booleans(), min_size=1, max_size=7),
    cuts=st.lists(st.booleans(), min_size=7, max_size=7),
    queries=st.integers(1, 7),
)
def test_the_mask_is_the_conjunction_of_its_three_rules(real, cuts, queries):
    keys = len(real)
    queries = min(queries, keys)
    segments = torch.tensor(cuts[:keys]).long().cumsum(-1)
    found = attention_mask_from(torch.tensor([real]), query_slots=queries, segment_ids=segments[None])
    for row, query in enumerate(range(keys - queries, keys)):
        for key in range(keys):
            rule = key <= query and real[key] and bool(segments[query] == segments[key])
            assert found[0, 0, row, key] == rule


def test_default_positions_count_real_tokens_of_each_segment():
    left, right = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[1, 1, 1, 0, 0]])
    assert default_positions(left).tolist() == [[0, 0, 0, 1, 2]]
    assert default_positions(right).tolist() == [[0, 1, 2, 2, 2]]
    packed = torch.tensor([[4, 4, 4, 9, 9, 1]])
    assert default_positions(torch.ones(1, 6), packed).tolist() == [[0, 1, 2, 0, 1, 0]]
    assert default_positions(torch.tensor([[1, 1, 0, 1, 1, 1]]), packed).tolist() == [[0, 1, 1, 0, 1, 0]]


def test_a_query_without_keys_gets_zeros_and_finite_gradients():
    query, key, value = (portable_normal((1, 2, 3, 4), seed=1, stream=s).requires_grad_() for s in "qkv")
    mask = attention_mask_from(torch.tensor([[0, 1, 1]]))
    out = scaled_dot_product(query, key, value, scale=0.5, mask=mask)
    assert not out[:, :, 0].any() and out[:, :, 1:].all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (query, key, value))
    assert not query.grad[:, :, 0].any() and not value.grad[:, :, 0].any()


def test_attention_is_the_weighted_mean_of_values():
    """Two keys whose scores differ by ln 3 weigh 1 : 3."""
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = torch.tensor([0.0, math.log(3.0)], dtype=torch.float64).view(1, 1, 2, 1)
    value = torch.tensor([8.0, 16.0], dtype=torch.float64).view(1, 1, 2, 1)
    out = scaled_dot_product(query, key, value, scale=1.0, mask=torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert abs(out.item() - 14) <= 14 * 4 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("name", CONFIGS)
def test_the_future_does_not_reach_back(name, golden, tokens, rounding):
    config = preset(name)
    model, ids = golden(config), tokens(config, 2, LENGTH)
    changed = ids.clone()
    changed[:, 8:] = tokens(config, 2, LENGTH - 8, stream="other")
    before, after = model(ids).detach(), model(changed).detach()
    assert relative_l2(after[:, :8], before[:, :8]) <= rounding(config)
    assert relative_l2(after[:, 8:], before[:, 8:]) > rounding(config)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_changes_nothing(name, side, golden, tokens, rounding):
    config = preset(name)
    model, ids = golden(config), tokens(config, 2, LENGTH)
    alone = model(ids).detach()
    padding, real = tokens(config, 2, 5, stream="padding"), torch.ones_like(ids)
    order = (padding, ids) if side == "left" else (ids, padding)
    masks = (torch.zeros_like(padding), real) if side == "left" else (real, torch.zeros_like(padding))
    padded, mask = torch.cat(order, 1), torch.cat(masks, 1)
    found = model(padded, attention_mask=mask)
    assert found.isfinite().all()
    assert relative_l2(found[mask.bool()].detach().view_as(alone), alone) <= rounding(config)
    unmasked = model(padded)[mask.bool()].detach().view_as(alone)
    # Right padding lies in the future of every real token: only the left one needs the mask.
    assert (relative_l2(unmasked, alone) > rounding(config)) == (side == "left")


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_equal_themselves_alone(name, golden, tokens, rounding):
    config = preset(name)
    model = golden(config)
    parts = [tokens(config, 1, n, stream=f"part {n}") for n in (5, 9, 4)]
    packed = torch.cat(parts, 1)
    segments = torch.cat([torch.full_like(part, i) for i, part in enumerate(parts)], 1)
    alone = torch.cat([model(part) for part in parts], 1).detach()
    assert relative_l2(model(packed, segment_ids=segments).detach(), alone) <= rounding(config)
    leaking = model(packed, position_ids=default_positions(torch.ones_like(packed), segments)).detach()
    assert relative_l2(leaking[:, :5], alone[:, :5]) <= rounding(config)
    assert relative_l2(leaking[:, 5:], alone[:, 5:]) > rounding(config)
    # Positions only enter by distance: restarting them with each sequence is a convention, not a correction.
    running_on = model(packed, segment_ids=segments, position_ids=torch.arange(packed.shape[1])[None]).detach()
    assert relative_l2(running_on, alone) <= rounding(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_do_not_see_each_other(name, golden, tokens, rounding):
    config = preset(name)
    model, ids = golden(config), tokens(config, 4, LENGTH)
    order = torch.tensor([2, 0, 3, 1])
    together = model(ids).detach()
    assert relative_l2(model(ids[order]).detach(), together[order]) <= rounding(config)
    assert relative_l2(model(ids[1:2]).detach(), together[1:2]) <= rounding(config)


def test_replacing_the_function_replaces_the_kernel_of_every_layer(golden, tokens, monkeypatch):
    config = preset("tiny-moonlight")
    model, ids = golden(config), tokens(config, 1, LENGTH)
    right = model(ids).detach()

    def upper_left(query, key, value, *, scale, mask, plain=scaled_dot_product):
        """Attends to the future, too."""
        return plain(query, key, value, scale=scale, mask=torch.ones_like(mask))

    monkeypatch.setattr(attention, "scaled_dot_product", upper_left)
    assert not torch.equal(model(ids).detach()[:, 0], right[:, 0])


def test_masks_of_another_shape_are_refused(golden, tokens):
    config = preset("tiny-moonlight")
    model, ids = golden(config), tokens(config, 2, LENGTH)
    with pytest.raises(InputError, match=r"attention_mask: the mask must have the shape.*\[2, 12\]; found \[2, 11\]"):
        model(ids, attention_mask=torch.ones(2, LENGTH - 1))
    with pytest.raises(InputError, match=r"segment_ids must have the shape of the tokens.*\(2, 12\); found \(1, 12\)"):
        model(ids, segment_ids=torch.zeros(1, LENGTH, dtype=torch.long))
    with pytest.raises(InputError, match=r"input_ids: token ids are a batch of rows; expected \[b, s\]; found \[12\]"):
        model(ids[0])
