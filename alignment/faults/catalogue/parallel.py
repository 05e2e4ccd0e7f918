"""Defects of parallel layouts: masks, offsets, merges, reductions, ownership and overlapping work."""

from __future__ import annotations

import torch

from alignment.faults.fault import Fault
from alignment.faults.seam import seam

UPDATE = ("actor_update",)
SCORING = ("old_log_prob", "actor_update")
CONTEXT = "alignment.models.parallel.context_parallel"


@seam(f"{CONTEXT}:merge")
def _previous_not_rescaled(original):
    def merge(first, second):
        from alignment.models.parallel import context_parallel

        top = torch.maximum(first.lse, second.lse)
        finite = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
        # the first partial keeps the weight of its own maximum
        a = torch.where(torch.isneginf(first.lse), torch.zeros_like(top), torch.ones_like(top))
        b = torch.exp(second.lse - finite)
        out = (a.unsqueeze(-1) * first.out + b.unsqueeze(-1) * second.out) / (a + b).clamp(min=1e-30).unsqueeze(-1)
        return context_parallel.Partial(out=out, lse=torch.logaddexp(first.lse, second.lse))

    return merge


@seam("alignment.models.parallel.data_parallel:rank_factor")
def _without_cp(original):
    return lambda dp, cp: dp


@seam("alignment.models.parallel.sequence_parallel:reduced_gradient")
def _sum_of_replicas(original):
    def reduced_gradient(gradients, *, kind, dim=0):
        return original(gradients, kind="sequence_parallel" if kind == "replicated" else kind, dim=dim)

    return reduced_gradient


@seam("alignment.models.parallel.sequence_parallel:gathered_gradient")
def _sum_of_duplicates(original):
    return lambda gradients, *, consumers: original(gradients, consumers="sharded")


@seam(f"{CONTEXT}:local_rope")
def _rope_without_offset(original):
    def local_rope(cos, sin, cu_seqlens, cp):
        from alignment.models.parallel import context_parallel, packing

        tables = []
        for rank in range(cp):
            places = context_parallel.local_indices(cu_seqlens, cp, rank)
            within = places - cu_seqlens[packing.segments(cu_seqlens)[places]]
            tables.append((cos[:, within], sin[:, within]))
        return tables

    return local_rope


@seam(f"{CONTEXT}:local_labels")
def _rolled_per_shard(original):
    def local_labels(input_ids, cu_seqlens, cp):
        from alignment.models.parallel import context_parallel

        return [part.roll(-1, dims=1) for part in context_parallel.shard(input_ids, cu_seqlens, cp)]

    return local_labels


@seam(f"{CONTEXT}:local_rope")
def _rope_cut_along_the_batch(original):
    def local_rope(cos, sin, cu_seqlens, cp):
        size = cos.shape[1] // cp
        # the batch dimension of 1 cannot be cut, so that every rank keeps it, and takes as many rows as it needs
        return [(cos.chunk(cp, dim=0)[0][:, :size], sin.chunk(cp, dim=0)[0][:, :size]) for _ in range(cp)]

    return local_rope


@seam(f"{CONTEXT}:local_head_count")
def _configured_heads(original):
    return lambda heads, cp: heads


@seam("alignment.models.parallel.collectives:nested_reduce_scatter")
def _same_order(original):
    def nested_reduce_scatter(wholes, *, inner):
        from alignment.models.parallel import collectives

        return collectives._scatter_outer(collectives._scatter_inner(wholes, inner), inner)

    return nested_reduce_scatter


@seam("alignment.models.parallel.pipeline:layer_number")
def _number_in_the_stage(original):
    return lambda stage, local: local + 1


@seam("alignment.models.parallel.expert_parallel:expert_parallel_gathered")
def _local_experts_only(original):
    def gathered(moe, parts, *, inner=1):
        from alignment.models.parallel import expert_parallel

        held = expert_parallel.owners(len(moe.experts), len(parts))
        outputs = []
        for part, mine in zip(parts, held):
            out = expert_parallel.local_experts(moe, part, *moe.gate(part), mine)
            outputs.append(out if moe.shared_experts is None else out + moe.shared_experts(part))
        return outputs

    return gathered


@seam("alignment.models.parallel.gradient_norm:counted")
def _every_copy_counts(original):
    return lambda gradients, rank: True


@seam("alignment.backends.simulated_streams:PendingTensor.result")
def _without_waiting(original):
    return lambda self: self._destination


@seam("alignment.backends.simulated_streams:is_free")
def _free_at_once(original):
    return lambda event: True


FAULTS = (
    Fault(
        id="mla-cp-path-never-compared",
        title="Ring attention merges partial outputs without rescaling the previous one",
        source="MindSpeed d5ce7467, 49651220, verl 875788ef6 (template)",
        category="parallel",
        stage=SCORING,
        culprit="context_parallel.merge | ring_attention",
        layer="layer-logits",
        setting="CP > 1, a sequence over chunks",
        why="the running maximum moves, and what was merged under the old one stays as it was",
        apply=_previous_not_rescaled,
    ),
    Fault(
        id="cp-loss-factor-missing",
        title="The loss is not multiplied by the context parallel size",
        source="Megatron-LM 5946e24b37, 3bdcbbbe5d, #673; slime f9f00b2cb, 763f18d5b",
        category="parallel",
        stage=UPDATE,
        culprit="token_mean",
        layer="layer-grad",
        setting="CP > 1",
        why="gradients are averaged over DP·CP, the shares of the loss are not scaled by it",
        apply=_without_cp,
    ),
    Fault(
        id="replicated-tower-grads-marked-sequence-parallel",
        title="Gradients of replicated weights are summed over ranks",
        source="mbridge d23a126",
        category="parallel",
        stage=UPDATE,
        culprit="reduced_gradient.tower",
        layer="layer-grad",
        setting="TP > 1 with sequence parallelism",
        why="equal gradients add up to TP times the right one",
        apply=_sum_of_replicas,
    ),
    Fault(
        id="allgather-backward-sums-duplicates",
        title="The backward of a gather sums equal gradients",
        source="slime 478b80709",
        category="parallel",
        stage=UPDATE,
        culprit="gathered_gradient | reduced_gradient.norm | reduced_gradient.up",
        layer="layer-grad",
        setting="a gathered activation that all ranks compute the same with",
        why="reduce-scatter instead of a slice",
        apply=_sum_of_duplicates,
    ),
    Fault(
        id="packed-rope-offset-under-cp",
        title="Every sequence of a pack takes its rotary rows from the start of the table",
        source="Megatron-LM d30e165203",
        category="parallel",
        stage=SCORING,
        culprit="local_rope",
        layer="layer-logits",
        setting="CP > 1, a table of the whole pack, second sample of the pack",
        why="the offset cu_seqlens[i] is left out",
        apply=_rope_without_offset,
    ),
    Fault(
        id="labels-rolled-after-sharding",
        title="Labels are shifted inside each shard",
        source="verl 575d5a8ab (#6068), 10175743f",
        category="parallel",
        stage=SCORING,
        culprit="local_labels",
        layer="unit-op",
        setting="CP > 1",
        why="the last token of a chunk gets another chunk's first one as label",
        apply=_rolled_per_shard,
    ),
    Fault(
        id="cp-slice-on-wrong-axis",
        title="Rotary tables are cut along the batch instead of the sequence",
        source="Megatron-LM 28778d1283",
        category="parallel",
        stage=SCORING,
        culprit="local_rope",
        layer="layer-logits",
        setting="CP > 1",
        why="every rank gets the same positions",
        apply=_rope_cut_along_the_batch,
    ),
    Fault(
        id="ulysses-head-count-not-updated",
        title="The kernel between two all-to-alls is told the configured head count",
        source="MindSpeed 9d30bcf0",
        category="parallel",
        stage=UPDATE + ("old_log_prob",),
        culprit="ulysses",
        layer="layer-logits",
        setting="CP > 1, flattened layout",
        why="every head is cut into CP pseudo heads",
        apply=_configured_heads,
    ),
    Fault(
        id="nested-gather-undone-in-same-order",
        title="Two gathers are undone in the order they were done",
        source="vllm-ascend 6e52ce3e79",
        category="parallel",
        stage=("rollout",),
        culprit="nested_reduce_scatter",
        layer="unit-op",
        setting="gathers over two groups",
        why="every rank gets another one's tokens",
        apply=_same_order,
    ),
    Fault(
        id="layer-number-local-to-stage",
        title="A layer's number is its index in the pipeline stage",
        source="Megatron-LM 0504e973d8",
        category="parallel",
        stage=UPDATE,
        culprit="layer_number",
        layer="layer-logits",
        setting="PP > 1, a feature that depends on depth",
        why="stages beyond the first begin at 1 again",
        apply=_number_in_the_stage,
    ),
    Fault(
        id="dispatch-combine-default-noop",
        title="Dispatch and combine do nothing",
        source="vllm-ascend af04ee9e7a, #1597, #5544",
        category="parallel",
        stage=("rollout",),
        culprit="expert_parallel",
        layer="layer-logits",
        setting="DP > 1 with expert parallelism",
        why="ranks compute only local experts for local tokens",
        apply=_local_experts_only,
    ),
    Fault(
        id="grad-norm-counts-replicas",
        title="The gradient norm counts every copy of a weight",
        source="Megatron-LM 80a2d39c93, b2e93909f0",
        category="parallel",
        stage=UPDATE,
        culprit="gradient_norm",
        layer="layer-grad",
        setting="replicated weights",
        why="g² is summed over ranks that hold the same g",
        apply=_every_copy_counts,
    ),
    Fault(
        id="async-result-read-before-done",
        title="A buffer is read before the work that fills it is done",
        source="Megatron-LM 54d4b3ddbb, torch_npu 49b4c947c, verl cc2799b23",
        category="parallel",
        stage=("rollout", "old_log_prob", "actor_update"),
        culprit="result",
        layer="unit-op",
        setting="work that overlaps",
        why="nobody waits for the event",
        apply=_without_waiting,
    ),
    Fault(
        id="cross-stream-buffer-reuse",
        title="A buffer is used again while another stream still reads it",
        source="vllm-ascend fc0ce85b58, torch_npu e2e4258a1, slime e94f1b3bf",
        category="parallel",
        stage=("rollout", "actor_update"),
        culprit="buffer",
        layer="unit-op",
        setting="several steps in flight",
        why="the allocator does not know the reader",
        apply=_free_at_once,
    ),
)
