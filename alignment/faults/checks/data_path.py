"""Prompts: their order over epochs and resumes, their padding, their hash, and the random state of every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy
import torch

from alignment.faults.check import Check, Finding, Setting, expect
from alignment.faults.scratch import scratch
from alignment.numerics.random import portable_integers

ROLLOUT, CHECKPOINT = "rollout", "checkpoint"
LENGTHS = (3, 1, 5, 2, 4, 3, 6)


def _prompts(seed: int):
    from alignment.rl import data

    return data.PromptSet(
        [
            data.Prompt(
                prompt_id=f"p{i}",
                data_source=f"s{i % 2}",
                ground_truth=str(i),
                metadata=f"m{i}",
                token_ids=tuple(portable_integers(3, 9, (n,), seed=seed, stream=f"data/{i}").tolist()),
            )
            for i, n in enumerate(LENGTHS)
        ],
        tokenizer_hash="t",
    )


def order(setting: Setting) -> Iterator[Finding]:
    """Every prompt once an epoch, another order in the next; a resume at any place goes on as if nothing had
    happened.
    """
    from alignment.rl import data as product

    seven = _prompts(setting.seed)

    def names(sampler, count: int) -> list[list[str]]:
        return [[p.prompt_id for p in sampler.next_batch()] for _ in range(count)]

    # a set that batches divide, and one that leaves a rest
    six = product.PromptSet(seven[:6], tokenizer_hash="t")
    for shuffle, prompts in ((True, seven), (True, six), (False, seven)):
        whole = names(product.PromptSampler(prompts, batch_size=2, seed=setting.seed, shuffle=shuffle), 12)
        for epoch in range(4):
            seen = [name for batch in whole[3 * epoch : 3 * epoch + 3] for name in batch]
            yield from expect(
                len(set(seen)) == 6, stage=ROLLOUT, place="PromptSampler.order", evidence=f"epoch {epoch}: {seen}"
            )
        if shuffle:
            orders = {tuple(name for batch in whole[3 * e : 3 * e + 3] for name in batch) for e in range(4)}
            yield from expect(
                len(orders) > 1, stage=ROLLOUT, place="PromptSampler.order", evidence="every epoch has the same order"
            )
        else:
            yield from expect(
                whole[0] == ["p0", "p1"] and whole[3] == whole[0],
                stage=ROLLOUT,
                place="PromptSampler.order",
                evidence=f"unshuffled: {whole[0]}, {whole[3]}",
            )
        for stop in range(9):
            first = product.PromptSampler(prompts, batch_size=2, seed=setting.seed, shuffle=shuffle)
            names(first, stop)
            first.reserve(stop, 3)
            second = product.PromptSampler(prompts, batch_size=2, seed=setting.seed, shuffle=shuffle)
            second.load_state_dict(first.state_dict())
            found = names(second, 3)
            yield from expect(
                found == whole[stop : stop + 3],
                stage=CHECKPOINT,
                place="PromptSampler.position",
                evidence=f"resumed after {stop} batches: {found} instead of {whole[stop : stop + 3]}",
            )
    twice = [
        [p.prompt_id for p in product.PromptSampler(seven, batch_size=2, seed=1).reserve(step, 4)] for step in (5, 5, 6)
    ]
    yield from expect(
        twice[0] == twice[1] and len(set(twice[0])) == 4,
        stage=ROLLOUT,
        place="PromptSampler.reserve",
        evidence=f"{twice}",
    )


def contents(setting: Setting) -> Iterator[Finding]:
    """A batch holds its prompts left padded, beside their answers; a saved set is the set, and its hash sees every
    field.
    """
    import dataclasses

    from alignment.rl import data as product

    prompts = _prompts(setting.seed)
    for width in (None, 8):
        batch = product.prompt_batch(prompts[2:6], pad_token_id=0, prompt_length=width)
        for row, prompt in enumerate(prompts[2:6]):
            n = len(prompt.token_ids)
            padding = batch["prompts"].shape[1] - n
            ids, mask = batch["prompts"][row].tolist(), batch["prompt_mask"][row].tolist()
            where = {"stage": ROLLOUT, "evidence": f"{prompt.prompt_id}: {ids}, {mask}"}
            yield from expect(ids == [0] * padding + list(prompt.token_ids), place="prompt_batch.prompts", **where)
            yield from expect(mask == [0] * padding + [1] * n, place="prompt_batch.prompt_mask", **where)
            for name in ("prompt_id", "data_source", "ground_truth", "metadata"):
                yield from expect(
                    batch[name][row] == getattr(prompt, name),
                    stage=ROLLOUT,
                    place=f"prompt_batch.{name}",
                    evidence=f"{batch[name][row]} beside {prompt.prompt_id}",
                )
    with scratch() as folder:
        prompts.save(folder / "set")
        again = product.PromptSet.load(folder / "set")
    yield from expect(list(again) == list(prompts), stage=ROLLOUT, place="PromptSet.load", evidence="other prompts")
    seen = {prompts.content_hash}
    for name, value in (
        ("prompt_id", "x"),
        ("token_ids", (1,)),
        ("data_source", "x"),
        ("ground_truth", "x"),
        ("metadata", "x"),
    ):
        other = product.PromptSet(
            [*prompts[:-1], dataclasses.replace(prompts[-1], **{name: value})], tokenizer_hash="t"
        )
        yield from expect(
            other.content_hash not in seen, stage=ROLLOUT, place="PromptSet.content_hash", evidence=f"blind to {name}"
        )
        seen.add(other.content_hash)


class Characters:
    """A tokenizer of one token per character."""

    content_hash = "characters"

    def encode_chat(self, messages) -> list[int]:
        """All contents, one after the other."""
        return [ord(c) for message in messages for c in message["content"]]


def reading(setting: Setting) -> Iterator[Finding]:
    """Rows of verl's parquet: each prompt beside its own answer, cut on the side that was asked for, or left out."""
    from alignment.errors import UnavailableError
    from alignment.rl import data as product

    rows = [
        {
            "data_source": f"s{i}",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": f"g{i}"},
            "extra_info": {"index": i, "metadata": f"m{i}"},
        }
        for i, text in enumerate(("abc", "abcdefgh", "xy"))
    ]
    with scratch() as folder:
        try:
            product.write_parquet(rows, folder / "rows.parquet")
        except UnavailableError:
            return
        for truncation, filtered, kept in (
            ("left", False, ("abc", "efgh", "xy")),
            ("right", False, ("abc", "abcd", "xy")),
            ("middle", False, ("abc", "abgh", "xy")),
            ("error", True, ("abc", None, "xy")),
        ):
            found = product.from_parquet(
                folder / "rows.parquet",
                Characters(),
                max_prompt_length=4,
                filter_overlong_prompts=filtered,
                truncation=truncation,
            )
            mine = [
                ("".join(map(chr, p.token_ids)), p.data_source, p.ground_truth, p.metadata, p.prompt_id) for p in found
            ]
            right = [(t, f"s{i}", f"g{i}", f"m{i}", f"s{i}-{i}") for i, t in enumerate(kept) if t is not None]
            yield from expect(
                mine == right and found.dropped == kept.count(None),
                stage=ROLLOUT,
                place="from_parquet",
                evidence=f"{truncation}: {mine} and {found.dropped} dropped",
            )


def generators(setting: Setting) -> Iterator[Finding]:
    """Every rank goes on with its own random numbers after a resume, of every generator."""
    from alignment.rl import checkpoint, worker

    held = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    def draw() -> list[float]:
        return [random.random(), float(numpy.random.random()), float(torch.rand(1)), random.gauss(0, 1)]

    def rank(number: int, role: str):
        one = worker.Worker.__new__(worker.Worker)
        one.roles, one.rank, one.world_size = (role,), number, 2
        return one

    try:
        with scratch() as folder:
            expected = {}
            ranks = [(r, role) for role in ("rollout", "reward") for r in range(2)]
            for place, (r, role) in enumerate(ranks):
                seed = 10 * setting.seed + place
                random.seed(seed)
                numpy.random.seed(seed)
                torch.manual_seed(seed)
                draw()
                rank(r, role).save(folder)
                expected[r, role] = draw()
            for r, role in ranks:
                random.seed(99)
                numpy.random.seed(99)
                torch.manual_seed(99)
                rank(r, role).load(folder)
                found = draw()
                yield from expect(
                    found == expected[r, role],
                    stage=CHECKPOINT,
                    place="rng_file",
                    evidence=f"{role} rank {r} draws {found} instead of {expected[r, role]}",
                )
            one = folder / "one.safetensors"
            checkpoint.save_rng(one)
            first = draw()
            checkpoint.load_rng(one)
            second = draw()
            yield from expect(
                first == second, stage=CHECKPOINT, place="checkpoint.load_rng", evidence=f"{second} instead of {first}"
            )
    finally:
        random.setstate(held[0])
        numpy.random.set_state(held[1])
        torch.set_rng_state(held[2])


CHECKS = (
    Check(name="data_path.order", layer="unit-op", cost=0.01, run=order),
    Check(
        name="data_path.contents",
        layer="unit-op",
        cost=0.005,
        run=contents,
        kept_because="padding, pairing and hashes of prompts are no entry of the catalogue",
    ),
    Check(
        name="data_path.reading",
        layer="unit-op",
        cost=0.01,
        run=reading,
        kept_because="answers beside the wrong prompts are no entry of the catalogue",
    ),
    Check(name="data_path.generators", layer="unit-op", cost=0.01, run=generators),
)
