"""Captures written as msprobe dumps say what the capture said."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.msprobe_writer import NO_STACK, write_msprobe
from alignment.capture.own_format import OwnCapture
from alignment.capture.readers import open_capture
from alignment.capture.record import Statistics, TensorRow
from alignment.capture.session import capture


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, *, mask=None):
        return {"hidden": self.down(torch.relu(self.up(x))), "mask": mask}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask=ids != 0)["hidden"]
        return self.norm(x)


def captured(tmp_path, *, level="L0", detail="tensor", dtype=torch.float32):
    torch.manual_seed(0)
    net = Net().to(dtype)
    config = CaptureConfig(level=level, detail=detail, values=False, settings=False)
    with capture(net, config, directory=tmp_path / "own") as session:
        with session.step(0):
            net(torch.tensor([[1, 2, 3]])).float().pow(2).sum().backward()
            net(torch.tensor([[1, 2, 0]]))
    return list(OwnCapture(tmp_path / "own").rows(0, "train", 0))


def key(row):
    return row.kind, row.module, row.direction, row.call, row.role, row.path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_survive_writing_and_reading(tmp_path, dtype):
    rows = [r for r in captured(tmp_path, dtype=dtype) if r.module]
    assert write_msprobe(tmp_path / "dump" / "step0" / "rank0", rows, level="L0", task="tensor") > 10
    found = {key(r): r for r in open_capture(tmp_path / "dump").rows(0, "model", 0)}
    # Parameters stand at a call of their module, and a sole result has no number.
    expected = {key(r): r for r in rows}
    assert set(found) == set(expected)
    for name, row in expected.items():
        again = found[name]
        assert (again.dtype, again.shape, again.class_name, again.parent) == (
            row.dtype,
            row.shape,
            row.class_name,
            row.parent,
        )
        np.testing.assert_array_equal(again.tensor(), row.tensor())
        if row.dtype in ("float32", "bfloat16"):
            assert again.statistics == row.statistics
        else:
            assert (again.statistics.max, again.statistics.min) == (row.statistics.max, row.statistics.min)


def test_the_files_are_those_of_msprobe(tmp_path):
    folder = tmp_path / "rank0"
    write_msprobe(folder, captured(tmp_path, detail="statistics"), level="L0", task="statistics")
    assert sorted(p.name for p in folder.iterdir()) == ["construct.json", "dump.json", "stack.json"]
    dump = json.loads((folder / "dump.json").read_text())
    assert {k: v for k, v in dump.items() if k != "data"} == {
        "task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None
    }  # fmt: skip
    entry = dump["data"]["Module.layers.0.up.Linear.forward.0"]
    assert list(entry) == ["input_args", "input_kwargs", "output", "parameters"]
    assert list(entry["output"][0]) == ["type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"]
    assert dump["data"]["Module.embed.Embedding.forward.0"]["input_args"][0]["Norm"] is None  # of integers, as msprobe
    assert set(dump["data"]["Module.layers.0.up.Linear.parameters_grad.0"]) == {"weight", "bias"}
    tree = json.loads((folder / "construct.json").read_text())
    assert tree["Module.layers.0.up.Linear.forward.1"] == "Module.layers.0.Block.forward.1"
    assert tree["Module.layers.0.up.Linear.backward.0"] == "Module.layers.0.Block.backward.0"
    assert tree["Module.layers.0.Block.forward.0"] is None
    calls, frames = json.loads((folder / "stack.json").read_text())["0"]
    assert set(calls) == set(dump["data"]) and frames == [NO_STACK]


def test_operators_are_counted_over_the_step(tmp_path):
    folder = tmp_path / "rank0"
    write_msprobe(folder, captured(tmp_path, level="mix", detail="statistics"), level="mix", task="statistics")
    names = list(json.loads((folder / "dump.json").read_text())["data"])
    numbers = [n.split(".")[-2] for n in names if n.startswith("Aten.addmm.default.") and n.endswith("forward")]
    assert numbers == [str(i) for i in range(len(numbers))] and len(numbers) > 2
    operators = [r for r in open_capture(folder).rows(0, "model", 0) if r.kind == "operator"]
    assert {r.parent for r in operators if r.module == "Aten.addmm.default" and r.direction == "forward"} >= {
        "layers.0.up"
    }


def row(**changes):
    fields = {
        "module": "a", "class_name": "Linear", "kind": "module", "direction": "forward", "call": 0, "role": "output",
        "path": "output", "order": 0, "parent": "", "dtype": "float32", "shape": (2,),
    }  # fmt: skip
    return TensorRow(**{**fields, **changes})


def test_what_is_not_finite_shows(tmp_path):
    broken = Statistics(max=1.0, min=0.0, mean=0.5, l2=1.0, nan_count=1, inf_count=0, count=2)
    write_msprobe(tmp_path, [row(statistics=broken)], level="L0", task="statistics")
    text = (tmp_path / "dump.json").read_text()
    assert '"Max": NaN' in text
    [again] = open_capture(tmp_path).rows(0, "model", 0)
    assert again.statistics.nan_count == 1
    infinite = Statistics(max=1.0, min=0.0, mean=0.5, l2=1.0, nan_count=0, inf_count=1, count=2)
    write_msprobe(tmp_path, [row(statistics=infinite)], level="L0", task="statistics")
    [again] = open_capture(tmp_path).rows(0, "model", 0)
    assert again.statistics.inf_count > 0 and again.statistics.nan_count == 0


def test_nested_and_missing_places(tmp_path):
    rows = [
        row(role="input", path="args.2", order=0), row(role="input", path="args.0.hidden", order=1),
        row(role="input", path="kwargs.context.cos", order=2), row(path="output.1", order=3),
    ]  # fmt: skip
    write_msprobe(tmp_path, rows, level="L0", task="statistics")
    entry = json.loads((tmp_path / "dump.json").read_text())["data"]["Module.a.Linear.forward.0"]
    assert entry["input_args"][1] is None and set(entry["input_args"][0]) == {"hidden"}
    assert set(entry["input_kwargs"]["context"]) == {"cos"} and entry["output"][0] is None
    assert [r.path for r in open_capture(tmp_path).rows(0, "model", 0)] == [
        "args.0.hidden", "args.2", "kwargs.context.cos", "output.1",
    ]  # fmt: skip
