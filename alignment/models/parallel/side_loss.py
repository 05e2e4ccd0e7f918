"""Losses beside the main one (load balancing, z-loss, multi-token prediction) that enter through the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class SideLoss:
    """Attaches side losses to activations (Megatron-LM's ``MoEAuxLossAutoScaler``).

    The activation passes through unchanged; in the backward the side loss gets ``scale`` as its gradient, whatever the
    main loss is. The scale has to be the one the main loss gets in the same schedule: with n micro batches 1/n.
    """

    def __init__(self) -> None:
        self.scale = 1.0

    def attach(self, activation: Tensor, loss: Tensor) -> Tensor:
        """``activation`` itself, with ``loss`` (a scalar) hanging on it."""
        return _Attach.apply(activation, loss, self)

    def set_scale(self, scale: float) -> None:
        """What a schedule calls before its first backward pass."""
        self.scale = scale


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, activation, loss, side):
        ctx.side, ctx.shape = side, loss.shape
        ctx.kind = loss.dtype
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.full(ctx.shape, ctx.side.scale, dtype=ctx.kind), None


def run_schedule(
    micro_batches: Sequence[Tensor], forward: Callable[[Tensor, SideLoss], Tensor], *, side: SideLoss | None = None
) -> float:
    """Gradient accumulation over micro batches of equal weight: every loss, main and side, counts 1/n.

    Args:
        forward: one micro batch → its main loss; attaches side losses on the way. Its backward is run here.

    Returns:
        The mean of the main losses.
    """
    side = side or SideLoss()
    count = len(micro_batches)
    side.set_scale(1.0 / count)
    total = 0.0
    for micro in micro_batches:
        loss = forward(micro, side) / count
        loss.backward()
        total += float(loss.detach())
    return total
