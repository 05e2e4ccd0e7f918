"""The whole model: names, initialisation, sizes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.models.value_model import ValueModel
from alignment.numerics.metrics import relative_l2

TINY = preset("tiny-deepseek")


def count(config) -> int:
    return sum(p.numel() for p in CausalLM(config, device="meta").parameters())


def test_tensor_names_are_those_of_published_checkpoints():
    config = replace(TINY, num_hidden_layers=2, n_routed_experts=4, n_group=2)
    attention = [
        "self_attn.kv_a_layernorm.weight", "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight",
        "self_attn.o_proj.weight", "self_attn.q_a_layernorm.weight", "self_attn.q_a_proj.weight",
        "self_attn.q_b_proj.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight",
    ]  # fmt: skip
    swiglu = ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
    expected = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    expected |= {f"model.layers.{i}.{name}" for i in (0, 1) for name in attention}
    expected |= {f"model.layers.0.mlp.{name}" for name in swiglu}
    expected |= {
        f"model.layers.1.mlp.{block}.{name}"
        for block in ("shared_experts", *(f"experts.{e}" for e in range(4)))
        for name in swiglu
    }
    expected |= {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"}
    assert set(CausalLM(config, device="meta").state_dict()) == expected
    plain = CausalLM(replace(config, q_lora_rank=None), device="meta").state_dict()
    assert "model.layers.0.self_attn.q_proj.weight" in plain
    assert not any("q_a_" in name or "q_b_" in name for name in plain)


def test_the_large_presets_have_the_published_sizes():
    """Moonlight: 15.96 billion; DeepSeek-V3: 671.03 billion without its prediction module (arXiv:2412.19437)."""

    def published(name: str) -> int:
        config = preset(name)
        dense = config.first_k_dense_replace
        without, one = (count(replace(config, num_hidden_layers=n)) for n in (dense, dense + 1))
        return without + (one - without) * (config.num_hidden_layers - dense)

    assert published("moonlight-16b-a3b") == 15_960_108_544
    assert published("deepseek-v3-671b") == 671_026_404_352


def test_seeds_are_portable_and_names_independent():
    one, again, other = (CausalLM(TINY, dtype=torch.float64).init_weights(s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    low = CausalLM(TINY, dtype=torch.bfloat16).init_weights(1).state_dict()
    assert all(torch.equal(low[name], one[name].to(low[name].dtype)) for name in one)
    deeper = CausalLM(replace(TINY, num_hidden_layers=4), dtype=torch.float64).init_weights(1).state_dict()
    assert all(torch.equal(one[name], deeper[name]) for name in one)


def test_the_initial_distribution_hides_nothing():
    state = CausalLM(TINY, dtype=torch.float64).init_weights(1).state_dict()
    for name, tensor in state.items():
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        spread = TINY.initializer_range
        # Six standard errors of a mean and of a standard deviation.
        assert abs(tensor.mean() - centre) <= 6 * spread / math.sqrt(tensor.numel()), name
        assert abs(tensor.std() - spread) <= 6 * spread / math.sqrt(2 * tensor.numel()), name


def test_building_draws_nothing_from_the_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    CausalLM(TINY).init_weights(0)
    ValueModel(TINY).init_weights(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_each_dtype_lies_at_its_own_distance_from_float64(golden, tokens, rounding):
    ids = tokens(TINY, 2, 10)
    exact = golden(TINY)(ids).detach()
    single, half = (
        relative_l2(golden(TINY, dtype=dtype)(ids).detach(), exact) for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < single <= rounding(TINY, torch.float32) < half <= rounding(TINY, torch.bfloat16)
    assert golden(TINY, dtype=torch.bfloat16)(ids).dtype is torch.bfloat16


def test_a_tied_head_is_one_parameter(golden, tokens):
    config = replace(TINY, tie_word_embeddings=True)
    model = golden(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert count(config) == count(TINY) - TINY.vocab_size * TINY.hidden_size
    assert not torch.equal(model(tokens(config, 1, 4)), golden(TINY)(tokens(config, 1, 4)))


def test_copies_are_independent(golden, tokens):
    model, ids = golden(TINY), tokens(TINY, 1, 4)
    before = model(ids).detach()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids), before)
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    assert torch.equal(model(ids), before) and not torch.equal(twin(ids), before)


def test_sequences_beyond_the_table_are_refused(golden):
    config = replace(TINY, max_position_embeddings=8)
    with pytest.raises(InputError, match=r"position_ids: .* expected 0 to 7 \(max_position_embeddings\); found 0 to 8"):
        golden(config)(torch.zeros(1, 9, dtype=torch.long))


def test_the_critic_starts_from_the_policys_backbone(golden, tokens):
    policy, ids = golden(TINY), tokens(TINY, 2, 6)
    critic = ValueModel.from_policy(policy, seed=5)
    values = critic(ids)
    assert values.shape == (2, 6) and values.dtype is torch.float64
    hidden = policy.model(ids)
    expected = hidden @ critic.score.weight[0] + critic.score.bias
    bound = TINY.hidden_size * torch.finfo(torch.float64).eps * hidden.detach().abs().amax().item()
    assert (values - expected).detach().abs().max().item() <= bound
    values.sum().backward()
    assert all(p.grad is None for p in policy.parameters()), "the backbone is a copy"
    assert set(critic.state_dict()) == (set(policy.state_dict()) - {"lm_head.weight"}) | {"score.weight", "score.bias"}
    assert not torch.equal(values, ValueModel.from_policy(policy, seed=6)(ids))


def test_the_critic_ignores_padding(golden, tokens, rounding):
    critic, ids = ValueModel(TINY, dtype=torch.float64).init_weights(3), tokens(TINY, 2, 6)
    padded = torch.cat([tokens(TINY, 2, 3, stream="padding"), ids], 1)
    mask = torch.tensor([[0] * 3 + [1] * 6] * 2)
    alone = critic(ids).detach()
    found = critic(padded, attention_mask=mask).detach()[:, 3:]
    assert relative_l2(found, alone) <= rounding(TINY)
    assert relative_l2(critic(padded).detach()[:, 3:], alone) > rounding(TINY)
