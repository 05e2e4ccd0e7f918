"""What every fused operator does around its formula: check devices and dtypes, log the call, cut gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from alignment.devices.emulated_npu.call_log import Call, record

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def operator(*, differentiable: bool) -> Callable[[Callable], Callable]:
    """Make a formula an operator.

    Args:
        differentiable: whether the real operator has a derivative. Where it has none its result does not require
            gradients, so a training path that relies on it is cut on the emulator as on hardware.

    Raises:
        RuntimeError: a tensor that is not on the NPU, or a float64 tensor, which no fused operator takes.
    """

    def wrap(formula: Callable) -> Callable:
        signature = inspect.signature(formula)
        name = formula.__name__

        @functools.wraps(formula)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for parameter, tensor in _tensors(bound.arguments):
                _check(name, parameter, tensor)
            record(_describe(name, bound.arguments))
            with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
                return formula(*bound.args, **bound.kwargs)

        return call

    return wrap


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for parameter, value in arguments.items():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield parameter, item


def _check(name: str, parameter: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "npu":
        raise RuntimeError(f"{name}: expected npu tensors, but {parameter} is on {tensor.device}")
    if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
        raise RuntimeError(
            f"{name}: {parameter} is {tensor.dtype}; the fused operator takes float16, bfloat16 and float32"
        )


def _describe(name: str, arguments: dict[str, Any]) -> Call:
    values, shapes, dtypes = {}, {}, {}
    for parameter, value in arguments.items():
        if isinstance(value, torch.Tensor):
            shapes[parameter], dtypes[parameter] = tuple(value.shape), _dtype_name(value)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
            shapes[parameter] = tuple(tuple(item.shape) for item in value)
            dtypes[parameter] = tuple(_dtype_name(item) for item in value)
        else:
            values[parameter] = list(value) if isinstance(value, (list, tuple)) else value
    return Call(name=name, arguments=values, shapes=shapes, dtypes=dtypes)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def unsupported(name: str, what: str) -> NotImplementedError:
    """The error for a documented option that the emulator does not compute."""
    return NotImplementedError(f"emulated {name}: {what} is not emulated; add it to the shim or skip on the emulator")
