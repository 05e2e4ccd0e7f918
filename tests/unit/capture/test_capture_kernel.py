"""The fast path of reductions gives what the plain one gives, and is missed by nobody who has no compiler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.capture import kernel as module
from alignment.capture.reduction import Reducer
from alignment.numerics.random import portable_normal
from alignment.numerics.sketch import FOLD, sketch_tables

SIZE = 64
EPS = float(np.finfo(np.float32).eps)


def both_paths(t):
    """(statistics, sketch) by the fast and by the plain path."""
    answers = []
    for fast in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not fast:
                patch.setattr("alignment.capture.reduction.kernel", lambda: None)
            reducer = Reducer(sketch_size=SIZE)
            reducer.add(t)
            _, statistics, sketches = reducer.results()
            answers.append((statistics()[0], sketches()[0]))
    return answers


needs_kernel = pytest.mark.skipif(module.kernel() is None, reason="there is no compiler, or the fast path is off")


@needs_kernel
@given(
    n=st.integers(0, 40_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1e-12, 1, 1e9]),
)
@settings(max_examples=40, deadline=None)
def test_both_paths_agree_to_the_rounding_of_their_sums(n, dtype, scale):
    t = (portable_normal(n, seed=1, stream="x", dtype=torch.float32) * scale).to(dtype)
    (a, x), (b, y) = both_paths(t)
    size = float(t.double().abs().sum())
    assert a[:2].tolist() == b[:2].tolist() and a[4:].tolist() == b[4:].tolist()
    assert abs(a[2] - b[2]) * max(n, 1) <= 2 * math.log2(n + 2) * EPS * size + np.finfo(np.float32).tiny
    assert math.isclose(a[3], b[3], rel_tol=2 * math.log2(n + 2) * EPS)
    assert np.linalg.norm(x - y) <= 32 * EPS * float(t.double().norm()) + np.finfo(np.float32).tiny


@needs_kernel
def test_tensors_of_more_groups_than_are_added_in_float32_are_reduced_right():
    tables = sketch_tables(SIZE, 0)
    t = portable_normal(FOLD * tables.group + 12_345, seed=2, stream="x", dtype=torch.float32)
    (a, x), (b, y) = both_paths(t)
    assert np.linalg.norm(x - y) <= 32 * EPS * float(t.double().norm())
    assert math.isclose(a[3], float(t.double().norm()), rel_tol=math.log2(len(t)) * EPS)


@needs_kernel
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("at", [0, 17, 999])
def test_numbers_that_need_care_take_the_plain_path(value, at):
    t = portable_normal(1000, seed=3, stream="x", dtype=torch.float32)
    t[at] = value
    (a, x), (b, y) = both_paths(t)
    assert a.tolist() == b.tolist() and np.array_equal(x, y)


def test_the_switch_turns_the_fast_path_off(monkeypatch):
    monkeypatch.setenv(module.SWITCH, "off")
    module.kernel.cache_clear()
    try:
        assert module.kernel() is None
    finally:
        module.kernel.cache_clear()


def test_without_a_compiler_there_is_no_fast_path_and_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    module.kernel.cache_clear()
    try:
        assert module.kernel() is None
        reducer = Reducer(sketch_size=SIZE)
        reducer.add(torch.ones(10))
        assert reducer.results()[1]()[0].tolist() == [1, 1, 1, math.sqrt(10), 0, 0, 10]
    finally:
        module.kernel.cache_clear()
