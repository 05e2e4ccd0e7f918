"""Defects of models, experts, weights and samplers that are in no catalogue: checks that judge whole seams catch
them, too.

Each one is a mistake somebody might make; none of the checks was written with it in mind.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from alignment.faults.audit import catch
from alignment.faults.checks import all_checks
from alignment.faults.fault import Fault
from alignment.faults.seam import wrapped
from alignment.numerics.random import portable_normal

MODELS, WEIGHTS, BACKENDS = "alignment.models", "alignment.weights", "alignment.backends"
MUTANTS: dict[str, tuple[str, object]] = {}


def mutant(target: str):
    def decorate(make):
        assert make.__name__ not in MUTANTS
        MUTANTS[make.__name__] = (target, make)
        return make

    return decorate


# --- attention -------------------------------------------------------------------------------------------------------


@mutant(f"{MODELS}.mla:softmax_scale")
def mscale_once(original):
    def scale(config):
        yarn = config.rope_scaling
        return (
            config.q_head_dim**-0.5 * (original(config) / config.q_head_dim**-0.5) ** 0.5 if yarn else original(config)
        )

    return scale


@mutant(f"{MODELS}.rope:table_mscale")
def table_correction_left_out(original):
    return lambda scaling: 1.0


@mutant(f"{MODELS}.rope:correction_range")
def ramp_rounded_the_other_way(original):
    return lambda scaling, *, width, theta: tuple(n + 1 for n in original(scaling, width=width, theta=theta))


@mutant(f"{MODELS}.rope:inverse_frequencies")
def theta_of_the_wrong_width(original):
    return lambda config: original(dataclasses.replace(config, rope_theta=config.rope_theta * 1.001))


@mutant(f"{MODELS}.rope:rotate_interleaved")
def turned_the_other_way(original):
    return lambda x, cos, sin: original(x, cos, -sin)


@mutant(f"{MODELS}.rope:rotate_interleaved")
def no_gradient_through_rope(original):
    return lambda x, cos, sin: original(x.detach(), cos, sin)


@mutant(f"{MODELS}.attention:attention_mask_from")
def one_key_ahead(original):
    def mask(key_mask, **options):
        allowed = original(key_mask, **options)
        ahead = torch.zeros_like(allowed)
        ahead[..., 1:] = allowed[..., :-1]
        return allowed | ahead

    return mask


@mutant(f"{MODELS}.attention:attention_mask_from")
def itself_not_allowed(original):
    def mask(key_mask, **options):
        allowed = original(key_mask, **options)
        moved = torch.zeros_like(allowed)
        moved[..., :-1] = allowed[..., 1:]
        return moved & allowed | (allowed.sum(-1, keepdim=True) == 1) & allowed

    return mask


@mutant(f"{MODELS}.attention:attention_mask_from")
def window_of_128(original):
    def mask(key_mask, **options):
        allowed = original(key_mask, **options)
        return allowed & (allowed.flip(-1).cumsum(-1).flip(-1) <= 128)

    return mask


@mutant(f"{MODELS}.attention:scaled_dot_product")
def scores_capped(original):
    return lambda q, k, v, *, scale, mask: original(q.clamp(-1.5, 1.5), k, v, scale=scale, mask=mask)


@mutant(f"{MODELS}.attention:scaled_dot_product")
def scale_applied_to_the_gradient_twice(original):
    def attend(q, k, v, *, scale, mask):
        out = original(q, k, v, scale=scale, mask=mask)
        return out + (1e-3 * q.sum() - (1e-3 * q.sum()).detach())

    return attend


@mutant(f"{MODELS}.norm:rms_norm")
def epsilon_forgotten(original):
    return lambda x, weight, *, eps: original(x, weight, eps=0.0)


@mutant(f"{MODELS}.norm:rms_norm")
def mean_taken_off(original):
    return lambda x, weight, *, eps: original(x - x.mean(-1, keepdim=True), weight, eps=eps)


@mutant(f"{MODELS}.norm:rms_norm")
def norm_in_bfloat16(original):
    return lambda x, weight, *, eps: original(x.bfloat16(), weight, eps=eps).to(x.dtype)


@mutant(f"{MODELS}.mla:MultiHeadLatentAttention._attend_absorbed")
def absorbed_scale_by_latent_width(original):
    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        factor = (self.config.q_head_dim / (self.config.kv_lora_rank + self.config.qk_rope_head_dim)) ** 0.5
        return original(self, q_nope * factor, q_rope * factor, latent, k_rope, mask)

    return attend


@mutant(f"{MODELS}.mla:MultiHeadLatentAttention.project_latent")
def latent_cached_before_its_norm(original):
    def project(self, hidden, context):
        latent, k_rope = original(self, hidden, context)
        if context.cache is None:
            return latent, k_rope
        c = self.config
        return self.kv_a_proj_with_mqa(hidden).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)[0], k_rope

    return project


@mutant(f"{MODELS}.cache:LatentCache.select")
def mask_of_other_rows(original):
    def select(self, rows):
        chosen = original(self, rows)
        chosen.mask = chosen.mask.roll(1, 0)
        return chosen

    return select


@mutant(f"{MODELS}.cache:LatentCache.real_tokens")
def padding_counted_as_positions(original):
    # Relative positions within a prompt are kept, those between prompt and response are not.
    return lambda self: (
        self.mask[:, : self.length].sum(-1) + 2 * (self.length > self.mask[:, : self.length].sum(-1)).long()
    )


@mutant(f"{BACKENDS}.paged_cache:PagedCache.finish")
def blocks_given_back_twice(original):
    def finish(self, request):
        self._free += self._tables[request][:1]
        original(self, request)

    return finish


# --- experts ---------------------------------------------------------------------------------------------------------


@mutant(f"{MODELS}.moe:select_experts")
def softmax_weights(original):
    def select(scores, bias, config):
        chosen, weights = original(scores, bias, config)
        return chosen, torch.softmax(scores.gather(1, chosen), -1) * config.routed_scaling_factor

    return select


@mutant(f"{MODELS}.moe:select_experts")
def weights_detached(original):
    def select(scores, bias, config):
        chosen, weights = original(scores, bias, config)
        return chosen, weights.detach()

    return select


@mutant(f"{MODELS}.moe:select_experts")
def choice_without_bias(original):
    return lambda scores, bias, config: original(scores, bias * 0, config)


@mutant(f"{MODELS}.moe:select_experts")
def scaled_before_normalising(original):
    def select(scores, bias, config):
        chosen, weights = original(scores, bias, config)
        return chosen, weights / config.routed_scaling_factor if config.norm_topk_prob else weights

    return select


@mutant(f"{MODELS}.moe:MixtureOfExperts.forward")
def shared_expert_scaled(original):
    def forward(self, hidden):
        out = original(self, hidden)
        return out if self.shared_experts is None else out + 0.01 * self.shared_experts(hidden)

    return forward


@mutant(f"{MODELS}.moe:MixtureOfExperts.run_experts")
def last_expert_gets_nothing(original):
    def run(self, x, chosen, weights):
        return original(self, x, chosen, weights * (chosen != len(self.experts) - 1))

    return run


@mutant(f"{MODELS}.expert_dispatch:permute")
def pairs_taken_for_tokens(original):
    return lambda x, chosen, how: x[how.rows % len(x)]


@mutant(f"{MODELS}.expert_dispatch:ExpertWeights.cut")
def bias_on_every_rank(original):
    def cut(self, rank, ranks):
        return dataclasses.replace(original(self, rank, ranks), down_bias=self.down_bias)

    return cut


@mutant(f"{MODELS}.router_losses:load_balancing_loss")
def scores_not_normalised(original):
    def loss(scores, chosen, **options):
        experts = scores.shape[1]
        share = F.one_hot(chosen.flatten(), experts).sum(0).to(scores.dtype) / chosen.numel()
        return experts * (share * scores.mean(0)).sum()

    return loss


# --- weights ---------------------------------------------------------------------------------------------------------


@mutant(f"{MODELS}.mla:MultiHeadLatentAttention.absorb")
def w_uv_of_the_next_head(original):
    def absorb(self, *, contiguous=False):
        w_uk_t, w_uv = original(self, contiguous=contiguous)
        self.w_uv = w_uv.roll(1, 0)
        return w_uk_t, self.w_uv

    return absorb


@mutant(f"{BACKENDS}.weight_sync:stream_weights")
def sent_in_bfloat16(original):
    def stream(model, *, dtype=None):
        for name, tensor in original(model, dtype=dtype):
            yield name, tensor.bfloat16().to(tensor.dtype)

    return stream


@mutant(f"{BACKENDS}.weight_sync:stream_weights")
def gate_and_up_exchanged(original):
    def stream(model, *, dtype=None):
        sent = dict(original(model, dtype=dtype))
        for name, tensor in sent.items():
            other = name.replace("gate_proj", "*").replace("up_proj", "gate_proj").replace("*", "up_proj")
            yield name, sent[other]

    return stream


@mutant(f"{BACKENDS}.golden_rollout:GoldenRollout.update_weights")
def norms_not_updated(original):
    def update(self, stream, *, post_process=True, partial=False):
        held = {name: tensor.clone() for name, tensor in self.named_parameters()}
        kept = ((name, held[name] if "norm" in name else tensor) for name, tensor in stream)
        original(self, kept, post_process=post_process, partial=partial)

    return update


@mutant(f"{BACKENDS}.golden_rollout:GoldenRollout.wake")
def waking_brings_old_weights(original):
    def wake(self):
        self._host = [(w, None if kept is None else kept * 0.999, shape) for w, kept, shape in self._host]
        original(self)

    return wake


@mutant(f"{WEIGHTS}.fp8:quantize")
def scale_per_row(original):
    return lambda weight, *, block=(128, 128): (
        original(weight, block=block)[0],
        original(weight, block=block)[1] * 0 + 1,
    )


@mutant(f"{WEIGHTS}.fp8:dequantize")
def divided_by_the_scale(original):
    return lambda weight, scale, *, block=(128, 128): original(weight, 1 / scale, block=block)


@mutant(f"{WEIGHTS}.fp8_rollout:is_quantised")
def head_quantised(original):
    return lambda name, tensor: original(name, tensor) or "lm_head" in name or "embed_tokens" in name


@mutant(f"{WEIGHTS}.megatron_layout:unshard")
def ranks_in_reverse(original):
    return lambda parameter, shards: original(parameter, list(shards)[::-1])


@mutant(f"{WEIGHTS}.megatron_layout:shard")
def gate_and_up_not_interleaved(original):
    def shard(parameter, tensors, *, rank, size):
        if len(tensors) == 2 and size > 1:
            return torch.cat(list(tensors)).chunk(size)[rank]
        return original(parameter, tensors, rank=rank, size=size)

    return shard


@mutant(f"{MODELS}.config:ModelConfig.from_hf")
def epsilon_by_default(original):
    def from_hf(cls, hf, **more):
        return original(cls, {k: v for k, v in hf.items() if k != "rms_norm_eps"}, **more)

    return from_hf


@mutant(f"{WEIGHTS}.fused_qkv:split_qkv")
def key_and_value_exchanged(original):
    def split(fused, *, groups, head_dim):
        q, k, v = original(fused, groups=groups, head_dim=head_dim)
        return q, v, k

    return split


@mutant(f"{WEIGHTS}.fp8_scaling:DelayedScaling.record")
def history_never_forgets(original):
    def record(self, values):
        before = self.amax.amax()
        original(self, values)
        self.amax[0] = torch.maximum(self.amax[0], before)

    return record


# --- sampler and precision -------------------------------------------------------------------------------------------


@mutant(f"{BACKENDS}.golden_rollout:_truncate")
def top_p_one_token_short(original):
    return lambda log_probs, params: original(
        log_probs, dataclasses.replace(params, top_p=max(params.top_p - 0.15, 0.05))
    )


@mutant(f"{BACKENDS}.golden_rollout:_truncate")
def not_renormalised(original):
    def truncate(log_probs, params):
        kept = original(log_probs, params)
        return log_probs.masked_fill(kept.isneginf(), float("-inf"))

    return truncate


@mutant(f"{BACKENDS}.golden_rollout:_sample")
def temperature_after_truncation(original):
    def sample(logits, params, draws):
        if params.temperature in (0, 1):
            return original(logits, params, draws)
        from alignment.backends import golden_rollout

        kept = golden_rollout._truncate(torch.log_softmax(logits, -1).float(), params)
        return original(
            kept.to(logits.dtype).nan_to_num(neginf=-1e4), dataclasses.replace(params, top_k=-1, top_p=1.0), draws
        )

    return sample


@mutant(f"{BACKENDS}.golden_rollout:GoldenRollout.generate")
def only_the_first_end_token(original):
    def generate(self, prompts, attention_mask, params, keys):
        ends = params.eos_token_ids[:1] or None
        return original(self, prompts, attention_mask, dataclasses.replace(params, eos_token_id=ends), keys)

    return generate


@mutant(f"{BACKENDS}.speculative:residual")
def rejected_drawn_from_the_target(original):
    return lambda p, q: p


@mutant(f"{BACKENDS}.speculative:accept_token")
def accepted_by_the_target_alone(original):
    return lambda p, q, token, uniform: uniform < float(p[token])


@mutant(f"{MODELS}.linear:Linear.forward")
def sums_in_bfloat16(original):
    def forward(self, x):
        if x.dtype != torch.bfloat16:
            return original(self, x)
        total = torch.zeros(*x.shape[:-1], len(self.weight), dtype=x.dtype)
        for a, b in zip(x.split(1, dim=-1), self.weight.split(1, dim=-1)):
            total = total + F.linear(a, b)
        return total

    return forward


@mutant(f"{MODELS}.linear:Linear.forward")
def bfloat16_inputs_undeclared(original):
    def forward(self, x):
        return (
            F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)
            if x.dtype == torch.float32
            else original(self, x)
        )

    return forward


@mutant(f"{BACKENDS}.golden_rollout:_gather_log_probs")
def gap_with_a_sign(original):
    def gather(logits, tokens):
        found = original(logits, tokens)
        return found + 0.03 if logits.dtype == torch.bfloat16 else found

    return gather


@mutant(f"{BACKENDS}.golden_rollout:_gather_log_probs")
def gap_of_a_broken_stack(original):
    def gather(logits, tokens):
        found = original(logits, tokens)
        noise = portable_normal(tuple(found.shape), seed=int(tokens.sum()) % 1009, stream="broken").to(found.dtype)
        return found + 0.5 * noise if logits.dtype == torch.bfloat16 else found

    return gather


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_of_no_catalogue_is_caught(name):
    target, make = MUTANTS[name]
    fault = Fault(
        id=name, title=name, source="this test", category="unlisted", stage=("rollout",), culprit=name, layer="unit-op",
        setting="any", why=name, apply=lambda: wrapped(target, make),
    )  # fmt: skip
    row = catch(fault, all_checks())
    assert row.caught, f"no check sees {name} on {target}"
