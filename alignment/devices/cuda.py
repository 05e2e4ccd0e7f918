"""NVIDIA GPUs as devices."""

from __future__ import annotations

import os

import torch

from alignment.devices.base import Availability
from alignment.devices.fingerprint import Fingerprint, nvidia_driver_version


def availability() -> Availability:
    """Available when torch is built for CUDA, a driver answers and a device is visible; otherwise the reason."""

    def no(reason: str) -> Availability:
        return Availability(kind="cuda", available=False, reason=reason)

    if torch.version.cuda is None:
        return no(f"torch {torch.__version__} is built without CUDA")
    count = torch.cuda.device_count()
    if count and torch.cuda.is_available():
        return Availability(
            kind="cuda", available=True, reason=f"{count} visible, CUDA {torch.version.cuda}", count=count
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return no(f"no device is visible: CUDA_VISIBLE_DEVICES is {visible!r}")
    try:
        torch.cuda.init()
    except Exception as error:  # the driver's own words are the reason, whatever their type
        return no(_first_line(error))
    return no(f"torch is built for CUDA {torch.version.cuda} and no device is visible")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def synchronize(index: int) -> None:
    """Wait for the device."""
    torch.cuda.synchronize(index)


def memory_allocated(index: int) -> int:
    """Bytes of tensors by torch's allocator."""
    return torch.cuda.memory_allocated(index)


def max_memory_allocated(index: int) -> int:
    """Peak bytes of tensors by torch's allocator."""
    return torch.cuda.max_memory_allocated(index)


def reset_peak_memory(index: int) -> None:
    """Start a new peak."""
    torch.cuda.reset_peak_memory_stats(index)


def empty_cache() -> None:
    """Give cached blocks back."""
    torch.cuda.empty_cache()


def seed(value: int) -> None:
    """Seed the generator of every GPU (queued until CUDA is initialised)."""
    torch.cuda.manual_seed_all(value)


def is_initialized() -> bool:
    """True once this process has a CUDA context."""
    return torch.cuda.is_initialized()


def has_allocated() -> bool:
    """True once a tensor has lived on a GPU of this process: before that no cuBLAS handle can have been used."""
    return torch.cuda.is_initialized() and any(
        torch.cuda.memory_stats(i).get("allocation.all.allocated", 0) for i in range(torch.cuda.device_count())
    )


def rng_state() -> list[torch.Tensor] | None:
    """State of every GPU's generator; None before CUDA is initialised (there is nothing to come back to)."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None


def set_rng_state(state: list[torch.Tensor] | None) -> None:
    """The inverse of :func:`rng_state`."""
    if state is not None:
        torch.cuda.set_rng_state_all(state)


def fingerprint(index: int) -> Fingerprint:
    """GPU name, driver, CUDA and cuDNN, streaming multiprocessors and host threads."""
    properties = torch.cuda.get_device_properties(index)
    cudnn = torch.backends.cudnn.version()
    return Fingerprint(
        kind="cuda",
        label="cuda",
        chip=properties.name,
        driver=nvidia_driver_version(),
        runtime=f"CUDA {torch.version.cuda}",
        cores=properties.multi_processor_count,
        threads=torch.get_num_threads(),
        details={
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cudnn": str(cudnn),
            "total_memory": str(properties.total_memory),
        },
    )
