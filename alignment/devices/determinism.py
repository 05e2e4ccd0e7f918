"""Determinism as one context: seeds, framework and communication switches, each verified and explained.

What each environment variable does and when it counts, from public documents:

* verl, ``docs/ascend_tutorial/ascend_consistency_zh.rst``: with several cards over HCCL (the default) set
  ``CLOSE_MATMUL_K_SHIFT=1``, ``ATB_MATMUL_SHUFFLE_K_ENABLE=0``, ``HCCL_DETERMINISTIC=true`` and
  ``VLLM_ENABLE_V1_MULTIPROCESSING=0``; over LCCL (chosen by ``HCCL_OP_EXPANSION_MODE=AIV``) ``LCCL_DETERMINISTIC=1``
  and ``ATB_LLM_LCOC_ENABLE=0`` take the place of ``HCCL_DETERMINISTIC``; on a single card neither is needed.
* CANN environment variable reference, ``HCCL_DETERMINISTIC``: false (default), true, or strict, for the reducing
  collectives; when it is on it takes precedence over the AIV expansion, which then may not take effect.
* PyTorch, *Reproducibility*: ``torch.use_deterministic_algorithms`` and, for cuBLAS, ``CUBLAS_WORKSPACE_CONFIG``
  ``:4096:8`` or ``:16:8``, read when the cuBLAS handle is made.
* vLLM, *Reproducibility*: ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` makes the scheduling of V1 deterministic.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import numpy as np
import torch

from alignment.devices import base
from alignment.devices.base import Device
from alignment.errors import InputError

ENVIRONMENT, FRAMEWORK = "environment", "framework"

_VERL = "verl docs/ascend_tutorial/ascend_consistency_zh.rst"
_CANN = "CANN environment variable reference, HCCL_DETERMINISTIC"
_TORCH = "PyTorch documentation, Reproducibility"
_VLLM = "vLLM documentation, Reproducibility"


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One determinism switch and whether it counts for a kind of device and a number of cards.

    ``wanted`` is what is set when it ``applies``; any of ``accepted`` (compared without case) that the user already set
    is kept. ``why`` says why it applies or does not, ``source`` where that is documented.
    """

    name: str
    wanted: str
    accepted: tuple[str, ...]
    where: str
    applies: bool
    why: str
    source: str

    def satisfied_by(self, value: str | None) -> bool:
        """True when ``value`` already is what this switch wants."""
        return value is not None and value.strip().lower() in {a.lower() for a in (self.wanted, *self.accepted)}


@dataclass(frozen=True, kw_only=True)
class SwitchState:
    """A switch as it was found and as it was verified inside the context (None: not set)."""

    switch: Switch
    found: str | None
    verified: str | None

    def row(self) -> tuple[str, str, str, str, str]:
        """(name, wanted, verified, applies, why) for a table."""
        s = self.switch
        return (
            s.name,
            s.wanted,
            "not set" if self.verified is None else self.verified,
            "yes" if s.applies else "no",
            s.why,
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every switch with its verified value, for the provenance of a run."""

    seed: int
    device: str
    world_size: int
    states: tuple[SwitchState, ...]

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """One row per switch: name, wanted, verified value, applies, why."""
        return [state.row() for state in self.states]

    def to_dict(self) -> dict:
        """JSON-ready form."""
        return {
            "seed": self.seed,
            "device": self.device,
            "world_size": self.world_size,
            "switches": {
                s.switch.name: {
                    "wanted": s.switch.wanted,
                    "verified": s.verified,
                    "applies": s.switch.applies,
                    "why": s.switch.why,
                    "source": s.switch.source,
                }
                for s in self.states
            },
        }


def switches(device_kind: str, world_size: int, environ: Mapping[str, str]) -> tuple[Switch, ...]:
    """Decide which switches count. Pure: ``environ`` is only read, for ``HCCL_OP_EXPANSION_MODE``.

    Args:
        device_kind: ``cpu``, ``cuda`` or ``npu``.
        world_size: number of cards that communicate; 1 is a single-card run.
        environ: the environment to decide by.
    """
    if device_kind not in base.KINDS:
        raise InputError(
            "unknown kind of device", where="determinism", expected=", ".join(base.KINDS), found=device_kind
        )
    if world_size < 1:
        raise InputError("not a number of cards", where="determinism", expected="world_size ≥ 1", found=world_size)
    npu, cuda = device_kind == "npu", device_kind == "cuda"
    lccl = environ.get("HCCL_OP_EXPANSION_MODE", "").strip().strip('"').upper() == "AIV"
    many = world_size > 1

    def env(name, wanted, accepted, applies, why, source):
        return Switch(
            name=name, wanted=wanted, accepted=accepted, where=ENVIRONMENT, applies=applies, why=why, source=source
        )

    def framework(name, wanted, applies, why):
        return Switch(name=name, wanted=wanted, accepted=(), where=FRAMEWORK, applies=applies, why=why, source=_TORCH)

    def collective(ours: bool, name: str) -> str:
        if not npu:
            return f"{device_kind} does not use HCCL"
        if not many:
            return "a single card does not communicate"
        if ours:
            return f"{world_size} cards communicate over {name}"
        if lccl:
            return (
                "HCCL_OP_EXPANSION_MODE=AIV: the cards communicate over LCCL (set, it would take precedence over AIV "
                "and change the path under test)"
            )
        return "the cards communicate over HCCL (HCCL_OP_EXPANSION_MODE is not AIV)"

    only_npu = "the Ascend matmul reads it" if npu else f"{device_kind} has no Ascend kernels"
    return (
        framework("torch.use_deterministic_algorithms", "True", True, "refuses kernels without a deterministic form"),
        framework(
            "torch.backends.cudnn.deterministic", "True", cuda, "cuDNN" if cuda else f"{device_kind} has no cuDNN"
        ),
        framework(
            "torch.backends.cudnn.benchmark",
            "False",
            cuda,
            "timing would choose the algorithm" if cuda else f"{device_kind} has no cuDNN",
        ),
        env(
            "CUBLAS_WORKSPACE_CONFIG",
            ":4096:8",
            (":16:8",),
            cuda,
            "cuBLAS reads it when its handle is made" if cuda else f"{device_kind} has no cuBLAS",
            _TORCH,
        ),
        env("CLOSE_MATMUL_K_SHIFT", "1", (), npu, only_npu + (": no shift of the K axis" if npu else ""), _VERL),
        env(
            "ATB_MATMUL_SHUFFLE_K_ENABLE",
            "0",
            ("false",),
            npu,
            only_npu + (": ATB shuffles K by default" if npu else ""),
            _VERL,
        ),
        env("HCCL_DETERMINISTIC", "true", ("strict",), npu and many and not lccl, collective(not lccl, "HCCL"), _CANN),
        env("LCCL_DETERMINISTIC", "1", ("true",), npu and many and lccl, collective(lccl, "LCCL"), _VERL),
        env(
            "ATB_LLM_LCOC_ENABLE",
            "0",
            ("false",),
            npu and many and lccl,
            collective(lccl, "LCCL")
            + ("; overlap of communication and computation off" if npu and many and lccl else ""),
            _VERL,
        ),
        env(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0", ("false",), True, "a vLLM rollout schedules deterministically", _VLLM
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What this process has already done that makes a switch come too late."""

    process_group: bool = False
    cublas: bool = False
    npu: bool = False

    @classmethod
    def read(cls) -> ProcessState:
        """The state of this process."""
        from alignment.devices import cuda, npu

        return cls(
            process_group=torch.distributed.is_available() and torch.distributed.is_initialized(),
            cublas=cuda.has_allocated(),
            npu=npu.is_initialized(),
        )


_COLLECTIVE = ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", "ATB_LLM_LCOC_ENABLE")
_NPU_KERNELS = ("CLOSE_MATMUL_K_SHIFT", "ATB_MATMUL_SHUFFLE_K_ENABLE")


def refuse_if_late(wanted: tuple[Switch, ...], environ: Mapping[str, str], state: ProcessState) -> None:
    """Raise InputError when a switch that applies is not set and what reads it has already started.

    Pure: decides by the arguments alone.
    """
    for switch in wanted:
        found = environ.get(switch.name)
        if not switch.applies or switch.where != ENVIRONMENT or switch.satisfied_by(found):
            continue
        late = None
        if switch.name in _COLLECTIVE and state.process_group:
            late = "the process group is already initialised"
        elif switch.name == "CUBLAS_WORKSPACE_CONFIG" and state.cublas:
            late = "tensors have already lived on the GPU, so the cuBLAS handle may exist"
        elif switch.name in (*_COLLECTIVE, *_NPU_KERNELS) and state.npu:
            late = "the NPU is already initialised"
        if late:
            raise InputError(
                f"too late for determinism: {late}",
                where=switch.name,
                expected=" or ".join((switch.wanted, *switch.accepted)),
                found="not set" if found is None else found,
                next_step=f"export {switch.name}={switch.wanted} before the process starts, "
                "or enter deterministic() before the first use of the device",
            )


@contextlib.contextmanager
def deterministic(seed: int, device: Device, *, world_size: int | None = None) -> Iterator[Report]:
    """Run a block deterministically on ``device`` and restore everything on exit.

    Seeds Python, NumPy, torch and the device; sets the switches that apply (:func:`switches`), verifies each as the
    native libraries will see it, and yields the :class:`Report`. On exit seeds' states, framework flags and environment
    are as they were.

    Args:
        seed: seed of every generator, 0 ≤ seed < 2³².
        device: the device that computes.
        world_size: communicating cards; by default the process group's size, else ``WORLD_SIZE``, else 1.

    Raises:
        InputError: when it is too late for a switch, when a switch does not hold after it was set, or for a bad seed.
    """
    if not 0 <= seed < 2**32:
        raise InputError("not a seed", where="determinism", expected="0 ≤ seed < 2**32 (NumPy's range)", found=seed)
    size = _world_size() if world_size is None else world_size
    wanted = switches(device.kind, size, os.environ)
    refuse_if_late(wanted, os.environ, ProcessState.read())
    with contextlib.ExitStack() as undo:
        undo.enter_context(_restored_generators(device))
        found = {s.name: _read(s) for s in wanted}
        for switch in wanted:
            if switch.applies and not switch.satisfied_by(found[switch.name]):
                _set(switch, undo)
        states = tuple(SwitchState(switch=s, found=found[s.name], verified=_read(s)) for s in wanted)
        for state in states:
            if state.switch.applies and not state.switch.satisfied_by(state.verified):
                raise InputError(
                    "the switch does not hold after it was set",
                    where=state.switch.name,
                    expected=state.switch.wanted,
                    found="not set" if state.verified is None else state.verified,
                )
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        device.seed(seed)
        yield Report(seed=seed, device=device.label, world_size=size, states=states)


def _world_size() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise InputError("not a number of cards", where="WORLD_SIZE", expected="an integer ≥ 1", found=text)
    return int(text)


def _read(switch: Switch) -> str | None:
    if switch.where == ENVIRONMENT:
        return _native_environment(switch.name)
    return str(
        {
            "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
            "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
            "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
        }[switch.name]()
    )


def _native_environment(name: str) -> str | None:
    """The variable as a C library sees it: ``os.environ`` can be replaced by a dictionary that no library reads."""
    try:
        getenv = ctypes.CDLL(None).getenv
    except (OSError, TypeError, AttributeError):
        return os.environ.get(name)
    getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    value = getenv(name.encode())
    return None if value is None else value.decode(errors="replace")


def _set(switch: Switch, undo: contextlib.ExitStack) -> None:
    name = switch.name
    if switch.where == ENVIRONMENT:
        undo.callback(_restore_variable, os.environ, name, os.environ.get(name))
        os.environ[name] = switch.wanted
    elif name == "torch.use_deterministic_algorithms":
        undo.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
    else:
        flag = name.rsplit(".", 1)[1]
        undo.callback(setattr, torch.backends.cudnn, flag, getattr(torch.backends.cudnn, flag))
        setattr(torch.backends.cudnn, flag, switch.wanted == "True")


def _restore_variable(environ: MutableMapping[str, str], name: str, value: str | None) -> None:
    if value is None:
        environ.pop(name, None)
    else:
        environ[name] = value


@contextlib.contextmanager
def _restored_generators(device: Device) -> Iterator[None]:
    backend = base._backend(device.kind)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), backend.rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        backend.set_rng_state(states[3])
