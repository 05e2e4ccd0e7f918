"""RMSNorm: formula, precision, laws."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from alignment.models.norm import RMSNorm, rms_norm
from alignment.numerics.random import portable_normal

SIZE = 48
EPS = 1e-6
X = portable_normal((5, SIZE), seed=1, stream="x")
W = portable_normal(SIZE, seed=1, stream="w")


def test_a_hand_computed_case():
    """mean square of (3, 4) is 12.5; with ε = 0.5 the divisor is sqrt(13)."""
    x, w = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = torch.tensor([3.0, 8.0], dtype=torch.float64) / 13.0**0.5
    torch.testing.assert_close(rms_norm(x, w, eps=0.5), expected, rtol=4 * torch.finfo(torch.float64).eps, atol=0)


def test_it_is_torchs_rms_norm():
    theirs = nn.functional.rms_norm(X, (SIZE,), W, eps=EPS)
    torch.testing.assert_close(rms_norm(X, W, eps=EPS), theirs, rtol=SIZE * torch.finfo(torch.float64).eps, atol=0)


@settings(deadline=None)
@given(exponent=st.integers(-20, 20))
def test_scaling_the_input_and_epsilon_changes_no_bit(exponent):
    """rms_norm(αx; α²ε) = rms_norm(x; ε), exactly for powers of four (their roots are powers of two)."""
    scale = 4.0**exponent
    assert torch.equal(rms_norm(X * scale, W, eps=EPS * scale**2), rms_norm(X, W, eps=EPS))


def test_the_scale_law_rejects_epsilon_outside_the_root():
    def wrong(x, w, *, eps):
        return w * x / (x.square().mean(-1, keepdim=True).sqrt() + eps)

    scale = 4.0**-5
    assert not torch.equal(wrong(X * scale, W, eps=EPS * scale**2), wrong(X, W, eps=EPS))


def test_the_mean_is_not_subtracted():
    """LayerNorm gives the same for shifted inputs; RMSNorm must not."""
    assert not torch.equal(rms_norm(X + 3, W, eps=EPS), rms_norm(X, W, eps=EPS))
    layer_norm = nn.functional.layer_norm(X, (SIZE,), W, eps=EPS)
    assert not torch.allclose(rms_norm(X, W, eps=EPS), layer_norm)


def test_bfloat16_takes_its_mean_in_float32():
    x, w = X.bfloat16(), torch.ones(SIZE, dtype=torch.bfloat16)
    wide = x.float()
    expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()
    assert torch.equal(rms_norm(x, w, eps=EPS), expected)
    narrow = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    assert not torch.equal(narrow, expected)


def test_float64_stays_float64():
    assert torch.equal(rms_norm(X, W, eps=EPS), RMSNorm_of(W)(X))
    assert not torch.equal(rms_norm(X, W, eps=EPS), rms_norm(X.float(), W, eps=EPS))


def RMSNorm_of(weight):
    module = RMSNorm(SIZE, eps=EPS, dtype=weight.dtype, device="cpu")
    module.weight.data.copy_(weight)
    return module
