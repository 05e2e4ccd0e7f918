"""Plain settings of modules: which are recorded, and that a differing one is named at its module before any tensor."""

from __future__ import annotations

import functools
import gc
import json
import math
import types
import weakref
from dataclasses import dataclass

import pytest
import torch
from capture_model import batch, make_model
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.capture.settings import SettingsReader
from alignment.diagnose.capture_comparison import compare_captures
from alignment.diagnose.pairing import SETTING_ROUNDING
from alignment.errors import InputError


@dataclass(frozen=True)
class Config:
    n_group: int = 4
    routed_scaling_factor: float = 2.5
    hidden_act: str = "silu"
    hidden_size: int = 8
    use_cache: bool = True


def scaled(x, config):
    return x * config.routed_scaling_factor


def decorated(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Norm(nn.Module):
    unit = 1.0

    def __init__(self, eps=1e-6, **more):
        super().__init__()
        self.eps, self.note, self.inplace = eps, "not read", False
        self.act_fn = nn.functional.silu
        self.gelu = functools.partial(nn.functional.gelu, approximate="tanh")
        self.limits, self.softcap, self.dropout = (0.0, math.inf), None, nn.Dropout(0.5)
        for name, value in more.items():
            setattr(self, name, value)

    @decorated
    def forward(self, x):
        x = self.act_fn(self.gelu(x, *self.limits, inplace=self.inplace)) if self.softcap else x
        return self.normalised(self.dropout(x)) * self.unit

    def normalised(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Router(nn.Module):
    def __init__(self, config=Config()):
        super().__init__()
        self.config, self.top_k = config, 2
        self.act = config.hidden_act
        self.weight = nn.Parameter(torch.eye(config.hidden_size))

    def forward(self, x):
        return scaled(x[..., : self.top_k], self.config)


class Layer(nn.Module):
    def __init__(self, **norm):
        super().__init__()
        self.norm, self.router = Norm(**norm), Router()
        torch.manual_seed(0)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        return self.router(self.norm(self.proj(x)))


def test_what_the_forward_pass_reads_is_a_setting_and_nothing_else():
    assert SettingsReader().of(Norm()) == {
        "eps": 1e-6, "unit": 1.0, "act_fn": "silu()", "gelu": "gelu(approximate=tanh)", "softcap": None,
        "limits": "[0.0, inf]",
    }  # fmt: skip
    assert SettingsReader().of(nn.Linear(3, 3)) == {}


def test_a_configuration_counts_where_it_is_read_in_functions_as_well():
    found = SettingsReader().of(Router())
    assert found == {"top_k": 2, "config.routed_scaling_factor": 2.5, "config.hidden_act": "silu"}


def test_dropout_counts_where_the_module_trains():
    module = nn.Dropout(0.25)
    assert SettingsReader().of(module) == {"p": 0.25}
    assert SettingsReader().of(module.eval()) == {}


def test_a_forward_that_was_replaced_is_read_as_it_is_now():
    module = Norm()
    module.forward = lambda x: x * module.softcap
    assert set(SettingsReader().of(module)) == {"softcap"}


def test_a_method_that_was_bound_to_one_module_counts_for_that_one():
    reader, plain, other = SettingsReader(), Norm(), Norm()
    other.core = types.MethodType(lambda self, x: x * self.scale, other)
    plain.scale = other.scale = 2.0
    assert "scale" not in reader.of(plain)
    assert reader.of(other)["scale"] == 2.0
    assert "scale" not in reader.of(plain)


def test_nothing_holds_a_module_once_its_capture_has_ended(tmp_path):
    def captured():
        model = nn.Sequential(nn.Linear(8, 8))
        old = model[0].forward
        # as hooks of libraries replace it
        model[0].forward = functools.partial(lambda module, x: old(x), model[0])
        capture_of(model, tmp_path / "a")
        return weakref.ref(model[0])

    held = captured()
    gc.collect()
    assert held() is None


def test_the_code_of_a_class_is_read_once_for_all_stages(tmp_path, monkeypatch):
    from alignment.capture import settings

    read = []
    mentioned = settings._mentioned
    monkeypatch.setattr(settings, "_mentioned", lambda kind, functions: read.append(kind) or mentioned(kind, functions))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with capture(model, CaptureConfig(), directory=tmp_path) as session:
        for step in range(2):
            with session.step(step):
                model(torch.ones(2, 8)).sum().backward()
    assert sorted(kind.__name__ for kind in read) == ["Linear", "Sequential"]


def test_an_infinite_setting_can_be_stored(tmp_path):
    capture_of(nn.Sequential(nn.Linear(8, 8), Norm(eps=math.inf)), tmp_path / "a")
    [row] = [r for r in OwnCapture(tmp_path / "a").rows(0, "train", 0) if r.kind == "setting" and r.path == "eps"]
    assert row.value == "inf"


def capture_of(model, directory, config=CaptureConfig()):
    with capture(model, config, directory=directory) as session, session.step(0):
        torch.manual_seed(1)
        model(torch.randn(5, 8)).sum().backward()
    assert session.failure is None
    return OwnCapture(directory)


def compared(tmp_path, golden, target, config=CaptureConfig()):
    golden, target = capture_of(golden, tmp_path / "g", config), capture_of(target, tmp_path / "t", config)
    return compare_captures(golden, target).stages[0]


@pytest.mark.parametrize("detail", ["statistics", "sketch", "tensor"])
def test_a_differing_setting_is_named_at_its_module_first(tmp_path, detail):
    for model in (golden := Layer(), target := Layer(eps=1.5e-6)):
        model.norm.dropout.p = 0.0
    found = compared(tmp_path, golden, target, CaptureConfig(detail=detail))
    assert found.first.module == "norm" and found.first.quantity == "setting eps"
    assert found.reason() == "first introduced divergence: norm, setting eps: 1.5e-06, golden has 1e-06"


def test_equal_settings_are_no_pairs_and_no_rows(tmp_path):
    for model in (models := [Layer(), Layer(), Layer(), Layer()]):
        model.norm.dropout.p = 0.0
    found = compared(tmp_path / "with", *models[:2])
    assert found.aligned
    without = compared(tmp_path / "without", *models[2:], CaptureConfig(settings=False))
    assert (found.pairs, found.rows) == (without.pairs, without.rows)
    assert not [r for r in OwnCapture(tmp_path / "without" / "g").rows(0, "train", 0) if r.kind == "setting"]


def test_a_setting_that_one_side_lacks_is_no_difference(tmp_path):
    golden, target = Layer(), Layer()
    del target.norm.limits
    target.norm.softcap = False
    golden.norm.softcap = False
    for model in (golden, target):
        model.norm.dropout.p = 0.0
    assert compared(tmp_path, golden, target).aligned


class OtherNorm(Norm):
    """Another implementation."""


@pytest.mark.parametrize(
    ("change", "named"),
    [({"eps": 1e-5}, "setting eps"), ({"softcap": False}, None), ({"act_fn": torch.tanh}, None),
     ({"eps": 1e-6 * (1 + SETTING_ROUNDING / 2)}, None)],
    ids=["number", "none", "function", "rounding"],
)  # fmt: skip
def test_between_classes_numbers_are_compared_and_names_of_functions_are_not(tmp_path, change, named):
    golden, target = Layer(), Layer()
    target.norm = OtherNorm(**change)
    for model in (golden, target):
        model.norm.dropout.p = 0.0
    found = compared(tmp_path, golden, target)
    assert (found.first.quantity if found.first else None) == named


def test_within_a_class_the_name_of_an_activation_is_compared(tmp_path):
    golden, target = Layer(), Layer(act_fn=torch.tanh)
    for model in (golden, target):
        model.norm.dropout.p = 0.0
    found = compared(tmp_path, golden, target)
    assert found.reason() == "first introduced divergence: norm, setting act_fn: tanh(), golden has silu()"


def test_settings_are_stored_once_per_kind_of_module(tmp_path):
    model = nn.Sequential(*[nn.LayerNorm(8) for _ in range(20)])
    capture_of(model, tmp_path / "a")
    table = json.loads((tmp_path / "a" / "step0" / "train" / "rank0.json").read_text())["settings"]
    assert table["kinds"] == [["LayerNorm", {"eps": 1e-05, "normalized_shape": "[8]"}]] and len(table["modules"]) == 20


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda t: t["modules"].__setitem__(0, ["0", 7]), "settings.modules[0]"),
        (lambda t: t["kinds"].__setitem__(0, ["LayerNorm", {"eps": [1]}]), "settings.kinds[0].eps"),
        (lambda t: t.pop("kinds"), "settings.kinds"),
    ],
)
def test_a_damaged_table_is_refused_with_its_place(tmp_path, change, place):
    capture_of(nn.LayerNorm(8), tmp_path / "a")
    path = tmp_path / "a" / "step0" / "train" / "rank0.json"
    document = json.loads(path.read_text())
    change(document["settings"])
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as error:
        list(OwnCapture(tmp_path / "a").rows(0, "train", 0))
    assert place in str(error.value)


def test_the_model_of_the_other_tests_is_captured_with_its_settings(tmp_path):
    ids, mask = batch()
    with capture(make_model(), CaptureConfig(), directory=tmp_path / "c") as session, session.step(0):
        session._model(input_ids=ids, attention_mask=mask)
    found = {r.module for r in OwnCapture(tmp_path / "c").rows(0, "train", 0) if r.kind == "setting"}
    assert found == {"embed"}
