"""Rotary embedding by complex numbers: a channel pair is a number that is multiplied with e^{iθ}."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alignment.models.config import ModelConfig


def mscale(factor: float, coefficient: float) -> float:
    """0.1 · coefficient · ln(factor) + 1 (YaRN, arXiv:2309.00071, equation 22), 1 without extension."""
    return 1.0 + 0.1 * coefficient * math.log(factor) if factor > 1 else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """(nope + rope)^-1/2 · m(factor, mscale_all_dim)² (DeepSeek-V3, ``modeling_deepseek.py``)."""
    scale = 1.0 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    yarn = config.rope_scaling
    return scale * mscale(yarn.factor, yarn.mscale_all_dim or 0.0) ** 2 if yarn else scale


def angles(positions: Tensor, config: ModelConfig) -> Tensor:
    """Angle of every pair at every position, float64 ``[…, r/2]``; YaRN's ramp pair by pair as the paper words it."""
    width, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    frequencies = []
    for pair in range(width // 2):
        frequency = math.exp(-2 * pair / width * math.log(theta))
        if yarn:
            ends = [
                width / 2 * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)
                for turns in (yarn.beta_fast, yarn.beta_slow)
            ]
            low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), width - 1)
            share = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
            frequency = frequency / yarn.factor * share + frequency * (1 - share)
        frequencies.append(frequency)
    return positions.double()[..., None] * torch.tensor(frequencies, dtype=torch.float64)


def amplitude(config: ModelConfig) -> float:
    """What cos and sin are multiplied with: m(factor, mscale) / m(factor, mscale_all_dim)."""
    yarn = config.rope_scaling
    if not yarn:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    return mscale(yarn.factor, 1.0)


def turned(x: Tensor, angle: Tensor, *, size: float = 1.0, interleaved: bool = True) -> Tensor:
    """``x`` ``[…, r]`` with every pair turned by ``angle`` ``[…, r/2]`` and multiplied by ``size``.

    Returns:
        First members of all pairs, then second ones.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    number = torch.complex(first, second) * torch.polar(torch.full_like(angle, size), angle)
    return torch.cat([number.real, number.imag], dim=-1)
