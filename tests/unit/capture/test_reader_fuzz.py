"""Damaged captures are read or refused with one clear error, whatever the damage: no crash, no hang, no code."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import capture_samples
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignment.capture.readers import open_capture
from alignment.errors import InputError

CASES = 20_000
"""Mutated captures of every format: what the readers have to survive before a release."""
UNIT_SHARE = 320
"""The unit run takes every so many of them."""
SECONDS = 20
"""A capture of a few kilobytes that takes longer is a hang."""

_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_HOSTILE = (
    b"-1", b"0", b"1e400", b"NaN", b"99999999999999999999999", b"null", b"true", b'"x"', b"[]", b"{}", b"1.5", b"[1,2]",
    b'"../../etc/passwd"', b'"/etc/passwd"', b"9007199254740993", b"[" * 3000, b"2147483648", b'"\\ud800"',
)  # fmt: skip


class Hang(Exception):
    """The reader took too long."""


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


def mutated(data: bytes, random: np.random.Generator) -> bytes:
    """One damaged version of ``data``."""
    kind = int(random.integers(0, 9))
    size = max(1, len(data))
    at, to = sorted(int(n) for n in random.integers(0, size + 1, 2))
    if kind == 0:  # one bit
        out = bytearray(data or b"\0")
        out[at % len(out)] ^= 1 << int(random.integers(0, 8))
        return bytes(out)
    if kind == 1:  # one byte
        out = bytearray(data or b"\0")
        out[at % len(out)] = int(random.choice([0, 1, 0x7F, 0x80, 0xFF, int(random.integers(0, 256))]))
        return bytes(out)
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + data[to:]
    if kind == 4:
        return data[:at] + random.bytes(int(random.integers(1, 16))) + data[at:]
    if kind == 5:
        return data[:to] + data[at : at + 64] + data[to:]
    if kind == 6:  # a word of eight bytes: a length, an offset, a count
        value = int(random.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63])).to_bytes(8, "little")
        return data[:at] + value + data[at + 8 :]
    numbers = list(_NUMBER.finditer(data))
    if not numbers:
        return data + random.bytes(1)
    if kind == 7:  # a number becomes something else
        match = numbers[int(random.integers(0, len(numbers)))]
        return data[: match.start()] + _HOSTILE[int(random.integers(0, len(_HOSTILE)))] + data[match.end() :]
    words = list(re.finditer(rb'"[^"\n]{1,60}"', data))  # a text becomes something else
    if not words:
        return data[at:]
    match = words[int(random.integers(0, len(words)))]
    return data[: match.start()] + _HOSTILE[int(random.integers(0, len(_HOSTILE)))] + data[match.end() :]


def check_mutations(sample: str, tmp_path: Path, cases: range) -> tuple[int, int]:
    """Numbers of captures read and refused."""
    clean = capture_samples.SAMPLES[sample](tmp_path / "clean")
    format = capture_samples.format_of(sample)
    assert exhaust(clean, format) > 0
    work = tmp_path / "work"
    shutil.copytree(clean, work)
    files = sorted(p for p in work.rglob("*") if p.is_file())
    read = refused = 0

    def too_long(*_):
        raise Hang(f"{sample}: {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for case in cases:
            random = np.random.Generator(np.random.Philox(key=case))
            path = files[int(random.integers(0, len(files)))]
            data = path.read_bytes()
            damaged = data
            for _ in range(int(random.integers(1, 4))):
                damaged = mutated(damaged, random)
            path.write_bytes(damaged)
            signal.alarm(SECONDS)
            try:
                exhaust(work, format)
                read += 1
            except InputError as error:
                refused += 1
                assert str(tmp_path) in str(error) or error.where is not None, f"case {case}: {error}"
            except Exception as error:
                raise AssertionError(f"{sample}, case {case}, {path.relative_to(work)}: {error!r}") from error
            finally:
                signal.alarm(0)
                path.write_bytes(data)
        assert exhaust(work, format) > 0
    finally:
        signal.signal(signal.SIGALRM, before)
    return read, refused


@pytest.mark.parametrize("sample", capture_samples.SAMPLES)
def test_damaged_captures_are_read_or_refused(sample, tmp_path):
    read, refused = check_mutations(sample, tmp_path, range(0, CASES, UNIT_SHARE))
    assert refused > 0, "no mutation was noticed: the harness damages nothing"


@pytest.mark.slow
@pytest.mark.parametrize("sample", capture_samples.SAMPLES)
def test_twenty_thousand_damaged_captures_are_read_or_refused(sample, tmp_path):
    read, refused = check_mutations(sample, tmp_path, range(CASES))
    assert read > 0 and refused > 0


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
        assert error.where is not None
