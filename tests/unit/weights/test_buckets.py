"""Tensors through one buffer: as they were, however they lie in memory, and however late they are read."""

import pytest
import torch

from alignment.errors import InputError
from alignment.weights.buckets import through_buckets


def test_every_tensor_arrives_whatever_its_strides_and_dtype():
    base = torch.arange(24.0).view(4, 6)
    sent = {"a": base, "b": base.T, "c": base[:, ::2], "d": base.bfloat16(), "e": torch.arange(3), "f": base.double()}
    # A list is read when the buffer was filled many times over.
    found = dict(list(through_buckets(iter(sent.items()), size=200)))
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_tensor_larger_than_the_buffer_is_refused():
    with pytest.raises(InputError, match="big: a tensor does not fit into a bucket; expected 8 bytes; found 16"):
        list(through_buckets([("big", torch.zeros(4))], size=8))
