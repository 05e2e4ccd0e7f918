"""Do two tensors share memory? Facts about storage, the same facts along a chain of ops, and the sentinel that decides.

Why it matters: a rollout engine keeps weights derived from ``kv_b_proj`` (``W_UK_T``, ``W_UV``). While they are views,
an in-place weight update reaches them; once an op on the way returns new storage they go stale (verl pull request
4130). On an Ascend NPU both ``.contiguous()`` and an internal-format ``.view()`` were reported to do that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from alignment.errors import InputError

SENTINEL = -100


@dataclass(frozen=True, kw_only=True)
class StorageFacts:
    """Where a tensor's elements live: addresses in bytes, offset and strides in elements."""

    data_ptr: int
    storage_ptr: int
    storage_bytes: int
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    contiguous: bool
    has_base: bool
    dtype: str
    device: str


def facts(tensor: torch.Tensor) -> StorageFacts:
    """Pointer, stride and contiguity facts of a tensor. Reads no element."""
    storage = tensor.untyped_storage()
    return StorageFacts(
        data_ptr=tensor.data_ptr(),
        storage_ptr=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
        storage_offset=tensor.storage_offset(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        contiguous=tensor.is_contiguous(),
        has_base=tensor._is_view(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
    )


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when both tensors live on one storage, not necessarily on overlapping elements (never for empty ones)."""
    if a.device != b.device:
        return False
    x, y = a.untyped_storage(), b.untyped_storage()
    return x.data_ptr() == y.data_ptr() and x.nbytes() > 0 and y.nbytes() > 0


def is_view_of(derived: torch.Tensor, source: torch.Tensor) -> bool:
    """True when every element of ``derived`` is an element of ``source``'s address range on the same storage.

    Autograd's view relation (``Tensor._is_view``) is not asked: under ``no_grad`` and after ``detach`` it says nothing.
    """
    if derived.numel() == 0 or not shares_storage(derived, source):
        return False
    low, high = _address_range(derived)
    source_low, source_high = _address_range(source)
    return source_low <= low and high <= source_high


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    low = tensor.data_ptr()
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (span + 1) * tensor.element_size()


def sentinel_seen(source: torch.Tensor, derived: torch.Tensor, value: float = SENTINEL) -> bool:
    """The decisive test: is ``value``, written in place to all of ``source``, read through all of ``derived``?

    ``source`` is restored bit for bit. Elements of ``derived`` that held ``value`` before cannot decide, so a tensor
    made only of them is refused.

    Raises:
        InputError: when ``derived`` holds nothing but the sentinel already, or either tensor is empty.
    """
    if source.numel() == 0 or derived.numel() == 0:
        raise InputError("an empty tensor cannot carry a sentinel", where="sentinel_seen")
    with torch.no_grad():
        saved = source.detach().clone()
        if bool((derived == value).all()):
            raise InputError(
                "the derived tensor holds the sentinel already, so the test cannot decide",
                where="sentinel_seen",
                expected=f"a value other than {value}",
                next_step="pass another sentinel",
            )
        try:
            source.detach().fill_(value)
            return bool((derived == value).all())
        finally:
            source.detach().copy_(saved)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One op of a chain: the facts before and after, and whether the result still sees the very first source."""

    op: str
    before: StorageFacts
    after: StorageFacts
    same_storage: bool
    view_of_source: bool
    sentinel: bool

    def row(self) -> tuple[str, str, str, str, str, str]:
        """(op, strides before, strides after, contiguous after, address, aliasing) for a table."""
        return (
            self.op,
            str(self.before.strides),
            str(self.after.strides),
            "contiguous" if self.after.contiguous else "strided",
            "same address" if self.after.data_ptr == self.before.data_ptr else "other address",
            "aliases the source" if self.sentinel else "a copy",
        )


def view(*shape: int) -> tuple[str, Callable]:
    """``t.view(shape)``: must alias or raise, by PyTorch's contract."""
    return f"view{shape}", lambda t: t.view(*shape)


def reshape(*shape: int) -> tuple[str, Callable]:
    """``t.reshape(shape)``, the control: it may copy, and does for strides that no view can express."""
    return f"reshape{shape}", lambda t: t.reshape(*shape)


def transpose(dim0: int, dim1: int) -> tuple[str, Callable]:
    """``t.transpose(dim0, dim1)``: always aliases."""
    return f"transpose({dim0}, {dim1})", lambda t: t.transpose(dim0, dim1)


def contiguous() -> tuple[str, Callable]:
    """``t.contiguous()``: the same tensor if it is contiguous, else a copy."""
    return "contiguous()", lambda t: t.contiguous()


def split(sizes: Sequence[int], dim: int, part: int) -> tuple[str, Callable]:
    """``t.split(sizes, dim)[part]``: always aliases."""
    return f"split({list(sizes)}, {dim})[{part}]", lambda t: t.split(list(sizes), dim)[part]


def chain(tensor: torch.Tensor, ops: Sequence[tuple[str, Callable]]) -> list[Step]:
    """Apply ``ops`` one after another and record the facts before and after each.

    Args:
        tensor: the source; it is written to by the sentinel test and restored after every step.
        ops: pairs of a name and a function of a tensor; :func:`view`, :func:`reshape`, :func:`transpose`,
            :func:`contiguous` and :func:`split` make them.

    Returns:
        One :class:`Step` per op; ``view_of_source`` and ``sentinel`` are about the first tensor, not the one before.

    Raises:
        InputError: when an op refuses its input; names the op and the shape and strides it was given.
    """
    steps, current = [], tensor.detach()
    source = current
    for name, op in ops:
        try:
            following = op(current)
        except RuntimeError as error:
            raise InputError(
                f"{name} refused its input: {str(error).splitlines()[0]}",
                where="aliasing chain",
                found=f"shape {tuple(current.shape)}, strides {tuple(current.stride())}",
            ) from error
        steps.append(
            Step(
                op=name,
                before=facts(current),
                after=facts(following),
                same_storage=shares_storage(current, following),
                view_of_source=is_view_of(following, source),
                sentinel=sentinel_seen(source, following),
            )
        )
        current = following
    return steps


def first_copy(steps: Sequence[Step]) -> Step | None:
    """The first op whose result no longer sees the source, or None."""
    return next((step for step in steps if not step.sentinel), None)
