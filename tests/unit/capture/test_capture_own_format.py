"""The files of a capture: what is written is read, and what is damaged is refused by the name of file and field."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.capture.own_format import (
    OwnCapture,
    RowColumns,
    decoded,
    stage_directory,
    write_about,
    write_part,
    write_rows,
)
from alignment.capture.record import DIRECTIONS, KINDS, ROLES, Shard
from alignment.errors import InputError
from alignment.weights.tensor_file import read_header

ROW = {
    "module": "model.layers.0", "class_name": "Block", "kind": "module", "direction": "forward", "call": 0,
    "role": "output", "path": "output", "order": 0, "parent": "model", "dtype": "float32", "shape": (2, 3),
    "shard": None, "keys": -1, "statistics": 0, "sketch": 0, "sketch_count": 0, "tensor": None,
}  # fmt: skip


def write(root, rows=(ROW,), *, step=0, stage="train", rank=0, piece="", sketches=None, groups=(), parts=()):
    columns = RowColumns()
    for row in rows:
        columns.append(**{**ROW, **row})
    if not (root / "capture.json").exists():
        write_about(root, {"detail": "sketch", "stage_order": ["rollout", "train"]})
    return write_rows(
        root, step, stage, rank, columns, piece=piece, statistics=np.arange(7.0)[None],
        sketches=np.ones((2, 8)) if sketches is None else sketches, key_groups=groups, parts=parts,
    )  # fmt: skip


text = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
naturals = st.integers(0, 1000)


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "module": text,
                "class_name": text,
                "kind": st.sampled_from(KINDS),
                "direction": st.sampled_from(DIRECTIONS),
                "role": st.sampled_from(ROLES),
                "path": text,
                "parent": text,
                "call": naturals,
                "order": naturals,
                "shape": st.lists(naturals, max_size=4).map(tuple),
                "shard": st.none() | st.sampled_from([4, 8]).flatmap(lambda n: st.tuples(*[naturals] * n)),
                "sketch": st.integers(-1, 1),
            }
        ),
        max_size=6,
    )
)
@settings(max_examples=30, deadline=None)
def test_any_row_comes_back_as_it_was(tmp_path_factory, rows):
    root = tmp_path_factory.mktemp("c")
    write(root, rows)
    read = list(OwnCapture(root).rows(0, "train", 0))
    assert len(read) == len(rows)
    for got, row in zip(read, rows):
        for name in ("module", "class_name", "kind", "direction", "role", "path", "parent", "call", "order", "shape"):
            assert getattr(got, name) == row[name]
        cut = row["shard"]
        runs = () if cut is None else tuple(zip(cut[4::2], cut[5::2]))
        assert got.shard == (cut and Shard(dim=cut[0], start=cut[1], length=cut[2], whole=cut[3], runs=runs))
        assert got.has_sketch == (row["sketch"] >= 0) and got.statistics.max == 0 and got.statistics.count == 6


def test_steps_stages_ranks_and_pieces_are_found_in_their_order(tmp_path):
    for step in (10, 2):
        for stage in ("train", "rollout", "extra"):
            write(tmp_path, step=step, stage=stage, rank=1)
    write(tmp_path, [{"module": "second"}], step=2, rank=1, piece="1")
    write(tmp_path, [{"module": "driver"}], step=2, rank=1, piece="driver")
    (tmp_path / "step3" / "train").mkdir(parents=True)
    (tmp_path / "step3" / "train" / "rank0.safetensors").write_bytes(b"left over")
    reader = OwnCapture(tmp_path)
    assert reader.steps() == [2, 10] and reader.stages(2) == ["rollout", "train", "extra"]
    assert reader.ranks(2, "train") == [1] and reader.ranks(2, "none") == []
    rows = list(reader.rows(2, "train", 1))
    assert [r.module for r in rows] == ["model.layers.0", "second", "driver"] and [r.order for r in rows] == [0, 1, 2]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool,
              torch.float8_e4m3fn, torch.float8_e5m2]
)  # fmt: skip
def test_tensors_come_back_in_a_dtype_that_holds_them_exactly(tmp_path, dtype):
    t = torch.randn(16, 16).mul(3).to(dtype)
    name = str(dtype).removeprefix("torch.")
    part = write_part(tmp_path, 0, "train", 0, 0, {"t0": (name, t.shape, t.view(torch.uint8).numpy())})
    write(tmp_path, [{"tensor": "0/t0", "dtype": name, "shape": tuple(t.shape)}], parts=[part])
    [row] = OwnCapture(tmp_path).rows(0, "train", 0)
    assert np.array_equal(row.tensor().astype(np.float64), t.double().numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_8_bit_float_is_decoded(tmp_path, dtype):
    bits = torch.arange(256, dtype=torch.uint8)
    part = write_part(tmp_path, 0, "train", 0, 0, {"t0": (str(dtype).removeprefix("torch."), (256,), bits.numpy())})
    [stored] = read_header(stage_directory(tmp_path, 0, "train") / part).tensors
    assert np.array_equal(decoded(stored), bits.view(dtype).float().numpy(), equal_nan=True)


def test_one_sketch_per_sample_comes_with_the_keys(tmp_path):
    write(tmp_path, [{"sketch_count": 2, "keys": 0}], groups=[["a", "b"]])
    [row] = OwnCapture(tmp_path).rows(0, "train", 0)
    assert row.keys == ("a", "b") and row.sketch().shape == (2, 8)


@pytest.mark.parametrize("version", [2, 3])
def test_sketches_of_samples_of_an_older_version_are_not_read(tmp_path, version):
    """Their samples lay elsewhere: they would differ from any that is made now. Sketches of whole tensors do not."""
    path = write(tmp_path, [{"sketch_count": 2, "keys": 0}, {}], groups=[["a", "b"]])
    damage(path, lambda document: document.update(version=version))
    of_samples, whole = OwnCapture(tmp_path).rows(0, "train", 0)
    assert of_samples.has_sketch == (version == 3) and whole.has_sketch
    assert of_samples.statistics is not None and of_samples.keys == ("a", "b")


def damage(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=99), "field version is damaged.*expected 3.*found 99"),
        (lambda d: d.update(rows=5), r"field columns\.module is damaged.*5 rows.*1 rows"),
        (lambda d: d.update(data="../../etc/passwd"), "field data is damaged.*beside this one.*passwd"),
        (lambda d: d["columns"].pop("role"), r"field columns\.role is damaged"),
        (
            lambda d: d["columns"]["kind"].update(values=["thing"]),
            r"columns\.kind is damaged.*module | operator.*thing",
        ),
        (lambda d: d["columns"]["shape"].update(values=[[-1]]), r"columns\.shape is damaged.*a shape"),
        (lambda d: d["columns"].update(statistics=[7]), r"columns\.statistics\[0\] is damaged.*below 1.*found 7"),
        (lambda d: d["columns"].update(sketch=[2]), r"columns\.sketch\[0\] is damaged.*at most 2 sketches"),
        (lambda d: d["columns"].update(keys=[3]), r"columns\.keys\[0\] is damaged"),
        (lambda d: d["columns"].update(call=[True]), r"columns\.call is damaged"),
        (lambda d: d["columns"]["module"].update(codes=[9]), r"columns\.module\.codes is damaged"),
    ],
)
def test_a_damaged_field_is_refused_by_its_name(tmp_path, change, message):
    path = write(tmp_path)
    damage(path, change)
    with pytest.raises(InputError, match=message) as refused:
        list(OwnCapture(tmp_path).rows(0, "train", 0))
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("spec", ["0/none", "9/t0", "x/t0", "../t0", ""])
def test_a_tensor_that_is_not_there_is_refused_when_it_is_asked_for(tmp_path, spec):
    part = write_part(tmp_path, 0, "train", 0, 0, {"t0": ("float32", (2, 3), np.zeros((2, 3), "<f4"))})
    write(tmp_path, [{"tensor": spec}], parts=[part])
    [row] = OwnCapture(tmp_path).rows(0, "train", 0)
    with pytest.raises(InputError, match=r"columns\.tensor\[0\] is damaged"):
        row.tensor()


def test_truncated_files_are_refused(tmp_path):
    path = write(tmp_path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="truncated or not JSON"):
        list(OwnCapture(tmp_path).rows(0, "train", 0))
    path.write_text(whole)
    data = path.with_suffix(".safetensors")
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(InputError, match="damaged or is not a safetensors file"):
        list(OwnCapture(tmp_path).rows(0, "train", 0))


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"format": "other", "version": 1}, "this is no capture"),
        ({"format": "alignment-capture", "version": 99}, "another version"),
    ],
)
def test_what_is_no_capture_of_this_version_is_refused(tmp_path, about, message):
    (tmp_path / "capture.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match=message):
        OwnCapture(tmp_path)


@pytest.mark.parametrize("stage", ["", "..", "a/b", "a" * 81])
def test_a_stage_that_is_no_folder_is_refused(tmp_path, stage):
    with pytest.raises(InputError, match="cannot be the name of a stage"):
        stage_directory(tmp_path, 0, stage)


def test_reading_statistics_does_not_import_torch(tmp_path):
    write(tmp_path)
    code = (
        "import sys; from alignment.capture.own_format import OwnCapture;"
        f"rows = list(OwnCapture({str(tmp_path)!r}).rows(0, 'train', 0)); rows[0].sketch();"
        "assert rows[0].statistics.count == 6 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
