"""Which part of a whole a tensor is: what DTensor and megatron-core's layers say about themselves."""

from __future__ import annotations

import sys

from torch import Tensor, nn

from alignment.capture.record import Shard

_COLUMN, _ROW = ("ColumnParallelLinear", "TEColumnParallelLinear"), ("RowParallelLinear", "TERowParallelLinear")


def local_tensor(t: Tensor) -> Tensor:
    """What this rank holds of ``t``."""
    return t._local_tensor if hasattr(t, "_local_tensor") else t


def parameter_shard(parameter: Tensor) -> Shard | None:
    """The place of a parameter, or of its gradient: a DTensor's, or a megatron-core tensor parallel parameter's."""
    if hasattr(parameter, "_local_tensor"):
        return _dtensor_shard(parameter)
    if getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "partition_dim", -1) >= 0:
        # Strided partitions (a fused gate and up projection) are several runs and no single shard.
        if getattr(parameter, "partition_stride", 1) == 1:
            return _tensor_parallel(parameter, parameter.partition_dim)
    return None


def activation_shard(module: nn.Module, role: str, path: str, t: Tensor) -> Shard | None:
    """The place of a module's input or output, or of its gradient.

    Known are DTensors and, at several tensor parallel ranks, the outputs of megatron-core's column parallel layers and
    the inputs of its row parallel ones. With context parallelism nothing is said: a rank holds two pieces there.
    """
    if hasattr(t, "_local_tensor"):
        return _dtensor_shard(t)
    kind = type(module).__name__
    if kind not in _COLUMN and kind not in _ROW or t.dim() < 2:
        return None
    sharded = (
        kind in _COLUMN and path in ("output", "output.0") and not getattr(module, "gather_output", False)
    ) or (kind in _ROW and path == "args.0" and getattr(module, "input_is_parallel", False))
    if not sharded or getattr(module, "explicit_expert_comm", False) or _context_parallel() > 1:
        return None
    return _tensor_parallel(t, t.dim() - 1)


def _tensor_parallel(t: Tensor, dim: int) -> Shard | None:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        return None
    size, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    if size == 1:
        return None
    length = t.shape[dim]
    return Shard(dim=dim, start=rank * length, length=length, whole=size * length)


def _context_parallel() -> int:
    state = sys.modules.get("megatron.core.parallel_state")
    return 1 if state is None else state.get_context_parallel_world_size()


def _dtensor_shard(t: Tensor) -> Shard | None:
    from torch.distributed.tensor import Shard as Placement
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    cut = [p.dim for p in t.placements if isinstance(p, Placement)]
    if len(set(cut)) != 1:
        return None
    [dim] = set(cut)
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    if shape[dim] == t.shape[dim]:
        return None
    return Shard(dim=dim, start=offset[dim], length=shape[dim], whole=t.shape[dim])
