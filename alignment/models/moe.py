"""Mixture of experts with DeepSeek-V3's bias-corrected sigmoid router (arXiv:2412.19437, section 2.1.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.config import ModelConfig
from alignment.models.mlp import SwiGLU
from alignment.models.precision import at_least_float32


def select_experts(scores: Tensor, bias: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """The experts of each token and the weights their outputs enter with.

    1. Selection uses ``scores + bias``; a group of experts scores the sum of its two best, the best ``topk_group``
    groups stay. 2. Of their experts the best ``num_experts_per_tok`` are taken.
    3. The weights are the scores *without* the bias, divided by their sum where ``norm_topk_prob``, times
       ``routed_scaling_factor``.

    Args:
        scores: ``[n, n_routed_experts]``, in (0, 1).
        bias: ``[n_routed_experts]``, ``e_score_correction_bias``.

    Returns:
        expert numbers int64 ``[n, k]`` (in no particular order) and weights ``[n, k]`` in the dtype of ``scores``.
    """
    tokens, experts = scores.shape
    choice = (scores + bias).detach()
    if config.n_group > 1:
        grouped = choice.view(tokens, config.n_group, experts // config.n_group)
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, group_scores.topk(config.topk_group, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(tokens, experts)
    chosen = choice.topk(config.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(1, chosen)
    if config.norm_topk_prob:
        # The published code guards the division with this constant.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * config.routed_scaling_factor


class Router(nn.Module):
    """sigmoid(W x) in float32 at least, then :func:`select_experts`.

    ``e_score_correction_bias`` is a buffer: training moves it by the load of the experts, not by gradient. It is kept
    in float32 at least, because its steps vanish in bfloat16.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=dtype, device=device))
        bias = torch.zeros(config.n_routed_experts, dtype=at_least_float32(dtype), device=device)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, hidden_size]`` to expert numbers ``[n, k]`` and weights ``[n, k]`` (float32 at least)."""
        wide = at_least_float32(x.dtype)
        scores = torch.sigmoid(F.linear(x.to(wide), self.weight.to(wide)))
        return select_experts(scores, self.e_score_correction_bias.to(wide), self.config)


class MixtureOfExperts(nn.Module):
    """Σ over the chosen experts of weight · expert(x), plus the shared experts, which see every token.

    The ``n_shared_experts`` are one SwiGLU of their joint width, as published. Every routed expert runs, on no tokens
    if need be, so that each parameter always has a gradient.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config

        def swiglu(width: int) -> SwiGLU:
            return SwiGLU(config.hidden_size, width, dtype=dtype, device=device)

        self.gate = Router(config, dtype=dtype, device=device)
        self.experts = nn.ModuleList(swiglu(config.moe_intermediate_size) for _ in range(config.n_routed_experts))
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = swiglu(config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same shape."""
        x = hidden.flatten(0, -2)
        chosen, weights = self.gate(x)
        out = self.run_experts(x, chosen, weights).view_as(hidden)
        return out if self.shared_experts is None else out + self.shared_experts(hidden)

    def run_experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Σ_j weights[:, j] · expert[chosen[:, j]](x): sort the (token, choice) pairs by expert, run each on its
        slice, sort back.

        Sorting back instead of adding into place keeps the order of the sum, and so its bits, fixed on every device.
        """
        tokens, choices = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        experts = torch.arange(len(self.experts), device=chosen.device)
        counts = (chosen.flatten()[:, None] == experts).sum(0).tolist()
        slices = x[order // choices].split(counts)
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, slices, strict=True)])
        outputs = outputs[order.argsort()].view(tokens, choices, -1)
        return (outputs * weights.unsqueeze(-1)).sum(1).to(x.dtype)
