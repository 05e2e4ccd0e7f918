"""Which part of a whole a tensor is: what DTensor and megatron-core's layers say about themselves."""

from __future__ import annotations

import sys

from torch import Tensor, nn

from alignment.capture.record import Shard

_COLUMN, _ROW = ("ColumnParallelLinear", "TEColumnParallelLinear"), ("RowParallelLinear", "TERowParallelLinear")


def local_tensor(t: Tensor) -> Tensor:
    """What this rank holds of ``t``."""
    return t._local_tensor if hasattr(t, "_local_tensor") else t


def parameter_shard(parameter: Tensor, module: nn.Module) -> Shard | None:
    """The place of a parameter of ``module``, or its gradient: a DTensor's, or a parallel layer's of megatron-core."""
    if hasattr(parameter, "_local_tensor"):
        return _dtensor_shard(parameter)
    if getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "partition_dim", -1) >= 0:
        # Strided partitions (a fused gate and up projection) are several runs and no single shard.
        if getattr(parameter, "partition_stride", 1) == 1:
            return _tensor_parallel(parameter, parameter.partition_dim, expert=_of_expert(module))
    return None


def activation_shard(module: nn.Module, path: str, t: Tensor, batch: tuple[int, int] | None = None) -> Shard | None:
    """The place of a module's input or output, or of its gradient.

    Known are DTensors and, at several tensor parallel ranks of megatron-core, the outputs of column parallel layers,
    the inputs of row parallel ones, and the pieces of a sequence under sequence parallelism. With context parallelism
    nothing is said: a rank holds two pieces there.

    Args:
        batch: (samples, tokens) of the micro batch that is running, by which a piece of a sequence is known.
    """
    if hasattr(t, "_local_tensor"):
        return _dtensor_shard(t)
    kind = type(module).__name__
    if (
        t.dim() >= 3
        and batch is not None
        and "megatron.core.parallel_state" in sys.modules
        and _context_parallel() == 1
    ):
        piece = _tensor_parallel(t, 0)
        if piece is not None and (t.shape[1], piece.whole) == batch:
            return piece
    if kind not in _COLUMN and kind not in _ROW or t.dim() < 2:
        return None
    if getattr(getattr(module, "weight", None), "partition_stride", 1) != 1:
        # A rank holds its pieces of gate and up side by side, which is no single piece of the whole.
        return None
    sharded = (kind in _COLUMN and path in ("output", "output.0") and not getattr(module, "gather_output", False)) or (
        kind in _ROW and path == "args.0" and getattr(module, "input_is_parallel", False)
    )
    if not sharded or _context_parallel() > 1:
        return None
    return _tensor_parallel(t, t.dim() - 1, expert=_of_expert(module))


def global_names(model: nn.Module) -> dict[str, str]:
    """Names of modules as they would be on one rank, where a rank counts its own layers and experts from 0.

    megatron-core's layers know their number in the whole model (``layer_number``, from 1); expert parallel ranks hold
    equal consecutive parts of the experts.
    """
    names = {name: name for name, _ in model.named_modules()}
    if "megatron.core.parallel_state" not in sys.modules:
        return names
    for name, module in model.named_modules():
        number = getattr(module, "layer_number", None)
        stem, _, index = name.rpartition(".")
        if isinstance(number, int) and index.isdigit():
            _rename(names, name, f"{stem}.{number - 1}")
    experts = _expert_parallel_rank()
    for name, module in model.named_modules():
        if experts and name.endswith(".local_experts") and isinstance(module, nn.ModuleList):
            for i in range(len(module)):
                _rename(names, f"{name}.{i}", f"{names[name]}.{experts * len(module) + i}")
    return names


def _rename(names: dict[str, str], old: str, new: str) -> None:
    """Moves a module, and everything inside it that has not moved yet, to another name."""
    stem = names[old]
    for name in names:
        if name == old or name.startswith(f"{old}."):
            names[name] = new + names[name][len(stem) :]


def _of_expert(module: nn.Module) -> bool:
    """Experts are cut among other ranks than the rest of the model."""
    return bool(getattr(module, "is_expert", False))


def _expert_parallel_rank() -> int:
    state = sys.modules.get("megatron.core.parallel_state")
    return 0 if state is None else state.get_expert_model_parallel_rank() or 0


def _tensor_parallel(t: Tensor, dim: int, *, expert: bool = False) -> Shard | None:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        return None
    if expert:
        size, rank = state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()
    else:
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
