"""Dumps of the real msprobe are read to the value, and ours are read by it."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import msprobe_run
import numpy as np
import pytest

from alignment.capture.readers import open_capture

pytestmark = pytest.mark.engine

SECONDS = 300
SCRIPT = Path(__file__).with_name("msprobe_run.py")
SETTINGS = (("statistics", "L1", "float32"), ("tensor", "L0", "float32"), ("tensor", "mix", "bfloat16"))
OURS = (("statistics", "L0", "float32"), ("tensor", "L0", "float32"), ("tensor", "mix", "bfloat16"))


def dump(out: Path, *setting: str) -> Path:
    """By the real msprobe, whose state is one per process."""
    command = [sys.executable, str(SCRIPT), "msprobe", str(out), *setting, "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def dump_ours(out: Path, *setting: str, fault: str = "none") -> Path:
    msprobe_run.main("ours", out, *setting, fault)
    return out


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """The real msprobe's dumps, by setting."""
    if importlib.util.find_spec("msprobe") is None:
        pytest.skip("msprobe is not installed")
    root = tmp_path_factory.mktemp("msprobe")
    return {setting: dump(root / "-".join(setting), *setting) for setting in SETTINGS}


@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_every_row_of_a_real_dump_is_read(dumps, setting):
    task, level, dtype = setting
    reader = open_capture(dumps[setting])
    about = reader.describe()
    assert (about["task"], about["level"], about["framework"]) == (task, level, "pytorch")
    assert reader.steps() == [0, 1] and reader.ranks(0, "model") == [0]
    rows = list(reader.rows(1, "model", 0))
    assert {r.direction for r in rows} == {"forward", "backward"}
    kinds = {"L0": {"module", "parameter", "parameter_gradient"}, "L1": {"operator"}}
    assert {r.kind for r in rows} == kinds.get(level, kinds["L0"] | kinds["L1"])
    if level != "L1":
        paths = {(r.path, r.role) for r in rows if r.module == "layers.1" and r.direction == "forward"}
        assert {("args.0", "input"), ("kwargs.mask", "input"), ("kwargs.scale", "input")} < paths
        assert {("output.hidden", "output"), ("output.aux.0", "output"), ("output.aux.1", "output")} < paths
        up = next(r for r in rows if r.module == "layers.1.up")
        assert up.parent == "layers.1" and up.class_name == "Linear"
        gradients = {r.module for r in rows if r.kind == "parameter_gradient"}
        assert {"head.weight", "layers.0.down.bias", "embed.weight"} <= gradients
    if level != "L0":
        assert {"Functional.linear", "Torch.relu"} <= {r.module for r in rows}
    if level == "mix":
        assert {r.parent for r in rows if r.module == "Torch.relu" and r.direction == "forward"} == {
            "layers.0",
            "layers.1",
        }


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s[0] == "tensor"], ids="-".join)
def test_tensors_are_those_that_torch_loads_and_have_their_statistics(dumps, setting):
    import torch

    root = dumps[setting]
    loaded = 0
    [folder] = (root / "step0").iterdir()
    for row in open_capture(root).rows(0, "model", 0):
        values = row.tensor()
        if values is None:
            assert row.dtype in ("int", "float", "bool") and row.shape == ()
            continue
        loaded += 1
        assert values.shape == row.shape
        if row.statistics is not None and values.size:
            assert (float(values.max()), float(values.min())) == (row.statistics.max, row.statistics.min)
    files = list((folder / "dump_tensor_data").iterdir())
    assert loaded == len(files)
    from alignment.capture.readers.torch_file import read_torch

    for path in files:
        theirs = torch.load(path, weights_only=True)
        theirs = theirs.float() if theirs.dtype is torch.bfloat16 else theirs
        np.testing.assert_array_equal(read_torch(path).load(), theirs.detach().numpy())


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    root = tmp_path_factory.mktemp("ours")
    return {s: dump_ours(root / "-".join(s), *s) for s in OURS}


def module_rows(root: Path) -> dict:
    """By msprobe's names; parameters, which msprobe writes at every call, once."""
    rows = {}
    for r in open_capture(root).rows(1, "model", 0):
        if r.kind in ("module", "parameter", "parameter_gradient") and r.dtype not in ("float", "int"):
            rows.setdefault((r.kind, r.module, r.class_name, r.direction, r.role, r.path), r)
    return rows


def test_our_dumps_name_and_measure_what_msprobe_does(dumps, ours):
    setting = ("tensor", "L0", "float32")
    theirs, mine = module_rows(dumps[setting]), module_rows(ours[setting])
    # msprobe leaves out gradients of arguments and results that are passed through unused.
    assert {k for k in theirs if k[3] == "forward"} == {k for k in mine if k[3] == "forward"}
    both = theirs.keys() & mine.keys()
    assert {k[0] for k in both if k[3] == "backward"} == {"module", "parameter_gradient"}
    for key in both:
        one, other = theirs[key], mine[key]
        assert (one.dtype, one.shape) == (other.dtype, other.shape), key
        np.testing.assert_array_equal(one.tensor(), other.tensor(), err_msg=str(key))
        if one.dtype == "float32":
            # Two ways to add up n squares in float32.
            bound = one.statistics.count * np.finfo(np.float32).eps
            assert abs(one.statistics.l2 - other.statistics.l2) <= bound * max(
                one.statistics.l2, np.finfo(np.float32).tiny
            ), key


def compared(target: Path, golden: Path, out: Path) -> list[dict[str, str]]:
    """The rows of ``msprobe compare``, first step."""
    paths = [next((d / "step0").iterdir()) / "dump.json" for d in (target, golden)]
    command = [
        sys.executable,
        "-m",
        "msprobe.msprobe",
        "compare",
        "-tp",
        str(paths[0]),
        "-gp",
        str(paths[1]),
        "-o",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [result] = [p for p in out.rglob("compare_result*.csv")]
    with open(result, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("setting", OURS, ids="-".join)
def test_msprobe_compares_our_dumps(dumps, ours, setting, tmp_path):
    same = compared(ours[setting], ours[setting], tmp_path / "same")
    assert len(same) > 20 and {row["Result"] for row in same} == {"pass"}
    assert any(row["NPU Name"].startswith("Module.layers.0.up.Linear.forward.0") for row in same)
    assert not any(row["Bench Name"] == "N/A" for row in same)


def test_msprobe_sees_a_fault_in_our_dumps(dumps, ours, tmp_path):
    setting = ("statistics", "L0", "float32")
    wrong = dump_ours(tmp_path / "wrong", *setting, fault="scale")
    rows = compared(wrong, ours[setting], tmp_path / "out")
    flagged = [row["NPU Name"] for row in rows if row["Result"] != "pass"]
    relative = {row["NPU Name"]: row for row in rows}
    up, down = (relative[f"Module.layers.0.{m}.Linear.forward.0.output.0"] for m in ("up", "down"))
    assert float(up["L2norm diff"]) == 0.0 and abs(float(down["L2norm diff"])) > 0.0
    assert flagged or float(down["NormRelativeErr"].rstrip("%")) > 0


def test_key_data_that_msprobe_saved_is_read(tmp_path):
    single_saver = pytest.importorskip("msprobe.core.single_save.single_saver")
    import torch

    single_saver.SingleSave(str(tmp_path))
    for step in range(2):
        responses = [torch.arange(6).view(2, 3) + step, torch.arange(2).view(1, 2)]
        single_saver.SingleSave.save({"responses": responses, "prompts": torch.arange(4).view(2, 2)})
        single_saver.SingleSave.save({"prompts": torch.arange(4).view(2, 2) + 7})
        single_saver.SingleSave.save_ex({"entropys": torch.ones(2)})
        single_saver.SingleSave.step()
    reader = open_capture(tmp_path)
    assert reader.steps() == [0, 1] and reader.stages(1) == ["data"]
    rows = {(r.path, r.call): r for r in reader.rows(1, "data", 0)}
    assert rows["responses", 0].tensor().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert rows["responses.1", 0].tensor().tolist() == [[0, 1]]
    assert rows["prompts", 1].tensor().tolist() == [[7, 8], [9, 10]]
    assert rows["entropys", 0].statistics.mean == 1.0 and rows["responses", 0].statistics.max == 6.0


def test_a_batch_of_the_transfer_queue_is_read(tmp_path):
    tensordict = pytest.importorskip("tensordict")
    import torch

    folder = tmp_path / "exp_project" / "GBS2_N1_in3_out4" / "3" / "0"
    folder.mkdir(parents=True)
    ragged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    fields = {"prompts": torch.arange(6).view(2, 3), "nested": {"x": torch.ones(2)}, "responses": ragged}
    batch = tensordict.TensorDict(fields, batch_size=[2])
    batch["uid"] = tensordict.NonTensorStack("a", "b")
    torch.save(
        {"tensordict": batch, "tags": [{"a": 1}], "keys": ["k1", "k2"], "global_steps": 3}, folder / "tq_batch.pt"
    )
    rows = {r.module: r.tensor().tolist() for r in open_capture(tmp_path).rows(3, "rollout", 0)}
    assert rows == {
        "prompts": [[0, 1, 2], [3, 4, 5]],
        "nested.x": [1.0, 1.0],
        "responses.values": [0, 1, 0, 1, 2],
        "responses.offsets": [0, 2, 5],
    }


def test_a_batch_that_verl_saved_is_read(tmp_path):
    verl = pytest.importorskip("verl.protocol")
    import torch

    tensors = {
        "prompts": torch.arange(6).view(2, 3),
        "rm_scores": torch.randn(2, 4),
        "mask": torch.tensor([[True], [False]]),
    }
    others = {"uid": np.array(["a", "b"], dtype=object), "acc": np.array([0.5, 1.0])}
    folder = tmp_path / "exp_project" / "GBS2_N1_in3_out4" / "7"
    folder.mkdir(parents=True)
    verl.DataProto.from_dict(tensors=tensors, non_tensors=others, meta_info={"timing": {"gen": 1.0}}).save_to_disk(
        folder / "gen_batch.dp"
    )
    reader = open_capture(tmp_path)
    assert reader.steps() == [7]
    rows = {r.module: r for r in reader.rows(7, "rollout", 0)}
    for name, tensor in tensors.items():
        assert rows[name].dtype == str(tensor.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(rows[name].tensor(), tensor.numpy())
    assert rows["acc"].tensor().tolist() == [0.5, 1.0]
