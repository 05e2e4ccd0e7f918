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
    return isinstance(getattr(layer, "weight", None), Tensor) and any(
        all(hasattr(module, name) for name in names) for names in DERIVED
    )


def absorbed_weight(module: nn.Module) -> tuple[Tensor, Tensor]:
    """The weight [heads · (nope + v), rank] that ``module`` computes with, and the tensor whose version is its own.

    Without derived tensors it is the layer's own weight.
    """
    for key, value in DERIVED:
        w_uk_t, w_uv = getattr(module, key, None), getattr(module, value, None)
        if isinstance(w_uk_t, Tensor) and isinstance(w_uv, Tensor):
            together = torch.cat([w_uk_t.detach(), w_uv.detach().transpose(1, 2)], dim=1)
            return together.flatten(0, 1), w_uk_t
    weight = module._modules[LAYER].weight
    return weight, weight
