"""TensorBoard event files: the scalars of a run as curves, without TensorFlow or TensorBoard.

The format is TFRecord (length, masked CRC-32C of the length, data, masked CRC-32C of the data) around ``Event``
messages in protocol buffers; of these the scalars are kept, whether written as ``simple_value`` or as a tensor
of one float. A torn last record, as a killed writer leaves it, ends the file; damage anywhere before is an error.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from alignment.capture.readers.foreign import files_below, reading, require_regular
from alignment.capture.record import OF_THE_MACHINE, Statistics, TensorRow
from alignment.errors import InputError

STAGE = "metrics"
LARGEST_RECORD = 1 << 28
MOST_SCALARS = 5_000_000
_MASK = 0xA282EAD8
_MEASURED = re.compile(r"(.*/)?(timing(_\w+)?|perf)/.*|.*memory.*")
"""Tags under which trainers log what the machine took (``timing_s/step``, ``perf/throughput``, ``gpu/memory_gb``)."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class EventFiles:
    """A folder of event files, or one file. See :class:`~alignment.capture.record.CaptureReader`.

    Where several files have a value of one step, as after a resume, the later file's counts.

    Raises:
        InputError: there are none.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._files = _event_files(self.root)
        if not self._files:
            raise InputError("there are no event files", where=root, expected="*tfevents*")
        self._curves: dict[str, dict[int, float]] | None = None

    def curves(self) -> dict[str, dict[int, float]]:
        """Value by step by tag, in the order in which they were first written.

        Raises:
            InputError: a file is damaged, naming the byte.
        """
        if self._curves is None:
            curves: dict[str, dict[int, float]] = {}
            count = 0
            for path in self._files:
                prefix = "/".join(path.relative_to(self.root).parent.parts) if self.root.is_dir() else ""
                for tag, step, value in scalars(path):
                    count += 1
                    if count > MOST_SCALARS:
                        raise InputError("more scalars than are read", where=path, expected=f"at most {MOST_SCALARS}")
                    curves.setdefault(f"{prefix}/{tag}" if prefix else tag, {})[step] = value
            self._curves = curves
        return self._curves

    def steps(self) -> list[int]:
        """Steps of which there is a value that says what was computed."""
        return sorted({step for tag, curve in self.curves().items() if not _measures(tag) for step in curve})

    def stages(self, step: int) -> list[str]:
        """The one stage."""
        return [STAGE]

    def ranks(self, step: int, stage: str) -> list[int]:
        """The writer of the files."""
        return [0] if stage == STAGE else []

    def describe(self) -> dict[str, Any]:
        """Format, files and tags."""
        return {"format": "tensorboard", "files": len(self._files), "tags": list(self.curves())}

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        """One row of shape () per tag that has a value at this step, those of the machine marked as such."""
        order = 0
        for tag, curve in self.curves().items():
            if step in curve:
                value = curve[step]
                finite = value if math.isfinite(value) else 0.0
                yield TensorRow(
                    module=tag, class_name=OF_THE_MACHINE if _measures(tag) else "", kind="value", direction="forward",
                    call=0, role="output", path=tag,
                    order=order, parent="", dtype="float32", shape=(),
                    statistics=Statistics(
                        max=finite, min=finite, mean=finite, l2=abs(finite), nan_count=int(math.isnan(value)),
                        inf_count=int(math.isinf(value)), count=1,
                    ),
                    load_tensor=lambda value=value: np.asarray(value, dtype=np.float64),
                )  # fmt: skip
                order += 1


def _measures(tag: str) -> bool:
    return _MEASURED.fullmatch(tag) is not None


def is_events(root: Path) -> bool:
    """Whether there are event files."""
    return bool(_event_files(Path(root)))


def scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of every scalar in the file at ``path``, in order.

    Raises:
        InputError: the file is damaged, naming the byte.
    """
    size = require_regular(path, "event file")
    with open(path, "rb") as file:
        position = 0
        while position < size:
            data = _record(file, path, position, size)
            if data is None:
                return
            where = f"{path}, byte {position}"
            with reading(where, "event"):
                yield from _scalars_of(data, where)
            position += 16 + len(data)


def _record(file: BinaryIO, path: Path, position: int, size: int) -> bytes | None:
    where = f"{path}, byte {position}"
    header = file.read(12)
    if len(header) < 12:
        return None
    length, checksum = struct.unpack("<QI", header)
    if masked_crc32c(header[:8]) != checksum:
        raise InputError("the length of a record does not have its checksum: the file is damaged", where=where)
    if length > LARGEST_RECORD:
        raise InputError(
            "a record is larger than any event", where=where, expected=f"at most {LARGEST_RECORD} bytes", found=length
        )
    if position + 16 + length > size:
        return None
    data, tail = file.read(length), file.read(4)
    if len(data) < length or len(tail) < 4:
        return None
    if masked_crc32c(data) != struct.unpack("<I", tail)[0]:
        raise InputError("a record does not have its checksum: the file is damaged", where=where)
    return data


def _scalars_of(event: bytes, where: str) -> Iterator[tuple[str, int, float]]:
    step, summaries = 0, []
    for number, kind, value in _fields(event, where):
        if number == 2 and kind == _VARINT:
            step = value - (1 << 64) if value >> 63 else value
        elif number == 5 and kind == _BYTES:
            summaries.append(value)
    for summary in summaries:
        for number, kind, entry in _fields(summary, where):
            if number == 1 and kind == _BYTES:
                found = _scalar(entry, where)
                if found is not None:
                    yield found[0], step, found[1]


def _scalar(entry: bytes, where: str) -> tuple[str, float] | None:
    tag, value, tensor = "", None, None
    for number, kind, field in _fields(entry, where):
        if number == 1 and kind == _BYTES:
            tag = field.decode("utf-8")
        elif number == 2 and kind == _FIXED32:
            value = struct.unpack("<f", field)[0]
        elif number == 8 and kind == _BYTES:
            tensor = field
    if value is None and tensor is not None:
        value = _tensor_scalar(tensor, where)
    return None if value is None else (tag, value)


def _tensor_scalar(tensor: bytes, where: str) -> float | None:
    """The value of a float or double tensor of one element; None of any other (images, histograms, text)."""
    dtype, dims, values = 0, 0, []
    for number, kind, field in _fields(tensor, where):
        if number == 1 and kind == _VARINT:
            dtype = field
        elif number == 2 and kind == _BYTES:
            dims = sum(1 for n, k, _ in _fields(field, where) if n == 2 and k == _BYTES)
        elif number == 4 and kind == _BYTES and dtype in (1, 2) and len(field) == 4 * dtype:
            values.append(struct.unpack("<f" if dtype == 1 else "<d", field)[0])
        elif number in (5, 6) and kind in (_BYTES, _FIXED32, _FIXED64):
            code, width = ("f", 4) if number == 5 else ("d", 8)
            if len(field) % width:
                raise InputError("a tensor of torn numbers", where=where)
            values += struct.unpack(f"<{len(field) // width}{code}", field)
    return values[0] if dims == 0 and len(values) == 1 and dtype in (1, 2) else None


def _fields(message: bytes, where: str) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of the fields of a message of protocol buffers."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at, where)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at, where)
        elif kind in (_FIXED64, _FIXED32):
            width = 8 if kind == _FIXED64 else 4
            value, at = message[at : at + width], at + width
        elif kind == _BYTES:
            length, at = _varint(message, at, where)
            value, at = message[at : at + length], at + length
        else:
            raise InputError("a field of an unknown kind", where=where, found=f"wire type {kind}")
        if at > len(message):
            raise InputError("an event ends within a field", where=where)
        yield number, kind, value


def _varint(message: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise InputError("an event ends within a number", where=where)
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise InputError("a number of more than 64 bits", where=where)


def _crc32c_table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


_TABLE = _crc32c_table()


def masked_crc32c(data: bytes) -> int:
    """The checksum of the TFRecord format: CRC-32C (Castagnoli), rotated right by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    table = _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + _MASK) & 0xFFFFFFFF


def _event_files(root: Path) -> list[Path]:
    if root.is_file():
        return [root] if "tfevents" in root.name else []
    return [path for path in files_below(root) if "tfevents" in path.name] if root.is_dir() else []
