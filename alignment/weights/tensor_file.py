"""safetensors files as bytes: headers read and written by hand, so that a tensor never has to be in memory as a
whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from alignment.errors import InputError

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

_LARGEST_HEADER = 100_000_000
"""The limit of the safetensors format."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: ``dtype`` in the names of the format (``BF16``), ``begin`` in bytes from the start of
    ``path``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The header of one file: its tensors in the order of their bytes, and its metadata."""

    path: Path
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    header: bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return len(self.header) + sum(t.nbytes for t in self.tensors)


def read_header(path: Path) -> TensorFile:
    """The header of the file at ``path``, checked against the length of the file.

    Raises:
        InputError: the file is missing, truncated or not safetensors, or holds a dtype that is not of the format.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise _damaged(path, f"a header of {length} bytes in a file of {size}")
            text = file.read(length)
    except FileNotFoundError:
        raise InputError("a file of the checkpoint is missing", where=path) from None
    except OSError as error:
        raise InputError("the file cannot be read", where=path, found=str(error)) from error
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__", None) or {}
        listed = sorted(content.items(), key=lambda item: item[1]["data_offsets"])
        tensors, end = [], 0
        for name, entry in listed:
            if entry["dtype"] not in ITEM_BYTES:
                raise InputError(
                    "a dtype that cannot be copied",
                    where=f"{path}: {name}",
                    expected=", ".join(ITEM_BYTES),
                    found=entry["dtype"],
                )
            begin, stop = entry["data_offsets"]
            tensor = StoredTensor(
                name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]), path=path, begin=8 + length + begin
            )
            if begin != end or stop - begin != tensor.nbytes:
                raise _damaged(path, f"offsets [{begin}, {stop}] of {name}, {tensor.nbytes} bytes from {end} on")
            tensors.append(tensor)
            end = stop
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    if 8 + length + end != size:
        raise _damaged(path, f"{size} bytes instead of {8 + length + end}")
    return TensorFile(path=path, tensors=tuple(tensors), metadata=metadata, header=prefix + text)


def stored_tensors(src: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``src`` by name, file by file, in the order of their bytes.

    Raises:
        InputError: there is no checkpoint, a file is missing or damaged, or the index disagrees with its files.
    """
    from alignment.weights.checkpoint import INDEX_FILE
    from alignment.weights.indexed_save import read_index

    index = read_index(src)
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(index.values())):
        if Path(file).name != file:
            raise InputError("the index points outside its folder", where=src / INDEX_FILE, found=file)
        for tensor in read_header(src / file).tensors:
            if index.get(tensor.name) != file:
                raise InputError(
                    f"the index and the file disagree about the tensor {tensor.name}",
                    where=src / file,
                    expected=f"in {index.get(tensor.name, 'no file')}",
                    found="in this file",
                )
            stored[tensor.name] = tensor
    missing = sorted(index.keys() - stored.keys())
    if missing:
        raise InputError(
            f"the index and the file disagree about the tensor {missing[0]}",
            where=src / index[missing[0]],
            expected="in the file",
            found="missing",
        )
    return stored


def plan_file(
    path: Path, tensors: Iterable[tuple[str, str, Sequence[int]]], *, metadata: Mapping[str, str]
) -> TensorFile:
    """The file that (name, dtype, shape) of ``tensors`` make, the widest dtypes first, so that all lie aligned."""
    ordered = sorted(tensors, key=lambda t: -ITEM_BYTES[t[1]])
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, dtype, shape in ordered:
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = [
        StoredTensor(
            name=name,
            dtype=dtype,
            shape=tuple(shape),
            path=Path(path),
            begin=len(header) + content[name]["data_offsets"][0],
        )
        for name, dtype, shape in ordered
    ]
    return TensorFile(path=Path(path), tensors=tuple(placed), metadata=dict(metadata), header=header)


def write_file(at: Path, plan: TensorFile, fill: Callable[[StoredTensor, BinaryIO], None]) -> None:
    """Writes ``plan`` to ``at``; ``fill`` writes the bytes of one tensor after the other."""
    with open(at, "wb", buffering=0) as out:
        out.write(plan.header)
        for tensor in plan.tensors:
            fill(tensor, out)
            # Has the kernel begin to write what is complete, so that the flush at the end finds the disk done with
            # most of it.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(out.fileno(), tensor.begin, tensor.nbytes, os.POSIX_FADV_DONTNEED)
            if out.tell() != tensor.begin + tensor.nbytes:
                raise AssertionError(f"{tensor.name} was not filled: {out.tell()} of {tensor.begin + tensor.nbytes}")


def copy_bytes(tensor: StoredTensor, out: BinaryIO, buffer: memoryview) -> None:
    """Copies the bytes of ``tensor`` to ``out``, one ``buffer`` after the other.

    Raises:
        InputError: the file is shorter than its header says.
    """
    with open(tensor.path, "rb", buffering=0) as source:
        source.seek(tensor.begin)
        left = tensor.nbytes
        while left:
            piece = buffer[: min(left, len(buffer))]
            read_into(source, piece, tensor)
            write_all(out, piece)
            left -= len(piece)


def read_into(source: BinaryIO, buffer: memoryview, tensor: StoredTensor) -> None:
    """Fills ``buffer`` from ``source``."""
    got = 0
    while got < len(buffer):
        count = source.readinto(buffer[got:])
        if not count:
            raise InputError("the file ends too early", where=f"{tensor.path}: {tensor.name}")
        got += count


def write_all(out: BinaryIO, data: memoryview) -> None:
    """Writes all of ``data``: an unbuffered file may take less at a time (Linux stops at 2 GiB)."""
    done = 0
    while done < len(data):
        done += out.write(data[done:])


def _damaged(path: Path, found: str) -> InputError:
    return InputError("the file is damaged or is not a safetensors file", where=path, found=found)
