"""Ranks that hold several pieces of a tensor are put together by the places of these, and compared with the whole."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from comparison_rows import MemoryCapture
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.record import Shard
from alignment.capture.session import capture
from alignment.capture.shards import activation_shard, global_names
from alignment.diagnose.capture_comparison import compare_captures
from alignment.errors import InputError
from alignment.numerics.random import portable_integers, portable_normal

BATCH, TOKENS, WIDTH, VOCABULARY = 2, 16, 8, 64
RANKS = (0, 1)


@pytest.fixture
def parallel(monkeypatch):
    """What megatron-core says of its ranks: ``parallel(tensor=(rank, size), context=(rank, size))``."""

    def set_ranks(tensor=(0, 1), context=(0, 1)):
        state = types.SimpleNamespace(
            get_tensor_model_parallel_rank=lambda: tensor[0],
            model_parallel_is_initialized=lambda: True,
            get_tensor_model_parallel_world_size=lambda: tensor[1],
            get_context_parallel_rank=lambda: context[0],
            get_context_parallel_world_size=lambda: context[1],
            get_expert_model_parallel_rank=lambda: 0,
            get_expert_tensor_parallel_rank=lambda: 0,
            get_expert_tensor_parallel_world_size=lambda: 1,
        )
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    return set_ranks


def drawn(*shape, stream):
    return portable_normal(shape, seed=1, stream=stream, dtype=torch.float32)


class ColumnParallelLinear(nn.Module):
    def __init__(self, weight, stride=1, bend=lambda y: y):
        super().__init__()
        self.weight, self.bend = nn.Parameter(weight), bend
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0
        self.weight.partition_stride = stride

    def forward(self, x):
        return self.bend(x @ self.weight.T)


class QKVParallelLinear(nn.Module):
    def __init__(self, weight, sizes, rank, size, bend=lambda y: y):
        super().__init__()
        self.weight, self.bend = nn.Parameter(weight), bend
        self.output_sizes, self.tp_rank, self.tp_size, self.num_kv_head_replicas = sizes, rank, size, 1

    def forward(self, x):
        return self.bend(x @ self.weight.T)


class Model(nn.Module):
    """Embeds, runs one layer and returns what it embedded: results of single ranks end in the layer."""

    def __init__(self, layer):
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), layer
        with torch.no_grad():
            self.embed.weight.copy_(drawn(VOCABULARY, WIDTH, stream="embedding"))

    def forward(self, ids):
        hidden = self.embed(ids)
        self.layer(hidden)
        return hidden


IDS = portable_integers(0, VOCABULARY, (BATCH, TOKENS), seed=2, stream="ids")


def recorded(directory, model, ids=IDS, **config):
    with capture(model, CaptureConfig(**config), directory=directory) as session, session.step(0), torch.no_grad():
        model(ids)
    assert session.failure is None
    return list(OwnCapture(directory).rows(0, "train", 0))


def compared(golden, ranks):
    target = MemoryCapture({0: {"train": dict(enumerate(ranks))}})
    return compare_captures(MemoryCapture({0: {"train": {0: golden}}}), target).stages[0]


def parts_of(weight, sizes, rank, ranks=2):
    """What one rank holds of each of the projections that are merged in ``weight``, one after the other."""
    return torch.cat([part.chunk(ranks)[rank] for part in weight.split(sizes)])


def halves_swapped(y):
    return torch.cat(y.chunk(2, -1)[::-1], -1)


def last_two_swapped(y):
    query, key, value = y.split([WIDTH // 2, WIDTH // 4, WIDTH // 4], -1)
    return torch.cat([query, value, key], -1)


@pytest.mark.parametrize("fault", (None, "weight", "output"))
@pytest.mark.parametrize("detail", ("sketch", "tensor"))
@pytest.mark.parametrize("samples", (True, False), ids=("by sample", "by place"))
def test_gate_and_up_of_every_rank_are_compared_with_the_whole_by_place(tmp_path, parallel, detail, samples, fault):
    whole = drawn(2 * WIDTH, WIDTH, stream="gate and up")
    config = {"detail": detail, "real_tokens": samples}
    parallel()
    golden = recorded(tmp_path / "whole", Model(ColumnParallelLinear(whole, 2)), **config)
    ranks = []
    for rank in RANKS:
        parallel(tensor=(rank, 2))
        weight = parts_of(whole, [WIDTH, WIDTH], rank)
        wrong = fault if rank else None
        weight = halves_swapped(weight.T).T.contiguous() if wrong == "weight" else weight
        layer = ColumnParallelLinear(weight, 2, halves_swapped if wrong == "output" else lambda y: y)
        ranks.append(recorded(tmp_path / str(rank), Model(layer), **config))
    stage = compared(golden, ranks)
    if fault is None:
        assert stage.aligned and stage.details == (detail,), stage.reason()
    else:
        quantity = {"weight": "parameter weight", "output": "out output"}[fault]
        assert (stage.first.module, stage.first.quantity) == ("layer", quantity), stage.reason()


@pytest.mark.parametrize("fault", (None, "weight", "output"))
def test_query_key_and_value_of_every_rank_are_compared_with_the_whole_by_place(tmp_path, fault):
    sizes = [WIDTH, WIDTH // 2, WIDTH // 2]
    whole = drawn(sum(sizes), WIDTH, stream="query, key and value")
    golden = recorded(tmp_path / "whole", Model(QKVParallelLinear(whole, sizes, 0, 1)))
    ranks = []
    for rank in RANKS:
        weight, wrong = parts_of(whole, sizes, rank), fault if rank else None
        weight = last_two_swapped(weight.T).T.contiguous() if wrong == "weight" else weight
        layer = QKVParallelLinear(weight, sizes, rank, 2, last_two_swapped if wrong == "output" else lambda y: y)
        ranks.append(recorded(tmp_path / str(rank), Model(layer)))
    stage = compared(golden, ranks)
    if fault is None:
        assert stage.aligned and stage.details == ("sketch",), stage.reason()
    else:
        quantity = {"weight": "parameter weight", "output": "out output"}[fault]
        assert (stage.first.module, stage.first.quantity) == ("layer", quantity), stage.reason()


def chunks_swapped(y):
    return torch.cat(y.chunk(2, 1)[::-1], 1)


@pytest.mark.parametrize("fault", (None, "ids", "output"))
@pytest.mark.parametrize("detail", ("sketch", "tensor"))
@pytest.mark.parametrize("size", (2, 4))
def test_chunks_of_context_parallel_ranks_are_compared_with_the_whole_by_place(
    tmp_path, parallel, size, detail, fault
):
    whole = drawn(WIDTH, WIDTH, stream="layer")
    config = {"detail": detail, "real_tokens": False}
    parallel()
    golden = recorded(tmp_path / "whole", Model(ColumnParallelLinear(whole)), **config)
    ranks = []
    for rank in range(size):
        parallel(context=(rank, size))
        chunks = IDS.chunk(2 * size, 1)
        held = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)
        wrong = fault if rank == 1 else None
        held = chunks_swapped(held) if wrong == "ids" else held
        layer = ColumnParallelLinear(whole, bend=chunks_swapped if wrong == "output" else lambda y: y)
        ranks.append(recorded(tmp_path / str(rank), Model(layer), held, **config))
    stage = compared(golden, ranks)
    if fault is None:
        assert stage.aligned and stage.details == (detail,), stage.reason()
    else:
        # ids in another order have the same statistics, so it may be their embeddings that are seen to differ first
        assert stage.first.module in {"ids": ("", "embed"), "output": ("layer",)}[fault], stage.reason()
    with pytest.raises(InputError, match="the ranks do not hold the whole tensor"):
        compared(golden, [ranks[0], ranks[0]])


def test_where_ranks_of_a_sequence_hold_their_chunks(parallel):
    layer, batch = nn.Identity(), (BATCH, 8)
    parallel(context=(0, 2))
    assert activation_shard(layer, "output", torch.zeros(8, BATCH, 3), batch) == Shard.of(0, 16, ((0, 4), (12, 4)))
    assert activation_shard(layer, "output", torch.zeros(BATCH, 8, 3), batch) == Shard.of(1, 16, ((0, 4), (12, 4)))
    assert activation_shard(layer, "output", torch.zeros(5, 3), batch) is None
    parallel(context=(1, 2))
    held = activation_shard(layer, "output", torch.zeros(8, BATCH, 3), batch)
    assert held == Shard(dim=0, start=4, length=8, whole=16), "its chunks follow on"
    parallel(context=(0, 2), tensor=(1, 2))
    assert activation_shard(layer, "output", torch.zeros(4, BATCH, 3), batch) == Shard.of(0, 16, ((12, 4),))
    column = ColumnParallelLinear(torch.zeros(3, 3))
    assert activation_shard(column, "output", torch.zeros(8, BATCH, 3), batch) is None, "cut twice"


def test_a_process_that_only_imports_megatron_has_no_shards(monkeypatch):
    """msprobe imports it: a state without groups answers no question about them."""

    def uninitialised():
        raise AssertionError("tensor model parallel group is not initialized")

    state = types.SimpleNamespace(
        model_parallel_is_initialized=lambda: False,
        get_context_parallel_world_size=lambda: 0,
        get_tensor_model_parallel_world_size=uninitialised,
        get_expert_model_parallel_rank=uninitialised,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    model = nn.Sequential(nn.Linear(4, 4))
    assert activation_shard(model[0], "output", torch.zeros(2, 3, 4), (2, 3)) is None
    assert global_names(model) == {"": "", "0": "0"}
