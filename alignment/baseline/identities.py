"""What a training run must satisfy whatever it learns, judged on its logged metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from alignment.errors import InputError
from alignment.models.config import ModelConfig
from alignment.numerics.budget import Budget, Noise
from alignment.numerics.curve_run import CurveRun
from alignment.numerics.verdict import Measure
from alignment.rl.config import TrainConfig

GAP = "training/rollout_log_probs_abs_diff_mean"
SHOWN = {
    "training/rollout_log_probs_diff_mean": ("signed log_prob gap", "nats"),
    "training/rollout_log_probs_diff_max": ("max |log_prob gap|", "nats"),
    "training/rollout_actor_probs_pearson_corr": ("Pearson correlation of the probabilities", ""),
}


def judge_identities(
    metrics: Sequence[Mapping[str, float]], baselines: Sequence[CurveRun], *, config: TrainConfig, model: ModelConfig
) -> list[Measure]:
    """The identities of a run, each as the worst of its steps.

    * One update per rollout: nothing moved between old log-prob and update, so |mean(old − new log-prob)| is roundoff and
      no token is clipped.
    * Entropy lies in (0, ln V).
    * Train–rollout gap: mean |Δ log p| stays inside what the baseline runs, of other seeds, measured.

    Args:
        metrics: one mapping per step.
        baselines: stored runs of the same setting; their ``log_prob_gap`` is the noise of the gap.
        config: of the run.
        model: of the policy.

    Raises:
        InputError: a step lacks a metric, or the judged run is one of ``baselines``.
    """
    found: list[Measure] = []
    dtype = config.actor_rollout_ref.model.dtype
    limit = math.log(model.vocab_size)
    if config.updates_per_epoch * config.actor_rollout_ref.actor.ppo_epochs == 1:
        # A log-prob is of the size of ln V, and behind it stand sums over the hidden size.
        still = Budget.from_roundoff(
            metric="|PPO KL| of the only update", dtype=dtype, reduction_length=model.hidden_size, unit="nats", scale=limit
        )
        kl = _worst(abs(v) for v in _series(metrics, "actor/ppo_kl"))
        found.append(still.judge(kl, run_seed=config.trainer.seed))
        clipped = Budget.exact(metric="clip fraction of the only update", reason="its ratio is 1")
        found.append(clipped.judge(_worst(_series(metrics, "actor/pg_clipfrac")), run_seed=config.trainer.seed))
    entropies = list(_series(metrics, "actor/entropy"))
    outside = Budget.exact(metric="entropy outside (0, ln V)", reason="of every distribution over V tokens", unit="nats")
    worst = _worst(max(-h, h - limit, 0.0) if h == h else h for h in entropies)
    found.append(outside.judge(worst, run_seed=config.trainer.seed))
    found.append(_gap(metrics, baselines, config=config, model=model))
    for name, (label, unit) in SHOWN.items():
        values = [row[name] for row in metrics if name in row]
        if values:
            found.append(Measure(name=label, value=max(values, key=abs) if unit else min(values), unit=unit))
    return found


def _gap(
    metrics: Sequence[Mapping[str, float]], baselines: Sequence[CurveRun], *, config: TrainConfig, model: ModelConfig
) -> Measure:
    noise = Noise(
        values=tuple(_worst(step.scalars["log_prob_gap"] for step in run.steps) for run in baselines),
        seeds=tuple(run.seed for run in baselines),
        perturbation="sampling seed",
        device=baselines[0].device,
    )
    budget = Budget.from_noise(
        noise,
        metric="mean |train − rollout log_prob|",
        dtype=config.actor_rollout_ref.model.dtype,
        reduction_length=model.hidden_size,
        unit="nats",
        scale=math.log(model.vocab_size),
    )
    return budget.judge(_worst(_series(metrics, GAP)), run_seed=config.trainer.seed)


def _series(metrics: Sequence[Mapping[str, float]], name: str) -> list[float]:
    for row in metrics:
        if name not in row:
            raise InputError("a step lacks a metric", where=f"step {row.get('step')}", expected=name)
    return [row[name] for row in metrics]


def _worst(values) -> float:
    """The largest, or NaN where there is one."""
    values = list(values)
    return math.nan if any(v != v for v in values) else max(values)
