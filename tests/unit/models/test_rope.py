"""Rotary embedding: frequencies, tables, pairing, and its laws."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.models.config import YarnScaling, preset
from alignment.models.rope import (
    RotaryTable,
    correction_range,
    inverse_frequencies,
    rotate_interleaved,
    softmax_mscale,
    table_mscale,
    yarn_mscale,
)
from alignment.numerics.random import portable_normal

PLAIN = preset("tiny-moonlight")
DEEPSEEK = preset("deepseek-v3-671b")
EPS = torch.finfo(torch.float64).eps


def test_plain_frequencies():
    config = replace(PLAIN, qk_rope_head_dim=8, rope_theta=10000.0)
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(inverse_frequencies(config), expected, rtol=4 * EPS, atol=0)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    """DeepSeek-V3: pairs up to 10 turn at least 32 times in 4096 tokens, pairs from 23 less than once."""
    assert correction_range(DEEPSEEK.rope_scaling, width=64, theta=10000.0) == (10, 23)
    plain = inverse_frequencies(replace(DEEPSEEK, rope_scaling=None))
    yarn = inverse_frequencies(DEEPSEEK)
    assert torch.equal(yarn[:11], plain[:11])
    assert torch.equal(yarn[23:], plain[23:] / 40)
    ratio = yarn[10:24] / plain[10:24]
    ramp = 1 - torch.arange(14, dtype=torch.float64) / 13 * (1 - 1 / 40)
    torch.testing.assert_close(ratio, ramp, rtol=8 * EPS, atol=0)


def test_the_correction_range_is_clipped_to_the_head():
    scaling = YarnScaling(factor=2.0, original_max_position_embeddings=4, beta_fast=32.0)
    assert correction_range(scaling, width=16, theta=10000.0)[0] == 0
    scaling = YarnScaling(factor=2.0, original_max_position_embeddings=1 << 40)
    assert correction_range(scaling, width=16, theta=100.0)[1] == 15


def test_a_ramp_without_width_is_a_step():
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=6, beta_fast=1.0, beta_slow=0.999)
    config = replace(PLAIN, rope_scaling=scaling)
    assert correction_range(scaling, width=16, theta=PLAIN.rope_theta) == (0, 0)
    plain = inverse_frequencies(PLAIN)
    assert torch.equal(inverse_frequencies(config), torch.cat([plain[:1], plain[1:] / 4]))


def test_the_two_mscale_fields():
    scaling = YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.3)
    log = math.log(40.0)
    assert yarn_mscale(40.0, 1.3) == 0.1 * 1.3 * log + 1
    assert table_mscale(scaling) == (0.1 * 0.707 * log + 1) / (0.1 * 1.3 * log + 1)
    assert softmax_mscale(scaling) == 0.1 * 1.3 * log + 1
    neither = replace(scaling, mscale=None, mscale_all_dim=None)
    assert (table_mscale(neither), softmax_mscale(neither)) == (0.1 * log + 1, 1.0)
    assert (table_mscale(None), softmax_mscale(None)) == (1.0, 1.0)
    unextended = replace(scaling, factor=1.0)
    assert (table_mscale(unextended), softmax_mscale(unextended)) == (1.0, 1.0)


def test_the_table_is_cos_and_sin_times_mscale():
    config = preset("tiny-deepseek")
    positions = torch.tensor([[0, 3, 511]])
    cos, sin = RotaryTable(config)(positions, torch.float64)
    angles = positions[..., None] * inverse_frequencies(config)
    scale = table_mscale(config.rope_scaling)
    assert scale != 1
    assert torch.equal(cos, angles.cos() * scale) and torch.equal(sin, angles.sin() * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_models_get_the_float64_table_rounded_once(dtype):
    """In float32 the angle alone would be off by 0.01 rad at the far end, a million times the rounding of the table."""
    config = replace(DEEPSEEK, qk_rope_head_dim=4, max_position_embeddings=163840, rope_scaling=None)
    far = torch.tensor([[163839]])
    table = RotaryTable(config)
    cos, _ = table(far, dtype)
    assert cos.dtype is torch.float32
    assert torch.equal(cos, table(far, torch.float64)[0].float())
    naive = (far[..., None].float() * inverse_frequencies(config).float()).cos()
    assert not torch.equal(cos, naive)


@pytest.mark.parametrize("position", [-1, 2048])
def test_positions_outside_the_table_are_refused(position):
    with pytest.raises(InputError, match="outside the rotary table; expected 0 to 2047.*found"):
        RotaryTable(PLAIN)(torch.tensor([[position]]), torch.float64)


def test_pairs_are_neighbours():
    """(x0, x1) = (1, 0) turned by a quarter is (0, 1); the result lists first members, then second ones."""
    x = torch.tensor([1.0, 0.0, 0.0, 5.0], dtype=torch.float64).view(1, 1, 1, 4)
    cos = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 2)
    sin = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 2)
    assert rotate_interleaved(x, cos, sin).flatten().tolist() == [0.0, 0.0, 1.0, 5.0]


def test_copies_do_not_carry_tables():
    table = RotaryTable(PLAIN)
    table(torch.tensor([[1]]), torch.float64)
    assert copy.deepcopy(table)._tables == {}


@settings(deadline=None)
@given(
    first=st.integers(0, 400),
    second=st.integers(0, 400),
    shift=st.integers(0, 100),
    name=st.sampled_from(["tiny-moonlight", "tiny-deepseek"]),
)
def test_scores_depend_on_the_distance_only(first, second, shift, name):
    config = preset(name)
    table = RotaryTable(config)
    query, key = (
        portable_normal((1, 1, 1, config.qk_rope_head_dim), seed=first, stream=stream) for stream in ("query", "key")
    )

    def score(a: int, b: int) -> float:
        turned = [rotate_interleaved(x, *table(torch.tensor([[p]]), torch.float64)) for x, p in ((query, a), (key, b))]
        return float((turned[0] * turned[1]).sum())

    here, there = score(first, second), score(first + shift, second + shift)
    # The angles are rounded relative to themselves, up to max_position_embeddings radians.
    reach = float(query.norm() * key.norm()) * table_mscale(config.rope_scaling) ** 2
    assert abs(here - there) <= 4 * EPS * config.max_position_embeddings * reach
    if abs(first - second) > 1:
        assert abs(score(first, second) - score(second, second)) > 4 * EPS * config.max_position_embeddings * reach


@settings(deadline=None)
@given(position=st.integers(0, 2047))
def test_rotation_keeps_lengths(position):
    x = portable_normal((1, 1, 1, PLAIN.qk_rope_head_dim), seed=position, stream="x")
    turned = rotate_interleaved(x, *RotaryTable(PLAIN)(torch.tensor([[position]]), torch.float64))
    assert abs(float(turned.norm() / x.norm()) - 1) <= EPS * PLAIN.qk_rope_head_dim
    assert position == 0 or not torch.equal(turned.sort().values, x.sort().values)
