"""Importing this maps ``torch.cuda`` and CUDA device strings onto the NPU, for the rest of the process.

Follows Ascend/pytorch ``torch_npu/contrib/transfer_to_npu.py``: a script written for ``cuda`` runs on ``npu`` as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_CUDA_NAMES = (
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
)
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_TENSOR_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


def _on_npu(value: Any) -> Any:
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return value.replace("cuda", "npu", 1)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu", value.index) if value.index is not None else torch.device("npu")
    return value


def _redirected(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), int) and not isinstance(kwargs["device"], bool):
            kwargs["device"] = f"npu:{kwargs['device']}"
        return function(*map(_on_npu, args), **{name: _on_npu(value) for name, value in kwargs.items()})

    return call


def _cuda(self, device: torch.device | str | int | None = None, *args: Any, **kwargs: Any):
    return self.npu(_on_npu(device), *args, **kwargs)


def _hccl_for_nccl(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str):
            backend = backend.replace("nccl", "hccl").replace("cuda", "npu")
        return function(backend, *args, **kwargs)

    return call


def _patch() -> None:
    for name in _CUDA_NAMES:
        setattr(torch.cuda, name, getattr(torch.npu, name))
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    for name in _TENSOR_METHODS:
        setattr(torch.Tensor, name, _redirected(getattr(torch.Tensor, name)))
    torch.nn.Module.to = _redirected(torch.nn.Module.to)
    torch.Tensor.cuda = torch.nn.Module.cuda = _cuda
    torch.Tensor.is_cuda = torch.Tensor.is_npu
    torch.cuda.amp.autocast = torch.npu.amp.autocast
    torch.cuda.amp.GradScaler = torch.npu.amp.GradScaler
    torch.autocast.__init__ = _redirected(torch.autocast.__init__)
    if torch.distributed.is_available():
        torch.distributed.init_process_group = _hccl_for_nccl(torch.distributed.init_process_group)


_patch()
