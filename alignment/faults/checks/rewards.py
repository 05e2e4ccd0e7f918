"""Rewards: the verdict on known answers (also in a worker thread), shaping near the limit, and the token that
carries it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from alignment.errors import InputError
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.checks.losses import response_mask
from alignment.numerics.random import portable_normal

STAGE = "reward"
ANSWERS = (
    ("chain_sum", "12 + 30 = <answer>42</answer>", "42", True),
    ("chain_sum", "<answer>41</answer> no, <answer>42.0</answer>", "42", True),
    ("chain_sum", "<answer>42</answer> no, <answer>41</answer>", "42", False),
    ("chain_sum", "1,042", "1042", True),
    ("chain_sum", "the sum is 42", "42", False),
    ("chain_sum", "", "42", False),
    ("products", "-42", "-42", True),
    ("products", "42", "-42", False),
    ("gcd", "7", "7", True),
    ("gcd", "17", "7", False),
    ("lcm", "nothing", "7", False),
    ("spell_backward", "TAC", "tac", True),
    ("spell_backward", "cat", "tac", False),
)
"""Task, response, reference, and whether the last tagged (else the whole) answer is the reference: judged by hand."""


def verdicts(setting: Setting) -> Iterator[Finding]:
    """Full credit and +1 exactly for right answers, on the main thread and on another one; nonsense is refused, not
    0.
    """
    from alignment.rl import scoring as product

    def score(case: tuple[str, str, str, bool]):
        name, response, truth, _ = case
        return product.score_response(f"reasoning_gym/{name}", response, truth, verifier="built_in")

    with ThreadPoolExecutor(max_workers=1) as pool:
        for where, scores in (
            ("main thread", list(map(score, ANSWERS))),
            ("worker thread", list(pool.map(score, ANSWERS))),
        ):
            for case, got in zip(ANSWERS, scores):
                right = (1.0, 1.0) if case[3] else (-1.0, 0.0)
                yield from expect(
                    (got.score, got.acc) == right,
                    stage=STAGE,
                    place=f"scoring.score_response.{case[0]}",
                    evidence=f"{where}: {case[1]!r} against {case[2]!r} earns {got.score:g} (acc {got.acc:g})",
                )
    several = product.score_responses(
        [f"reasoning_gym/{c[0]}" for c in ANSWERS],
        [c[1] for c in ANSWERS],
        [c[2] for c in ANSWERS],
        verifier="built_in",
    )
    yield from expect(
        [s.acc for s in several] == [float(c[3]) for c in ANSWERS],
        stage=STAGE,
        place="scoring.score_responses",
        evidence=f"{[s.acc for s in several]}",
    )
    try:
        got = product.score_response("nobody/knows", "1", "1")
        yield Finding(stage=STAGE, place="scoring.score_response", evidence=f"an unknown source earns {got.score:g}")
    except InputError:
        pass


def shaping(setting: Setting) -> Iterator[Finding]:
    """The overlong penalty at every length; a buffer that cannot be is refused, and no reward is ever NaN."""
    from alignment.rl import shaping as product

    for limit, buffer, factor in ((16, 4, 1.0), (16, 16, 0.5), (9, 1, 2.0)):
        for length in range(limit + 1):
            found = product.overlong_reward(length, max_response_length=limit, buffer_len=buffer, penalty_factor=factor)
            beyond = length - (limit - buffer)
            golden = -factor * beyond / buffer if beyond > 0 else 0.0
            yield from differs(
                torch.tensor(found, dtype=torch.float64),
                torch.tensor(golden, dtype=torch.float64),
                stage=STAGE,
                place="overlong_reward",
                what=f"{length} of {limit} tokens, buffer {buffer}",
            )
    for buffer in (0, 17):
        for length in (15, 16):
            try:
                found = product.overlong_reward(length, max_response_length=16, buffer_len=buffer)
            except InputError:
                continue
            except ZeroDivisionError as error:
                found = math.nan
                evidence = f"a buffer of {buffer} tokens: {error}"
            else:
                evidence = f"a buffer of {buffer} of 16 tokens gives {found}"
            yield Finding(stage=STAGE, place="overlong_reward", evidence=evidence)


def placement(setting: Setting) -> Iterator[Finding]:
    """Each reward on the last token of its response, and nowhere else; one that is not a number is refused."""
    from alignment.rl import shaping as product

    mask = response_mask()
    mask[0, 3] = 1
    rewards = portable_normal((4,), seed=setting.seed, stream="rewards/placed").tolist()
    found = product.place_on_last_token(rewards, mask, dtype=torch.float64)
    golden = torch.zeros(4, 8, dtype=torch.float64)
    for row, reward in enumerate(rewards):
        golden[row, int(mask[row].sum()) - 1] = reward
    yield from differs(found, golden, stage=STAGE, place="place_on_last_token.token_level_scores")
    for bad in (math.nan, math.inf):
        try:
            product.place_on_last_token([*rewards[:3], bad], mask)
        except InputError:
            continue
        yield Finding(stage=STAGE, place="place_on_last_token", evidence=f"a reward of {bad} is passed on")


class Letters:
    """A tokenizer whose token i is a digit, 2 ends a response, and 0 is padding."""

    def decode_response(self, ids) -> str:
        """Digits up to the end token."""
        ids = list(ids)
        return "".join(str(i - 10) for i in (ids[: ids.index(2)] if 2 in ids else ids))


def scorer(setting: Setting) -> Iterator[Finding]:
    """The stage from response tokens to token rewards: padding is not read, shaping counts tokens, places are right."""
    from alignment.rl import batch as batches
    from alignment.rl import stages

    # token 10 + d is the digit d; what stands behind the end is noise that would change the answer
    responses = torch.tensor(
        [[14, 12, 2, 17, 17, 17], [14, 11, 2, 0, 0, 0], [14, 12, 2, 0, 0, 0], [14, 12, 14, 12, 14, 12]]
    )
    lengths = [3, 3, 3, 6]
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    batch = batches.Batch(
        {"responses": responses, "response_mask": mask},
        {
            "data_source": ["reasoning_gym/chain_sum"] * 4,
            "ground_truth": ["42", "42", "42", "424242"],
            "metadata": [""] * 4,
        },
    )
    for shaped in (False, True):
        one = stages.Scorer.__new__(stages.Scorer)
        one._tokenizer, one._limit = Letters(), 6
        one._buffer = SimpleNamespace(enable=shaped, len=4, penalty_factor=0.5)
        done = one(batch)
        golden = torch.zeros(4, 6, dtype=torch.float64)
        for row, (n, score) in enumerate(zip(lengths, (1.0, -1.0, 1.0, 1.0))):
            golden[row, n - 1] = score - (0.5 * max(0, n - 2) / 4 if shaped else 0.0)
        yield from expect(
            done["score"] == [1.0, -1.0, 1.0, 1.0], stage=STAGE, place="Scorer.score", evidence=f"{done['score']}"
        )
        yield from differs(
            done["token_level_scores"].double(),
            golden,
            stage=STAGE,
            place="Scorer.token_level_scores",
            what=f"overlong buffer: {shaped}",
        )


CHECKS = (
    Check(
        name="rewards.placement",
        layer="unit-op",
        cost=0.001,
        run=placement,
        kept_because="which token carries a reward is no entry of the catalogue",
    ),
    Check(name="rewards.shaping", layer="unit-op", cost=0.003, run=shaping),
    Check(name="rewards.verdicts", layer="unit-op", cost=0.003, run=verdicts),
    Check(
        name="rewards.scorer",
        layer="unit-op",
        cost=0.004,
        run=scorer,
        kept_because="the seams above may be right and put together wrongly",
    ),
)
