"""What each stage does to its batch, given an engine: the arithmetic between batch fields and engine calls.

A stage gets whole rows and answers with whole rows. In between they are cut into micro batches, by one rule for
training and inference (:mod:`alignment.rl.batching`), and each is trimmed to its longest prompt and response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from alignment.backends.rollout import RolloutEngine, SamplingParams
from alignment.backends.training import LossFunction, MicroBatch, Outputs, TrainingEngine, UpdateReport
from alignment.rl.aggregation import Counts, masked_mean
from alignment.rl.batch import Batch
from alignment.rl.batching import Partition, micro_batches, token_counts
from alignment.rl.config import ActorConfig, CriticConfig, RefConfig, RolloutConfig, RunConfig, TrainConfig
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_stages import outputs_of_student
from alignment.rl.log_prob import log_probs_and_entropy, response_logits
from alignment.rl.losses import ActorLoss, CriticLoss
from alignment.rl.scoring import score_responses
from alignment.rl.shaping import overlong_reward, place_on_last_token
from alignment.rl.tokenizer import Tokenizer

PROMPT_SIDE = ("prompts", "prompt_mask")
WHOLE = ("input_ids", "attention_mask", "position_ids")


def policy_outputs(model: nn.Module, micro_batch: MicroBatch, *, temperature: float) -> Outputs:
    """``log_probs`` and ``entropy`` [b,r] of the responses at ``temperature``."""
    logits = model(
        micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"], position_ids=micro_batch["position_ids"]
    )
    responses = micro_batch["responses"]
    logits = response_logits(logits, responses.shape[1])
    log_probs, entropy = log_probs_and_entropy(logits, responses, temperature=temperature)
    return {"log_probs": log_probs, "entropy": entropy}


def outputs_of_policy(config: RunConfig) -> Callable[[nn.Module, MicroBatch], Outputs]:
    """How the policy's model answers a micro batch under ``config``: from logits, straight from hidden states, or as
    teacher and student of a distillation.
    """
    if isinstance(config, GkdConfig):
        return outputs_of_student(config)
    policy = config.actor_rollout_ref
    if policy.model.use_fused_kernels:
        from alignment.rl.fused_head import fused_policy_outputs

        return partial(fused_policy_outputs, temperature=policy.rollout.temperature)
    return partial(policy_outputs, temperature=policy.rollout.temperature)


def generate(engine: RolloutEngine, batch: Batch, config: RunConfig) -> Batch:
    """The rollout stage: one response per row. The draws of a row follow from its ``sample_key`` and the run's seed."""
    rollout = config.actor_rollout_ref.rollout
    params = SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=config.trainer.seed,
        max_new_tokens=config.data.max_response_length,
        eos_token_id=batch.info["eos_token_id"],
        pad_token_id=batch.info["pad_token_id"],
    )
    prompts, prompt_mask = batch["prompts"], batch["prompt_mask"]
    width = int(prompt_mask.sum(1).max())
    made = engine.generate(prompts[:, -width:], prompt_mask[:, -width:], params, torch.tensor(batch["sample_key"]))
    responses, response_mask = made.responses.cpu(), made.response_mask.cpu()
    attention_mask = torch.cat([prompt_mask, response_mask.to(prompt_mask.dtype)], dim=1)
    fields = {
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
    }
    if rollout.calculate_log_probs:
        fields["rollout_log_probs"] = made.log_probs.cpu()
    return batch.add(fields)


class Scorer:
    """The reward stage: scores the decoded responses and places the reward on the last token of each.

    Adds ``token_level_scores`` and the lists ``score``, ``acc`` and, with the overlong buffer, ``overlong_reward``.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._tokenizer = Tokenizer(Path(config.actor_rollout_ref.model.path))
        self._limit = config.data.max_response_length
        self._buffer = config.reward_model.overlong_buffer

    def __call__(self, batch: Batch) -> Batch:
        lengths = batch["response_mask"].sum(1).tolist()
        texts = [self._tokenizer.decode_response(row[:n]) for row, n in zip(batch["responses"].tolist(), lengths)]
        scores = score_responses(
            batch["data_source"], texts, batch["ground_truth"], metadata=[m or None for m in batch["metadata"]]
        )
        meta = {"score": [s.score for s in scores], "acc": [s.acc for s in scores]}
        rewards = meta["score"]
        if self._buffer.enable:
            meta["overlong_reward"] = [
                overlong_reward(
                    n,
                    max_response_length=self._limit,
                    buffer_len=self._buffer.len,
                    penalty_factor=self._buffer.penalty_factor,
                )
                for n in lengths
            ]
            rewards = [a + b for a, b in zip(rewards, meta["overlong_reward"])]
        return batch.add({"token_level_scores": place_on_last_token(rewards, batch["response_mask"])}, meta)


Cut = Callable[[Batch], Partition]


def rollout_batching(config: TrainConfig) -> Cut:
    """How the old log-probs are batched."""
    return _log_prob_batching(config.actor_rollout_ref.rollout)


def reference_batching(config: TrainConfig) -> Cut:
    """How the reference's log-probs are batched."""
    return _log_prob_batching(config.actor_rollout_ref.ref)


def update_batching(settings: ActorConfig | CriticConfig) -> Cut:
    """How an update (and the critic's inference) is batched."""
    return lambda batch: micro_batches(
        token_counts(batch),
        use_dynamic_bsz=settings.use_dynamic_bsz,
        micro_batch_size=settings.ppo_micro_batch_size_per_gpu,
        max_token_len=settings.ppo_max_token_len_per_gpu,
    )


def _log_prob_batching(settings: RolloutConfig | RefConfig) -> Cut:
    return lambda batch: micro_batches(
        token_counts(batch),
        use_dynamic_bsz=settings.log_prob_use_dynamic_bsz,
        micro_batch_size=settings.log_prob_micro_batch_size_per_gpu,
        max_token_len=settings.log_prob_max_token_len_per_gpu,
    )


def forward(engine: TrainingEngine, batch: Batch, cut: Cut, *, stage: str) -> dict[str, torch.Tensor]:
    """The engine's outputs for all rows, in order, [b,r] each; 0 behind a response's end."""
    partition = cut(batch)
    mask = batch["response_mask"] != 0
    outputs = engine.forward([trim(part) for part in partition.split(batch)], stage=stage)
    whole = {}
    for name in outputs[0]:
        parts = [nn.functional.pad(o[name], (0, mask.shape[1] - o[name].shape[1])) for o in outputs]
        whole[name] = partition.restore(parts).masked_fill(~mask, 0.0)
    return whole


def update(
    engine: TrainingEngine,
    mini_batches: Sequence[Batch],
    counts: Sequence[Counts],
    cut: Cut,
    *,
    stage: str,
    loss: Callable[[Counts], LossFunction],
) -> list[UpdateReport]:
    """One optimizer step per mini batch; ``counts`` are those of each whole mini batch over all ranks."""
    return [
        engine.update([trim(part) for part in cut(mini).split(mini)], loss(count), stage=stage)
        for mini, count in zip(mini_batches, counts, strict=True)
    ]


def actor_loss(config: TrainConfig, counts: Counts) -> LossFunction:
    """The policy's loss, with one metric more: ``actor/pg_scale``, the mean of |advantage · ratio| over tokens.

    The policy loss itself is near 0 by construction on the first update; differences of it are judged on this scale.
    """
    loss = ActorLoss(config=config.actor_rollout_ref.actor, counts=counts)

    def scaled(outputs: Outputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        value, metrics = loss(outputs, micro_batch)
        ratio = torch.exp(outputs["log_probs"].detach() - micro_batch["old_log_probs"])
        size = (micro_batch["advantages"] * ratio).abs()
        return value, {**metrics, "actor/pg_scale": masked_mean(size, micro_batch["response_mask"], counts=counts)}

    return scaled


def critic_loss(config: TrainConfig, counts: Counts) -> LossFunction:
    """The critic's loss."""
    return CriticLoss(
        config=config.critic, counts=counts, loss_scale_factor=config.actor_rollout_ref.actor.loss_scale_factor
    )


def trim(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a micro batch, cut to its longest prompt (from the left) and response (from the right)."""
    width = batch["prompts"].shape[1]
    mask = batch["attention_mask"] != 0
    prompt = int(mask[:, :width].sum(1).max())
    response = int(mask[:, width:].sum(1).max())
    tensors = {}
    for name, tensor in batch.tensors.items():
        if name in PROMPT_SIDE:
            tensors[name] = tensor[:, width - prompt :]
        elif name in WHOLE:
            tensors[name] = tensor[:, width - prompt : width + response]
        else:
            tensors[name] = tensor[:, :response]
    return tensors
