"""Work that overlaps gives what the same work gives one step after the other, on the most adverse schedule."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.numerics.random import portable_normal, portable_uniform

STAGE = "rollout"


def overlap(setting: Setting) -> Iterator[Finding]:
    """Copies, collectives, sampling and pipeline transfers over several steps with other contents."""
    from alignment.backends import simulated_streams as product

    seed = setting.seed
    sources = [portable_normal((5,), seed=seed, stream=f"streams/{i}") for i in range(4)]
    for i, (found, right) in enumerate(zip(product.fetch(sources), sources)):
        yield from differs(found, right, stage=STAGE, place="simulated_streams.fetch.result", what=f"copy {i}")
    buckets = [sources[:2], sources[2:], sources[1:3]]
    for i, found in enumerate(product.all_reduce_buckets(buckets)):
        right = buckets[i][0] + buckets[i][1]
        place = "simulated_streams.all_reduce_buckets.result"
        yield from differs(found, right, stage=STAGE, place=place, what=f"bucket {i}")
    steps = [torch.softmax(3 * portable_normal((4, 9), seed=seed, stream=f"streams/p/{i}"), -1) for i in range(5)]
    draws = [portable_uniform((4, 9), seed=seed, stream=f"streams/u/{i}") for i in range(5)]
    for i, (found, p, u) in enumerate(zip(product.sample_by_race(steps, draws), steps, draws)):
        right = (p / -torch.log1p(-u)).argmax(-1)
        yield from expect(
            torch.equal(found, right),
            stage=STAGE,
            place="simulated_streams.sample_by_race.buffer",
            evidence=f"step {i}: {found.tolist()} instead of {right.tolist()}",
        )
    for i, (found, p) in enumerate(zip(product.pipeline_transfer(steps, lambda x: x * x), steps)):
        yield from differs(
            found, p * p, stage=STAGE, place="simulated_streams.pipeline_transfer.buffer", what=f"micro batch {i}"
        )


CHECKS = (Check(name="streams.overlap", layer="unit-op", cost=0.002, run=overlap),)
