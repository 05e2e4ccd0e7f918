"""Devices behind one small interface: find them, with the reason where one is not there, and hold one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import torch

from alignment.devices.fingerprint import Fingerprint
from alignment.errors import InputError, UnavailableError

KINDS = ("npu", "cuda", "cpu")  # in the order "auto" prefers them


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a kind of device can be used in this process, and why (not).

    ``count`` is the number of devices this process sees; ``reason`` is one sentence in both cases.
    """

    kind: str
    available: bool
    reason: str
    count: int = 0
    emulated: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {'available' if self.available else 'unavailable'}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of this process. Get it by :func:`get_device`, which refuses what is not there.

    ``emulated`` is True for the ``npu`` that lives on host memory: its label says so and its results never become a
    baseline. Memory counters are bytes, read from the framework's allocator (cuda, npu) or from the process (cpu).
    """

    kind: str
    index: int = 0
    emulated: bool = False

    @property
    def label(self) -> str:
        """``cpu``, ``cuda``, ``npu`` or ``npu (emulated)``: what every report shows."""
        return f"{self.kind} (emulated)" if self.emulated else self.kind

    @property
    def torch_device(self) -> torch.device:
        """The ``torch.device``; the CPU has no index."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""
        _backend(self.kind).synchronize(self.index)

    def memory_allocated(self) -> int:
        """Bytes in use now."""
        return _backend(self.kind).memory_allocated(self.index)

    def max_memory_allocated(self) -> int:
        """Highest number of bytes in use since the last :meth:`reset_peak_memory`."""
        return _backend(self.kind).max_memory_allocated(self.index)

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        _backend(self.kind).reset_peak_memory(self.index)

    def empty_cache(self) -> None:
        """Give cached blocks back to the device."""
        _backend(self.kind).empty_cache()

    def seed(self, seed: int) -> None:
        """Seed the device's own generator (every index of the kind)."""
        _backend(self.kind).seed(seed)

    def fingerprint(self) -> Fingerprint:
        """Chip, driver, runtime, cores and kernel threads."""
        return _backend(self.kind).fingerprint(self.index)


def availability(kind: str) -> Availability:
    """Whether ``kind`` (cpu, cuda, npu) can be used here, with the reason. Raises InputError for another kind."""
    return _backend(kind).availability()


def discover() -> tuple[Availability, ...]:
    """Every kind of device in the order of preference, each with its reason."""
    return tuple(availability(kind) for kind in KINDS)


def get_device(name: str | torch.device = "auto") -> Device:
    """The device called ``name``: ``auto`` (npu, else cuda, else cpu), a kind, or ``kind:index``.

    Raises InputError for a name that is none of these, UnavailableError with the reason for one this machine lacks.
    """
    text = str(name)
    if text == "auto":
        kind, index = choose(discover()).kind, 0
    else:
        match = re.fullmatch(r"([a-z]+)(?::(\d+))?", text)
        if not match or match.group(1) not in KINDS:
            raise InputError(
                "unknown device",
                where="device",
                expected="auto, " + ", ".join(f"{k} or {k}:<index>" for k in KINDS),
                found=text,
            )
        kind, index = match.group(1), int(match.group(2) or 0)
    state = availability(kind)
    if not state.available:
        raise UnavailableError(
            f"device {kind} is not available: {state.reason}",
            where="device",
            next_step="run on --device auto to use the best device of this machine",
        )
    if index >= state.count:
        raise UnavailableError(
            "there is no such device",
            where="device",
            expected=f"an index below {state.count}",
            found=f"{kind}:{index}",
        )
    return Device(kind=kind, index=index, emulated=state.emulated)


def choose(states: Iterable[Availability]) -> Availability:
    """The first available kind in the order npu, cuda, cpu (what ``auto`` means)."""
    found = {s.kind: s for s in states if s.available}
    return next(found[kind] for kind in KINDS if kind in found)


def _backend(kind: str) -> ModuleType:
    if kind not in KINDS:
        raise InputError("unknown kind of device", where="device", expected=", ".join(KINDS), found=kind)
    return importlib.import_module(f"alignment.devices.{kind}")
