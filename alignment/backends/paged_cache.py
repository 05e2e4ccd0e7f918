"""A paged KV cache behind fixed-shape batches, as engines keep it that replay captured graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from alignment.errors import InputError

DUMMY_SLOT = 0
"""The first slot belongs to nobody: rows that pad a batch to its captured shape write there."""


class PagedCache:
    """Keys of many requests in blocks of slots; writes go through one persistent slot mapping of fixed length.

    Args:
        blocks: number of blocks; the first one holds the dummy slot and is never given out.
        block_size: slots per block.
        width: channels of a key.
        batch: rows of the captured batch; smaller batches are padded to it.
    """

    def __init__(
        self, *, blocks: int, block_size: int, width: int, batch: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.block_size, self.batch = block_size, batch
        self.keys = torch.zeros(blocks * block_size, width, dtype=dtype)
        self.slot_mapping = torch.full((batch,), DUMMY_SLOT)
        self._free = list(range(blocks - 1, 0, -1))
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def append(self, keys: Mapping[str, Tensor]) -> None:
        """One new key ``[width]`` per running request.

        Raises:
            InputError: more requests than the batch has rows, or no block left.
        """
        if len(keys) > self.batch:
            raise InputError("the batch is full", where="PagedCache", expected=f"at most {self.batch}", found=len(keys))
        slots = torch.tensor([self._next_slot(request) for request in keys], dtype=torch.int64)
        self.map_slots(slots)
        rows = self.keys.new_zeros(self.batch, self.keys.shape[1])
        rows[: len(keys)] = torch.stack(list(keys.values()))
        # The captured kernel writes every row of its batch, the padding included.
        self.keys[self.slot_mapping] = rows

    def map_slots(self, slots: Tensor) -> None:
        """The slots of this step's rows; the rows behind them point at the dummy slot."""
        self.slot_mapping[: len(slots)] = slots
        self.slot_mapping[len(slots) :] = DUMMY_SLOT

    def read(self, request: str) -> Tensor:
        """The keys of a request, ``[length, width]``."""
        slots = torch.tensor([b * self.block_size + i for b in self._tables[request] for i in range(self.block_size)])
        return self.keys[slots[: self._lengths[request]]]

    def finish(self, request: str) -> None:
        """Gives the blocks of a request back."""
        self._free += self._tables.pop(request)
        del self._lengths[request]

    def _next_slot(self, request: str) -> int:
        length = self._lengths.setdefault(request, 0)
        table = self._tables.setdefault(request, [])
        if length == len(table) * self.block_size:
            if not self._free:
                raise InputError("no block is left", where="PagedCache", next_step="finish a request")
            table.append(self._free.pop())
        self._lengths[request] = length + 1
        return table[length // self.block_size] * self.block_size + length % self.block_size
