"""Differences between two right implementations. None of them may raise an alarm.

Those that round act where the run is bfloat16 (or declares what they do): in float64 they would be defects.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

from alignment.faults.fault import Fault
from alignment.faults.seam import all_of, seam, wrapped
from alignment.numerics.precision import Precision
from alignment.numerics.random import portable_normal, portable_permutation

EVERYWHERE = ("rollout", "old_log_prob", "ref_log_prob", "actor_update")
LINEAR = "alignment.models.linear:Linear.forward"


@seam(LINEAR)
def _partial_sums(original):
    def forward(self, x):
        if x.dtype != torch.bfloat16 or x.shape[-1] < 8:
            return original(self, x)
        parts = [F.linear(a, b) for a, b in zip(x.tensor_split(8, dim=-1), self.weight.tensor_split(8, dim=-1))]
        total = torch.stack([part.float() for part in parts]).sum(0).to(x.dtype)
        return total if self.bias is None else total + self.bias

    return forward


@seam("alignment.models.mla:MultiHeadLatentAttention._attend_expanded")
def _absorbed_everywhere(original):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        from alignment.models import attention, mla

        c = self.config
        per_head = self.kv_b_proj.weight.view(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        w_uk, w_uv = per_head.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        query = torch.cat([torch.einsum("bhsn,hnr->bhsr", q_nope, w_uk), q_rope], dim=-1)
        key = torch.cat([latent, k_rope], dim=-1).unsqueeze(1)
        out = attention.scaled_dot_product(query, key, latent.unsqueeze(1), scale=mla.softmax_scale(c), mask=mask)
        return torch.einsum("bhsr,hvr->bhsv", out, w_uv)

    return attend


@seam(LINEAR)
def _reduction_by_batch(original):
    def forward(self, x):
        width = x.shape[-1]
        if x.dtype != torch.bfloat16 or width < 4:
            return original(self, x)
        cut = 1 + (7 * x.numel() // width) % (width - 1)
        first = F.linear(x[..., :cut], self.weight[:, :cut])
        total = (first.float() + F.linear(x[..., cut:], self.weight[:, cut:]).float()).to(x.dtype)
        return total if self.bias is None else total + self.bias

    return forward


@seam("alignment.backends.golden_rollout:_gather_log_probs")
def _healthy_noise(original):
    def gather(logits, tokens):
        log_probs = original(logits, tokens)
        if logits.dtype != torch.bfloat16:
            return log_probs
        seed = int(tokens.sum()) % 1_000_003
        noise = portable_normal(tuple(log_probs.shape), seed=seed, stream="healthy gap")
        return log_probs + 0.015 * noise.to(log_probs.dtype)

    return gather


def _positions_moved():
    def forward(original):
        def moved(self, input_ids, *, attention_mask=None, position_ids=None, segment_ids=None):
            from alignment.models import attention

            if position_ids is None:
                mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
                position_ids = attention.default_positions(mask, segment_ids)
            return original(
                self, input_ids, attention_mask=attention_mask, position_ids=position_ids + 7, segment_ids=segment_ids
            )

        return moved

    def extend(original):
        def moved(self, input_ids, cache, *, attention_mask=None, position_ids=None, absorbed=False):
            from alignment.models import attention

            if position_ids is None:
                mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
                position_ids = cache.real_tokens()[:, None] + attention.default_positions(mask)
            return original(
                self, input_ids, cache, attention_mask=attention_mask, position_ids=position_ids + 7, absorbed=absorbed
            )

        return moved

    return all_of(
        lambda: wrapped("alignment.models.backbone:Backbone.forward", forward),
        lambda: wrapped("alignment.models.backbone:Backbone.extend", extend),
    )()


@seam("alignment.models.moe:Router.forward")
def _near_ties_flip(original):
    def forward(self, x):
        if x.dtype != torch.bfloat16:
            return original(self, x)
        from alignment.models import moe

        logits = F.linear(x.float(), self.weight.float())
        noise = portable_normal(tuple(logits.shape), seed=x.numel(), stream="near ties").to(logits.dtype)
        scores = torch.sigmoid(logits + 1e-3 * noise)
        return moe.select_experts(scores, self.e_score_correction_bias.float(), self.config)

    return forward


@seam("alignment.models.moe:select_experts")
def _another_order_of_choices(original):
    def select(scores, bias, config):
        chosen, weights = original(scores, bias, config)
        order = portable_permutation(chosen.shape[1], seed=len(scores), stream="order of choices")
        return chosen[:, order], weights[:, order]

    return select


@seam("alignment.rl.losses:ActorLoss.__call__")
def _logged_value_scaled(original):
    def loss(self, outputs, micro_batch):
        value, metrics = original(self, outputs, micro_batch)
        return value, {name: metric * 4 if "loss" in name else metric for name, metric in metrics.items()}

    return loss


@seam("alignment.backends.golden_rollout:GoldenRollout.generate")
def _another_stream(original):
    def generate(self, prompts, attention_mask, params, keys):
        return original(self, prompts, attention_mask, dataclasses.replace(params, seed=params.seed + 1), keys)

    return generate


@seam(LINEAR)
def _ten_bits_of_mantissa(original):
    def cut(x):
        # 13 of 23 bits are rounded away.
        bits = x.detach().contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

    def forward(self, x):
        if x.dtype != torch.float32 or torch.is_grad_enabled():
            return original(self, x)
        return F.linear(cut(x), cut(self.weight), self.bias)

    return forward


def _benign(**fields) -> Fault:
    return Fault(category="benign", culprit="nothing", benign=True, **fields)


FAULTS = (
    _benign(
        id="tp-partial-sum-rounding",
        title="partial sums are rounded per rank before they are reduced",
        source="measured",
        stage=EVERYWHERE,
        layer="unit-op",
        setting="bfloat16, 8 ranks",
        why="each of 8 partial sums is rounded once more; errors have no sign",
        apply=_partial_sums,
    ),
    _benign(
        id="mla-absorbed-versus-expanded",
        title="prefill attends over the latents as decode does",
        source="measured; vllm-ascend",
        stage=("rollout", "old_log_prob"),
        layer="layer-logits",
        setting="any",
        why="(q W_UK) c and q (W_UK c) are equal by associativity",
        apply=_absorbed_everywhere,
    ),
    _benign(
        id="batch-size-dependent-kernels",
        title="a reduction is cut at another place for every batch size",
        source="vllm 11778, 32480, 7779",
        stage=("rollout",),
        layer="rollout-vs-train-logprob",
        setting="bfloat16",
        why="the order of a sum depends on the batch",
        apply=_reduction_by_batch,
    ),
    _benign(
        id="train-rollout-gap-normal-range",
        title="log-probs of the engine differ by 0.015 without a sign",
        source="vime 275; trl 5312",
        stage=("rollout",),
        layer="rollout-vs-train-logprob",
        setting="bfloat16",
        why="the gap that healthy stacks report",
        apply=_healthy_noise,
    ),
    _benign(
        id="left-padding-position-shift",
        title="all positions of a sequence are moved by a constant",
        source="trl 6800; measured",
        stage=EVERYWHERE,
        layer="layer-logits",
        setting="any",
        why="rotary attention sees differences of positions alone",
        apply=_positions_moved,
    ),
    _benign(
        id="near-tie-expert-flip",
        title="router logits move by 1e-3",
        source="measured; NeMo-RL and slime notes on replay",
        stage=("rollout",),
        layer="layer-logits",
        setting="a router declared in bfloat16",
        why="tokens change experts where the margin is smaller than rounding",
        declares=Precision(router="bfloat16"),
        apply=_near_ties_flip,
    ),
    _benign(
        id="topk-output-order",
        title="a token's experts come in another order",
        source="torch.topk(sorted=False)",
        stage=EVERYWHERE,
        layer="unit-op",
        setting="any",
        why="the set of (expert, weight) pairs is the same",
        apply=_another_order_of_choices,
    ),
    _benign(
        id="metric-only-scaling",
        title="a logged loss is multiplied by the number of micro-batches",
        source="verl 0af6a385b, 2320603ea, 6d9ac2f7b, 88db55407, bdfedd461",
        stage=("actor_update",),
        layer="layer-grad",
        setting="any",
        why="the gradient is that of the right loss",
        apply=_logged_value_scaled,
    ),
    _benign(
        id="different-rng-streams",
        title="the sampler draws from another stream",
        source="device generators differ",
        stage=("rollout",),
        layer="rollout-vs-train-logprob",
        setting="any",
        why="other tokens from the same distribution",
        apply=_another_stream,
    ),
    _benign(
        id="fp32-hf32-matmul",
        title="float32 matmuls with 10 bits of mantissa",
        source="Ascend HF32, NVIDIA TF32",
        stage=EVERYWHERE,
        layer="unit-op",
        setting="a run that declares hf32",
        why="it says so; undeclared it is a defect",
        declares=Precision(matmul="hf32"),
        apply=_ten_bits_of_mantissa,
    ),
)
