"""Which engines a run may choose (``engine.train``, ``engine.rollout``), and whether they are here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from alignment.backends.subject import SubjectAvailability
from alignment.devices.base import Device


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """One choice of ``engine.<role>``; ``available`` imports nothing heavy and starts nothing."""

    role: Literal["train", "rollout"]
    name: str
    available: Callable[[Device], SubjectAvailability]


def _golden(device: Device) -> SubjectAvailability:
    return SubjectAvailability(available=True, reason=f"part of this package, on {device.label}")


def _fsdp(device: Device) -> SubjectAvailability:
    if device.kind == "npu" and device.emulated:
        return SubjectAvailability(available=False, reason="HCCL needs real NPUs; the device is emulated")
    if importlib.util.find_spec("transformers") is None:
        return SubjectAvailability(
            available=True, reason="only actor.fsdp_config.model=golden: transformers is not installed"
        )
    return SubjectAvailability(available=True, reason=f"torch's FSDP2 on {device.label}")


def _megatron(device: Device) -> SubjectAvailability:
    from alignment.backends.megatron_model import megatron_availability

    if device.kind == "npu" and device.emulated:
        return SubjectAvailability(available=False, reason="HCCL needs real NPUs; the device is emulated")
    return megatron_availability(device)


def _vllm(device: Device) -> SubjectAvailability:
    from alignment.backends.vllm_rollout import vllm_availability

    return vllm_availability(device)


ENGINES: tuple[EngineEntry, ...] = (
    EngineEntry(role="train", name="golden", available=_golden),
    EngineEntry(role="train", name="fsdp", available=_fsdp),
    EngineEntry(role="train", name="megatron", available=_megatron),
    EngineEntry(role="rollout", name="golden", available=_golden),
    EngineEntry(role="rollout", name="vllm", available=_vllm),
)
