"""Tensor and sequence parallelism: one block whose weights, activations and gradients are spread in every way there is.

* ``sharded`` weights (``up``, ``down``): a rank owns a part and its gradient;
* ``sequence_parallel`` weights (``norm``, ``bias``): every rank owns a copy and sees a part of the tokens, so the
  gradients are parts that add up;
* ``replicated`` weights (``tower``: a router, a vision tower): every rank owns a copy and sees all tokens, so the
  gradients are equal already and must not add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.parallel import collectives

SHARDED, SEQUENCE_PARALLEL, REPLICATED = "sharded", "sequence_parallel", "replicated"
KINDS = {"norm": SEQUENCE_PARALLEL, "up": SHARDED, "down": SHARDED, "bias": SEQUENCE_PARALLEL, "tower": REPLICATED}
SHARD_DIMENSION = {"up": 0, "down": 1}


def gather_sequence(parts: Sequence[Tensor], *, consumers: str) -> list[Tensor]:
    """All tokens on every rank, with the backward that fits what reads them.

    ``sharded`` consumers each make another part of the result: the gradients on the ranks are parts that add up
    (reduce-scatter). ``replicated`` consumers all make the same result: the gradients are equal, and a rank takes its
    slice of its own (Megatron-LM's ``gather_from_sequence_parallel_region``, ``tensor_parallel_output_grad``).

    Args:
        parts: ``[b, s / tp, h]`` per rank.

    Returns:
        ``[b, s, h]`` per rank.

    Raises:
        InputError: another kind of consumers.
    """
    if consumers not in (SHARDED, REPLICATED):
        raise InputError(
            "unknown consumers", where="gather_sequence", expected=f"{SHARDED} | {REPLICATED}", found=consumers
        )
    return list(_Gather.apply(consumers, *parts))


def gathered_gradient(gradients: Sequence[Tensor], *, consumers: str) -> list[Tensor]:
    """The backward of :func:`gather_sequence`: ``[b, s, h]`` per rank to ``[b, s / tp, h]`` per rank."""
    if consumers == SHARDED:
        return collectives.reduce_scatter(gradients, dim=1)
    return [collectives.split_evenly(g, len(gradients), dim=1)[rank] for rank, g in enumerate(gradients)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, consumers, *parts):
        ctx.consumers = consumers
        return tuple(whole.clone() for whole in collectives.all_gather(parts, dim=1))

    @staticmethod
    def backward(ctx, *gradients):
        return None, *gathered_gradient(gradients, consumers=ctx.consumers)


def scatter_sequence(wholes: Sequence[Tensor]) -> list[Tensor]:
    """Each rank keeps its slice of a result that all ranks have; the backward gives every rank the whole gradient."""
    return list(_Scatter.apply(*wholes))


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *wholes):
        return tuple(collectives.split_evenly(w, len(wholes), dim=1)[rank].clone() for rank, w in enumerate(wholes))

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(whole.clone() for whole in collectives.all_gather(gradients, dim=1))


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / √(mean x² + eps) · weight, over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class SequenceParallelBlock:
    """``y = x + down(silu(up(norm(x)))) + bias``, then ``y + tanh(tower(y))``, on ``tp`` ranks.

    Args:
        weights: ``norm`` [h], ``up`` [f, h], ``down`` [h, f], ``bias`` [h], ``tower`` [h, h].
        tp: number of ranks; f and the sequence divide by it.
    """

    def __init__(self, weights: Mapping[str, Tensor], tp: int) -> None:
        self.tp = tp
        self.local: dict[str, list[Tensor]] = {}
        for name, whole in weights.items():
            if KINDS[name] == SHARDED:
                parts = collectives.split_evenly(whole.detach(), tp, dim=SHARD_DIMENSION[name])
            else:
                parts = [whole.detach()] * tp
            self.local[name] = [part.clone().requires_grad_() for part in parts]

    def forward(self, x: Sequence[Tensor]) -> list[Tensor]:
        """``[b, s / tp, h]`` per rank to the same."""
        w = self.local
        normed = [rms_norm(part, w["norm"][rank]) for rank, part in enumerate(x)]
        gathered = gather_sequence(normed, consumers=SHARDED)
        partials = [
            torch.nn.functional.silu(full @ w["up"][rank].t()) @ w["down"][rank].t()
            for rank, full in enumerate(gathered)
        ]
        # The bias is added after the sum over ranks, once.
        reduced = collectives.reduce_scatter(partials, dim=1)
        hidden = [part + out + w["bias"][rank] for rank, (part, out) in enumerate(zip(x, reduced))]
        everywhere = gather_sequence(hidden, consumers=REPLICATED)
        tower = scatter_sequence([torch.tanh(full @ w["tower"][rank].t()) for rank, full in enumerate(everywhere)])
        return [part + out for part, out in zip(hidden, tower)]

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of each whole weight, after the reduction its kind needs."""
        return {
            name: reduced_gradient([part.grad for part in parts], kind=KINDS[name], dim=SHARD_DIMENSION.get(name, 0))
            for name, parts in self.local.items()
        }


def reduced_gradient(gradients: Sequence[Tensor], *, kind: str, dim: int = 0) -> Tensor:
    """What the optimizer gets for a weight of ``kind``: joined parts, the sum over ranks, or any rank's own."""
    if kind == SHARDED:
        return torch.cat(list(gradients), dim=dim)
    if kind == SEQUENCE_PARALLEL:
        return collectives.all_reduce(gradients)[0]
    return gradients[0]
