"""The importance-weighted KL penalty, value and gradient, inside and outside its clamps."""

from __future__ import annotations

import math

import torch

from alignment.rl.weighted_kl import weighted_kl


def at(log_prob: float, ref: float, behaviour: float) -> tuple[float, float]:
    x = torch.tensor(log_prob, dtype=torch.float64, requires_grad=True)
    value = weighted_kl(x, torch.tensor(ref, dtype=torch.float64), torch.tensor(behaviour, dtype=torch.float64))
    return float(value.detach()), float(torch.autograd.grad(value, x)[0])


def test_inside_the_clamps_weight_and_kl_both_move():
    value, gradient = at(-1.0, -1.75, -0.5)
    w, d = math.exp(-0.5), -0.75
    assert math.isclose(value, w * (math.exp(d) - 1 - d))
    assert math.isclose(gradient, w * (math.exp(d) - 1 - d) + w * (1 - math.exp(d)))


def test_a_clamped_token_has_no_gradient_at_all():
    value, gradient = at(-1.0, -31.0, -3.0)
    assert gradient == 0.0 and value == 10.0
    value, gradient = at(-1.0, -31.0, 2.0)
    assert gradient == 0.0 and math.isclose(value, math.exp(-3.0) * (math.exp(-20) - 1 + 20))
    assert at(-4.0, -0.5, -4.0) == (10.0, 0.0)
