"""Ascend NPUs as devices. The one file that imports torch_npu."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import sys

import torch

from alignment.devices.base import Availability
from alignment.devices.fingerprint import (
    ASCEND_ROOT,
    UNKNOWN,
    Fingerprint,
    ascend_driver_version,
    ascend_firmware_version,
    cann_version,
)
from alignment.errors import InputError

EMULATOR = "alignment.devices.emulated_npu"


def emulated() -> bool:
    """True when the ``npu`` of this process is the emulated one. Never imports the emulator."""
    module = sys.modules.get(EMULATOR)
    return module is not None and bool(module.is_installed())


def availability() -> Availability:
    """Available when torch_npu imports and a device is visible, or when the emulated one is installed."""

    def no(reason: str) -> Availability:
        return Availability(kind="npu", available=False, reason=reason)

    if emulated():
        return Availability(
            kind="npu",
            available=True,
            reason="emulated on host memory; results are labelled and never recorded as a baseline",
            count=torch.npu.device_count(),
            emulated=True,
        )
    if importlib.util.find_spec("torch_npu") is None:
        return no("torch_npu is not installed")
    try:
        torch_npu = importlib.import_module("torch_npu")
    except Exception as error:  # a missing CANN library or a torch of another version: the text is the reason
        return no(f"torch_npu does not import: {_first_line(error)}")
    try:
        count = torch.npu.device_count() if torch.npu.is_available() else 0
    except Exception as error:
        return no(f"torch_npu {_version(torch_npu)} cannot reach a device: {_first_line(error)}")
    if count:
        return Availability(
            kind="npu", available=True, reason=f"{count} visible, torch_npu {_version(torch_npu)}", count=count
        )
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return no(f"no device is visible: ASCEND_RT_VISIBLE_DEVICES is {visible!r}")
    if not (ASCEND_ROOT / "driver").exists() and not glob.glob("/dev/davinci[0-9]*"):
        return no("torch_npu is installed but there is no Ascend driver and no /dev/davinci device")
    return no(f"torch_npu {_version(torch_npu)} sees no device; npu-smi info says what the driver sees")


def _version(module) -> str:
    return str(getattr(module, "__version__", UNKNOWN))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def synchronize(index: int) -> None:
    """Wait for the device."""
    torch.npu.synchronize(index)


def memory_allocated(index: int) -> int:
    """Bytes of tensors by torch_npu's allocator (HCCL's buffers are outside it)."""
    return torch.npu.memory_allocated(index)


def max_memory_allocated(index: int) -> int:
    """Peak bytes of tensors by torch_npu's allocator."""
    return torch.npu.max_memory_allocated(index)


def reset_peak_memory(index: int) -> None:
    """Start a new peak."""
    torch.npu.reset_peak_memory_stats(index)


def empty_cache() -> None:
    """Give cached blocks back."""
    torch.npu.empty_cache()


def seed(value: int) -> None:
    """Seed the generator of every NPU."""
    torch.npu.manual_seed_all(value)


def is_initialized() -> bool:
    """True once this process has initialised the NPU runtime, which has then read its environment variables.

    The emulated device reads none, so for it nothing is ever too late.
    """
    module = getattr(torch, "npu", None)
    return module is not None and not emulated() and bool(module.is_initialized())


def rng_state() -> list[torch.Tensor] | None:
    """State of every NPU's generator; None before the runtime is initialised."""
    if is_initialized() or emulated():
        return [torch.npu.get_rng_state(i) for i in range(torch.npu.device_count())]
    return None


def set_rng_state(state: list[torch.Tensor] | None) -> None:
    """The inverse of :func:`rng_state`."""
    for index, one in enumerate(state or ()):
        torch.npu.set_rng_state(one, index)


FRACTAL_NZ = 29


def internal_format(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an NPU tensor in the FRACTAL_NZ format that Ascend matmuls prefer (``torch_npu.npu_format_cast``).

    Raises InputError for a tensor that is not on an NPU.
    """
    if tensor.device.type != "npu":
        raise InputError("only an NPU has internal formats", where="internal_format", found=str(tensor.device))
    return importlib.import_module("torch_npu").npu_format_cast(tensor, FRACTAL_NZ)


def fingerprint(index: int) -> Fingerprint:
    """Chip, driver, CANN, AI cores and host threads, from torch_npu and the Ascend information files."""
    if emulated():
        return Fingerprint(
            kind="npu",
            label="npu (emulated)",
            chip="emulated",
            driver="none",
            runtime="none",
            cores=1,
            threads=torch.get_num_threads(),
            emulated=True,
        )
    properties = torch.npu.get_device_properties(index)
    cores = getattr(properties, "cube_core_num", None) or getattr(properties, "multi_processor_count", None) or 0
    details = {
        "firmware": ascend_firmware_version(),
        "torch_npu": _version(sys.modules.get("torch_npu")),
        "total_memory": str(getattr(properties, "total_memory", UNKNOWN)),
        "vector_cores": str(getattr(properties, "vector_core_num", UNKNOWN)),
    }
    return Fingerprint(
        kind="npu",
        label="npu",
        chip=str(torch.npu.get_device_name(index)),
        driver=ascend_driver_version(),
        runtime=f"CANN {cann_version()}",
        cores=int(cores),
        threads=torch.get_num_threads(),
        details=details,
    )
