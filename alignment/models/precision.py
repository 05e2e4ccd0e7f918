"""Which dtype the sensitive parts of the model compute in."""

from __future__ import annotations

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, rope, router and softmax in a model of ``dtype``: float32, or float64 where that is
    ``dtype``.

    The published code (DeepSeek-V3, ``modeling_deepseek.py``; transformers ``modeling_deepseek_v3.py``) casts to
    float32 there. In float64 that cast would lose the precision the golden model exists for.
    """
    return torch.promote_types(dtype, torch.float32)
