"""``torch.npu`` of the emulated device.

This module itself is registered as ``torch.npu`` by ``install()``; its names and signatures are those of torch_npu's
``torch_npu.npu`` (Ascend/pytorch, ``torch_npu/npu/__init__.py``). Work is done when a call returns, so streams and
events only order and time it, and memory figures count live host bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator

import torch

DEVICE_NAME = "Ascend (emulated)"

_ops = torch.ops.emu_npu


def _index(device: torch.device | str | int | None = None) -> int:
    if device is None:
        return _ops.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _ops.current_device()
    device = torch.device(device)
    if device.type != "npu":
        raise ValueError(f"expected an npu device, got {device}")
    return _ops.current_device() if device.index is None else device.index


# ---- devices


def is_available() -> bool:
    return True


_initialized = True  # activation checkpointing looks here before it saves the random state


def is_initialized() -> bool:
    return True


def init() -> None: ...


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False  # host memory survives a fork


def device_count() -> int:
    return _ops.device_count()


def current_device() -> int:
    return _ops.current_device()


def set_device(device: torch.device | str | int) -> None:
    _ops.set_device(_index(device))


def synchronize(device: torch.device | str | int | None = None) -> None:
    _index(device)


def get_device_name(device: torch.device | str | int | None = None) -> str:
    _index(device)
    return DEVICE_NAME


def get_device_capability(device: torch.device | str | int | None = None) -> None:
    """None, as on an NPU: the notion is CUDA's."""


def get_device_properties(device: torch.device | str | int | None = None) -> types.SimpleNamespace:
    """Name, total host memory in bytes and host cores: nothing here describes a chip."""
    _index(device)
    return types.SimpleNamespace(
        name=DEVICE_NAME, total_memory=_host_memory(), multi_processor_count=os.cpu_count() or 1, emulated=True
    )


class device(contextlib.ContextDecorator):
    """Makes an npu device current inside the block; ``None`` or a negative index changes nothing."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        unchanged = device is None or (isinstance(device, int) and device < 0)
        self._target = None if unchanged else _index(device)
        self._previous: list[int] = []

    def __enter__(self) -> device:
        self._previous.append(_ops.current_device())
        if self._target is not None:
            _ops.set_device(self._target)
        return self

    def __exit__(self, *exc: object) -> None:
        _ops.set_device(self._previous.pop())


def device_of(tensor: torch.Tensor) -> device:
    return device(tensor.device.index if tensor.device.type == "npu" else None)


# ---- memory


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_allocated(device: torch.device | str | int | None = None) -> int:
    return _ops.memory(_index(device), False)


def max_memory_allocated(device: torch.device | str | int | None = None) -> int:
    return _ops.memory(_index(device), True)


memory_reserved = memory_allocated  # nothing is cached
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: torch.device | str | int | None = None) -> None:
    _ops.reset_peak(_index(device))


reset_max_memory_allocated = reset_peak_memory_stats


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, int]:
    current, peak = memory_allocated(device), max_memory_allocated(device)
    return {
        f"{kind}_bytes.all.{when}": value
        for kind in ("allocated", "reserved", "active")
        for when, value in (("current", current), ("peak", peak))
    }


def mem_get_info(device: torch.device | str | int | None = None) -> tuple[int, int]:
    """(free, total) bytes of the host, as if this process were alone on it."""
    total = _host_memory()
    return total - memory_allocated(device), total


def empty_cache() -> None: ...


# ---- random numbers

default_generators = tuple(_ops.default_generator(i) for i in range(_ops.device_count()))


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    default_generators[current_device()].seed()


def seed_all() -> None:
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: torch.device | str | int = "npu") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int = "npu") -> None:
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


# ---- streams and events


class Stream(torch.Stream):
    def __new__(cls, device: torch.device | str | int | None = None, priority: int = 0, **kwargs: object) -> Stream:
        return torch.Stream.__new__(cls, device=torch.device("npu", _index(device)), priority=priority, **kwargs)


class _EventFactory(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


class Event(metaclass=_EventFactory):
    """Makes a ``torch.Event``: ``elapsed_time`` refuses a subclass of it, so this cannot be one."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: object
    ) -> torch.Event:
        return torch.Event(device="npu", enable_timing=enable_timing)


ExternalEvent = Event


class NPUGraph:
    """Present for isinstance checks and imports; capturing a graph is not emulated."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("npu (emulated): graph capture is not emulated; run the eager path")


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("npu", _index(device)))


def default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    private_use_1 = 20  # c10::DeviceType::PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=private_use_1)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    with stream if stream is not None else contextlib.nullcontext():
        yield


# ---- precision and modes


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


# torch_npu's defaults: HF32 on for convolution, off for matmul. The flags are kept, not acted on; the arithmetic is
# switched on by `semantics.hf32_matmul`.
matmul = types.SimpleNamespace(allow_hf32=False)
conv = types.SimpleNamespace(allow_hf32=True)
config = types.SimpleNamespace(allow_internal_format=True)


def set_compile_mode(**_: object) -> None: ...


def set_option(_: dict[str, object]) -> None: ...


amp = types.ModuleType("torch.npu.amp")
amp.autocast = functools.partial(torch.amp.autocast, "npu")
amp.GradScaler = functools.partial(torch.amp.GradScaler, "npu")

streams = types.ModuleType("torch.npu.streams")
streams.Stream, streams.Event, streams.ExternalEvent = Stream, Event, ExternalEvent


def __getattr__(name: str) -> object:
    # torch probes its device modules for optional names, so this must stay an AttributeError.
    raise AttributeError(f"emulated torch.npu has no {name!r}: add it to {__name__} or skip the test on the emulator")


def register() -> None:
    """Make this module ``torch.npu`` and give tensors, modules and storages their ``.npu()`` and ``.is_npu``."""
    this = sys.modules[__name__]
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", this)
    sys.modules.update({"torch.npu": this, "torch.npu.amp": amp, "torch.npu.streams": streams})
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
