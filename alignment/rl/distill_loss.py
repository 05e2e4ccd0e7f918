"""The divergence between teacher and student at every token, and the loss of generalised knowledge distillation.

With teacher T, student S and mixture M = β·T + (1 − β)·S, per token

    JSD_β(T, S) = β · KL(T ‖ M) + (1 − β) · KL(S ‖ M)      for 0 < β < 1

(Agarwal et al. 2024, "On-policy distillation of language models", arXiv 2306.13649, eq. 1). At the ends the mixture
becomes one of the two and the expression vanishes, so the ends are *defined* as the limits of JSD_β/β and
JSD_β/(1 − β): β = 0 is KL(T ‖ S) (forward), β = 1 is KL(S ‖ T) (reverse). These are the definitions of TRL's
``generalized_jsd_loss`` and of ms-swift's ``gkd_loss``.

Everything is computed in float32, or in float64 where either side is float64: widened *before* the temperature divides.
Results are per token, so they depend neither on chunks nor on what shares the batch (but for the rounding of a last
bit); who adds them up divides by the counts of the whole batch (:class:`DistillCounts`), so shares of micro batches and
ranks add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from alignment.errors import InputError

IGNORED = -100
"""The label of a position that does not count, Hugging Face's."""

CHUNK_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class TeacherTokens:
    """What the teacher says at n active tokens: ``logits`` [n,v], or its k most likely tokens.

    ``topk_log_probs`` [n,k] are log-probs (or logits: a constant per row drops out) at temperature 1, −inf where a row
    has fewer than k; ``topk_indices`` [n,k] their token ids.

    Raises:
        InputError: neither or both forms, or tables of different shapes.
    """

    logits: Tensor | None = None
    topk_log_probs: Tensor | None = None
    topk_indices: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.logits is None) == (self.topk_log_probs is None):
            raise InputError(
                "a teacher gives its whole distribution or its most likely tokens",
                where="teacher",
                expected="either logits, or topk_log_probs and topk_indices",
            )
        if self.topk_log_probs is not None:
            shapes = [None if t is None else list(t.shape) for t in (self.topk_log_probs, self.topk_indices)]
            if shapes[0] != shapes[1]:
                raise InputError(
                    "the tables of the teacher's most likely tokens differ in shape",
                    where="topk_indices",
                    expected=shapes[0],
                    found=shapes[1],
                )

    def __len__(self) -> int:
        return len(self.logits if self.logits is not None else self.topk_log_probs)

    @property
    def covered(self) -> Tensor:
        """[n], true where the teacher said anything at all: a row of −inf is a position it never scored."""
        if self.logits is not None:
            return torch.ones(len(self.logits), dtype=torch.bool, device=self.logits.device)
        return ~torch.isneginf(self.topk_log_probs).all(-1)

    def select(self, rows: slice | Tensor) -> TeacherTokens:
        """Only the rows of a slice, mask or index."""
        return TeacherTokens(
            **{k: None if v is None else v[rows] for k, v in vars(self).items()},
        )


@dataclass(frozen=True, kw_only=True)
class DistillCounts:
    """What a loss is divided by, over all micro batches and ranks of a training step.

    ``tokens`` active tokens that the teacher covers, ``sft_tokens`` active tokens of dataset responses.
    """

    tokens: int
    sft_tokens: int = 0

    def __add__(self, other: DistillCounts) -> DistillCounts:
        return DistillCounts(tokens=self.tokens + other.tokens, sft_tokens=self.sft_tokens + other.sft_tokens)


def kl_divergence(p_log: Tensor, q_log: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p·(log p − log q) over the last dimension, in nats, with 0 · log 0 = 0; +inf where p is not in q.

    Args:
        p_log, q_log: normalised log-probs [...,v]; −inf forbids a token.
    """
    absent = torch.isneginf(p_log)
    # Taken out before the product: 0 · inf is NaN, and so is its gradient even behind a mask.
    p_safe, q_safe = p_log.masked_fill(absent, 0.0), q_log.masked_fill(absent, 0.0)
    return (p_safe.exp().masked_fill(absent, 0.0) * (p_safe - q_safe)).sum(-1)


def mixture(student_log: Tensor, teacher_log: Tensor, beta: float) -> Tensor:
    """log(β·T + (1 − β)·S), for 0 < β < 1: the *teacher's* weight is β."""
    absent = torch.isneginf(student_log) & torch.isneginf(teacher_log)
    student, teacher = student_log.masked_fill(absent, 0.0), teacher_log.masked_fill(absent, 0.0)
    mixed = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return mixed.masked_fill(absent, -math.inf)


def jsd(student_log: Tensor, teacher_log: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence of normalised log-probs [...,v], per token [...], in nats.

    Exact at the ends: β = 0 is KL(T ‖ S), β = 1 is KL(S ‖ T). Inside, it is of the order of β near 0 and of 1 − β near
    1, with those divergences as the limits of the quotients.

    Raises:
        InputError: β outside [0, 1].
    """
    if not 0.0 <= beta <= 1.0:
        raise InputError("the interpolation is out of range", where="beta", expected="0 … 1", found=beta)
    if beta == 0.0:
        return kl_divergence(teacher_log, student_log)
    if beta == 1.0:
        return kl_divergence(student_log, teacher_log)
    mixed = mixture(student_log, teacher_log, beta)
    return beta * kl_divergence(teacher_log, mixed) + (1.0 - beta) * kl_divergence(student_log, mixed)


def align_vocabularies(student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits over one vocabulary where the two models' differ in size, as ms-swift does it.

    The shorter side gets the longer side's own logits for the ids it lacks (padding rows of an embedding, mostly), so
    such ids pull neither model anywhere relative to the other's belief. Gradients flow through the copy.
    """
    student, teacher = student_logits.shape[-1], teacher_logits.shape[-1]
    if student < teacher:
        student_logits = torch.cat([student_logits, teacher_logits[..., student:].to(student_logits)], -1)
    elif teacher < student:
        teacher_logits = torch.cat([teacher_logits, student_logits[..., teacher:].to(teacher_logits)], -1)
    return student_logits, teacher_logits


def paired_logits(student_logits: Tensor, teacher: TeacherTokens) -> tuple[Tensor, Tensor]:
    """Both sides' logits over one support, at least float32: the vocabulary, or the teacher's most likely tokens.

    Over the most likely tokens the student is *gathered* there, so that softmax renormalises both sides on them; slots
    that a ragged row leaves open are −inf on both sides.
    """
    if teacher.logits is not None:
        ours, theirs = align_vocabularies(*_widened(student_logits, teacher.logits))
        return ours, theirs
    ours, theirs = _widened(student_logits, teacher.topk_log_probs)
    open_slots = torch.isneginf(theirs)
    return ours.gather(-1, teacher.topk_indices).masked_fill(open_slots, -math.inf), theirs


def token_divergence(
    student_logits: Tensor,
    teacher: TeacherTokens,
    *,
    beta: float,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """The divergence at every token, and whether both models would say the same there.

    Args:
        student_logits: [n,v] at the positions that predict the active tokens, any float dtype; receives the gradient.
        teacher: the same n tokens; never receives a gradient of its own.
        beta: 0 … 1.
        temperature: > 0, divides the logits of both sides.
        chunk_size: tokens whose wide probabilities exist at once; they are recomputed in the backward pass.

    Returns:
        Two tensors [n]: the divergence in nats (float64 where either side is, else float32; 0 where the teacher covers
        nothing), and agreement: 1 where the two most likely tokens are equal, at the same dtype, without gradient.

    Raises:
        InputError: sizes that do not fit, or parameters out of range.
    """
    if not temperature > 0:
        raise InputError("the temperature has to be positive", where="temperature", expected="> 0", found=temperature)
    if len(student_logits) != len(teacher):
        raise InputError(
            "teacher and student have different numbers of active tokens",
            where="token_divergence",
            expected=f"{len(student_logits)} (student)",
            found=f"{len(teacher)} (teacher)",
        )
    covered = teacher.covered

    def part(tokens: slice) -> tuple[Tensor, Tensor]:
        said = teacher.select(tokens)
        ours, theirs = paired_logits(student_logits[tokens], said)
        # A row that the teacher never scored has nothing to normalise: any finite row in its place is dropped below.
        blank = ~covered[tokens].unsqueeze(-1)
        ours, theirs = (x.masked_fill(blank, 0.0) if said.logits is None else x for x in (ours, theirs))
        ours_log, theirs_log = (torch.log_softmax(scaled(x, temperature), -1) for x in (ours, theirs))
        value = jsd(ours_log, theirs_log, beta).masked_fill(blank.squeeze(-1), 0.0)
        best = theirs.detach().argmax(-1, keepdim=True)
        if said.logits is None:
            best = said.topk_indices.gather(-1, best)
        agrees = (student_logits[tokens].detach().argmax(-1) == best.squeeze(-1)) & covered[tokens]
        return value, agrees.to(value.dtype)

    return _by_chunks(part, len(student_logits), chunk_size)


def sft_divergence(student_logits: Tensor, labels: Tensor, *, chunk_size: int = CHUNK_TOKENS) -> Tensor:
    """−log p of the labels [n] under student logits [n,v] at temperature 1, at least float32."""

    def part(tokens: slice) -> tuple[Tensor]:
        (wide,) = _widened(student_logits[tokens])
        return (-torch.log_softmax(wide, -1).gather(-1, labels[tokens].unsqueeze(-1)).squeeze(-1),)

    return _by_chunks(part, len(student_logits), chunk_size)[0]


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature; both sides of a divergence go through here."""
    return logits if temperature == 1.0 else logits / temperature


def shift_labels(labels: Tensor) -> Tensor:
    """Labels [b,s] moved to the positions that predict them: entry i is the label of token i + 1, the last ignored."""
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    return shifted


def active_positions(labels: Tensor) -> Tensor:
    """[b,s], true at the positions whose logits predict a token that counts."""
    return shift_labels(labels) != IGNORED


def require_same_active(labels: Tensor, teacher_labels: Tensor, sample_ids: list | None = None) -> None:
    """Refuse views in which teacher and student would be scored on different tokens (OPSD: same response, two prompts).

    Positions may differ, the active tokens may not: the same ids in the same order, sample by sample.

    Args:
        labels: [b,s] of the student's view; `teacher_labels`: [b,t] of the teacher's. Unshifted, −100 elsewhere.
        sample_ids: names for the message.

    Raises:
        InputError: naming the first sample that differs, with both counts or the first token that differs.
    """
    for row, (ours, theirs) in enumerate(zip(labels, teacher_labels, strict=True)):
        # A first token has nothing before it to predict it: it can never be active.
        ours, theirs = ours[1:], theirs[1:]
        ours, theirs = ours[ours != IGNORED], theirs[theirs != IGNORED]
        where = f"labels, sample {row if sample_ids is None else sample_ids[row]}"
        if len(ours) != len(theirs):
            raise InputError(
                "teacher and student see different numbers of active tokens",
                where=where,
                expected=f"{len(ours)} (student)",
                found=f"{len(theirs)} (teacher)",
                next_step="both views must hold the whole response: raise gkd.max_length, or shorten the prompts",
            )
        if not torch.equal(ours, theirs.to(ours)):
            place = int((ours != theirs.to(ours)).nonzero()[0])
            raise InputError(
                "teacher and student see different tokens in the response",
                where=f"{where}, active token {place}",
                expected=int(ours[place]),
                found=int(theirs[place]),
            )


def _widened(*logits: Tensor) -> tuple[Tensor, ...]:
    wide = torch.float64 if any(x.dtype == torch.float64 for x in logits) else torch.float32
    return tuple(x.to(wide) for x in logits)


def _by_chunks(part: Callable[[slice], tuple[Tensor, ...]], total: int, chunk_size: int) -> tuple[Tensor, ...]:
    if chunk_size < 1:
        raise InputError("a chunk has at least one token", where="chunk_size", expected="≥ 1", found=chunk_size)
    # One chunk even for no tokens at all: an empty result that hangs on the graph, so that an empty rank takes part.
    chunks = [slice(i, i + chunk_size) for i in range(0, max(total, 1), chunk_size)]
    if torch.is_grad_enabled():
        pieces = [checkpoint(part, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        pieces = [part(chunk) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*pieces))
