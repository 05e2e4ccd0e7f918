"""Advantages and returns from token-level rewards: GRPO (which DAPO uses), RLOO and GAE.

They are computed on the driver in float64 and returned in the dtype of the rewards, so that no device's arithmetic
enters. On padding advantages and returns are 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.rl.aggregation import masked_sum
from alignment.rl.batch import Batch
from alignment.rl.kl import apply_kl_penalty

if TYPE_CHECKING:
    from alignment.rl.config import AlgorithmConfig

GRPO_EPSILON = 1e-6
WHITENING_EPSILON = 1e-8


def grpo_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Sequence[Hashable],
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = GRPO_EPSILON,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages, the same on every token of a response (verl's ``compute_grpo_outcome_advantage``).

    With R_i the summed rewards of response i and the mean and *unbiased* standard deviation (n − 1) of its group:
    ``A_i = (R_i − mean) / (std + epsilon)``, or ``R_i − mean`` without normalisation (Dr. GRPO, arXiv 2503.20783). A
    group of one has mean 0 and standard deviation 1, as in verl. A group of equal rewards gets exactly 0.

    Args:
        token_level_rewards, response_mask: [b,r].
        uid: the group of each sample; samples of a group need not be adjacent.
        norm_adv_by_std_in_grpo, epsilon: as above.

    Returns:
        Advantages and returns [b,r]; they are equal (Shao et al. 2024, arXiv 2402.03300).
    """
    totals = _totals(token_level_rewards, response_mask, uid)
    result = torch.empty_like(totals)
    for members in _groups(uid).values():
        rewards = totals[members]
        if len(members) == 1:
            deviation, std = rewards, torch.ones((), dtype=rewards.dtype)
        else:
            # Relative to the first: equal rewards then have a deviation of exactly 0, whatever their value.
            shifted = rewards - rewards[0]
            deviation, std = shifted - shifted.mean(), shifted.std(correction=1)
        result[members] = deviation / (std + epsilon) if norm_adv_by_std_in_grpo else deviation
    advantages = _spread(result, response_mask, token_level_rewards)
    return advantages, advantages.clone()


def rloo_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[Hashable]
) -> tuple[Tensor, Tensor]:
    """Leave-one-out advantages: ``A_i = R_i − mean of the others of its group`` (Ahmadian et al., arXiv 2402.14740).

    A group of one keeps its reward, as in verl. Arguments and results as in :func:`grpo_advantages`.
    """
    totals = _totals(token_level_rewards, response_mask, uid)
    result = totals.clone()
    for members in _groups(uid).values():
        n = len(members)
        if n > 1:
            shifted = totals[members] - totals[members[0]]
            result[members] = (shifted - shifted.mean()) * (n / (n - 1))
    advantages = _spread(result, response_mask, token_level_rewards)
    return advantages, advantages.clone()


def gae_advantages(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the response tokens (Schulman et al. 2015, arXiv 1506.02438).

    ``δ_t = r_t + gamma · V_{t+1} − V_t`` with V = 0 after the last response token,
    ``A_t = δ_t + gamma · lam · A_{t+1}``, returns ``A_t + V_t``. The advantages are then whitened over the whole batch
    (the returns are not), as verl does.

    Args:
        token_level_rewards, values, response_mask: [b,r].
        gamma, lam: in [0, 1].
        whiten: False leaves the advantages as they are.

    Returns:
        Advantages and returns [b,r].
    """
    mask = response_mask != 0
    rewards = torch.where(mask, token_level_rewards.double(), 0.0)
    baseline = torch.where(mask, values.double(), 0.0)
    following = torch.zeros_like(rewards[:, 0])
    value_after = torch.zeros_like(following)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * value_after - baseline[:, t]
        # A masked token is passed over: what follows it follows what precedes it.
        following = torch.where(mask[:, t], delta + gamma * lam * following, following)
        value_after = torch.where(mask[:, t], baseline[:, t], value_after)
        columns.append(following)
    advantages = torch.where(mask, torch.stack(columns[::-1], dim=1), 0.0)
    returns = torch.where(mask, advantages + baseline, 0.0)
    if whiten:
        advantages = masked_whiten(advantages, mask)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


def masked_whiten(values: Tensor, mask: Tensor, *, epsilon: float = WHITENING_EPSILON) -> Tensor:
    """``(x − mean) / sqrt(var + epsilon)`` over the tokens of the mask, with the unbiased variance; 0 elsewhere.

    Raises:
        InputError: fewer than two tokens, which have no variance.
    """
    mask = mask != 0
    count = int(mask.sum())
    if count < 2:
        raise InputError(
            "whitening needs a variance", where="advantage", expected="at least two response tokens", found=count
        )
    centred = torch.where(mask, values - masked_sum(values, mask) / count, torch.zeros_like(values))
    variance = masked_sum(centred.square(), mask) / (count - 1)
    return centred * torch.rsqrt(variance + epsilon)


def compute_advantages(
    batch: Batch, algorithm: AlgorithmConfig, *, kl_coef: float | None = None
) -> tuple[Batch, dict[str, float]]:
    """The advantage stage: adds ``token_level_rewards``, ``advantages`` and ``returns``.

    Args:
        batch: as the contract of the stage says; with ``use_kl_in_reward`` also ``old_log_probs`` and ``ref_log_prob``,
            with ``gae`` also ``values``.
        algorithm: the configuration section.
        kl_coef: the controller's coefficient at this step; ``kl_ctrl.kl_coef`` by default.

    Returns:
        The batch with the added fields, and the metrics of the KL penalty (empty without one).
    """
    mask, rewards = batch["response_mask"], batch["token_level_scores"]
    metrics: dict[str, float] = {}
    if algorithm.use_kl_in_reward:
        coefficient = algorithm.kl_ctrl.kl_coef if kl_coef is None else kl_coef
        rewards, current = apply_kl_penalty(
            rewards, batch["old_log_probs"], batch["ref_log_prob"], mask, kind=algorithm.kl_penalty, kl_coef=coefficient
        )
        metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}
    if algorithm.adv_estimator == "gae":
        pair = gae_advantages(rewards, batch["values"], mask, gamma=algorithm.gamma, lam=algorithm.lam)
    elif algorithm.adv_estimator == "rloo":
        pair = rloo_advantages(rewards, mask, batch["uid"])
    else:
        pair = grpo_advantages(rewards, mask, batch["uid"], norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo)
    fields = {"token_level_rewards": rewards.clone(), "advantages": pair[0], "returns": pair[1]}
    return batch.add(fields), metrics


def _totals(token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[Hashable]) -> Tensor:
    if len(uid) != len(token_level_rewards):
        raise InputError("there is one uid per sample", where="uid", expected=len(token_level_rewards), found=len(uid))
    return masked_sum(token_level_rewards.double(), response_mask, dim=-1)


def _groups(uid: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for i, name in enumerate(uid):
        groups.setdefault(name, []).append(i)
    return groups


def _spread(per_sample: Tensor, response_mask: Tensor, like: Tensor) -> Tensor:
    return torch.where(response_mask != 0, per_sample.unsqueeze(1), 0.0).to(like.dtype)
