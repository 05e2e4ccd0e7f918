"""Ascend memory formats as tags on the storage. The bytes stay row-major: the emulator tags, it does not permute."""

from __future__ import annotations

import enum

import torch

from torch_npu._operator import operator

_ops = torch.ops.emu_npu


class Format(enum.IntEnum):
    """``torch_npu.Format`` (op-plugin docs, npu_format_cast)."""

    UNDEFINED = -1
    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    NC1HWC0_C04 = 12
    HWCN = 16
    NDHWC = 27
    FRACTAL_NZ = 29
    NCDHW = 30
    NDC1HWC0 = 32
    FRACTAL_Z_3D = 33
    NC = 35
    NCL = 47


def get_npu_format(tensor: torch.Tensor) -> Format:
    """The format number of a tensor's storage; ``Format.ND`` (2) unless it was cast."""
    return Format(_ops.get_format(tensor))


@operator(differentiable=True)
def npu_format_cast(input: torch.Tensor, acl_format: int | Format, customize_dtype: int | None = None) -> torch.Tensor:
    """``torch_npu.npu_format_cast(input, acl_format, customize_dtype=None) -> Tensor``.

    Returns ``input`` itself where the format is already right, else a new tensor in the format asked for.
    """
    target = Format(acl_format)
    if get_npu_format(input) == target:
        return input
    cast = input.clone(memory_format=torch.preserve_format)
    _ops.set_format(cast, int(target))
    return cast


@operator(differentiable=False)
def npu_format_cast_(self: torch.Tensor, acl_format: int | Format) -> torch.Tensor:
    """``torch_npu.npu_format_cast_(self, acl_format) -> Tensor``: the same tensor object on new storage.

    Views taken before the call keep the old storage: they no longer share memory with the tensor.
    """
    target = Format(acl_format)
    if get_npu_format(self) != target:
        cast = self.detach().clone(memory_format=torch.preserve_format)
        _ops.set_format(cast, int(target))
        self.data = cast
    return self
