"""Rotary embedding of the first channels of a head, in either pairing: what models without latent attention do."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.precision import at_least_float32


def partial_tables(position_ids: Tensor, *, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[b, s, rotary_dim / 2]`` in float64: the frequencies are those of ``rotary_dim`` channels,
    θ^(-2i / rotary_dim), not those of the head.
    """
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = position_ids.double().unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def rotate_partially(x: Tensor, cos: Tensor, sin: Tensor, *, rotary_dim: int, interleaved: bool) -> Tensor:
    """Rotate the first ``rotary_dim`` channels of every head and pass the others through.

    ``partial_rotary_factor`` of GLM, Phi and NeoX models is ``rotary_dim / d``.

    Args:
        x: ``[b, h, s, d]``.
        cos, sin: ``[b, s, rotary_dim / 2]``.
        interleaved: pair (2i, 2i + 1), else (i, i + rotary_dim / 2); the result keeps the layout of ``x``.

    Raises:
        InputError: an odd ``rotary_dim``, or one wider than the head.
    """
    if rotary_dim % 2 or not 0 < rotary_dim <= x.shape[-1]:
        raise InputError(
            "only pairs of a head's channels rotate",
            where="rotary_dim",
            expected=f"an even number up to {x.shape[-1]}",
            found=rotary_dim,
        )
    rotated, passed = x.split([rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
    wide = rotated.to(at_least_float32(x.dtype))
    cos, sin = cos.unsqueeze(1).to(wide.dtype), sin.unsqueeze(1).to(wide.dtype)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned.to(x.dtype), passed], dim=-1)
