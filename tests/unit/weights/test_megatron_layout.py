from __future__ import annotations

import dataclasses
import itertools
import weakref

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.models.config import preset
from alignment.weights.checkpoint import expected_shapes
from alignment.weights.megatron_layout import (
    ParallelSizes,
    Place,
    fetch_from,
    local_parameters,
    places,
    shard,
    to_hugging_face,
    to_megatron,
    unshard,
)
from alignment.weights.megatron_names import Naming, Split, megatron_parameters

SMALL = dict(
    vocab_size=24,
    hidden_size=8,
    intermediate_size=24,
    moe_intermediate_size=8,
    num_attention_heads=4,
    n_routed_experts=8,
    kv_lora_rank=6,
    qk_rope_head_dim=2,
    qk_nope_head_dim=3,
    v_head_dim=5,
)


def small(*, layers=4, dense=1, query_latent=None, shared=1, name="tiny-moonlight"):
    base = preset(name)
    return dataclasses.replace(
        base,
        **SMALL,
        num_hidden_layers=layers,
        first_k_dense_replace=dense,
        q_lora_rank=query_latent,
        n_shared_experts=shared,
    )


def numbered(config):
    """Every element of the model differs from every other, so that nothing can be swapped unseen."""
    state, start = {}, 0
    for name, shape in expected_shapes(config).items():
        count = torch.Size(shape).numel()
        state[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(shape)
        start += count
    return state


def spread(config, sizes, stream, naming=Naming.LOCAL):
    """The state of every rank."""
    stream = list(stream)
    return {
        place: {(local.chunk, local.name): part for local, part in to_megatron(config, sizes, place, stream, naming)}
        for place in places(sizes)
    }


@st.composite
def layouts(draw):
    layers = draw(st.integers(2, 7))
    config = small(
        layers=layers,
        dense=draw(st.integers(0, 2)),
        query_latent=draw(st.sampled_from([None, 4])),
        shared=draw(st.sampled_from([0, 1, 2])),
    )
    stages = draw(st.integers(1, 3))
    uneven = stages > 1 and draw(st.booleans())
    sizes = ParallelSizes(
        tensor_model_parallel_size=draw(st.sampled_from([1, 2, 4])),
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=draw(st.sampled_from([None, 2])) if stages > 1 else None,
        expert_model_parallel_size=draw(st.sampled_from([1, 2, 4])),
        expert_tensor_parallel_size=draw(st.sampled_from([None, 1, 2])),
        num_layers_in_first_pipeline_stage=draw(st.sampled_from([None, 1, 2])) if uneven else None,
        num_layers_in_last_pipeline_stage=draw(st.sampled_from([None, 1, 2])) if uneven else None,
    )
    try:
        sizes.check(config)
    except InputError:
        assume(False)
    return config, sizes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(layouts(), st.sampled_from(list(Naming)))
def test_round_trip_gives_back_every_bit(layout, naming):
    config, sizes = layout
    state = numbered(config)
    ranks = spread(config, sizes, state.items(), naming)
    back = dict(to_hugging_face(config, fetch_from(config, sizes, ranks, naming), naming))
    assert set(back) == set(state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(layouts())
def test_a_sharded_model_holds_every_element_once(layout):
    """Without replicated parameters and once per group, the ranks together hold exactly the checkpoint."""
    config, sizes = layout
    state = numbered(config)
    held = torch.zeros(sum(t.numel() for t in state.values()), dtype=torch.int64)
    for place, ranks in spread(config, sizes, state.items()).items():
        for local in local_parameters(config, sizes, place):
            parameter = local.parameter
            routed = parameter.expert is not None
            if not routed and (place.expert or place.expert_tensor) or routed and place.tensor:
                continue
            if parameter.split is Split.REPLICATED and place.tensor:
                continue
            held[ranks[local.chunk, local.name].long().flatten()] += 1
    assert held.eq(1).all()


def test_resharding_is_a_stream_into_a_stream():
    config = small(layers=6)
    here = ParallelSizes(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    there = ParallelSizes(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=2,
    )
    state = numbered(config)
    moved = spread(
        config, there, to_hugging_face(config, fetch_from(config, here, spread(config, here, state.items())))
    )
    direct = spread(config, there, state.items())
    for place, held in direct.items():
        assert held.keys() == moved[place].keys()
        assert all(torch.equal(held[key], moved[place][key]) for key in held)


def test_gate_and_up_are_cut_before_they_are_stacked():
    """Cutting the stack itself gives rank 0 the whole gate and rank 1 the whole up projection: a silent mix-up."""
    config = small()
    parameter = next(p for p in megatron_parameters(config) if p.split is Split.GATED)
    gate, up = (numbered(config)[name] for name in parameter.hf_names)
    parts = [shard(parameter, [gate, up], rank=rank, size=2) for rank in range(2)]
    rows = len(gate) // 2
    assert torch.equal(parts[0], torch.cat([gate[:rows], up[:rows]]))
    wrong = list(torch.cat([gate, up]).chunk(2))
    assert not torch.equal(dict(unshard(parameter, wrong))[parameter.hf_names[0]], gate)
    assert torch.equal(dict(unshard(parameter, parts))[parameter.hf_names[0]], gate)


def test_layers_of_uneven_stages_are_the_field_layout():
    """61 layers over 16 stages, 3 in the first, 2 in the last and 4 in each other (the 671B run)."""
    config = preset("deepseek-v3-671b")
    sizes = ParallelSizes(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=16,
        expert_model_parallel_size=16,
        expert_tensor_parallel_size=1,
        num_layers_in_first_pipeline_stage=3,
        num_layers_in_last_pipeline_stage=2,
    )
    sizes.check(config, world_size=256)
    counts = [len(sizes.layers(config, pipeline_rank=p)) for p in range(16)]
    assert counts == [3, *[4] * 14, 2]
    assert list(itertools.chain(*(sizes.layers(config, pipeline_rank=p) for p in range(16)))) == list(range(61))
    assert sizes.experts(config, expert_rank=15) == range(240, 256)


def test_virtual_stages_take_turns():
    sizes = ParallelSizes(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    config = small(layers=8)
    assert [list(sizes.layers(config, pipeline_rank=p, chunk=c)) for p in (0, 1) for c in (0, 1)] == [
        [0, 1], [4, 5], [2, 3], [6, 7],
    ]  # fmt: skip


def test_never_more_than_a_gate_and_its_partner_are_alive():
    """The stream is consumed tensor by tensor: two full copies of the model never exist."""
    config, alive, most = small(), weakref.WeakSet(), 0
    shapes = expected_shapes(config)

    def stream():
        for name, shape in shapes.items():
            tensor = torch.zeros(shape)
            alive.add(tensor)
            yield name, tensor
            del tensor

    for _ in to_megatron(config, ParallelSizes(tensor_model_parallel_size=2), Place(), stream()):
        most = max(most, len(alive))
    # A kept gate projection, the tensor just read, and the one the stream still holds.
    assert most <= 3 < len(shapes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(tensor_model_parallel_size=3), "num_attention_heads = 4"),
        (dict(expert_model_parallel_size=3), "n_routed_experts = 8"),
        (dict(expert_tensor_parallel_size=3), "moe_intermediate_size = 8"),
        (dict(pipeline_model_parallel_size=3), "4 layer(s) shared equally by 3 stage(s)"),
        (
            dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=4),
            "a divisor of a stage's 2 layer(s)",
        ),
        (dict(virtual_pipeline_model_parallel_size=2), "more than 1 with virtual stages"),
        (dict(tensor_model_parallel_size=0), "an integer of at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(InputError) as refusal:
        ParallelSizes(**sizes).check(small())
    assert message in str(refusal.value)
    assert next(iter(sizes)).removeprefix("virtual_") in str(refusal.value)


def test_vocabulary_that_cannot_be_shared_out_is_refused():
    config = dataclasses.replace(small(), vocab_size=25)
    with pytest.raises(InputError, match="a divisor of vocab_size = 25"):
        ParallelSizes(tensor_model_parallel_size=2).check(config)


def test_ranks_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="a multiple of 4"):
        ParallelSizes(tensor_model_parallel_size=2, context_parallel_size=2).check(small(), world_size=6)


def test_a_missing_tensor_is_named():
    config = small()
    state = numbered(config)
    del state["model.layers.2.mlp.experts.3.up_proj.weight"]
    with pytest.raises(InputError, match=r"model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight"):
        spread(config, ParallelSizes(), state.items())
