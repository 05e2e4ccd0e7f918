"""Vocabulary parallelism: the output layer's rows over several ranks, and what is computed from logits cut so.

The vocabulary is padded to a multiple of the ranks. The padded columns exist in the weights and must not exist in any
distribution: they enter every log-sum-exp as −inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.parallel import collectives
from alignment.models.precision import at_least_float32


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """The next multiple of ``tp``."""
    return -(-vocab_size // tp) * tp


def shard_vocabulary(weight: Tensor, tp: int) -> list[Tensor]:
    """Rows of the output layer ``[v, h]`` per rank, ``[⌈v / tp⌉, h]``; padded with zeros, as allocators leave them."""
    padding = padded_vocabulary(len(weight), tp) - len(weight)
    return collectives.split_evenly(torch.nn.functional.pad(weight, (0, 0, 0, padding)), tp)


def without_phantoms(logits: Tensor, *, rank: int, vocab_size: int) -> Tensor:
    """The logits of one rank ``[…, w]`` with −inf in the columns beyond ``vocab_size``."""
    width = logits.shape[-1]
    phantom = torch.arange(rank * width, (rank + 1) * width, device=logits.device) >= vocab_size
    return logits.masked_fill(phantom, -torch.inf)


def log_probs_and_entropy(
    shards: Sequence[Tensor], labels: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy, in nats, from logits cut by vocabulary (Megatron-LM's
    ``vocab_parallel_cross_entropy``).

    The largest logit, Σ exp and the label's own logit are each reduced over the ranks; only the owner of a label
    contributes its logit. The logits are left as they were: the entropy is of the same logits as the log-prob.

    Args:
        shards: ``[…, ⌈v / tp⌉]`` per rank.
        labels: ``[…]`` *global* token ids.
        vocab_size: v, the number of real columns.
        temperature: > 0.

    Returns:
        Two tensors ``[…]``, float64 for float64 logits, else float32.

    Raises:
        InputError: a label outside the vocabulary.
    """
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < vocab_size:
        raise InputError(
            "a label is no token",
            where="labels",
            expected=f"0 … {vocab_size - 1}",
            found=[int(labels.min()), int(labels.max())],
        )
    wide = [
        without_phantoms(part.to(at_least_float32(part.dtype)) / temperature, rank=rank, vocab_size=vocab_size)
        for rank, part in enumerate(shards)
    ]
    top = torch.stack([part.detach().amax(-1) for part in wide]).amax(0)
    exponentials = [torch.exp(part - top.unsqueeze(-1)) for part in wide]
    total = collectives.all_reduce([e.sum(-1) for e in exponentials])[0]
    lse = top + torch.log(total)
    own = []
    for rank, part in enumerate(wide):
        width = part.shape[-1]
        local = labels - rank * width
        mine = (local >= 0) & (local < width)
        picked = part.gather(-1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
        own.append(torch.where(mine, picked, torch.zeros_like(picked)))
    label_logit = collectives.all_reduce(own)[0]
    # Σ p·z over the real columns: 0 · −inf would be NaN
    expected = collectives.all_reduce(
        [(e * part.masked_fill(torch.isneginf(part), 0.0)).sum(-1) for e, part in zip(exponentials, wide)]
    )[0]
    return label_logit - lse, lse - expected / total


def linear_log_probs(
    hidden: Tensor, weights: Sequence[Tensor], labels: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> Tensor:
    """Log-probs straight from hidden states, one vocabulary shard at a time forward and backward (fused cross entropy).

    The logits of only one shard exist at once; the backward makes them again. Its gradients, with p the softmax and y
    the label: ``∂/∂hidden = g/T · (W_y − Σ_j p_j W_j)``, ``∂/∂W_j = g/T · (1[j = y] − p_j) · hidden``.

    Args:
        hidden: ``[n, h]``.
        weights: ``[w, h]`` per rank or tile, padded rows included.
        labels: int64 ``[n]``.

    Returns:
        ``[n]``.
    """
    return _FusedLinear.apply(hidden, labels, vocab_size, temperature, *weights)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, labels, vocab_size, temperature, *weights):
        top = torch.full(labels.shape, -torch.inf, dtype=hidden.dtype)
        total, own = torch.zeros_like(top), torch.zeros_like(top)
        for rank, weight in enumerate(weights):
            logits = tile_logits(hidden, weight, rank=rank, vocab_size=vocab_size, temperature=temperature)
            higher = torch.maximum(top, logits.amax(-1))
            # A tile of padding alone leaves the maximum at −inf.
            shift = torch.where(torch.isneginf(higher), torch.zeros_like(higher), higher)
            total = total * torch.exp(top - shift) + torch.exp(logits - shift.unsqueeze(-1)).sum(-1)
            top = higher
            mine, local = _owned(labels, weight, rank)
            own = own + torch.where(mine, logits.gather(-1, local.unsqueeze(-1)).squeeze(-1), torch.zeros_like(own))
        lse = top + torch.log(total)
        ctx.save_for_backward(hidden, labels, lse, *weights)
        ctx.vocab_size, ctx.temperature = vocab_size, temperature
        return own - lse

    @staticmethod
    def backward(ctx, gradient):
        hidden, labels, lse, *weights = ctx.saved_tensors
        to_hidden, to_weights = linear_gradients(
            gradient, hidden, weights, labels, lse, vocab_size=ctx.vocab_size, temperature=ctx.temperature
        )
        return to_hidden, None, None, None, *to_weights


def tile_logits(hidden: Tensor, weight: Tensor, *, rank: int, vocab_size: int, temperature: float) -> Tensor:
    """``[n, w]``: the logits of one tile over the temperature, −inf in its padding."""
    return without_phantoms(hidden @ weight.t() / temperature, rank=rank, vocab_size=vocab_size)


def linear_gradients(
    gradient: Tensor,
    hidden: Tensor,
    weights: Sequence[Tensor],
    labels: Tensor,
    lse: Tensor,
    *,
    vocab_size: int,
    temperature: float,
) -> tuple[Tensor, list[Tensor]]:
    """The backward of :func:`linear_log_probs`: gradients of hidden states and of every tile, from the log-sum-exp."""
    to_hidden, to_weights = torch.zeros_like(hidden), []
    for rank, weight in enumerate(weights):
        logits = tile_logits(hidden, weight, rank=rank, vocab_size=vocab_size, temperature=temperature)
        to_logits = -torch.exp(logits - lse.unsqueeze(-1))
        mine, local = _owned(labels, weight, rank)
        to_logits.scatter_add_(-1, local.unsqueeze(-1), mine.to(to_logits).unsqueeze(-1))
        to_logits = to_logits * gradient.unsqueeze(-1) / temperature
        to_hidden += to_logits @ weight
        to_weights.append(to_logits.t() @ hidden)
    return to_hidden, to_weights


def _owned(labels: Tensor, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    local = labels - rank * len(weight)
    mine = (local >= 0) & (local < len(weight))
    return mine, torch.where(mine, local, 0)
