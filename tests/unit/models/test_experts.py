"""Dispatch to experts and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.models.backbone import init_weights
from alignment.models.config import preset
from alignment.models.moe import MixtureOfExperts
from alignment.numerics.metrics import relative_l2
from alignment.numerics.random import portable_integers, portable_normal, portable_permutation

CONFIG = preset("tiny-deepseek")
ROUNDING = torch.finfo(torch.float64).eps * CONFIG.moe_intermediate_size * CONFIG.num_experts_per_tok
TOKENS = 17


def layer(config=CONFIG) -> MixtureOfExperts:
    built = MixtureOfExperts(config, dtype=torch.float64, device="cpu")
    init_weights(built, config, 4)
    return built


def hidden(seed: int = 0) -> torch.Tensor:
    return portable_normal((TOKENS, CONFIG.hidden_size), seed=seed, stream="hidden")


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), choices=st.integers(1, 4))
def test_dispatch_equals_a_loop_over_tokens(seed, choices):
    moe = layer()
    x = hidden(seed)
    chosen = portable_integers(0, CONFIG.n_routed_experts, (TOKENS, choices), seed=seed, stream="chosen")
    weights = portable_normal((TOKENS, choices), seed=seed, stream="weights")
    with torch.no_grad():
        expected = torch.stack(
            [
                sum(w * moe.experts[e](token) for e, w in zip(experts.tolist(), ws, strict=True))
                for token, experts, ws in zip(x, chosen, weights, strict=True)
            ]
        )
        found = moe.run_experts(x, chosen, weights)
        forgot_to_sort_back = moe.run_experts(x, chosen.flip(0), weights)
    assert relative_l2(found, expected) <= ROUNDING
    assert relative_l2(forgot_to_sort_back, expected) > ROUNDING


def test_the_shared_expert_sees_every_token():
    moe, x = layer(), hidden()
    with torch.no_grad():
        routed = moe.run_experts(x, *moe.gate(x))
        assert relative_l2(moe(x), routed + moe.shared_experts(x)) <= ROUNDING
        assert relative_l2(moe(x), routed) > ROUNDING


@pytest.mark.parametrize("count", [0, 1, 2])
def test_shared_experts_are_one_layer_of_their_joint_width(count):
    names = {n: tuple(p.shape) for n, p in layer(replace(CONFIG, n_shared_experts=count)).named_parameters()}
    shared = {n: shape for n, shape in names.items() if n.startswith("shared_experts")}
    width = count * CONFIG.moe_intermediate_size
    assert shared.get("shared_experts.gate_proj.weight", (0, CONFIG.hidden_size)) == (width, CONFIG.hidden_size)
    assert bool(shared) == bool(count)


def test_renumbering_experts_changes_nothing():
    moe, x = layer(replace(CONFIG, n_group=1, topk_group=1)), hidden()
    other = layer(moe.config)
    order = portable_permutation(CONFIG.n_routed_experts, seed=1, stream="experts")
    with torch.no_grad():
        other.gate.weight.copy_(moe.gate.weight[order])
        wrong = other(x)
        other.gate.e_score_correction_bias.copy_(moe.gate.e_score_correction_bias[order])
        for to, source in enumerate(order.tolist()):
            other.experts[to].load_state_dict(moe.experts[source].state_dict())
        assert relative_l2(other(x), moe(x)) <= ROUNDING
        assert relative_l2(wrong, moe(x)) > ROUNDING


def test_reordering_tokens_reorders_the_result():
    moe, x = layer(), hidden()
    order = portable_permutation(TOKENS, seed=1, stream="tokens")
    with torch.no_grad():
        assert relative_l2(moe(x[order]), moe(x)[order]) <= ROUNDING


def test_an_expert_without_tokens_has_a_zero_gradient_not_none():
    moe = layer()
    chosen = torch.zeros(TOKENS, 1, dtype=torch.long)
    moe.run_experts(hidden(), chosen, torch.ones(TOKENS, 1, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in moe.experts.parameters())
    assert all(p.grad.any() for p in moe.experts[0].parameters())
    assert not any(p.grad.any() for expert in moe.experts[1:] for p in expert.parameters())
