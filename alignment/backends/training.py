"""Training engines: what the pipeline asks of whatever holds the trainable weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from alignment.errors import InputError

MicroBatch = Mapping[str, torch.Tensor]
"""A few samples: at least ``input_ids``, ``attention_mask``, ``position_ids`` [b, s] and ``responses`` [b, r]."""

Outputs = Mapping[str, torch.Tensor]
"""What one forward pass gives: ``log_probs`` and ``entropy`` [b, r] of a policy, ``values`` [b, r] of a critic."""

LossFunction = Callable[[Outputs, MicroBatch], tuple[torch.Tensor, Mapping[str, float | torch.Tensor]]]
"""Loss of one micro batch, already divided by the counts of its *whole* mini batch, and metrics under the same rule.

Such terms add up: the sum over micro batches and data parallel ranks is the loss of the mini batch, whatever the split.
"""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay, a global gradient norm and a warmed-up learning rate.

    ``lr_warmup_steps`` updates rise linearly (the first one already moves: it uses ``lr / lr_warmup_steps``);
    afterwards ``lr_scheduler_type`` is ``constant``, or ``cosine`` down to ``min_lr_ratio · lr`` at ``total_steps``.
    ``clip_grad`` is the largest global L2 norm of the gradient; 0 switches clipping off.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    lr_warmup_steps: int = 0
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float = 0.0
    total_steps: int = 0

    def __post_init__(self) -> None:
        if self.lr_scheduler_type not in ("constant", "cosine"):
            raise InputError(
                "unknown schedule",
                where="lr_scheduler_type",
                expected="constant or cosine",
                found=self.lr_scheduler_type,
            )
        if self.lr_scheduler_type == "cosine" and self.total_steps <= self.lr_warmup_steps:
            raise InputError(
                "a cosine schedule has to know where it ends",
                where="total_steps",
                expected=f"more than lr_warmup_steps = {self.lr_warmup_steps}",
                found=self.total_steps,
            )

    def learning_rate(self, update: int) -> float:
        """The learning rate of update number ``update``, counted from 0."""
        if update < self.lr_warmup_steps:
            return self.lr * (update + 1) / self.lr_warmup_steps
        if self.lr_scheduler_type == "constant":
            return self.lr
        progress = min(1.0, (update - self.lr_warmup_steps) / (self.total_steps - self.lr_warmup_steps))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one optimizer step gave one rank to compute.

    Attributes:
        tokens: real tokens, prompt and response, of the rows that pass through the rank; where several ranks hold one
            model, the rows of all of them.
        micro_batches: passes of the rank, idle ones included.
        pipeline_stages: ranks that hold one model's layers one after the other.
        pipeline_chunks: pieces of each stage, interleaved.
    """

    tokens: int
    micro_batches: int
    pipeline_stages: int = 1
    pipeline_chunks: int = 1

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch], *, passes: int | None = None, **pipeline: int) -> Workload | None:
        """The workload of ``micro_batches``, which take as many passes unless it is said otherwise.

        None where one has no ``attention_mask``: models that need none are trained too.
        """
        if not all("attention_mask" in batch for batch in micro_batches):
            return None
        tokens = sum(int((batch["attention_mask"] != 0).sum()) for batch in micro_batches)
        return cls(tokens=tokens, micro_batches=len(micro_batches) if passes is None else passes, **pipeline)


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """One optimizer step: this rank's share of the additive ``metrics``, and what is equal on every rank.

    ``grad_norm`` is the global norm before clipping; ``parameter_grad_norms`` is empty unless asked for; ``workload``
    is this rank's, None where an engine does not say.
    """

    metrics: Mapping[str, float]
    grad_norm: float
    learning_rate: float
    parameter_grad_norms: Mapping[str, float] = field(default_factory=dict)
    workload: Workload | None = None


@runtime_checkable
class TrainingEngine(Protocol):
    """Weights, their optimizer and the passes over them. One engine is one data parallel rank."""

    def forward(self, micro_batches: Sequence[MicroBatch], *, stage: str) -> list[dict[str, torch.Tensor]]:
        """Outputs of every micro batch without gradients, on the host, in order.

        Raises:
            InputError: the outputs are not finite, naming ``stage``; or the engine is offloaded.
        """
        ...

    def update(
        self, micro_batches: Sequence[MicroBatch], loss: LossFunction, *, stage: str, parameter_grad_norms: bool = False
    ) -> UpdateReport:
        """One optimizer step over one mini batch: gradients add up over micro batches, then over ranks."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and tensor of every weight, one at a time, on the device of the engine."""
        ...

    def save_state(self, directory: Path) -> None:
        """Weights, optimizer and schedule into ``directory``. Called on rank 0 only."""
        ...

    def load_state(self, directory: Path) -> None:
        """The inverse of :meth:`save_state`, on every rank.

        Raises:
            InputError: a tensor is missing, left over or of another shape or dtype.
        """
        ...

    def offload(self) -> None:
        """Gives the memory of the device back; the engine refuses to compute until :meth:`reload`."""
        ...

    def reload(self) -> None:
        """Brings everything back to the device."""
        ...


class SoleRank:
    """Data parallel over one rank: nothing to add up."""

    rank = 0
    world_size = 1

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves ``tensors`` as they are."""


class ProcessGroupRanks:
    """Data parallel ranks joined by ``torch.distributed`` (gloo on CPU, nccl on CUDA, hccl on NPU).

    Args:
        rank, world_size: place among the ranks.
        init_method: where rank 0 listens, ``tcp://host:port``.
        device_kind: decides the communication library.
    """

    def __init__(
        self, *, rank: int, world_size: int, init_method: str, device_kind: str, timeout_seconds: float = 120.0
    ) -> None:
        import datetime

        import torch.distributed as dist

        backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device_kind]
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        self.rank, self.world_size = rank, world_size

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces every tensor by its sum over the ranks, in one message per dtype."""
        import torch.distributed as dist

        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([t.reshape(-1) for t in group])
            dist.all_reduce(flat)
            for tensor, piece in zip(group, flat.split([t.numel() for t in group])):
                tensor.copy_(piece.view_as(tensor))

    def close(self) -> None:
        """Leaves the group."""
        import torch.distributed as dist

        dist.destroy_process_group()
