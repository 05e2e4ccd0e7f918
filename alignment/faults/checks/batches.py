"""Batches: picking, cutting, joining and repeating rows keeps every field together; and which groups a step trains
on.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch

from alignment.faults.check import Check, Finding, Setting, expect
from alignment.numerics.random import portable_integers, portable_normal

STAGE = "advantage"


def _batch(product, seed: int, start: int, count: int):
    rows = range(start, start + count)
    drawn = portable_normal((20, 3), seed=seed, stream="batches/x")
    # Every row knows its number in a tensor and in a list: fields that part are found.
    tensors = {"number": torch.tensor([[row, row] for row in rows]), "x": drawn[start : start + count]}
    return product.Batch(tensors, {"uid": [f"u{row}" for row in rows]}, {"n": 2})


def _rows(batch) -> list[int]:
    numbers = batch["number"][:, 0].tolist()
    return numbers if batch["uid"] == [f"u{row}" for row in numbers] else []


def algebra(setting: Setting) -> Iterator[Finding]:
    """Rows by index, slice, list and mask; pieces, repeats and joins; nothing of the original changes."""
    from alignment.rl import batch as product

    whole = _batch(product, setting.seed, 0, 6)
    picked = torch.tensor([True, False, True, True, False, False])
    cases = {
        "__getitem__.list": (whole[[4, 0, 4]], [4, 0, 4]),
        "__getitem__.slice": (whole[1:5:2], [1, 3]),
        "__getitem__.int": (whole[-1], [5]),
        "__getitem__.mask": (whole[picked], [0, 2, 3]),
        "repeat.interleaved": (whole[:3].repeat(2), [0, 0, 1, 1, 2, 2]),
        "repeat": (whole[:3].repeat(2, interleave=False), [0, 1, 2, 0, 1, 2]),
        "concat": (product.Batch.concat([whole[3:], whole[:3]]), [3, 4, 5, 0, 1, 2]),
        "select": (whole.select(["uid", "number"]), [0, 1, 2, 3, 4, 5]),
    }
    for number, part in enumerate(whole.chunk(3)):
        cases[f"chunk.{number}"] = (part, [2 * number, 2 * number + 1])
    for number, part in enumerate(whole.split(4)):
        cases[f"split.{number}"] = (part, [[0, 1, 2, 3], [4, 5]][number])
    x = portable_normal((20, 3), seed=setting.seed, stream="batches/x")
    for name, (found, golden) in cases.items():
        same = _rows(found) == golden and ("x" not in found or torch.equal(found["x"], x[golden]))
        yield from expect(
            same, stage=STAGE, place=f"Batch.{name}", evidence=f"{_rows(found) or found['uid']} instead of {golden}"
        )
    added = whole.add({"number": whole["number"] + 1})
    kept = _rows(whole) == list(range(6)) and torch.equal(added["number"], whole["number"] + 1)
    yield from expect(kept, stage=STAGE, place="Batch.add", evidence="the original changed, or the result did not")


def filtering(setting: Setting) -> Iterator[Finding]:
    """Groups that agree are left out, whatever their value; the first that qualify are taken, whole and in order."""
    from alignment.rl import batch as batches
    from alignment.rl import filtering as product

    lengths = portable_integers(1, 5, (20,), seed=setting.seed, stream="batches/lengths")
    mask = (torch.arange(5) < lengths[:, None]).long()

    def rollouts(accs: dict[str, list[float]], start: int):
        uid = [name for name, values in accs.items() for _ in values]
        acc = [value for values in accs.values() for value in values]
        rows = range(start, start + len(acc))
        return batches.Batch(
            {"response_mask": mask[list(rows)], "token_level_scores": mask[list(rows)] * 0.1},
            {"uid": uid, "prompt_id": uid, "acc": acc, "score": [2 * a - 1 for a in acc], "row": list(rows)},
        )

    first = rollouts({"a": [1, 0, 1], "b": [1, 1, 1], "c": [0, 0, 0], "d": [0, 0, 1]}, 0)
    second = rollouts({"e": [0.3, 0.3], "f": [0, 1], "g": [1]}, 12)
    kept = {s.uid: s.kept for s in product.group_statistics(first, "acc")} | {
        s.uid: s.kept for s in product.group_statistics(second, "acc")
    }
    golden = {"a": True, "b": False, "c": False, "d": True, "e": False, "f": True, "g": True}
    place = "filtering.group_statistics"
    yield from expect(kept == golden, stage=STAGE, place=place, evidence=f"{kept}")
    settings = SimpleNamespace(enable=True, mode="regenerate", metric="acc", max_num_gen_batches=3, reserve_size=0)
    sampling = product.DynamicSampling(settings, train_batch_size=3, gen_batch_size=4)
    asked = []
    for round_ in (first, second):
        asked.append(sampling.prompts_wanted())
        sampling.offer(round_)
    asked.append(sampling.prompts_wanted())
    yield from expect(
        asked == [4, 4, 0],
        stage=STAGE,
        place="filtering.DynamicSampling.prompts_wanted",
        evidence=f"{asked} prompts wanted instead of [4, 4, 0]",
    )
    taken = sampling.take()["row"]
    right = [0, 1, 2, 9, 10, 11, 14, 15]
    place = "filtering.DynamicSampling.take"
    yield from expect(taken == right, stage=STAGE, place=place, evidence=f"rows {taken} instead of {right}")


CHECKS = (
    Check(
        name="batches.algebra",
        layer="unit-op",
        cost=0.002,
        run=algebra,
        kept_because="rows whose fields part are no entry of the catalogue, and are silent",
    ),
    Check(
        name="batches.filtering",
        layer="unit-op",
        cost=0.002,
        run=filtering,
        kept_because="dynamic sampling is no entry of the catalogue, and decides what DAPO trains on",
    ),
)
