"""The bias-corrected, grouped sigmoid router."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.models.config import ModelConfig, preset
from alignment.models.moe import Router, select_experts
from alignment.numerics.random import portable_normal, portable_uniform

EPS = torch.finfo(torch.float64).eps
PLAIN = replace(preset("tiny-moonlight"), n_routed_experts=4, routed_scaling_factor=2.0)
GROUPED = replace(preset("tiny-deepseek"), n_group=4, topk_group=2, num_experts_per_tok=3)
NO_BIAS = torch.zeros(4, dtype=torch.float64)


def table(chosen: torch.Tensor, weights: torch.Tensor) -> list[dict[int, float]]:
    return [dict(zip(c.tolist(), w.tolist(), strict=True)) for c, w in zip(chosen, weights, strict=True)]


def scores_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_the_weights_are_normalised_scores_times_the_factor():
    (found,) = table(*select_experts(scores_of([0.1, 0.6, 0.2, 0.3]), NO_BIAS, PLAIN))
    assert found.keys() == {1, 3}
    assert found[1] == pytest.approx(2 * 0.6 / 0.9, rel=4 * EPS)
    assert found[3] == pytest.approx(2 * 0.3 / 0.9, rel=4 * EPS)


def test_without_normalisation_only_the_factor_applies():
    (found,) = table(*select_experts(scores_of([0.1, 0.6, 0.2, 0.3]), NO_BIAS, replace(PLAIN, norm_topk_prob=False)))
    assert found == {1: 1.2, 3: 0.6}


def test_the_bias_selects_and_does_not_weigh():
    bias = torch.tensor([0.9, 0.0, 0.0, 0.0], dtype=torch.float64)
    (found,) = table(*select_experts(scores_of([0.1, 0.6, 0.2, 0.3]), bias, PLAIN))
    assert found.keys() == {0, 1}
    assert found[0] == pytest.approx(2 * 0.1 / 0.7, rel=4 * EPS)


def test_the_bias_has_no_gradient_and_the_scores_have():
    scores, bias = scores_of([0.1, 0.6, 0.2, 0.3]).requires_grad_(), NO_BIAS.clone().requires_grad_()
    select_experts(scores, bias, replace(PLAIN, norm_topk_prob=False))[1].sum().backward()
    assert scores.grad.tolist() == [[0.0, 2.0, 0.0, 2.0]]
    assert bias.grad is None


def test_a_group_is_worth_its_two_best_experts():
    """The best expert, 0.9, sits in a group that loses: 0.9 + 0.0 < 0.5 + 0.5 < 0.6 + 0.45."""
    scores = scores_of([0.9, 0.0, 0.5, 0.5, 0.6, 0.45, 0.3, 0.3])
    chosen, _ = select_experts(scores, torch.zeros(8, dtype=torch.float64), GROUPED)
    assert set(chosen[0].tolist()) == {2, 3, 4}
    everything = select_experts(scores, torch.zeros(8, dtype=torch.float64), replace(GROUPED, topk_group=4))[0]
    assert set(everything[0].tolist()) == {0, 2, 4} or set(everything[0].tolist()) == {0, 3, 4}


def test_the_groups_are_chosen_with_the_bias():
    scores = scores_of([0.1, 0.1, 0.5, 0.5, 0.6, 0.4, 0.3, 0.3])
    bias = torch.tensor([1.0, 1.0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    chosen, _ = select_experts(scores, bias, GROUPED)
    assert {0, 1} <= set(chosen[0].tolist())


def test_experts_of_dropped_groups_lose_even_to_negative_choices():
    """Masked with 0 instead of -inf, a dropped expert would beat a kept one whose biased score is negative."""
    scores = scores_of([0.9, 0.8, 0.7, 0.01, 0.1, 0.1, 0.1, 0.1])
    bias = torch.tensor([0, 0, 0, -0.5, -0.9, -0.9, -0.9, -0.9], dtype=torch.float64)
    config = replace(GROUPED, num_experts_per_tok=4)
    assert set(select_experts(scores, bias, config)[0][0].tolist()) == {0, 1, 2, 3}


def reference(scores: list[float], bias: list[float], config: ModelConfig) -> dict[int, float]:
    """The three steps of the paper, one token at a time, in plain Python."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    width = config.n_routed_experts // config.n_group
    groups = range(config.n_group)
    worth = {g: sum(sorted(choice[g * width : (g + 1) * width])[-2:]) for g in groups}
    kept = sorted(groups, key=worth.get)[-config.topk_group :]
    candidates = [e for g in kept for e in range(g * width, (g + 1) * width)]
    chosen = sorted(candidates, key=choice.__getitem__)[-config.num_experts_per_tok :]
    total = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
    return {e: scores[e] / total * config.routed_scaling_factor for e in chosen}


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([(8, 4, 2, 3), (8, 1, 1, 3), (8, 2, 1, 2), (12, 3, 2, 5), (8, 4, 4, 8)]),
    normalise=st.booleans(),
)
def test_it_is_the_three_steps_of_the_paper(seed, shape, normalise):
    experts, groups, kept, per_token = shape
    config = replace(
        GROUPED,
        n_routed_experts=experts,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=per_token,
        norm_topk_prob=normalise,
    )
    scores = portable_uniform((6, experts), seed=seed, stream="scores")
    bias = portable_normal(experts, seed=seed, stream="bias") / 4
    for row, found in zip(scores.tolist(), table(*select_experts(scores, bias, config)), strict=True):
        expected = reference(row, bias.tolist(), config)
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=(per_token + 2) * EPS)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_renumbering_experts_within_groups_renumbers_the_choice(seed):
    scores = portable_uniform((5, 8), seed=seed, stream="scores")
    bias = portable_normal(8, seed=seed, stream="bias") / 4
    groups = portable_uniform(4, seed=seed, stream="groups").argsort()
    order = (groups[:, None] * 2 + torch.tensor([1, 0])).flatten()
    plain = table(*select_experts(scores, bias, GROUPED))
    renumbered = table(*select_experts(scores[:, order], bias[order], GROUPED))
    for before, after in zip(plain, renumbered, strict=True):
        moved = {int(order[e]): w for e, w in after.items()}
        assert moved == pytest.approx(before, rel=8 * EPS)


def test_renumbering_across_groups_is_not_a_law():
    """Otherwise the test above could not tell groups from no groups."""
    scores = scores_of([0.9, 0.0, 0.5, 0.5, 0.6, 0.45, 0.3, 0.3])
    order = torch.tensor([0, 2, 1, 3, 4, 5, 6, 7])
    bias = torch.zeros(8, dtype=torch.float64)
    before = set(select_experts(scores, bias, GROUPED)[0][0].tolist())
    after = {int(order[e]) for e in select_experts(scores[:, order], bias, GROUPED)[0][0]}
    assert before != after


def test_a_bfloat16_router_scores_in_float32():
    config = preset("tiny-moonlight")
    router = Router(config, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        router.weight.copy_(portable_normal(tuple(router.weight.shape), seed=2, stream="w"))
    x = portable_normal((64, config.hidden_size), seed=2, stream="x", dtype=torch.bfloat16)
    _, weights = router(x)
    assert weights.dtype is torch.float32
    assert router.e_score_correction_bias.dtype is torch.float32
    scores = torch.sigmoid(x.float() @ router.weight.float().T)
    expected = select_experts(scores, router.e_score_correction_bias, config)[1]
    torch.testing.assert_close(weights, expected, rtol=config.hidden_size * torch.finfo(torch.float32).eps, atol=0)
    narrow = torch.sigmoid(x @ router.weight.T).float()
    assert not torch.equal(select_experts(narrow, router.e_score_correction_bias, config)[1], weights)
