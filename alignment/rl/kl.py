"""Estimators of the KL divergence to the reference from the log-probs of sampled tokens, and its use in the reward.

With y ~ π, d = log π(y) − log π_ref(y) and r = exp(−d) (Schulman, *Approximating KL divergence*, 2020):

=======================  ===============  =======================================================================
name (verl's too)        value            expectation of value; gradient through log π at fixed samples
=======================  ===============  =======================================================================
``k1``, ``kl``           d                KL(π‖π_ref); gradient has expectation 0: as a *loss* it teaches nothing
``k2``, ``mse``          d²/2             close to KL near d = 0, else biased; gradient has the expectation ∇KL(π‖π_ref)
``k3``, ``low_var_kl``   r − 1 + d        KL(π‖π_ref), never negative; gradient has the expectation ∇KL(π_ref‖π)
``abs``                  abs(d)           none; a penalty on distance
``k1+``, ``k3+``         as k1, k3        straight-through: the gradient of k2
=======================  ===============  =======================================================================

verl clamps the exponent of k3 to ±20 and its value to ±10, and so do we; where a clamp acts, the gradient is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.rl.aggregation import masked_sum

ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "k1+": "k1+",
    "k3+": "k3+",
}
"""verl's names of the estimators, and the estimator each one means."""

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """The estimate of KL(π‖π_ref) at every sampled token (verl's ``core_algos.kl_penalty``).

    Args:
        log_prob, ref_log_prob: log-probs of the sampled tokens under both policies, same shape, in nats.
        kind: one of ``ESTIMATORS``.

    Returns:
        A tensor of that shape, differentiable in `log_prob`.

    Raises:
        InputError: unknown estimator. verl's ``full`` needs the whole distribution, which no stage carries.
    """
    if kind not in ESTIMATORS:
        raise InputError("unknown KL estimator", where="kl_penalty", expected=" | ".join(ESTIMATORS), found=kind)
    name = ESTIMATORS[kind]
    difference = log_prob - ref_log_prob
    if name.endswith("+"):
        value, gradient = kl_penalty(log_prob, ref_log_prob, name[:-1]), 0.5 * difference.square()
        return value.detach() + (gradient - gradient.detach())
    if name == "k1":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "k2":
        return 0.5 * difference.square()
    inverse = torch.clamp(-difference, min=-LOG_RATIO_LIMIT, max=LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(x) − 1 loses near 0, where a healthy run lives
    return torch.clamp(torch.expm1(inverse) - inverse, min=-K3_LIMIT, max=K3_LIMIT)


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    kind: str,
    kl_coef: float,
) -> tuple[Tensor, float]:
    """Rewards with the KL penalty inside (``use_kl_in_reward``): ``scores − kl_coef · kl`` on response tokens.

    Args:
        token_level_scores, old_log_probs, ref_log_prob, response_mask: [b,r].
        kind: estimator, one of ``ESTIMATORS``.
        kl_coef: its coefficient, at this step.

    Returns:
        ``token_level_rewards`` [b,r] in the dtype of the scores, and the KL of the batch as verl's controller sees it:
        the mean over sequences of the mean over tokens.
    """
    mask = response_mask != 0
    estimate = kl_penalty(old_log_probs.double(), ref_log_prob.double(), kind)
    estimate = torch.where(mask, estimate, torch.zeros_like(estimate))
    rewards = (token_level_scores.double() - kl_coef * estimate).to(token_level_scores.dtype)
    per_sequence = masked_sum(estimate, mask, dim=-1) / mask.sum(-1).clamp(min=1)
    return rewards, float(per_sequence.mean())


class KlController:
    """The coefficient of the KL penalty over the run: constant, or steered towards a target.

    Adaptive (Ziegler et al., *Fine-tuning language models from human preferences*, 2019): after a step with n samples
    the coefficient is multiplied by ``1 + clip(kl / target − 1, ±0.2) · n / horizon``.

    Args:
        kind: ``fixed`` or ``adaptive``.
        kl_coef: the coefficient at the first step.
        target_kl, horizon: used by ``adaptive`` only.

    Raises:
        InputError: unknown kind, or an adaptive controller without a positive target and horizon.
    """

    def __init__(self, *, kind: str = "fixed", kl_coef: float, target_kl: float = 0.1, horizon: int = 10000) -> None:
        if kind not in ("fixed", "adaptive"):
            raise InputError("unknown KL controller", where="kl_ctrl.type", expected="fixed | adaptive", found=kind)
        if kind == "adaptive" and not (target_kl > 0 and horizon > 0):
            raise InputError(
                "an adaptive controller needs a target and a horizon",
                where="kl_ctrl",
                expected="target_kl > 0 and horizon > 0",
                found=f"target_kl = {target_kl}, horizon = {horizon}",
            )
        self.kind, self.value, self.target_kl, self.horizon = kind, kl_coef, target_kl, horizon

    def update(self, current_kl: float, samples: int) -> None:
        """Takes note of a step that saw `samples` samples with the given KL."""
        if self.kind == "adaptive":
            error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * samples / self.horizon
