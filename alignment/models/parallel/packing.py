"""Sequences packed into one row without padding, and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Some sequences one after the other in a row of T tokens.

    Attributes:
        input_ids: int64 ``[1, T]``.
        position_ids: int64 ``[1, T]``, from 0 within each sequence.
        segment_ids: int64 ``[1, T]``, the number of the sequence, which attention must not leave.
        labels: int64 ``[1, T]``, the next token of the same sequence; 0 at a sequence's last token.
        label_mask: int64 ``[1, T]``, one where the *label* counts.
        cu_seqlens: int64 ``[n + 1]``, where each sequence starts, and T (FlashAttention's ``cu_seqlens``).
    """

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    labels: Tensor
    label_mask: Tensor
    cu_seqlens: Tensor


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """``[0, l₀, l₀ + l₁, …]`` int64, over *all* sequences of the micro batch."""
    if not lengths or min(lengths) < 1:
        raise InputError("a packed sequence has tokens", where="lengths", expected="at least one each", found=lengths)
    return torch.tensor([0, *lengths]).cumsum(0)


def segments(cu_seqlens: Tensor) -> Tensor:
    """The number of its sequence for each of the T tokens, int64 ``[T]``."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def positions(cu_seqlens: Tensor) -> Tensor:
    """The place of each token in its own sequence, int64 ``[T]``."""
    return torch.arange(int(cu_seqlens[-1])) - cu_seqlens[segments(cu_seqlens)]


def shift_within(values: Tensor, cu_seqlens: Tensor, *, fill: int = 0) -> Tensor:
    """What follows each token in its own sequence: ``values[..., i + 1]``, and ``fill`` at a sequence's last token.

    Labels and the mask of the labels are both made by it, so that a mask counts a token where it is predicted.
    """
    shifted = torch.full_like(values, fill)
    shifted[..., :-1] = values[..., 1:]
    shifted[..., cu_seqlens[1:] - 1] = fill
    return shifted


def pack(input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Pack:
    """The real tokens of every row, in order.

    Args:
        input_ids, attention_mask: ``[b, s]``, padding on either side.
        loss_mask: ``[b, s]``, one on the tokens that are trained (as tokens, not as places that predict them).
    """
    real = attention_mask != 0
    cu_seqlens = cumulative_lengths(real.sum(1).tolist())
    flat_ids, flat_mask = input_ids[real][None], loss_mask[real][None]
    return Pack(
        input_ids=flat_ids,
        position_ids=positions(cu_seqlens)[None],
        segment_ids=segments(cu_seqlens)[None],
        labels=shift_within(flat_ids, cu_seqlens),
        label_mask=shift_within(flat_mask.long(), cu_seqlens),
        cu_seqlens=cu_seqlens,
    )


def unpack(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Values of the packed row ``[1, T, …]`` back at their places ``[b, s, …]``; 0 at padding."""
    result = values.new_zeros(*attention_mask.shape, *values.shape[2:])
    result[attention_mask != 0] = values[0]
    return result


def packed_logits(model: CausalLM, packed: Pack) -> Tensor:
    """Logits ``[1, T, v]`` of the packed row, each sequence for itself."""
    return model(packed.input_ids, position_ids=packed.position_ids, segment_ids=packed.segment_ids)
