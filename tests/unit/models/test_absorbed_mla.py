"""Absorbed against expanded attention, and where the absorbed weights live."""

from __future__ import annotations

import pytest
import torch

from alignment.errors import InputError
from alignment.models.attention import observe_attention
from alignment.models.config import preset
from alignment.numerics.metrics import relative_l2

CONFIGS = ["tiny-moonlight", "tiny-deepseek"]
BATCH, PROMPT, LENGTH = 3, 7, 12


@pytest.fixture(params=CONFIGS)
def config(request):
    return preset(request.param)


def left_padding() -> torch.Tensor:
    return (torch.arange(PROMPT) >= 2 * torch.arange(BATCH)[:, None]).long()


def generate(model, ids, *, absorbed: bool, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of every slot, the prompt at once and the rest token by token."""
    cache = model.new_cache(BATCH, LENGTH)
    parts = [model.prefill(ids[:, :PROMPT], cache, attention_mask=mask, absorbed=absorbed)]
    parts += [model.decode(ids[:, t : t + 1], cache, absorbed=absorbed) for t in range(PROMPT, LENGTH)]
    return torch.cat(parts, 1)


def test_both_forms_of_generation_equal_the_whole_forward(config, golden, tokens, rounding):
    model, ids = golden(config), tokens(config, BATCH, LENGTH)
    model.absorb()
    whole = model(ids).detach()
    assert relative_l2(generate(model, ids, absorbed=False), whole) <= rounding(config)
    assert relative_l2(generate(model, ids, absorbed=True), whole) <= rounding(config)


def test_with_left_padding_too(config, golden, tokens, rounding):
    model, ids = golden(config), tokens(config, BATCH, LENGTH)
    model.absorb()
    mask = torch.cat([left_padding(), torch.ones(BATCH, LENGTH - PROMPT, dtype=torch.long)], 1)
    whole = model(ids, attention_mask=mask).detach()[mask.bool()]
    for absorbed in (False, True):
        found = generate(model, ids, absorbed=absorbed, mask=left_padding())[mask.bool()]
        assert relative_l2(found, whole) <= rounding(config)
    unmasked = generate(model, ids, absorbed=True)[mask.bool()]
    assert relative_l2(unmasked, whole) > rounding(config)


def test_the_absorbed_form_attends_over_one_latent_head(config, golden, tokens):
    model, ids = golden(config), tokens(config, BATCH, PROMPT)
    model.absorb()
    with observe_attention() as calls:
        model.prefill(ids, model.new_cache(BATCH, PROMPT), absorbed=True)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert {tuple(c.key.shape) for c in calls} == {(BATCH, 1, PROMPT, width)}
    assert {tuple(c.value.shape) for c in calls} == {(BATCH, 1, PROMPT, config.kv_lora_rank)}


def test_absorbed_weights_are_the_rows_of_kv_b_proj(config, golden):
    layer = golden(config).model.layers[0].self_attn
    w_uk_t, w_uv = layer.absorb()
    heads, nope, value, rank = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
    )
    assert w_uk_t.shape == (heads, nope, rank) and w_uv.shape == (heads, rank, value)
    for head in range(heads):
        rows = layer.kv_b_proj.weight[head * (nope + value) : (head + 1) * (nope + value)]
        assert torch.equal(w_uk_t[head], rows[:nope])
        assert torch.equal(w_uv[head], rows[nope:].T)


def test_absorbed_weights_are_views_that_follow_an_update(config, golden, tokens, rounding):
    model, ids = golden(config), tokens(config, BATCH, LENGTH)
    model.absorb()
    layer = model.model.layers[0].self_attn
    assert layer.w_uk_t.untyped_storage().data_ptr() == layer.kv_b_proj.weight.untyped_storage().data_ptr()
    assert layer.w_uv.untyped_storage().data_ptr() == layer.kv_b_proj.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.kv_b_proj.weight.mul_(1.5)
    assert relative_l2(generate(model, ids, absorbed=True), model(ids).detach()) <= rounding(config)


@pytest.mark.parametrize("which", ["w_uk_t", "w_uv"])
def test_a_sentinel_shows_who_shares_storage(config, golden, which):
    layer = golden(config).model.layers[0].self_attn
    layer.absorb()
    with torch.no_grad():
        layer.kv_b_proj.weight.fill_(-100.0)
    assert bool((getattr(layer, which) == -100.0).all())
    layer.absorb(contiguous=True)
    with torch.no_grad():
        layer.kv_b_proj.weight.fill_(7.0)
    assert bool((getattr(layer, which) == -100.0).all())
    assert getattr(layer, which).is_contiguous()


def test_contiguous_copies_go_stale_until_absorbed_again(config, golden, tokens, rounding):
    """The defect behind garbled rollouts after the first weight update."""
    model, ids = golden(config), tokens(config, BATCH, LENGTH)
    model.absorb(contiguous=True)
    assert relative_l2(generate(model, ids, absorbed=True), model(ids).detach()) <= rounding(config)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.kv_b_proj.weight.mul_(1.5)
    assert relative_l2(generate(model, ids, absorbed=True), model(ids).detach()) > rounding(config)
    model.absorb(contiguous=True)
    assert relative_l2(generate(model, ids, absorbed=True), model(ids).detach()) <= rounding(config)


@pytest.mark.parametrize("which", ["w_uk_t", "w_uv"])
def test_either_weight_alone_is_detected(config, golden, tokens, rounding, which):
    model, ids = golden(config), tokens(config, BATCH, LENGTH)
    model.absorb()
    layer = model.model.layers[-1].self_attn
    setattr(layer, which, getattr(layer, which).flip(0))
    assert relative_l2(generate(model, ids, absorbed=True), model(ids).detach()) > rounding(config)


def test_decoding_before_absorbing_is_refused(golden, tokens):
    config = preset("tiny-moonlight")
    model = golden(config)
    with pytest.raises(InputError, match=r"layer 0 self_attn: the absorbed projections do not exist yet.*absorb\(\)"):
        model.decode(tokens(config, 1, 1), model.new_cache(1, 4))


def test_absorbed_weights_are_no_parameters(config, golden):
    model = golden(config)
    names = list(model.state_dict())
    model.absorb(contiguous=True)
    assert list(model.state_dict()) == names
    assert not any("w_uk" in name or "w_uv" in name for name in names)
