"""How decided a choice of experts is: rounding may turn a near-tie either way, and a budget that allowed for it would hide faults."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.models.config import ModelConfig

# A choice counts as decided when scores in (0, 1) are this many unit roundoffs of the run dtype apart: rounded activations
# move them by one or two.
NEAR_TIE_ROUNDOFFS = 4


def routing_gap(scores: Tensor, config: ModelConfig) -> Tensor:
    """[n]: how far each row of ``scores`` [n, experts] is from another choice of experts or of groups."""
    groups = scores.unflatten(-1, (config.n_group, -1))
    by_group = groups.topk(2, dim=-1).values.sum(-1)
    gap = torch.full(scores.shape[:1], torch.inf, dtype=scores.dtype)
    if config.n_group > config.topk_group:
        best = by_group.sort(descending=True).values
        gap = best[:, config.topk_group - 1] - best[:, config.topk_group]
    kept = torch.zeros_like(by_group).scatter(-1, by_group.topk(config.topk_group).indices, 1.0).bool()
    best = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2).sort(descending=True).values
    k = config.num_experts_per_tok
    return torch.minimum(gap, best[:, k - 1] - best[:, k])
