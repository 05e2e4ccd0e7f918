"""Cases: inputs that every machine builds alike, golden values that cover every quantity, and no routing near-ties."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from alignment.backends.case import Draw, Quantity, checked, observe
from alignment.backends.catalogue import cases, find_cases
from alignment.backends.golden_layers import router_observations, undecided_tokens
from alignment.backends.layers import MODEL_MASK
from alignment.backends.routing import NEAR_TIE_ROUNDOFFS, routing_gap
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.precision import unit_roundoff

ALL = cases()
SMALL = [case for case in ALL if case.layer == "unit" or case.operator == "decoder_layer"]


def ids(chosen):
    return [case.id for case in chosen]


def test_ids_are_unique_and_cover_both_dtypes_of_every_name():
    assert len(set(ids(ALL))) == len(ALL)
    for name in {case.name for case in ALL}:
        assert {case.dtype for case in ALL if case.name == name} == {"float32", "bfloat16"}


@pytest.mark.parametrize("case", SMALL, ids=ids(SMALL))
def test_inputs_repeat_and_depend_on_the_seed(case):
    first, again, other = case.inputs(), case.inputs(), case.inputs(seed=case.seed + 1)
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("case", SMALL, ids=ids(SMALL))
def test_golden_values_are_float64_finite_and_in_the_order_of_the_quantities(case):
    golden = case.golden_observations(case.inputs())
    assert tuple(golden) == case.quantity_names
    for name, tensor in golden.items():
        assert tensor.dtype is torch.float64 and torch.isfinite(tensor).all(), name


def test_real_inputs_are_rounded_to_the_run_dtype_before_golden_sees_them():
    draw = Draw("any", 1, torch.bfloat16)
    drawn, whole = draw.normal("x", 64), Draw("any", 1, torch.float64).normal("x", 64)
    assert drawn.dtype is torch.bfloat16
    assert torch.equal(drawn, whole.to(torch.bfloat16)) and not torch.equal(drawn.double(), whole)


def test_a_tensor_does_not_depend_on_what_else_is_drawn():
    alone = Draw("any", 1, torch.float32).normal("b", 8)
    draw = Draw("any", 1, torch.float32)
    draw.normal("a", 8)
    assert torch.equal(alone, draw.normal("b", 8))


def test_an_observation_that_is_missing_or_unknown_is_named():
    case = ALL[0]
    with pytest.raises(InputError, match=r"unknown \['grad.y'\], missing \['output', 'grad.x', 'grad.weight'\]"):
        checked(case, {"grad.y": torch.zeros(1)}, "the subject")
    assert checked(case, {"output": torch.zeros(1)}, "the subject", partial=True).keys() == {"output"}


def test_gradients_are_those_of_the_cotangent_product():
    x, cotangent = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])
    seen = observe(lambda t, a: {"y": t["x"] ** 2}, {"x": x, "cotangent.y": cotangent}, {}, ["x"])
    assert torch.equal(seen["grad.x"], 2 * x * cotangent)


def test_identity_changes_with_every_part_of_the_configuration():
    case = ALL[0]
    changed = (
        dataclasses.replace(case, seed=case.seed + 1),
        dataclasses.replace(case, attributes={"eps": 1e-5}),
        dataclasses.replace(case, quantities=(*case.quantities, Quantity(name="more", module="m"))),
    )
    assert all(other.identity() != case.identity() for other in changed)


def test_an_unknown_case_suggests_the_nearest_one():
    with pytest.raises(InputError, match="did you mean 'swiglu-"):
        find_cases(["swigul-float32"])
    assert [c.id for c in find_cases(["swiglu"])] == ["swiglu-float32", "swiglu-bfloat16"]


MOE_LAYERS = [case for case in ALL if "router_scores" in case.quantity_names]


@pytest.mark.parametrize("case", MOE_LAYERS, ids=ids(MOE_LAYERS))
def test_every_judged_token_of_a_moe_layer_is_routed_by_more_than_a_near_tie(case):
    inputs = case.inputs()
    scores = case.golden_observations(inputs)["router_scores"]
    gap = routing_gap(scores, preset(case.attributes["preset"]))
    decided = inputs["decided"].flatten().bool()
    assert decided.sum() > decided.numel() // 2, "most tokens are judged"
    assert (gap[decided] >= NEAR_TIE_ROUNDOFFS * unit_roundoff(case.dtype)).all()


def test_the_routing_gap_is_that_of_the_last_chosen_expert_and_of_the_last_chosen_group():
    config = preset("tiny-deepseek")  # 8 experts in 4 groups of 2, of which 2, top 3
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.65, 0.6, 0.1, 0.1]], dtype=torch.float64)
    by_expert, by_group = 0.7 - 0.6, (0.7 + 0.6) - (0.65 + 0.6)
    assert routing_gap(scores, config).item() == pytest.approx(min(by_expert, by_group), rel=unit_roundoff("float32"))


def test_whole_models_are_fed_tokens_that_no_layer_routes_by_a_near_tie():
    case = next(c for c in ALL if c.id == "causal_lm.tiny-deepseek-bfloat16")
    inputs = case.inputs()
    model = CausalLM(preset("tiny-deepseek"), dtype=torch.float64)
    model.load_state_dict({n.removeprefix("weight."): t for n, t in inputs.items() if n.startswith("weight.")})
    margin = NEAR_TIE_ROUNDOFFS * unit_roundoff(case.dtype)
    assert not undecided_tokens(model, inputs["input_ids"], MODEL_MASK, margin).any()
    assert undecided_tokens(model, inputs["input_ids"], MODEL_MASK, 1.0).any(), "the probe can find near-ties"


def test_router_observations_spread_choice_and_weights_over_all_experts():
    x, weight, bias = torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0.0, 1.0, 2.0])
    seen = router_observations(x, weight, bias, torch.tensor([[2], [1]]), torch.tensor([[5.0], [6.0]]))
    assert seen["router_scores"].tolist() == [[0.5, 1.5, 2.5]] * 2
    assert seen["router_selected"].tolist() == [[0, 0, 1], [0, 1, 0]]
    assert seen["router_weights"].tolist() == [[0, 0, 5], [0, 6, 0]]
