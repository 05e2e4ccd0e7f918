"""Defects of losses, advantages and log-probs: normalisation, masks, clamps, signs, buffers and missing gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import torch
from torch import nn

from alignment.faults.fault import Fault
from alignment.faults.seam import all_of, seam

UPDATE = ("actor_update",)
SCORING = ("old_log_prob", "actor_update")
AGGREGATE = "alignment.rl.aggregation:agg_loss"


@seam(AGGREGATE)
def _own_counts(original):
    def agg_loss(loss_mat, loss_mask, loss_agg_mode, *, counts=None, loss_scale_factor=None):
        return original(loss_mat, loss_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)

    return agg_loss


@seam(AGGREGATE)
def _mean_of_means(original):
    def agg_loss(loss_mat, loss_mask, loss_agg_mode, *, counts=None, loss_scale_factor=None):
        local = original(loss_mat, loss_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
        if counts is None:
            return local
        return local * int((loss_mask != 0).any(-1).sum()) / counts.sequences

    return agg_loss


@seam(AGGREGATE)
def _sum_over_length(original):
    def agg_loss(loss_mat, loss_mask, loss_agg_mode, **how):
        mode = "seq-mean-token-mean" if loss_agg_mode == "seq-mean-token-sum" else loss_agg_mode
        return original(loss_mat, loss_mask, mode, **how)

    return agg_loss


@seam("alignment.rl.losses:ActorLoss.__call__")
def _kl_subtracted(original):
    def call(self, outputs, micro_batch):
        wrong = dataclasses.replace(self.config, kl_loss_coef=-self.config.kl_loss_coef)
        return original(dataclasses.replace(self, config=wrong), outputs, micro_batch)

    return call


@seam("alignment.rl.weighted_kl:weighted_kl")
def _weight_outside_the_clamp(original):
    def weighted_kl(log_prob, ref_log_prob, behaviour_log_prob, *, log_ratio_limit=20.0, value_limit=10.0):
        d = (ref_log_prob - log_prob).clamp(-log_ratio_limit, log_ratio_limit)
        weight = torch.exp((log_prob - behaviour_log_prob.detach()).clamp(-20.0, 20.0))
        return weight * (torch.expm1(d) - d).clamp(-value_limit, value_limit)

    return weighted_kl


@seam("alignment.models.parallel.packing:pack")
def _mask_not_shifted(original):
    def pack(input_ids, attention_mask, loss_mask):
        packed = original(input_ids, attention_mask, loss_mask)
        return dataclasses.replace(packed, label_mask=loss_mask[attention_mask != 0][None].long())

    return pack


@seam("alignment.rl.advantages:masked_whiten")
def _not_masked_again(original):
    def masked_whiten(values, mask, *, epsilon=1e-8):
        kept = values[mask != 0]
        return (values - kept.mean()) * torch.rsqrt(kept.var() + epsilon)

    return masked_whiten


@seam("alignment.rl.losses:policy_loss")
def _without_dual_clip(original):
    def policy_loss(*tensors, clip_ratio_c=3.0, **how):
        return original(*tensors, clip_ratio_c=math.inf, **how)

    return policy_loss


@seam("alignment.rl.turns:trained")
def _by_role(original):
    return lambda span: span.role == "assistant"


@seam("alignment.rl.stages:forward")
def _masked_before_restoring(original):
    def forward(engine, batch, cut, *, stage):
        from alignment.rl import stages

        partition = cut(batch)
        mask = batch["response_mask"] != 0
        outputs = engine.forward([stages.trim(part) for part in partition.split(batch)], stage=stage)
        whole = {}
        for name in outputs[0]:
            parts = [nn.functional.pad(o[name], (0, mask.shape[1] - o[name].shape[1])) for o in outputs]
            permuted = torch.cat(parts).masked_fill(~mask, 0.0)
            whole[name] = partition.restore(list(permuted.split([len(p) for p in parts])))
        return whole

    return forward


@seam("alignment.models.parallel.side_loss:SideLoss.set_scale")
def _scale_never_set(original):
    return lambda self, scale: None


@seam("alignment.models.parallel.vocab_parallel:log_probs_and_entropy")
def _exponentials_in_the_logits(original):
    def log_probs_and_entropy(shards, labels, *, vocab_size, temperature=1.0):
        log_probs, _ = original(shards, labels, vocab_size=vocab_size, temperature=temperature)
        mutated = [torch.exp(part - part.detach().amax(-1, keepdim=True)) for part in shards]
        _, entropy = original(mutated, labels, vocab_size=vocab_size, temperature=temperature)
        return log_probs, entropy

    return log_probs_and_entropy


@seam("alignment.models.parallel.vocab_parallel:without_phantoms")
def _zeros_in_the_padding(original):
    return lambda logits, *, rank, vocab_size: logits


@seam("alignment.models.parallel.vocab_parallel:linear_gradients")
def _no_hidden_gradient(original):
    def linear_gradients(*arguments, **how):
        _, to_weights = original(*arguments, **how)
        return None, to_weights

    return linear_gradients


@seam("alignment.rl.log_prob:linear_log_probs_and_entropy")
def _detached_hidden(original):
    def linear(hidden, weight, labels, **how):
        return original(hidden.detach(), weight, labels, **how)

    return linear


@seam("alignment.rl.kl:apply_kl_penalty")
def _reward_in_the_kl_buffer(original):
    def apply(token_level_scores, old_log_probs, ref_log_prob, response_mask, *, kind, kl_coef):
        rewards, _ = original(
            token_level_scores, old_log_probs, ref_log_prob, response_mask, kind=kind, kl_coef=kl_coef
        )
        # The buffer of the KL has become the rewards when it is logged.
        shared = torch.where(response_mask != 0, rewards, torch.zeros_like(rewards))
        per_sequence = shared.sum(-1) / (response_mask != 0).sum(-1).clamp(min=1)
        return rewards, float(per_sequence.mean())

    return apply


@seam("alignment.rl.critic:value_outputs")
def _tempered_values(original):
    def value_outputs(model, micro_batch):
        return {name: values / 0.7 for name, values in original(model, micro_batch).items()}

    return value_outputs


@seam("alignment.backends.golden_training:GoldenTrainingEngine.forward")
def _dropout_while_scoring(original):
    def forward(self, micro_batches, *, stage):
        def drop(module, arguments):
            return (nn.functional.dropout(arguments[0], p=0.05, training=True), *arguments[1:])

        with contextlib.ExitStack() as stack:
            for module in self.model.modules():
                if isinstance(module, nn.Linear):
                    stack.callback(module.register_forward_pre_hook(drop).remove)
            return original(self, micro_batches, stage=stage)

    return forward


FAULTS = (
    Fault(
        id="loss-normalised-per-micro-batch",
        title="Each micro batch divides by its own token count",
        source="verl 2eb020aa9 (critic), e160d3b2e; NeMo-RL d1f0609a2",
        category="loss",
        stage=UPDATE,
        culprit="agg_loss",
        layer="layer-grad",
        setting="more than one micro batch",
        why="the sum of means over K micro batches is K times the mean",
        apply=_own_counts,
    ),
    Fault(
        id="mean-of-local-token-means",
        title="Means of ranks or micro batches are averaged as if they were equally long",
        source="verl b49178f0f",
        category="loss",
        stage=UPDATE,
        culprit="agg_loss",
        layer="layer-grad",
        setting="unequal token counts per part",
        why="mean of Σ_r/n_r instead of Σ/n",
        apply=_mean_of_means,
    ),
    Fault(
        id="seq-sum-mode-divides-by-length",
        title="seq-mean-token-sum also divides by the length",
        source="verl 4d722b176",
        category="loss",
        stage=UPDATE,
        culprit="seq-mean-token-sum",
        layer="unit-op",
        setting="loss_agg_mode=seq-mean-token-sum",
        why="Σ_t / length instead of Σ_t",
        apply=_sum_over_length,
    ),
    Fault(
        id="kl-loss-subtracted",
        title="The KL loss enters with the wrong sign",
        source="verl a65c9157b",
        category="loss",
        stage=UPDATE,
        culprit="kl_loss",
        layer="layer-grad",
        setting="KL away from 0",
        why="policy loss − β·KL is minimised",
        apply=_kl_subtracted,
    ),
    Fault(
        id="kl-clamp-order",
        title="The importance weight is outside the clamped KL",
        source="NeMo-RL 2206ae11f",
        category="loss",
        stage=UPDATE,
        culprit="weighted_kl",
        layer="layer-grad",
        setting="tokens with |log-ratio| > 20",
        why="clamped tokens still receive gradient through the weight",
        apply=_weight_outside_the_clamp,
    ),
    Fault(
        id="loss-mask-shifted-by-one",
        title="The loss mask is not shifted with the labels",
        source="verl 2d6c6dbb3, OpenRLHF #973",
        category="loss",
        stage=UPDATE,
        culprit="label_mask",
        layer="unit-op",
        setting="responses that begin inside the sequence",
        why="the first response token is never trained, a token behind the last one is",
        apply=_mask_not_shifted,
    ),
    Fault(
        id="whitened-advantage-leaks-to-padding",
        title="Whitened advantages are not masked again",
        source="verl 4e9586a3a",
        category="loss",
        stage=("advantage",),
        culprit="masked_whiten",
        layer="unit-op",
        setting="unequal lengths",
        why="padding gets −mean/std",
        apply=_not_masked_again,
    ),
    Fault(
        id="dual-clip-constant-not-forwarded",
        title="The third clip bound does not reach the loss",
        source="slime 78156c53c",
        category="loss",
        stage=UPDATE,
        culprit="clip_ratio_c",
        layer="unit-op",
        setting="ratio above c under a negative advantage",
        why="the loss has no ceiling",
        apply=_without_dual_clip,
    ),
    Fault(
        id="history-assistant-tokens-trained",
        title="Assistant turns of the prompt are trained",
        source="NeMo-RL c3bb1d787 (#1956, #1960)",
        category="loss",
        stage=("advantage", "actor_update"),
        culprit="loss_mask",
        layer="unit-op",
        setting="an assistant's turn in the prompt",
        why="the mask selects by role instead of by who generated",
        apply=_by_role,
    ),
    Fault(
        id="dynamic-batch-order-not-restored-before-mask",
        title="Outputs are masked before their order is restored",
        source="verl f147ede20",
        category="loss",
        stage=("old_log_prob", "advantage"),
        culprit="forward",
        layer="unit-op",
        setting="dynamic micro batches over unequal lengths",
        why="a permuted tensor meets the mask of the original order",
        apply=_masked_before_restoring,
    ),
    Fault(
        id="side-loss-missing-microbatch-scale",
        title="The scale of a side loss is never set",
        source="MindSpeed 5516e15e, Megatron-LM ec97c85a60",
        category="loss",
        stage=UPDATE,
        culprit="side_loss",
        layer="layer-grad",
        setting="more than one micro batch",
        why="the side loss's gradient is micro-batches times too large",
        apply=_scale_never_set,
    ),
    Fault(
        id="entropy-from-mutated-logits",
        title="Entropy is taken of logits that the log-prob has overwritten",
        source="verl 73fc53f60, 51504d849",
        category="loss",
        stage=SCORING,
        culprit="entropy",
        layer="unit-op",
        setting="entropy and log-prob from one buffer",
        why="logits hold exp(logits − max) by then",
        apply=_exponentials_in_the_logits,
    ),
    Fault(
        id="fused-ce-counts-phantom-vocab",
        title="Padded vocabulary columns count in the log-sum-exp",
        source="verl 37ff251ea (#2656, #2899)",
        category="loss",
        stage=SCORING,
        culprit="vocab_parallel",
        layer="unit-op",
        setting="a vocabulary that does not divide, all logits negative",
        why="zeros instead of −inf in the padding add e⁰ each",
        apply=_zeros_in_the_padding,
    ),
    Fault(
        id="fused-loss-drops-hidden-grad",
        title="A fused output layer returns no gradient for the hidden states",
        source="verl e48725a95",
        category="loss",
        stage=UPDATE,
        culprit="hidden",
        layer="layer-grad",
        setting="fused kernels",
        why="only the output layer trains",
        apply=all_of(_no_hidden_gradient, _detached_hidden),
    ),
    Fault(
        id="kl-buffer-reused-in-place",
        title="Rewards are built in the tensor of the KL",
        source="slime 045310b2b",
        category="loss",
        stage=("advantage",),
        culprit="apply_kl_penalty",
        layer="unit-op",
        setting="KL in the reward",
        why="what is reported as KL contains the reward",
        apply=_reward_in_the_kl_buffer,
    ),
    Fault(
        id="critic-output-divided-by-temperature",
        title="Values are divided by the rollout temperature",
        source="slime d9d149dce",
        category="loss",
        stage=("advantage",),
        culprit="values",
        layer="unit-op",
        setting="temperature ≠ 1",
        why="the extraction of responses divides whatever it extracts",
        apply=_tempered_values,
    ),
    Fault(
        id="logprob-computed-in-train-mode",
        title="Dropout is active while log-probs are scored",
        source="verl c79055298",
        category="loss",
        stage=("old_log_prob", "ref_log_prob"),
        culprit="log_probs",
        layer="rollout-vs-train-logprob",
        setting="a model with dropout",
        why="two scorings differ",
        apply=_dropout_while_scoring,
    ),
)
