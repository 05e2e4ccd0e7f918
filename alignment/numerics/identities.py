"""Identities of RL training that need no baseline: each is a pure function of recorded tensors and returns a measure.

Tensors are [b, r] over responses, ``response_mask`` is 1 on response tokens; only those are read. NaN in a tensor gives
a measure outside its bound. A ``budget`` replaces the exact bound where two implementations compute the same number
(e.g. another batch layout on the second pass).
"""

from __future__ import annotations

import math

import torch

from alignment.errors import InputError
from alignment.numerics.budget import Budget
from alignment.numerics.metrics import signed_mean_difference
from alignment.numerics.verdict import Measure

# mean |Δ log-prob| between rollout and training in public reports: bfloat16 engines 0.010 … 0.025, 0.035 on a working
# NPU run with TP = 2, broken stacks 0.05 … 0.2
GAP_HEALTHY, GAP_BROKEN = 0.025, 0.05


def log_prob_agreement(
    log_prob: torch.Tensor, ref_log_prob: torch.Tensor, response_mask: torch.Tensor, *, budget: Budget | None = None
) -> Measure:
    """Step 0: actor and reference have the same weights, so max |log-prob − ref log-prob| = 0."""
    a, b = _chosen(response_mask, log_prob=log_prob, ref_log_prob=ref_log_prob)
    return _judged("max |log_prob - ref_log_prob|", _largest((a - b).abs()), budget, "same weights at step 0")


def first_kl(
    log_prob: torch.Tensor, ref_log_prob: torch.Tensor, response_mask: torch.Tensor, *, budget: Budget | None = None
) -> Measure:
    """Step 0: the KL loss vanishes. Token mean of k3 = r − 1 − ln r ≥ 0 with ln r = ref − log-prob (Schulman 2020)."""
    a, b = _chosen(response_mask, log_prob=log_prob, ref_log_prob=ref_log_prob)
    d = b - a
    return _judged("KL at step 0", float((torch.expm1(d) - d).mean()), budget, "same weights at step 0")


def log_probs_nonpositive(
    log_prob: torch.Tensor, response_mask: torch.Tensor, *, budget: Budget | None = None
) -> Measure:
    """A probability is at most 1: max(log-prob, 0) over tokens is 0."""
    (a,) = _chosen(response_mask, log_prob=log_prob)
    return _judged("largest positive log_prob", _largest(a.clamp(min=0.0)), budget, "log-probabilities are ≤ 0")


def entropy_in_range(
    entropy: torch.Tensor, response_mask: torch.Tensor, *, vocab_size: int, budget: Budget | None = None
) -> Measure:
    """Entropy in nats: every token in [0, ln V], and the mean strictly inside, else the policy collapsed or is uniform.

    The value is how far the worst token is outside, infinity where the mean is on the boundary.
    """
    (h,) = _chosen(response_mask, entropy=entropy)
    limit = math.log(vocab_size)
    outside = _largest(torch.maximum(-h, h - limit).clamp(min=0.0))
    if not 0.0 < float(h.mean()) < limit:
        outside = math.nan if math.isnan(outside) else math.inf
    return _judged("entropy outside (0, ln V)", outside, budget, f"0 < mean entropy < ln {vocab_size}", unit="nats")


def first_update_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor, *, budget: Budget | None = None
) -> Measure:
    """The first on-policy update has ratio exp(log-prob − old log-prob) exactly 1: max |ratio − 1| = 0."""
    a, b = _chosen(response_mask, log_prob=log_prob, old_log_prob=old_log_prob)
    reason = "no update between the two passes"
    return _judged("max |ratio - 1|", _largest(torch.expm1(a - b).abs()), budget, reason)


def train_inference_gap(
    rollout_log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    budget: Budget | None = None,
) -> tuple[Measure, Measure, Measure]:
    """Log-prob gap training − rollout on sampled tokens: mean |Δ| (judged), signed mean and max |Δ| (shown).

    Without a ``budget``, mean |Δ| is judged by the band of public reports: healthy 0.010 … 0.025, broken from 0.05. It
    is 0 with batch-invariant kernels. Rounding has a signed mean near 0 in standard errors; faults have a sign.
    """
    train, rollout = _chosen(response_mask, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    difference = (train - rollout).abs()
    gap = float(difference.mean())
    band = "healthy" if gap <= GAP_HEALTHY else "elevated" if gap < GAP_BROKEN else "broken"
    if budget is None:
        # the band from 0.05 on counts as broken, its edge included
        bound, origin = math.nextafter(GAP_BROKEN, 0.0), f"band of public reports, this one is {band}"
    else:
        bound, origin = budget.value, budget.origin
    # a gap that is not finite has no signed mean, and signed_mean_difference has one finite side to refer to
    signed = signed_mean_difference(train - rollout, torch.zeros_like(train))
    return (
        Measure(name="mean |log_prob gap|", value=gap, bound=bound, unit="nats", origin=origin),
        Measure(name="signed log_prob gap", value=signed.mean, unit="nats", origin=f"{signed.z:+.1f} standard errors"),
        Measure(name="max |log_prob gap|", value=_largest(difference), unit="nats"),
    )


def _judged(name: str, value: float, budget: Budget | None, reason: str, unit: str = "") -> Measure:
    budget = budget or Budget.exact(metric=name, reason=reason, unit=unit)
    return Measure(name=name, value=value, bound=budget.value, unit=budget.unit or unit, origin=budget.origin)


def _chosen(response_mask: torch.Tensor, **tensors: torch.Tensor) -> list[torch.Tensor]:
    mask = response_mask.detach().cpu() > 0
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            found = tuple(tensor.shape)
            raise InputError("shape differs from response_mask", where=name, expected=tuple(mask.shape), found=found)
    if not bool(mask.any()):
        raise InputError("the mask has no response token", where="response_mask", expected="at least one 1", found=0)
    return [tensor.detach().cpu().to(torch.float64)[mask] for tensor in tensors.values()]


def _largest(values: torch.Tensor) -> float:
    return float(values.max())
