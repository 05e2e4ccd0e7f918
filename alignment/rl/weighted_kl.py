"""The KL penalty of tokens that another policy drew: importance weighted, clamped as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.rl import kl


def weighted_kl(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    behaviour_log_prob: Tensor,
    *,
    log_ratio_limit: float = kl.LOG_RATIO_LIMIT,
    value_limit: float = kl.K3_LIMIT,
) -> Tensor:
    """k3 at every token, weighted by w = π / μ for tokens drawn from μ (NeMo-RL's ``calculate_kl`` with importance
    weights).

    With d = clamp(log π_ref − log π, ±``log_ratio_limit``): ``clamp(w · (eᵈ − 1 − d), ±value_limit)``. Where the
    clamp of the log-ratio acts the term has no gradient at all, so w is detached there; where the outer clamp acts
    it has none either. A clamp inside a product would leave the gradient through w on exactly the tokens that it is
    to silence.

    Args:
        log_prob, ref_log_prob, behaviour_log_prob: log-probs of the drawn tokens under π, π_ref and μ, same shape.

    Returns:
        A tensor of that shape, differentiable in `log_prob`.
    """
    raw = ref_log_prob - log_prob
    d = raw.clamp(-log_ratio_limit, log_ratio_limit)
    weight = importance_weight(log_prob, behaviour_log_prob, silent=raw.abs() > log_ratio_limit)
    return (weight * (torch.expm1(d) - d)).clamp(-value_limit, value_limit)


def importance_weight(log_prob: Tensor, behaviour_log_prob: Tensor, *, silent: Tensor) -> Tensor:
    """π / μ, without a gradient where ``silent``; the log-ratio is clamped to ±20."""
    difference = (log_prob - behaviour_log_prob.detach()).clamp(-kl.LOG_RATIO_LIMIT, kl.LOG_RATIO_LIMIT)
    weight = torch.exp(difference)
    return torch.where(silent, weight.detach(), weight)
