"""Damaged captures are read or refused with one clear error, whatever the damage: no crash, no hang, no code."""

from __future__ import annotations

import json
from pathlib import Path

import capture_samples
import numpy as np
import pytest
from damage import CASES, UNIT_CASES, survived
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignment.capture.readers import open_capture
from alignment.errors import InputError


def exhaust(path: Path, format: str | None = None) -> int:
    """Reads everything there is to read."""
    reader = open_capture(path, format=format)
    reader.describe()
    count = 0
    for step in reader.steps():
        for stage in reader.stages(step):
            for rank in reader.ranks(step, stage):
                for row in reader.rows(step, stage, rank):
                    row.sketch()
                    found = row.tensor()
                    assert found is None or isinstance(found, np.ndarray)
                    count += 1
                if hasattr(reader, "call_stack"):
                    reader.call_stack(step, stage, rank, "Module.layers.0.proj.Linear.forward.0")
    return count


@pytest.mark.parametrize("sample", capture_samples.SAMPLES)
def test_damaged_captures_are_read_or_refused(sample, tmp_path):
    read, refused = check_mutations(sample, tmp_path, UNIT_CASES)
    assert refused > 0, "no mutation was noticed: the harness damages nothing"


@pytest.mark.slow
@pytest.mark.parametrize("sample", capture_samples.SAMPLES)
def test_twenty_thousand_damaged_captures_are_read_or_refused(sample, tmp_path):
    read, refused = check_mutations(sample, tmp_path, range(CASES))
    assert read > 0 and refused > 0


def check_mutations(sample: str, tmp_path: Path, cases: range) -> tuple[int, int]:
    """Numbers of captures read and refused."""
    clean = capture_samples.SAMPLES[sample](tmp_path / "clean")
    format = capture_samples.format_of(sample)
    assert exhaust(clean, format) > 0
    return survived(sample, clean, lambda folder: exhaust(folder, format), cases)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("numpy.dtype", "f0", "the pickle has a dtype that is not read; found f0"),
        ("_codecs.encode", None, "the pickle encodes something that is no text"),
    ],
)
def test_what_a_constructor_refuses_names_the_file_and_the_byte(tmp_path, name, arguments, problem):
    module, _, function = name.rpartition(".")
    text = b"N" if arguments is None else b"X" + len(arguments).to_bytes(4, "little") + arguments.encode()
    called = b"c" + module.encode() + b"\n" + function.encode() + b"\n" + text + b"\x85"
    (tmp_path / "gen_batch.dp").write_bytes(b"\x80\x02" + called + b"R.")
    with pytest.raises(InputError) as caught:
        exhaust(tmp_path, "skip-rollout")
    byte = 2 + len(called)
    assert str(caught.value) == f"{tmp_path / 'gen_batch.dp'}: {name}, byte {byte} of the pickle: {problem}"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
TENSOR = st.fixed_dictionaries(
    {"type": st.just("torch.Tensor") | LEAVES, "dtype": st.sampled_from(["torch.float32", "torch.bool", "x"]) | LEAVES,
     "shape": st.lists(st.integers(-1, 4), max_size=3) | VALUES, "Max": LEAVES,
     "Min": LEAVES, "Mean": LEAVES, "Norm": LEAVES},
    optional={"data_name": st.sampled_from(["a.pt", "../a.pt", "/etc/passwd", ""]) | LEAVES},
)  # fmt: skip
NAMES = st.sampled_from(
    ["Module.a.Linear.forward.0", "Module.a.Linear.backward.0", "Module.a.Linear.parameters_grad.0",
     "Torch.relu.0.forward",
     "Tensor.add.1.backward", "Module.forward.0", "x"]
) | st.text(max_size=10)  # fmt: skip
CALL = st.dictionaries(
    st.sampled_from(["input_args", "input_kwargs", "output", "input", "parameters", "weight"]),
    st.lists(TENSOR | VALUES, max_size=3) | st.dictionaries(st.text(max_size=6), TENSOR | VALUES, max_size=2) | VALUES,
    max_size=4,
)  # fmt: skip
FUZZ = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


@FUZZ
@given(data=st.dictionaries(NAMES, CALL | VALUES, max_size=4) | VALUES)
def test_any_json_is_a_dump_or_an_error(tmp_path, data):
    (tmp_path / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}))
    read_or_refused(tmp_path, "msprobe")


@FUZZ
@given(
    content=st.binary(max_size=200),
    name=st.sampled_from(["dump.json", "a.pt", "a.npy", "a.safetensors", "1.jsonl", "a.tfevents", "gen_batch.dp"]),
)
def test_any_bytes_are_a_file_or_an_error(tmp_path, content, name):
    folder = tmp_path / name.replace(".", "_")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    read_or_refused(folder, None)


@FUZZ
@given(
    head=st.sampled_from([b"\x80\x02", b"\x80\x04", b""]),
    operations=st.lists(
        st.sampled_from(
            [b"(", b")", b"]", b"}", b"N", b"K\x01", b"q\x00", b"h\x00", b"r\xff\xff\xff\xff", b"R", b"b", b"t",
             b"\x85", b"\x86",
             b"s", b"u", b"a", b"e", b"2", b"0", b"Q", b"\x81", b"\x92", b"\x93", b"cnumpy\ndtype\n", b"cos\nsystem\n",
             b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"X\x02\x00\x00\x00f4",
             b"X\x01\x00\x00\x00<",
             b"cnumpy.core.multiarray\n_reconstruct\n", b"cverl.protocol\nDataProto\n", b"C\x04abcd",
             b"\x8f", b"\x90", b"\x94"]
        ),
        max_size=30,
    ),
)  # fmt: skip
def test_any_operations_are_a_pickle_or_an_error(tmp_path, head, operations):
    (tmp_path / "gen_batch.dp").write_bytes(head + b"".join(operations) + b".")
    read_or_refused(tmp_path, "skip-rollout")


def read_or_refused(path: Path, format: str | None) -> None:
    try:
        exhaust(path, format)
    except InputError as error:
        assert str(path) in str(error.where), f"the error names no file: {error}"
