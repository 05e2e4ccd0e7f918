"""An opt-in PyTorch device named ``npu`` on host memory, with a ``torch_npu``-shaped front.

It lets every NPU check run on a machine without an NPU: device handling, storage aliasing, collectives, the calls that
reach the fused operators, and the logic that compares. It says nothing about an NPU's accuracy, overflow, memory
layout or races; everything it produces is labelled ``npu (emulated)``.

The device can be installed once per process and not removed. Install it at start-up, before anything else looks for an
accelerator: ``install()``, or ``ALIGNMENT_EMULATE_NPU=1`` and ``install_if_requested()`` in workers.
``ALIGNMENT_EMULATED_NPU_COUNT`` sets how many devices there are (2 unless set, at most 16).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from pathlib import Path

from alignment.devices.emulated_npu.call_log import Call, CallLog, calls, recorded_calls
from alignment.errors import InputError

__all__ = [
    "LABEL",
    "Call",
    "CallLog",
    "banner",
    "calls",
    "install",
    "install_if_requested",
    "is_installed",
    "recorded_calls",
]

LABEL = "npu (emulated)"
REQUEST = "ALIGNMENT_EMULATE_NPU"
COUNT = "ALIGNMENT_EMULATED_NPU_COUNT"
MAX_DEVICES = 16

_SHIM = Path(__file__).with_name("shim")
_lock = threading.RLock()
_installed = False


def is_installed() -> bool:
    """Whether ``npu`` is the emulated device in this process."""
    return _installed


def banner() -> str:
    """One line that tells the reader of a log what its ``npu`` is."""
    import torch

    count = torch.npu.device_count() if _installed else 0
    return (
        f"{LABEL}: {count} devices on host memory under torch {torch.__version__}; "
        "shows code paths and comparisons, not an NPU's arithmetic"
    )


def install() -> None:
    """Install the device ``npu``, ``torch.npu``, the backend ``hccl`` and the ``torch_npu`` shim in this process.

    Does nothing if they are installed. Prints nothing. Sets ``ALIGNMENT_EMULATE_NPU=1`` so that the processes started
    from here have the same devices once they call ``install_if_requested``.

    Raises:
        UnavailableError: no C++ compiler and nothing in the cache.
        InputError: the real torch_npu is installed, another backend has taken PrivateUse1, the build failed, or
            ``ALIGNMENT_EMULATED_NPU_COUNT`` is no number from 1 to 16.
    """
    global _installed
    with _lock:
        if _installed:
            return
        _check_count()
        _refuse_real_torch_npu()
        import torch

        from alignment.devices.emulated_npu import build

        _refuse_taken_backend(torch._C._get_privateuse1_backend_name())
        torch.ops.load_library(str(build.build()))
        from alignment.devices.emulated_npu import module

        module.register()
        _register_hccl()
        if str(_SHIM) not in sys.path:
            sys.path.append(str(_SHIM))
        os.environ[REQUEST] = "1"
        _installed = True


def install_if_requested() -> bool:
    """Install the device if ``ALIGNMENT_EMULATE_NPU`` is ``1``; return whether it is installed now.

    Workers (Ray actors, subprocesses) call this first thing.
    """
    requested = os.environ.get(REQUEST, "")
    if requested not in ("", "0", "1"):
        raise InputError("not a switch", where=REQUEST, expected="0 or 1", found=repr(requested))
    if requested == "1":
        install()
    return _installed


def _check_count() -> None:
    text = os.environ.get(COUNT, "")
    if text and not (text.isdecimal() and 1 <= int(text) <= MAX_DEVICES):
        raise InputError("not a number of devices", where=COUNT, expected=f"1 to {MAX_DEVICES}", found=repr(text))


def _refuse_real_torch_npu() -> None:
    origin = _torch_npu_origin()
    if origin is not None and not Path(origin).resolve().is_relative_to(_SHIM.resolve()):
        raise InputError(
            "the NPU is not emulated where the real torch_npu is installed",
            where=origin,
            next_step="run without emulation (pytest -m npu), or use an environment without torch-npu",
        )


def _torch_npu_origin() -> str | None:
    loaded = sys.modules.get("torch_npu")
    if loaded is not None:
        return getattr(loaded, "__file__", None) or "<torch_npu, loaded without a file>"
    spec = importlib.util.find_spec("torch_npu")
    return None if spec is None else (spec.origin or "<torch_npu, a namespace package>")


def _refuse_taken_backend(name: str) -> None:
    if name != "privateuseone":
        raise InputError(
            "the NPU cannot be emulated because another backend has taken torch's PrivateUse1 device",
            expected="PrivateUse1 not renamed yet",
            found=f"renamed to {name!r}",
            next_step="run in a process of its own, without the package that registers that backend",
        )


def _register_hccl() -> None:
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "HCCL"):
        return

    def gloo_in_place(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    # "cpu" too: the device's collectives are redispatched to gloo's CPU kernels, on the same bytes.
    dist.Backend.register_backend("hccl", gloo_in_place, devices=["npu", "cpu"])


def __getattr__(name: str) -> object:
    if name == "semantics":
        return importlib.import_module(f"{__name__}.semantics")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
