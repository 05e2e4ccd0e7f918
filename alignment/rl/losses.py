"""The losses of the policy and the value model, per mini batch or as shares of one that add up over its parts.

Every loss takes ``counts``, those of the whole mini batch (see :mod:`alignment.rl.aggregation`); what it returns for a
micro batch, the loss and every metric, is that micro batch's share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.rl.aggregation import Counts, agg_loss, masked_mean
from alignment.rl.kl import LOG_RATIO_LIMIT, kl_penalty

if TYPE_CHECKING:
    from alignment.rl.config import ActorConfig, CriticConfig


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
    counts: Counts | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective with DAPO's clip-higher and dual clip (verl's ``vanilla`` policy loss).

    With ρ = exp(log_prob − old_log_prob), the exponent clamped to ±20, and advantage A, per token:

    * ``l = max(−ρ·A, −clip(ρ, 1 − clip_ratio_low, 1 + clip_ratio_high)·A)`` (Schulman et al. 2017, arXiv 1707.06347;
      DAPO, arXiv 2503.14476, section 3.1);
    * where A < 0: ``l = min(l, −clip_ratio_c·A)`` (Ye et al. 2019, arXiv 1912.09729).

    Args:
        log_prob, old_log_prob, advantages: [b,r], float32 or wider, nats; only `log_prob` receives a gradient.
        response_mask: [b,r], tokens that count. Values elsewhere are never looked at.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: the three bounds, the last > 1.
        loss_agg_mode, counts, loss_scale_factor: see :func:`~alignment.rl.aggregation.agg_loss`.

    Returns:
        The loss, and detached metrics, means over tokens: ``pg_clipfrac`` (the clipped branch was taken),
        ``pg_clipfrac_lower`` (the dual clip acted) and ``ppo_kl`` (mean of old − new log-prob).

    Raises:
        InputError: ``clip_ratio_c`` ≤ 1.
    """
    if clip_ratio_c <= 1.0:
        raise InputError(
            "dual clip bounds the ratio from above", where="clip_ratio_c", expected="> 1", found=clip_ratio_c
        )
    counts = counts or Counts.of(response_mask)
    mask = response_mask != 0
    zero = torch.zeros((), dtype=log_prob.dtype, device=log_prob.device)
    # Masked before exp, so that nothing on padding can reach the gradient as 0 · inf.
    log_ratio = torch.where(mask, log_prob - old_log_prob.detach(), zero).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = torch.where(mask, advantages.detach().to(log_prob.dtype), zero)
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    standard = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_ratio_c
    negative = advantages < 0
    loss = agg_loss(
        torch.where(negative, torch.minimum(standard, ceiling), standard),
        response_mask,
        loss_agg_mode,
        counts=counts,
        loss_scale_factor=loss_scale_factor,
    )
    with torch.no_grad():
        metrics = {
            "pg_clipfrac": masked_mean((clipped > unclipped).to(log_prob.dtype), mask, counts=counts),
            "pg_clipfrac_lower": masked_mean((negative & (standard > ceiling)).to(log_prob.dtype), mask, counts=counts),
            "ppo_kl": masked_mean(-log_ratio, mask, counts=counts),
        }
    return loss, metrics


def value_loss(
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    counts: Counts | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the value model, clipped around its old prediction (verl's ``compute_value_loss``).

    Per token ``½ · max((v − R)², (clip(v, v_old ± cliprange_value) − R)²)``.

    Args:
        vpreds: new predictions [b,r], which receive the gradient.
        values, returns: the predictions before the update, and the targets [b,r].
        response_mask, loss_agg_mode, counts, loss_scale_factor: as in :func:`policy_loss`.

    Returns:
        The loss, and detached metrics, means over tokens: ``vf_clipfrac`` (the clipped branch was larger) and
        ``vpred_mean``.
    """
    counts = counts or Counts.of(response_mask)
    mask = response_mask != 0
    zero = torch.zeros((), dtype=vpreds.dtype, device=vpreds.device)
    old = torch.where(mask, values.detach().to(vpreds.dtype), zero)
    target = torch.where(mask, returns.detach().to(vpreds.dtype), zero)
    new = torch.where(mask, vpreds, zero)
    near = torch.minimum(torch.maximum(new, old - cliprange_value), old + cliprange_value)
    free, clipped = (new - target).square(), (near - target).square()
    loss = 0.5 * agg_loss(
        torch.maximum(free, clipped), response_mask, loss_agg_mode, counts=counts, loss_scale_factor=loss_scale_factor
    )
    with torch.no_grad():
        metrics = {
            "vf_clipfrac": masked_mean((clipped > free).to(vpreds.dtype), mask, counts=counts),
            "vpred_mean": masked_mean(new, mask, counts=counts),
        }
    return loss, metrics


@dataclass(frozen=True, kw_only=True)
class ActorLoss:
    """The loss of the policy update, as training engines call it: ``loss(outputs, micro_batch)``.

    ``policy loss − entropy_coeff · entropy + kl_loss_coef · KL`` with the parts that the configuration asks for, all
    under one ``loss_agg_mode``.

    Attributes:
        config: ``actor_rollout_ref.actor``.
        counts: of the whole mini batch over all ranks.
    """

    config: ActorConfig
    counts: Counts

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of the loss and of each metric.

        Args:
            outputs: ``log_probs`` and ``entropy`` [b,r] of the policy being trained.
            micro_batch: ``old_log_probs``, ``advantages``, ``response_mask`` [b,r], and ``ref_log_prob`` for a KL loss.

        Raises:
            InputError: a KL loss without ``ref_log_prob``.
        """
        config, mask = self.config, micro_batch["response_mask"]
        how = {"counts": self.counts, "loss_scale_factor": config.loss_scale_factor}
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        loss, metrics = policy_loss(
            outputs["log_probs"],
            micro_batch["old_log_probs"],
            micro_batch["advantages"],
            mask,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=config.clip_ratio_c,
            loss_agg_mode=config.loss_agg_mode,
            **how,
        )
        metrics = {f"actor/{name}": value for name, value in metrics.items()} | {"actor/pg_loss": loss.detach()}
        entropy = agg_loss(outputs["entropy"], mask, config.loss_agg_mode, **how)
        metrics["actor/entropy"] = entropy.detach()
        if config.entropy_coeff != 0.0:
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            if "ref_log_prob" not in micro_batch:
                raise InputError(
                    "the KL loss needs the reference's log-probs",
                    where="update_actor, ref_log_prob",
                    found=sorted(micro_batch),
                )
            reference = micro_batch["ref_log_prob"].detach().to(outputs["log_probs"].dtype)
            zero = torch.zeros((), dtype=reference.dtype, device=reference.device)
            estimate = kl_penalty(
                torch.where(mask != 0, outputs["log_probs"], zero),
                torch.where(mask != 0, reference, zero),
                config.kl_loss_type,
            )
            kl = agg_loss(estimate, mask, config.loss_agg_mode, **how)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + config.kl_loss_coef * kl
        metrics["actor/loss"] = loss.detach()
        return loss, metrics


@dataclass(frozen=True, kw_only=True)
class CriticLoss:
    """The loss of the value update, as training engines call it: ``loss(outputs, micro_batch)``.

    Attributes:
        config: ``critic``.
        counts: of the whole mini batch over all ranks.
        loss_scale_factor: as the actor's.
    """

    config: CriticConfig
    counts: Counts
    loss_scale_factor: int | None = None

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of the loss and of each metric: ``outputs["values"]`` against the fields ``values`` and ``returns``."""
        loss, metrics = value_loss(
            outputs["values"],
            micro_batch["values"],
            micro_batch["returns"],
            micro_batch["response_mask"],
            cliprange_value=self.config.cliprange_value,
            loss_agg_mode=self.config.loss_agg_mode or "token-mean",
            counts=self.counts,
            loss_scale_factor=self.loss_scale_factor,
        )
        return loss, {f"critic/{name}": value for name, value in metrics.items()} | {"critic/vf_loss": loss.detach()}
