"""``torch.save`` files are read without torch, and nothing in them runs."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from alignment.capture.readers.arrays import StoredArray
from alignment.capture.readers.pickled import Record, run, walk
from alignment.capture.readers.torch_file import read_torch
from alignment.errors import InputError


def saved(tmp_path, value, **how):
    path = tmp_path / "x.pt"
    torch.save(value, path, **how)
    return path


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12.0)[3:9:2],
        torch.arange(3.0).expand(4, 3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.int16),
        torch.arange(5).to(torch.uint16),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(7).half(),
        torch.nn.Parameter(torch.ones(2)),
        torch.arange(400_000.0),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}".replace("torch.", ""),
)
def test_values_dtypes_and_views_survive(tmp_path, tensor):
    found = read_torch(saved(tmp_path, tensor))
    assert (found.dtype, found.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    np.testing.assert_array_equal(found.load(), tensor.detach().numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_formats_that_numpy_lacks_come_as_float32(tmp_path, dtype):
    bits = torch.arange(256).to(torch.uint8)
    tensor = (bits.to(torch.int16) << 8).view(dtype) if dtype is torch.bfloat16 else bits.view(dtype)
    found = read_torch(saved(tmp_path, tensor)).load()
    np.testing.assert_array_equal(found, tensor.float().numpy())
    assert found.dtype == np.float32


def test_structures_are_walked_once(tmp_path):
    shared = torch.ones(2)
    tree = {
        "model": {"a": shared, "b": [torch.zeros(1), 3]},
        "again": shared,
        "n": np.arange(3),
        "size": torch.Size([2]),
    }
    leaves = dict(walk(read_torch(saved(tmp_path, tree))))
    assert {k for k, v in leaves.items() if isinstance(v, StoredArray)} == {"model.a", "model.b.0", "again"}
    assert leaves["model.b.1"] == 3 and leaves["size.0"] == 2 and leaves["n"].tolist() == [0, 1, 2]


class Attack:
    """Creates a file wherever it is unpickled."""

    def __init__(self, marker) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("inside", [False, True])
def test_code_is_refused_and_does_not_run(tmp_path, inside):
    attack = Attack(tmp_path / "ran")
    path = saved(tmp_path, {"weights": attack} if inside else attack)
    with pytest.raises(
        InputError, match=r"byte \d+ of the pickle: the pickle wants posix.mkdir, which is code and is not run"
    ):
        read_torch(path)
    assert not attack.marker.exists()
    torch.load(path, weights_only=False)
    assert attack.marker.exists()


@pytest.mark.parametrize("value", [torch.nn.Linear(2, 2), math.sqrt], ids=["module", "function"])
def test_objects_that_are_no_tensors_are_refused(tmp_path, value):
    with pytest.raises(InputError, match="which is code and is not run"):
        read_torch(saved(tmp_path, value))


@pytest.mark.parametrize(
    "program",
    [
        b"cposix\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"(S'a'\nibuiltins\nprint\n.",
        b"\x80\x02cnumpy\ndtype\n}S'x'\nS'y'\nsb.",
        b"\x80\x02(dS'a'\nb.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    ],
)
def test_only_data_is_a_pickle(program):
    with pytest.raises(InputError, match="of the pickle: the pickle"):
        run(program, where="x")


def test_unknown_objects_are_records_where_they_are_asked_for():
    program = b"\x80\x02cverl.protocol\nDataProto\n)\x81K\x07b."
    found = run(program, where="x", records=("verl.protocol.DataProto",))
    assert isinstance(found, Record) and found.state == 7
    with pytest.raises(InputError, match="which is code"):
        run(program, where="x")


def test_a_self_referential_pickle_ends():
    found = run(b"\x80\x02]q\x00h\x00a.", where="x")
    assert list(walk(found)) == []


def test_a_flipped_byte_of_a_tensor_is_noticed(tmp_path):
    path = saved(tmp_path, torch.arange(1000.0))
    data = bytearray(path.read_bytes())
    data[data.index(torch.tensor([500.0, 501.0]).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        InputError, match="storage 0: the tensor's bytes do not have their checksum: the file is damaged"
    ):
        read_torch(path).load()


def test_other_layouts_are_refused(tmp_path):
    path = saved(tmp_path, torch.ones(2), _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="no archive of torch.save; expected the zip format of PyTorch 1.6"):
        read_torch(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([0] * 10_000))
    with pytest.raises(InputError, match="data.pkl is compressed, as torch.save never does"):
        read_torch(path)
    with pytest.raises(InputError, match="the file does not exist"):
        read_torch(tmp_path / "absent.pt")
    with pytest.raises(InputError, match="not a regular file"):
        read_torch(tmp_path)


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((1 << 40,), (1,), 0), ((4,), (1,), 1), ((2, 2), (3, 1), 0), ((-1,), (1,), 0), ((4,), (1,), -1)],
)
def test_a_tensor_beyond_its_bytes_is_refused(shape, strides, offset):
    buffer = io.BytesIO(b"\0" * 16)
    with pytest.raises(InputError, match="x: "):
        StoredArray(
            source=buffer.getvalue(), where="x", begin=0, nbytes=16, dtype="float32", shape=shape,
            strides=strides, offset=offset,
        )  # fmt: skip
