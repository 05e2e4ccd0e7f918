"""The ranks of a megatron-core run: who holds what, who computes the same samples, and how tensors get between them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.models.config import ModelConfig
from alignment.weights.megatron_layout import ParallelSizes, Place, owner
from alignment.weights.megatron_names import MegatronParameter, Split

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

_current: MegatronGroups | None = None


class MegatronGroups:
    """This process's place among the ranks. Made by :func:`join_groups`; one per process at a time.

    Attributes:
        place: in the groups that cut parameters.
        replica: the ranks (tensor · pipeline · context) that compute the same samples as this one, in order.
        replica_rank: this rank's place among them.
        data_rank, data_size: among the replicas.
    """

    def __init__(self, sizes: ParallelSizes, device: Device) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state as ps

        self.sizes, self.device = sizes, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.place = Place(
            tensor=ps.get_tensor_model_parallel_rank(),
            pipeline=ps.get_pipeline_model_parallel_rank(),
            expert=ps.get_expert_model_parallel_rank(),
            expert_tensor=ps.get_expert_tensor_parallel_rank(),
        )
        self.context_rank = ps.get_context_parallel_rank()
        self.data_rank, self.data_size = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        self._tensor = ps.get_tensor_model_parallel_group()
        self._expert_tensor = ps.get_expert_tensor_parallel_group()
        self._expert = ps.get_expert_model_parallel_group()
        self._pipeline = ps.get_pipeline_model_parallel_group()
        self._context = ps.get_context_parallel_group()
        data_ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(data_ranks, self.data_rank)
        self.replica = [rank for rank, data in enumerate(data_ranks) if data == self.data_rank]
        self.replica_rank = self.replica.index(self.rank)
        # Every rank has to take part in making every group.
        groups = {
            data: dist.new_group([rank for rank, other in enumerate(data_ranks) if other == data])
            for data in sorted(set(data_ranks))
        }
        self._replica = groups[self.data_rank]

    @property
    def last_stage(self) -> bool:
        return self.place.pipeline == self.sizes.pipeline_model_parallel_size - 1

    def share_in_replica(self, value: Any) -> list[Any]:
        """``value`` of every rank of the replica, in order. Values are plain objects and host tensors."""
        if len(self.replica) == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * len(self.replica)
        dist.all_gather_object(values, value, group=self._replica)
        return values

    def most(self, value: int) -> int:
        """The largest ``value`` over all ranks."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        held = torch.tensor([value], device=self.device.torch_device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()

    def gather_context(self, x: Tensor) -> Tensor:
        """``x`` [b, s/c] of every context rank as [b, s] in the order of positions; differentiable.

        Every context rank computes the same loss from the result, so each takes only the gradient of its own part: the
        sum over context ranks is then the gradient of the loss.
        """
        if self.sizes.context_parallel_size == 1:
            return x
        return _GatherContext.apply(x, self._context)

    def gather_vocabulary(self, logits: Tensor) -> Tensor:
        """``logits`` [b, s, v/t] of every tensor parallel rank as [b, s, v]; differentiable, same loss everywhere."""
        if self.sizes.tensor == 1:
            return logits
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        return gather_from_tensor_model_parallel_region(logits)

    def parts(
        self,
        parameter: MegatronParameter,
        config: ModelConfig,
        held: Tensor | None,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The parts of ``parameter`` in order of their tensor parallel ranks, on every rank.

        Args:
            held: this rank's part, None where it holds none.
            shape, dtype: of one part.
        """
        import torch.distributed as dist

        pipeline, _, expert = owner(parameter, config, self.sizes)
        routed = parameter.expert is not None
        size = 1 if parameter.split is Split.REPLICATED else (self.sizes.expert_tensor if routed else self.sizes.tensor)
        if held is not None:
            parts = [held.contiguous()]
            if size > 1:
                parts = [torch.empty_like(parts[0]) for _ in range(size)]
                dist.all_gather(parts, held.contiguous(), group=self._expert_tensor if routed else self._tensor)
        else:
            parts = [torch.empty(tuple(shape), dtype=dtype, device=self.device.torch_device) for _ in range(size)]
        if routed and self.sizes.expert_model_parallel_size > 1 and self.place.pipeline == pipeline:
            self._broadcast(parts, self._expert, expert)
        if self.sizes.pipeline_model_parallel_size > 1:
            self._broadcast(parts, self._pipeline, pipeline)
        return parts

    def _broadcast(self, tensors: Sequence[Tensor], group: Any, source: int) -> None:
        import torch.distributed as dist

        root = dist.get_process_group_ranks(group)[source]
        for tensor in tensors:
            dist.broadcast(tensor, root, group=group)


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        import torch.distributed as dist

        size, ctx.rank = group.size(), dist.get_rank(group)
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        order = context_order(x.shape[1] * size, size).to(x.device)
        ctx.mine = order.view(size, -1)[ctx.rank]
        out = torch.empty(len(x), x.shape[1] * size, *x.shape[2:], dtype=x.dtype, device=x.device)
        out[:, order] = torch.cat(parts, dim=1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.mine].contiguous(), None


def context_order(length: int, size: int) -> Tensor:
    """The positions held by context ranks 0, 1, …, one after the other."""
    from alignment.backends.megatron_model import zigzag

    return torch.cat([zigzag(length, size, rank) for rank in range(size)])


def join_groups(sizes: ParallelSizes, device: Device, *, seed: int = 1) -> MegatronGroups:
    """The groups of this process for ``sizes``; those of other sizes are given up, and engines on them become useless.

    The ranks are those of the default process group, which is made for a single process where there is none.

    Raises:
        InputError: ``sizes`` do not fit the number of ranks.
    """
    global _current
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[device.kind], store=dist.HashStore(), rank=0, world_size=1)
    if _current is not None and (_current.sizes, _current.world_size) == (sizes, dist.get_world_size()):
        return _current
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    leave_groups()
    needed = sizes.model_parallel
    if dist.get_world_size() % needed:
        raise InputError(
            "unsupported parallel size",
            where="the number of ranks",
            expected=f"a multiple of {needed}",
            found=dist.get_world_size(),
        )
    ps.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
        context_parallel_size=sizes.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor,
        distributed_timeout_minutes=datetime.timedelta(minutes=10).seconds // 60,
    )
    model_parallel_cuda_manual_seed(seed)
    _current = MegatronGroups(sizes, device)
    return _current


def leave_groups() -> None:
    """Gives up megatron-core's groups (not the default process group)."""
    global _current
    from megatron.core import parallel_state as ps

    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
        # 0.12 leaves these behind, and later groups then believe in ranks of the earlier ones.
        for name in [n for n in vars(ps) if n.endswith("_GLOBAL_RANKS")]:
            setattr(ps, name, None)
    _current = None
