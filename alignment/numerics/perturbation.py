"""Benign perturbations: what measured noise is measured with."""

from __future__ import annotations

import torch

from alignment.errors import InputError
from alignment.numerics.random import portable_integers


def one_ulp(x: torch.Tensor, *, seed: int, stream: str = "one-ulp") -> torch.Tensor:
    """``x`` with every element moved to the next representable value of its dtype, up or down at random.

    The direction is a portable coin per element in row-major order. NaN, infinity, the extremes next to infinity and
    exact zeros (masks, padding, structural zeros) stay as they are. Works for float64, float32, float16 and bfloat16 on
    any device; the result is on the device of ``x``.

    Raises:
        InputError: another dtype.
    """
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(x.element_size())
    if not x.dtype.is_floating_point or integer is None:
        raise InputError("one ulp is defined for 16-, 32- and 64-bit floats", where="one_ulp", found=x.dtype)
    host = x.detach().cpu().contiguous()
    step = 2 * portable_integers(0, 2, tuple(host.shape), seed=seed, stream=stream) - 1
    # in sign and magnitude the neighbours of a nonzero finite value are one pattern away, and ±1 keeps the sign bit
    bits = host.view(integer)
    moved = (bits + step.to(integer)).view(x.dtype)
    keep = (host == 0) | ~torch.isfinite(host) | ~torch.isfinite(moved)
    return torch.where(keep, host, moved).to(x.device)
