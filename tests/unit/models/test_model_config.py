"""Model shapes: reading, writing and refusing configurations."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from alignment.errors import InputError
from alignment.models.config import PRESETS, ModelConfig, YarnScaling, preset

TINY = preset("tiny-deepseek")

# config.json of moonshotai/Moonlight-16B-A3B and deepseek-ai/DeepSeek-V3 as published (auto_map left out).
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163586, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11264,
    "kv_lora_rank": 512, "max_position_embeddings": 8192, "model_type": "deepseek_v3",
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.46.3",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06,
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "rope_scaling": {"beta_fast": 32,
    "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "type": "yarn"}, "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip(name):
    assert ModelConfig.from_hf(preset(name).to_hf()) == preset(name)


@pytest.mark.parametrize(("name", "published"), [("moonlight-16b-a3b", MOONLIGHT), ("deepseek-v3-671b", DEEPSEEK)])
def test_the_large_presets_are_the_published_models(name, published):
    config = ModelConfig.from_hf(published)
    assert config == preset(name)
    again = config.to_hf()
    kept = {k: v for k, v in published.items() if k not in ("torch_dtype", "quantization_config", "rope_scaling")}
    assert {k: again[k] for k in kept} == kept


def test_the_tiny_presets_tell_every_width_apart():
    for name in ("tiny-moonlight", "tiny-deepseek"):
        c = preset(name)
        widths = [c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.q_head_dim, c.kv_lora_rank, c.hidden_size]
        widths += [c.intermediate_size, c.moe_intermediate_size, c.num_attention_heads * c.q_head_dim]
        widths += [c.num_attention_heads * c.v_head_dim, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)]
        assert len(set(widths)) == len(widths), name


def test_transformers_5_writes_rope_parameters():
    hf = TINY.to_hf()
    parameters = {**hf.pop("rope_scaling"), "rope_theta": hf.pop("rope_theta")}
    assert ModelConfig.from_hf({**hf, "rope_parameters": parameters}) == TINY
    plain = {**preset("tiny-moonlight").to_hf(), "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    del plain["rope_theta"]
    assert ModelConfig.from_hf(plain) == preset("tiny-moonlight")


def test_bookkeeping_keys_are_kept_and_do_not_count():
    config = ModelConfig.from_hf({**TINY.to_hf(), "_name_or_path": "somewhere", "seq_aux": True})
    assert config == TINY and hash(config) == hash(TINY)
    assert config.to_hf()["seq_aux"] is True
    assert pickle.loads(pickle.dumps(config)).hf_extra["seq_aux"] is True


def test_null_means_none_of_it():
    nulls = dict.fromkeys(("n_shared_experts", "n_group", "rms_norm_eps", "tie_word_embeddings"))
    config = ModelConfig.from_hf({**preset("tiny-moonlight").to_hf(), **nulls})
    assert (config.n_shared_experts, config.n_group, config.rms_norm_eps) == (0, 1, 1e-6)
    assert config.tie_word_embeddings is False


def test_configs_are_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        TINY.hidden_size = 1
    with pytest.raises(TypeError):
        YarnScaling(1.0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "of another architecture; expected model_type 'deepseek_v3'; found 'llama'"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "expected DeepseekV3ForCausalLM; found DeepseekV2ForCausalLM"),
        (
            {"hidden_act": "gelu"},
            "hidden_act: the golden model does not compute this setting; expected silu; found gelu",
        ),
        ({"attention_bias": True}, "attention_bias: the golden model does not compute this setting"),
        ({"rope_interleave": False}, "rope_interleave: the golden model does not compute this setting"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: latent attention has as many key heads as query heads"),
        ({"scoring_func": "softmax"}, "scoring_func: invalid model configuration; expected 'sigmoid'; found 'softmax'"),
        ({"topk_method": "greedy"}, "expected 'noaux_tc'; found 'greedy'"),
        ({"n_group": 3}, "n_group: invalid model configuration; expected a divisor of n_routed_experts=8; found 3"),
        ({"n_group": 8, "topk_group": 8}, "at least two experts per group"),
        ({"topk_group": 5}, "expected at most n_group=4; found 5"),
        ({"num_experts_per_tok": 5}, "expected at most the 4 experts of topk_group groups; found 5"),
        ({"qk_rope_head_dim": 15}, "expected an even width (rotary pairs); found 15"),
        ({"hidden_size": 0}, "hidden_size: invalid model configuration; expected an integer of at least 1; found 0"),
        ({"hidden_size": 64.0}, "expected an integer of at least 1; found 64.0"),
        ({"hidden_size": True}, "expected an integer of at least 1; found True"),
        ({"q_lora_rank": 0}, "q_lora_rank: invalid model configuration; expected an integer of at least 1; found 0"),
        ({"rope_theta": 1.0}, "rope_theta: invalid model configuration; expected a number greater than 1; found 1.0"),
        ({"rope_theta": "1e4"}, "expected a number greater than 1; found '1e4'"),
        ({"routed_scaling_factor": float("nan")}, "expected a number greater than 0; found nan"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: invalid model configuration; expected true or false; found 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling: rope settings are no mapping; found 'yarn'"),
        ({"rms_norm_eps": 0}, "expected a number greater than 0; found 0"),
        ({"n_shared_experts": -1}, "expected an integer of at least 0; found -1"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "unknown rope kind; expected 'default' or 'yarn'; found 'linear'",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "yarn needs 'original_max_position_embeddings'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 9, "beta_fats": 1}},
            "unknown yarn parameter 'beta_fats'",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 9}},
            "rope_scaling.factor: invalid model configuration; expected a number of at least 1; found 0.5",
        ),
    ],
)
def test_refusals_name_the_field_and_the_file(change, message):
    with pytest.raises(InputError) as error:
        ModelConfig.from_hf({**TINY.to_hf(), **change}, where="some/config.json")
    assert message in str(error.value)
    assert str(error.value).startswith("some/config.json")


def test_a_misspelt_key_is_missed_and_proposed():
    hf = TINY.to_hf()
    hf["kv_lora_rnak"] = hf.pop("kv_lora_rank")
    with pytest.raises(InputError, match="no 'kv_lora_rank'.*is 'kv_lora_rnak' a misspelling of it"):
        ModelConfig.from_hf(hf)


def test_defaults_that_differ_from_transformers_are_never_guessed():
    for name in ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace"):
        hf = TINY.to_hf()
        del hf[name]
        with pytest.raises(InputError, match=f"no '{name}'"):
            ModelConfig.from_hf(hf)


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="no model preset is called 'tiny-moonlit'.*did you mean 'tiny-moonlight'"):
        preset("tiny-moonlit")


def test_every_field_is_written():
    written = replace(TINY, eos_token_id=(2, 5)).to_hf()
    assert {f.name for f in fields(TINY)} - {"hf_extra"} <= written.keys()
    assert written["eos_token_id"] == [2, 5]
    assert ModelConfig.from_hf(written).eos_token_id == (2, 5)


def test_transformers_reads_what_is_written():
    transformers = pytest.importorskip("transformers")
    for name in ("tiny-moonlight", "tiny-deepseek"):
        theirs = transformers.DeepseekV3Config(**preset(name).to_hf())
        assert ModelConfig.from_hf(theirs.to_dict()) == preset(name)
