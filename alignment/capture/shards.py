"""Which part of a whole a tensor is: what DTensor and megatron-core's layers say about themselves."""

from __future__ import annotations

import sys
from typing import Any

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
        stride = getattr(parameter, "partition_stride", 1)
        return _tensor_parallel(parameter, parameter.partition_dim, expert=_of_expert(module), stride=stride)
    return _merged_outputs(module, parameter, 0) if parameter.dim() else None


def activation_shard(module: nn.Module, path: str, t: Tensor, batch: tuple[int, int] | None = None) -> Shard | None:
    """The place of a module's input or output, or of its gradient.

    Known are DTensors and, at several tensor parallel ranks of megatron-core, the outputs of column parallel layers,
    the inputs of row parallel ones, and the pieces of a sequence under sequence parallelism; the outputs of vLLM's
    merged layers; and under context parallelism the two chunks of a sequence that a rank of megatron-core holds, of
    tensors that are not cut by their features as well.

    Args:
        batch: (samples, tokens) of the micro batch that is running, by which a piece of a sequence is known.
    """
    if hasattr(t, "_local_tensor"):
        return _dtensor_shard(t)
    kind = type(module).__name__
    if kind in _MERGED:
        return _merged_outputs(module, t, t.dim() - 1) if path in ("output", "output.0") and t.dim() > 1 else None
    sharded = t.dim() >= 2 and (
        (kind in _COLUMN and path in ("output", "output.0") and not getattr(module, "gather_output", False))
        or (kind in _ROW and path == "args.0" and getattr(module, "input_is_parallel", False))
    )
    if batch is not None and _megatron() is not None:
        if _context_parallel() > 1:
            cut_twice = sharded and _tensor_parallel(t, t.dim() - 1, expert=_of_expert(module)) is not None
            return None if cut_twice else _sequence_chunks(t, batch)
        if t.dim() >= 3:
            piece = _tensor_parallel(t, 0)
            if piece is not None and (t.shape[1], piece.whole) == batch:
                return piece
    if not sharded or _context_parallel() > 1:
        return None
    # a rank holds its parts of gate and up side by side
    stride = getattr(getattr(module, "weight", None), "partition_stride", 1) if kind in _COLUMN else 1
    return _tensor_parallel(t, t.dim() - 1, expert=_of_expert(module), stride=stride)


def never_cut(module: nn.Module) -> bool:
    """Whether :func:`activation_shard` answers None for every tensor of the module that is no DTensor."""
    return type(module).__name__ not in _MERGED and _megatron() is None


_MERGED = ("MergedColumnParallelLinear", "QKVParallelLinear")


def _merged_outputs(module: nn.Module, t: Tensor, dim: int) -> Shard | None:
    """Of vLLM's layers that hold a part of each of several projections one after the other."""
    if type(module).__name__ not in _MERGED:
        return None
    size, sizes = getattr(module, "tp_size", 1), getattr(module, "output_sizes", None)
    if size == 1 or not sizes or getattr(module, "num_kv_head_replicas", 1) > 1:
        return None
    if t.shape[dim] * size != sum(sizes):
        return None
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    runs = tuple((begin + module.tp_rank * (n // size), n // size) for begin, n in zip(begins, sizes))
    return Shard.of(dim, sum(sizes), runs)


def _sequence_chunks(t: Tensor, batch: tuple[int, int]) -> Shard | None:
    """Of a sequence in 2·cp chunks rank r holds those numbered r and 2·cp − 1 − r, so that all do equal work under a
    causal mask (``get_batch_on_this_cp_rank`` of megatron-core). Under sequence parallelism its tensor parallel ranks
    share these.
    """
    state = _megatron()
    size, rank = state.get_context_parallel_world_size(), state.get_context_parallel_rank()
    samples, tokens = batch
    half, shares = tokens // 2, state.get_tensor_model_parallel_world_size()
    held = ((rank * half, half), ((2 * size - 1 - rank) * half, half))
    if t.dim() < 2 or tokens % 2:
        return None
    if tuple(t.shape[:2]) == (samples, tokens):
        return Shard.of(1, size * tokens, held)
    if t.shape[1] != samples or t.dim() < 3:
        return None
    if t.shape[0] == tokens:
        return Shard.of(0, size * tokens, held)
    if t.shape[0] * shares != tokens:
        return None
    first = state.get_tensor_model_parallel_rank() * t.shape[0]
    return Shard.of(0, size * tokens, _within(held, first, first + t.shape[0]))


def _within(runs: tuple[tuple[int, int], ...], first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Elements first … last − 1 of what ``runs`` hold together."""
    at, out = 0, []
    for start, length in runs:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            out.append((start + low - at, high - low))
        at += length
    return tuple(out)


def global_names(model: nn.Module) -> dict[str, str]:
    """Names of modules as they would be on one rank, where a rank counts its own layers and experts from 0.

    megatron-core's layers know their number in the whole model (``layer_number``, from 1); expert parallel ranks hold
    equal consecutive parts of the experts.
    """
    names = {name: name for name, _ in model.named_modules()}
    if _megatron() is None:
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


def _megatron() -> Any:
    """The parallel state of megatron-core, or None where the process has none: others import it and do not use it."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def has_parallel_state() -> bool:
    """Whether megatron-core runs in this process."""
    return _megatron() is not None


def _of_expert(module: nn.Module) -> bool:
    """Experts are cut among other ranks than the rest of the model."""
    return bool(getattr(module, "is_expert", False))


def _expert_parallel_rank() -> int:
    state = _megatron()
    return 0 if state is None else state.get_expert_model_parallel_rank() or 0


def _tensor_parallel(t: Tensor, dim: int, *, expert: bool = False, stride: int = 1) -> Shard | None:
    """A rank's part of a dimension, or of each of the ``stride`` equal ones that are merged in it."""
    state = _megatron()
    if state is None:
        return None
    if expert:
        size, rank = state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()
    else:
        size, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    if size == 1:
        return None
    length = t.shape[dim]
    if length % stride:
        return None
    run = length // stride
    return Shard.of(dim, size * length, tuple(((i * size + rank) * run, run) for i in range(stride)))


def _context_parallel() -> int:
    state = _megatron()
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
