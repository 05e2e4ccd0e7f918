"""Sketches: ‖sketch(x) − sketch(y)‖ estimates ‖x − y‖ whatever the difference, adds up over shards, equals in NumPy and
torch, and the bars fail for projections that hash less."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.numerics import sketch as module
from alignment.numerics.random import portable_normal
from alignment.numerics.sketch import SKETCH_SIZE, Place, sketch_array, sketch_tensor

WITHIN_5_PERCENT = 0.95
"""Share of draws that the requirement states for an error of at most 5 %."""
WITHIN_10_PERCENT = 1.0
"""The same for 10 %."""
DRAWS = 80
ROWS, COLUMNS, HEAD = 256, 512, 64
EPS = torch.finfo(torch.float32).eps
# A sketch is a sum of at most _FOLD groups of _ROWS rows in float32, then log2(size) butterflies of a rotation.
SUMMED = module.FOLD + module._ROWS + SKETCH_SIZE.bit_length()


def normal(shape, seed, stream="x"):
    return portable_normal(shape, seed=seed, stream=stream, dtype=torch.float32)


def pick(n, k, seed):
    return np.random.Generator(np.random.Philox(seed)).choice(n, size=k, replace=False)


def one_element(seed):
    d = torch.zeros(ROWS * COLUMNS)
    d[pick(len(d), 1, seed)] = 3.0
    return d


def few_elements(seed):
    d = torch.zeros(ROWS * COLUMNS)
    d[pick(len(d), 30, seed)] = 1.0
    return d


def one_token(seed):
    d = torch.zeros(ROWS, COLUMNS)
    d[pick(ROWS, 1, seed)] = normal(COLUMNS, seed)
    return d


def equal_row(seed):
    d = torch.zeros(ROWS, COLUMNS)
    d[pick(ROWS, 1, seed)] = 0.5
    return d


def column(seed):
    d = torch.zeros(4 * ROWS, COLUMNS)
    d[:, pick(COLUMNS, 1, seed)] = 1.0
    return d


def stride(step):
    def difference(seed):
        d = torch.zeros(1 << 18)
        d[int(pick(step, 1, seed)[0]) :: step] = 1.0
        return d

    return difference


def swapped(dim, width):
    def difference(seed):
        x = normal((ROWS, COLUMNS), seed)
        a, b = (int(i) * width for i in pick(x.shape[dim] // width, 2, seed))
        y = x.clone()
        y.narrow(dim, a, width).copy_(x.narrow(dim, b, width))
        y.narrow(dim, b, width).copy_(x.narrow(dim, a, width))
        return x - y

    return difference


def permutation(seed):
    x = normal(ROWS * COLUMNS, seed)
    return x - x[torch.from_numpy(pick(len(x), len(x), seed))]


def sign(seed):
    return 2 * normal((ROWS, COLUMNS), seed)


def constant(seed):
    return torch.ones(1 << 18)


def alternating(seed):
    return torch.where(torch.arange(1 << 18) // 4096 % 2 == 0, 1.0, -1.0)


def heavy_tailed(seed):
    return normal((ROWS, COLUMNS), seed, "numerator") / normal((ROWS, COLUMNS), seed, "denominator")


DIFFERENCES = {
    "one element": one_element,
    "30 equal elements": few_elements,
    "one token": one_token,
    "one row of equal values": equal_row,
    "one column": column,
    "stride 16": stride(16),
    "stride 1024": stride(1024),
    "stride 16384": stride(16384),
    "two rows swapped": swapped(0, 1),
    "two heads swapped": swapped(1, HEAD),
    "a permutation": permutation,
    "a sign": sign,
    "a constant": constant,
    "alternating blocks": alternating,
    "heavy tails": heavy_tailed,
}


def relative_errors(difference, sketch):
    errors = []
    for seed in range(DRAWS):
        d = difference(seed).reshape(-1)
        estimate = np.linalg.norm(sketch(d, seed).astype(np.float64))
        errors.append(abs(estimate / float(torch.linalg.vector_norm(d.double())) - 1))
    return np.array(errors)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_norm_of_any_difference_is_estimated_within_the_bars(name):
    errors = relative_errors(DIFFERENCES[name], lambda d, seed: sketch_tensor(d, seed=seed).numpy())
    assert (errors <= 0.05).mean() >= WITHIN_5_PERCENT, f"{name}: {errors.max():.3f} at worst"
    assert (errors <= 0.10).mean() >= WITHIN_10_PERCENT, f"{name}: {errors.max():.3f} at worst"


def plain_buckets(d, seed):
    """The textbook form with a power of two: bucket i mod 1024 and a random sign per element."""
    signs = module._signs(module._hash(np.arange(len(d)), seed, 9))
    return (d.numpy() * signs).reshape(-1, SKETCH_SIZE).sum(0)


def signs_per_row(d, seed):
    """One sign for all elements of a row: cheap, and blind to what is equal in every row."""
    rows = d.reshape(-1, SKETCH_SIZE).numpy()
    return (rows * module._signs(module._hash(np.arange(len(rows)), seed, 9))[:, None]).sum(0)


@pytest.mark.parametrize(
    ("name", "sketch"),
    [("one column", plain_buckets), ("stride 1024", plain_buckets), ("a constant", signs_per_row)],
)
def test_the_bars_fail_a_projection_that_hashes_less(name, sketch):
    errors = relative_errors(DIFFERENCES[name], sketch)
    assert (errors <= 0.05).mean() < WITHIN_5_PERCENT and errors.max() > 0.10


@pytest.mark.parametrize("size", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("name", ["one token", "two heads swapped", "a sign"])
def test_small_relative_differences_of_float32_tensors_are_resolved(name, size):
    d = DIFFERENCES[name](1).reshape(-1)
    x = normal(len(d), 2, "base")
    y = x + d * (size * float(x.norm() / d.norm()))
    true = float((x.double() - y.double()).norm() / x.double().norm())
    difference = sketch_tensor(x).double() - sketch_tensor(y).double()
    estimate = float(difference.norm() / sketch_tensor(x).double().norm())
    # Both norms are estimates: their errors of at most 10 % may add up.
    assert abs(estimate / true - 1) <= 0.2


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 5000), log_size=st.integers(2, 10))
@settings(max_examples=25, deadline=None)
def test_numpy_and_torch_agree_to_the_rounding_of_their_sums(seed, n, log_size):
    x = normal(n, seed % 1000)
    a, b = (
        sketch_array(x.numpy(), size=1 << log_size, seed=seed),
        sketch_tensor(x, size=1 << log_size, seed=seed).numpy(),
    )
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape == (1 << log_size,)
    assert np.linalg.norm(a - b) <= SUMMED * EPS * float(x.norm()) + np.finfo(np.float32).tiny


@pytest.mark.parametrize("n", [1000, 200_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sketch_is_the_same_to_the_last_bit_where_products_are_lowered(n, dtype):
    x = normal(n, 3)
    plain = sketch_tensor(x)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(sketch_tensor(x), plain)
        assert (torch.eye(2) @ torch.eye(2)).dtype == dtype  # it is switched on


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_the_sketches_of_shards_add_up_to_the_sketch_of_the_whole(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    x = normal(tuple(shape), 3)
    total = np.zeros(64)
    for low, high in zip([0, *cuts], [*cuts, shape[dim]]):
        part = x.narrow(dim, low, high - low)
        if high > low:
            place = Place.of(tuple(part.shape), dim=dim, start=low, whole=shape[dim])
            of_torch = sketch_tensor(part, size=64, place=place).numpy()
            of_numpy = sketch_array(part.numpy(), size=64, place=place)
            assert np.linalg.norm(of_torch - of_numpy) <= SUMMED * EPS * float(part.norm())
            total += of_torch
    whole = sketch_tensor(x, size=64).numpy()
    assert np.linalg.norm(total - whole) <= 2 * SUMMED * EPS * float(x.norm())


def test_a_shard_sketched_as_if_it_were_the_whole_does_not_add_up():
    x = normal((64, 96), 3)
    halves = sum(sketch_tensor(half) for half in x.chunk(2, dim=1))
    assert float((halves - sketch_tensor(x)).norm()) > 0.5 * float(x.norm())


def test_shards_of_many_groups_add_up():
    x = normal((700, 1024), 4)
    total = sum(
        sketch_tensor(part, place=Place.of((700, 256), dim=1, start=256 * i, whole=1024))
        for i, part in enumerate(x.chunk(4, dim=1))
    )
    assert float((total - sketch_tensor(x)).norm()) <= 4 * SUMMED * EPS * float(x.norm())


@given(a=st.floats(-8, 8, width=32), n=st.integers(1, 400))
@settings(max_examples=25, deadline=None)
def test_a_sketch_is_linear(a, n):
    x, y = normal(n, 5), normal(n, 6)
    left = sketch_tensor(a * x + y, size=64)
    right = a * sketch_tensor(x, size=64) + sketch_tensor(y, size=64)
    assert float((left - right).norm()) <= SUMMED * EPS * (abs(a) * float(x.norm()) + float(y.norm()))


def test_elements_that_are_not_finite_count_as_zero_and_huge_ones_as_the_largest():
    x = normal(1000, 7)
    broken = x.clone()
    broken[[1, 5, 9]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    cleared = x.clone()
    cleared[[1, 5, 9]] = 0
    assert torch.equal(sketch_tensor(broken), sketch_tensor(cleared))
    assert np.array_equal(sketch_array(broken.numpy()), sketch_array(cleared.numpy()))
    huge = torch.full((1000,), torch.finfo(torch.float32).min)
    assert torch.isfinite(sketch_tensor(huge)).all() and np.isfinite(sketch_array(huge.numpy())).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_every_dtype_is_sketched_as_float32(dtype):
    x = (normal((30, 40), 8) * 4).to(dtype)
    assert torch.equal(sketch_tensor(x), sketch_tensor(x.float()))


def test_the_signs_are_those_that_were_recorded():
    # A change of the hash makes every stored capture incomparable.
    assert sketch_array(np.arange(10, dtype=np.float32), size=4).tolist() == [1.5, 6.5, 9.5, 6.5]


@pytest.mark.parametrize(("size", "seed"), [(1000, 0), (2, 0), (1024, -1), (1024, 2**32)])
def test_a_size_that_is_no_power_of_two_and_a_seed_out_of_range_are_refused(size, seed):
    with pytest.raises(InputError, match="power of two|32 bits"):
        sketch_tensor(torch.ones(3), size=size, seed=seed)


def test_a_shard_outside_the_whole_is_refused():
    with pytest.raises(InputError, match="does not lie inside the whole"):
        Place.of((4, 4), dim=0, start=2, whole=5)
    with pytest.raises(InputError, match="another number of elements"):
        sketch_tensor(torch.ones(3, 4), place=Place.of((4, 4), dim=0, start=0, whole=8))
