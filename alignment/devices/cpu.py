"""The host CPU as a device."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from alignment.devices import memory
from alignment.devices.base import Availability
from alignment.devices.fingerprint import UNKNOWN, Fingerprint, parse_cpu_model, parse_torch_build


def availability() -> Availability:
    """Always there."""
    return Availability(kind="cpu", available=True, reason=f"torch {torch.__version__}", count=1)


def synchronize(index: int) -> None:
    """CPU kernels return when they are done."""


def memory_allocated(index: int) -> int:
    """Resident bytes of the process: torch keeps no counter for the CPU."""
    return memory.resident_bytes()


def max_memory_allocated(index: int) -> int:
    """Peak resident bytes of the process."""
    return memory.peak_resident_bytes()


def reset_peak_memory(index: int) -> None:
    """Start a new peak where the kernel allows it."""
    memory.reset_peak_resident()


def empty_cache() -> None:
    """Nothing is cached."""


def seed(value: int) -> None:
    """The CPU's generator is the one ``torch.manual_seed`` sets."""
    torch.manual_seed(value)


def is_initialized() -> bool:
    """True: there is nothing to initialise."""
    return True


def rng_state() -> object:
    """No state beyond torch's CPU generator."""
    return None


def set_rng_state(state: object) -> None:
    """The inverse of :func:`rng_state`."""


def fingerprint(index: int) -> Fingerprint:
    """Model name, instruction set torch uses, BLAS and oneDNN, logical CPUs and kernel threads."""
    try:
        chip = parse_cpu_model(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        chip = None
    build = parse_torch_build(torch.__config__.show())
    details = dict(build)
    details["isa"] = torch.backends.cpu.get_cpu_capability()
    details["machine"] = platform.machine()
    details["mkldnn_enabled"] = str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
    details["mkl_available"] = str(torch.backends.mkl.is_available())
    details["interop_threads"] = str(torch.get_num_interop_threads())
    libraries = [f"{name} {build[name]}" for name in ("blas", "mkl", "onednn") if name in build]
    return Fingerprint(
        kind="cpu",
        label="cpu",
        chip=chip or platform.processor() or UNKNOWN,
        driver="none",
        runtime=", ".join(libraries) or UNKNOWN,
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        details=details,
    )
