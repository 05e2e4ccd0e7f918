"""Who is in a micro batch: a content hash per sample, by which it is found again in any order and padding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alignment.capture.reduction import Samples


def sample_keys(input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[str, ...]:
    """A hash of the real tokens of every row [b, s]; equal rows are told apart by their order (``…#1``)."""
    ids = input_ids.detach().to("cpu", torch.int64)
    mask = None if attention_mask is None else attention_mask.detach().to("cpu") != 0
    keys, met = [], {}
    for i, row in enumerate(ids):
        real = row if mask is None else row[mask[i]]
        key = hashlib.sha256(real.contiguous().numpy().tobytes()).hexdigest()[:16]
        met[key] = met.get(key, -1) + 1
        keys.append(key if not met[key] else f"{key}#{met[key]}")
    return tuple(keys)


def samples_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Samples | None:
    """The samples that a model was called with: ``input_ids`` by name, or the first matrix of integers.

    The mask is ``attention_mask`` where it has the same shape. None where the call has no token ids.
    """
    ids = kwargs.get("input_ids")
    if not _is_ids(ids):
        ids = next((a for a in args if _is_ids(a)), None)
    if ids is None:
        return None
    mask = kwargs.get("attention_mask")
    if not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        mask = next((a for a in args if isinstance(a, Tensor) and a is not ids and _is_mask(a, ids)), None)
    b, s = ids.shape
    bounds = ((0, s),) * b
    if mask is not None:
        real = mask.detach().to("cpu") != 0
        positions = torch.arange(s)
        first = torch.where(real, positions, s).amin(1).tolist()
        last = torch.where(real, positions, -1).amax(1).tolist()
        bounds = tuple((min(low, high + 1), high + 1) for low, high in zip(first, last))
    return Samples(keys=sample_keys(ids, mask), bounds=bounds, shape=(b, s))


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32) and len(value) > 0
    )


def _is_mask(value: Tensor, ids: Tensor) -> bool:
    if value.shape != ids.shape or value.dtype not in (torch.bool, torch.int64, torch.int32):
        return False
    return value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())
