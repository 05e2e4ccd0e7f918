"""The probe of a weight sync: sequences, the trainer's log-probs of them, and how far a correct engine may be off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.backends.golden_rollout import probe_model
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig
from alignment.models.precision import at_least_float32
from alignment.numerics.budget import Budget, Noise
from alignment.numerics.random import portable_integers


@dataclass(frozen=True, kw_only=True)
class ProbeCase:
    """Sequences whose response tokens both paths must give the trainer's log-probs for.

    ``input_ids`` and ``attention_mask`` are ``[b, p + r]``, prompts left padded, responses (the last
    ``response_length`` columns) right padded. ``seed`` identifies the run for the budget.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_length: int
    seed: int

    @property
    def response_mask(self) -> Tensor:
        """Bool ``[b, r]``."""
        return self.attention_mask[:, -self.response_length :].bool()


def probe_case(
    config: ModelConfig, *, seed: int, batch: int = 4, prompt_length: int = 12, response_length: int = 8
) -> ProbeCase:
    """Random tokens with ragged prompts and responses, the same bits on every machine."""

    def draw(low: int, high: int, shape, stream: str) -> Tensor:
        return portable_integers(low, high, shape, seed=seed, stream=f"weight_sync/{stream}")

    ids = draw(0, config.vocab_size, (batch, prompt_length + response_length), "tokens")
    prompts = draw(1, prompt_length + 1, (batch, 1), "prompt_lengths")
    responses = draw(2, response_length + 1, (batch, 1), "response_lengths")
    responses[0] = response_length
    columns = torch.arange(prompt_length + response_length)
    mask = (columns >= prompt_length - prompts) & (columns < prompt_length + responses)
    return ProbeCase(input_ids=ids * mask, attention_mask=mask.long(), response_length=response_length, seed=seed)


@torch.no_grad()
def trainer_log_probs(model: CausalLM, case: ProbeCase) -> Tensor:
    """The trainer's log-probs of the response tokens ``[b, r]``: float32 at least, temperature 1, 0 at padding."""
    ids, mask = case.input_ids.to(model.device), case.attention_mask.to(model.device)
    logits = model(ids, attention_mask=mask)[:, -case.response_length - 1 : -1]
    wide = torch.log_softmax(logits.to(at_least_float32(logits.dtype)), dim=-1)
    chosen = wide.gather(-1, ids[:, -case.response_length :, None]).squeeze(-1)
    return chosen.masked_fill(~case.response_mask.to(chosen.device), 0)


MAXIMUM, MEDIAN = "max |Δ log p|", "median |Δ log p|"


def gap_metric(dtype: torch.dtype) -> str:
    """How the gap between engine and trainer is summed up over response tokens: the maximum from float32 on, else the
    median.

    Below float32 rounding changes which experts a token near a tie is sent to, and that token's log-prob by any amount:
    the maximum has no scale there. Stale weights move most tokens, and so the median too.
    """
    return MAXIMUM if torch.finfo(dtype).eps <= torch.finfo(torch.float32).eps else MEDIAN


def token_gaps(values: Tensor, log_probs: Tensor, case: ProbeCase) -> Tensor:
    """|values - log_probs| in float64 on the CPU, ``[b, r]``; 0 at padding, NaN where either is."""
    gaps = (values.double().cpu() - log_probs.double().cpu()).abs()
    return gaps.masked_fill(~case.response_mask.cpu(), 0)


def summed_up(gaps: Tensor, case: ProbeCase, metric: str) -> float:
    """The maximum or the median of the gaps of response tokens; NaN if any is."""
    real = gaps[case.response_mask.cpu()]
    return float(real.max() if metric == MAXIMUM else real.median())


def probe_budget(trainer: CausalLM, *, seeds: Iterable[int], device: str) -> Budget:
    """How far a correct engine may be from the trainer, in nats, by :func:`gap_metric` of the trainer's dtype.

    The noise is what re-association does to the trainer's own model over cases of other seeds: expanded against
    absorbed attention and batched against step by step, in the trainer's dtype. No engine takes part, so a fault of one
    cannot widen the budget it is judged by. The trainer's weights and attributes are left as they were.

    Args:
        trainer: the model whose log-probs the engine is judged by.
        seeds: at least five, none of them the seed of a judged case.
        device: label of the device it is measured on.
    """
    values, size, used = [], 0.0, tuple(seeds)
    metric = gap_metric(trainer.dtype)
    attentions = [layer.self_attn for layer in trainer.model.layers]
    held = [(attention.w_uk_t, attention.w_uv) for attention in attentions]
    try:
        for attention in attentions:
            attention.w_uk_t = attention.w_uv = None
        trainer.absorb(contiguous=True)
        for seed in used:
            case = probe_case(trainer.config, seed=seed)
            ids, mask = case.input_ids.to(trainer.device), case.attention_mask.to(trainer.device)
            expected, found = trainer_log_probs(trainer, case), probe_model(trainer, ids, mask, case.response_length)
            paths = (found.prefill, found.decode)
            values.append(max(summed_up(token_gaps(path, expected, case), case, metric) for path in paths))
            size = max(size, float(expected.abs().max()))
    finally:
        for attention, (w_uk_t, w_uv) in zip(attentions, held, strict=True):
            attention.w_uk_t, attention.w_uv = w_uk_t, w_uv
    noise = Noise(values=tuple(values), seeds=used, perturbation="tokens of another seed", device=device)
    return Budget.from_noise(
        noise,
        metric=metric,
        dtype=trainer.dtype,
        reduction_length=trainer.config.hidden_size,
        unit="nats",
        scale=size,
    )
