"""The weight of a layer that its parent multiplies with other tensors itself and never calls.

The absorbed form of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.2) computes with two matrices that
were cut from ``kv_b_proj``. What a run computed with is those two, so they are put together again and recorded under
the layer's name: a capture of the expanded form has the same tensor there, and a stale copy is another one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAYER = "kv_b_proj"
DERIVED = (("w_uk_t", "w_uv"), ("W_UK_T", "W_UV"))
"""What holds W_UK transposed [heads, nope, rank] and W_UV [heads, rank, v]: here, and in vLLM and vLLM-Ascend."""


def absorbs(module: nn.Module) -> bool:
    """Whether ``module`` has a form in which it does without a call of :data:`LAYER`."""
    layer = module._modules.get(LAYER)
    return layer is not None and layer._parameters.get("weight") is not None and _derived(module)


def absorbed_parts(module: nn.Module) -> tuple[Tensor, ...]:
    """What ``module`` computes with: W_UK transposed and W_UV or, where nothing is derived, the layer's own weight."""
    for names in DERIVED:
        parts = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(part, Tensor) for part in parts):
            return parts
    return (module._modules[LAYER].weight,)


def joined(parts: tuple[Tensor, ...]) -> Tensor:
    """The weight [heads · (nope + v), rank] that ``parts`` are of."""
    if len(parts) == 1:
        return parts[0]
    w_uk_t, w_uv = (part.detach() for part in parts)
    return torch.cat([w_uk_t, w_uv.transpose(1, 2)], dim=1).flatten(0, 1)


def _derived(module: nn.Module) -> bool:
    return any(all(hasattr(module, name) for name in names) for names in DERIVED)
