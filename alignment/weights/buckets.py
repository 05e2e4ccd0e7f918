"""Weights on their way from trainer to engine in buckets of bytes: packed, sent, and unpacked again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError

ALIGNMENT = 8
"""Bytes of the largest dtype."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a tensor lies in its bucket, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Bucket:
    """A transfer buffer of uint8, filled again and again, with the table of what is in it."""

    def __init__(self, size: int) -> None:
        self.buffer = torch.zeros(size, dtype=torch.uint8)
        self.slots: list[Slot] = []

    @property
    def used(self) -> int:
        return self.slots[-1].end if self.slots else 0

    def fits(self, tensor: Tensor) -> bool:
        """Whether there is room for ``tensor``."""
        return _aligned(self.used) + tensor.nbytes <= len(self.buffer)

    def put(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor: its elements in row-major order, whatever its strides are."""
        begin = _aligned(self.used)
        end = begin + tensor.nbytes
        self.buffer[begin:end] = bytes_of(tensor)
        self.slots.append(Slot(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), begin=begin, end=end))

    def clear(self) -> None:
        """Makes room for the next tensors in the same memory."""
        self.slots = []


def _aligned(offset: int) -> int:
    """The next offset at which any dtype may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` in row-major order as uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def take_out(bucket: Bucket, slot: Slot) -> Tensor:
    """A tensor of its own memory: the buffer is filled again before the engine has read everything."""
    return bucket.buffer[slot.begin : slot.end].clone().view(slot.dtype).view(slot.shape)


def through_buckets(stream: Iterable[tuple[str, Tensor]], *, size: int) -> Iterator[tuple[str, Tensor]]:
    """The stream as it arrives on the other side of one buffer of ``size`` bytes.

    Raises:
        InputError: a tensor is larger than the buffer.
    """
    bucket = Bucket(size)
    for name, tensor in stream:
        if tensor.nbytes > size:
            raise InputError(
                "a tensor does not fit into a bucket", where=name, expected=f"{size} bytes", found=tensor.nbytes
            )
        if not bucket.fits(tensor):
            yield from [(slot.name, take_out(bucket, slot)) for slot in bucket.slots]
            bucket.clear()
        bucket.put(name, tensor)
    yield from [(slot.name, take_out(bucket, slot)) for slot in bucket.slots]
