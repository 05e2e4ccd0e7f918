"""The map between vLLM's fused parameters and the checkpoint's names."""

from __future__ import annotations

import pytest
import torch

from alignment.errors import InputError
from alignment.weights.vllm_names import Shard, joined, unfused, unstacked_experts


def test_a_fused_layer_is_taken_apart_in_order():
    weight = torch.arange(12.0).view(6, 2)
    parts = list(unfused("model.layers.0.self_attn.fused_qkv_a_proj", weight, [2, 4], None))
    assert [p.name for p in parts] == [
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    ]
    assert torch.equal(parts[0].tensor, weight[:2]) and torch.equal(parts[1].tensor, weight[2:])
    assert parts[0].tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_a_plain_layer_keeps_its_name():
    weight = torch.ones(3, 2)
    assert list(unfused("model.layers.0.self_attn.o_proj", weight, [3], 1)) == [
        Shard("model.layers.0.self_attn.o_proj.weight", weight, 1)
    ]


def test_parts_that_do_not_fill_the_layer_are_an_error():
    with pytest.raises(
        InputError, match="gate_up_proj: .*other parts.*gate_proj and up_proj, 6 rows together; found parts of"
    ):
        list(unfused("m.gate_up_proj", torch.ones(6, 2), [2, 3], None))


@pytest.mark.parametrize(("tensor_parallel", "dims"), [(True, (0, 0, 1)), (False, (None, None, None))])
def test_stacked_experts_get_their_numbers(tensor_parallel, dims):
    w13, w2 = torch.arange(2 * 6 * 2.0).view(2, 6, 2), torch.arange(2 * 2 * 3.0).view(2, 2, 3)
    shards = list(unstacked_experts("m.mlp.experts.routed_experts", w13, w2, [1, 3], tensor_parallel=tensor_parallel))
    assert [s.name for s in shards] == [
        f"m.mlp.experts.{e}.{part}_proj.weight" for e in (1, 3) for part in ("gate", "up", "down")
    ]
    assert tuple(s.dim for s in shards[:3]) == dims
    assert torch.equal(shards[3].tensor, w13[1, :3]) and torch.equal(shards[4].tensor, w13[1, 3:])
    assert torch.equal(shards[5].tensor, w2[1])


def test_ranks_are_joined_along_the_dimension_they_cut():
    whole = torch.arange(12.0).view(3, 4)
    assert torch.equal(joined([Shard("x", whole[:, :2], 1), Shard("x", whole[:, 2:], 1)]), whole)
    assert torch.equal(joined([Shard("x", whole, None), Shard("x", whole, None)]), whole)
