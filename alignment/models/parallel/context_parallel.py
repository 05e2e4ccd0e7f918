"""Context parallelism: a sequence over several ranks in zig-zag chunks, with ring attention or Ulysses.

A sequence is cut into 2·cp chunks and rank r holds chunks r and 2·cp − 1 − r, so that causal work is equal (Megatron
Core and Transformer Engine cut so). A pack is cut sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.mla import AttentionContext, softmax_scale
from alignment.models.parallel import collectives, packing


def local_indices(cu_seqlens: Tensor, cp: int, rank: int) -> Tensor:
    """Which of the T tokens of a pack rank ``rank`` holds: its two chunks of every sequence, int64 ``[T / cp]``.

    They are offsets into the *pack*: with ``cu_seqlens`` [0, 4, 8] and cp = 2, rank 0 holds [0, 3, 4, 7].

    Raises:
        InputError: a sequence whose length is no multiple of 2·cp.
    """
    rows = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        if (end - start) % (2 * cp):
            raise InputError(
                "a sequence is cut into two chunks per rank",
                where="cu_seqlens",
                expected=f"lengths that are multiples of {2 * cp}",
                found=end - start,
            )
        chunks = torch.arange(start, end).chunk(2 * cp)
        rows += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(rows)


def shard(whole: Tensor, cu_seqlens: Tensor, cp: int, *, dim: int = 1) -> list[Tensor]:
    """Every rank's tokens of ``whole``, along the sequence dimension ``dim``."""
    return [whole.index_select(dim, local_indices(cu_seqlens, cp, rank)) for rank in range(cp)]


def unshard(parts: Sequence[Tensor], cu_seqlens: Tensor, *, dim: int = 1) -> Tensor:
    """The inverse of :func:`shard`."""
    order = torch.cat([local_indices(cu_seqlens, len(parts), rank) for rank in range(len(parts))])
    return torch.cat(list(parts), dim=dim).index_select(dim, order.argsort())


def local_rope(cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cp: int) -> list[tuple[Tensor, Tensor]]:
    """Each rank's rows of the tables ``[1, T, r/2]`` of the whole pack, along the *sequence*."""
    return list(zip(shard(cos, cu_seqlens, cp), shard(sin, cu_seqlens, cp)))


def local_labels(input_ids: Tensor, cu_seqlens: Tensor, cp: int) -> list[Tensor]:
    """The next token of each of a rank's tokens: shifted in the whole pack *first*, then sharded."""
    return shard(packing.shift_within(input_ids, cu_seqlens), cu_seqlens, cp)


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Attention over some of the keys: normalised output ``[b, h, s, v]`` and log-sum-exp ``[b, h, s]`` of its
    scores.
    """

    out: Tensor
    lse: Tensor


def partial_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor) -> Partial:
    """softmax over these keys only, with the log-sum-exp that :func:`merge` needs; −inf and 0 where none is allowed."""
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    none = ~mask.any(-1, keepdim=True)
    # A row without a key would be NaN forward and backward.
    safe = scores.masked_fill(none, 0.0)
    out = torch.where(none, 0.0, torch.softmax(safe, dim=-1) @ value)
    return Partial(out=out, lse=torch.where(none.squeeze(-1), -torch.inf, torch.logsumexp(safe, dim=-1)))


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over both sets of keys: weights exp(lse − max), normalised (Liu et al., *Ring attention*,
    2310.01889).
    """
    top = torch.maximum(first.lse, second.lse)
    finite = torch.where(torch.isneginf(top), torch.zeros_like(top), top).detach()
    a, b = torch.exp(first.lse - finite), torch.exp(second.lse - finite)
    total = a + b
    empty = total == 0
    divisor = torch.where(empty, torch.ones_like(total), total)
    out = (a / divisor).unsqueeze(-1) * first.out + (b / divisor).unsqueeze(-1) * second.out
    return Partial(out=out, lse=torch.where(empty, -torch.inf, finite + torch.log(divisor)))


def causal_mask(query_index: Tensor, key_index: Tensor, cu_seqlens: Tensor) -> Tensor:
    """bool ``[1, 1, s, t]``: same sequence of the pack, and not later, by *global* place."""
    segment = packing.segments(cu_seqlens)
    same = segment[query_index][:, None] == segment[key_index][None, :]
    return (same & (key_index[None, :] <= query_index[:, None]))[None, None]


def ring_attention(
    query: Sequence[Tensor], key: Sequence[Tensor], value: Sequence[Tensor], *, scale: float, cu_seqlens: Tensor
) -> list[Tensor]:
    """Every rank attends to the keys of one rank after the other as they go round the ring, and merges.

    Args:
        query, key, value: per rank ``[b, h, s, d]``, ``[b, h, s, d]`` and ``[b, h, s, v]``, s = T / cp local tokens.

    Returns:
        ``[b, h, s, v]`` per rank, equal to attention over the whole pack up to rounding.
    """
    cp = len(query)
    places = [local_indices(cu_seqlens, cp, rank) for rank in range(cp)]
    outputs = []
    for rank in range(cp):
        total: Partial | None = None
        for step in range(cp):
            source = (rank - step) % cp
            mask = causal_mask(places[rank], places[source], cu_seqlens)
            part = partial_attention(query[rank], key[source], value[source], scale=scale, mask=mask)
            total = part if total is None else merge(total, part)
        outputs.append(total.out)
    return outputs


def local_head_count(heads: int, cp: int) -> int:
    """How many whole heads a rank owns between the two all-to-alls of Ulysses.

    Raises:
        InputError: the heads do not divide.
    """
    if heads % cp:
        raise InputError("heads are shared out evenly", where="Ulysses", expected=f"a multiple of {cp}", found=heads)
    return heads // cp


def ulysses_attention(
    query: Sequence[Tensor], key: Sequence[Tensor], value: Sequence[Tensor], *, scale: float, cu_seqlens: Tensor
) -> list[Tensor]:
    """Sequence parallel by all-to-all: whole sequences of some heads (Jacobs et al., *DeepSpeed Ulysses*, 2309.14509).

    Between the two all-to-alls the tensors are flat, ``[T, b, heads · d]``, as fused kernels take them, and the number
    of heads is an argument of its own. Arguments and result as :func:`ring_attention`.
    """
    cp, heads = len(query), query[0].shape[1]
    owned = local_head_count(heads, cp)

    def exchange(parts: Sequence[Tensor]) -> list[Tensor]:
        moved = collectives.all_to_all(parts, split_dim=1, concat_dim=2)
        order = torch.cat([local_indices(cu_seqlens, cp, rank) for rank in range(cp)]).argsort()
        return [part.index_select(2, order).permute(2, 0, 1, 3).flatten(2) for part in moved]

    index = torch.arange(int(cu_seqlens[-1]))
    mask = causal_mask(index, index, cu_seqlens)
    outputs = []
    for flat_q, flat_k, flat_v in zip(exchange(query), exchange(key), exchange(value)):
        q, k, v = (flat.unflatten(2, (owned, -1)).permute(1, 2, 0, 3) for flat in (flat_q, flat_k, flat_v))
        out = partial_attention(q, k, v, scale=scale, mask=mask).out
        # flat again, as the kernel returns it; the true heads are what goes back
        flat = out.permute(2, 0, 1, 3).flatten(2)
        outputs.append(flat.unflatten(2, (heads // cp, -1)).permute(1, 2, 0, 3))
    return [
        torch.cat([part.index_select(2, local_indices(cu_seqlens, cp, rank)) for part in outputs], dim=1)
        for rank in range(cp)
    ]


KINDS = ("ring", "ulysses")


def context_parallel_logits(
    model: CausalLM,
    input_ids: Tensor,
    *,
    cu_seqlens: Tensor,
    cp: int,
    kind: str = "ring",
    position_ids: Tensor | None = None,
) -> list[Tensor]:
    """Each rank's logits ``[1, T / cp, v]`` of a pack, by the model's own weights.

    Args:
        model: shared by all ranks: its gradients are the sum over ranks.
        input_ids: int64 ``[1, T]``.
        cu_seqlens: int64 ``[n + 1]``.
        kind: ``ring`` or ``ulysses``.
        position_ids: int64 ``[1, T]`` of the whole pack, where they are not 0, 1, … in each sequence (packed tables).

    Raises:
        InputError: an unknown kind, or sizes that do not divide.
    """
    if kind not in KINDS:
        raise InputError("unknown context parallelism", where="kind", expected=" | ".join(KINDS), found=kind)
    backbone = model.model
    if position_ids is None:
        position_ids = packing.positions(cu_seqlens)[None]
    ropes = local_rope(*backbone.rotary(position_ids, model.dtype), cu_seqlens, cp)
    attend_together = ring_attention if kind == "ring" else ulysses_attention

    def attend(queries, keys, values, *, scale, number):
        return attend_together(queries, keys, values, scale=scale, cu_seqlens=cu_seqlens)

    hidden = [backbone.embed_tokens(part) for part in shard(input_ids, cu_seqlens, cp)]
    for number, layer in enumerate(backbone.layers, start=1):
        hidden = run_layer(layer, hidden, ropes, attend, number=number)
    return [model.lm_head(backbone.norm(part)) for part in hidden]


Attend = Callable[..., list[Tensor]]


def run_layer(
    layer: nn.Module, hidden: Sequence[Tensor], ropes: Sequence[tuple[Tensor, Tensor]], attend: Attend, *, number: int
) -> list[Tensor]:
    """One decoder layer on all ranks together, with ``attend`` in the place of its attention.

    Args:
        hidden, ropes: per rank ``[b, s, hidden_size]``, and cos and sin ``[b, s, r/2]``.
        attend: queries, keys and values of all ranks (``[b, h, s, d]``), ``scale`` and ``number`` → outputs of all
        ranks. number: the layer's number in the whole model, from 1.
    """
    attention, config = layer.self_attn, layer.self_attn.config
    queries, keys, values = [], [], []
    for part, (cos, sin) in zip(hidden, ropes, strict=True):
        context = AttentionContext(cos=cos, sin=sin, mask=torch.empty(0))
        normed = layer.input_layernorm(part)
        queries.append(torch.cat(attention.project_query(normed, context), dim=-1))
        latent, k_rope = attention.project_latent(normed, context)
        kv = attention.kv_b_proj(latent).unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)
        k_nope, value = kv.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        keys.append(torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, config.num_attention_heads, -1, -1)], dim=-1))
        values.append(value)
    outputs = attend(queries, keys, values, scale=softmax_scale(config), number=number)
    after = [part + attention.o_proj(out.transpose(1, 2).flatten(2)) for part, out in zip(hidden, outputs)]
    return [part + layer.mlp(layer.post_attention_layernorm(part)) for part in after]
