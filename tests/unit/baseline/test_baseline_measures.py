"""Errors, flips and places of single quantities."""

from __future__ import annotations

import math

import pytest
import torch

from alignment.backends.case import Quantity
from alignment.baseline.measure import errors, flips, size_of, worst_place

REAL = Quantity(name="y", module="m")
TABLE = Quantity(name="norms", module="m", kind="table", labels=("a", "b", "c"))


def test_one_wrong_row_shows_in_the_largest_error_where_the_norm_hides_it():
    golden = torch.ones(1000, dtype=torch.float64)
    observed = golden.clone()
    observed[7] = 2.0
    found = errors(REAL, observed, golden)
    assert found["max_abs"] == 1.0 and found["relative_l2"] == pytest.approx(1000**-0.5)


def test_a_zero_golden_is_met_by_zero_only():
    zero = torch.zeros(4, dtype=torch.float64)
    assert errors(REAL, zero, zero) == {"relative_l2": 0.0, "max_abs": 0.0}
    assert errors(REAL, zero + 1, zero) == {"relative_l2": math.inf, "max_abs": math.inf}
    assert size_of(REAL, zero) == 0.0


def test_a_table_is_judged_entry_by_entry_and_names_the_worst():
    golden = torch.tensor([100.0, 1.0, 0.0], dtype=torch.float64)
    observed = torch.tensor([100.5, 1.5, 0.0], dtype=torch.float64)
    assert errors(TABLE, observed, golden) == {"max_relative": 0.5}
    assert worst_place(TABLE, observed, golden) == "b: found 1.5, golden 1"


def test_nan_is_never_inside_and_is_where_the_finger_points():
    golden = torch.ones(3, dtype=torch.float64)
    observed = torch.tensor([1.0, math.nan, 5.0], dtype=torch.float64)
    assert math.isnan(errors(REAL, observed, golden)["relative_l2"])
    assert worst_place(REAL, observed, golden).startswith("largest error at [1]: found nan")


SCORES = torch.tensor([[0.9, 0.5, 0.499, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("taken", "decided", "gap"),
    [([0, 1], 0, 0.0), ([0, 2], 0, 0.001), ([0, 3], 1, 0.4), ([0], 1, math.inf), ([0, 1, 2], 1, math.inf)],
)
def test_flips_count_beyond_a_near_tie_only(taken, decided, gap):
    golden = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    selected = torch.zeros(1, 4)
    selected[0, taken] = 1.0
    count, worst = flips(selected, golden, SCORES, margin=0.01)
    assert count == decided and worst == pytest.approx(gap)


def test_a_better_candidate_of_another_group_is_a_flip_too():
    golden = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    count, worst = flips(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), golden, SCORES, margin=0.01)
    assert count == 1 and worst == pytest.approx(0.8)
