"""Defects between trainer and rollout engine: conversion, layout, quantisation, transfer, and what stays behind."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from alignment.faults.fault import Fault
from alignment.faults.seam import all_of, seam, wrapped

BOTH = ("weight_sync", "rollout")
TRAINING = ("old_log_prob", "ref_log_prob", "actor_update")
ENGINE = "alignment.backends.golden_rollout:GoldenRollout"


@seam(f"{ENGINE}.process_weights_after_loading")
def _derived_at_start_only(original):
    def process(self):
        if next(self._attentions())[1].w_uv is None:
            original(self)

    return process


def _transposed_copy_kept():
    # Made when the engine is, as a view would be on a device; the update rebinds the weight and leaves the copy.
    def process(original):
        def made(self):
            original(self)
            for _, attention in self._attentions():
                projection = attention.o_proj
                if not hasattr(projection, "weight_t"):
                    projection.weight_t = projection.weight.detach().t().contiguous()

        return made

    def forward(original):
        def multiply(self, x):
            return x @ self.weight_t if hasattr(self, "weight_t") else original(self, x)

        return multiply

    return all_of(
        lambda: wrapped(f"{ENGINE}.process_weights_after_loading", process),
        lambda: wrapped("alignment.models.linear:Linear.forward", forward),
    )()


@seam(f"{ENGINE}.update_weights")
def _default_loader_from_the_second_update(original):
    def update(self, stream, *, post_process=True, partial=False):
        again = getattr(self, "updated_before", False)

        def loaded():
            for name, tensor in stream:
                # Without its loader the parameter is filled as it comes, and the layout the kernel wants is not made.
                yield (
                    name,
                    tensor.t() if again and ".experts." in name and tensor.shape[0] == tensor.shape[1] else tensor,
                )

        original(self, loaded(), post_process=post_process, partial=partial)
        self.updated_before = True

    return update


@seam("alignment.weights.rope_layout:reorder_rope_rows")
def _permuted_along_the_input(original):
    return lambda weight, *, rope_dim: original(weight.t().contiguous(), rope_dim=rope_dim).t()


@seam(f"{ENGINE}.update_weights")
def _every_other_update_skipped(original):
    def update(self, stream, *, post_process=True, partial=False):
        self.updates_seen = getattr(self, "updates_seen", 0) + 1
        if self.updates_seen % 2 or self._unsynced:
            original(self, stream, post_process=post_process, partial=partial)

    return update


@seam("alignment.backends.prefix_cache:PrefixCachingRollout.reset_prefix_cache")
def _prefixes_kept(original):
    return lambda self: None


@seam("alignment.weights.fp8_rollout:is_quantised")
def _gate_quantised(original):
    return lambda name, tensor: original(name, tensor) or name.endswith("mlp.gate.weight")


@seam("alignment.weights.fp8:quantize")
def _blocks_counted_by_floor(original):
    def quantize(weight, *, block=(128, 128)):
        codes, scale = original(weight, block=block)
        rows, columns = (size // edge * edge for size, edge in zip(weight.shape, block))
        codes = codes.float()
        # The last, partial blocks are never processed.
        codes[rows:], codes[:, columns:] = 0, 0
        return codes.to(torch.float8_e4m3fn), scale

    return quantize


@seam("alignment.weights.fp8:quantize")
def _zero_block_divided(original):
    def quantize(weight, *, block=(128, 128)):
        codes, scale = original(weight, block=block)
        rows, columns = weight.shape
        padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
        blocks = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
        scale = torch.where(blocks.abs().amax(dim=(1, 3)) > 0, scale, torch.zeros_like(scale))
        divided = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
        return torch.where(divided.isnan(), divided, codes.float()).to(torch.float8_e4m3fn), scale

    return quantize


@seam("alignment.weights.buckets:take_out")
def _views_kept(original):
    return lambda bucket, slot: bucket.buffer[slot.begin : slot.end].view(slot.dtype).view(slot.shape)


@seam("alignment.weights.buckets:bytes_of")
def _storage_order(original):
    def packed(tensor):
        if tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return original(tensor)
        return original(torch.as_strided(tensor, (tensor.numel(),), (1,)))

    return packed


@seam("alignment.weights.checkpoint:_copy_into")
def _copied_backwards(original):
    def copy(model, tensors):
        state = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in tensors:
                tensor.copy_(state[name].fill_(0.5))

    return copy


@seam(f"{ENGINE}.update_weights")
def _head_kept_apart(original):
    def update(self, stream, *, post_process=True, partial=False):
        if self.config.tie_word_embeddings:
            model = dict(self.named_modules())[""]
            if model.lm_head.weight is model.model.embed_tokens.weight:
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
        original(self, stream, post_process=post_process, partial=partial)

    return update


@seam("alignment.weights.fused_qkv:split_qkv")
def _split_along_the_rows(original):
    def split(fused, *, groups, head_dim):
        kept = groups * head_dim
        return (
            fused[: len(fused) - 2 * kept],
            fused[len(fused) - 2 * kept : len(fused) - kept],
            fused[len(fused) - kept :],
        )

    return split


@seam("alignment.weights.megatron_layout:unshard")
def _replicas_joined(original):
    def unshard(parameter, shards):
        for name, tensor in original(parameter, shards):
            if "_a_proj" in name:
                # The loader cuts what is too long: rank 0's rows, the first half of them twice.
                tensor = torch.cat([shards[0][: len(shards[0]) // 2]] * 2 + [shards[0]])[: len(tensor)]
            yield name, tensor

    return unshard


@seam("alignment.weights.megatron_layout:fetch_from")
def _experts_only_merged_with_ep(original):
    def fetch_from(config, sizes, states, *naming):
        fetch = original(config, sizes, states, *naming)

        def fetched(parameter):
            parts = fetch(parameter)
            if parameter.expert is not None and sizes.expert_model_parallel_size == 1:
                return [parts[0], *(torch.zeros_like(part) for part in parts[1:])]
            return parts

        return fetched

    return fetch_from


@seam("alignment.models.config:ModelConfig.from_hf")
def _unknown_keys_dropped(original):
    def from_hf(cls, hf, **more):
        known_to_the_base = {k: v for k, v in hf.items() if k not in ("q_lora_rank", "rope_scaling")}
        return original(cls, known_to_the_base, **more)

    return from_hf


@seam("alignment.models.config:_read_rope")
def _theta_read_at_the_old_place(original):
    def read(hf, where):
        theta, scaling = original(hf, where)
        return hf.get("rope_theta", 10000.0), scaling

    return read


@seam("alignment.models.fp8_cache:push_scales")
def _scales_dropped(original):
    def push(scales, caches):
        if any(cache.scale is None for cache in caches.values()):
            original(scales, caches)

    return push


def _fault(**fields) -> Fault:
    return Fault(category="weight-sync", **fields)


FAULTS = (
    _fault(
        id="mla-absorbed-weights-stale",
        title="w_uk_t and w_uv are made at start-up and never again",
        source="verl e2d45b00e, pull request 4130; vllm-ascend",
        stage=BOTH,
        culprit="w_uk_t | w_uv",
        layer="weight-sync",
        setting="derived weights that are copies; decode",
        why="kv_b_proj is updated in place and its copies are not",
        apply=_derived_at_start_only,
    ),
    _fault(
        id="cached-transposed-weight-stale",
        title="a linear layer multiplies with a transposed copy from its construction",
        source="vllm-ascend 09682e0751, issue 5747",
        stage=BOTH,
        culprit="o_proj",
        layer="weight-sync",
        setting="a second update",
        why="the update does not reach the copy, and every parameter compares equal",
        apply=_transposed_copy_kept,
    ),
    _fault(
        id="reregistered-param-loses-loader",
        title="experts are stored in the wrong layout from the second update on",
        source="vllm-ascend bdab23475a, 032b3f4a04",
        stage=("weight_sync",),
        culprit="experts",
        layer="weight-sync",
        setting="square experts, a second update",
        why="a new Parameter object lost the loader of the old one",
        apply=_default_loader_from_the_second_update,
    ),
    _fault(
        id="mlapo-rope-reorder-wrong-axis",
        title="rotary channels are reordered along the input axis",
        source="vllm-ascend dc960e798e",
        stage=("rollout",),
        culprit="kv_a_proj_with_mqa | q_proj",
        layer="layer-logits",
        setting="the fused pre-processing of MLA",
        why="the helper expects [out, in] and is given the transposed matrix",
        apply=_permuted_along_the_input,
    ),
    _fault(
        id="rollout-one-version-behind",
        title="every other update is skipped",
        source="trl 5312, 5313; verl b96b9ab53",
        stage=BOTH,
        culprit="model. | lm_head",
        layer="weight-sync",
        setting="several updates, one of them tiny",
        why="the bookkeeping of sleep and wake leaves the engine with older weights",
        apply=_every_other_update_skipped,
    ),
    _fault(
        id="prefix-cache-survives-update",
        title="keys of the old weights are used after an update",
        source="NeMo-RL 535eaab06, d4901ff62; ms-swift 4dbee0f6b; prime-rl 1650; verl accb1a07d",
        stage=BOTH,
        culprit="prefix_cache",
        layer="rollout-vs-train-logprob",
        setting="a repeated prompt after an update",
        why="the prefix cache is not emptied",
        apply=_prefixes_kept,
    ),
    _fault(
        id="router-gate-quantised",
        title="the router's weight is rounded to FP8 with the linear layers",
        source="verl 597b63fae, 3b11b52ee",
        stage=BOTH,
        culprit="mlp.gate",
        layer="layer-logits",
        setting="an FP8 rollout",
        why="a few percent of the choices change",
        apply=_gate_quantised,
    ),
    _fault(
        id="scale-group-count-floor",
        title="the ragged last block is lost",
        source="vllm-ascend d857777d9c; verl e75c570ea; MindSpeed 93970345",
        stage=("weight_sync", "rollout", "actor_update"),
        culprit="fp8.quantize",
        layer="unit-op",
        setting="dimensions that the block does not divide",
        why="n // block instead of its ceiling",
        apply=_blocks_counted_by_floor,
    ),
    _fault(
        id="fp8-zero-block-nan",
        title="a block of zeros becomes NaN",
        source="slime dd4851f26",
        stage=("weight_sync", "checkpoint"),
        culprit="fp8.quantize",
        layer="unit-op",
        setting="a block that is all zeros",
        why="its scale is 0 and 0/0 is NaN",
        apply=_zero_block_divided,
    ),
    _fault(
        id="reused-bucket-buffer-aliased",
        title="received tensors are views of a buffer that is filled again",
        source="verl 173945f28; verl-recipe a9e75bb",
        stage=("weight_sync", "rollout", "teacher"),
        culprit="buckets",
        layer="weight-sync",
        setting="several buckets, a consumer that keeps them",
        why="the tensors of a bucket become those of the last one",
        apply=_views_kept,
    ),
    _fault(
        id="noncontiguous-export-packed-by-storage",
        title="a transposed tensor is packed in the order of its storage",
        source="verl c47d54e83; NeMo-RL 684080e4f",
        stage=("weight_sync",),
        culprit="buckets",
        layer="weight-sync",
        setting="a tensor that is not contiguous",
        why="the bytes of W.T are those of W",
        apply=_storage_order,
    ),
    _fault(
        id="converter-copy-direction-reversed",
        title="source and destination of a conversion are exchanged",
        source="verl 615f5f146",
        stage=("checkpoint",),
        culprit=".weight",
        layer="weight-sync",
        setting="none",
        why="dst.copy_(src) with its arguments swapped: the target stays as it was allocated",
        apply=_copied_backwards,
    ),
    _fault(
        id="tied-head-updated-on-one-side",
        title="a tied head kept as a second tensor is not updated",
        source="vllm 51665; prime-rl 2823; NeMo-RL 755109d72, 051294558",
        stage=BOTH,
        culprit="lm_head",
        layer="weight-sync",
        setting="a tied head",
        why="only the embedding is in the update",
        apply=_head_kept_apart,
    ),
    _fault(
        id="fused-qkv-regrouping-error",
        title="a fused projection is split as [all q, all k, all v]",
        source="vime 274, 275",
        stage=BOTH,
        culprit="qkv_proj",
        layer="weight-sync",
        setting="several key groups",
        why="Megatron stores [q, k, v] group by group: heads are permuted",
        apply=_split_along_the_rows,
    ),
    _fault(
        id="replicated-down-proj-concatenated",
        title="replicated down projections are joined instead of taken once",
        source="mbridge db44c62",
        stage=("checkpoint", "weight_sync"),
        culprit="kv_a_proj_with_mqa | q_a_proj",
        layer="weight-sync",
        setting="TP > 1",
        why="the merge rule of sharded tensors is used for replicated ones",
        apply=_replicas_joined,
    ),
    _fault(
        id="expert-export-needs-ep-gt-1",
        title="experts are merged over TP only where EP > 1",
        source="mbridge b51c310",
        stage=("weight_sync", "checkpoint"),
        culprit="experts",
        layer="weight-sync",
        setting="EP = 1, TP > 1",
        why="one rank's part is exported for the whole expert",
        apply=_experts_only_merged_with_ep,
    ),
    _fault(
        id="mla-config-keys-silently-removed",
        title="keys of the configuration that a base class does not know are dropped",
        source="verl 3ebe6717a, 3f630e741",
        stage=TRAINING,
        culprit="config.q_lora_rank | config.rope_scaling",
        layer="layer-logits",
        setting="a query latent, YaRN",
        why="defaults stand for q_lora_rank and the rope settings",
        apply=_unknown_keys_dropped,
    ),
    _fault(
        id="rope-theta-default-after-config-move",
        title="rope_theta is not read where newer configurations keep it",
        source="slime d2698386c; mbridge 4389fcc, a42336b, d292833",
        stage=TRAINING,
        culprit="config.rope_theta",
        layer="layer-logits",
        setting="rope_theta ≠ 10000 inside rope_parameters",
        why="the default stands for it",
        apply=_theta_read_at_the_old_place,
    ),
    _fault(
        id="kv-cache-scales-not-forwarded",
        title="the FP8 cache keeps the scales of the first weights",
        source="NeMo-RL d5824c064",
        stage=BOTH,
        culprit="k_scale",
        layer="rollout-vs-train-logprob",
        setting="keys that grow after an update",
        why="new keys saturate, or lose their resolution",
        apply=_scales_dropped,
    ),
)
