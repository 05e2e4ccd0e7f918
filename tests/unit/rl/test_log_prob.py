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
from alignment.rl.log_prob import (
    chunked_log_probs_and_entropy,
    linear_log_probs_and_entropy,
    log_probs_and_entropy,
    require_finite,
    response_logits,
)

LAW = settings(max_examples=40, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32)
B, R, V, H = 3, 4, 11, 5


def case(seed, dtype=torch.float64):
    rng = philox(seed)
    logits = torch.from_numpy(3.0 * rng.standard_normal((B, R, V))).to(dtype)
    return logits, torch.from_numpy(rng.integers(0, V, (B, R)))


def check_against_scipy(compute, seed, temperature):
    logits, labels = case(seed)
    log_probs, entropy = compute(logits, labels, temperature=temperature)
    scaled = logits.numpy() / temperature
    expected = np.take_along_axis(scipy.special.log_softmax(scaled, -1), labels.numpy()[..., None], -1)[..., 0]
    bound = rounding(torch.float64, V, float(np.abs(scaled).max()) * V)
    assert np.abs(log_probs.numpy() - expected).max() <= bound
    assert np.abs(entropy.numpy() - scipy.stats.entropy(scipy.special.softmax(scaled, -1), axis=-1)).max() <= bound


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@LAW
@given(seed=SEEDS)
def test_against_scipy(temperature, seed):
    check_against_scipy(log_probs_and_entropy, seed, temperature)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logits, labels, temperature: log_probs_and_entropy(logits, labels),
        lambda logits, labels, temperature: log_probs_and_entropy(logits * temperature, labels),
        lambda logits, labels, temperature: log_probs_and_entropy(logits, labels.roll(1, 1), temperature=temperature),
    ],
    ids=["temperature ignored", "temperature multiplied", "labels shifted"],
)
def test_the_check_sees_a_wrong_computation(wrong):
    with pytest.raises(AssertionError):
        check_against_scipy(wrong, 1, 0.7)


def test_ranges_hold_to_the_bit():
    """Log-probs ≤ 0 and entropies ≥ 0 even where one logit towers over the others, in float32 and from bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        logits, labels = case(3, dtype)
        for spread in (0.0, 1.0, 30.0, 1000.0):
            log_probs, entropy = log_probs_and_entropy(logits * spread, labels)
            assert log_probs.dtype == entropy.dtype == torch.float32
            assert (log_probs <= 0).all() and (entropy >= 0).all()
            assert torch.isfinite(log_probs).all() and torch.isfinite(entropy).all()


def test_logits_are_widened_before_the_temperature():
    logits, labels = case(4, torch.bfloat16)
    assert torch.equal(
        log_probs_and_entropy(logits, labels, temperature=0.7)[0],
        log_probs_and_entropy(logits.float(), labels, temperature=0.7)[0],
    )
    assert not torch.equal(
        log_probs_and_entropy(logits, labels, temperature=0.7)[0], log_probs_and_entropy(logits / 0.7, labels)[0]
    )


def test_uniform_and_forbidden_tokens_by_hand():
    logits = torch.tensor([[[0.0, 0.0, -math.inf, -math.inf]]], dtype=torch.float64, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([[1]]))
    assert (log_probs.item(), entropy.item()) == (-math.log(2.0), math.log(2.0))
    (log_probs + entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.tolist() == [[[-0.5, 0.5, 0.0, 0.0]]]


@LAW
@given(seed=SEEDS)
def test_gradients_are_softmax_minus_one_hot_and_the_entropys(seed):
    logits, labels = case(seed)
    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, labels)
    p = torch.softmax(logits.detach(), -1)
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)
    bound = rounding(torch.float64, V, float(logits.detach().abs().max()) * V)
    assert (gradient - (torch.nn.functional.one_hot(labels, V) - p)).abs().max() <= bound
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert (gradient + p * (torch.log(p) + entropy.detach().unsqueeze(-1))).abs().max() <= bound


@LAW
@given(seed=SEEDS, shift=st.floats(-50, 50))
def test_a_shift_of_all_logits_changes_nothing(seed, shift):
    logits, labels = case(seed)
    plain, moved = log_probs_and_entropy(logits, labels), log_probs_and_entropy(logits + shift, labels)
    bound = rounding(torch.float64, V, (float(logits.abs().max()) + abs(shift)) * V)
    for a, b in zip(plain, moved):
        assert (a - b).abs().max() <= bound


def gradients(compute, *leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    log_probs, entropy = compute(*leaves)
    (log_probs.sum() + 0.5 * entropy.sum()).backward()
    return log_probs.detach(), entropy.detach(), [x.grad for x in leaves]


@pytest.mark.parametrize("chunk_size", [1, 5, 12, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_bitwise_the_whole(chunk_size, dtype):
    logits, labels = case(7, dtype)
    whole = gradients(lambda x: log_probs_and_entropy(x, labels, temperature=0.7), logits)
    parts = gradients(
        lambda x: chunked_log_probs_and_entropy(x, labels, temperature=0.7, chunk_size=chunk_size), logits
    )
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1]) and torch.equal(whole[2][0], parts[2][0])
    assert parts[0].shape == labels.shape
    with torch.no_grad():
        assert torch.equal(
            chunked_log_probs_and_entropy(logits, labels, temperature=0.7, chunk_size=chunk_size)[0], whole[0]
        )


def check_fused(seed, chunk_size, compute=linear_log_probs_and_entropy):
    rng = philox(seed)
    hidden, weight = torch.from_numpy(rng.standard_normal((B, R, H))), torch.from_numpy(rng.standard_normal((V, H)))
    labels = torch.from_numpy(rng.integers(0, V, (B, R)))
    whole = gradients(lambda h, w: log_probs_and_entropy(h @ w.t(), labels, temperature=0.7), hidden, weight)
    fused = gradients(lambda h, w: compute(h, w, labels, temperature=0.7, chunk_size=chunk_size), hidden, weight)
    magnitude = float(hidden.abs().sum() * weight.abs().max()) / 0.7
    for a, b in ((whole[0], fused[0]), (whole[1], fused[1]), *zip(whole[2], fused[2])):
        assert (a - b).abs().max() <= rounding(torch.float64, H * V * B * R, magnitude)


@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_fused_is_the_plain_form(chunk_size):
    check_fused(1, chunk_size)


def test_fused_check_sees_a_dropped_chunk():
    def dropping(hidden, weight, labels, **how):
        log_probs, entropy = linear_log_probs_and_entropy(hidden, weight, labels, **how)
        keep = torch.ones_like(log_probs)
        keep.view(-1)[-1] = 0.0
        return log_probs * keep, entropy

    with pytest.raises(AssertionError):
        check_fused(1, 5, dropping)


def test_response_positions():
    """The logits at p − 1 … p + r − 2 predict the response; one further right is the classic mistake."""
    p, r = 3, 2
    logits = torch.zeros(1, p + r, p + r)
    for position in range(p + r):
        logits[0, position, position] = 1.0
    assert response_logits(logits, r).argmax(-1).tolist() == [[p - 1, p]]
    assert response_logits(logits, r).data_ptr() == logits[:, p - 1].data_ptr()
    for bad in (0, p + r, -1):
        with pytest.raises(
            InputError,
            match=f"the first response token needs a token before it; expected 1 … 4 response tokens in 5 "
            f"positions; found {bad}",
        ):
            response_logits(logits, bad)


def test_log_probs_of_a_response_sum_to_its_log_probability():
    """A bigram model by hand: p(next = c | previous = c) = 0.5, everything else shares the rest."""
    words = 5
    table = torch.full((words, words), 0.125, dtype=torch.float64)
    table.fill_diagonal_(0.5)
    input_ids = torch.tensor([[1, 2, 2, 3, 3]])
    log_probs, _ = log_probs_and_entropy(response_logits(torch.log(table)[input_ids], 3), input_ids[:, 2:])
    assert torch.exp(log_probs.sum()).item() == pytest.approx(0.5 * 0.125 * 0.5, abs=8 * torch.finfo(torch.float64).eps)


def test_nan_logits_name_the_stage():
    logits = torch.zeros(2, 3, 4)
    require_finite(logits, stage="old_log_prob")
    logits[1, 2, 0] = float("nan")
    with pytest.raises(
        InputError,
        match=r"old_log_prob, sample 1, token 2: the logits are not finite; expected finite numbers; found nan "
        r"\(1 of 6 tokens\)",
    ):
        require_finite(logits, stage="old_log_prob")
    mask = torch.ones(2, 3)
    mask[1, 2] = 0
    require_finite(logits, stage="old_log_prob", mask=mask)
    with pytest.raises(
        InputError,
        match="ref_log_prob, sample 0, token 1: the log-probs are not finite; expected finite numbers; found inf",
    ):
        require_finite(torch.tensor([[0.0, math.inf]]), stage="ref_log_prob")
    forbidden = torch.zeros(1, 1, 3)
    forbidden[..., 0] = -math.inf
    require_finite(forbidden, stage="rollout")
    with pytest.raises(InputError, match="rollout, sample 0, token 0: the logits are not finite.*found -inf"):
        require_finite(torch.full((1, 1, 3), -math.inf), stage="rollout")


def test_errors():
    logits, labels = case(1)
    with pytest.raises(InputError, match="the temperature has to be positive; expected > 0; found 0.0"):
        log_probs_and_entropy(logits, labels, temperature=0.0)
    with pytest.raises(InputError, match=r"there is one label per distribution; expected \[3, 4\]; found \[3, 3\]"):
        log_probs_and_entropy(logits, labels[:, 1:])
    with pytest.raises(InputError, match="a chunk has at least one token; expected ≥ 1; found 0"):
        chunked_log_probs_and_entropy(logits, labels, chunk_size=0)
