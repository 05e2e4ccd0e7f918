"""Gated delta rule: the recurrent attention of hybrid models, over packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.errors import InputError


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """o_t = S_t q_t with S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ (Yang et al. 2024, arXiv:2412.06464,
    equation 10).

    The state S starts from zero at the first token of *every* sequence of the pack.

    Args:
        query, key: ``[h, t, d]``; value: ``[h, t, v]``.
        decay: α ``[h, t]`` in (0, 1]; beta: ``[h, t]`` in [0, 1].
        cu_seqlens: int64 ``[n + 1]``, where each sequence starts, and t; one sequence by default.

    Returns:
        ``[h, t, v]``.

    Raises:
        InputError: ``cu_seqlens`` does not run from 0 to t.
    """
    heads, tokens, width = key.shape
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or sorted(set(bounds)) != bounds:
        raise InputError(
            "the sequences do not fill the pack",
            where="cu_seqlens",
            expected=f"rising from 0 to {tokens}",
            found=bounds,
        )
    outputs = []
    for start, end in zip(bounds, bounds[1:]):
        state = query.new_zeros(heads, value.shape[-1], width)
        for t in range(start, end):
            k, v, b = key[:, t], value[:, t], beta[:, t, None, None]
            state = state * decay[:, t, None, None]
            recalled = torch.einsum("hvd,hd->hv", state, k)
            state = state + b * torch.einsum("hv,hd->hvd", v - recalled, k)
            outputs.append(torch.einsum("hvd,hd->hv", state, query[:, t]))
    return torch.stack(outputs, dim=1)
