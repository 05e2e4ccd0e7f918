"""``torch.save`` files without torch: a zip archive whose pickle is read as data; tensors are views of its bytes."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alignment.capture.readers.arrays import ITEM_BYTES, StoredArray
from alignment.capture.readers.foreign import reading, require_regular
from alignment.capture.readers.pickled import Name, Record, run
from alignment.errors import InputError

LARGEST_PICKLE = 1 << 28
"""Bytes of ``data.pkl``, which holds names and sizes but no numbers."""

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_NUMBER = re.compile(r"[0-9]{1,9}")


class _Storage:
    """Bytes of one storage in the archive; ``dtype`` is None where the tensor says it (``UntypedStorage``)."""

    def __init__(
        self, source: Path | bytes, where: str, begin: int, nbytes: int, dtype: str | None, crc: int, big: bool
    ):
        self.source, self.where, self.begin, self.nbytes = source, where, begin, nbytes
        self.dtype, self.crc, self.big = dtype, crc, big

    def tensor(self, dtype: str | None, shape: Any, strides: Any, offset: Any) -> StoredArray:
        dtype = dtype or self.dtype or "uint8"
        return StoredArray(
            source=self.source, where=self.where, begin=self.begin, nbytes=self.nbytes, dtype=dtype,
            shape=_sizes(shape), strides=_sizes(strides), offset=offset, crc32=self.crc, big_endian=self.big,
        )  # fmt: skip


def read_torch(source: Path | bytes, *, where: str | None = None, records: tuple[str, ...] = ()) -> Any:
    """What ``torch.save`` put into a file (or into ``source`` itself), with :class:`StoredArray` in place of tensors.

    Args:
        source: the file, or its bytes where it lies inside another one.
        where: what an error names.
        records: classes whose objects may occur, see :func:`~alignment.capture.readers.pickled.run`.

    Raises:
        InputError: the file is missing, damaged, compressed, or its pickle wants more than data. Files in the format
            before PyTorch 1.6 are refused.
    """
    where = where or str(source)
    size = require_regular(source, "file") if isinstance(source, Path) else len(source)
    with reading(where, "torch file"):
        opened = open(source, "rb") if isinstance(source, Path) else io.BytesIO(source)
        with opened as file:
            if file.read(4) != b"PK\x03\x04":
                raise InputError(
                    "this is no archive of torch.save", where=where, expected="the zip format of PyTorch 1.6 and later",
                    next_step="load it with torch.load(weights_only=True) and save it again",
                )  # fmt: skip
            with zipfile.ZipFile(file) as archive:
                entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                program = _entry(entries, "data.pkl", where)
                if program.file_size > LARGEST_PICKLE:
                    raise InputError("the pickle of the file is too large", where=where, found=program.file_size)
                big = "byteorder" in entries and archive.read(_entry(entries, "byteorder", where)) == b"big"
                text = archive.read(program)

                def place(token: Any) -> _Storage:
                    return _placed(token, entries, file, source, size, where, big)

                return run(text, where=where, known=_KNOWN, records=records, storage=place)


def _placed(
    token: Any, entries: dict[str, zipfile.ZipInfo], file: Any, source: Path | bytes, size: int, where: str, big: bool
) -> _Storage:
    if not isinstance(token, tuple) or len(token) != 5 or token[0] != "storage" or not isinstance(token[2], str):
        raise InputError("the file refers to a storage in an unknown way", where=where, found=str(token)[:80])
    kind, key = token[1], token[2]
    if type(kind) is not Name or not _NUMBER.fullmatch(key):
        raise InputError("the file refers to a storage in an unknown way", where=where, found=str(token)[:80])
    dtype = _STORAGES.get(kind.name)
    info = _entry(entries, f"data/{key}", where)
    file.seek(info.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if header[0] != b"PK\x03\x04":
        raise InputError(f"the storage {key} has no header", where=where)
    begin = info.header_offset + _LOCAL_HEADER.size + header[9] + header[10]
    if begin + info.file_size > size:
        raise InputError(f"the storage {key} reaches beyond the end of the file", where=where)
    return _Storage(source, f"{where}: storage {key}", begin, info.file_size, dtype, info.CRC, big)


def _entry(entries: dict[str, zipfile.ZipInfo], name: str, where: str) -> zipfile.ZipInfo:
    info = entries.get(name)
    if info is None:
        raise InputError(f"the archive has no {name}", where=where)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise InputError(f"{name} is compressed, as torch.save never does", where=where)
    return info


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Record):
        value = value.arguments[0] if value.arguments else ()
    if not isinstance(value, (tuple, list)):
        raise InputError("a tensor without a shape", where="torch file", found=str(value)[:80])
    return tuple(value)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredArray:
    return _of(storage).tensor(None, shape, strides, offset)


def _typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> StoredArray:
    if type(dtype) is not Name:
        raise InputError("a tensor without a dtype", where="torch file")
    return _of(storage).tensor(dtype.name, shape, strides, offset)


def _of(storage: Any) -> _Storage:
    if not isinstance(storage, _Storage):
        raise InputError("a tensor without a storage", where="torch file", found=type(storage).__name__)
    return storage


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _subclassed(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor of a subclass: its plain tensor, or the parts of one whose layout is unknown here (a nested tensor)."""
    if type(function) is not Name or type(arguments) is not tuple:
        raise InputError("a tensor that is made in an unknown way", where="torch file", found=str(function)[:80])
    call = _KNOWN.get(str(function))
    return Record(function, arguments) if call is None else call(*arguments)


def _is_a_name(*_: Any) -> Any:
    raise InputError("the file calls a type as a constructor", where="torch file")


_KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _subclassed,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": lambda *name: ":".join(map(str, name)),
    **{f"torch.{name}": _is_a_name for name in (*_STORAGES, "UntypedStorage", *ITEM_BYTES)},
    **{f"torch.{name}": _is_a_name for name in ("Tensor", "strided", "jagged")},
    "torch.storage.UntypedStorage": _is_a_name,
    "torch.storage.TypedStorage": _is_a_name,
    **{f"torch.{name}": _is_a_name for name in ("float8_e4m3fnuz", "float8_e5m2fnuz")},
    "torch.nn.parameter.Parameter": _parameter,
}
