"""What the communication test makes a step of: the policy, the critic of PPO, or the student of a distillation.

A role says how its configuration is made comparable, draws a batch whose step depends on the weights, and makes it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from alignment.backends.training import UpdateReport
from alignment.errors import InputError
from alignment.models.config import ModelConfig
from alignment.numerics.random import portable_integers, portable_normal, portable_uniform
from alignment.rl.aggregation import Counts
from alignment.rl.batch import Batch
from alignment.rl.config import RunConfig, TrainConfig
from alignment.rl.gkd_config import GkdConfig, TeacherKind

SEED = 20_241_201
_STILL = torch.finfo(torch.float32).tiny
"""A learning rate has to be positive; a weight plus this is the weight."""


class TrainedRole(Protocol):
    """How one optimizer step of a role is made.

    Attributes:
        name: of the role, for people; the policy's checks carry none.
        worker: role of the worker that holds it.
        stage: of the update.
        loss: name of the loss among an update's metrics.
    """

    name: str
    worker: str
    stage: str
    loss: str

    def comparable(self, config: Any) -> Any:
        """``config`` with micro batches that are the same rows however they are shared out, and weights that stay."""

    def micro_batch(self, config: Any) -> int:
        """Rows of a micro batch, of a configuration that is comparable."""

    def draw(self, config: Any, model: ModelConfig, *, rows: int) -> Batch:
        """Rows of different lengths."""

    def prepare(self, group: Any, batch: Batch) -> Batch:
        """The batch as the update takes it, with what the weights say about it beforehand."""

    def update(self, group: Any, batch: Batch, whole: Batch) -> Sequence[UpdateReport]:
        """One optimizer step on ``batch``, which is ``whole`` or rows of it: every rank's report."""


class Policy:
    """The policy under the loss of its configuration."""

    name, worker, stage, loss = "", "actor", "update_actor", "actor/loss"

    def comparable(self, config: TrainConfig) -> TrainConfig:
        actor = config.actor_rollout_ref.actor
        micro = actor.ppo_micro_batch_size_per_gpu or 1
        still = {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": micro}
        actor = dataclasses.replace(actor, **still, optim=_still(actor.optim))
        critic = config.critic
        if config.use_critic:
            micro_critic = {**still, "ppo_micro_batch_size_per_gpu": critic.ppo_micro_batch_size_per_gpu or micro}
            critic = dataclasses.replace(critic, **micro_critic, optim=_still(critic.optim))
        return dataclasses.replace(_settled(config, actor, micro), critic=critic)

    def micro_batch(self, config: TrainConfig) -> int:
        return config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu

    def draw(self, config: TrainConfig, model: ModelConfig, *, rows: int) -> Batch:
        return drawn_batch(config, model, rows=rows)

    def prepare(self, group: Any, batch: Batch) -> Batch:
        """Old log-probs a little off the policy's: with a ratio of 1 the loss would not depend on the weights."""
        old = group.call("old_log_prob", batch)["old_log_probs"]
        moved = old + 0.05 * _noise(old, "communication/old")
        return batch.add({"old_log_probs": moved, "ref_log_prob": old})

    def update(self, group: Any, batch: Batch, whole: Batch) -> list[UpdateReport]:
        counts = [Counts.of(whole["response_mask"])]
        return [of_rank[0] for of_rank in group.call(self.stage, batch, mini_batches=1, counts=counts)]


class Critic(Policy):
    """The value model of PPO."""

    name, worker, stage, loss = "critic", "critic", "update_critic", "critic/vf_loss"

    def micro_batch(self, config: TrainConfig) -> int:
        return config.critic.ppo_micro_batch_size_per_gpu

    def prepare(self, group: Any, batch: Batch) -> Batch:
        """Values a little off the critic's, and returns that are off by about 1."""
        values = group.call("values", batch)["values"]
        moved = values + 0.05 * _noise(values, "communication/values")
        return batch.add({"values": moved, "returns": values + _noise(values, "communication/returns")})


class Student:
    """The student of a distillation, under what its teacher says; in place of replicas' tables there are drawn ones."""

    name, worker, stage, loss = "student", "actor", "update_student", "student/loss"

    def comparable(self, config: GkdConfig) -> GkdConfig:
        actor = config.actor_rollout_ref.actor
        micro = config.gkd.micro_batch_size or 1
        settled = _settled(config, dataclasses.replace(actor, optim=_still(actor.optim)), micro)
        return dataclasses.replace(settled, gkd=dataclasses.replace(config.gkd, micro_batch_size=micro))

    def micro_batch(self, config: GkdConfig) -> int:
        return config.gkd.micro_batch_size

    def draw(self, config: GkdConfig, model: ModelConfig, *, rows: int) -> Batch:
        from alignment.rl.distill_loss import IGNORED, active_positions
        from alignment.rl.gkd_stages import TABLES

        drawn = drawn_batch(config, model, rows=rows)
        # Right padded, as distillation encodes its samples.
        lengths = drawn["attention_mask"].sum(1).tolist()
        prompts = drawn["prompt_mask"].sum(1).tolist()
        width = max(lengths)
        mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
        ids = torch.zeros(rows, width, dtype=torch.int64)
        for row, length in enumerate(lengths):
            ids[row, :length] = drawn["input_ids"][row][drawn["attention_mask"][row] == 1]
        answers = (torch.arange(width) >= torch.tensor(prompts).unsqueeze(1)) & (mask == 1)
        fields = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "labels": ids.masked_fill(~answers, IGNORED),
            "dataset_response": torch.ones(rows, dtype=torch.int64),
            "row": torch.arange(rows),
        }
        if config.teacher_kind is TeacherKind.REPLICAS:
            active = active_positions(fields["labels"])
            values, indices = _drawn_tables(rows, width, config.gkd.gkd_logits_topk, model.vocab_size)
            fields |= {TABLES[0]: values.masked_fill(~active.unsqueeze(-1), float("-inf")), TABLES[1]: indices}
        return Batch(fields, meta={**drawn.meta, "prompt_id": list(drawn["uid"])}, info=drawn.info)

    def prepare(self, group: Any, batch: Batch) -> Batch:
        return batch

    def update(self, group: Any, batch: Batch, whole: Batch) -> list[UpdateReport]:
        from alignment.rl.gkd_stages import TABLES, count

        # What the teacher says stays on the ranks until the update takes it.
        asked = batch if TABLES[0] in batch else group.call("teacher_log_prob", batch)
        return [answer.report for answer in group.call(self.stage, asked, counts=count(whole))]


def roles_of(config: RunConfig) -> tuple[TrainedRole, ...]:
    """What a run trains: the policy, with the critic where there is one; or the student.

    Raises:
        InputError: a student that is its own teacher until its adapter has learnt something.
    """
    if not isinstance(config, GkdConfig):
        return (Policy(), Critic()) if config.use_critic else (Policy(),)
    if config.teacher_kind is TeacherKind.ADAPTER_DISABLED:
        raise InputError(
            "before its first step a student is its own teacher without its adapter: there is no gradient to compare",
            where="gkd.teacher_model",
            expected="another checkpoint than the student's",
            found=config.gkd.teacher_model or "null",
            next_step="name one for this test: alignment communication --run RUN gkd.teacher_model=CHECKPOINT",
        )
    return (Student(),)


def drawn_batch(config: RunConfig, model: ModelConfig, *, rows: int) -> Batch:
    """``rows`` prompts and responses of different lengths, with advantages that do not cancel."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    draw = partial(portable_integers, seed=SEED)
    ids = draw(0, model.vocab_size, (rows, prompt + response), stream="communication/ids")
    padding = draw(0, max(1, prompt // 2), (rows,), stream="communication/prompts").tolist()
    cut = draw(0, max(1, response // 2), (rows,), stream="communication/responses").tolist()
    mask = torch.ones(rows, prompt + response, dtype=torch.int64)
    for row in range(rows):
        mask[row, : padding[row]] = 0
        mask[row, prompt + response - cut[row] :] = 0
    return Batch(
        {
            "prompts": ids[:, :prompt],
            "prompt_mask": mask[:, :prompt],
            "responses": ids[:, prompt:],
            "response_mask": mask[:, prompt:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "advantages": 0.5
            + portable_uniform((rows, response), seed=SEED, stream="communication/advantages", dtype=torch.float32),
        },
        meta={"uid": [str(row) for row in range(rows)]},
        info={"step": 1},
    )


def _drawn_tables(rows: int, width: int, topk: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and tokens [rows, width, k] of a teacher; the tokens of a position differ, the likeliest is first.

    Only what is kept is drawn: over a vocabulary of 10⁵ tokens the whole distribution is megabytes a position.
    """
    k = min(topk, vocabulary)
    # One draw more stands for all tokens that are left out: the rest of the probability is theirs.
    said = portable_normal(
        (rows, width, min(k + 1, vocabulary)), seed=SEED, stream="communication/teacher", dtype=torch.float32
    )
    values = torch.log_softmax(said, -1)[..., :k].sort(dim=-1, descending=True).values
    start = portable_integers(0, vocabulary, (rows, width, 1), seed=SEED, stream="communication/teacher/tokens")
    # No common divisor, so that a token comes again only after all others; wide, so that every shard has some.
    stride = next(step for step in itertools.count(vocabulary // k) if math.gcd(step, vocabulary) == 1)
    return values, (start + stride * torch.arange(k)) % vocabulary


def _noise(like: torch.Tensor, stream: str) -> torch.Tensor:
    return portable_normal(tuple(like.shape), seed=SEED, stream=stream, dtype=torch.float32).to(like)


def _still(optim: Any) -> Any:
    return dataclasses.replace(optim, lr=_STILL, weight_decay=0.0, lr_warmup_steps=0)


def _settled(config: Any, actor: Any, micro: int) -> Any:
    """``config`` with its actor, and every forward pass cut into micro batches of as many rows."""
    policy = config.actor_rollout_ref
    cut = {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": micro}
    rollout, ref = dataclasses.replace(policy.rollout, **cut), dataclasses.replace(policy.ref, **cut)
    trainer = dataclasses.replace(config.trainer, balance_batch=False, save_freq=0, resume_mode="disable")
    policy = dataclasses.replace(policy, actor=actor, rollout=rollout, ref=ref)
    return dataclasses.replace(config, actor_rollout_ref=policy, trainer=trainer)
