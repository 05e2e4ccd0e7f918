"""Files appear whole or not at all."""

import math

import pytest

from alignment.errors import InputError
from alignment.files import parse_yaml, read_json, write_atomically, write_json


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


SCALARS = (
    "1e-6", "1.0e-06", "1e5", "+1E+3", "-2.5e-08", "1.5e3", "1_0e3", "1.e-3", "1e400", "'1e-6'", "1e", "e5", "0x1e5",
    "12e3b", "1e_6", "1_000", "1.5", "-.inf", ".inf", "2026-01-01", "2026-02-31", "on", "no", "null", "12:30", "007",
)  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS)
def test_scalars_are_what_hydra_makes_of_them(scalar):
    OmegaConf = pytest.importorskip("omegaconf").OmegaConf
    found, expected = parse_yaml(f"x: {scalar}", hydra=True)["x"], OmegaConf.create(f"x: {scalar}")["x"]
    assert (type(found), found) == (type(expected), expected)


def test_only_what_hydra_wrote_is_read_as_hydra_does():
    """A commit of a stack may look like a number with an exponent."""
    parse_yaml("x: 1e-6", hydra=True)
    assert parse_yaml("x: 1e-6") == {"x": "1e-6"}
    assert parse_yaml("commit: 1234567e8") == {"commit": "1234567e8"}
