"""The metrics of a step: their names, and reductions that do not depend on how the batch was cut.

Metrics of an update arrive as *shares* (each already divided by the counts of the whole mini batch) and are added.
Metrics of a batch are computed on the driver from all samples with exactly rounded sums (``math.fsum``), so neither
order nor padding nor micro-batching changes a bit of them. A mean of means occurs nowhere, except over the optimizer
steps of one training step, which all have equal weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.filtering import DynamicSampling


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric's name, how it is reduced, its unit and what it says."""

    name: str
    reduction: str
    unit: str
    meaning: str


SHARE = "added over micro batches and ranks, mean over the updates of a step"
UPDATE = "equal on all ranks, mean over the updates of a step"
TOKENS = "mean over response tokens"
SAMPLES = "mean over samples"


def _family(prefix: str, unit: str, meaning: str) -> tuple[Metric, ...]:
    how = {"mean": SAMPLES, "max": "maximum over samples", "min": "minimum over samples"}
    return tuple(Metric(name=f"{prefix}/{k}", reduction=v, unit=unit, meaning=meaning) for k, v in how.items())


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(name="actor/loss", reduction=SHARE, unit="", meaning="what is differentiated"),
        Metric(name="actor/pg_loss", reduction=SHARE, unit="", meaning="policy part of the loss"),
        Metric(name="actor/pg_clipfrac", reduction=SHARE, unit="fraction", meaning="tokens on the clipped branch"),
        Metric(name="actor/pg_clipfrac_lower", reduction=SHARE, unit="fraction", meaning="tokens where dual clip acts"),
        Metric(name="actor/ppo_kl", reduction=SHARE, unit="nats", meaning="old minus new log-prob"),
        Metric(
            name="actor/pg_scale", reduction=SHARE, unit="", meaning="abs. advantage times ratio: the scale of pg_loss"
        ),
        Metric(name="actor/entropy", reduction=SHARE, unit="nats", meaning="entropy of the policy, by loss_agg_mode"),
        Metric(name="actor/kl_loss", reduction=SHARE, unit="nats", meaning="KL to the reference, by loss_agg_mode"),
        Metric(name="actor/grad_norm", reduction=UPDATE, unit="", meaning="global L2 norm before clipping"),
        Metric(name="actor/lr", reduction=UPDATE, unit="", meaning="learning rate"),
        Metric(
            name="actor/reward_kl_penalty",
            reduction="mean over samples of the mean over tokens",
            unit="nats",
            meaning="KL in the reward",
        ),
        Metric(name="actor/reward_kl_penalty_coeff", reduction="one per step", unit="", meaning="its coefficient"),
        Metric(name="critic/vf_loss", reduction=SHARE, unit="", meaning="value loss"),
        Metric(name="critic/vf_clipfrac", reduction=SHARE, unit="fraction", meaning="tokens on the clipped branch"),
        Metric(name="critic/vpred_mean", reduction=SHARE, unit="reward", meaning="predicted value"),
        Metric(name="critic/grad_norm", reduction=UPDATE, unit="", meaning="global L2 norm before clipping"),
        Metric(name="critic/lr", reduction=UPDATE, unit="", meaning="learning rate"),
        *_family("critic/score", "reward", "reward per sample that is trained on, shaping included"),
        *_family("critic/rewards", "reward", "the same with the KL penalty"),
        *_family("critic/advantages", "", "advantage per response token"),
        *_family("critic/returns", "", "return per response token"),
        *_family("response_length", "tokens", "response"),
        *_family("prompt_length", "tokens", "prompt"),
        Metric(
            name="response_length/clip_ratio",
            reduction=SAMPLES,
            unit="fraction",
            meaning="responses as long as the limit",
        ),
        Metric(
            name="reward/before_filter",
            reduction=SAMPLES,
            unit="reward",
            meaning="score of every sample that devices may compare",
        ),
        Metric(name="reward/after_filter", reduction=SAMPLES, unit="reward", meaning="score of the samples trained on"),
        Metric(name="acc/before_filter", reduction=SAMPLES, unit="fraction", meaning="correct among them"),
        Metric(
            name="acc/after_filter", reduction=SAMPLES, unit="fraction", meaning="correct among the samples trained on"
        ),
        Metric(name="response_length/before_filter", reduction=SAMPLES, unit="tokens", meaning="their responses"),
        Metric(
            name="filter/kept_fraction",
            reduction="kept groups over generated groups",
            unit="fraction",
            meaning="groups that qualify",
        ),
        Metric(name="filter/num_gen_batches", reduction="one per step", unit="rounds", meaning="generation rounds"),
        Metric(
            name="filter/filled",
            reduction="one per step",
            unit="groups",
            meaning="groups trained on that do not qualify",
        ),
        Metric(
            name="training/rollout_log_probs_abs_diff_mean",
            reduction=TOKENS,
            unit="nats",
            meaning="abs. train minus rollout log-prob",
        ),
        Metric(
            name="training/rollout_log_probs_diff_mean",
            reduction=TOKENS,
            unit="nats",
            meaning="train minus rollout log-prob, signed",
        ),
        Metric(
            name="training/rollout_log_probs_diff_max",
            reduction="maximum over response tokens",
            unit="nats",
            meaning="largest abs. difference",
        ),
        Metric(
            name="training/rollout_actor_probs_pearson_corr",
            reduction="over response tokens",
            unit="",
            meaning="correlation of the probabilities",
        ),
    )
}


def add_shares(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of one update from the shares of its micro batches or ranks. A name may be missing in some."""
    collected: dict[str, list[float]] = {}
    for share in shares:
        for name, value in share.items():
            collected.setdefault(name, []).append(float(value))
    return {name: math.fsum(values) for name, values in collected.items()}


def mean_over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its optimizer steps, which all weigh the same.

    Raises:
        InputError: no updates, or updates that report different metrics.
    """
    if not updates:
        raise InputError("a step without updates has no update metrics", where="mean_over_updates")
    for i, update in enumerate(updates):
        if set(update) != set(updates[0]):
            raise InputError(
                f"update {i} reports other metrics than update 0",
                where="mean_over_updates",
                expected=sorted(updates[0]),
                found=sorted(update),
            )
    return {name: math.fsum(u[name] for u in updates) / len(updates) for name in updates[0]}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards, advantages and lengths of the samples that are trained on (verl's names)."""
    mask = batch["response_mask"] != 0
    length = mask.sum(-1)
    metrics: dict[str, float] = {}
    for prefix, field in (("critic/score", "token_level_scores"), ("critic/rewards", "token_level_rewards")):
        if field in batch:
            _describe(metrics, prefix, torch.where(mask, batch[field].double(), 0.0).sum(-1))
    for prefix, field in (("critic/advantages", "advantages"), ("critic/returns", "returns")):
        if field in batch:
            _describe(metrics, prefix, batch[field].double()[mask])
    _describe(metrics, "response_length", length.double())
    prompt_tokens = (batch["attention_mask"] != 0).sum(-1) - length
    _describe(metrics, "prompt_length", prompt_tokens.double())
    limit = batch.info.get("max_response_length", mask.shape[1])
    metrics["response_length/clip_ratio"] = int((length >= limit).sum()) / len(batch)
    return metrics


def sampling_metrics(sampling: DynamicSampling, batch: Batch) -> dict[str, float]:
    """Rewards, correctness and response length before and after filtering, and how much was kept.

    Args:
        sampling: after its last round.
        batch: what it gave to train on.
    """
    groups = sampling.compared
    samples = sum(g.size for g in groups)
    metrics = {
        "reward/before_filter": math.fsum(g.mean * g.size for g in groups) / samples,
        "reward/after_filter": _mean(batch["score"]),
        "response_length/before_filter": math.fsum(g.response_length * g.size for g in groups) / samples,
        "filter/kept_fraction": sampling.kept_fraction,
        "filter/num_gen_batches": float(sampling.rounds),
        "filter/filled": float(sampling.filled),
    }
    if all(g.acc is not None for g in groups):
        metrics["acc/before_filter"] = math.fsum(g.acc * g.size for g in groups) / samples
        metrics["acc/after_filter"] = _mean(batch["acc"])
    return metrics


def log_prob_gap(log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """How far the trainer's log-probs of the sampled tokens are from the rollout engine's.

    Over response tokens, Δ = trainer − rollout: mean of abs. Δ, signed mean, largest abs. Δ, and Pearson's correlation
    of the *probabilities* (1 when both are equal; left out when one of them is constant). Rounding has a signed mean
    near 0, faults have a sign.

    Args:
        log_probs, rollout_log_probs, response_mask: [b,r].

    Raises:
        InputError: no response tokens, or a value that is not finite.
    """
    mask = response_mask != 0
    train, rollout = log_probs.double()[mask], rollout_log_probs.double()[mask]
    if not len(train):
        raise InputError("there are no response tokens", where="log_prob_gap")
    if not bool(torch.isfinite(train - rollout).all()):
        raise InputError("a log-prob is not finite", where="log_prob_gap", expected="finite numbers")
    difference = (train - rollout).tolist()
    metrics = {
        "training/rollout_log_probs_abs_diff_mean": _mean([abs(d) for d in difference]),
        "training/rollout_log_probs_diff_mean": _mean(difference),
        "training/rollout_log_probs_diff_max": max(abs(d) for d in difference),
    }
    correlation = _pearson(train.exp().tolist(), rollout.exp().tolist())
    if correlation is not None:
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics


def _pearson(x: list[float], y: list[float]) -> float | None:
    if x == y:
        return 1.0
    mean_x, mean_y = _mean(x), _mean(y)
    a, b = [v - mean_x for v in x], [v - mean_y for v in y]
    norm_x, norm_y = math.fsum(v * v for v in a), math.fsum(v * v for v in b)
    if norm_x == 0.0 or norm_y == 0.0:
        return None
    value = math.fsum(v * w for v, w in zip(a, b)) / (math.sqrt(norm_x) * math.sqrt(norm_y))
    return min(1.0, max(-1.0, value))


def _describe(metrics: dict[str, float], prefix: str, values: Tensor) -> None:
    numbers = values.tolist()
    metrics.update({f"{prefix}/mean": _mean(numbers), f"{prefix}/max": max(numbers), f"{prefix}/min": min(numbers)})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
