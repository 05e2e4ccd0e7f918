"""Defects of the sampler and of log-probs."""

from __future__ import annotations

import dataclasses

import torch

from alignment.faults.fault import Fault
from alignment.faults.seam import seam
from alignment.numerics.random import portable_uniform

SAMPLE = "alignment.backends.golden_rollout:_sample"
GENERATE = "alignment.backends.golden_rollout:GoldenRollout.generate"


@seam(SAMPLE)
def _before_the_temperature(original):
    def sample(logits, params, draws):
        tokens, _ = original(logits, params, draws)
        raw = torch.log_softmax(logits.float(), dim=-1).cpu()
        return tokens, raw.gather(-1, tokens[:, None])[:, 0]

    return sample


@seam("alignment.rl.stages:policy_outputs")
def _loss_without_temperature(original):
    def outputs(model, micro_batch, *, temperature):
        return original(model, micro_batch, temperature=1.0 if torch.is_grad_enabled() else temperature)

    return outputs


@seam(SAMPLE)
def _most_likely_log_prob(original):
    def sample(logits, params, draws):
        tokens, _ = original(logits, params, draws)
        return tokens, torch.log_softmax(logits.float() / (params.temperature or 1.0), dim=-1).max(-1).values.cpu()

    return sample


@seam(GENERATE)
def _one_key_for_all(original):
    def generate(self, prompts, attention_mask, params, keys):
        return original(self, prompts, attention_mask, params, keys[:1].expand_as(keys).contiguous())

    return generate


@seam(SAMPLE)
def _greedy_not_recognised(original):
    def sample(logits, params, draws):
        greedy = -1.0
        if params.temperature == 0 != greedy:
            params = dataclasses.replace(params, temperature=1.0)
        return original(logits, params, draws)

    return sample


@seam("alignment.backends.speculative:verify")
def _jointly_with_certainty(original):
    def verify(draft, p, q, uniforms):
        if q is not None:
            return original(draft, p, q, uniforms)
        kept, joint = [], 1.0
        for step, token in enumerate(draft):
            joint *= float(p[step, token])
            if uniforms[step] >= joint:
                left = p[step].clone()
                left[token] = 0
                return kept, left / left.sum()
            kept.append(token)
        return kept, p[len(draft)]

    return verify


@seam("alignment.backends.speculative:drafted_first")
def _ties_in_any_order(original):
    def order(has_draft):
        noise = portable_uniform((len(has_draft),), seed=len(has_draft), stream="an unstable sort")
        return ((~has_draft).double() + 0.5 * noise).argsort()

    return order


@seam("alignment.rl.log_prob:response_logits")
def _logits_of_the_token_itself(original):
    return lambda logits, response_length: logits[:, logits.shape[1] - response_length :]


@seam(SAMPLE)
def _nucleus_nobody_asked_for(original):
    def sample(logits, params, draws):
        return original(logits, dataclasses.replace(params, top_p=min(params.top_p, 0.9)), draws)

    return sample


def _fault(**fields) -> Fault:
    return Fault(category="sampler", **fields)


FAULTS = (
    _fault(
        id="raw-logprobs-from-rollout",
        title="the engine returns log-probs from before the temperature",
        source="vime 64, 69; verl 4162; trl 4159; NeMo-RL 54d7cd22d",
        stage=("rollout", "old_log_prob"),
        culprit="sampler.log_prob",
        layer="rollout-vs-train-logprob",
        setting="temperature ≠ 1",
        why="log_softmax(z) instead of log_softmax(z / T)",
        apply=_before_the_temperature,
    ),
    _fault(
        id="train-logits-not-tempered",
        title="the loss does not divide by the temperature",
        source="verl 5deb8cc9a; NeMo-RL 4e02da031, ed718b47d",
        stage=("old_log_prob", "actor_update"),
        culprit="log_prob | temperature | policy_outputs | output_layer | head",
        layer="rollout-vs-train-logprob",
        setting="temperature ≠ 1",
        why="old log-probs are at T and those of the update at 1: the ratio is not 1 on the first step",
        apply=_loss_without_temperature,
    ),
    _fault(
        id="logprob-of-first-entry-not-sampled",
        title="the log-prob of the most likely token stands for the sampled one",
        source="NeMo-RL 78965b37f",
        stage=("rollout",),
        culprit="sampler.log_prob",
        layer="unit-op",
        setting="temperature > 0",
        why="the first entry of the returned dictionary is taken",
        apply=_most_likely_log_prob,
    ),
    _fault(
        id="seed-shared-by-all-samples",
        title="all samples of a batch draw the same numbers",
        source="verl 3f6cd4792",
        stage=("rollout", "advantage"),
        culprit="sampler.seed",
        layer="unit-op",
        setting="several samples per prompt",
        why="the engine's seed is that of every request: groups have no spread",
        apply=_one_key_for_all,
    ),
    _fault(
        id="greedy-constant-mismatch",
        title="temperature 0 is not taken for greedy",
        source="vllm-ascend 2add3dc3e0",
        stage=("rollout",),
        culprit="sampler.greedy",
        layer="unit-op",
        setting="temperature 0",
        why="greedy is marked with 0 on one side and looked for as -1 on the other",
        apply=_greedy_not_recognised,
    ),
    _fault(
        id="block-verify-without-draft-probs",
        title="n-gram drafts are accepted jointly as if their draft probability were 1",
        source="vllm-ascend 7be6291c82, 2f4d55e7e8",
        stage=("rollout",),
        culprit="speculative.verify",
        layer="unit-op",
        setting="drafts of more than one token without probabilities",
        why="the product of the target's probabilities is not a chance of acceptance per token",
        apply=_jointly_with_certainty,
    ),
    _fault(
        id="unstable-sort-scrambles-tokens",
        title="rows of a batch change places in a sort of booleans",
        source="vllm-ascend 8fb0ef5ffa; MindSpeed 73cb468b",
        stage=("rollout",),
        culprit="drafted_first",
        layer="unit-op",
        setting="more than a few rows",
        why="equal keys keep no order without stable=True",
        apply=_ties_in_any_order,
    ),
    _fault(
        id="logprob-of-input-token",
        title="logits are scored against their own input token",
        source="Megatron-LM 1b075299e3",
        stage=("rollout", "old_log_prob"),
        culprit="log_prob | response_logits",
        layer="unit-op",
        setting="none",
        why="the shift by one is missing",
        apply=_logits_of_the_token_itself,
    ),
    _fault(
        id="nucleus-renormalisation-one-sided",
        title="the rollout samples a nucleus and renormalises, the trainer does not know",
        source="NeMo-RL 2aea5addc; vime 69",
        stage=("rollout", "old_log_prob"),
        culprit="sampler",
        layer="rollout-vs-train-logprob",
        setting="top_p = 1 declared; the sign of the gap",
        why="log-probs are too high by the log of the mass that was kept, always with the same sign",
        apply=_nucleus_nobody_asked_for,
    ),
)
