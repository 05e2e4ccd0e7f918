"""The difference of two tensors: exact, estimated or bounded from below, by what was recorded."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from comparison_rows import statistics_of

from alignment.diagnose.difference import (
    CHUNK, RESOLUTION, coarser, from_sketches, from_statistics, from_tensors, rounding,
)  # fmt: skip
from alignment.numerics.random import portable_normal
from alignment.numerics.sketch import SKETCH_SIZE, sketch_array

SKETCH_DEVIATION = 1 / math.sqrt(2 * SKETCH_SIZE)
"""Relative standard deviation of a norm that is estimated from a sketch."""


def draw(shape, stream):
    return portable_normal(shape, seed=0, stream=stream).numpy()


def exact(golden, target):
    d = target.astype(np.float64) - golden
    return np.linalg.norm(d) / np.linalg.norm(golden), float(np.vdot(d, golden) / np.vdot(golden, golden))


@pytest.mark.parametrize("size", (1, 1000, CHUNK, 2 * CHUNK + 17))
def test_tensors_are_measured_exactly_across_chunks(size):
    golden = draw((size,), "g").astype(np.float32)
    target = (golden + 1e-3 * draw((size,), "d") + 1e-3 * golden).astype(np.float32)
    found = from_tensors(golden, target)
    relative, gain = exact(golden, target)
    # float32 sums of a chunk lose at most √chunk unit roundoffs of what they add up
    slack = math.sqrt(min(size, CHUNK)) * 2.0**-24
    assert abs(found.relative - relative) <= slack * relative
    assert abs(found.gain - gain) <= slack * relative
    assert found.worst == pytest.approx(
        np.abs(target - golden).max() / np.sqrt((golden.astype(np.float64) ** 2).mean()), rel=slack * 10
    )


@pytest.mark.parametrize("scale", (1e-1, 1e-3, 1e-5))
@pytest.mark.parametrize("kind", ("noise", "two rows swapped", "sign of a row"))
def test_a_sketch_estimates_what_tensors_say(scale, kind):
    golden = draw((96, 64), "g")
    target = golden.copy()
    if kind == "noise":
        target += scale * draw((96, 64), "d")
    elif kind == "two rows swapped":
        target[[3, 50]] = target[[50, 3]]
    else:
        target[7] *= -1
    relative, gain = exact(golden, target)
    found = from_sketches(sketch_array(golden), sketch_array(target), statistics_of(golden), statistics_of(target))
    # four standard deviations, and the rounding of float32 sketches
    assert abs(found.relative - relative) <= 4 * SKETCH_DEVIATION * relative + RESOLUTION
    assert abs(found.gain - gain) <= 4 * SKETCH_DEVIATION * relative**2 + RESOLUTION


def test_statistics_bound_from_below_and_see_scale_and_shift():
    golden = draw((64, 64), "g")
    for target in (1.5 * golden, golden + 0.5, golden[::-1], golden + draw((64, 64), "d")):
        found = from_statistics(statistics_of(golden), statistics_of(target))
        relative, _ = exact(golden, target)
        assert found.relative <= relative * (1 + 2.0**-40)
    assert from_statistics(statistics_of(golden), statistics_of(1.5 * golden)).gain == pytest.approx(0.5)
    assert from_statistics(statistics_of(golden), statistics_of(golden[::-1])).relative <= 2.0**-40


def test_norms_that_a_tool_did_not_keep_leave_the_extremes():
    from dataclasses import replace

    golden = replace(statistics_of(np.arange(5)), l2=math.nan, mean=math.nan)
    assert from_statistics(golden, golden).relative == 0.0
    assert from_statistics(golden, replace(golden, max=8.0)).relative == 1.0


def test_masks_with_infinity_are_equal_and_new_nan_is_a_problem():
    mask = np.where(np.tri(8) > 0, 0.0, -np.inf)
    assert from_tensors(mask, mask).relative == 0.0
    values = draw((8,), "v")
    bad = values.copy()
    bad[2] = np.nan
    assert "NaN" in from_tensors(values, bad).problem
    assert from_tensors(bad, bad).problem == ""
    assert "NaN" in from_tensors(bad, values).problem
    other = mask.copy()
    other[0, 1] = 0.0
    assert from_tensors(mask, other).problem


def test_integers_count_what_moved_and_shapes_are_problems():
    golden = np.arange(100)
    target = golden.copy()
    target[:3] += 1
    assert from_tensors(golden, target).relative == pytest.approx(math.sqrt(2 * 0.03))
    assert "shape" in from_tensors(golden, golden[:50]).problem


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_the_rounding_of_two_sides_is_what_is_measured(dtype):
    count = 1 << 16
    x = torch.exp(portable_normal((count,), seed=3, stream="x"))
    one_side = float(((x.to(dtype).double() - x) / x).square().mean().sqrt())
    # the squares have a standard deviation of about their mean, so their mean is known to 1/√count
    assert one_side == pytest.approx(
        rounding(str(dtype).removeprefix("torch.")) / math.sqrt(2), rel=4 / math.sqrt(count)
    )
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float32") == "bfloat16"
    assert rounding("int64") == 0.0
