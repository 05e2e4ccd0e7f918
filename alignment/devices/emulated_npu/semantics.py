"""NPU behaviours on the emulated device, each a context manager over single aten kernels, undone on exit.

They act on ``npu`` tensors only; the CPU stays the untouched reference. They nest, combine, and reach backward, which
runs on another thread; for that they hold for the whole process, so enter them from one thread at a time. They model
*kinds* of difference, never the chip's bits: use them to prove that a comparison flags, localises or accepts, not to
set a bound. The switches ``torch.npu.matmul.allow_hf32`` and ``torch.npu.conv.allow_hf32`` are kept but change nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import torch

_ops = torch.ops.emu_npu

FORMAT_ND = 2
_BASE_FORMATS = frozenset({0, 1, 2, 27, 30})  # NCHW, NHWC, ND, NDHWC, NCDHW: no fractal blocks
_FLOAT32_MANTISSA_BITS = 23
HF32_MANTISSA_BITS = 11


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return _ops.host_alias(tensor) if tensor.device.type == "npu" else tensor


def _npu(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return _ops.from_host(tensor, like.device.index)


@contextlib.contextmanager
def _overridden(kernels: dict[str, Callable]) -> Iterator[None]:
    """Replace aten kernels on npu tensors inside the block. The newest replacement of a kernel wins."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "PrivateUse1")
        yield
    finally:
        library._destroy()


# ---------------------------------------------------------------------------------------------- internal formats


def _is_internal(tensor: torch.Tensor) -> bool:
    return _ops.get_format(tensor) not in _BASE_FORMATS


def _alias(operator: Callable, tensor: torch.Tensor, *geometry: object) -> torch.Tensor:
    """The view that an aten view operator gives, on the tensor's own storage."""
    host = operator(_ops.host_alias(tensor), *geometry)
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), host.storage_offset(), host.size(), host.stride())


def _copying(operator: Callable, copies: Callable[[torch.Tensor], bool]) -> Callable:
    def kernel(tensor: torch.Tensor, *geometry: object) -> torch.Tensor:
        if copies(tensor):
            host = operator(_ops.host_alias(tensor), *geometry)
            return _npu(host.clone(memory_format=torch.contiguous_format), tensor)
        return _alias(operator, tensor, *geometry)

    return kernel


# transpose, permute, slice, select, expand and the like reach the device as as_strided.
_VIEW, _AS_STRIDED = torch.ops.aten.view.default, torch.ops.aten.as_strided.default


@contextlib.contextmanager
def internal_format_view_copies() -> Iterator[None]:
    """Any view of a weight in an internal format (FRACTAL_NZ = 29 ...) silently is new storage in ND.

    The behaviour reported for vLLM-Ascend's MLA weights: ``view`` of an NZ ``kv_b_proj.weight`` does not alias it, so a
    later in-place weight update does not reach ``W_UK`` and ``W_UV``. Weights without gradient only (as in rollout).
    """
    with _overridden({"view": _copying(_VIEW, _is_internal), "as_strided": _copying(_AS_STRIDED, _is_internal)}):
        yield


@contextlib.contextmanager
def internal_format_as_strided_copies() -> Iterator[None]:
    """The rule of torch_npu's public sources: ``view`` aliases whatever the format; only ``as_strided`` copies.

    There ``view`` has aliased since 2022 (branches v2.5.1 to v2.12.0), and ``as_strided`` of an internal-format tensor
    makes a copy in the base format and warns not to write to it in place.
    """
    with _overridden({"as_strided": _copying(_AS_STRIDED, _is_internal)}):
        yield


# ---------------------------------------------------------------------------------------------- arithmetic


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arithmetic:
    """How reductions are computed; the nested contexts each change one field."""

    hf32: bool = False
    k_block: int | None = None
    lanes: int | None = None
    shuffled: bool = False


_arithmetic = _Arithmetic()
_lock = threading.RLock()
# Deliberately not seeded: two runs of one program must differ, as two runs on the device do.
_entropy = torch.Generator()
_entropy.seed()


@contextlib.contextmanager
def _changed(**fields: object) -> Iterator[None]:
    # Process-wide and not thread-local, because backward runs on autograd's device thread.
    global _arithmetic
    with _lock:
        outer, _arithmetic = _arithmetic, dataclasses.replace(_arithmetic, **fields)
    try:
        with _overridden(_REDUCTIONS) if outer == _Arithmetic() else contextlib.nullcontext():
            yield
    finally:
        with _lock:
            _arithmetic = outer


@contextlib.contextmanager
def hf32_matmul() -> Iterator[None]:
    """float32 matrix products with both inputs rounded to HF32; sums stay float32.

    HF32 is assumed to be 1 + 8 + 11 bits (sign, exponent, explicit mantissa), rounded to nearest, ties to even; the
    width is from public descriptions of the format, not measured on a chip. Other dtypes are untouched.
    """
    with _changed(hf32=True):
        yield


@contextlib.contextmanager
def blocked_k_accumulation(block: int) -> Iterator[None]:
    """Matrix products summed over K in blocks of ``block``, one after the other, in float32, rounded at the end."""
    if block < 1:
        raise ValueError(f"block is at least 1, not {block}")
    with _changed(k_block=block):
        yield


@contextlib.contextmanager
def interleaved_lane_sums(lanes: int = 8) -> Iterator[None]:
    """``sum`` over dimensions as ``lanes`` interleaved partial sums in float32, then a sum over the lanes."""
    if lanes < 1:
        raise ValueError(f"lanes is at least 1, not {lanes}")
    with _changed(lanes=lanes):
        yield


@contextlib.contextmanager
def nondeterministic_reductions(block: int = 64) -> Iterator[None]:
    """Matrix products and accumulating index writes whose order of summation differs from call to call and run to run.

    Covers ``mm``, ``bmm``, ``addmm``, ``baddbmm`` (K blocks of ``block`` in random order, unless an enclosing
    ``blocked_k_accumulation`` sets the block), ``index_add`` and ``index_put(accumulate=True)``. Under
    ``torch.use_deterministic_algorithms(True)`` the order is fixed, and two runs are equal bit by bit.
    """
    with _changed(shuffled=True, k_block=_arithmetic.k_block or block):
        yield


def round_to_hf32(tensor: torch.Tensor) -> torch.Tensor:
    """A finite float32 tensor rounded to HF32's 11 mantissa bits, to nearest, ties to even; relative error <= 2^-12."""
    dropped = _FLOAT32_MANTISSA_BITS - HF32_MANTISSA_BITS
    bits = tensor.contiguous().view(torch.int32)
    half_minus_one = (1 << (dropped - 1)) - 1
    rounded = (bits + half_minus_one + ((bits >> dropped) & 1)) & ~((1 << dropped) - 1)
    return torch.where(tensor.isfinite(), rounded.view(torch.float32), tensor)


def _order(count: int) -> torch.Tensor:
    if _arithmetic.shuffled and not torch.are_deterministic_algorithms_enabled():
        return torch.randperm(count, generator=_entropy)
    return torch.arange(count)


def _reordered(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are computed here rather than by torch's own kernel."""
    if dtype == torch.float32:
        return _arithmetic.hf32 or _arithmetic.k_block is not None
    return dtype in (torch.bfloat16, torch.float16) and _arithmetic.k_block is not None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """float32 [.., m, n] = [.., m, k] @ [.., k, n] of host tensors, in the arithmetic of the moment."""
    if _arithmetic.hf32 and left.dtype == torch.float32:
        left, right = round_to_hf32(left), round_to_hf32(right)
    left, right = left.float(), right.float()
    block = _arithmetic.k_block
    if block is None:
        return torch.matmul(left, right)
    lefts, rights = left.split(block, -1), right.split(block, -2)
    total = left.new_zeros(*left.shape[:-1], right.shape[-1])
    for index in _order(len(lefts)).tolist():
        total += torch.matmul(lefts[index], rights[index])
    return total


def _matmul(left, right):
    a, b = _host(left), _host(right)
    return _npu(_product(a, b).to(a.dtype) if _reordered(a.dtype) else torch.matmul(a, b), left)


def _added_matmul(added, left, right, *, beta=1, alpha=1):
    c, a, b = _host(added), _host(left), _host(right)
    if not _reordered(a.dtype):
        native = torch.addmm if a.dim() == 2 else torch.baddbmm
        return _npu(native(c, a, b, beta=beta, alpha=alpha), left)
    total = _product(a, b) * alpha
    if beta != 0:  # with beta == 0 the addend is not read, even where it is NaN
        total = c.float() * beta + total
    return _npu(total.to(a.dtype), left)


def _into(out, result):
    return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)


def _matmul_out(left, right, *, out):
    return _into(out, _matmul(left, right))


def _added_matmul_out(added, left, right, *, beta=1, alpha=1, out):
    return _into(out, _added_matmul(added, left, right, beta=beta, alpha=alpha))


def _added_matmul_(added, left, right, *, beta=1, alpha=1):
    return added.copy_(_added_matmul(added, left, right, beta=beta, alpha=alpha))


def _sum(tensor, dim, keepdim=False, *, dtype=None):
    host = _host(tensor)
    result_dtype = dtype or (host.dtype if host.is_floating_point() else torch.int64)
    if _arithmetic.lanes is None or result_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return _npu(torch.sum(host, dim, keepdim, dtype=dtype), tensor)
    dims = range(host.dim()) if not dim else {d % host.dim() for d in dim} if host.dim() else ()
    total = host.float()
    for d in dims:
        lanes = [
            total[(slice(None),) * d + (slice(lane, None, _arithmetic.lanes),)] for lane in range(_arithmetic.lanes)
        ]
        total = torch.stack([lane.sum(d, keepdim=True) for lane in lanes]).sum(0)
    total = total if keepdim or not host.dim() else total.squeeze(tuple(dims))
    return _npu(total.to(result_dtype), tensor)


def _sum_out(tensor, dim, keepdim=False, *, dtype=None, out):
    return _into(out, _sum(tensor, dim, keepdim, dtype=dtype))


def _index_add_(tensor, dim, index, source, *, alpha=1):
    order = _order(index.numel())
    rows = _host(source).index_select(dim, order) if source.dim() else _host(source)
    _host(tensor).index_add_(dim, _host(index).reshape(-1)[order], rows, alpha=alpha)
    return tensor


def _index_add(tensor, dim, index, source, *, alpha=1):
    return _index_add_(tensor.clone(), dim, index, source, alpha=alpha)


def _index_put_impl_(tensor, indices, values, accumulate=False, unsafe=False):
    hosts = [None if index is None else _host(index) for index in indices]
    value = _host(values)
    integer = all(index is None or index.dtype in (torch.int32, torch.int64) for index in hosts)
    if accumulate and integer and all(index is not None for index in hosts):
        # Every indexed row is one addend, so the rows can be taken in any order.
        hosts = list(torch.broadcast_tensors(*hosts))
        value = value.expand(*hosts[0].shape, *tensor.shape[len(hosts) :]).flatten(0, hosts[0].dim() - 1)
        order = _order(hosts[0].numel())
        hosts, value = [index.reshape(-1)[order] for index in hosts], value[order]
    torch.ops.aten._index_put_impl_(_host(tensor), hosts, value, accumulate, unsafe)
    return tensor


_REDUCTIONS = {
    "mm": _matmul,
    "bmm": _matmul,
    "mm.out": _matmul_out,
    "bmm.out": _matmul_out,
    "addmm": _added_matmul,
    "baddbmm": _added_matmul,
    "addmm_": _added_matmul_,
    "baddbmm_": _added_matmul_,
    "addmm.out": _added_matmul_out,
    "baddbmm.out": _added_matmul_out,
    "sum.dim_IntList": _sum,
    "sum.IntList_out": _sum_out,
    "index_add": _index_add,
    "index_add_": _index_add_,
    "_index_put_impl_": _index_put_impl_,
}
