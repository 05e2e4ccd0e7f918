"""A paged cache: requests keep their own keys while batches shrink, and what is full says so."""

import pytest
import torch

from alignment.backends.paged_cache import DUMMY_SLOT, PagedCache
from alignment.errors import InputError


def key(value):
    return torch.full((2,), float(value))


def test_a_smaller_batch_writes_to_nobody_else():
    cache = PagedCache(blocks=5, block_size=2, width=2, batch=3)
    cache.append({"a": key(1), "b": key(2), "c": key(3)})
    cache.append({"a": key(4)})
    assert cache.slot_mapping[1:].tolist() == [DUMMY_SLOT] * 2
    assert cache.read("a")[:, 0].tolist() == [1, 4]
    assert cache.read("b")[:, 0].tolist() == [2] and cache.read("c")[:, 0].tolist() == [3]
    cache.finish("a")
    cache.append({"d": key(5)})
    assert cache.read("d")[:, 0].tolist() == [5]


def test_a_full_batch_and_a_full_cache_are_refused():
    cache = PagedCache(blocks=2, block_size=1, width=2, batch=1)
    with pytest.raises(InputError, match="the batch is full; expected at most 1; found 2"):
        cache.append({"a": key(1), "b": key(2)})
    cache.append({"a": key(1)})
    with pytest.raises(InputError, match="no block is left"):
        cache.append({"a": key(2)})
