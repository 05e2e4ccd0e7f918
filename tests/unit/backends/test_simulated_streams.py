"""Streams that work as late as they may: results are those of doing everything at once."""

from __future__ import annotations

import pytest
import torch

from alignment.backends import simulated_streams as streams
from alignment.errors import InputError
from alignment.numerics.random import portable_normal, portable_uniform


def test_work_waits_until_somebody_needs_it():
    stream, seen = streams.Stream(), []
    first, second = (stream.submit(lambda i=i: seen.append(i)) for i in range(2))
    assert not seen and not first.done
    first.wait()
    assert seen == [0] and first.done and not second.done
    stream.synchronize()
    assert seen == [0, 1] and second.done


def test_results_are_there_once_they_were_waited_for():
    sources = [portable_normal((3,), seed=i, stream="s") for i in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(streams.fetch(sources), sources))
    assert streams.fetch([]) == []
    sums = streams.all_reduce_buckets([sources[:2], sources[2:]])
    assert torch.equal(sums[1], sources[2] + sources[3])
    too_early = torch.zeros(3, dtype=torch.float64)
    pending = streams.copy_async(sources[0], too_early, streams.Stream())
    assert not too_early.any() and torch.equal(pending.result(), sources[0])
    with pytest.raises(InputError, match="a copy keeps the shape"):
        streams.copy_async(sources[0], torch.zeros(2), streams.Stream())


def test_a_buffer_is_used_again_only_after_its_last_reader():
    pool, stream = streams.BufferPool(), streams.Stream()
    buffer = pool.take((2,))
    event = stream.submit(lambda: None)
    pool.give_back(buffer, after=event)
    assert pool.take((2,)) is not buffer
    event.wait()
    assert pool.take((2,)) is buffer


def test_overlapping_steps_do_not_see_each_others_buffers():
    steps = [torch.softmax(portable_normal((5, 9), seed=i, stream="p"), -1) for i in range(4)]
    draws = [portable_uniform((5, 9), seed=i, stream="u") for i in range(4)]
    for chosen, p, u in zip(streams.sample_by_race(steps, draws), steps, draws):
        assert torch.equal(chosen, (p / -torch.log1p(-u)).argmax(-1))
    for made, p in zip(streams.pipeline_transfer(steps, lambda x: 2 * x), steps):
        assert torch.equal(made, 2 * p)
