"""Fused MoE routing: gating, permutation of tokens to experts, and the way back."""

from __future__ import annotations

import torch

from torch_npu._operator import operator, unsupported


def _largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest along the last dimension; among equals the lower index, as the reference code does."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


# ---- gating


@operator(differentiable=False)
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``torch_npu.npu_moe_gating_top_k_softmax(x, finished=None, k=1) -> (y, expert_idx, row_idx)``.

    Softmax over the experts of ``x`` [rows, experts], then top-k; the weights are *not* renormalised. ``expert_idx``
    and ``row_idx`` are int32 [rows, k]; ``row_idx[r, j] = j * rows + r``. A finished row gets the expert ``experts``.
    Source: op-plugin docs, npu_moe_gating_top_k_softmax. No gradient.
    """
    probabilities = torch.softmax(x.float(), -1)
    chosen = _largest(probabilities, k)
    weights = probabilities.gather(-1, chosen).to(x.dtype)
    if finished is not None:
        chosen = chosen.masked_fill(finished.reshape(*chosen.shape[:-1], 1), x.shape[-1])
    rows = chosen[..., 0].numel()
    row_idx = torch.arange(rows * k, dtype=torch.int32, device=x.device).view(k, rows).t().contiguous()
    return weights, chosen.int(), row_idx.view(chosen.shape)


@operator(differentiable=True)
def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``torch_npu.npu_moe_gating_top_k(x, k, *, ...) -> (y, expert_idx, norm)``: DeepSeek-V3's router.

    ``norm = sigmoid(x)`` (``norm_type`` 1) or ``softmax(x)`` (0). Selection is on ``norm + bias``: the ``k_group`` best
    of ``group_count`` groups, a group scored by its maximum (``group_select_mode`` 0) or the sum of its two best (1),
    then the ``k`` best experts in them. vLLM-Ascend calls it with ``norm_type=1, group_select_mode=1, renorm=0``.
    ``y`` is ``norm`` *without* bias at those experts, for sigmoid divided by
    ``(sum + eps)``, times ``routed_scaling_factor``. ``expert_idx`` is int32 [rows, k]; ``norm`` is float32
    [rows, experts] if ``out_flag``, else unspecified (NaN here). ``bias`` has the dtype of ``x``.
    Source: op-plugin docs and tests, npu_moe_gating_top_k. Gradient of ``y`` with respect to ``x`` only.
    """
    rows, experts = x.shape
    if renorm != 0:
        raise unsupported("npu_moe_gating_top_k", f"renorm {renorm}")
    if norm_type not in (0, 1) or group_select_mode not in (0, 1):
        raise RuntimeError(
            f"npu_moe_gating_top_k: norm_type and group_select_mode are 0 or 1, not {norm_type}, {group_select_mode}"
        )
    if experts % group_count or not 1 <= k_group <= group_count or k > experts // group_count * k_group:
        raise RuntimeError(
            f"npu_moe_gating_top_k: cannot take {k} of {experts} experts from {k_group} of {group_count} groups"
        )
    if bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != (experts,)):
        raise RuntimeError(
            f"npu_moe_gating_top_k: bias is {x.dtype} [{experts}] like x, not {bias.dtype} {list(bias.shape)}"
        )
    norm = torch.sigmoid(x.float()) if norm_type == 1 else torch.softmax(x.float(), -1)
    selection = norm.detach()
    if bias is not None:
        selection = selection + bias.detach().float()
    if group_count > 1:
        grouped = selection.view(rows, group_count, -1)
        group_score = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros(rows, group_count, dtype=torch.bool, device=x.device)
        kept.scatter_(1, _largest(group_score, k_group), True)
        selection = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).view(rows, experts)
    chosen = _largest(selection, k)
    y = norm.gather(-1, chosen)
    if norm_type == 1:
        y = y / (y.sum(-1, keepdim=True) + eps)
    norm_out = norm.detach() if out_flag else torch.full_like(norm, torch.nan)
    return (y * routed_scaling_factor).to(x.dtype), chosen.int(), norm_out


# ---- tokens to experts and back (training)


@operator(differentiable=True)
def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch_npu.npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False)``.

    Repeats ``tokens`` [t, h] for their experts ``indices`` [t, k] (or [t]) and sorts them stably by expert, keeping the
    first ``num_out_tokens`` (all where None or 0). Returns (permuted [t*k, h], sorted_indices int32 [t*k]); the latter
    is the *inverse* permutation: where each (token, expert) went. Source: op-plugin tests,
    test_npu_moe_token_permute_and_unpermute.
    """
    if padded_mode:
        raise unsupported("npu_moe_token_permute", "padded_mode")
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    order = torch.argsort(indices.flatten(), stable=True)
    kept = order[:num_out_tokens] if num_out_tokens else order
    return tokens.index_select(0, kept // top_k), _inverse(order).int()


@operator(differentiable=True)
def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> torch.Tensor:
    """``torch_npu.npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, ...) -> [t, h]``.

    Gathers ``permuted_tokens`` by ``sorted_indices`` (of ``npu_moe_token_permute``) and sums each token's ``k`` rows,
    weighted by ``probs`` [t, k]; without ``probs`` k is 1. Rows dropped by ``num_out_tokens`` count as 0.
    Source: op-plugin tests, test_npu_moe_token_permute_and_unpermute.
    """
    if padded_mode:
        raise unsupported("npu_moe_token_unpermute", "padded_mode")
    top_k = 1 if probs is None else probs.shape[1]
    index = sorted_indices.long()
    dropped = index >= permuted_tokens.shape[0]
    rows = permuted_tokens.index_select(0, index.masked_fill(dropped, 0)).float()
    rows = rows.masked_fill(dropped.unsqueeze(-1), 0.0).view(-1, top_k, permuted_tokens.shape[-1])
    if probs is not None:
        rows = rows * probs.float().unsqueeze(-1)
    return rows.sum(1).to(permuted_tokens.dtype)


@operator(differentiable=True)
def npu_moe_token_permute_with_routing_map(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Megatron's permute: rows of ``tokens`` [t, h] in expert order of ``routing_map`` [t, e].

    Returns (permuted, permuted_probs or None, sorted_indices int32: where the rows of each token are, token by token).
    Source: op-plugin tests, test_npu_moe_token_permute_with_routing_map.
    """
    if drop_and_pad:
        raise unsupported("npu_moe_token_permute_with_routing_map", "drop_and_pad")
    by_expert = routing_map.bool().t().contiguous()
    token = torch.arange(tokens.shape[0], device=tokens.device).expand(by_expert.shape).masked_select(by_expert)
    permuted_probs = None if probs is None else probs.t().masked_select(by_expert)
    return tokens.index_select(0, token), permuted_probs, torch.argsort(token, stable=True).int()


@operator(differentiable=True)
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: list[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """The way back of ``npu_moe_token_permute_with_routing_map``: [t, h], each token's rows summed.

    ``probs`` [t, e] weighs the rows. Every token has the same number of experts. Source: op-plugin tests,
    test_npu_moe_token_unpermute_with_routing_map.
    """
    if drop_and_pad:
        raise unsupported("npu_moe_token_unpermute_with_routing_map", "drop_and_pad")
    rows = permuted_tokens.index_select(0, sorted_indices.long()).float()
    rows = rows.view(restore_shape[0], -1, permuted_tokens.shape[-1])
    if probs is not None:
        rows = rows * probs.float().masked_select(routing_map.bool()).view(restore_shape[0], -1, 1)
    return rows.sum(1).to(permuted_tokens.dtype)


# ---- tokens to experts and back (inference)


@operator(differentiable=False)
def npu_moe_init_routing(
    x: torch.Tensor, row_idx: torch.Tensor, expert_idx: torch.Tensor, active_num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``torch_npu.npu_moe_init_routing(x, row_idx, expert_idx, active_num)``.

    Sorts the (row, expert) pairs of ``row_idx``, ``expert_idx`` [rows, k] stably by expert. Returns
    (expanded_x [min(rows, active_num)*k, h], expanded_row_idx int32 [rows*k]: where pair ``row_idx`` went,
    expanded_expert_idx: the sorted experts). Source: op-plugin docs, npu_moe_init_routing.
    """
    rows, k = expert_idx.shape
    experts, order = torch.sort(expert_idx.flatten(), stable=True)
    source = row_idx.flatten()[order].long()
    active = min(active_num, rows) * k
    return x.index_select(0, source[:active] % rows), _inverse(source).int(), experts


@operator(differentiable=False)
def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] = (),
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``torch_npu.npu_moe_init_routing_v2`` without quantisation (``quant_mode=-1``) and without dropping.

    Sorts the pairs of ``expert_idx`` [rows, k] stably by expert; pairs outside ``active_expert_range`` [start, end)
    come last and are inactive. Returns:

    * expanded_x [rows*k, h], the active rows first (rows past them are unspecified; 0 here);
    * expanded_row_idx int32 [rows*k]: with ``row_idx_type`` 0 where each pair went (-1 if inactive), with 1 which pair
      is where;
    * tokens per expert of the range, int64: cumulative (``expert_tokens_num_type`` 0) or counts (1); empty without
      ``expert_tokens_num_flag``;
    * ``scale`` of each active row, if given.

    Source: op-plugin docs and tests, npu_moe_init_routing_v2.
    """
    if quant_mode != -1 or drop_pad_mode != 0 or expert_tokens_num_type not in (0, 1) or offset is not None:
        raise unsupported(
            "npu_moe_init_routing_v2",
            f"quant_mode {quant_mode}, drop_pad_mode {drop_pad_mode}, expert_tokens_num_type {expert_tokens_num_type}",
        )
    k = expert_idx.shape[1]
    start, end = active_expert_range if len(active_expert_range) else (0, expert_num)
    flat = expert_idx.flatten().long()
    active = (flat >= start) & (flat < end)
    order = torch.argsort(flat.masked_fill(~active, torch.iinfo(torch.int32).max), stable=True)
    total = int(active.sum())
    taken = total if active_num in (-1, 0) else min(active_num, total)
    expanded = torch.zeros(flat.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    expanded[:taken] = x.index_select(0, order[:taken] // k)
    if row_idx_type == 1:
        row_idx = order.int()
    else:
        row_idx = torch.full_like(order, -1)
        row_idx[order[:total]] = torch.arange(total, device=x.device)
    counts = torch.empty(0, dtype=torch.int64, device=x.device)
    if expert_tokens_num_flag:
        counts = torch.bincount(flat[active] - start, minlength=end - start)
        counts = counts.cumsum(0) if expert_tokens_num_type == 0 else counts
    scales = x.new_empty(0) if scale is None else scale[order[:taken] // k]
    return expanded, row_idx.int(), counts, scales


@operator(differentiable=False)
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: torch.Tensor, num_expert: int) -> torch.Tensor:
    """``torch_npu.npu_moe_compute_expert_tokens(sorted_experts, num_expert)``: end of each expert's rows, [num_expert].

    Source: op-plugin docs, npu_moe_compute_expert_tokens.
    """
    experts = torch.arange(num_expert, device=sorted_expert_for_source_row.device, dtype=torch.int64)
    ends = torch.searchsorted(sorted_expert_for_source_row.long(), experts, right=True)
    return ends.to(sorted_expert_for_source_row.dtype)


@operator(differentiable=False)
def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """``torch_npu.npu_moe_finalize_routing``: the experts' rows back to their tokens.

    ``out[r] = skip1[r] + skip2[r] + sum_j scales[r, j] * (expanded_permuted_rows[dst(r, j)] + bias[expert(r, j)])``.
    ``expanded_src_to_dst_row`` [rows*k] is ordered by column (``dst(r, j)`` at ``r + j*rows``) in ``drop_pad_mode`` 0
    and 1, by row (at ``r*k + j``) in 2 and 3; modes 1 and 3 take ``expanded_permuted_rows`` [e, c, h], and -1 for a
    dropped row. Without ``scales`` the weights are 1. Source: op-plugin docs, npu_moe_finalize_routing.
    """
    if drop_pad_mode not in range(4):
        raise RuntimeError(f"npu_moe_finalize_routing: drop_pad_mode is 0 to 3, not {drop_pad_mode}")
    hidden = expanded_permuted_rows.shape[-1]
    k = k if scales is None else scales.shape[1]
    index = expanded_src_to_dst_row.long()
    index = index.view(k, -1).t() if drop_pad_mode in (0, 1) else index.view(-1, k)
    dropped = index < 0
    flat = expanded_permuted_rows.reshape(-1, hidden).float()
    rows = flat[index.masked_fill(dropped, 0)].masked_fill(dropped.unsqueeze(-1), 0.0)
    if bias is not None:
        rows = rows + bias.float()[export_for_source_row.long()]
    if scales is not None:
        rows = rows * scales.float().unsqueeze(-1)
    out = rows.sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            out = out + skip.float()
    return out.to(expanded_permuted_rows.dtype)
