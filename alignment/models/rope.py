"""Rotary position embedding, plain and YaRN, in DeepSeek's interleaved pairing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.config import ModelConfig, YarnScaling
from alignment.models.precision import at_least_float32


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1, and 1 where nothing is extended (YaRN, arXiv:2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def table_mscale(scaling: YarnScaling | None) -> float:
    """What multiplies the cos/sin table: mscale(factor, mscale) / mscale(factor, mscale_all_dim).

    Without both fields it is YaRN's own mscale(factor, 1), as transformers and the published code have it.
    """
    if scaling is None:
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def softmax_mscale(scaling: YarnScaling | None) -> float:
    """What the softmax scale is multiplied with *twice*: mscale(factor, mscale_all_dim), or 1 without that field."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return yarn_mscale(scaling.factor, scaling.mscale_all_dim)


def correction_range(scaling: YarnScaling, *, width: int, theta: float) -> tuple[int, int]:
    """First and last rotary pair of YaRN's ramp: below it frequencies are kept, above it they are divided by
    ``factor``.

    Pair d turns r times over the original context where d = width · ln(L / (2πr)) / (2 ln θ); the ends are r =
    beta_fast (rounded down) and r = beta_slow (rounded up).
    """

    def pair(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), width - 1)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each rotary pair: θ^(-2i/width) for i in 0 … width/2 - 1, blended with 1/factor of it
    by YaRN.

    Returns:
        ``[qk_rope_head_dim / 2]`` float64 on the CPU.
    """
    width = config.qk_rope_head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    low, high = correction_range(scaling, width=width, theta=config.rope_theta)
    # A ramp of no width would divide by zero; the published code widens it by this much.
    length = (high - low) or 0.001
    interpolated = ((torch.arange(width // 2, dtype=torch.float64) - low) / length).clamp(0, 1)
    return frequencies * (1 - interpolated) + frequencies / scaling.factor * interpolated


class RotaryTable:
    """cos and sin for every position up to ``max_position_embeddings``, times :func:`table_mscale`.

    The angles are taken in float64 on the CPU and rounded once, so that every device and dtype starts from the same
    table; in float32 the angle itself would be off by up to 0.01 rad at position 163840. Computed at the first use.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each ``[b, s, qk_rope_head_dim / 2]``, in float32 or, for a float64 model, float64.

        Raises:
            InputError: a position outside 0 … ``max_position_embeddings`` - 1 (positions on a CPU only: elsewhere
            looking at
                them would wait for the device).
        """
        if position_ids.device.type == "cpu" and position_ids.numel():
            low, high = int(position_ids.min()), int(position_ids.max())
            if low < 0 or high >= self.config.max_position_embeddings:
                raise InputError(
                    "a position lies outside the rotary table",
                    where="position_ids",
                    expected=f"0 to {self.config.max_position_embeddings - 1} (max_position_embeddings)",
                    found=f"{low} to {high}",
                )
        key = (at_least_float32(dtype), position_ids.device)
        if key not in self._tables:
            positions = torch.arange(self.config.max_position_embeddings, dtype=torch.float64)
            angles = torch.outer(positions, inverse_frequencies(self.config))
            mscale = table_mscale(self.config.rope_scaling)
            self._tables[key] = tuple((part * mscale).to(key[0]).to(key[1]) for part in (angles.cos(), angles.sin()))
        cos, sin = self._tables[key]
        return cos[position_ids], sin[position_ids]

    def __getstate__(self) -> dict:
        return {"config": self.config, "_tables": {}}


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x0, x1), (x2, x3), … each by its angle.

    The pairing is DeepSeek's (and GPT-J's), not the half-split one of Llama. The *layout of the result* is that of
    the published code, which gathers the first members of all pairs and then the second ones; scores do not depend on
    it, a cache of rotated keys does.

    Args:
        x: ``[b, h, s, r]``.
        cos, sin: ``[b, s, r/2]``.

    Returns:
        ``[b, h, s, r]`` in ``x.dtype``.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
