"""Files appear whole or not at all."""

import math

import pytest

from alignment.errors import InputError
from alignment.files import read_json, write_atomically, write_json


def test_json_keeps_every_bit_of_a_float(tmp_path):
    value = {"b": math.nextafter(1 / 3, 1), "a": [1e-320, 2**-1022]}
    write_json(tmp_path / "deep" / "value.json", value)
    assert read_json(tmp_path / "deep" / "value.json") == value


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(beside):
        beside.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("text", ['{"a": 1', "\x00\x01"])
def test_a_truncated_file_is_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InputError, match="broken.json: the file is truncated or not JSON"):
        read_json(path)


def test_a_missing_file_and_a_nan_are_named(tmp_path):
    with pytest.raises(InputError, match="the file does not exist"):
        read_json(tmp_path / "none.json")
    with pytest.raises(InputError, match="JSON cannot carry"):
        write_json(tmp_path / "nan.json", {"x": math.nan})
    assert not list(tmp_path.iterdir())
