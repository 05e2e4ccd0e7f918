"""Fused norms, SwiGLU and rotary embeddings."""

from __future__ import annotations

import torch

from torch_npu._operator import operator


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    if tuple(x.shape[x.dim() - gamma.dim() :]) != tuple(gamma.shape):
        raise RuntimeError(f"rms_norm: gamma {tuple(gamma.shape)} is not the trailing shape of x {tuple(x.shape)}")
    wide = x.float()
    normalised = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(wide.square().mean(normalised, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd.detach()


@operator(differentiable=True)
def npu_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch_npu.npu_rms_norm(self, gamma, epsilon=1e-06) -> (y, rstd)``.

    ``y = self / sqrt(mean(self^2) + epsilon) * gamma`` over the dimensions of ``gamma``; ``rstd`` is float32 with those
    dimensions kept as 1. Source: op-plugin docs, npu_rms_norm.
    """
    return _rms_norm(self, gamma, epsilon)


@operator(differentiable=False)
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``torch_npu.npu_add_rms_norm(x1, x2, gamma, epsilon=1e-06) -> (y, rstd, x)`` with ``x = x1 + x2``.

    The sum is rounded to the input dtype before it is normalised. No gradient.
    Source: op-plugin docs, npu_add_rms_norm.
    """
    x = x1 + x2
    y, rstd = _rms_norm(x, gamma, epsilon)
    return y, rstd, x


@operator(differentiable=True)
def npu_swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``torch_npu.npu_swiglu(self, dim=-1)``: ``silu(first half) * second half`` along ``dim``.

    Source: op-plugin docs, npu_swiglu.
    """
    if self.shape[dim] % 2:
        raise RuntimeError(f"npu_swiglu: dimension {dim} of {tuple(self.shape)} cannot be halved")
    gate, up = self.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(self.dtype)


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    return (x.float() * cos.float() + rotated * sin.float()).to(x.dtype)


def _rotated_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotated_interleave(x: torch.Tensor) -> torch.Tensor:
    even, odd = x.float()[..., ::2], x.float()[..., 1::2]
    return torch.stack((-odd, even), -1).flatten(-2)


@operator(differentiable=True)
def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch_npu.npu_rotary_mul(input, r1, r2, rotary_mode='half', rotate=None)``: ``x * cos + rotate(x) * sin``.

    ``r1`` and ``r2`` are cos and sin, broadcast against ``input`` [.., d]. ``half`` pairs (i, i + d/2), ``interleave``
    pairs (2i, 2i + 1); ``rotate`` [d, d], given instead, makes ``rotate(x) = x @ rotate`` and has no gradient.
    Source: op-plugin docs, npu_rotary_mul.
    """
    if rotate is not None:
        with torch.no_grad():
            return _rotary(input, r1, r2, input.float() @ rotate.float())
    if rotary_mode == "half":
        return _rotary(input, r1, r2, _rotated_half(input))
    if rotary_mode == "interleave":
        return _rotary(input, r1, r2, _rotated_interleave(input))
    raise RuntimeError(f"npu_rotary_mul: rotary_mode is 'half' or 'interleave', not {rotary_mode!r}")


@operator(differentiable=True)
def npu_rotary_position_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """``npu_rotary_position_embedding(x, cos, sin, mode=0)``: mode 0 is ``half``, mode 1 is ``interleave``.

    Source: MindSpeed docs, npu_rotary_position_embedding (called on ``torch_npu`` and on MindSpeed's own extension).
    """
    if mode not in (0, 1):
        raise RuntimeError(f"npu_rotary_position_embedding: mode is 0 (half) or 1 (interleave), not {mode!r}")
    return _rotary(x, cos, sin, _rotated_half(x) if mode == 0 else _rotated_interleave(x))
