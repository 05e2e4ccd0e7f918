"""Reducing on an accelerator, without waiting for it, gives what the CPU gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.reduction import Reducer
from alignment.capture.session import capture
from alignment.numerics.random import portable_normal
from alignment.numerics.sketch import Place, sketch_array

EPS = float(np.finfo(np.float32).eps)


class OnAccelerator(Reducer):
    """Takes the path of an accelerator for tensors of the CPU."""

    def _at_once(self, *summands, samples):
        return None

    def _reduce(self, t, place, samples, shard):
        index = len(self._statistics)
        self._statistics.append(None)
        first = self._sketch_count
        self._on_accelerator(index, t, place, self._fill(t))
        return type(self.add_number(0.0))(index, first, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_path_of_an_accelerator_agrees(dtype):
    t = (portable_normal((300, 170), seed=1, stream="x") * 3).to(dtype)
    reducer = OnAccelerator(sketch_size=256)
    reduced = reducer.add(t)
    _, statistics, sketches = reducer.results()
    high, low, mean, l2, nans, infs, count = statistics()[reduced.statistics]
    exact = t.double()
    assert (high, low, nans, infs, count) == (exact.max(), exact.min(), 0, 0, t.numel())
    assert math.isclose(l2, float(exact.norm()), rel_tol=math.log2(t.numel()) * EPS)
    assert abs(mean - float(exact.mean())) <= math.log2(t.numel()) * EPS * float(exact.abs().mean())
    expected = sketch_array(t.float().numpy(), size=256)
    assert np.linalg.norm(sketches()[reduced.sketch] - expected) <= 32 * EPS * float(exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_what_an_accelerator_reduces(dtype):
    t = portable_normal((300, 170), seed=1, stream="x", dtype=torch.float32)

    def results():
        reducer = OnAccelerator(sketch_size=256)
        reducer.add(t)
        _, statistics, sketches = reducer.results()
        return statistics()[0], sketches()[0]

    plain = results()
    with torch.autocast("cpu", dtype=dtype):
        lowered = results()
    assert all(np.array_equal(a, b) for a, b in zip(plain, lowered, strict=True))


def test_what_is_not_finite_is_counted_there_too():
    t = torch.tensor([1.0, float("nan"), -2.0, float("inf"), -float("inf")])
    reducer = OnAccelerator(sketch_size=4)
    reduced = reducer.add(t)
    assert reducer.results()[1]()[reduced.statistics].tolist() == [1, -2, -0.5, np.float32(math.sqrt(5)), 1, 2, 5]
    empty = OnAccelerator(sketch_size=4)
    at = empty.add(torch.full((3,), float("nan"))).statistics
    assert empty.results()[1]()[at].tolist() == [0, 0, 0, 0, 3, 0, 3]


def test_shards_are_sketched_at_their_place():
    t = portable_normal((6, 8), seed=2, stream="x", dtype=torch.float32)
    total = np.zeros(64)
    for i, part in enumerate(t.chunk(2, dim=1)):
        for reducer in (Reducer(sketch_size=64), OnAccelerator(sketch_size=64)):
            at = reducer.add(part.contiguous(), place=Place.of((6, 4), dim=1, start=4 * i, whole=8)).sketch
            total += reducer.results()[2]()[at] / 2
    assert np.linalg.norm(total - sketch_array(t.numpy(), size=64)) <= 32 * EPS * float(t.norm())


def test_shards_that_are_captured_add_up(tmp_path, monkeypatch):
    from alignment.capture import hooks
    from alignment.capture.record import Shard

    t = portable_normal((6, 8), seed=2, stream="x", dtype=torch.float32)
    monkeypatch.setattr(hooks, "never_cut", lambda module: False)
    monkeypatch.setattr(
        hooks,
        "activation_shard",
        lambda module, path, x, batch=None: Shard(dim=1, start=int(x[0, 0] == t[0, 4]) * 4, length=4, whole=8),
    )
    sketches = []
    for rank, part in enumerate(t.chunk(2, dim=1)):
        with capture(nn.Identity(), CaptureConfig(), directory=tmp_path / str(rank)) as session:
            with session.step(0):
                session._model(part.contiguous())
        row = next(OwnCapture(tmp_path / str(rank)).rows(0, "train", 0))
        assert (row.shard.start, row.shard.whole) == (4 * rank, 8)
        sketches.append(row.sketch())
    assert np.linalg.norm(sum(sketches) - sketch_array(t.numpy())) <= 32 * EPS * float(t.norm())


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(
    "bounds", [((0, 7), (0, 7)), ((3, 7), (0, 5)), ((7, 7), (2, 2))], ids=["full", "padded", "empty"]
)
def test_samples_are_reduced_alike_on_an_accelerator(bounds, each):
    from alignment.capture.samples import Samples

    t = portable_normal((2, 7, 40_000), seed=6, stream="x", dtype=torch.float32)
    t[0, 3, 5] = float("nan")
    answers = []
    for accelerated in (False, True):
        reducer = Reducer(sketch_size=64)
        if accelerated:
            reducer._parts_on_cpu = reducer._parts_on_accelerator
            reducer._at_once = lambda *_, **__: None
        reducer.each_sample = each
        reducer.samples = Samples(keys=tuple(f"{i:016x}" for i in (5 << 40, 9 << 50)), bounds=bounds, shape=(2, 7))
        reduced = reducer.add(t)
        assert reduced.sketches == (2 if each else -1)
        _, statistics, sketches = reducer.results()
        answers.append((statistics()[reduced.statistics], sketches()))
    (a, x), (b, y) = answers
    real = torch.cat([row[low:high].flatten() for row, (low, high) in zip(t, bounds)])
    finite = real[real.isfinite()].double()
    assert len(x) == len(y) == (2 if each else 1)
    assert a[[0, 1, 4, 5, 6]].tolist() == b[[0, 1, 4, 5, 6]].tolist() and a[6] == len(real)
    size = float(finite.norm())
    assert np.linalg.norm(x - y) <= 32 * EPS * size and math.isclose(a[3], size, rel_tol=64 * EPS)
    assert math.isclose(b[3], size, rel_tol=64 * EPS)
    assert bool(np.linalg.norm(x) > size / 2) == (len(finite) > 0)


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("width", [1, 2, 300, 20_000])
def test_what_equal_samples_have_in_common_is_estimated_at_its_size(width, accelerated):
    """Sixteen groups of eight equal samples, as a rollout has them, with few elements each."""
    from alignment.capture.samples import Samples, sample_keys

    ids = torch.arange(16).repeat_interleave(8)[:, None].expand(128, 3).contiguous()
    x = portable_normal((16, 3, width), seed=7, stream="x", dtype=torch.float32).repeat_interleave(8, 0)
    samples = Samples(keys=sample_keys(ids), bounds=((0, 3),) * 128, shape=(128, 3))
    assert len(set(samples.slots)) == 128
    seen = []
    for seed in range(8):
        reducer = Reducer(sketch_size=1024, sketch_seed=seed)
        if accelerated:
            reducer._parts_on_cpu = reducer._parts_on_accelerator
            reducer._at_once = lambda *_, **__: None
        reducer.samples = samples
        reducer.add(x)
        seen.append(float(np.linalg.norm(reducer.results()[2]()[0])) / float(x.double().norm()))
    # the size of the few elements that meet in one bucket is off by a few per cent, as that of any other tensor
    assert max(abs(ratio - 1) for ratio in seen) < 0.1
    assert np.std(seen) < 2 / math.sqrt(2 * 1024)
