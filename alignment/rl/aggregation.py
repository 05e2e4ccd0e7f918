"""From a loss per token to one number: verl's ``loss_agg_mode``, normalised by the counts of the whole mini batch.

A micro batch divides by counts that are not its own, so its result is a *share*: the shares of all micro batches and
data parallel ranks add up to the loss of the mini batch, however it was cut. Dividing by the micro batch's own counts
and averaging afterwards (a mean of means) weighs tokens by the luck of the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a loss is divided by: response tokens, and sequences that have any, of the whole mini batch over all ranks.

    They are verl's ``batch_num_tokens`` and ``global_batch_size``. Counts of parts add up with ``+``.
    """

    tokens: int
    sequences: int

    @classmethod
    def of(cls, mask: Tensor) -> Counts:
        """The counts of a response mask [b,r]."""
        per_sequence = (mask != 0).sum(-1)
        return cls(tokens=int(per_sequence.sum()), sequences=int((per_sequence > 0).sum()))

    def __add__(self, other: Counts) -> Counts:
        return Counts(tokens=self.tokens + other.tokens, sequences=self.sequences + other.sequences)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ of the values where the mask is set. Values elsewhere are dropped, not multiplied by 0, so they may be NaN."""
    kept = torch.where(mask != 0, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, *, counts: Counts | None = None) -> Tensor:
    """Mean over the tokens of the mask, or this part's share of the mean over `counts`."""
    return masked_sum(values, mask) / (counts or Counts.of(mask)).tokens


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    counts: Counts | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """One number from a loss per token (verl's ``core_algos.agg_loss`` as it is since it takes global counts).

    With N tokens and S sequences in the mini batch, and n_i tokens in sequence i:

    * ``token-mean``: Σ_i Σ_t l_it / N (DAPO: long responses weigh more);
    * ``seq-mean-token-sum``: Σ_i Σ_t l_it / S;
    * ``seq-mean-token-mean``: Σ_i (Σ_t l_it / n_i) / S (GRPO);
    * ``seq-mean-token-sum-norm``: Σ_i Σ_t l_it / (S · `loss_scale_factor`) (Dr. GRPO, a constant in place of n_i;
      earlier releases of verl did not divide by S).

    Args:
        loss_mat: [b,r], any float dtype; the sum is taken in that dtype.
        loss_mask: [b,r], tokens that count. A sequence without any counts nowhere.
        loss_agg_mode: one of ``LOSS_AGG_MODES``.
        counts: of the whole mini batch over all ranks; those of `loss_mask` by default. Results for parts add up.
        loss_scale_factor: the constant of the last mode; the response width r by default, which changes with padding.

    Returns:
        A scalar. No factor for the number of ranks is applied: gradients are to be *summed* over ranks. Where a
        framework averages them (FSDP, DDP), multiply by the number of ranks, as verl's ``dp_size`` does.

    Raises:
        InputError: unknown mode, shapes that differ, or a mini batch without response tokens.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise InputError(
            "unknown aggregation", where="loss_agg_mode", expected=" | ".join(LOSS_AGG_MODES), found=loss_agg_mode
        )
    if loss_mat.shape != loss_mask.shape:
        raise InputError(
            "the loss and its mask differ in shape",
            where="agg_loss",
            expected=list(loss_mask.shape),
            found=list(loss_mat.shape),
        )
    counts = counts or Counts.of(loss_mask)
    if counts.tokens == 0 or counts.sequences == 0:
        raise InputError("the mini batch has no response tokens", where="agg_loss", expected="at least one", found=0)
    if loss_agg_mode == "token-mean":
        return masked_sum(loss_mat, loss_mask) / counts.tokens
    per_sequence = masked_sum(loss_mat, loss_mask, dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        per_sequence = per_sequence / (loss_mask != 0).sum(-1).clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / (loss_scale_factor or loss_mask.shape[-1])
    return per_sequence.sum() / counts.sequences
