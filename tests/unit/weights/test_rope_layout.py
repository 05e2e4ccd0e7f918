"""Reordered rotary rows: halves of the reordered projection are the neighbours of the plain one."""

import pytest
import torch

from alignment.errors import InputError
from alignment.weights.rope_layout import reorder_query_rows, reorder_rope_rows


def test_the_last_rows_come_by_halves_and_the_others_stay():
    weight = torch.arange(6.0)[:, None].expand(6, 6)
    assert reorder_rope_rows(weight, rope_dim=4)[:, 0].tolist() == [0, 1, 2, 4, 3, 5]
    assert reorder_query_rows(weight, heads=2, rope_dim=2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert reorder_query_rows(weight[:, :1].expand(6, 2), heads=1, rope_dim=6)[:, 0].tolist() == [0, 2, 4, 1, 3, 5]
    # A square matrix does not tell which axis is meant: along the input it would be another matrix.
    square = torch.arange(36.0).view(6, 6)
    assert not torch.equal(reorder_rope_rows(square, rope_dim=4), reorder_rope_rows(square.T, rope_dim=4).T)


def test_too_few_rows_are_refused():
    with pytest.raises(InputError, match="the rotary rows are the last ones; expected ≥ 8 rows; found 2"):
        reorder_rope_rows(torch.zeros(2, 3), rope_dim=8)
