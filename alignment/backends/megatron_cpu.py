"""What megatron-core needs on a machine without an accelerator: named shims, in force only inside :func:`on_cpu`.

Every shim says what fails without it; the engine tests switch each off and see that failure.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from alignment.errors import InputError

CPU = torch.device("cpu")


class Patches:
    """Attributes replaced until :meth:`undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces ``owner.name``; an attribute that was not there is taken away again afterwards."""
        missing = name not in vars(owner)
        before = None if missing else vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(
            functools.partial(delattr, owner, name) if missing else functools.partial(setattr, owner, name, before)
        )

    def enter(self, context: Any) -> None:
        """Enters a context that is left on :meth:`undo`."""
        context.__enter__()
        self._undo.append(functools.partial(context.__exit__, None, None, None))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


@dataclass(frozen=True, kw_only=True)
class Shim:
    """One replacement.

    Attributes:
        name: how tests and messages call it.
        why: what fails without it.
        apply: puts it in force.
        versions: of megatron-core it is for, as a prefix; None for all.
        for_missing_engine: what it makes up for is not a CPU but a missing Transformer Engine, so that a CUDA machine
            without it needs it too.
    """

    name: str
    why: str
    apply: Callable[[Patches], None]
    versions: str | None = None
    for_missing_engine: bool = False

    def fits(self, version: str) -> bool:
        return self.versions is None or version.startswith(self.versions)


class _Idle:
    """A stream or event of a device that works in order: nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> _Idle:
        return _Idle()

    def elapsed_time(self, *args: Any) -> float:
        return 0.0


def _device_module(patches: Patches) -> None:
    # One function object per name: torch._dynamo refuses the same object under two names.
    def answering(value: Any) -> Callable:
        return lambda *args, **kwargs: value

    cuda = torch.cuda
    patches.set(cuda, "current_device", answering(CPU))
    for name in ("set_device", "synchronize", "empty_cache", "set_stream"):
        patches.set(cuda, name, answering(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        patches.set(cuda, name, answering(0))
    patches.set(cuda, "get_device_capability", answering((0, 0)))


def _streams(patches: Patches) -> None:
    cuda = torch.cuda
    patches.set(cuda, "Stream", _Idle)
    patches.set(cuda, "Event", _Idle)
    patches.set(cuda, "current_stream", lambda *args, **kwargs: _Idle())
    patches.set(cuda, "default_stream", lambda *args, **kwargs: _Idle())
    patches.set(cuda, "stream", lambda stream: contextlib.nullcontext())


def _generators(patches: Patches) -> None:
    import megatron.core.tensor_parallel.random as random

    patches.set(torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    patches.set(torch.cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    patches.set(torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed))
    patches.set(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    if hasattr(random, "_get_cuda_rng_state"):
        patches.set(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class CudaToCpu(TorchFunctionMode):
    """Answers requests for CUDA tensors with CPU tensors; ``Tensor.type()`` names the class that is expected."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _tensors(patches: Patches) -> None:
    patches.set(torch.nn.Module, "cuda", lambda module, *args, **kwargs: module)
    patches.enter(CudaToCpu())


def _eager(patches: Patches) -> None:
    patches.enter(torch.compiler.set_stance("force_eager"))


def _norm(patches: Patches) -> None:
    import megatron.core.transformer.torch_norm as torch_norm

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> torch.nn.RMSNorm:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm

    patches.set(torch_norm.WrappedTorchNorm, "__new__", staticmethod(new))


def _split_sizes(patches: Patches) -> None:
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    patches.set(dispatcher, "maybe_move_tensor_to_cpu", move)


def _uneven_collectives(patches: Patches) -> None:
    import torch.distributed as dist

    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(tensor_list: list, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        rows = [len(t) if t.dim() else 1 for t in tensor_list]
        if len(set(rows)) == 1:
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        gather(parts, padded, group=group)
        for target, part, count in zip(tensor_list, parts, rows):
            target.copy_(part[:count])
        return None

    def reduce_scatter(
        output: torch.Tensor, input_list: list, op: Any = dist.ReduceOp.SUM, group: Any = None, **others: Any
    ) -> Any:
        rows = [len(t) if t.dim() else 1 for t in input_list]
        if len(set(rows)) == 1:
            return scatter(output, input_list, op=op, group=group, **others)
        whole = torch.cat(list(input_list))
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split(rows)[dist.get_rank(group)])
        return None

    patches.set(dist, "all_gather", all_gather)
    patches.set(dist, "reduce_scatter", reduce_scatter)


def _router_gemm(patches: Patches) -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if "te_general_gemm" not in vars(moe_utils):
        patches.set(moe_utils, "te_general_gemm", None)


def _engine_version(patches: Patches) -> None:
    import megatron.core.utils as utils
    from packaging.version import Version

    patches.set(utils, "get_te_version", lambda: Version("0"))


def _quantized_shards(patches: Patches) -> None:
    import megatron.core.optimizer.distrib_optimizer as distributed

    patches.set(distributed, "quantize_param_shard", lambda *args, **kwargs: None)


def _offload_copies(patches: Patches) -> None:
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    def groups(optimizer: Any, offload_fraction: float) -> tuple:
        """Every parameter gets a host copy of its own, as on a device at an offload fraction of 1."""
        host_groups, host_copy, device_of, in_float32 = [], {}, {}, {}
        for group in optimizer.param_groups:
            copies = []
            for parameter in group["params"]:
                copy = parameter.detach().clone()
                if optimizer.param_update_in_fp32 and copy.dtype != torch.float32:
                    copy = copy.float()
                    in_float32[parameter] = copy
                host_copy[parameter], device_of[copy] = copy, parameter
                copies.append(copy)
            if copies:
                host_groups.append({**group, "params": copies})
        return host_groups, [], host_copy, device_of, in_float32

    patches.set(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", groups)


SHIMS: tuple[Shim, ...] = (
    Shim(
        name="device_module",
        why="asking torch.cuda for the current device, its memory or a synchronisation raises without a driver",
        apply=_device_module,
    ),
    Shim(
        name="streams",
        why="shared experts, the dispatcher and the optimizer make CUDA streams and events",
        apply=_streams,
    ),
    Shim(
        name="generators", why="the tracker of random states reads and sets those of the CUDA device", apply=_generators
    ),
    Shim(
        name="tensors",
        why="schedules, optimizers and rope make tensors on device 'cuda' and recognise dtypes by CUDA tensor types",
        apply=_tensors,
    ),
    Shim(
        name="eager",
        why="fused functions are compiled on their first call, with a C++ compiler and for more than a minute",
        apply=_eager,
    ),
    Shim(
        name="norm",
        why="the torch norm refuses sequence parallelism and does not mark its weight for it",
        apply=_norm,
        for_missing_engine=True,
    ),
    Shim(
        name="split_sizes",
        why="the all-to-all dispatcher turns only CUDA tensors into the numbers that the collective takes",
        apply=_split_sizes,
    ),
    Shim(
        name="uneven_collectives",
        why="expert tensor parallel ranks exchange different numbers of tokens, which gloo refuses and NCCL takes",
        apply=_uneven_collectives,
    ),
    Shim(
        name="router_gemm",
        why="the router reads a name that is only defined with Transformer Engine",
        apply=_router_gemm,
        for_missing_engine=True,
        versions="0.16",
    ),
    Shim(
        name="engine_version",
        why="optimizer settings compare the version of Transformer Engine, which is None where it is not installed",
        apply=_engine_version,
        for_missing_engine=True,
        versions="0.16",
    ),
    Shim(
        name="quantized_shards",
        why="the distributed optimizer calls a function that raises without Transformer Engine",
        apply=_quantized_shards,
        for_missing_engine=True,
        versions="0.12",
    ),
    Shim(
        name="offload_copies",
        why="the offloading optimizer makes host copies only of CUDA parameters and then misses those of the others",
        apply=_offload_copies,
    ),
)


def configuration() -> dict[str, Any]:
    """Settings of ``TransformerConfig`` that CPU kernels need: no fusion that exists on CUDA only."""
    return {
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "moe_grouped_gemm": False,
        "moe_shared_expert_overlap": False,
    }


_depth = 0


@contextlib.contextmanager
def without_transformer_engine() -> Iterator[None]:
    """Puts in force only what makes up for a missing Transformer Engine, on a CUDA device."""
    import megatron.core

    patches = Patches()
    try:
        for shim in SHIMS:
            if shim.for_missing_engine and shim.fits(megatron.core.__version__):
                shim.apply(patches)
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def on_cpu(*, without: Collection[str] = ()) -> Iterator[None]:
    """Puts the shims in force; what they replaced is back afterwards. Nested uses are one.

    Args:
        without: names of shims to leave out, to show what they are for.

    Raises:
        InputError: an unknown name.
    """
    global _depth
    unknown = set(without) - {shim.name for shim in SHIMS}
    if unknown:
        raise InputError(
            f"no shim is called {min(unknown)!r}", where="megatron_cpu", expected=", ".join(s.name for s in SHIMS)
        )
    if _depth:
        yield
        return
    patches = Patches()
    _depth += 1
    try:
        # The rest of torch.cuda has to be in place before megatron.core is imported.
        early = ("device_module", "streams", "tensors", "eager")
        for shim in sorted(SHIMS, key=lambda s: s.name not in early):
            if shim.name not in early:
                import megatron.core

                if not shim.fits(megatron.core.__version__):
                    continue
            if shim.name not in without:
                shim.apply(patches)
        yield
    finally:
        patches.undo()
        _depth -= 1
