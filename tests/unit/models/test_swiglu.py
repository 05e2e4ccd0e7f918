"""SwiGLU against numbers computed by hand."""

from __future__ import annotations

import math

import torch

from alignment.models.mlp import SwiGLU

EPS = torch.finfo(torch.float64).eps


def _one_wide(gate: float, up: float, down: float) -> SwiGLU:
    layer = SwiGLU(1, 1, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), (gate, up, down), strict=True):
            parameter.fill_(value)
    return layer


def test_the_gate_goes_through_silu_and_the_other_branch_does_not():
    """x = 1, gate 2, up 3, down 5: 5 · (2 σ(2)) · 3."""
    found = _one_wide(2.0, 3.0, 5.0)(torch.ones(1, dtype=torch.float64)).item()
    assert abs(found - 30 / (1 + math.exp(-2))) <= 4 * EPS * 30
    swapped = _one_wide(3.0, 2.0, 5.0)(torch.ones(1, dtype=torch.float64)).item()
    assert abs(swapped - 30 / (1 + math.exp(-2))) > 4 * EPS * 30


def test_parameters_have_the_published_names_and_no_bias():
    layer = SwiGLU(6, 10, dtype=torch.float64, device="cpu")
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "gate_proj.weight": (10, 6),
        "up_proj.weight": (10, 6),
        "down_proj.weight": (6, 10),
    }
