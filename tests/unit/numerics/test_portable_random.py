"""Portable random numbers: published Philox answers, distribution, independence of order and layout."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.numerics import random as portable

# Random123 (Salmon et al. 2011), published known answers of philox4x64 with 10 rounds: counter, key, output
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]),
    (
        [2**64 - 1] * 4,
        [2**64 - 1] * 2,
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    (
        [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
        [0x452821E638D01377, 0xBE5466CF34E90C6C],
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    words = portable._philox4x64(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64))
    assert [int(word) for word in words[:, 0]] == expected


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_numpy_philox_gives_the_same_known_answers(counter, key, expected):
    # NumPy advances the 256-bit counter before it computes a block
    number = sum(word << (64 * i) for i, word in enumerate(counter)) - 1
    source = np.random.Philox(counter=number % 2**256, key=key[0] | key[1] << 64)
    assert [int(word) for word in source.random_raw(4)] == expected


def test_stored_draws_never_change():
    """A change of these bits silently changes every stored baseline."""
    normal = portable.portable_normal(4, seed=7, stream="weights/embed")
    uniform = portable.portable_uniform(3, seed=7, stream="weights/embed")
    integers = portable.portable_integers(-3, 1000, 5, seed=-1, stream="tokens")
    grid = portable.portable_uniform_grid(3, "sampling", [1, -5], [0, 6])
    assert [x.hex() for x in normal.tolist()] == FROZEN["normal"]
    assert [x.hex() for x in uniform.tolist()] == FROZEN["uniform"]
    assert integers.tolist() == FROZEN["integers"]
    assert [x.hex() for x in grid.flatten().tolist()] == FROZEN["grid"]
    assert portable.portable_key("prompt-17", 3) == FROZEN["key"]


FROZEN = {
    "normal": ["0x1.c06d03e4892d0p-2", "0x1.1b82993380194p-1", "0x1.d9ebd349db889p+0", "-0x1.05b6072510590p-2"],
    "uniform": ["0x1.56ab6424630b8p-1", "0x1.6b94a4eba9226p-1", "0x1.ef94fc0dd40dep-1"],
    "integers": [523, 415, 267, 670, 747],
    "grid": ["0x1.8b08b132c4802p-2", "0x1.d1d68d16f6780p-8", "0x1.ffd237d7b3a46p-1", "0x1.e3e7ae7c591fep-1"],
    "key": 3125516143629422238,
}


def test_normal_quantile_agrees_with_scipy():
    p = np.concatenate([np.linspace(0.0, 1.0, 20001)[1:-1], 2.0 ** -np.arange(2, 53), 1.0 - 2.0 ** -np.arange(2, 53)])
    ours, oracle = portable._normal_quantile(p), scipy.special.ndtri(p)
    # both algorithms claim a few units in the last place
    assert np.max(np.abs(ours - oracle) / np.maximum(np.abs(oracle), 1.0)) <= 8 * np.finfo(np.float64).eps


def test_logarithm_agrees_with_libm():
    x = np.concatenate([np.logspace(-300, 0, 5001), 1.0 - 2.0 ** -np.arange(1, 53)])
    assert np.all(np.abs(portable._log(x) - np.log(x)) <= 2 * np.spacing(np.abs(np.log(x))))


def test_distributions():
    z = portable.portable_normal(40_000, seed=1, stream="normal").numpy()
    u = portable.portable_uniform(40_000, seed=1, stream="uniform").numpy()
    assert scipy.stats.kstest(z, "norm").pvalue > 1e-3
    assert scipy.stats.kstest(u, "uniform").pvalue > 1e-3
    k = portable.portable_integers(0, 7, 40_000, seed=1, stream="integers").numpy()
    assert scipy.stats.chisquare(np.bincount(k, minlength=7)).pvalue > 1e-3
    assert (
        scipy.stats.kstest(portable.portable_uniform_grid(1, "g", range(200), 200).flatten(), "uniform").pvalue > 1e-3
    )


def test_integers_skip_the_biased_remainder(monkeypatch):
    """With a range of 3·2⁶² the last quarter of the raw values must be skipped, not folded onto the first numbers."""

    class Fixed:
        def __init__(self):
            self.values = [2**64 - 1, 5, 3 * 2**62, 3 * 2**62 - 1, 9]

        def random_raw(self, n):
            taken, self.values = self.values[:n], self.values[n:]
            return np.array(taken, np.uint64)

    monkeypatch.setattr(portable, "_philox", lambda seed, stream: Fixed())
    drawn = portable.portable_integers(-(2**62), 2**63, 3, seed=0, stream="x") + 2**62
    assert drawn.tolist() == [5, 3 * 2**62 - 1 - 2**64, 9]


def test_full_int64_range():
    drawn = portable.portable_integers(-(2**63), 2**63, 1000, seed=0, stream="x")
    assert drawn.min() < -(2**61) and drawn.max() > 2**61


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_stays_below_one_in_every_dtype(dtype):
    u = portable.portable_uniform((300, 300), seed=0, stream="u", dtype=dtype)
    assert u.dtype == dtype and u.shape == (300, 300)
    assert u.min() >= 0 and u.max() < 1


def test_normal_is_float64_then_cast():
    full = portable.portable_normal((5, 7), seed=3, stream="w")
    assert torch.equal(portable.portable_normal((5, 7), seed=3, stream="w", dtype=torch.bfloat16), full.bfloat16())


@settings(max_examples=30, deadline=None)
@given(st.integers(), st.text(max_size=12), st.integers(0, 40), st.integers(0, 40))
def test_longer_draw_starts_with_the_shorter(seed, stream, n, more):
    for draw in (
        portable.portable_uniform,
        portable.portable_normal,
        lambda shape, **kw: portable.portable_integers(0, 5, shape, **kw),
    ):
        short, long = draw(n, seed=seed, stream=stream), draw(n + more, seed=seed, stream=stream)
        assert torch.equal(long[:n], short)


def test_streams_and_seeds_are_independent():
    draws = [
        portable.portable_uniform(8, seed=seed, stream=stream)
        for seed, stream in [(0, "a"), (0, "b"), (1, "a"), (-1, "a"), (11, "a"), (1, "1\x1fa")]
    ]
    draws.append(portable.portable_uniform_grid(0, "a", [0], 8)[0])
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, 50), min_size=1, max_size=9),
    st.randoms(),
)
def test_grid_depends_on_key_and_position_only(rows, columns, shuffle):
    grid = portable.portable_uniform_grid(5, "s", rows, columns)
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    assert torch.equal(portable.portable_uniform_grid(5, "s", [rows[i] for i in order], columns), grid[order])
    for j, column in enumerate(columns):
        assert torch.equal(portable.portable_uniform_grid(5, "s", torch.tensor(rows), [column])[:, 0], grid[:, j])
    assert torch.equal(portable.portable_uniform_grid(5, "s", rows, 51)[:, columns], grid)


def test_permutation():
    order = portable.portable_permutation(1000, seed=0, stream="p")
    assert sorted(order.tolist()) == list(range(1000))
    assert not torch.equal(order, torch.arange(1000))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: portable.portable_uniform(3, seed=1.5, stream="x"),
            "seed must be an integer; expected int; found 1.5",
        ),
        (lambda: portable.portable_uniform((2, -1), seed=1, stream="x"), "no negative size"),
        (lambda: portable.portable_uniform(3, seed=1, stream=3), "a stream is named by a string"),
        (lambda: portable.portable_normal(3, seed=1, stream="x", dtype=torch.int64), "floating-point dtype"),
        (lambda: portable.portable_integers(3, 3, 1, seed=1, stream="x"), "found low=3, high=3"),
        (lambda: portable.portable_integers(0, 300, 1, seed=1, stream="x", dtype=torch.uint8), "leaves the dtype"),
        (lambda: portable.portable_uniform_grid(1, "x", [0.5], 3), "rows must be one row of int64 values"),
        (lambda: portable.portable_uniform_grid(1, "x", [1], [-1]), "expected values ≥ 0; found -1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError) as error:
        call()
    assert message in str(error.value)
