"""The attention every layer computes, in every form, and the masks it computes it under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.precision import at_least_float32


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What one call of :func:`scaled_dot_product` was given."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor


_observers: list[list[AttentionCall]] = []


@contextmanager
def observe_attention() -> Iterator[list[AttentionCall]]:
    """Collect every call of :func:`scaled_dot_product`, in order: one per layer and forward.

    What is read here is what the computation used, whatever attribute a module may show.
    """
    calls: list[AttentionCall] = []
    _observers.append(calls)
    try:
        yield calls
    finally:
        _observers[:] = [seen for seen in _observers if seen is not calls]


def scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor) -> Tensor:
    """softmax(scale · q kᵀ, over the allowed keys) v: the one place where the model attends.

    Layers look this function up in its module at every call, so replacing ``attention.scaled_dot_product`` replaces
    the kernel of the whole model. The softmax is computed in float32 at least and rounded to the dtype of the query.
    A query that may attend to nothing (padding) gets zeros.

    Args:
        query: ``[b, h, s, d]``.
        key: ``[b, h or 1, t, d]``; one head is shared by all (the absorbed form).
        value: ``[b, h or 1, t, v]``.
        scale: what the scores are multiplied with; see :func:`alignment.models.mla.softmax_scale`.
        mask: bool ``[b, 1, s, t]``, true where the query may attend to the key.

    Returns:
        ``[b, h, s, v]``.
    """
    for calls in _observers:
        calls.append(AttentionCall(query=query, key=key, value=value, scale=scale, mask=mask))
    scores = _matmul_by_head(query, key.transpose(-1, -2)) * scale
    scores = scores.to(at_least_float32(query.dtype))
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    # The product with the mask makes the rows without any allowed key zero instead of uniform.
    weights = torch.softmax(scores, dim=-1) * mask
    return _matmul_by_head(weights.to(query.dtype), value)


def _matmul_by_head(rows: Tensor, matrix: Tensor) -> Tensor:
    """``[b, h, s, d]`` times ``[b, h or 1, d, t]``; broadcasting would copy a shared matrix to every head."""
    if matrix.shape[1] == rows.shape[1]:
        return torch.matmul(rows, matrix)
    return torch.matmul(rows.flatten(1, 2), matrix.squeeze(1)).unflatten(1, rows.shape[1:3])


def attention_mask_from(
    key_mask: Tensor, *, query_slots: int | None = None, segment_ids: Tensor | None = None
) -> Tensor:
    """Which query may attend to which key: real tokens, not later than itself, of its own segment.

    Causality is by *slot* (place in the row), not by position id: left padding shifts positions, packing restarts them.

    Args:
        key_mask: ``[b, t]``, non-zero where the slot holds a real token.
        query_slots: how many of the last slots are queries; all of them by default.
        segment_ids: integers ``[b, t]``; slots of equal id form one packed sequence.

    Returns:
        bool ``[b, 1, s, t]``.
    """
    batch, keys = key_mask.shape
    slots = torch.arange(keys, device=key_mask.device)
    queries = slots[keys - (query_slots if query_slots is not None else keys) :]
    allowed = (slots[None, :] <= queries[:, None])[None] & key_mask.bool()[:, None, :]
    if segment_ids is not None:
        if segment_ids.shape != key_mask.shape:
            raise InputError(
                "segment_ids must have the shape of the tokens",
                where="segment_ids",
                expected=tuple(key_mask.shape),
                found=tuple(segment_ids.shape),
            )
        allowed = allowed & (segment_ids[:, queries, None] == segment_ids[:, None, :])
    return allowed.unsqueeze(1)


def default_positions(mask: Tensor, segment_ids: Tensor | None = None) -> Tensor:
    """Position of each token among the real tokens of its row and segment, from 0; padding repeats its predecessor's.

    Args:
        mask: ``[b, s]``, non-zero where the token is real.
        segment_ids: ``[b, s]``; each segment must be one run of slots.

    Returns:
        int64 ``[b, s]``.
    """
    real = mask.long()
    counted = real.cumsum(-1) - 1
    if segment_ids is not None:
        starts = torch.ones_like(segment_ids, dtype=torch.bool)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        before = counted - real + 1
        counted = counted - torch.where(starts, before, torch.zeros_like(before)).cummax(-1).values
    return counted.clamp_min(0)
