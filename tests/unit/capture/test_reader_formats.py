"""The other formats: rollouts of verl, event files, folders of tensors, the collector's own data, and finding out."""

from __future__ import annotations

import json
import struct
import sys

import capture_samples
import numpy as np
import pytest
import torch

from alignment.capture.readers import FORMATS, open_capture
from alignment.capture.readers.collector_dump import CollectorDump
from alignment.capture.readers.event_files import EventFiles, masked_crc32c
from alignment.capture.readers.json_stream import members
from alignment.errors import InputError


def rows_of(reader, step, stage, rank=0):
    return {row.module: row for row in reader.rows(step, stage, rank)}


# --- finding out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", capture_samples.SAMPLES)
def test_every_format_is_found_out(tmp_path, sample):
    root = capture_samples.SAMPLES[sample](tmp_path / "capture")
    asked = open_capture(root, format=capture_samples.format_of(sample))
    assert type(open_capture(root)) is type(asked)
    assert asked.describe() and asked.steps()


def test_what_is_no_capture_is_an_error_that_lists_the_formats(tmp_path):
    with pytest.raises(InputError, match="no capture of a known format is here; expected alignment: capture.json"):
        open_capture(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="found notes.txt"):
        open_capture(tmp_path)
    with pytest.raises(InputError, match="there is no such capture"):
        open_capture(tmp_path / "absent")
    with pytest.raises(InputError, match=f"there is no such format; expected {', '.join(FORMATS)}; found pickle"):
        open_capture(tmp_path, format="pickle")
    with pytest.raises(InputError, match="there are no event files"):
        open_capture(tmp_path, format="tensorboard")


# --- JSON in pieces -------------------------------------------------------------------------------------------------


def test_members_come_one_by_one_across_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr("alignment.capture.readers.json_stream.CHUNK", 7)
    value = {"a": 12345678901, "data": {"x": {"y": [1.5, "é\\n"]}, "z": -17}, "b": None}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(value, indent=3))
    found = list(members(path, descend="data"))
    assert found == [
        (None, "a", 12345678901),
        ("data", "x", {"y": [1.5, "é\\n"]}),
        ("data", "z", -17),
        (None, "b", None),
    ]
    for text in ("{}", '{"data": {}}', ' {"a": 1} '):
        path.write_text(text)
        list(members(path, descend="data"))
    for text in ("", "[]", '{"a" 1}', '{"a": 1} x', '{"a": 1,}', '{"data": {"x": 1', '{"a": 1e}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"x\.json, character \d+"):
            list(members(path, descend="data"))


# --- rollouts of verl -----------------------------------------------------------------------------------------------


def test_columns_of_rollout_lines(tmp_path):
    reader = open_capture(capture_samples.lines(tmp_path / "rollouts"))
    assert reader.steps() == [1, 2] and reader.stages(1) == ["rollout"]
    rows = rows_of(reader, 1, "rollout")
    assert list(rows) == [
        "input",
        "input.length",
        "output",
        "output.length",
        "gts",
        "gts.length",
        "score",
        "step",
        "acc",
    ]
    assert rows["score"].tensor().tolist() == [-0.5, 0.5, 1.5, 2.5] and rows["score"].statistics.mean == 1.0
    assert rows["acc"].dtype == "bool" and rows["output"].dtype == "text" and rows["output"].statistics is None
    hashes = rows["input"].tensor()
    assert hashes[0] == hashes[1] != hashes[2] and float(hashes[0]) == hashes[0]
    assert len(set(rows["score"].keys)) == 4  # the two samples of a prompt are told apart
    assert rows["score"].keys[0].partition("-")[0] == rows["score"].keys[1].partition("-")[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a"', r"1\.jsonl, line 5: a line is torn or not JSON"),
        ("[1]", r"1\.jsonl, line 5: a line is no sample"),
        ('{"input": "a"}', r"1\.jsonl, line 5: the samples have different fields"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    root = capture_samples.lines(tmp_path / "rollouts")
    with open(root / "1.jsonl", "a") as file:
        file.write(line)
    with pytest.raises(InputError, match=message):
        rows_of(open_capture(root), 1, "rollout")


def test_batches_of_skip_rollout(tmp_path):
    reader = open_capture(capture_samples.skipped(tmp_path))
    assert reader.steps() == [1, 2]
    rows = rows_of(reader, 2, "rollout")
    assert rows["prompts"].tensor().tolist() == [[2, 3, 4], [5, 6, 7]] and rows["prompts"].dtype == "int64"
    assert rows["acc"].tensor().tolist() == [0.0, 1.0] and rows["uid"].dtype == "text"


def test_a_batch_that_wants_code_is_refused(tmp_path):
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "gen_batch.dp").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    with pytest.raises(
        InputError, match=r"gen_batch\.dp, byte 0 of the pickle: the pickle wants posix.system, which is code"
    ):
        rows_of(open_capture(tmp_path), 1, "rollout")


def test_batches_of_two_runs_are_not_mixed(tmp_path):
    capture_samples.skipped(tmp_path / "a")
    capture_samples.skipped(tmp_path / "b")
    with pytest.raises(InputError, match="the batches of several runs"):
        open_capture(tmp_path)


# --- event files ----------------------------------------------------------------------------------------------------


def test_scalars_become_curves(tmp_path):
    reader = open_capture(capture_samples.events(tmp_path / "board"))
    assert reader.curves() == {"actor/loss": {0: 0.5, 1: 1.5, 2: 2.5}, "reward": {0: -1.0, 1: 0.0, 2: 1.0}}
    assert reader.steps() == [0, 1, 2]
    row = rows_of(reader, 1, "metrics")["actor/loss"]
    assert row.statistics.mean == 1.5 and row.tensor() == 1.5


def test_what_tensorboard_writes_is_what_is_read(tmp_path):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    for step in range(3):
        writer.add_scalar("plain", step / 2, step)
        writer.add_scalar("tensor", step / 3, step, new_style=True)
        writer.add_scalar("double", step / 3, step, new_style=True, double_precision=True)
    writer.add_histogram("weights", torch.arange(9.0), 1)
    writer.add_text("note", "hello", 1)
    writer.close()
    curves = EventFiles(tmp_path).curves()
    assert curves["plain"] == {0: 0.0, 1: 0.5, 2: 1.0} and set(curves) == {"plain", "tensor", "double"}
    assert curves["tensor"][1] == np.float32(1 / 3) and curves["double"][1] == 1 / 3


def test_the_checksum_is_crc32c():
    # The check value of CRC-32C for the nine digits, masked as the TFRecord format does.
    crc = 0xE3069283
    assert masked_crc32c(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_torn_last_record_ends_the_file_and_damage_before_is_an_error(tmp_path):
    root = capture_samples.events(tmp_path / "board")
    [path] = root.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    assert EventFiles(root).curves()["reward"] == {0: -1.0, 1: 0.0}
    second = 16 + struct.unpack("<Q", data[:8])[0]
    damaged = bytearray(data)
    damaged[second + 20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=f"byte {second}: a record does not have its checksum"):
        EventFiles(root).curves()
    damaged[second] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=f"byte {second}: the length of a record does not have its checksum"):
        EventFiles(root).curves()


def test_later_files_win(tmp_path):
    capture_samples.events(tmp_path / "board")
    again = capture_samples.record(capture_samples.event(1, "reward", 9.0))
    (tmp_path / "board" / "events.out.tfevents.2.host.1.0").write_bytes(again)
    assert EventFiles(tmp_path / "board").curves()["reward"] == {0: -1.0, 1: 9.0, 2: 1.0}


# --- tensors --------------------------------------------------------------------------------------------------------


def test_tensors_of_a_folder(tmp_path):
    rows = rows_of(open_capture(capture_samples.tensors(tmp_path / "t")), 0, "tensors")
    assert {name: (row.dtype, row.shape) for name, row in rows.items()} == {
        "a.weight": ("float32", (3, 2)), "a.deep.0.bias": ("bfloat16", (2,)), "b.none": ("float32", (0, 2)),
        "b.x": ("bfloat16", (4,)), "c": ("float64", (2, 3)), "d": ("int16", (3,)),
    }  # fmt: skip
    assert rows["a.weight"].tensor().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert rows["b.x"].tensor().tolist() == [0, 1, 2, 3] and rows["c"].tensor().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_parts_of_a_checkpoint_have_the_names_of_its_tensors(tmp_path):
    from safetensors.torch import save_file

    for i in (1, 2):
        save_file({f"layer.{i}": torch.ones(1)}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    assert list(rows_of(open_capture(tmp_path), 0, "tensors")) == ["layer.1", "layer.2"]


def test_objects_in_an_npy_file_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="of a dtype that is not read; found object"):
        rows_of(open_capture(tmp_path), 0, "tensors")


# --- the collector --------------------------------------------------------------------------------------------------


def test_every_spelling_of_key_data_is_read(tmp_path):
    reader = CollectorDump(capture_samples.collector(tmp_path))
    assert reader.steps() == [0, 1] and reader.ranks(1, "data") == [0, 1]
    assert reader.stages(0) == ["data", "actor_update"]
    rows = rows_of(reader, 1, "data", 1)
    assert {name: row.tensor()[0, 0] for name, row in rows.items()} == {"entropys": 11, "prompts": 11, "responses": 11}
    assert all(row.statistics.mean == 2.5 for row in rows.values())
    assert rows_of(reader, 0, "actor_update")["layers.0.proj"].class_name == "Linear"


def test_samples_of_key_data_are_named_by_their_prompts(tmp_path):
    from alignment.capture.collector_data import write_key_data

    tokens = np.array([[0, 5, 6], [0, 5, 6], [0, 0, 7]])
    wide = np.pad(tokens, ((0, 0), (2, 0)), constant_values=9)  # another width, other padding, another order
    for root, prompts, order in (("a", tokens, [0, 1, 2]), ("b", wide, [2, 0, 1])):
        mask = np.concatenate([np.isin(prompts, (5, 6, 7)), np.ones((3, 2), bool)], axis=1).astype(np.int64)
        values = {
            "prompts": prompts[order],
            "attention_mask": mask[order],
            "responses": np.arange(6).reshape(3, 2)[order],
        }
        values["old_log_probs"] = np.zeros((3, 2), np.float32)
        write_key_data(tmp_path / root, values, step=0, rank=0, micro_step=0)
    one, other = (rows_of(CollectorDump(tmp_path / root), 0, "data") for root in "ab")
    assert len(set(one["responses"].keys)) == 3 and one["old_log_probs"].keys is None
    place = [other["responses"].keys.index(key) for key in one["responses"].keys]
    assert place == [1, 2, 0]
    np.testing.assert_array_equal(other["responses"].tensor()[place], one["responses"].tensor())


def test_a_stranger_among_key_data_is_an_error(tmp_path):
    root = capture_samples.collector(tmp_path)
    folder = root / "data" / "prompts" / "step0" / "rank0" / "micro_step0"
    np.save(folder / "other0.npy", np.arange(2))
    with pytest.raises(InputError, match=r"a file of another name; expected prompts<i>\.npy; found other0\.npy"):
        rows_of(CollectorDump(root), 0, "data")


def test_statistics_of_another_tensor_are_an_error(tmp_path):
    root = capture_samples.collector(tmp_path)
    path = root / "data" / "prompts" / "step0" / "rank0" / "micro_step0" / "prompts0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shape": [9, 9]}))
    with pytest.raises(
        InputError, match=r"prompts0\.json: shape: the statistics are of another tensor; expected \[2, 3\]"
    ):
        rows_of(CollectorDump(root), 0, "data")


def test_no_reader_is_imported_before_it_is_needed():
    # The module that detects formats costs no more than the record.
    import subprocess

    names = "sorted(m for m in sys.modules if m.startswith('alignment.capture'))"
    code = f"import sys, alignment.capture.readers; print({names})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eval(done.stdout) == ["alignment.capture", "alignment.capture.readers", "alignment.capture.record"]
