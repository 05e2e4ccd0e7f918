"""What the stages make of whole batches, against one sequence after the other without padding.

Prompts and responses are unequal in length, the temperature is not 1, and batches are cut by size, by tokens and
not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.reference import distributions
from alignment.faults.reference.toy_policy import ToyPolicy, forward_alone
from alignment.numerics.random import portable_integers, portable_normal

TEMPERATURE = 0.7
PROMPTS, RESPONSES = (3, 1, 5, 2, 4, 5), (4, 6, 1, 3, 2, 5)
PAD, VOCABULARY = 0, 13


def tensors(seed: int) -> dict[str, Tensor]:
    """Six samples, left padded prompts and right padded responses, each wider than any sample needs."""
    width, length = max(PROMPTS) + 3, max(RESPONSES) + 1
    drawn = portable_integers(3, VOCABULARY, (len(PROMPTS), width + length), seed=seed, stream="stages/ids")
    place = torch.arange(width + length)
    prompt, response = torch.tensor(PROMPTS)[:, None], torch.tensor(RESPONSES)[:, None]
    mask = ((place >= width - prompt) & (place < width + response)).long()
    ids = drawn * mask
    return {
        "prompts": ids[:, :width],
        "prompt_mask": mask[:, :width],
        "responses": ids[:, width:],
        "response_mask": mask[:, width:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }


def alone(model: ToyPolicy, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """``log_probs`` and ``entropy`` (or ``values``) [b, r] of every response, one sequence at a time."""
    shape = fields["responses"].shape
    names = ("values",) if model.values else ("log_probs", "entropy")
    results = {name: torch.zeros(shape, dtype=torch.float64) for name in names}
    with torch.no_grad():
        for row, (p, r) in enumerate(zip(PROMPTS, RESPONSES)):
            tokens = fields["input_ids"][row][fields["attention_mask"][row] != 0]
            said = forward_alone(model, tokens.tolist())[p - 1 : p + r - 1]
            if model.values:
                results["values"][row, :r] = said
                continue
            chosen = distributions.of_labels(said, tokens[p:], temperature=TEMPERATURE)
            results["log_probs"][row, :r], results["entropy"][row, :r] = chosen.log_probs, chosen.entropy
    return results


def slicing(setting: Setting) -> Iterator[Finding]:
    """Which logits, and which values, belong to which response token, and at what temperature."""
    from alignment.rl import critic, fused_head, stages

    fields = tensors(setting.seed)
    mask = fields["response_mask"] != 0
    policy, critic_model = (ToyPolicy(seed=setting.seed, values=v) for v in (False, True))
    golden = alone(policy, fields) | alone(critic_model, fields)
    forms = {
        "policy_outputs": ("old_log_prob", partial(stages.policy_outputs, policy, temperature=TEMPERATURE)),
        "fused_policy_outputs": (
            "old_log_prob",
            partial(fused_head.fused_policy_outputs, policy, temperature=TEMPERATURE, chunk_size=5),
        ),
        "value_outputs": ("advantage", partial(critic.value_outputs, critic_model)),
    }
    for name, (stage, form) in forms.items():
        for graded in (False, True):
            with torch.set_grad_enabled(graded):
                outputs = form(fields)
            what = "with gradients" if graded else "without gradients"
            for quantity, found in outputs.items():
                yield from differs(
                    found[mask],
                    golden[quantity][mask],
                    stage="actor_update" if graded and not stage == "advantage" else stage,
                    place=f"{name}.{quantity}",
                    what=what,
                )


def batching(setting: Setting) -> Iterator[Finding]:
    """A stage's outputs do not depend on how its batch is cut, ordered or padded, and are 0 behind a response."""
    from alignment.backends import golden_training
    from alignment.rl import batch as batches
    from alignment.rl import batching as cuts
    from alignment.rl import stages

    fields = tensors(setting.seed)
    policy = ToyPolicy(seed=setting.seed)
    golden = alone(policy, fields)
    engine = golden_training.GoldenTrainingEngine(
        policy, optimizer=None, device="cpu", outputs=partial(stages.policy_outputs, temperature=TEMPERATURE)
    )
    plans = {
        "whole": lambda b: cuts.micro_batches(cuts.token_counts(b), use_dynamic_bsz=False),
        "two samples each": lambda b: cuts.micro_batches(
            cuts.token_counts(b), use_dynamic_bsz=False, micro_batch_size=2
        ),
        "by tokens": lambda b: cuts.micro_batches(cuts.token_counts(b), use_dynamic_bsz=True, max_token_len=11),
    }
    mask = fields["response_mask"] != 0
    for order in (torch.arange(6), torch.tensor([4, 2, 0, 5, 1, 3])):
        batch = batches.Batch({name: tensor[order] for name, tensor in fields.items()})
        for name, plan in plans.items():
            outputs = stages.forward(engine, batch, plan, stage="old_log_prob")
            for quantity, found in outputs.items():
                where = {"stage": "old_log_prob", "place": f"forward.{quantity}"}
                yield from differs(found, golden[quantity][order] * mask[order], what=f"micro batches: {name}", **where)


def repeatable(setting: Setting) -> Iterator[Finding]:
    """Scoring has no randomness and no memory: twice is the same, and the update's first ratio is exactly 1."""
    from alignment.backends import golden_training
    from alignment.backends.training import OptimizerConfig
    from alignment.rl import batch as batches
    from alignment.rl import batching as cuts
    from alignment.rl import stages

    fields = tensors(setting.seed)
    policy = ToyPolicy(seed=setting.seed)
    policy.train()
    golden = alone(policy, fields)
    seen: list[Tensor] = []

    def loss(outputs, micro_batch):
        seen.append(outputs["log_probs"].detach().clone())
        return outputs["log_probs"].sum() * 0.0, {}

    whole = partial(cuts.micro_batches, use_dynamic_bsz=False)
    for stage, frozen in (("ref_log_prob", True), ("old_log_prob", False)):
        policy.requires_grad_(not frozen)
        engine = golden_training.GoldenTrainingEngine(
            policy,
            optimizer=None if frozen else OptimizerConfig(lr=0.0),
            device="cpu",
            outputs=partial(stages.policy_outputs, temperature=TEMPERATURE),
        )
        batch = batches.Batch(fields)
        scores = [
            stages.forward(engine, batch, lambda b: whole(cuts.token_counts(b)), stage=stage)["log_probs"] for _ in "ab"
        ]
        same = torch.equal(*scores)
        yield from expect(
            same,
            stage=stage,
            place="forward.log_probs",
            evidence=f"two scorings differ by {float((scores[0] - scores[1]).abs().max()):.3g}",
        )
        yield from differs(scores[0], golden["log_probs"], stage=stage, place="forward.log_probs")
        if not frozen:
            engine.update([stages.trim(batch)], loss, stage="update_actor")
            length = seen[0].shape[1]
            ratio = torch.exp(seen[0] - scores[0][:, :length])[fields["response_mask"][:, :length] != 0]
            yield from differs(
                ratio,
                torch.ones_like(ratio),
                stage=stage,
                place="forward.log_probs",
                what="ratio of the first inner step",
            )


def partitions(setting: Setting) -> Iterator[Finding]:
    """Micro batches, mini batches and ranks hold every sample once, within their budgets, and results find back."""
    from alignment.rl import batch as batches
    from alignment.rl import batching as cuts
    from alignment.rl import stages

    lengths = [a + b for a, b in zip(PROMPTS, RESPONSES)]
    fields = tensors(setting.seed)
    for rows in ([0, 2, 5], [1, 3]):
        part = {name: tensor[rows] for name, tensor in fields.items()}
        prompt, response = max(PROMPTS[i] for i in rows), max(RESPONSES[i] for i in rows)
        width = fields["prompts"].shape[1]
        trimmed = stages.trim(batches.Batch(part))
        for name, tensor in part.items():
            first, last = {"prompt": (width - prompt, width), "respon": (0, response)}.get(
                name[:6], (width - prompt, width + response)
            )
            same = torch.equal(trimmed[name], tensor[:, first:last])
            yield from expect(same, stage="old_log_prob", place=f"trim.{name}", evidence=f"rows {rows}")
    counted = cuts.token_counts(batches.Batch(fields))
    yield from expect(counted == lengths, stage="old_log_prob", place="batching.token_counts", evidence=f"{counted}")
    plans = {
        "micro_batches.size": (cuts.micro_batches(lengths, use_dynamic_bsz=False, micro_batch_size=4), None),
        "micro_batches.tokens": (cuts.micro_batches(lengths, use_dynamic_bsz=True, max_token_len=12), 12),
        "mini_batches": (cuts.mini_batches(6, 2, order=[3, 1, 5, 0, 2, 4]), None),
        "rank_shares": (cuts.rank_shares(lengths, 3), None),
        "rank_shares.balanced": (cuts.rank_shares(lengths, 3, balance=True), None),
        "balanced_partition": (cuts.balanced_partition(lengths, 4), None),
    }
    values = portable_normal((6, 3), seed=setting.seed, stream="stages/partitions")
    for name, (partition, budget) in plans.items():
        once = sorted(i for rows in partition.parts for i in rows) == list(range(6))
        where = {"stage": "actor_update", "place": f"batching.{name}"}
        yield from expect(once, evidence=f"samples {partition.parts}", **where)
        if not once:
            continue
        if budget:
            largest = max(sum(lengths[i] for i in rows) for rows in partition.parts)
            yield from expect(largest <= budget, evidence=f"{largest} tokens exceed {budget}", **where)
        found = partition.restore([values[list(rows)] for rows in partition.parts])
        yield from differs(
            found, values, stage="old_log_prob", place="batching.Partition.restore", what=f"order of {name}"
        )
        parts = [part["x"] for part in partition.split(batches.Batch({"x": values}))]
        right = torch.cat([values[list(rows)] for rows in partition.parts])
        yield from differs(torch.cat(parts), right, stage="old_log_prob", place="batching.Partition.split", what=name)
    equal = cuts.rank_shares(lengths, 3, balance=True)
    sizes = [len(rows) for rows in equal.parts]
    yield from expect(
        len(set(sizes)) == 1, stage="actor_update", place="batching.rank_shares", evidence=f"sizes {sizes}"
    )


class Recorded:
    """A rollout engine that answers with given responses and remembers what it was asked."""

    def __init__(self, fields: dict[str, Tensor], log_probs: Tensor) -> None:
        self.fields, self.log_probs = fields, log_probs

    def generate(self, prompts, prompt_mask, params, keys):
        """The responses, in the order of the prompts."""
        self.asked = prompts, prompt_mask, params, keys
        return SimpleNamespace(
            responses=self.fields["responses"], response_mask=self.fields["response_mask"], log_probs=self.log_probs
        )


def rollout(setting: Setting) -> Iterator[Finding]:
    """What is asked of an engine, and what is made of its answer: ids, masks, positions and log-probs in their
    places.
    """
    from alignment.rl import batch as batches
    from alignment.rl import stages

    fields = tensors(setting.seed)
    log_probs = -portable_normal(fields["responses"].shape, seed=setting.seed, stream="stages/rollout").abs()
    engine = Recorded(fields, log_probs)
    keys = portable_integers(0, 1000, (len(PROMPTS),), seed=setting.seed, stream="stages/keys").tolist()
    given = batches.Batch(
        {"prompts": fields["prompts"], "prompt_mask": fields["prompt_mask"]},
        {"sample_key": keys},
        {"eos_token_id": 2, "pad_token_id": PAD},
    )
    settings = SimpleNamespace(temperature=TEMPERATURE, top_p=0.9, top_k=7, calculate_log_probs=True)
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=settings),
        trainer=SimpleNamespace(seed=setting.seed),
        data=SimpleNamespace(max_response_length=fields["responses"].shape[1]),
    )
    done = stages.generate(engine, given, config)
    prompts, mask, params, sent = engine.asked
    facts = {
        "temperature": (params.temperature, TEMPERATURE),
        "top_p": (params.top_p, 0.9),
        "top_k": (params.top_k, 7),
        "eos_token_id": (params.eos_token_ids, (2,)),
        "max_new_tokens": (params.max_new_tokens, fields["responses"].shape[1]),
        "sample_key": (sent.tolist(), keys),
        "prompts": (
            [row[m != 0].tolist() for row, m in zip(prompts, mask)],
            [row[m != 0].tolist() for row, m in zip(fields["prompts"], fields["prompt_mask"])],
        ),
    }
    real = fields["attention_mask"] != 0
    for name in ("input_ids", "responses", "response_mask", "attention_mask"):
        facts[name] = (done[name].tolist(), fields[name].tolist())
    facts["position_ids"] = (done["position_ids"][real].tolist(), fields["position_ids"][real].tolist())
    facts["rollout_log_probs"] = (done["rollout_log_probs"].tolist(), log_probs.tolist())
    for name, (found, golden) in facts.items():
        yield from expect(
            found == golden, stage="rollout", place=f"generate.{name}", evidence=f"{found} instead of {golden}"
        )


def probabilities(setting: Setting) -> Iterator[Finding]:
    """What stages give are log-probs ≤ 0 and entropies within 0 … ln V."""
    from alignment.rl import stages

    with torch.no_grad():
        outputs = stages.policy_outputs(ToyPolicy(seed=setting.seed), tensors(setting.seed), temperature=TEMPERATURE)
    top, low, high = outputs["log_probs"].max(), outputs["entropy"].min(), outputs["entropy"].max()
    where = {"stage": "old_log_prob"}
    yield from expect(float(top) <= 0, place="policy_outputs.log_probs", evidence=f"a log-prob of {top:.3g}", **where)
    inside = 0 <= float(low) and float(high) <= math.log(VOCABULARY)
    yield from expect(inside, place="policy_outputs.entropy", evidence=f"from {low:.3g} to {high:.3g}", **where)


CHECKS = (
    Check(
        name="stages.partitions",
        layer="unit-op",
        cost=0.001,
        run=partitions,
        kept_because="samples that are lost or doubled by a cut are no entry of the catalogue",
    ),
    Check(
        name="stages.probabilities",
        layer="unit-op",
        cost=0.002,
        run=probabilities,
        kept_because="it holds without any reference, on any subject",
    ),
    Check(
        name="stages.rollout",
        layer="unit-op",
        cost=0.002,
        run=rollout,
        kept_because="positions and masks made behind an engine's answer feed every later stage",
    ),
    Check(name="stages.slicing", layer="unit-op", cost=0.01, run=slicing),
    Check(
        name="stages.batching",
        layer="unit-op",
        cost=0.02,
        run=batching,
        kept_because="outputs that depend on the cut of a batch, of which losses see the sum",
    ),
    Check(
        name="stages.repeatable",
        layer="unit-op",
        cost=0.015,
        run=repeatable,
        kept_because="it needs no reference: two scorings agree, and the first ratio is 1",
    ),
)
