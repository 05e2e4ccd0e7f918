"""Aliasing probes: facts, views, and the sentinel, on the chain that makes W_UK_T and W_UV out of kv_b_proj."""

from __future__ import annotations

import pytest
import torch

from alignment.devices import aliasing, npu
from alignment.devices.aliasing import chain, facts, first_copy, is_view_of, sentinel_seen, shares_storage
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset

HEADS, NOPE, VALUE, RANK = 2, 3, 5, 4  # widths that differ, so that a wrong axis cannot go unseen


def kv_b_proj() -> torch.Tensor:
    rows = HEADS * (NOPE + VALUE)
    return torch.arange(rows * RANK, dtype=torch.float32).reshape(rows, RANK).clone()


def w_uv_chain():
    """kv_b_proj [heads·(nope+v), rank] → W_UV [heads, rank, v], as vLLM derives it."""
    return [
        aliasing.transpose(0, 1),
        aliasing.view(RANK, HEADS, NOPE + VALUE),
        aliasing.split([NOPE, VALUE], 2, 1),
        aliasing.transpose(0, 1),
    ]


def test_facts_of_a_strided_view():
    t = torch.zeros(4, 6, dtype=torch.float64)
    part = t[1:, 2:4]
    found = facts(part)
    assert (found.storage_offset, found.strides, found.shape) == (8, (6, 1), (3, 2))
    assert found.data_ptr == found.storage_ptr + 8 * t.element_size()
    assert found.storage_bytes == t.numel() * t.element_size()
    assert (found.contiguous, found.has_base, found.dtype, found.device) == (False, True, "float64", "cpu")


def test_views_alias_all_the_way_to_w_uv():
    steps = chain(kv_b_proj(), w_uv_chain())
    assert [s.sentinel for s in steps] == [True] * 4
    assert [s.view_of_source for s in steps] == [True] * 4
    assert first_copy(steps) is None


def test_contiguous_is_where_the_alias_ends():
    steps = chain(kv_b_proj(), [*w_uv_chain(), aliasing.contiguous()])
    broken = first_copy(steps)
    assert broken.op == "contiguous()"
    assert not broken.same_storage
    assert broken.row()[3:] == ("contiguous", "other address", "a copy")
    assert steps[3].row()[3:] == ("strided", "same address", "aliases the source")


def test_contiguous_of_a_contiguous_tensor_is_the_tensor():
    (step,) = chain(kv_b_proj(), [aliasing.contiguous()])
    assert step.same_storage and step.sentinel and step.after.data_ptr == step.before.data_ptr


def test_reshape_is_the_control_view_where_it_can_copy_where_it_must():
    aliased, copied = (
        chain(kv_b_proj(), [aliasing.reshape(RANK, -1), aliasing.transpose(0, 1)]),
        chain(kv_b_proj(), [aliasing.transpose(0, 1), aliasing.reshape(-1)]),
    )
    assert first_copy(aliased) is None
    assert first_copy(copied).op == "reshape(-1,)"


def test_a_view_that_cannot_be_expressed_is_refused_by_name():
    with pytest.raises(InputError, match=r"view\(-1,\) refused its input.*shape \(4, 16\), strides \(1, 4\)"):
        chain(kv_b_proj(), [aliasing.transpose(0, 1), aliasing.view(-1)])


@pytest.mark.parametrize("derive", [lambda t: t.clone(), lambda t: t.double(), lambda t: t + 0, lambda t: t.flip(0)])
def test_copies_do_not_alias(derive):
    source = kv_b_proj()
    derived = derive(source)
    assert not shares_storage(source, derived)
    assert not is_view_of(derived, source)
    assert not sentinel_seen(source, derived)


def test_two_parts_of_one_storage_are_not_views_of_each_other():
    left, right = torch.arange(8.0).split(4)
    assert shares_storage(left, right)
    assert not is_view_of(left, right)
    assert not sentinel_seen(left, right)


def test_a_derived_tensor_wider_than_its_source_is_not_seen_through():
    whole = torch.arange(8.0)
    assert not is_view_of(whole, whole[2:6])
    assert not sentinel_seen(whole[2:6], whole)


def test_relation_survives_no_grad_and_detach():
    source = torch.nn.Parameter(kv_b_proj())
    with torch.no_grad():
        derived = source.t()
    assert is_view_of(derived.detach(), source)
    assert sentinel_seen(source, derived)
    assert torch.equal(source, kv_b_proj())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_the_source_comes_back_bit_for_bit(dtype):
    source = torch.arange(12, dtype=torch.int64).reshape(3, 4).to(dtype)
    if dtype.is_floating_point:
        source[0, 0] = float("nan")
    before = source.clone()
    assert sentinel_seen(source, source.t())
    assert torch.equal(source.view(torch.uint8), before.view(torch.uint8))


def test_a_sentinel_that_is_there_already_cannot_decide():
    held = torch.full((3,), -100.0)
    with pytest.raises(InputError, match="holds the sentinel already.*pass another sentinel"):
        sentinel_seen(torch.zeros(3), held)
    assert not sentinel_seen(torch.zeros(3), held, value=-7)


def test_empty_tensors_decide_nothing():
    empty = torch.zeros(0)
    assert not shares_storage(empty, empty)
    assert not is_view_of(empty, empty)
    with pytest.raises(InputError, match="an empty tensor cannot carry a sentinel"):
        sentinel_seen(empty, torch.zeros(1))


@pytest.mark.parametrize("quantity", ["w_uk_t", "w_uv"])
def test_the_models_absorbed_weights_are_views_or_copies_as_asked(device, quantity):
    """What weight sync rests on: a view sees an in-place update of kv_b_proj, a packed copy does not."""
    attention = CausalLM(preset("tiny-deepseek"), device=device.torch_device).init_weights(1).model.layers[0].self_attn
    weight = attention.kv_b_proj.weight
    attention.absorb()
    assert is_view_of(getattr(attention, quantity), weight)
    assert sentinel_seen(weight, getattr(attention, quantity))
    attention.absorb(contiguous=True)
    assert getattr(attention, quantity).is_contiguous()
    assert not shares_storage(getattr(attention, quantity), weight)
    assert not sentinel_seen(weight, getattr(attention, quantity))


# --- on an NPU -------------------------------------------------------------------------------------------------------


@pytest.mark.npu
def test_on_an_npu_views_alias_and_contiguous_copies():
    steps = chain(kv_b_proj().to("npu"), [*w_uv_chain(), aliasing.contiguous()])
    assert [s.sentinel for s in steps] == [True, True, True, True, False]
    assert [s.view_of_source for s in steps] == [True, True, True, True, False]
    assert first_copy(steps).op == "contiguous()"
    assert steps[0].after.device.startswith("npu")


@pytest.fixture
def emulated():
    from alignment.devices.base import get_device

    if not get_device("npu").emulated:
        pytest.skip("only the emulated NPU can switch this behaviour")
    from alignment.devices.emulated_npu import semantics

    return semantics


def plain_chain():
    """The chain of the golden model: a view of the weight, then strided views of that."""
    return [
        aliasing.view(HEADS, NOPE + VALUE, RANK),
        aliasing.split([NOPE, VALUE], 1, 1),
        aliasing.transpose(1, 2),
    ]


@pytest.mark.npu
def test_a_view_of_an_internal_format_weight_can_be_new_storage(emulated):
    """The reported behaviour: no error, the right values, and no alias."""
    weight = npu.internal_format(kv_b_proj().to("npu"))
    with emulated.internal_format_view_copies():
        steps = chain(weight, plain_chain())
        (control,) = chain(kv_b_proj().to("npu"), [aliasing.view(HEADS, NOPE + VALUE, RANK)])
        derived = weight.view(HEADS, NOPE + VALUE, RANK)
    assert first_copy(steps).op == f"view{(HEADS, NOPE + VALUE, RANK)}"
    assert not steps[0].same_storage and not steps[0].view_of_source
    assert steps[0].row()[4:] == ("other address", "a copy")
    assert torch.equal(derived.cpu(), kv_b_proj().view(HEADS, NOPE + VALUE, RANK))
    assert control.sentinel  # a plain tensor keeps its alias under the same behaviour
    assert first_copy(chain(weight, plain_chain())) is None  # and so does the weight once it is off


@pytest.mark.npu
def test_by_the_published_rule_view_aliases_and_the_strided_ops_copy(emulated):
    weight = npu.internal_format(kv_b_proj().to("npu"))
    with emulated.internal_format_as_strided_copies():
        view, split, _ = steps = chain(weight, plain_chain())
    assert view.sentinel and view.same_storage
    assert first_copy(steps) is split and split.op == f"split({[NOPE, VALUE]}, 1)[1]"


def test_internal_formats_are_an_npus():
    with pytest.raises(InputError, match="only an NPU has internal formats; found cpu"):
        npu.internal_format(kv_b_proj())
