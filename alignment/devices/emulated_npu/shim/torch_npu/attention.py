"""``npu_fusion_attention``: scaled dot product attention in the kernel's layouts and mask modes."""

from __future__ import annotations

import torch

from torch_npu._operator import operator, unsupported

_NO_LIMIT = 2147483647
_COMPRESSED_MASK = 2048  # side of the triangular mask that modes 2 to 4 take whatever the sequence length
_STATISTICS_WIDTH = 8  # softmax max and sum are repeated to a 32-byte block of float32
_TO_BNSD = {"SBH": (1, 2, 0, 3), "BSH": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3)}


@operator(differentiable=True)
def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _NO_LIMIT,
    next_tockens: int = _NO_LIMIT,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """``torch_npu.npu_fusion_attention``: ``dropout(softmax(mask(scale * Q K^T + pse))) V``.

    The default ``scale`` is 1, not 1/sqrt(d). Layouts: SBH [s, b, n*d], BSH [b, s, n*d], BNSD, BSND, and TND [t, n, d]
    with ``actual_seq_qlen`` / ``actual_seq_kvlen`` the cumulative lengths (no leading 0). ``head_num`` counts query
    heads; keys and values may have fewer (GQA), and values may be narrower than keys. In ``atten_mask`` 1 hides.
    Without ``atten_mask`` nothing is hidden, whatever ``sparse_mode`` says. Modes:

    * 0: the mask as given, and only the band ``-pre_tockens <= j - i <= next_tockens`` is computed (origin top left);
    * 1: the mask as given;
    * 2: causal from the top left, 3: causal from the bottom right, 4: the band from the bottom right. These take the
      compressed mask, ``triu(ones(2048, 2048), 1)``.

    A row with nothing visible gives 0 where the kernel handles such rows (``inner_precise=2``; mode 3 with more queries
    than keys), and otherwise the mean of the values, as a finite mask value gives.

    Returns:
        (attention, softmax_max, softmax_sum, reserved, seed, offset, numels); the statistics are float32
        [b, n, s, 8], or [t, n, 8] for TND.

    Source: op-plugin docs, npu_fusion_attention. Not emulated: modes 5 to 8, ``padding_mask``, compressed alibi
    ``pse``, ``pse`` with TND.
    """
    _check_arguments(query, key, value, padding_mask, atten_mask, keep_prob, prefix, sparse_mode)
    hidden = _Mask(atten_mask, sparse_mode, pre_tockens, next_tockens, inner_precise)
    options = {"scale": scale, "keep_prob": keep_prob, "sink": sink}
    if input_layout == "TND":
        if pse is not None:
            raise unsupported("npu_fusion_attention", "pse with layout TND")
        _check_heads(query.shape[1], head_num, key.shape[1], input_layout)
        out, maximum, total = _varlen(query, key, value, actual_seq_qlen, actual_seq_kvlen, hidden, options)
    elif input_layout in _TO_BNSD:
        out, maximum, total = _batched(query, key, value, head_num, input_layout, pse, hidden, options)
    else:
        raise RuntimeError(f"npu_fusion_attention: input_layout is SBH, BSH, BNSD, BSND or TND, not {input_layout!r}")
    return out, maximum, total, torch.empty(0, device=query.device), 0, 0, 0


def _check_arguments(query, key, value, padding_mask, atten_mask, keep_prob, prefix, sparse_mode) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"npu_fusion_attention: query, key and value have one dtype, not {query.dtype}, {key.dtype}, {value.dtype}"
        )
    if not 0 < keep_prob <= 1:
        raise RuntimeError(f"npu_fusion_attention: keep_prob is in (0, 1], not {keep_prob}")
    if padding_mask is not None:
        raise unsupported("npu_fusion_attention", "padding_mask")
    if prefix is not None or sparse_mode not in range(5):
        raise unsupported("npu_fusion_attention", f"sparse_mode {sparse_mode} (or prefix)")
    if atten_mask is not None and atten_mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"npu_fusion_attention: atten_mask is bool or uint8, not {atten_mask.dtype}")


def _check_heads(found: int, head_num: int, kv_heads: int, layout: str) -> None:
    if found != head_num:
        raise RuntimeError(f"npu_fusion_attention: head_num is {head_num}, but query has {found} heads in {layout}")
    if head_num % kv_heads:
        raise RuntimeError(
            f"npu_fusion_attention: {head_num} query heads are no multiple of {kv_heads} key heads in {layout}"
        )


def _batched(query, key, value, head_num, layout, pse, hidden, options):
    merged = layout in ("SBH", "BSH")
    if merged:
        if query.shape[-1] % head_num:
            raise RuntimeError(
                f"npu_fusion_attention: hidden size {query.shape[-1]} is no multiple of {head_num} heads"
            )
        head_dim = query.shape[-1] // head_num
        kv_heads = key.shape[-1] // head_dim
        query = query.unflatten(-1, (head_num, -1))
        key, value = key.unflatten(-1, (kv_heads, -1)), value.unflatten(-1, (kv_heads, -1))
    to_bnsd = _TO_BNSD[layout]
    query, key, value = (tensor.permute(to_bnsd) for tensor in (query, key, value))
    _check_heads(query.shape[1], head_num, key.shape[1], layout)
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            "npu_fusion_attention: query, key and value do not fit together in "
            f"{layout}: [b, n, s, d] are {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if pse is not None and (pse.dim() != 4 or pse.shape[2] not in (1, query.shape[2]) or pse.shape[3] != key.shape[2]):
        raise unsupported("npu_fusion_attention", f"pse of shape {tuple(pse.shape)}")
    mask, zero_rows = hidden.of(query.shape[2], key.shape[2], query.device)
    out, maximum, total = _attend(query, key, value, mask, zero_rows, pse, **options)
    out = out.permute([to_bnsd.index(axis) for axis in range(4)])
    return out.flatten(-2) if merged else out, maximum, total


def _varlen(query, key, value, q_ends, kv_ends, hidden, options):
    if q_ends is None or kv_ends is None:
        raise RuntimeError("npu_fusion_attention: layout TND needs actual_seq_qlen and actual_seq_kvlen")
    if len(q_ends) != len(kv_ends):
        raise RuntimeError(
            f"npu_fusion_attention: actual_seq_qlen has {len(q_ends)} sequences, actual_seq_kvlen {len(kv_ends)}"
        )
    tokens, heads = query.shape[:2]
    q_start = kv_start = 0
    outputs, maxima, totals = [], [], []
    for q_end, kv_end in zip(q_ends, kv_ends, strict=True):
        if q_end <= q_start or kv_end <= kv_start:  # an empty sequence, or a trailing 0: not computed
            continue
        q = query[q_start:q_end].transpose(0, 1).unsqueeze(0)
        k, v = (tensor[kv_start:kv_end].transpose(0, 1).unsqueeze(0) for tensor in (key, value))
        mask, zero_rows = hidden.of(q.shape[2], k.shape[2], query.device)
        out, maximum, total = _attend(q, k, v, mask, zero_rows, None, **options)
        outputs.append(out[0].transpose(0, 1))
        maxima.append(maximum[0].transpose(0, 1))
        totals.append(total[0].transpose(0, 1))
        q_start, kv_start = q_end, kv_end
    if q_start != tokens:
        rest = tokens - q_start
        outputs.append(query.new_zeros(rest, heads, value.shape[-1]))
        maxima.append(query.new_zeros(rest, heads, _STATISTICS_WIDTH, dtype=torch.float32))
        totals.append(query.new_zeros(rest, heads, _STATISTICS_WIDTH, dtype=torch.float32))
    return torch.cat(outputs), torch.cat(maxima), torch.cat(totals)


class _Mask:
    """The mask of one call, cut for sequences of given lengths."""

    def __init__(self, atten_mask, sparse_mode, pre_tockens, next_tockens, inner_precise) -> None:
        self._given = None if atten_mask is None else atten_mask.bool()
        self._mode = sparse_mode
        self._pre, self._next = pre_tockens, next_tockens
        self._inner_precise = inner_precise

    def of(self, q_len: int, kv_len: int, device: torch.device) -> tuple[torch.Tensor | None, bool]:
        """(what is hidden [.., q_len, kv_len] or None, whether a row with nothing visible gives zeros)."""
        if self._given is None:
            return None, False
        zero_rows = self._inner_precise == 2 or (self._mode == 3 and q_len > kv_len)
        # j - i, the distance of a key from the diagonal
        distance = torch.arange(kv_len, device=device) - torch.arange(q_len, device=device).unsqueeze(-1)
        if self._mode in (0, 1):
            if self._given.shape[-2] < q_len or self._given.shape[-1] < kv_len:
                raise RuntimeError(
                    f"npu_fusion_attention: atten_mask {tuple(self._given.shape)} does not cover {q_len} queries "
                    f"and {kv_len} keys"
                )
            mask = self._given[..., :q_len, :kv_len]
            if self._mode == 0:
                mask = mask | (distance > self._next) | (distance < -self._pre)
            return mask, zero_rows
        self._check_compressed(max(q_len, kv_len))
        if self._mode == 2:
            return distance > 0, zero_rows
        distance = distance - (kv_len - q_len)  # from the diagonal that ends in the bottom right corner
        if self._mode == 3:
            return distance > 0, zero_rows
        return (distance > self._next) | (distance < -self._pre), zero_rows

    def _check_compressed(self, length: int) -> None:
        # The kernel reads any mask as if it were this one, so another mask is silently wrong on hardware.
        used = min(length, _COMPRESSED_MASK)
        side = (_COMPRESSED_MASK, _COMPRESSED_MASK)
        corner = self._given[:used, :used] if tuple(self._given.shape) == side else None
        if corner is None or not torch.equal(corner, torch.ones_like(corner).triu(1)):
            raise RuntimeError(
                f"npu_fusion_attention: sparse_mode {self._mode} takes the compressed mask triu(ones(2048, 2048), 1), "
                f"not a mask of shape {tuple(self._given.shape)}{'' if corner is None else ' with other values'}"
            )


def _attend(query, key, value, mask, zero_rows, pse, *, scale, keep_prob, sink):
    """(output [b, n, s, dv], softmax max and sum [b, n, s, 8]) of [b, n, s, d] inputs; softmax in float32."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    if pse is not None:
        scores = scores + pse.float()
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(torch.float32).min)
    maximum = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        maximum = torch.maximum(maximum, sink.detach().float().view(1, -1, 1, 1))
    exponentials = (scores - maximum).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.float().view(1, -1, 1, 1) - maximum).exp()
    weights = exponentials / total
    if zero_rows and mask is not None:
        weights = weights.masked_fill(mask.all(-1, keepdim=True), 0.0)
    if keep_prob < 1:
        weights = torch.nn.functional.dropout(weights, 1 - keep_prob, training=True)
    # The second product takes the weights in the input dtype, as the kernel's matrix unit does.
    out = torch.matmul(weights.to(value.dtype).float(), value.float()).to(query.dtype)
    statistics = (tensor.detach().expand(*tensor.shape[:-1], _STATISTICS_WIDTH) for tensor in (maximum, total))
    return out, *statistics
