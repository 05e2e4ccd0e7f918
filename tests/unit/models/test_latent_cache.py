"""The latent cache: slots, rows, limits."""

from __future__ import annotations

import pytest
import torch

from alignment.errors import InputError
from alignment.models.config import preset
from alignment.numerics.metrics import relative_l2

CONFIG = preset("tiny-moonlight")


@pytest.fixture
def model(golden):
    built = golden(CONFIG)
    built.absorb()
    return built


def test_it_holds_latent_and_rotated_key_only(model):
    cache = model.new_cache(2, 9)
    assert {tuple(t.shape) for t in cache.latent} == {(2, 9, CONFIG.kv_lora_rank)}
    assert {tuple(t.shape) for t in cache.rope_key} == {(2, 9, CONFIG.qk_rope_head_dim)}
    assert len(cache.latent) == len(cache.rope_key) == CONFIG.num_hidden_layers
    assert cache.latent[0].dtype is model.dtype


def test_selected_rows_continue_as_in_the_whole_batch(model, tokens, rounding):
    ids = tokens(CONFIG, 4, 8)
    cache = model.new_cache(4, 8)
    model.prefill(ids[:, :7], cache)
    rows = torch.tensor([3, 1, 1])
    few = cache.select(rows)
    everything = model.decode(ids[:, 7:], cache)
    found = model.decode(ids[rows, 7:], few)
    assert relative_l2(found, everything[rows]) <= rounding(CONFIG)
    assert relative_l2(found, everything[[0, 1, 1]]) > rounding(CONFIG)
    assert (few.batch_size, few.length, cache.length) == (3, 8, 8)


def test_rows_that_have_ended_leave_padding_behind(model, tokens, rounding):
    """Row 0 skips the third slot: it must go on as if the token there had never been."""
    ids = tokens(CONFIG, 2, 4)
    cache = model.new_cache(2, 4)
    model.prefill(ids[:, :2], cache)
    model.decode(ids[:, 2:3], cache, attention_mask=torch.tensor([[0], [1]]))
    found = model.decode(ids[:, 3:4], cache)
    assert cache.real_tokens().tolist() == [3, 4]
    without = model(ids[:1, [0, 1, 3]]).detach()[:, -1:]
    assert relative_l2(found[:1], without) <= rounding(CONFIG)
    assert relative_l2(found[:1], model(ids[:1]).detach()[:, -1:]) > rounding(CONFIG)


def test_only_the_last_logits_on_request(model, tokens):
    ids = tokens(CONFIG, 2, 5)
    everything = model.prefill(ids, model.new_cache(2, 5))
    last = model.prefill(ids, model.new_cache(2, 5), logits_to_keep=1)
    assert last.shape == (2, 1, CONFIG.vocab_size)
    assert relative_l2(last, everything[:, -1:]) <= torch.finfo(torch.float64).eps * CONFIG.hidden_size


def test_a_full_cache_and_another_batch_are_refused(model, tokens):
    cache = model.new_cache(2, 3)
    with pytest.raises(InputError, match="the cache is full; expected at most 3 tokens; found 4"):
        model.prefill(tokens(CONFIG, 2, 4), cache)
    with pytest.raises(InputError, match="the cache holds another batch; expected 2; found 1"):
        model.prefill(tokens(CONFIG, 1, 3), cache)
    assert cache.length == 0
