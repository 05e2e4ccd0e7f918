from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import random_cut, random_masked, rounding

from alignment.errors import InputError
from alignment.rl.aggregation import LOSS_AGG_MODES, Counts, agg_loss, masked_mean, masked_sum

SEEDS = st.integers(0, 2**32)
LAW = settings(max_examples=40, deadline=None, derandomize=True)


def exact(loss, mask, mode, scale):
    """The definitions of the modes in exact rational arithmetic."""
    rows = [[Fraction(float(x)) for x, m in zip(row, keep) if m] for row, keep in zip(loss, mask)]
    rows = [row for row in rows if row]
    tokens, sequences = sum(map(len, rows)), len(rows)
    return {
        "token-mean": sum(sum(row) for row in rows) / tokens,
        "seq-mean-token-sum": sum(sum(row) for row in rows) / sequences,
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / sequences,
        "seq-mean-token-sum-norm": sum(sum(row) for row in rows) / (sequences * scale),
    }[mode]


def check_against_exact(aggregate, mode, seed):
    loss, mask = random_masked(5, 7, seed)
    mask[seed % 5] *= seed % 2  # every other seed has a sequence without tokens
    if not mask.any():
        mask[0, 0] = 1
    found = float(aggregate(loss, mask, mode, loss_scale_factor=16))
    bound = rounding(loss.dtype, loss.numel(), float(loss.abs().sum()))
    assert abs(Fraction(found) - exact(loss.tolist(), mask.tolist(), mode, 16)) <= bound


def check_partition(aggregate, mode, seed):
    """The shares of any cut of the batch add up to the loss of the whole, and so do their gradients."""
    loss, mask = random_masked(6, 5, seed)
    counts = Counts.of(mask)
    leaf = loss.clone().requires_grad_()
    whole = aggregate(leaf, mask, mode, counts=counts, loss_scale_factor=8)
    whole.backward()
    parts = loss.clone().requires_grad_()
    total = sum(
        aggregate(parts[rows], mask[rows], mode, counts=counts, loss_scale_factor=8) for rows in random_cut(6, seed)
    )
    total.backward()
    bound = rounding(loss.dtype, loss.numel(), float(loss.abs().sum()))
    assert abs(total.item() - whole.item()) <= bound
    assert torch.equal(parts.grad, leaf.grad)


def mean_of_means(loss, mask, mode, *, counts=None, loss_scale_factor=None):
    share = mask.shape[0] / counts.sequences if counts else 1.0
    return agg_loss(loss, mask, mode, loss_scale_factor=loss_scale_factor) * share


def counts_padding(loss, mask, mode, *, counts=None, loss_scale_factor=None):
    return agg_loss(loss, torch.ones_like(mask), mode, counts=counts, loss_scale_factor=loss_scale_factor)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@LAW
@given(seed=SEEDS)
def test_definition_in_exact_arithmetic(mode, seed):
    check_against_exact(agg_loss, mode, seed)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_definition_check_sees_padding_in_the_mask(mode):
    with pytest.raises(AssertionError):
        check_against_exact(counts_padding, mode, 1)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@LAW
@given(seed=SEEDS)
def test_shares_add_up_however_the_batch_is_cut(mode, seed):
    check_partition(agg_loss, mode, seed)


def test_partition_check_sees_a_mean_of_means():
    with pytest.raises(AssertionError):
        check_partition(mean_of_means, "token-mean", 3)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_partition_is_exact_where_arithmetic_is(mode):
    """Whole numbers and counts that are powers of two round nowhere, so the shares add up to the bit."""
    loss = torch.arange(-16.0, 16.0, dtype=torch.float32).reshape(4, 8)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    for i, length in enumerate((2, 8, 2, 4)):
        mask[i, :length] = True
    counts = Counts.of(mask)
    assert counts == Counts(tokens=16, sequences=4)
    whole = agg_loss(loss, mask, mode, counts=counts)
    assert whole.item() == exact(loss.tolist(), mask.tolist(), mode, 8)
    for cut in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[2], [0, 1, 3]]):
        assert sum(agg_loss(loss[rows], mask[rows], mode, counts=counts) for rows in cut) == whole


def test_modes_by_hand():
    loss = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert agg_loss(loss, mask, "token-mean").item() == 3.0
    assert agg_loss(loss, mask, "seq-mean-token-sum").item() == 4.5
    assert agg_loss(loss, mask, "seq-mean-token-mean").item() == 3.75
    assert agg_loss(loss, mask, "seq-mean-token-sum-norm", loss_scale_factor=9).item() == 0.5
    assert agg_loss(loss, mask, "seq-mean-token-sum-norm").item() == 1.5


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@LAW
@given(seed=SEEDS)
def test_padding_and_scale(mode, seed):
    loss, mask = random_masked(4, 6, seed)
    loss[mask == 0] = float("nan")
    plain = agg_loss(loss, mask, mode, loss_scale_factor=6)
    wide = torch.nn.functional.pad(loss, (0, 3), value=float("inf"))
    assert agg_loss(wide, torch.nn.functional.pad(mask, (0, 3)), mode, loss_scale_factor=6) - plain == pytest.approx(
        0.0, abs=rounding(loss.dtype, loss.numel(), float(loss.nan_to_num().abs().sum()))
    )
    assert agg_loss(4.0 * loss, mask, mode, loss_scale_factor=6) == 4.0 * plain
    assert torch.isfinite(plain)


def test_a_sequence_without_tokens_counts_nowhere():
    loss, mask = torch.ones(3, 2), torch.tensor([[1, 1], [0, 0], [1, 0]])
    assert Counts.of(mask) == Counts(tokens=3, sequences=2)
    assert agg_loss(loss, mask, "seq-mean-token-mean").item() == 1.0
    assert Counts.of(mask[:1]) + Counts.of(mask[1:]) == Counts.of(mask)


def test_masked_sum_drops_what_is_outside():
    values = torch.tensor([[1.0, float("nan")], [2.0, 4.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert masked_sum(values, mask).item() == 7.0
    assert masked_sum(values, mask, dim=1).tolist() == [1.0, 6.0]
    assert masked_mean(values, mask, counts=Counts(tokens=14, sequences=2)).item() == 0.5


def test_errors():
    with pytest.raises(InputError, match="loss_agg_mode: unknown aggregation; expected token-mean | .*; found mean"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "mean")
    with pytest.raises(InputError, match=r"differ in shape; expected \[1, 2\]; found \[1, 1\]"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 2), "token-mean")
    with pytest.raises(InputError, match="the mini batch has no response tokens"):
        agg_loss(torch.ones(1, 2), torch.zeros(1, 2), "token-mean")
