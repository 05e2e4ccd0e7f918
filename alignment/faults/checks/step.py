"""A whole training step through the stages of a worker: contracts between them, values of each, gradients at the end.

Groups of two samples, a reference that is another model than the policy, rewards of both signs, two mini batches,
and micro batches by tokens. Parts may each be right and be put together wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.checks import rewards, training
from alignment.faults.checks import stages as samples
from alignment.faults.reference import distributions, objectives
from alignment.faults.reference.toy_policy import ToyPolicy, forward_alone
from alignment.numerics.random import portable_integers, portable_normal

EOS, PAD = 2, 0
PROMPTS, LENGTHS = (3, 3, 1, 1, 5, 5), (4, 2, 6, 3, 1, 4)
WIDTH, LONGEST = 7, 6
RIGHT = (True, False, False, True, True, True)
UID = ("a", "a", "b", "b", "c", "c")


def _tensors(seed: int) -> dict[str, Tensor]:
    prompts = portable_integers(3, 13, (3, WIDTH), seed=seed, stream="step/prompts").repeat_interleave(2, 0)
    responses = portable_integers(10, 13, (6, LONGEST), seed=seed, stream="step/responses")
    n = torch.tensor(LENGTHS)[:, None]
    prompt_mask = (torch.arange(WIDTH) >= WIDTH - torch.tensor(PROMPTS)[:, None]).long()
    response_mask = (torch.arange(LONGEST) < n).long()
    ended = torch.tensor([length < LONGEST for length in LENGTHS])
    responses = torch.where((torch.arange(LONGEST) == n - 1) & ended[:, None], EOS, responses) * response_mask
    attention = torch.cat([prompt_mask, response_mask], 1)
    return {
        "prompts": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts * prompt_mask, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }


def _scored(model: ToyPolicy, fields: dict[str, Tensor]) -> Tensor:
    result = torch.zeros(6, LONGEST, dtype=torch.float64)
    with torch.no_grad():
        for row, (p, r) in enumerate(zip(PROMPTS, LENGTHS)):
            tokens = fields["input_ids"][row][fields["attention_mask"][row] != 0]
            logits = forward_alone(model, tokens.tolist())[p - 1 : p + r - 1]
            result[row, :r] = distributions.of_labels(logits, tokens[p:], temperature=samples.TEMPERATURE).log_probs
    return result


def _worker(setting: Setting, policy: ToyPolicy, reference: ToyPolicy, actor: Any, said: Tensor, fields: dict) -> Any:
    from alignment.backends import golden_training
    from alignment.backends.training import OptimizerConfig
    from alignment.rl import stages, worker

    cut = {
        "log_prob_use_dynamic_bsz": True,
        "log_prob_micro_batch_size_per_gpu": None,
        "log_prob_max_token_len_per_gpu": 13,
    }
    how = {"device": "cpu", "outputs": partial(stages.policy_outputs, temperature=samples.TEMPERATURE)}
    one = worker.Worker.__new__(worker.Worker)
    one.config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(
            actor=actor,
            ref=SimpleNamespace(**cut),
            rollout=SimpleNamespace(
                temperature=samples.TEMPERATURE, top_p=1.0, top_k=-1, calculate_log_probs=True, **cut
            ),
        ),
        trainer=SimpleNamespace(seed=setting.seed),
        data=SimpleNamespace(max_response_length=LONGEST),
    )
    one.roles, one.rank, one.world_size, one._takes_turns = ("actor", "rollout", "reference", "reward"), 0, 1, False
    one.engine = samples.Recorded(fields, said)
    optimizer, watched = OptimizerConfig(lr=0.0, weight_decay=0.0), training.Watched()
    one.actor = golden_training.GoldenTrainingEngine(policy, optimizer=optimizer, ranks=watched, **how)
    one.reference = golden_training.GoldenTrainingEngine(reference, optimizer=None, **how)
    one.scorer = stages.Scorer.__new__(stages.Scorer)
    one.scorer._tokenizer, one.scorer._limit = rewards.Letters(), LONGEST
    one.scorer._buffer = SimpleNamespace(enable=False)
    return one, watched


def whole(setting: Setting) -> Iterator[Finding]:
    """Rollout, reward, both log-probs, advantages, update."""
    from alignment.rl import advantages, aggregation, config, contracts
    from alignment.rl import batch as batches

    policy, reference = ToyPolicy(seed=setting.seed), ToyPolicy(seed=setting.seed)
    for name, weight in reference.named_parameters():
        weight.data += 0.1 * portable_normal(weight.shape, seed=setting.seed, stream=f"step/{name}")
    fields = _tensors(setting.seed)
    mask = fields["response_mask"]
    golden = {"old_log_probs": _scored(policy, fields), "ref_log_prob": _scored(reference, fields)}
    actor = config.ActorConfig(
        loss_agg_mode="token-mean",
        clip_ratio_low=training.LOW,
        clip_ratio_high=training.HIGH,
        clip_ratio_c=training.C,
        entropy_coeff=training.ENTROPY,
        use_kl_loss=True,
        kl_loss_coef=training.KL,
        ppo_mini_batch_size=2,
        loss_scale_factor=9,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=10,
    )
    said = golden["old_log_probs"].float()
    one, watched = _worker(setting, policy, reference, actor, said, fields)
    texts = [rewards.Letters().decode_response(row[:n]) for row, n in zip(fields["responses"].tolist(), LENGTHS)]
    meta = {
        "uid": list(UID),
        "prompt_id": list(UID),
        "sample_key": list(range(6)),
        "data_source": ["reasoning_gym/gcd"] * 6,
        "ground_truth": [text if right else "x" for text, right in zip(texts, RIGHT)],
        "metadata": [""] * 6,
    }
    info = {"n": 2, "eos_token_id": EOS, "pad_token_id": PAD}
    batch = batches.Batch({k: fields[k] for k in ("prompts", "prompt_mask")}, meta, info)
    totals = [1.0 if right and text else -1.0 for right, text in zip(RIGHT, texts)]
    algorithm = config.AlgorithmConfig(adv_estimator="grpo")
    spread = torch.tensor(objectives.group_advantages(totals, UID, normalise=True), dtype=torch.float64)[:, None] * mask
    placed = torch.zeros(6, LONGEST, dtype=torch.float64)
    placed[torch.arange(6), torch.tensor(LENGTHS) - 1] = torch.tensor(totals, dtype=torch.float64)
    for stage, run, expected in (
        ("rollout", one.rollout, {"rollout_log_probs": said}),
        ("reward", one.reward, {"token_level_scores": placed}),
        ("old_log_prob", one.old_log_prob, {"old_log_probs": golden["old_log_probs"]}),
        ("ref_log_prob", one.ref_log_prob, {"ref_log_prob": golden["ref_log_prob"]}),
        ("advantage", lambda b: advantages.compute_advantages(b, algorithm)[0], {"advantages": spread}),
    ):
        batch = run(batch)
        for name, right in expected.items():
            # advantages are rounded to the dtype of the rewards
            bound = torch.finfo(batch[name].dtype).eps if batch[name].dtype == torch.float32 else None
            yield from differs(batch[name], right.double(), stage=stage, place=f"step.{name}", bound=bound)
        try:
            contracts.check(stage, batch)
        except InputError as broken:
            yield Finding(stage=stage, place=f"contract · {broken.where}", evidence=str(broken))
    gap = (batch["rollout_log_probs"].double() - batch["old_log_probs"]).abs().max()
    yield from expect(
        float(gap) <= float(said.abs().max()) * torch.finfo(torch.float32).eps,
        stage="old_log_prob",
        place="step.rollout_log_probs",
        evidence=f"rollout and training differ by {float(gap):.3g}",
    )
    minis = batch.chunk(3)
    counts = [aggregation.Counts.of(mini["response_mask"]) for mini in minis]
    one.update_actor(batch, 3, counts)
    for number, (mini, found) in enumerate(zip(minis, watched.seen, strict=True)):
        right = training.reference_gradients(
            policy, {k: v.double() if v.is_floating_point() else v for k, v in mini.tensors.items()}, "token-mean"
        )
        size = max(float(g.abs().max()) for g in right.values())
        for name, gradient in zip(right, found):
            yield from differs(
                gradient,
                right[name],
                stage="actor_update",
                place=f"step.update_actor.{name}",
                what=f"mini batch {number}",
                scale=size,
            )


CHECKS = (
    Check(
        name="step.whole",
        layer="layer-grad",
        cost=0.05,
        run=whole,
        kept_because="contracts between the stages, and parts that are right and put together wrongly",
    ),
)
