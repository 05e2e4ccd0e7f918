"""Losses, divergences and advantages in plain Python floats, one token at a time, each with its derivative."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

Rows = Sequence[Sequence[float]]
Pair = tuple[float, float]
"""A value, and its derivative by the log-prob (or value) that is trained."""


def token_weights(
    mask: Rows, mode: str, *, tokens: int | None = None, sequences: int | None = None, width: int | None = None
) -> list[list[float]]:
    """What each token's loss is multiplied with (DAPO, arXiv:2503.14476, eq. 8; GRPO, 2402.03300; Dr. GRPO,
    2503.20783).

    ``tokens`` and ``sequences`` are those of the whole mini batch, by default those of ``mask``.
    """
    lengths = [sum(1 for m in row if m) for row in mask]
    tokens = sum(lengths) if tokens is None else tokens
    sequences = sum(1 for n in lengths if n) if sequences is None else sequences
    result = []
    for row, n in zip(mask, lengths):
        weight = {
            "token-mean": 1 / tokens,
            "seq-mean-token-sum": 1 / sequences,
            "seq-mean-token-mean": 1 / (sequences * max(n, 1)),
            "seq-mean-token-sum-norm": 1 / (sequences * (width or len(row))),
        }[mode]
        result.append([weight if m else 0.0 for m in row])
    return result


def policy_token(log_prob: float, old: float, advantage: float, *, low: float, high: float, c: float) -> Pair:
    """PPO's clipped loss with dual clip (arXiv:1707.06347 eq. 7; 1912.09729 eq. 5), the log-ratio clamped to ±20."""
    raw = log_prob - old
    ratio = math.exp(min(max(raw, -20.0), 20.0))
    slope = ratio if -20.0 < raw < 20.0 else 0.0
    inside = min(max(ratio, 1 - low), 1 + high)
    free, clipped = -advantage * ratio, -advantage * inside
    value, derivative = (free, -advantage * slope) if free >= clipped else (clipped, 0.0)
    if advantage < 0 and value > -advantage * c:
        return -advantage * c, 0.0
    return value, derivative


def policy_region(log_prob: float, old: float, advantage: float, *, low: float, high: float, c: float) -> str:
    """The name of the bound that decides at a token."""
    ratio = math.exp(min(max(log_prob - old, -20.0), 20.0))
    if advantage < 0 and ratio > c:
        return "clip_ratio_c"
    if advantage > 0 and ratio > 1 + high:
        return "clip_ratio_high"
    if advantage < 0 and ratio < 1 - low:
        return "clip_ratio_low"
    return "ratio"


def value_token(prediction: float, old: float, target: float, *, clip: float) -> Pair:
    """½ max((v − R)², (clip(v) − R)²) (Schulman et al.'s baselines)."""
    near = min(max(prediction, old - clip), old + clip)
    free, clipped = (prediction - target) ** 2, (near - target) ** 2
    if free >= clipped:
        return 0.5 * free, prediction - target
    return 0.5 * clipped, near - target if near == prediction else 0.0


def kl_token(log_prob: float, reference: float, kind: str) -> Pair:
    """Schulman's estimators (2020) with verl's clamps: the exponent to ±20 and k3 to ±10."""
    d = log_prob - reference
    if kind in ("k1", "kl"):
        return d, 1.0
    if kind == "abs":
        return abs(d), math.copysign(1.0, d)
    if kind in ("k2", "mse"):
        return d * d / 2, d
    if kind == "k1+":
        return d, d
    x = min(max(-d, -20.0), 20.0)
    value = math.exp(x) - 1 - x
    derivative = 1 - math.exp(x) if -20.0 < -d < 20.0 else 0.0
    value, derivative = (value, derivative) if value < 10.0 else (10.0, 0.0)
    return (value, d) if kind == "k3+" else (value, derivative)


def weighted_kl_token(log_prob: float, reference: float, behaviour: float) -> Pair:
    """clamp(π/μ · k3, 10) where a clamped log-ratio silences the token (NeMo-RL's ``calculate_kl``)."""
    raw = reference - log_prob
    d = min(max(raw, -20.0), 20.0)
    w = math.exp(min(max(log_prob - behaviour, -20.0), 20.0))
    k3 = math.exp(d) - 1 - d
    if w * k3 > 10.0:
        return 10.0, 0.0
    if abs(raw) > 20.0:
        return w * k3, 0.0
    slope = w if abs(log_prob - behaviour) < 20.0 else 0.0
    return w * k3, slope * k3 + w * (1 - math.exp(d))


def mean_by_sequence(values: Rows, mask: Rows) -> float:
    """The mean over sequences of the mean over their tokens."""
    means = []
    for row, allowed in zip(values, mask):
        kept = [x for x, m in zip(row, allowed) if m]
        means.append(sum(kept) / max(len(kept), 1))
    return sum(means) / len(means)


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], *, normalise: bool) -> list[float]:
    """GRPO: (R − mean) / (s + 1e-6) with the unbiased s; a group of one keeps R / (1 + 1e-6), as verl has it."""
    result = []
    for reward, group in zip(rewards, groups):
        mine = [r for r, g in zip(rewards, groups) if g == group]
        if len(mine) == 1:
            mean, deviation = 0.0, 1.0
        else:
            mean = math.fsum(mine) / len(mine)
            deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
        result.append((reward - mean) / (deviation + 1e-6) if normalise else reward - mean)
    return result


def leave_one_out(rewards: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """RLOO: R minus the mean of the others of its group (arXiv:2402.14740)."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups)) if g == group and j != i]
        result.append(reward - math.fsum(others) / len(others) if others else reward)
    return result


def gae(rewards: Rows, values: Rows, mask: Rows, *, gamma: float, lam: float) -> list[list[float]]:
    """Σ_k (γλ)^k δ_{t+k} over the response tokens (arXiv:1506.02438 eq. 16), by the sum itself; 0 elsewhere."""
    result = []
    for reward, value, allowed in zip(rewards, values, mask):
        places = [t for t, m in enumerate(allowed) if m]
        row = [0.0] * len(allowed)
        deltas = []
        for i, t in enumerate(places):
            after = value[places[i + 1]] if i + 1 < len(places) else 0.0
            deltas.append(reward[t] + gamma * after - value[t])
        for i, t in enumerate(places):
            row[t] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
        result.append(row)
    return result


def whitened(values: Rows, mask: Rows) -> list[list[float]]:
    """(x − mean) / √(unbiased variance + 1e-8) over the mask; 0 elsewhere."""
    kept = [x for row, allowed in zip(values, mask) for x, m in zip(row, allowed) if m]
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((x - mean) ** 2 for x in kept) / (len(kept) - 1)
    return [
        [(x - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for x, m in zip(row, allowed)]
        for row, allowed in zip(values, mask)
    ]


def jsd_row(student: Sequence[float], teacher: Sequence[float], beta: float) -> float:
    """The generalised Jensen-Shannon divergence of two lists of log-probs (arXiv:2306.13649, eq. 1 and its ends)."""

    def kl(p: Sequence[float], q: Sequence[float]) -> float:
        return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q) if a > -math.inf)

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixed = [
        math.log(m) if (m := beta * math.exp(t) + (1 - beta) * math.exp(s)) else -math.inf
        for s, t in zip(student, teacher)
    ]
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)
