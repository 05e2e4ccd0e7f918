"""Routing and experts token by token, from the words of the DeepSeek-V3 report (arXiv:2412.19437, section 2.1.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from alignment.models.config import ModelConfig


def choose(scores: Tensor, bias: Tensor, config: ModelConfig) -> tuple[list[list[int]], Tensor]:
    """Experts of every token, best first, and the weights ``[n, k]`` in that order."""
    size = config.n_routed_experts // config.n_group
    biased = (scores + bias).tolist()
    chosen = []
    for row in biased:
        by_group = []
        for group in range(config.n_group):
            best = sorted(row[group * size : (group + 1) * size], reverse=True)
            by_group.append((sum(best[:2]), group))
        groups = {group for _, group in sorted(by_group, key=lambda pair: (-pair[0], pair[1]))[: config.topk_group]}
        allowed = [expert for expert in range(len(row)) if config.n_group == 1 or expert // size in groups]
        chosen.append(sorted(allowed, key=lambda expert: (-row[expert], expert))[: config.num_experts_per_tok])
    picked = torch.stack([scores[n, experts] for n, experts in enumerate(chosen)])
    if config.norm_topk_prob:
        picked = picked / picked.sum(-1, keepdim=True)
    return chosen, picked * config.routed_scaling_factor


def spread(chosen: list[list[int]], weights: Tensor, experts: int) -> Tensor:
    """The weights over all experts ``[n, experts]``, 0 where one is not chosen."""
    index = torch.tensor(chosen)
    return torch.zeros(len(chosen), experts, dtype=weights.dtype).scatter(1, index, weights)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)."""
    return x / (1 + torch.exp(-x))


def gated_mlp(x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    """down(silu(gate x) · up x)."""
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture(x: Tensor, weights: Mapping[str, Tensor], prefix: str, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Every expert on every token, times its weight or zero; and the shared experts. Also those weights ``[n,
    experts]``.
    """
    scores = 1 / (1 + torch.exp(-(x @ weights[f"{prefix}.gate.weight"].T)))
    bias = weights[f"{prefix}.gate.e_score_correction_bias"]
    chosen, _ = choose(scores.detach(), bias, config)
    selected = spread(
        chosen, torch.ones(len(chosen), config.num_experts_per_tok, dtype=x.dtype), config.n_routed_experts
    )
    share = scores * selected
    if config.norm_topk_prob:
        share = share / share.sum(-1, keepdim=True)
    share = share * config.routed_scaling_factor
    out = torch.zeros_like(x)
    for expert in range(config.n_routed_experts):
        out = out + share[:, expert : expert + 1] * gated_mlp(x, weights, f"{prefix}.experts.{expert}")
    if config.n_shared_experts:
        out = out + gated_mlp(x, weights, f"{prefix}.shared_experts")
    return out, share
