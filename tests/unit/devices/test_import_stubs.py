"""Imports answered with empty classes: what a plugin's file may do with them, and that nothing is left behind."""

from __future__ import annotations

import enum
import importlib
import sys
from abc import ABC, abstractmethod

import pytest
from packaging.version import Version
from torch import nn

from alignment.devices.emulated_npu.import_stubs import auto_stubs
from alignment.errors import InputError

ROOT = "a_package_nobody_has"


def test_every_import_and_name_below_a_root_is_answered_and_recorded():
    with auto_stubs((ROOT,)) as stubs:
        module = importlib.import_module(f"{ROOT}.layers.linear")
        assert isinstance(module.LinearBase, type)
        assert module.LinearBase is module.LinearBase
        assert module.LinearBase.__module__ == f"{ROOT}.layers.linear"
        assert Version(importlib.import_module(ROOT).__version__).is_prerelease is False
    assert stubs.modules == {ROOT, f"{ROOT}.layers", f"{ROOT}.layers.linear"}
    assert stubs.names == {f"{ROOT}.layers.linear.LinearBase"}
    assert str(stubs) == "3 stub modules, 1 stub names"


def test_nothing_is_left_behind():
    finders = list(sys.meta_path)
    with auto_stubs((ROOT,), missing=("another_package_nobody_has",)):
        importlib.import_module(ROOT)
        importlib.import_module("another_package_nobody_has")
    assert sys.meta_path == finders
    with pytest.raises(ModuleNotFoundError, match=ROOT):
        importlib.import_module(ROOT)


def test_nothing_is_left_behind_by_a_block_that_raises():
    finders = list(sys.meta_path)
    with pytest.raises(RuntimeError, match="in the block"), auto_stubs((ROOT,)):
        importlib.import_module(ROOT)
        raise RuntimeError("in the block")
    assert sys.meta_path == finders and ROOT not in sys.modules


def test_classes_of_a_plugin_may_inherit_from_stubs():
    with auto_stubs((ROOT,)):
        stub = importlib.import_module(ROOT)

        class Abstract(stub.Base, ABC):
            @abstractmethod
            def forward(self): ...

        class Layer(stub.Other, nn.Module):
            def __init__(self):
                super().__init__("arguments", of="the real base")
                self.inner = nn.Linear(1, 1)

        class Backend(stub.Generic[int]):
            pass

        with pytest.raises(TypeError, match="abstract"):
            Abstract()
        assert [name for name, _ in Layer().named_parameters()] == ["inner.weight", "inner.bias"]
        with pytest.raises(AttributeError, match="'Backend' object has no attribute 'W_UV'"):
            Backend().W_UV  # noqa: B018
        assert isinstance(Backend(), stub.Generic)


def test_stubs_decorate_stand_in_for_constants_and_log():
    with auto_stubs((ROOT,)):
        stub = importlib.import_module(ROOT)

        @stub.support_compile
        class Model:
            pass

        @stub.Registry.register("name")
        def function():
            return "itself"

        assert Model.__name__ == "Model" and function() == "itself"
        assert isinstance(stub.AttentionType.DECODER, type)
        stub.init_logger(__name__).info("a line that goes nowhere")


def test_values_stand_in_where_a_class_will_not_do():
    class Device(enum.Enum):
        A2 = 0

    with auto_stubs((ROOT,), values={f"{ROOT}.build.__device_type__": "A2"}):
        build = importlib.import_module(f"{ROOT}.build")
        assert Device[build.__device_type__] is Device.A2
        with pytest.raises(AttributeError):
            build.__chip__  # noqa: B018


def test_what_is_installed_is_not_stubbed_as_missing():
    with auto_stubs((), missing=("json", "json.no_such_part", "a_package_nobody_has")) as stubs:
        assert importlib.import_module("json").loads("1") == 1
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("json.another_part_nobody_has")
        importlib.import_module("json.no_such_part")
        importlib.import_module("a_package_nobody_has.below")
    assert stubs.modules == {"json.no_such_part", "a_package_nobody_has", "a_package_nobody_has.below"}


def test_a_package_that_is_loaded_already_is_refused():
    with pytest.raises(InputError) as refused, auto_stubs(("json",)):
        pass
    assert str(refused.value) == (
        "json: cannot be stubbed because it is imported already. Next: stub it in a process of its own, before "
        "anything imports it"
    )
