"""msprobe dumps: how names become rows, and what damage is called."""

from __future__ import annotations

import json
import subprocess
import sys

import capture_samples
import numpy as np
import pytest

from alignment.capture.readers import open_capture
from alignment.capture.readers.msprobe import MsprobeDump
from alignment.errors import InputError


def rows_of(root, **place):
    reader = open_capture(root)
    return {(r.kind, r.module, r.direction, r.role, r.path): r for r in reader.rows(0, "model", place.get("rank", 0))}


@pytest.mark.parametrize("tensors", [False, True])
def test_names_become_rows(tmp_path, tensors):
    rows = rows_of(capture_samples.msprobe(tmp_path, tensors=tensors))
    assert list(rows) == [
        ("operator", "Functional.linear", "forward", "input", "args.0"),
        ("operator", "Functional.linear", "forward", "input", "args.1"),
        ("operator", "Functional.linear", "forward", "input", "args.3"),
        ("operator", "Functional.linear", "forward", "input", "args.4"),
        ("operator", "Functional.linear", "forward", "output", "output"),
        ("module", "layers.0.proj", "forward", "input", "args.0"),
        ("module", "layers.0.proj", "forward", "input", "kwargs.mask"),
        ("module", "layers.0.proj", "forward", "output", "output.hidden"),
        ("module", "layers.0.proj", "forward", "output", "output.aux.0"),
        ("parameter", "layers.0.proj.weight", "forward", "input", "weight"),
        ("module", "layers.0.proj", "backward", "input", "output.0"),
        ("module", "layers.0.proj", "backward", "output", "args.0"),
        ("parameter_gradient", "layers.0.proj.weight", "backward", "output", "weight"),
    ]
    linear = rows["operator", "Functional.linear", "forward", "output", "output"]
    assert linear.parent == "layers.0.proj" and linear.dtype == "bfloat16" and linear.shape == (3, 2)
    scale = rows["operator", "Functional.linear", "forward", "input", "args.3"]
    assert scale.dtype == "float" and scale.statistics.mean == 2.5 and scale.shape == ()
    assert [r.order for r in rows.values()] == list(range(len(rows)))
    assert rows["module", "layers.0.proj", "forward", "output", "output.hidden"].class_name == "Linear"


def test_tensors_agree_with_their_statistics(tmp_path):
    for row in rows_of(capture_samples.msprobe(tmp_path, tensors=True), rank=1).values():
        values = row.tensor()
        if row.dtype in ("float", "bool") and values is None:
            continue
        assert values.shape == row.shape
        assert (values.max(), values.min()) == (row.statistics.max, row.statistics.min)
        if row.dtype == "float32":
            # A sum of n terms in float32, and its rounding.
            bound = row.statistics.count * np.finfo(np.float32).eps
            assert abs(np.linalg.norm(values.astype(np.float64)) / row.statistics.l2 - 1) <= bound
        else:
            assert row.dtype == "bool" and np.isnan(row.statistics.mean) or row.dtype == "bfloat16"


def test_steps_ranks_and_processes(tmp_path):
    root = capture_samples.msprobe(tmp_path / "a")
    assert (MsprobeDump(root).steps(), MsprobeDump(root).ranks(0, "model")) == ([0], [0, 1])
    assert MsprobeDump(root / "step0").ranks(0, "model") == [0, 1]
    assert MsprobeDump(root / "step0" / "rank1").ranks(0, "model") == [0]
    for old, new in (("rank0", "proc812"), ("rank1", "proc95")):
        (root / "step0" / old).rename(root / "step0" / new)
    assert MsprobeDump(root).ranks(0, "model") == [0, 1]
    (root / "step0" / "rank0").mkdir()
    (root / "step0" / "rank0" / "dump.json").write_text("{}")
    with pytest.raises(InputError, match="dumps both by rank and by process"):
        open_capture(root)


def test_the_call_stack_of_a_call(tmp_path):
    dump = MsprobeDump(capture_samples.msprobe(tmp_path))
    assert dump.call_stack(0, "model", 0, "Module.layers.0.proj.Linear.forward.0") == ["File a.py, line 1"]
    assert dump.call_stack(0, "model", 0, "Module.unknown.Linear.forward.0") == []


def damaged(tmp_path, change):
    root = capture_samples.msprobe(tmp_path, tensors=True)
    path = root / "step0" / "rank0" / "dump.json"
    document = json.loads(path.read_text())
    change(document["data"]["Module.layers.0.proj.Linear.forward.0"])
    path.write_text(json.dumps(document))
    return root, path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.update(input_args=3), r"forward\.0\.input_args: the field is damaged; expected a list; found 3"),
        (
            lambda e: e["input_args"][0].update(shape=[-1]),
            r"input_args\[0\]\.shape: the field is damaged; expected a shape",
        ),
        (lambda e: e["input_args"][0].update(dtype=1), r"input_args\[0\]\.dtype: the field is damaged"),
        (lambda e: e["input_args"][0].update(Max={}), r"input_args\[0\]\.Max: the field is damaged; expected a number"),
        (lambda e: e["parameters"]["weight"].update(data_name="../../x.pt"), "leads outside the folder of the capture"),
        (
            lambda e: e["parameters"]["weight"].update(data_name="/etc/passwd"),
            "leads outside the folder of the capture",
        ),
        (lambda e: e["parameters"]["weight"].update(data_name=["a"]), "a file name is expected"),
    ],
)
def test_a_damaged_field_is_named(tmp_path, change, message):
    root, path = damaged(tmp_path, change)
    with pytest.raises(InputError, match=message) as found:
        list(open_capture(root).rows(0, "model", 0))
    assert str(path) in str(found.value)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "outside.pt").write_bytes(b"PK\x03\x04")
    root = capture_samples.msprobe(tmp_path / "dump", tensors=True)
    data = root / "step0" / "rank0" / "dump_tensor_data"
    (data / "d.pt").unlink()
    (data / "d.pt").symlink_to(tmp_path / "outside.pt")
    row = rows_of(root)["module", "layers.0.proj", "forward", "input", "args.0"]
    with pytest.raises(InputError, match="leads outside the folder of the capture"):
        row.tensor()


@pytest.mark.parametrize("keep", [0, 1, 40, 900])
def test_a_truncated_dump_names_the_character(tmp_path, keep):
    root = capture_samples.msprobe(tmp_path)
    path = root / "step0" / "rank0" / "dump.json"
    path.write_text(path.read_text()[:keep])
    with pytest.raises(
        InputError, match=r"dump\.json, character \d+: the dump is truncated or not the JSON it should be"
    ):
        list(open_capture(root).rows(0, "model", 0))


def test_missing_and_exchanged_tensors_are_errors(tmp_path):
    root = capture_samples.msprobe(tmp_path, tensors=True)
    data = root / "step0" / "rank0" / "dump_tensor_data"
    rows = rows_of(root)
    (data / "d.pt").unlink()
    with pytest.raises(InputError, match="the file does not exist"):
        rows["module", "layers.0.proj", "forward", "input", "args.0"].tensor()
    (data / "h.pt").write_bytes((data / "a.pt").read_bytes())
    with pytest.raises(
        InputError, match=r"another tensor than the dump says; expected float32 \[2, 2\]; found float32 \[3, 2\]"
    ):
        rows["parameter", "layers.0.proj.weight", "forward", "input", "weight"].tensor()


def test_statistics_that_are_not_finite(tmp_path):
    root, _ = damaged(
        tmp_path, lambda e: e["input_args"][0].update(Max=float("nan"), Min=float("nan"), Mean=float("nan"))
    )
    row = rows_of(root)["module", "layers.0.proj", "forward", "input", "args.0"]
    assert row.statistics.nan_count == 1 and np.isfinite(row.statistics.max)


def test_a_dump_of_another_framework_is_refused(tmp_path):
    root = capture_samples.msprobe(tmp_path)
    path = root / "step0" / "rank0" / "dump.json"
    path.write_text(path.read_text().replace('"pytorch"', '"mindspore"'))
    with pytest.raises(InputError, match="a dump of another framework; expected pytorch; found mindspore"):
        list(open_capture(root).rows(0, "model", 0))


def test_one_call_at_a_time_is_in_memory(tmp_path):
    import tracemalloc

    def peak(calls):
        folder = tmp_path / str(calls) / "rank0"
        folder.mkdir(parents=True)
        entry = {"input_args": [], "input_kwargs": {}, "output": [{"type": "float", "value": 1.0}], "note": "x" * 2000}
        data = {f"Module.layers.{i}.Linear.forward.0": entry for i in range(calls)}
        (folder / "dump.json").write_text(json.dumps({"data": data}))
        reader = MsprobeDump(tmp_path / str(calls))
        tracemalloc.start()
        assert sum(1 for _ in reader.rows(0, "model", 0)) == calls
        return tracemalloc.get_traced_memory()[1], tracemalloc.stop()

    few, many = peak(1_500)[0], peak(6_000)[0]
    # Four times the dump in the memory of the smaller one: its buffer may be full or half full.
    assert many < 2 * few


def test_statistics_are_read_without_torch(tmp_path):
    capture_samples.msprobe(tmp_path, tensors=True)
    code = (
        "import sys; from alignment.capture.readers import open_capture\n"
        f"reader = open_capture({str(tmp_path)!r})\n"
        "assert all(r.tensor() is not None or r.shape == () for r in reader.rows(0, 'model', 0))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
