"""``.npy`` files: the header is read and checked, values are mapped when asked for; no pickle is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from alignment.capture.readers.arrays import StoredArray
from alignment.capture.readers.foreign import reading, require_regular
from alignment.errors import InputError

_NAMES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


def read_npy(path: Path) -> StoredArray:
    """The array in the file at ``path``.

    Raises:
        InputError: the file is missing, damaged, shorter than its header says, or holds objects.
    """
    size = require_regular(path, "file")
    with reading(path, "npy file"), open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise InputError("an npy file of another version", where=path, expected="1.0 or 2.0", found=str(version))
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        name = _NAMES.get(dtype.str[1:])
        if name is None or dtype.hasobject or dtype.fields:
            raise InputError("an npy file of a dtype that is not read", where=path, found=str(dtype)[:80])
        begin = file.tell()
        strides = None
        if fortran:
            strides, step = [], 1
            for n in shape:
                strides.append(step)
                step *= n
        return StoredArray(
            source=Path(path), where=str(path), begin=begin, nbytes=size - begin, dtype=name, shape=tuple(shape),
            strides=None if strides is None else tuple(strides), big_endian=dtype.byteorder == ">",
        )  # fmt: skip
