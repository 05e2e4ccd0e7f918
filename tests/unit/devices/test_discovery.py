"""Discovery says what is there and why what is not there is not."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from alignment.devices import base, cuda, memory, npu
from alignment.devices.base import Availability, Device, availability, choose, discover, get_device
from alignment.errors import InputError, UnavailableError


def states(**available: bool) -> list[Availability]:
    return [Availability(kind=k, available=v, reason="", count=1) for k, v in available.items()]


def test_every_kind_is_reported_with_a_reason():
    found = discover()
    assert [a.kind for a in found] == ["npu", "cuda", "cpu"]
    assert all(a.reason for a in found)
    assert str(found[-1]).startswith("cpu: available: torch ")


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        ({"cpu": True, "cuda": True, "npu": True}, "npu"),
        ({"cpu": True, "cuda": True, "npu": False}, "cuda"),
        ({"cpu": True, "cuda": False, "npu": False}, "cpu"),
    ],
)
def test_auto_prefers_npu_then_cuda_then_cpu(present, chosen):
    assert choose(states(**present)).kind == chosen


def test_cuda_without_a_cuda_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert availability("cuda").reason == f"torch {torch.__version__} is built without CUDA"


def test_cuda_with_no_driver_gives_the_drivers_words(monkeypatch):
    def init():
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check …")

    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda.availability().reason == "Found no NVIDIA driver on your system."


def test_cuda_with_its_devices_hidden(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda.availability().reason == "no device is visible: CUDA_VISIBLE_DEVICES is ''"


@pytest.fixture
def real_npu(monkeypatch):
    """A process without the emulator, so that the paths of the real torch_npu are taken."""
    monkeypatch.setattr(npu, "emulated", lambda: False)


def fake_torch_npu(monkeypatch, count):
    module = types.ModuleType("torch_npu")
    module.__version__ = "2.7.1"
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: object())
    fake = types.SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)
    monkeypatch.setattr(torch, "npu", fake, raising=False)


def test_npu_without_torch_npu(monkeypatch, real_npu):
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: None)
    assert npu.availability().reason == "torch_npu is not installed"


def test_npu_whose_import_fails_gives_the_error(monkeypatch, real_npu):
    def failing(name):
        raise ImportError("libascendcl.so: cannot open shared object file")

    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(npu.importlib, "import_module", failing)
    assert npu.availability().reason == ("torch_npu does not import: libascendcl.so: cannot open shared object file")


def test_npu_without_a_driver(monkeypatch, real_npu, tmp_path):
    fake_torch_npu(monkeypatch, 0)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(npu, "ASCEND_ROOT", tmp_path)
    assert (
        npu.availability().reason == "torch_npu is installed but there is no Ascend driver and no /dev/davinci device"
    )


def test_npu_with_its_devices_hidden(monkeypatch, real_npu):
    fake_torch_npu(monkeypatch, 0)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    assert npu.availability().reason == "no device is visible: ASCEND_RT_VISIBLE_DEVICES is ''"


def test_npu_that_is_there(monkeypatch, real_npu):
    fake_torch_npu(monkeypatch, 8)
    found = npu.availability()
    assert (found.available, found.count, found.emulated) == (True, 8, False)
    assert found.reason == "8 visible, torch_npu 2.7.1"
    assert get_device("npu:7").label == "npu"
    with pytest.raises(UnavailableError, match="expected an index below 8; found npu:8"):
        get_device("npu:8")


def test_emulated_npu_is_labelled(monkeypatch):
    monkeypatch.setitem(sys.modules, npu.EMULATOR, types.SimpleNamespace(is_installed=lambda: True))
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(device_count=lambda: 2), raising=False)
    device = get_device("npu")
    assert device.emulated
    assert device.label == "npu (emulated)"
    assert device.fingerprint().label == "npu (emulated)"
    assert device.fingerprint().emulated


def test_discovery_does_not_import_the_emulator(monkeypatch):
    monkeypatch.delitem(sys.modules, npu.EMULATOR, raising=False)
    assert not npu.emulated()
    assert npu.EMULATOR not in sys.modules


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "", "CPU"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(InputError, match="expected auto, npu or npu:<index>, cuda or cuda:<index>, cpu"):
        get_device(name)


def test_an_absent_device_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnavailableError, match="device cuda is not available: torch .* is built without CUDA"):
        get_device("cuda")


def test_unknown_kind_is_refused():
    with pytest.raises(InputError, match="unknown kind of device; expected npu, cuda, cpu; found tpu"):
        availability("tpu")


def test_cpu_device():
    device = get_device("cpu")
    assert device == Device(kind="cpu")
    assert device.label == "cpu"
    assert device.torch_device == torch.device("cpu")
    device.synchronize()
    device.empty_cache()
    assert 0 < device.memory_allocated() <= memory.peak_resident_bytes()


def test_device_index_reaches_torch():
    assert Device(kind="cuda", index=3).torch_device == torch.device("cuda", 3)


def test_peak_memory_sees_a_block_that_was_freed_again():
    device = get_device("cpu")
    bytes_held = 64 * 2**20
    with memory.peak_memory(device) as readings:
        held = torch.zeros(bytes_held // 4)
        held.add_(1)
        del held
    assert readings[0].above_start >= bytes_held // 2


def test_kinds_are_the_kinds_that_have_a_backend():
    assert {base._backend(kind).__name__.rsplit(".", 1)[1] for kind in base.KINDS} == set(base.KINDS)
