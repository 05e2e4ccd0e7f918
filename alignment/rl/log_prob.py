"""Log-probs of response tokens and entropies from logits.

The one slicing convention: ``input_ids`` is p prompt tokens and r response tokens, and the logits at position i predict
the token at i + 1, so the response is predicted by positions p − 1 … p + r − 2. Everything is computed in float32 or
wider; narrower logits are widened *before* the temperature divides them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from alignment.errors import InputError


def response_logits(logits: Tensor, response_length: int) -> Tensor:
    """The logits that predict the response: [b,s,v] → [b,r,v], positions s − r − 1 … s − 2 (a view).

    Works on hidden states as well. Raises ``InputError`` when no token precedes the response.
    """
    width = logits.shape[1]
    if not 0 < response_length < width:
        raise InputError(
            "the first response token needs a token before it",
            where="response_logits",
            expected=f"1 … {width - 1} response tokens in {width} positions",
            found=response_length,
        )
    return logits[:, width - response_length - 1 : width - 1]


def log_probs_and_entropy(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of its distribution, in nats.

    ``log p = log_softmax(logits / temperature)``; entropy ``−Σ p · log p`` with 0 · log 0 = 0. Written this way neither
    can leave its range by rounding: log-probs are ≤ 0 and entropies ≥ 0.

    Args:
        logits: [...,v], any float dtype; −inf forbids a token.
        labels: [...] token ids.
        temperature: > 0.

    Returns:
        Two tensors [...], float64 for float64 logits, else float32.

    Raises:
        InputError: temperature ≤ 0, or shapes that do not fit.
    """
    if not temperature > 0:
        raise InputError("the temperature has to be positive", where="temperature", expected="> 0", found=temperature)
    if logits.shape[:-1] != labels.shape:
        raise InputError(
            "there is one label per distribution",
            where="labels",
            expected=list(logits.shape[:-1]),
            found=list(labels.shape),
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    # Dividing by 1 costs a copy of the logits.
    log_p = torch.log_softmax(wide if temperature == 1.0 else wide / temperature, dim=-1)
    log_probs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    # −inf is replaced before the product: its gradient would be NaN even where p is 0.
    entropy = -(torch.exp(log_p) * log_p.masked_fill(torch.isneginf(log_p), 0.0)).sum(-1)
    return log_probs, entropy


def chunked_log_probs_and_entropy(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """The same numbers, bit for bit, from `chunk_size` tokens at a time.

    Only one chunk's float32 probabilities exist at once, forward and backward (they are recomputed there), where the
    plain form holds several copies of [b,r,v].
    """

    def part(tokens: slice) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(flat[tokens], flat_labels[tokens], temperature=temperature)

    flat, flat_labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    return _by_chunks(part, labels.shape, chunk_size)


def linear_log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies straight from hidden states and the output layer (what ``use_fused_kernels`` does).

    The logits ``hidden @ weightᵀ`` are made for `chunk_size` tokens at a time and never held as a whole: for b·r tokens
    and v words the memory falls from b·r·v to chunk_size·v. Equal to the plain form up to the order in which the
    matrix product adds (h terms per logit).

    Args:
        hidden: [...,h] hidden states at the predicting positions; `weight`: [v,h]; `labels`: [...].
        temperature, chunk_size: as above.
    """

    def part(tokens: slice) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(flat[tokens] @ weight.t(), flat_labels[tokens], temperature=temperature)

    flat, flat_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    return _by_chunks(part, labels.shape, chunk_size)


def require_finite(logits: Tensor, *, stage: str, mask: Tensor | None = None) -> None:
    """Refuse logits or log-probs that are NaN or +inf where the mask is set.

    Args:
        logits: [b,r,v] logits, or [b,r] log-probs. −inf is how a token is forbidden and passes, unless all of a row
            are.
        stage: the pipeline stage that made them, for the message.
        mask: [b,r], positions that count; all by default.

    Raises:
        InputError: stage, sample, token and value of the first bad entry, and how many tokens are affected.
    """
    bad = torch.isnan(logits) | torch.isposinf(logits)
    if logits.ndim == 3:
        bad = bad.any(-1) | torch.isneginf(logits).all(-1)
    if mask is not None:
        bad = bad & (mask != 0)
    if not bool(bad.any()):
        return
    sample, token = bad.nonzero()[0].tolist()
    row = logits[sample, token].reshape(-1)
    worst = row[torch.isnan(row) | torch.isinf(row)][0].item()
    raise InputError(
        "the logits are not finite" if logits.ndim == 3 else "the log-probs are not finite",
        where=f"{stage}, sample {sample}, token {token}",
        expected="finite numbers",
        found=f"{worst} ({int(bad.sum())} of {bad.numel()} tokens)",
    )


def _by_chunks(
    part: Callable[[slice], tuple[Tensor, Tensor]], shape: torch.Size, chunk_size: int
) -> tuple[Tensor, Tensor]:
    if chunk_size < 1:
        raise InputError("a chunk has at least one token", where="chunk_size", expected="≥ 1", found=chunk_size)
    total = shape.numel()
    # One chunk even for no tokens at all, so that dtype and device come from the computation.
    chunks = [slice(i, i + chunk_size) for i in range(0, max(total, 1), chunk_size)]
    if torch.is_grad_enabled():
        pieces = [checkpoint(part, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        pieces = [part(chunk) for chunk in chunks]
    return tuple(torch.cat(parts).reshape(shape) for parts in zip(*pieces))
