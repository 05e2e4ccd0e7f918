from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import philox, rounding

from alignment.errors import InputError
from alignment.rl.kl import ESTIMATORS, KlController, apply_kl_penalty, kl_penalty

LAW = settings(max_examples=40, deadline=None, derandomize=True)
VOCAB = 8


def distributions(seed):
    # Log-ratios stay below 2, where verl's clamp of k3 at 10 does not act.
    rng = philox(seed)
    logits = torch.from_numpy(rng.uniform(-0.5, 0.5, VOCAB)).requires_grad_()
    reference = torch.from_numpy(rng.uniform(-0.5, 0.5, VOCAB)).log_softmax(-1)
    return logits, logits.log_softmax(-1), reference


def exact_gradient(of, logits):
    (gradient,) = torch.autograd.grad(of, logits, retain_graph=True)
    return gradient


def expectation(log_p, reference, kind):
    """Σ_y π(y) · estimate(y): the mean over infinitely many samples."""
    return (log_p.exp().detach() * kl_penalty(log_p, reference, kind)).sum()


def check_unbiased(estimate, seed):
    _, log_p, reference = distributions(seed)
    true = float(scipy.stats.entropy(log_p.exp().detach().numpy(), reference.exp().numpy()))
    found = (log_p.exp() * estimate(log_p, reference)).sum().item()
    assert abs(found - true) <= rounding(torch.float64, VOCAB, (log_p - reference).abs().sum().item() + 1.0)


@pytest.mark.parametrize("kind", ["kl", "k1", "low_var_kl", "k3", "k1+", "k3+"])
@LAW
@given(seed=st.integers(0, 2**32))
def test_unbiased_estimators_have_the_kl_as_their_mean(kind, seed):
    check_unbiased(lambda p, q: kl_penalty(p, q, kind), seed)


@pytest.mark.parametrize("kind", ["k2", "abs"])
def test_the_check_sees_a_biased_estimator(kind):
    with pytest.raises(AssertionError):
        check_unbiased(lambda p, q: kl_penalty(p, q, kind), 1)


def test_the_check_sees_a_swapped_direction():
    with pytest.raises(AssertionError):
        check_unbiased(lambda p, q: kl_penalty(q, p, "k3"), 1)


def gradient_target(logits, log_p, reference, name):
    if name == "zero":
        return torch.zeros(VOCAB, dtype=torch.float64)
    if name == "reverse":  # ∇ KL(π‖π_ref)
        return exact_gradient((log_p.exp() * (log_p - reference)).sum(), logits)
    return exact_gradient((reference.exp() * (reference - log_p)).sum(), logits)  # ∇ KL(π_ref‖π)


GRADIENTS = {"k1": "zero", "k2": "reverse", "k3": "forward", "k1+": "reverse", "k3+": "reverse"}


def check_gradient(kind, target, seed):
    logits, log_p, reference = distributions(seed)
    found = exact_gradient(expectation(log_p, reference, kind), logits)
    wanted = gradient_target(logits, log_p, reference, target)
    scale = (log_p - reference).abs().exp().sum().item()
    assert (found - wanted).abs().max() <= rounding(torch.float64, VOCAB, scale)


@pytest.mark.parametrize(("kind", "target"), GRADIENTS.items())
@LAW
@given(seed=st.integers(0, 2**32))
def test_documented_gradients(kind, target, seed):
    check_gradient(kind, target, seed)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradient_check_sees_another_estimator(kind):
    other = {"zero": "reverse", "reverse": "forward", "forward": "zero"}[GRADIENTS[kind]]
    with pytest.raises(AssertionError):
        check_gradient(kind, other, 5)


def test_values_by_hand():
    p, q = torch.tensor([0.0, -1.0], dtype=torch.float64), torch.tensor([-1.0, -1.0], dtype=torch.float64)
    assert kl_penalty(p, q, "k1").tolist() == [1.0, 0.0]
    assert kl_penalty(q, p, "abs").tolist() == [1.0, 0.0]
    assert kl_penalty(p, q, "mse").tolist() == [0.5, 0.0]
    assert kl_penalty(p, q, "k3").tolist() == [math.expm1(-1.0) + 1.0, 0.0]


def test_verls_names():
    p, q = distributions(1)[1].detach(), distributions(1)[2]
    for names in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")):
        assert torch.equal(kl_penalty(p, q, names[0]), kl_penalty(p, q, names[1]))
    assert set(ESTIMATORS) == {"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"}
    for pair in (("k1", "k3"), ("k2", "k3"), ("k1", "k2"), ("k1", "abs")):
        assert not torch.equal(kl_penalty(p, q, pair[0]), kl_penalty(p, q, pair[1]))


def test_k3_is_never_negative_and_keeps_its_digits_near_zero():
    tiny = torch.tensor([1e-4, -1e-4, 0.0])
    value = kl_penalty(tiny, torch.zeros(3), "k3")
    assert (value >= 0).all()
    exact = torch.expm1(-tiny.double()) + tiny.double()
    naive = torch.exp(-tiny) - 1 + tiny
    eps = torch.finfo(torch.float32).eps
    # expm1 is rounded once and subtracting d cancels nothing of d²/2 beyond half an ulp of d
    assert (value.double() - exact).abs().max() <= eps * tiny.abs().max()
    assert (naive.double() - exact).abs().max() > eps * tiny.abs().max()


def test_verls_clamps_and_their_gradient():
    log_prob = torch.tensor([-100.0, -3.0, 0.0], requires_grad=True)
    value = kl_penalty(log_prob, torch.tensor([0.0, 0.0, -100.0]), "low_var_kl")
    assert value.tolist()[0] == 10.0 and value.tolist()[2] == 10.0
    value.sum().backward()
    assert log_prob.grad[0] == 0.0 and log_prob.grad[2] == 0.0 and log_prob.grad[1] == 0.0
    unclamped = torch.tensor([-1.0], requires_grad=True)
    kl_penalty(unclamped, torch.zeros(1), "k3").backward()
    assert unclamped.grad.item() == pytest.approx(1.0 - math.e, abs=4 * torch.finfo(torch.float32).eps)


def test_unknown_estimator():
    with pytest.raises(InputError, match="kl_penalty: unknown KL estimator; expected kl | k1 | .*; found full"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


def test_kl_in_reward_by_hand():
    scores = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    old = torch.tensor([[-1.0, -1.0, float("nan")], [-2.0, -9.0, -9.0]])
    ref = torch.tensor([[-2.0, -1.5, 0.0], [-1.0, 0.0, 0.0]])
    rewards, current = apply_kl_penalty(scores, old, ref, mask, kind="k1", kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 0.75, 0.0], [2.5, 0.0, 0.0]]
    assert current == (0.75 + -1.0) / 2
    assert rewards.dtype == scores.dtype


def test_controllers():
    fixed = KlController(kind="fixed", kl_coef=0.25)
    fixed.update(7.0, 10)
    assert fixed.value == 0.25
    adaptive = KlController(kind="adaptive", kl_coef=0.5, target_kl=0.1, horizon=100)
    adaptive.update(1.0, 50)
    assert adaptive.value == 0.5 * (1 + 0.2 * 50 / 100)
    adaptive.update(0.1, 50)
    assert adaptive.value == 0.5 * (1 + 0.2 * 50 / 100)
    adaptive.update(0.0, 50)
    assert adaptive.value == 0.5 * 1.1 * (1 - 0.2 * 50 / 100)
    with pytest.raises(InputError, match="unknown KL controller; expected fixed | adaptive; found pid"):
        KlController(kind="pid", kl_coef=1.0)
    with pytest.raises(InputError, match="an adaptive controller needs a target and a horizon"):
        KlController(kind="adaptive", kl_coef=1.0, horizon=0)


def test_abs_is_the_distance_in_numpy():
    p, q = distributions(9)[1].detach(), distributions(9)[2]
    assert np.array_equal(kl_penalty(p, q, "abs").numpy(), np.abs(p.numpy() - q.numpy()))
