"""Conversations of several turns, padding and ends of responses, against counting token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from alignment.faults.check import Check, Finding, Setting, expect
from alignment.numerics.random import portable_integers

UPDATE, ROLLOUT = "actor_update", "rollout"
MESSAGES = (
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4\n"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
)


def trajectories(setting: Setting) -> Iterator[Finding]:
    """Tokens as drawn, loss on drawn tokens only, log-probs beside them, and a budget that everything counts
    towards.
    """
    from alignment.rl import turns as product

    # ids with repeats that a tokenizer would merge, an assistant's turn in the prompt, an environment between turns
    plan = (
        ("system", 2, False),
        ("user", 3, False),
        ("assistant", 2, False),
        ("user", 1, False),
        ("assistant", 3, True),
        ("tool", 4, False),
        ("assistant", 2, True),
    )
    drawn = portable_integers(3, 6, (17,), seed=setting.seed, stream="turns/ids").tolist()
    trajectory, ids, mask, said = product.Trajectory(), [], [], []
    for role, count, generated in plan:
        tokens = tuple(drawn[len(ids) : len(ids) + count])
        log_probs = tuple(-0.1 * (i + 1) for i in range(count)) if generated else ()
        span = product.Span(token_ids=tokens, role=role, generated=generated, log_probs=log_probs)
        trajectory = trajectory.extended(span)
        ids += tokens
        mask += [int(generated)] * count
        said += log_probs or (0.0,) * count
    facts = (
        ("turns.next_input.token_ids", ROLLOUT, product.next_input(trajectory), tuple(ids)),
        ("turns.token_ids", ROLLOUT, trajectory.token_ids, tuple(ids)),
        ("turns.next_input.token_ids", ROLLOUT, product.next_input(trajectory, [9, 9]), (*ids, 9, 9)),
        ("turns.loss_mask", UPDATE, trajectory.loss_mask(), tuple(mask)),
        ("turns.rollout_log_probs", UPDATE, trajectory.rollout_log_probs(), tuple(said)),
        ("turns.prompt_length", "advantage", trajectory.prompt_length, 8),
        ("turns.group_key", "advantage", trajectory.group_key, tuple(ids[:8])),
    )
    for place, stage, found, golden in facts:
        yield from expect(found == golden, stage=stage, place=place, evidence=f"{found} instead of {golden}")
    for limit in (9, 11, 20, 4):
        left = max(0, limit - 9)
        found = trajectory.budget_left(limit)
        yield from expect(
            found == left,
            stage=ROLLOUT,
            place="turns.budget_left",
            evidence=f"{found} of {limit} left instead of {left}",
        )
        more = [(50 + i, -0.5) for i in range(30)]
        longer = product.continue_rollout(trajectory, more, max_response_length=limit)
        right = (*ids, *(t for t, _ in more[:left]))
        yield from expect(
            longer.token_ids == right,
            stage=ROLLOUT,
            place="turns.continue_rollout",
            evidence=f"{len(longer.token_ids)} tokens instead of {len(right)}",
        )


def templates(setting: Setting) -> Iterator[Finding]:
    """The text of training is that of inference up to the last character, whatever follows and however turns end."""
    from alignment.rl import turns as product

    golden = ""
    for count, message in enumerate(MESSAGES, start=1):
        golden += f"<|{message['role']}|>{message['content']}<eos>\n"
        shown = MESSAGES[:count]
        trained, asked = product.training_text(shown), product.render(shown, answer_next=True)
        for place, found, right in (
            ("turns.training_text", trained, golden),
            ("turns.render", asked, golden + "<|assistant|>"),
        ):
            yield from expect(found == right, stage=ROLLOUT, place=place, evidence=f"{found!r} instead of {right!r}")


def ends(setting: Setting) -> Iterator[Finding]:
    """Where responses end with any of several end tokens, also where the padding is one of them."""
    from alignment.rl import turns as product

    ids = portable_integers(4, 9, (5, 6), seed=setting.seed, stream="turns/ends")
    ids[0, 2], ids[1, 3], ids[2, 0], ids[3, 5] = 2, 3, 3, 2
    ids[0, 4] = 3
    for stops in ((2, 3), (3,), (2,)):
        found = product.mask_to_end(ids, eos_token_ids=stops).tolist()
        golden = []
        for row in ids.tolist():
            kept, over = [], False
            for token in row:
                kept.append(int(not over))
                over = over or token in stops
            golden.append(kept)
        yield from expect(
            found == golden, stage=ROLLOUT, place="turns.mask_to_end", evidence=f"end tokens {stops}: {found}"
        )
    responses = [[5, 6, 2], [7, 2, 2, 8, 2], [9]]
    for pad in (0, 2):
        padded, mask = product.pad_responses(responses, width=6, pad_token_id=pad)
        golden_mask = [[int(i < len(r)) for i in range(6)] for r in responses]
        golden_ids = [r + [pad] * (6 - len(r)) for r in responses]
        evidence = f"padding {pad}: {mask.tolist()}"
        yield from expect(
            mask.tolist() == golden_mask, stage="old_log_prob", place="turns.pad_responses.mask", evidence=evidence
        )
        evidence = f"padding {pad}: {padded.tolist()}"
        yield from expect(
            padded.tolist() == golden_ids, stage="old_log_prob", place="turns.pad_responses.ids", evidence=evidence
        )
        yield from expect(
            padded.dtype == torch.int64,
            stage="old_log_prob",
            place="turns.pad_responses.ids",
            evidence=f"{padded.dtype}",
        )


CHECKS = (
    Check(name="turns.trajectories", layer="unit-op", cost=0.001, run=trajectories),
    Check(name="turns.templates", layer="unit-op", cost=0.001, run=templates),
    Check(name="turns.ends", layer="unit-op", cost=0.001, run=ends),
)
