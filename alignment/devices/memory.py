"""Memory of the host process, which stands for device memory on the CPU, and a peak meter for any device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alignment.devices.base import Device

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Bytes of this process that are resident in memory (``VmRSS``)."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Highest resident size since start or the last :func:`reset_peak_resident` (``VmHWM``)."""
    return _status("VmHWM")


def reset_peak_resident() -> bool:
    """Start a new peak; False where the kernel does not allow it (the peak then counts from process start)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes before, after and at the highest point of a measured block, by the device's own counter."""

    before: int
    after: int
    peak: int

    @property
    def above_start(self) -> int:
        """Bytes the block needed on top of what was there."""
        return max(0, self.peak - self.before)


@contextmanager
def peak_memory(device: Device) -> Iterator[list[PeakMemory]]:
    """Measure the peak of a block; the reading is appended to the yielded list when the block ends.

    The counters are the framework's: what HCCL or NCCL hold, and what a rollout engine unmaps physically, is not seen.
    """
    readings: list[PeakMemory] = []
    device.synchronize()
    device.reset_peak_memory()
    before = device.memory_allocated()
    yield readings
    device.synchronize()
    readings.append(PeakMemory(before=before, after=device.memory_allocated(), peak=device.max_memory_allocated()))
