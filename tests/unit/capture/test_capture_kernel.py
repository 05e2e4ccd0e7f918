"""The fast path of reductions gives what the plain one gives, and is missed by nobody who has no compiler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.capture import kernel as module
from alignment.capture import reduction
from alignment.capture.record import CHAIN
from alignment.capture.reduction import Reducer
from alignment.numerics.random import portable_normal
from alignment.numerics.sketch import FOLD, sketch_array, sketch_tables

SIZE = 64
EPS = float(np.finfo(np.float32).eps)


def both_paths(t, size=SIZE):
    """(statistics, sketch) by the fast and by the plain path; a zero where no sketch is taken."""
    answers = []
    for fast in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not fast:
                patch.setattr("alignment.capture.reduction.kernel", lambda: None)
            reducer = Reducer(sketch_size=size)
            reducer.add(t)
            _, statistics, sketches = reducer.results()
            answers.append((statistics()[0], sketches()[0] if size else np.zeros(1)))
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


def test_the_switch_turns_the_fast_path_off_in_silence(monkeypatch, capsys):
    monkeypatch.setenv(module.SWITCH, "off")
    module.kernel.cache_clear()
    try:
        assert module.kernel() is None and not capsys.readouterr().err
    finally:
        module.kernel.cache_clear()


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "broken"])
def test_without_a_compiler_there_is_no_fast_path_and_no_error(monkeypatch, tmp_path, capsys, broken):
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path))
    compiler = tmp_path / "no-such-compiler"
    if broken:
        compiler.write_text("#!/bin/sh\necho 'fatal error: no headers' >&2\nexit 1\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    module.kernel.cache_clear()
    try:
        assert module.kernel() is None and module.kernel() is None
        said = capsys.readouterr().err
        assert said.count("cannot be built, so torch does it in several and a capture costs about twice as much") == 1
        assert ("fatal error: no headers" if broken else "No such file or directory") in said
        assert "install g++ or name a C++17 compiler in CXX, or set ALIGNMENT_CAPTURE_KERNEL=off" in said
        reducer = Reducer(sketch_size=SIZE)
        reducer.add(torch.ones(10))
        assert reducer.results()[1]()[0].tolist() == [1, 1, 1, math.sqrt(10), 0, 0, 10]
    finally:
        module.kernel.cache_clear()


def laid_out(kind):
    """A tensor of an unusual layout, and its elements in row-major order by NumPy."""
    x = portable_normal(6000, seed=4, stream="x", dtype=torch.float32)
    if kind == "reversed":  # torch has no negative steps; what comes from NumPy with one is copied
        return torch.from_numpy(np.ascontiguousarray(x.numpy()[::-1])), x.numpy()[::-1]
    t = {
        "expanded": lambda: x[:60].expand(40, 60),
        "expanded scalar": lambda: x[7].expand(3, 50),
        "zero stride inside": lambda: x[:60].reshape(20, 3, 1).expand(20, 3, 17),
        "transposed": lambda: x.reshape(60, 100).t(),
        "permuted": lambda: x.reshape(20, 30, 10).permute(2, 0, 1),
        "every third": lambda: x[::3],
        "columns": lambda: x.reshape(60, 100)[:, 5:97:7],
        "overlapping": lambda: x.as_strided((50, 40), (3, 2), 11),
        "offset": lambda: x[3:5001],
        "0-dim": lambda: x[17],
        "0-dim of a view": lambda: x.reshape(60, 100).t()[3, 4],
        "one element": lambda: x[5:6],
        "empty": lambda: x[:0],
        "empty between": lambda: x.reshape(60, 100)[:, :0],
        "empty expanded": lambda: x[:1].expand(0, 1),
        "negated": lambda: torch._neg_view(x.reshape(60, 100)),
        "part of complex": lambda: torch.view_as_complex(x.reshape(-1, 2)).conj().imag,
    }[kind]()
    return t, t.clone(memory_format=torch.contiguous_format).numpy().reshape(-1)


LAYOUTS = (
    "expanded", "expanded scalar", "zero stride inside", "transposed", "permuted", "every third", "columns",
    "overlapping", "offset", "0-dim", "0-dim of a view", "one element", "empty", "empty between", "empty expanded",
    "negated", "part of complex", "reversed",
)  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("size", [0, SIZE], ids=["statistics", "sketch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_any_layout_is_reduced_as_its_elements_in_order(kind, dtype, size):
    t, flat = laid_out(kind)
    if dtype != t.dtype:
        # to() keeps strides where it can; what it cannot keep is covered in float32
        t = t.to(dtype) if kind not in ("expanded", "zero stride inside") else t[..., :1].to(dtype).expand(t.shape)
        flat = t.float().clone(memory_format=torch.contiguous_format).numpy().reshape(-1)
    answers = both_paths(t, size)
    exact = flat.astype(np.float64)
    n = exact.size
    for s, _ in answers:
        assert (s[0], s[1], s[6]) == ((exact.max(), exact.min(), n) if n else (0, 0, 0))
        assert math.isclose(s[3], np.linalg.norm(exact), rel_tol=2 * math.log2(n + 2) * EPS)
        assert abs(s[2] * n - exact.sum()) <= 2 * math.log2(n + 2) * EPS * np.abs(exact).sum()
    if size:
        expected = sketch_array(flat, size=size)
        bound = 32 * EPS * np.linalg.norm(exact)
        assert all(np.linalg.norm(sketch - expected) <= bound for _, sketch in answers)
        # the order matters: the same elements the other way round are another sketch
        if n > 1 and not np.array_equal(flat, flat[::-1]):
            assert np.linalg.norm(answers[0][1] - sketch_array(flat[::-1], size=size)) > bound


@needs_kernel
def test_samples_of_any_layout_are_reduced_alike():
    from alignment.capture.samples import Samples

    keys = tuple(f"{i:016x}" for i in (3 << 48, 5 << 48))
    samples = Samples(keys=keys, bounds=((2, 9), (0, 4)), shape=(2, 10))
    x = portable_normal((10, 2, 6, 5), seed=5, stream="x", dtype=torch.float32)
    answers = {}
    for name, t in {"plain": x, "views": x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)}.items():
        for fast in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not fast:
                    patch.setattr("alignment.capture.reduction.kernel", lambda: None)
                reducer = Reducer(sketch_size=SIZE)
                reducer.samples = samples
                reducer.add(t)
                _, statistics, sketches = reducer.results()
                answers[name, fast] = statistics()[0], sketches()[0]
    exact = torch.cat([x[2:9, 0].flatten(), x[0:4, 1].flatten()]).double()
    (_, first), *_ = answers.values()
    for s, sketch in answers.values():
        assert (s[0], s[1], s[6]) == (exact.max(), exact.min(), len(exact))
        assert np.linalg.norm(sketch - first) <= 32 * EPS * float(exact.norm())


def summands(count, kind, dtype):
    whole = portable_normal((count, 2, 10, 2_500), seed=6, stream="x", dtype=torch.float32).to(dtype)
    if kind == "broken":
        whole[1, 0, 3, 1_234] = float("inf")
    if kind == "transposed":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in whole]
    return [t.clone() for t in whole] if kind == "plain" else list(whole)


@needs_kernel
@pytest.mark.parametrize("size", [0, SIZE, 2048], ids=["statistics", "sketch", "large sketch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [None, ((0, 10), (0, 10)), ((2, 9), (0, 0))], ids=["whole", "full", "padded"])
@pytest.mark.parametrize(
    "count, kind", [(2, "plain"), (3, "one block"), (4, "plain"), (2, "broken"), (3, "transposed")]
)
def test_a_sum_is_reduced_as_the_tensor_that_torch_makes_of_it(count, kind, bounds, dtype, size):
    from alignment.capture.samples import Samples

    given = summands(count, kind, dtype)
    total = given[0]
    for t in given[1:]:
        total = total + t
    answers = []
    for add in (lambda reducer: reducer.add_sum(given), lambda reducer: reducer.add(total)):
        reducer = Reducer(sketch_size=size)
        if bounds is not None:
            keys = tuple(f"{i:016x}" for i in (3 << 48, 5 << 48))
            reducer.samples = Samples(keys=keys, bounds=bounds, shape=(2, 10))
        reduced = add(reducer)
        _, statistics, sketches = reducer.results()
        answers.append((reduced, statistics()[0], sketches()[0] if size else np.zeros(1)))
    (a, x, s), (b, y, t) = answers
    # Without a sketch the pieces of a sum begin at other elements than chains of float32 do, so they round otherwise.
    bound = 2 * math.log2(total.numel()) * EPS
    assert a == b and np.array_equal(s, t) and x[[0, 1, 4, 5, 6]].tolist() == y[[0, 1, 4, 5, 6]].tolist()
    assert math.isclose(x[3], y[3], rel_tol=bound)
    assert abs(x[2] - y[2]) * x[6] <= bound * x[3] * math.sqrt(max(x[6], 1))
    if kind == "plain":
        assert x[3] != reducer_of(given[0], bounds, size)[3], "the first summand alone is another tensor"


@needs_kernel
def test_sums_of_several_sketch_sizes_have_room_in_turns():
    fast, given = module.kernel(), summands(2, "plain", torch.float32)
    total = given[0] + given[1]
    sketchers = {size: fast.sketcher(sketch_tables(size, 0)) for size in (SIZE, 4096, 2048)}
    for size in (4096, 2048, SIZE, 4096):
        assert len(fast._room) >= sketch_tables(size, 0).prime, "a sum would be written beyond its room"
        (found, sketch), (expected, of_total) = sketchers[size].reduce(*given), sketchers[size].reduce(total)
        assert found == expected and np.array_equal(sketch, of_total)


def reducer_of(t, bounds, size):
    from alignment.capture.samples import Samples

    reducer = Reducer(sketch_size=size)
    if bounds is not None:
        reducer.samples = Samples(keys=("3" * 16, "5" * 16), bounds=bounds, shape=(2, 10))
    reducer.add(t)
    return reducer.results()[1]()[0]


def one_after_the_other(t, dim):
    """How some devices add: NumPy's running sums are in float32."""
    return torch.from_numpy(np.add.accumulate(t.numpy(), axis=dim)[..., -1].copy())


def test_a_device_that_adds_in_one_chain_is_given_short_ones(monkeypatch):
    x = portable_normal((1 << 20) + 77, seed=4, stream="x", dtype=torch.float32).square()
    exact = float(x.double().sum())
    monkeypatch.setattr(torch.Tensor, "sum", one_after_the_other)
    partial = reduction._partial(x)
    lost = abs(float(np.sum(partial.numpy(), dtype=np.float64)) / exact - 1)
    levels = math.ceil(math.log(len(x) / CHAIN / reduction._PARTIALS, reduction._LATER))
    # every addition of positive numbers loses half a unit in the last place of its result at most
    bound = (CHAIN + reduction._LATER * levels) * EPS / 2
    assert len(partial) <= reduction._PARTIALS
    assert lost <= bound
    assert abs(float(one_after_the_other(x, 0)) / exact - 1) > bound, "the chain of all loses more"


@pytest.mark.parametrize("n", [0, 1, 63, 512, 513, 40_000])
def test_sums_for_the_host_are_those_of_all_elements(n):
    x = torch.ones(n)
    assert float(reduction._partial(x).double().sum()) == n
    assert reduction._squares(2 * x.numpy()) == 4 * n
