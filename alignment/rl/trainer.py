"""The DAPO trainer: the driver of a training run, readable from top to bottom in the order of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.backends.training import UpdateReport
from alignment.errors import InputError
from alignment.numerics.curve_run import CurveStep
from alignment.numerics.random import portable_key, portable_permutation
from alignment.rl.advantages import compute_advantages
from alignment.rl.aggregation import Counts
from alignment.rl.batch import Batch
from alignment.rl.batching import mini_batches
from alignment.rl.config import DEVICE_ONLY_FIELDS, TrainConfig
from alignment.rl.contracts import CONTRACTS, check
from alignment.rl.data import Prompt, PromptSampler, PromptSet, prompt_batch
from alignment.rl.driver import Driver, Progress, Silence  # noqa: F401  (engines of other projects take it from here)
from alignment.rl.executor import WorkerGroup
from alignment.rl.filtering import DynamicSampling
from alignment.rl.kl import KlController
from alignment.rl.metrics import (
    add_shares,
    batch_metrics,
    log_prob_gap,
    mean_over_updates,
    sampling_metrics,
)
from alignment.rl.mock_rollout import RecordedRollouts
from alignment.rl.observers import DriverObserver
from alignment.rl.tokenizer import Tokenizer

GAP = "training/rollout_log_probs_abs_diff_mean"
# A resumed run may go on for longer, and may save and log otherwise; everything else has to be what it was.
FREE_ON_RESUME = DEVICE_ONLY_FIELDS | {"trainer.total_training_steps", "trainer.total_epochs"}


class DapoTrainer(Driver):
    """Trains a policy by DAPO, GRPO or PPO, whichever the configuration describes.

    Args:
        config: the configuration.
        groups: worker group of each role.
        prompts: what it trains on.
        tokenizer: of the policy.
        checkpoints: directory of checkpoints.
        recorded: recorded rollouts to replay or to write, or None.
        generates: whether the workers have an inference engine.
        fingerprint: what a checkpoint has to agree with when it is resumed, flat.
        progress: told about stages and steps.
        observers: told about the stages that run here.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        groups: Mapping[str, WorkerGroup],
        prompts: PromptSet,
        tokenizer: Tokenizer,
        checkpoints: Path,
        recorded: RecordedRollouts | None = None,
        generates: bool = True,
        fingerprint: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        observers: Sequence[DriverObserver] = (),
    ) -> None:
        super().__init__(
            config,
            groups=groups,
            total_steps=total_steps(config, prompts),
            checkpoints=checkpoints,
            fingerprint=resume_fingerprint(config) if fingerprint is None else fingerprint,
            generates=generates,
            progress=progress,
        )
        self.tokenizer, self.recorded, self.observers = tokenizer, recorded, observers
        filtering, data = config.algorithm.filter_groups, config.data
        regenerates = filtering.enable and filtering.mode == "regenerate"
        self.sampler = PromptSampler(
            prompts,
            batch_size=data.gen_batch_size if regenerates else data.train_batch_size,
            seed=data.seed,
            shuffle=data.shuffle,
        )
        control = config.algorithm.kl_ctrl
        self.kl = KlController(
            kind=control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon
        )

    def _before_first_step(self) -> None:
        self._sync_weights()

    def _state(self) -> dict[str, Any]:
        return {"data": self.sampler.state_dict(), "kl_coef": self.kl.value}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.kl.value = state["kl_coef"]
        self.sampler.load_state_dict(state["data"])

    # --- one step ----------------------------------------------------------------------------------------------------

    def _train_step(self) -> tuple[dict[str, float], dict[str, Any]]:
        config = self.config
        batch, generated, sampling = self._collect()
        batch = self._stage("actor", "old_log_prob", batch, require=("entropys",))
        if config.use_reference:
            batch = self._stage("reference", "ref_log_prob", batch)
        if config.use_critic:
            batch = self._stage("critic", "values", batch)
        batch, metrics = self._advantage(batch)
        metrics |= batch_metrics(batch) | sampling_metrics(sampling, batch)
        if "rollout_log_probs" in batch:
            metrics |= log_prob_gap(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
        if config.use_critic:
            metrics |= self._update("critic", batch)
        metrics |= self._update("actor", batch)
        self._sync_weights()
        return metrics, group_statistics(self.step, generated, sampling, metrics)

    def _collect(self) -> tuple[Batch, Batch, DynamicSampling]:
        """Prompts → rollout → reward, again until enough groups qualify where dynamic sampling is on.

        Returns what is trained on, what the curves are drawn from, and how it was filtered.
        """
        filtering, data = self.config.algorithm.filter_groups, self.config.data
        sampling = DynamicSampling(
            filtering, train_batch_size=data.train_batch_size, gen_batch_size=data.gen_batch_size
        )
        rounds: list[Batch] = []
        while count := sampling.prompts_wanted():
            rounds.append(self._generate_and_score(self._next_prompts(count, sampling), attempt=len(rounds)))
            sampling.offer(rounds[-1])
        # How much of a reserve is used depends on the outcome: with it two devices could not be paired.
        shown = rounds[:1] if filtering.mode == "reserve" else rounds
        return sampling.take(), Batch.concat(shown), sampling

    def _next_prompts(self, count: int, sampling: DynamicSampling) -> Sequence[Prompt]:
        if sampling.rounds and self.config.algorithm.filter_groups.mode == "reserve":
            return self.sampler.reserve(self.step, count)
        return self.sampler.next_batch()

    def _generate_and_score(self, prompts: Sequence[Prompt], *, attempt: int) -> Batch:
        batch = self._expand(prompts, attempt)
        if self.recorded is not None and self.recorded.has(self.step, attempt):
            with self._timed("rollout"):
                batch = self.recorded.load(self.step, attempt, batch)
            check("rollout", batch)
            self._tell("rollout", None, batch)
        else:
            batch = self._stage("rollout", "rollout", batch)
            if self.recorded is not None:
                self.recorded.save(self.step, attempt, batch)
        return self._stage("reward", "reward", batch)

    def _expand(self, prompts: Sequence[Prompt], attempt: int) -> Batch:
        """Every prompt n times, each sample with the key its draws follow from."""
        n = self.config.actor_rollout_ref.rollout.n
        batch = prompt_batch(
            prompts, pad_token_id=self.tokenizer.pad_token_id, prompt_length=self.config.data.max_prompt_length
        )
        # A prompt may come up in two attempts of one step; its groups are two.
        batch = batch.add(meta={"uid": [f"{p}@{attempt}" for p in batch["prompt_id"]]}).repeat(n)
        keys = [portable_key(self.step, attempt, p, i % n) for i, p in enumerate(batch["prompt_id"])]
        facts = {
            "n": n,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            "step": self.step,
        }
        return batch.add(meta={"sample_key": keys}, info=facts)

    def _advantage(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        needed = ("old_log_probs", "ref_log_prob") if self.config.algorithm.use_kl_in_reward else ()
        check("advantage", batch, moment="before", require=needed + (("values",) if self.config.use_critic else ()))
        with self._timed("advantage"):
            before = batch
            batch, metrics = compute_advantages(batch, self.config.algorithm, kl_coef=self.kl.value)
        check("advantage", batch)
        self._tell("advantage", before, batch)
        if self.config.algorithm.use_kl_in_reward:
            self.kl.update(metrics["actor/reward_kl_penalty"], len(batch))
        return batch, metrics

    def _tell(self, stage: str, before: Batch | None, after: Batch) -> None:
        for observer in self.observers:
            observer.fields(self.step, stage, before, after)

    def _update(self, role: str, batch: Batch) -> dict[str, float]:
        """Epochs over mini batches, one optimizer step each."""
        stage, settings = (
            f"update_{role}",
            self.config.critic if role == "critic" else self.config.actor_rollout_ref.actor,
        )
        require = ("ref_log_prob",) if role == "actor" and self.config.actor_rollout_ref.actor.use_kl_loss else ()
        check(stage, batch, moment="before", require=require)
        contract, updates = CONTRACTS[stage], []
        batch = batch.select([*(f for f in (*contract.reads, *contract.optional) if f in batch), *contract.meta_reads])
        size = settings.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        with self._timed(stage):
            for epoch in range(settings.ppo_epochs):
                order = None
                if settings.shuffle:
                    stream = f"{stage}/{self.step}/{epoch}"
                    order = portable_permutation(len(batch), seed=self.config.trainer.seed, stream=stream).tolist()
                minis = mini_batches(len(batch), size, order=order).split(batch)
                counts = [Counts.of(mini["response_mask"]) for mini in minis]
                by_rank = self.groups[role].call(stage, Batch.concat(minis), mini_batches=len(minis), counts=counts)
                for reports in zip(*by_rank, strict=True):
                    self._note_workloads(stage, reports)
                    updates.append(one_update(role, reports))
        return mean_over_updates(updates)

def group_statistics(
    step: int, generated: Batch, sampling: DynamicSampling, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """The line of a step in ``groups.jsonl``: per-prompt statistics of what was generated, before any filter."""
    scalars = {"kept_fraction": sampling.kept_fraction, "generation_batches": sampling.rounds}
    if GAP in metrics:
        scalars["log_prob_gap"] = metrics[GAP]
    curve = CurveStep.from_samples(
        step=step,
        prompt_ids=generated["prompt_id"],
        uids=generated["uid"],
        scalars=scalars,
        values={
            "reward": generated["token_level_scores"].sum(1).tolist(),
            "score": generated["score"],
            "correctness": generated["acc"],
            "response_length": generated["response_mask"].sum(1).tolist(),
        },
    )
    return dataclasses.asdict(curve)


def one_update(role: str, reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Metrics of one optimizer step from the reports of its ranks: shares add up, the rest is equal on every rank.

    Raises:
        InputError: the gradient norm differs between ranks, so from here on they would hold different weights.
    """
    norms = [report.grad_norm for report in reports]
    if len(set(norms)) > 1:
        raise InputError(
            "the ranks disagree about the gradient after it was added up over them",
            where=f"update_{role}",
            expected="one gradient norm",
            found=", ".join(f"rank {rank}: {norm!r}" for rank, norm in enumerate(norms)),
            next_step="compare the collective operators with gradient accumulation on one rank",
        )
    shares = add_shares(report.metrics for report in reports)
    return {**shares, f"{role}/grad_norm": reports[0].grad_norm, f"{role}/lr": reports[0].learning_rate}


def total_steps(config: TrainConfig, prompts: PromptSet) -> int:
    """Training steps of the run: as configured, else all of ``total_epochs``."""
    return config.trainer.total_training_steps or config.trainer.total_epochs * (
        len(prompts) // config.data.train_batch_size
    )


def resume_fingerprint(config: TrainConfig) -> dict[str, Any]:
    """Everything that has to be equal for a run to be continued, flat."""
    schedules = {config.actor_rollout_ref.actor.optim.lr_scheduler_type, config.critic.optim.lr_scheduler_type}
    free = FREE_ON_RESUME if schedules == {"constant"} else DEVICE_ONLY_FIELDS
    return {k: v for k, v in config.deciding_fields().items() if k not in free}
