"""From one reward per response to one per token, with DAPO's soft punishment of responses near the length limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.errors import InputError


def overlong_reward(length: int, *, max_response_length: int, buffer_len: int, penalty_factor: float = 1.0) -> float:
    """What a response of `length` tokens loses (DAPO, arXiv 2503.14476, equation 13; verl's DAPO reward manager).

    ``min(−(length − (max_response_length − buffer_len)) / buffer_len · penalty_factor, 0)``: nothing up to where the
    buffer begins, then linearly down to ``−penalty_factor`` at the limit.

    Raises:
        InputError: a buffer that does not lie inside the response, or a length beyond the limit.
    """
    if not 0 < buffer_len <= max_response_length:
        raise InputError(
            "the overlong buffer lies inside the response",
            where="overlong_buffer.len",
            expected=f"1 … {max_response_length}",
            found=buffer_len,
        )
    if not 0 <= length <= max_response_length:
        raise InputError(
            "a response is longer than the limit",
            where="overlong_reward",
            expected=f"0 … {max_response_length}",
            found=length,
        )
    exceeds = length - (max_response_length - buffer_len)
    return min(-exceeds / buffer_len * penalty_factor, 0.0)


def place_on_last_token(
    rewards: Sequence[float], response_mask: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Each sample's reward on its last response token, 0 elsewhere.

    Args:
        rewards: one per sample.
        response_mask: [b,r], one run of ones per row.
        dtype: of the result.

    Returns:
        ``token_level_scores`` [b,r] on the device of the mask.

    Raises:
        InputError: another number of rewards than samples, a reward that is not finite, or a response without tokens.
    """
    lengths = (response_mask != 0).sum(-1)
    if len(rewards) != len(lengths):
        raise InputError("there is one reward per sample", where="rewards", expected=len(lengths), found=len(rewards))
    values = torch.tensor([float(x) for x in rewards], dtype=torch.float64)
    for i in (~torch.isfinite(values)).nonzero().flatten().tolist():
        raise InputError("a reward is not finite", where=f"reward, sample {i}", found=rewards[i])
    for i in (lengths == 0).nonzero().flatten().tolist():
        raise InputError("a response has no token to carry its reward", where=f"reward, response_mask, sample {i}")
    scores = torch.zeros(response_mask.shape, dtype=dtype, device=response_mask.device)
    return scores.scatter_(1, (lengths - 1).unsqueeze(1), values.to(scores).unsqueeze(1))
