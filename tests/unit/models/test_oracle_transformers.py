"""The golden model against transformers' DeepseekV3ForCausalLM, both in float64."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from alignment.models import attention, mla, moe, norm, rope
from alignment.models.config import ModelConfig, YarnScaling, preset
from alignment.numerics.metrics import relative_l2
from alignment.numerics.random import portable_normal

# The bar the project set for logits and for every parameter's gradient, relative to their norm.
ORACLE_BAR = 1e-10

MOONLIGHT, DEEPSEEK = preset("tiny-moonlight"), preset("tiny-deepseek")
YARN = DEEPSEEK.rope_scaling
CONFIGS = {
    "tiny-moonlight": MOONLIGHT,
    "tiny-deepseek": DEEPSEEK,
    "yarn without q latent": replace(DEEPSEEK, q_lora_rank=None),
    "plain rope with q latent": replace(DEEPSEEK, rope_scaling=None),
    "yarn, equal mscale": replace(DEEPSEEK, rope_scaling=replace(YARN, mscale=1.0, mscale_all_dim=1.0)),
    "yarn, no mscale": replace(DEEPSEEK, rope_scaling=replace(YARN, mscale=None, mscale_all_dim=None)),
    "yarn, only mscale_all_dim": replace(DEEPSEEK, rope_scaling=replace(YARN, mscale=None)),
    "yarn, ramp beyond the head": replace(
        DEEPSEEK,
        rope_scaling=YarnScaling(factor=2.0, original_max_position_embeddings=256, mscale=0.8, mscale_all_dim=0.5),
    ),
    "two groups, one kept": replace(DEEPSEEK, n_group=2, topk_group=1),
    "all groups kept": replace(DEEPSEEK, topk_group=4),
    "no top-k normalisation": replace(DEEPSEEK, norm_topk_prob=False),
    "no routed scaling": replace(MOONLIGHT, routed_scaling_factor=1.0),
    "no shared expert": replace(DEEPSEEK, n_shared_experts=0),
    "two shared experts": replace(DEEPSEEK, n_shared_experts=2),
    # Normalising a single weight makes it 1: its gradient would be nothing but rounding.
    "one expert per token": replace(DEEPSEEK, num_experts_per_tok=1, norm_topk_prob=False),
    "no dense layer": replace(DEEPSEEK, first_k_dense_replace=0),
    "two dense layers": replace(DEEPSEEK, first_k_dense_replace=2),
    "no MoE layer": replace(DEEPSEEK, first_k_dense_replace=3),
    "tied head": replace(DEEPSEEK, tie_word_embeddings=True),
    "large norm epsilon": replace(DEEPSEEK, rms_norm_eps=1e-2),
}
BATCH, LENGTH = 3, 24


def left_padded(rows: int, length: int) -> Tensor:
    """A mask whose row i begins with 3·i padding tokens."""
    return (torch.arange(length) >= 3 * torch.arange(rows)[:, None]).long()


def _gradient(tensor: Tensor) -> Tensor | None:
    """Zeros where a parameter took no part (transformers skips experts without tokens); None for a buffer."""
    if not tensor.requires_grad:
        return None
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def distances(model, twin, config: ModelConfig, input_ids: Tensor, mask: Tensor | None) -> dict[str, float]:
    """Relative L2 of the logits at real tokens and of every gradient of a dense linear loss on them."""
    real = torch.ones_like(input_ids) if mask is None else mask
    positions = attention.default_positions(real)
    weights = portable_normal((*input_ids.shape, config.vocab_size), seed=5, stream="loss") * real[..., None]
    logits = model(input_ids, attention_mask=mask)
    (logits * weights).sum().backward()
    with twin.running():
        expected = twin.logits(input_ids, attention_mask=mask, position_ids=positions)
        (expected * weights).sum().backward()
    found = {"logits": relative_l2(logits[real.bool()].detach(), expected[real.bool()].detach())}
    gradients = twin.tensors(_gradient)
    for name, parameter in model.named_parameters():
        found[name] = relative_l2(_gradient(parameter), gradients.pop(name))
    assert not gradients
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_gradient_equal_transformers(name, golden, oracle, tokens):
    config = CONFIGS[name]
    model = golden(config)
    found = distances(model, oracle(model), config, tokens(config, BATCH, LENGTH), None)
    worst = max(found, key=found.get)
    assert found[worst] <= ORACLE_BAR, f"{worst} is {found[worst]:.2e} from transformers"


@pytest.mark.parametrize("name", ["tiny-moonlight", "tiny-deepseek"])
def test_left_padded_rows_equal_transformers(name, golden, oracle, tokens):
    config = CONFIGS[name]
    model = golden(config)
    found = distances(model, oracle(model), config, tokens(config, BATCH, LENGTH), left_padded(BATCH, LENGTH))
    worst = max(found, key=found.get)
    assert found[worst] <= ORACLE_BAR, f"{worst} is {found[worst]:.2e} from transformers"


@pytest.mark.parametrize("name", ["tiny-moonlight", "tiny-deepseek"])
def test_the_oracle_is_what_transformers_ships_but_for_the_dtype(name, golden, oracle, tokens, rounding):
    """Unpatched and in its own float32, transformers lies at float32 distance from the oracle."""
    config = CONFIGS[name]
    twin = oracle(golden(config))
    input_ids = tokens(config, BATCH, LENGTH)
    patched = twin.logits(input_ids).detach()
    shipped = copy.deepcopy(twin.model).float()(input_ids=input_ids, use_cache=False).logits.detach()
    assert patched.dtype is torch.float64 and shipped.dtype is torch.float32
    assert ORACLE_BAR < relative_l2(shipped, patched) <= rounding(config, torch.float32)


def test_the_models_exercise_every_expert(golden, tokens):
    """Otherwise equal gradients could be equal zeros."""
    config = CONFIGS["tiny-deepseek"]
    model = golden(config)
    model(tokens(config, BATCH, LENGTH)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if not p.grad.any()] == []


@pytest.mark.parametrize("name", ["tiny-moonlight", "tiny-deepseek"])
def test_incremental_decoding_equals_transformers(name, golden, oracle, tokens):
    config = CONFIGS[name]
    model = golden(config)
    twin = oracle(model)
    input_ids, mask = tokens(config, BATCH, LENGTH), left_padded(BATCH, LENGTH)
    positions = attention.default_positions(mask)
    prompt = LENGTH // 2
    model.absorb()
    cache = model.new_cache(BATCH, LENGTH)
    ours = model.prefill(input_ids[:, :prompt], cache, attention_mask=mask[:, :prompt])
    with twin.running(), torch.no_grad():
        step = twin.model(
            input_ids=input_ids[:, :prompt],
            attention_mask=mask[:, :prompt],
            position_ids=positions[:, :prompt],
            use_cache=True,
        )
        assert relative_l2(ours[mask[:, :prompt].bool()], step.logits[mask[:, :prompt].bool()]) <= ORACLE_BAR
        for slot in range(prompt, LENGTH):
            # transformers 5.24 renamed the argument and the output.
            past = {key: step[key] for key in ("cache", "past_key_values") if key in step.keys()}
            step = twin.model(
                input_ids=input_ids[:, slot : slot + 1],
                attention_mask=mask[:, : slot + 1],
                position_ids=positions[:, slot : slot + 1],
                use_cache=True,
                **past,
            )
            ours = model.decode(input_ids[:, slot : slot + 1], cache)
            assert relative_l2(ours, step.logits) <= ORACLE_BAR, f"slot {slot}"


def _half_split(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _biased_weights(scores, bias, config):
    return _select_experts(scores + bias, torch.zeros_like(bias), config)


def _unbiased_selection(scores, bias, config):
    return _select_experts(scores, torch.zeros_like(bias), config)


def _groups_by_best_expert(scores, bias, config):
    """Doubling every expert makes the sum of the two best twice the best."""
    grouped = (scores + bias).view(len(scores), config.n_group, -1)
    best = grouped.max(-1).values.topk(config.topk_group, dim=-1).indices
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    penalty = torch.where(kept[..., None], 0.0, -4.0).expand_as(grouped).reshape_as(scores)
    chosen = (scores + bias + penalty).topk(config.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor


_select_experts = moe.select_experts
MUTATIONS = {
    "softmax scale of v_head_dim": (mla, "softmax_scale", lambda c: c.v_head_dim**-0.5),
    "softmax scale of qk_nope_head_dim": (
        mla,
        "softmax_scale",
        lambda c: c.qk_nope_head_dim**-0.5 * rope.softmax_mscale(c.rope_scaling) ** 2,
    ),
    "mscale once": (mla, "softmax_scale", lambda c: c.q_head_dim**-0.5 * rope.softmax_mscale(c.rope_scaling)),
    "no mscale on the table": (rope, "table_mscale", lambda scaling: 1.0),
    "half-split rope": (mla, "rotate_interleaved", _half_split),
    "rope without yarn": (
        rope,
        "inverse_frequencies",
        lambda c, plain=rope.inverse_frequencies: plain(replace(c, rope_scaling=None)),
    ),
    "norm without weight": (norm, "rms_norm", lambda x, w, *, eps, f=norm.rms_norm: f(x, torch.ones_like(w), eps=eps)),
    "epsilon outside the root": (
        norm,
        "rms_norm",
        lambda x, w, *, eps: w * x / (x.square().mean(-1, keepdim=True).sqrt() + eps),
    ),
    "bias in the weights": (moe, "select_experts", _biased_weights),
    "no bias in the selection": (moe, "select_experts", _unbiased_selection),
    "groups by their best expert": (moe, "select_experts", _groups_by_best_expert),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_bar_rejects(name, golden, oracle, tokens, monkeypatch):
    config = replace(DEEPSEEK, rms_norm_eps=1e-3, latent_norm_eps=1e-6)
    model = golden(config)
    twin = oracle(model)
    monkeypatch.setattr(*MUTATIONS[name])
    assert distances(model, twin, config, tokens(config, BATCH, LENGTH), None)["logits"] > ORACLE_BAR


def test_the_bar_rejects_the_latent_norms_using_rms_norm_eps(golden, oracle, tokens):
    config = replace(DEEPSEEK, rms_norm_eps=1e-5)
    model = golden(config)
    wrong = golden(replace(config, latent_norm_eps=1e-5))
    found = distances(wrong, oracle(model), config, tokens(config, BATCH, LENGTH), None)
    assert found["logits"] > ORACLE_BAR
