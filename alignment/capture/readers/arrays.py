"""Tensors that lie in files: where, of which dtype, and their values as NumPy arrays when they are asked for."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from alignment.errors import InputError

_PLAIN = {
    "float64": "f8", "float32": "f4", "float16": "f2", "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1",
    "uint64": "u8", "uint32": "u4", "uint16": "u2", "uint8": "u1", "bool": "?", "complex64": "c8", "complex128": "c16",
}  # fmt: skip
_FLOAT8 = {"float8_e4m3fn": (4, 7, 0x7F), "float8_e5m2": (5, 15, None), "float8_e8m0fnu": (8, 127, 0xFF)}
ITEM_BYTES = {
    **{name: np.dtype(code).itemsize for name, code in _PLAIN.items()},
    "bfloat16": 2,
    **dict.fromkeys(_FLOAT8, 1),
}
LARGEST_OVERLAP = 1 << 30
"""Bytes of a tensor that shows the same stored elements several times (``expand``): its size is not bounded by that of
its file."""
_MAPPED_FROM = 1 << 20
"""Smaller pieces are read, larger ones mapped: a map costs two system calls and a page fault each."""


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """A tensor in a file, or in bytes out of a file.

    Attributes:
        source: the file, or the bytes.
        where: what an error names.
        begin: byte at which the storage begins in ``source``.
        nbytes: size of the storage in bytes.
        dtype: PyTorch's name without the prefix (``bfloat16``).
        shape, strides, offset: the view of the storage, in elements.
        crc32: checksum of the storage, or None.
        big_endian: order of the bytes.
    """

    source: Path | bytes
    where: str
    begin: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    offset: int = 0
    crc32: int | None = None
    big_endian: bool = False

    def __post_init__(self) -> None:
        item = ITEM_BYTES.get(self.dtype)
        if item is None:
            raise InputError("a dtype that cannot be read", where=self.where, found=self.dtype)
        shape = self.shape
        if (
            not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in shape)
            or len(shape) > 64
        ):
            raise InputError("a shape is a list of sizes", where=self.where, found=str(shape)[:80])
        strides = contiguous(shape) if self.strides is None else self.strides
        if len(strides) != len(shape) or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in strides):
            raise InputError("the strides do not fit the shape", where=self.where, found=str(strides)[:80])
        if not isinstance(self.offset, int) or self.offset < 0:
            raise InputError("an offset is a number from 0", where=self.where, found=str(self.offset)[:80])
        reach = 0 if 0 in shape else self.offset + sum((n - 1) * s for n, s in zip(shape, strides)) + 1
        if reach * item > self.nbytes:
            raise InputError(
                "the tensor reaches beyond its bytes",
                where=self.where,
                expected=f"at most {self.nbytes} bytes",
                found=f"{reach * item} bytes for shape {list(shape)} of {self.dtype}",
            )
        if math.prod(shape) * item > max(self.nbytes, LARGEST_OVERLAP):
            raise InputError("the tensor is expanded to a size that is refused", where=self.where, found=list(shape))

    def load(self) -> np.ndarray:
        """The values, read-only where they are mapped; bfloat16 and the float8 formats as float32.

        Raises:
            InputError: the file became shorter, or its checksum is another.
        """
        code = np.dtype(_PLAIN.get(self.dtype, "u2" if self.dtype == "bfloat16" else "u1"))
        if self.big_endian:
            code = code.newbyteorder(">")
        raw = self._storage()
        if self.crc32 is not None and zlib.crc32(raw) != self.crc32:
            raise InputError("the tensor's bytes do not have their checksum: the file is damaged", where=self.where)
        flat = np.frombuffer(raw, dtype=code, count=self.nbytes // code.itemsize)
        strides = contiguous(self.shape) if self.strides is None else self.strides
        if 0 in self.shape:
            view = np.empty(self.shape, dtype=code)
        else:
            view = np.lib.stride_tricks.as_strided(
                flat[self.offset :], self.shape, [s * code.itemsize for s in strides], writeable=False
            )
        return decoded(view, self.dtype)

    def _storage(self) -> memoryview | np.ndarray | bytes:
        if isinstance(self.source, bytes):
            return memoryview(self.source)[self.begin : self.begin + self.nbytes]
        try:
            if self.source.stat().st_size < self.begin + self.nbytes:
                raise InputError("the file is shorter than its header says", where=self.where)
            if self.nbytes >= _MAPPED_FROM:
                return np.memmap(self.source, dtype=np.uint8, mode="r", offset=self.begin, shape=(self.nbytes,))
            with open(self.source, "rb") as file:
                file.seek(self.begin)
                raw = file.read(self.nbytes)
        except OSError as error:
            raise InputError(f"the file cannot be read ({error.strerror})", where=self.where) from None
        if len(raw) != self.nbytes:
            raise InputError("the file is shorter than its header says", where=self.where)
        return raw


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def decoded(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Values of a dtype that NumPy lacks, from its bits, as float32; any other array as it is."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype in _FLOAT8:
        return _float8_values(dtype)[raw]
    return raw


@lru_cache
def _float8_values(dtype: str) -> np.ndarray:
    exponent_bits, bias, nan = _FLOAT8[dtype]
    bits = np.arange(256)
    if dtype == "float8_e8m0fnu":  # an exponent alone, without a sign
        values = np.exp2(bits - 127.0)
    else:
        mantissa_bits = 7 - exponent_bits
        exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
        fraction = (bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * np.exp2(exponent - float(bias)))
        if nan is None:  # the last exponent holds infinity and NaN, as in the wider formats
            values = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), values)
        values = np.where(bits >= 128, -values, values)
    if nan is not None:
        values = np.where((bits & 0x7F if nan == 0x7F else bits) == nan, np.nan, values)
    return values.astype(np.float32)
