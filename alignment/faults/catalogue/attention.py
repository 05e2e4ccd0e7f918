"""Defects of attention: scale, masks, rotary embedding, KV cache."""

from __future__ import annotations

import dataclasses

import torch

from alignment.faults.fault import Fault
from alignment.faults.seam import all_of, seam, wrapped
from alignment.models.config import YarnScaling

TRAINING = ("old_log_prob", "ref_log_prob", "actor_update")
EVERYWHERE = ("rollout", *TRAINING)


@seam("alignment.models.mla:softmax_scale")
def _scale_by_value_width(original):
    return lambda config: config.v_head_dim**-0.5


@seam("alignment.models.rope:inverse_frequencies")
def _always_yarn(original):
    yarn = YarnScaling(factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)

    def frequencies(config):
        return original(dataclasses.replace(config, rope_scaling=config.rope_scaling or yarn))

    return frequencies


@seam("alignment.models.rope:softmax_mscale")
def _factor_of_the_other_field(original):
    def factor(scaling):
        if scaling is None:
            return 1.0
        return original(dataclasses.replace(scaling, mscale_all_dim=scaling.mscale))

    return factor


@seam("alignment.models.rope:softmax_mscale")
def _no_softmax_correction(original):
    return lambda scaling: 1.0


@seam("alignment.models.rope:rotate_interleaved")
def _halves_on_the_key(original):
    def rotate(x, cos, sin):
        if x.shape[1] != 1:
            return original(x, cos, sin)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    return rotate


@seam("alignment.models.rope:rotate_interleaved")
def _second_half_not_written(original):
    def rotate(x, cos, sin):
        half = x.shape[-1] // 2
        unrotated = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return torch.cat([original(x, cos, sin)[..., :half], unrotated[..., half:]], dim=-1)

    return rotate


def _whole_head():
    def tables(original):
        return lambda position_ids, *, rotary_dim, theta: original(position_ids, rotary_dim=2 * rotary_dim, theta=theta)

    def rotate(original):
        def whole(x, cos, sin, *, rotary_dim, interleaved):
            pairs = x.shape[-1] // 2
            return original(x, cos[..., :pairs], sin[..., :pairs], rotary_dim=2 * pairs, interleaved=interleaved)

        return whole

    return all_of(
        lambda: wrapped("alignment.models.partial_rope:partial_tables", tables),
        lambda: wrapped("alignment.models.partial_rope:rotate_partially", rotate),
    )()


@seam("alignment.models.attention:scaled_dot_product")
def _mask_cache_changed_in_place(original):
    cache: dict[tuple, torch.Tensor] = {}

    def attend(query, key, value, *, scale, mask):
        additive = cache.setdefault((tuple(mask.shape), mask.sum().item()), (~mask).to(query.dtype))
        # The first call scales the shared 0/1 mask itself, and the second one scales the scaled one.
        additive.mul_(-1e4)
        return original(query, key, value, scale=scale, mask=mask if bool((additive <= 0).all()) else additive > 0)

    return attend


@seam("alignment.models.attention:attention_mask_from")
def _decode_without_a_mask(original):
    def mask_from(key_mask, *, query_slots=None, segment_ids=None):
        if query_slots == 1:
            return torch.ones(len(key_mask), 1, 1, key_mask.shape[1], dtype=torch.bool, device=key_mask.device)
        return original(key_mask, query_slots=query_slots, segment_ids=segment_ids)

    return mask_from


@seam("alignment.models.attention:scaled_dot_product")
def _mean_of_the_values(original):
    def attend(query, key, value, *, scale, mask):
        return original(query * 0, key, value, scale=scale, mask=mask)

    return attend


@seam("alignment.models.attention:attention_mask_from")
def _boundaries_of_the_first_row(original):
    def mask_from(key_mask, *, query_slots=None, segment_ids=None):
        if segment_ids is not None:
            segment_ids = segment_ids[:1].expand_as(segment_ids)
        return original(key_mask, query_slots=query_slots, segment_ids=segment_ids)

    return mask_from


@seam("alignment.backends.paged_cache:PagedCache.map_slots")
def _stale_tail(original):
    def map_slots(self, slots):
        self.slot_mapping[: len(slots)] = slots

    return map_slots


@seam("alignment.models.linear_attention:gated_delta_rule")
def _state_flows_on(original):
    return lambda *tensors, cu_seqlens=None, **more: original(*tensors, cu_seqlens=None, **more)


def _fault(**fields) -> Fault:
    return Fault(category="attention", **fields)


FAULTS = (
    _fault(
        id="mla-softmax-scale-v-head-dim",
        title="softmax scale from the value width instead of the query width",
        source="MindSpeed a25e413e",
        stage=TRAINING,
        culprit="softmax_scale",
        layer="layer-logits",
        setting="qk_nope_head_dim + qk_rope_head_dim ≠ v_head_dim",
        why="scores are multiplied with v_head_dim^-½, which drops YaRN's factor as well",
        apply=_scale_by_value_width,
    ),
    _fault(
        id="mla-rope-type-assumed-yarn",
        title="YaRN frequencies for a model with plain rope",
        source="vllm-ascend d86021f7b4, issue 5385",
        stage=EVERYWHERE,
        culprit="rotary",
        layer="layer-logits",
        setting="rope_scaling absent",
        why="the kind of rope is assumed instead of read",
        apply=_always_yarn,
    ),
    _fault(
        id="mla-yarn-mscale-field-mixup",
        title="softmax factor from mscale instead of mscale_all_dim",
        source="Megatron-LM 62f0a9737d, issue 1429",
        stage=TRAINING,
        culprit="softmax_scale",
        layer="layer-logits",
        setting="YaRN with mscale ≠ mscale_all_dim",
        why="the two fields act in two places and are taken for each other",
        apply=_factor_of_the_other_field,
    ),
    _fault(
        id="mla-yarn-softmax-correction-missing",
        title="YaRN's second correction is left out",
        source="onnxruntime/mobius pull request 548",
        stage=EVERYWHERE,
        culprit="softmax_scale",
        layer="layer-logits",
        setting="YaRN with mscale_all_dim, positions > 0",
        why="only cos and sin are corrected, the attention scale is not",
        apply=_no_softmax_correction,
    ),
    _fault(
        id="rope-interleave-vs-half",
        title="split-halves rotation where the model pairs neighbours, on the key alone",
        source="vllm-ascend ee2ed573f1, c1392a6ce6; ms-swift 25d98e825",
        stage=EVERYWHERE,
        culprit="key.rotate_interleaved",
        layer="layer-logits",
        setting="positions > 0",
        why="pairs (i, i + d/2) are turned instead of (2i, 2i + 1)",
        apply=_halves_on_the_key,
    ),
    _fault(
        id="rope-second-half-not-written",
        title="only the first half of the rotated channels is stored",
        source="vllm-ascend 48b624e4cc",
        stage=("rollout",),
        culprit="rotate_interleaved",
        layer="unit-op",
        setting="positions > 0",
        why="the second half keeps the unrotated input",
        apply=_second_half_not_written,
    ),
    _fault(
        id="partial-rope-full-head",
        title="all channels of a head rotate instead of the first ones",
        source="vllm-ascend 1c0ecf806a, 80e5812b39",
        stage=EVERYWHERE,
        culprit="rotate_partially",
        layer="unit-op",
        setting="rotary_dim < head_dim",
        why="head_dim is passed for rotary_dim: frequencies and pairs are both wrong",
        apply=_whole_head,
    ),
    _fault(
        id="attn-mask-cache-mutated",
        title="a shared mask is scaled in place, call after call",
        source="vllm-ascend 643e6f5486",
        stage=("rollout",),
        culprit="scaled_dot_product",
        layer="unit-op",
        setting="the same shape a second time",
        why="the second call multiplies the scaled mask again, and its sign turns",
        apply=_mask_cache_changed_in_place,
    ),
    _fault(
        id="decode-mask-dropped",
        title="single-token decode attends without a mask",
        source="vllm-ascend 4adc032007",
        stage=("rollout",),
        culprit="attention_mask | self_attn",
        layer="layer-logits",
        setting="padded slots in the cache",
        why="the query attends to slots that hold no token",
        apply=_decode_without_a_mask,
    ),
    _fault(
        id="attention-returns-uniform-average",
        title="the softmax is not applied: the mean of the values comes back",
        source="vllm-ascend issue 13699",
        stage=("rollout",),
        culprit="scaled_dot_product",
        layer="unit-op",
        setting="more than one key",
        why="weights are equal whatever the scores are",
        apply=_mean_of_the_values,
    ),
    _fault(
        id="packed-seqlens-from-first-sample",
        title="boundaries of the first row are used for every row of packs",
        source="MindSpeed 8214f2f6",
        stage=("old_log_prob", "actor_update"),
        culprit="segment_ids",
        layer="layer-logits",
        setting="micro-batch > 1, packs with other boundaries",
        why="other rows get wrong document boundaries",
        apply=_boundaries_of_the_first_row,
    ),
    _fault(
        id="kv-slot-mapping-stale-tail",
        title="rows that pad a captured batch write to slots of an earlier batch",
        source="vllm-ascend ccb6fb9ec1, cbc987db0b, 5270d84675",
        stage=("rollout",),
        culprit="slot_mapping",
        layer="layer-logits",
        setting="a batch smaller than the one before",
        why="the tail of the slot mapping is not pointed at the dummy slot",
        apply=_stale_tail,
    ),
    _fault(
        id="linear-attn-state-leaks-across-pack",
        title="the recurrent state flows into the next sequence of a pack",
        source="slime 1d31a49fb",
        stage=("old_log_prob", "actor_update"),
        culprit="gated_delta_rule",
        layer="layer-logits",
        setting="second sample of a pack",
        why="the state is not reset at cu_seqlens",
        apply=_state_flows_on,
    ),
)
