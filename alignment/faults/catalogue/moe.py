"""Defects of mixtures of experts: routing, dispatch, bias, losses of the router."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

from alignment.faults.fault import Fault
from alignment.faults.seam import seam

TRAINING = ("old_log_prob", "ref_log_prob", "actor_update")
EVERYWHERE = ("rollout", *TRAINING)
SELECT = "alignment.models.moe:select_experts"


@seam(SELECT)
def _bias_in_the_weights(original):
    def select(scores, bias, config):
        chosen, _ = original(scores, bias, config)
        weights = (scores + bias).gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights * config.routed_scaling_factor

    return select


@seam("alignment.models.moe:Router.forward")
def _logits_rounded(original):
    def forward(self, x):
        if x.dtype != torch.bfloat16:
            return original(self, x)
        from alignment.models import moe

        scores = torch.sigmoid(F.linear(x, self.weight.to(x.dtype)).float())
        return moe.select_experts(scores, self.e_score_correction_bias.float(), self.config)

    return forward


@seam("alignment.backends.weight_sync:stream_weights")
def _bias_not_sent(original):
    def stream(model, *, dtype=None):
        for name, tensor in original(model, dtype=dtype):
            yield name, torch.zeros_like(tensor) if name.endswith("e_score_correction_bias") else tensor

    return stream


@seam(SELECT)
def _groups_by_their_best(original):
    def select(scores, bias, config):
        if config.n_group == 1:
            return original(scores, bias, config)
        tokens, experts = scores.shape
        grouped = (scores + bias).view(tokens, config.n_group, -1)
        best = grouped.amax(-1).topk(config.topk_group, dim=-1).indices
        kept = torch.zeros(tokens, config.n_group, dtype=torch.bool).scatter_(1, best, True)
        far = (~kept).repeat_interleave(experts // config.n_group, dim=1) * 1e4
        return original(scores, bias - far, dataclasses.replace(config, n_group=1, topk_group=1))

    return select


@seam(SELECT)
def _no_scaling_factor(original):
    return lambda scores, bias, config: original(scores, bias, dataclasses.replace(config, routed_scaling_factor=1.0))


@seam("alignment.models.expert_dispatch:reduce_partial_sums")
def _reduced_twice(original):
    return lambda parts: original(original(parts))


@seam("alignment.models.expert_dispatch:reduce_token_shards")
def _shards_added_up(original):
    def reduce(parts):
        shards = original(parts)
        return [torch.stack(shards).sum(0)] * len(shards) if len({len(s) for s in shards}) == 1 else shards

    return reduce


@seam("alignment.models.expert_dispatch:counts_from_offsets")
def _first_difference_reused(original):
    def counts(cumulative):
        difference = torch.diff(cumulative)
        return torch.cat([difference[:1], difference])

    return counts


@seam("alignment.models.expert_dispatch:gated_activation")
def _always_silu(original):
    return lambda gate, up, *, kind="silu": original(gate, up, kind="silu")


@seam("alignment.models.mlp:SwiGLU.forward")
def _alpha_and_bias_of_another_family(original):
    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(gate * torch.sigmoid(1.702 * gate) * (up + 1))

    return forward


@seam("alignment.models.expert_dispatch:routed_experts")
def _bias_unweighted(original):
    def routed(x, chosen, weights, experts, *, held=None, capacity=None):
        if experts.down_bias is None:
            return original(x, chosen, weights, experts, held=held, capacity=capacity)
        out = original(x, chosen, weights, dataclasses.replace(experts, down_bias=None), held=held, capacity=capacity)
        first = 0 if held is None else held.start
        mine = (chosen >= first) & (chosen < first + len(experts))
        bias = experts.down_bias[(chosen - first).clamp(0, len(experts) - 1)]
        return out + (bias * mine.unsqueeze(-1)).sum(1)

    return routed


@seam("alignment.models.expert_dispatch:unpermute")
def _marker_made_positive(original):
    def unpermute(rows, weights, how):
        return original(rows, weights, dataclasses.replace(how, place=how.place.abs()))

    return unpermute


@seam("alignment.models.moe:MixtureOfExperts.run_experts")
def _second_weight_gradient(original):
    def run(self, x, chosen, weights):
        spurious = sum((expert.gate_proj.weight * weights.sum()).sum() for expert in self.experts)
        return original(self, x, chosen, weights) + (spurious - spurious.detach())

    return run


@seam("alignment.models.router_losses:side_scale")
def _tensor_parallel_forgotten(original):
    return lambda *, micro_batches=1, tensor_parallel=1: original(micro_batches=micro_batches)


@seam("alignment.models.router_losses:z_loss")
def _of_probabilities(original):
    return lambda logits, *, tokens=None: original(torch.softmax(logits, dim=-1), tokens=tokens)


@seam("alignment.models.router_replay:entry_of_layer")
def _by_order(original):
    return lambda layer, order: max(order, 1)


@seam(SELECT)
def _garbage_beyond_1024(original):
    def select(scores, bias, config):
        chosen, weights = original(scores, bias, config)
        if len(scores) > 1024:
            chosen, weights = chosen.clone(), weights.clone()
            chosen[1024:], weights[1024:] = torch.arange(chosen.shape[1]), 0.5
        return chosen, weights

    return select


def _fault(**fields) -> Fault:
    return Fault(category="moe", **fields)


FAULTS = (
    _fault(
        id="router-bias-leaks-into-weights",
        title="the load-balancing bias enters the weights",
        source="Megatron-LM eec34ff3ae; mlx-lm pull request 1354",
        stage=TRAINING,
        culprit="gate",
        layer="layer-logits",
        setting="a bias far from 0",
        why="weights are the biased scores of the chosen experts; no choice changes",
        apply=_bias_in_the_weights,
    ),
    _fault(
        id="router-gemm-rounds-to-bf16",
        title="router logits are rounded to bfloat16 before they are cast to float32",
        source="sglang issue 34861; vllm-ascend 78aa7ae362",
        stage=("rollout",),
        culprit="mlp.gate",
        layer="unit-op",
        setting="a bfloat16 model whose router is declared in float32",
        why="the cast behind the matmul restores nothing",
        apply=_logits_rounded,
    ),
    _fault(
        id="expert-bias-lost-in-export",
        title="the router's bias never reaches the rollout engine",
        source="verl 28587336a",
        stage=("weight_sync", "rollout"),
        culprit="e_score_correction_bias",
        layer="weight-sync",
        setting="a bias far from 0",
        why="the bias is a buffer and the exporter walks parameters",
        apply=_bias_not_sent,
    ),
    _fault(
        id="group-limit-score-rule",
        title="a group scores its best expert instead of its two best",
        source="Megatron-LM e85385a761, issue 1441",
        stage=EVERYWHERE,
        culprit="gate",
        layer="layer-logits",
        setting="n_group > 1",
        why="other groups stay in the choice",
        apply=_groups_by_their_best,
    ),
    _fault(
        id="routed-scaling-not-forwarded",
        title="routed_scaling_factor is left out",
        source="vllm-ascend 8486a744f4; sglang pull request 31449",
        stage=EVERYWHERE,
        culprit="gate",
        layer="layer-logits",
        setting="routed_scaling_factor ≠ 1",
        why="the routed branch is too weak beside the shared expert",
        apply=_no_scaling_factor,
    ),
    _fault(
        id="moe-output-reduced-twice",
        title="the output of the experts is all-reduced twice",
        source="vllm-ascend 68a4db5554, 2b3bfe432e, issue 6710",
        stage=("rollout",),
        culprit="experts.reduce",
        layer="layer-logits",
        setting="TP > 1",
        why="runner and layer both add up: world size times the output",
        apply=_reduced_twice,
    ),
    _fault(
        id="moe-allreduce-over-token-shards",
        title="an all-reduce adds up different tokens after a reduce-scatter",
        source="vllm-ascend a777779cf5",
        stage=("rollout",),
        culprit="experts.reduce",
        layer="layer-logits",
        setting="sequence parallel with TP",
        why="each rank holds other tokens by then",
        apply=_shards_added_up,
    ),
    _fault(
        id="group-list-first-count-wrong",
        title="the count of the first expert is that of the second",
        source="vllm-ascend d43cabc2b1",
        stage=("rollout",),
        culprit="group_list | permutation | counts_from_offsets",
        layer="unit-op",
        setting="unequal counts of the first two experts",
        why="the first difference is used twice when cumulative counts become counts",
        apply=_first_difference_reused,
    ),
    _fault(
        id="moe-activation-hardcoded",
        title="experts always run SwiGLU",
        source="vllm-ascend eb0ce34e98",
        stage=("rollout",),
        culprit="activation",
        layer="layer-logits",
        setting="a model with tanh-GELU experts",
        why="the configured activation is not read",
        apply=_always_silu,
    ),
    _fault(
        id="swiglu-kernel-default-alpha-bias",
        title="SwiGLU with the alpha and the bias of another model family",
        source="vllm-ascend 79d1c6b22e",
        stage=("rollout",),
        culprit="swiglu",
        layer="unit-op",
        setting="none",
        why="defaults of the fused kernel apply where the caller passes nothing",
        apply=_alpha_and_bias_of_another_family,
    ),
    _fault(
        id="expert-down-bias-unweighted",
        title="the bias of the down projection is added unweighted",
        source="NeMo Automodel pull request 2591; Megatron-LM e4ea85970b",
        stage=EVERYWHERE,
        culprit="down_proj.bias",
        layer="layer-logits",
        setting="experts with biases",
        why="the routing weight is applied before the down projection",
        apply=_bias_unweighted,
    ),
    _fault(
        id="unpermute-abs-of-minus-one",
        title="the marker for tokens of other ranks becomes a valid row",
        source="vllm-ascend a99f254930",
        stage=("rollout",),
        culprit="unpermute",
        layer="unit-op",
        setting="EP > 1, or dropped tokens",
        why="abs(-1) is row 1",
        apply=_marker_made_positive,
    ),
    _fault(
        id="expert-wgrad-added-twice",
        title="a second weight gradient of the experts' first layer",
        source="MindSpeed 5cce8736",
        stage=("actor_update",),
        culprit="gate_proj.weight",
        layer="layer-grad",
        setting="gradients by parameter",
        why="the forward is right, a spurious term comes in through the routing probabilities",
        apply=_second_weight_gradient,
    ),
    _fault(
        id="aux-loss-scale-drops-parallel-factor",
        title="the gradient of the router's loss is TP times too large",
        source="Megatron-LM cac8d1a3f0, f6e0d425a5, 87d9d2506a, 9ef8a2a420",
        stage=("actor_update",),
        culprit="aux_loss",
        layer="layer-grad",
        setting="TP > 1",
        why="the side loss is not divided like the main one; the logged loss is right",
        apply=_tensor_parallel_forgotten,
    ),
    _fault(
        id="z-loss-on-probabilities",
        title="z-loss of probabilities instead of logits",
        source="Megatron-LM c656553315",
        stage=("actor_update",),
        culprit="z_loss",
        layer="unit-op",
        setting="logits away from 0",
        why="the softmax comes before the logsumexp",
        apply=_of_probabilities,
    ),
    _fault(
        id="router-replay-layer-offset",
        title="replayed experts are those of another layer",
        source="verl 6b4a867ff",
        stage=("old_log_prob", "actor_update"),
        culprit="gate.replay",
        layer="layer-logits",
        setting="dense layers before the first router",
        why="the record counts all layers, the trainer its routers",
        apply=_by_order,
    ),
    _fault(
        id="gating-kernel-wrong-above-1024-rows",
        title="rows beyond 1024 are routed wrongly",
        source="vllm-ascend 0dc58f8e81",
        stage=("rollout",),
        culprit="gate",
        layer="unit-op",
        setting="more than 1024 tokens in one call",
        why="a buffer of the fused kernel overflows",
        apply=_garbage_beyond_1024,
    ),
)
