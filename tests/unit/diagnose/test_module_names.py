"""One name for one module: the tables agree with those of the weight converters."""

from __future__ import annotations

import pytest

from alignment.diagnose.names import FUSED, NameMap, canonical
from alignment.errors import InputError
from alignment.models.config import ModelConfig
from alignment.weights import vllm_names
from alignment.weights.megatron_names import Naming, megatron_parameters

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("q_lora_rank", (None, 8))
def test_every_megatron_parameter_has_its_hugging_face_name(q_lora_rank):
    seen = 0
    for parameter in megatron_parameters(ModelConfig(**SMALL, q_lora_rank=q_lora_rank), Naming.LOCAL):
        name = canonical(parameter.name)
        if len(parameter.hf_names) == 1:
            assert name == parameter.hf_names[0]
        else:
            head, _, leaf = name.rpartition(".")
            prefix = head.removesuffix("gate_up_proj")
            assert tuple(f"{prefix}{part}.{leaf}" for part in FUSED["gate_up_proj"]) == parameter.hf_names
        seen += 1
    assert seen > 30


def test_fused_layers_are_those_of_vllm():
    assert {name: FUSED[name] for name in vllm_names.FUSED} == vllm_names.FUSED


@pytest.mark.parametrize(
    "name, expected",
    [
        ("_fsdp_wrapped_module.model.layers.1._checkpoint_wrapped_module.mlp", "model.layers.1.mlp"),
        ("_orig_mod.lm_head", "lm_head"),
        ("base_model.model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("module.module.decoder.layers.0.mlp.router", "model.layers.0.mlp.gate"),
        ("vision.blocks.3.attn", "vision.blocks.3.attn"),
        ("", ""),
    ],
)
def test_wrappers_are_dropped_and_unknown_names_kept(name, expected):
    assert canonical(name) == expected


def test_pairs_may_hold_stars_and_come_from_a_file(tmp_path):
    listed = tmp_path / "names.txt"
    listed.write_text("# ours = theirs\nmodel.layers.*.mlp = blocks.*.ff\n")
    names = NameMap.parse([str(listed), "lm_head=head"])
    assert names.target("blocks.7.ff.up.weight") == "model.layers.7.mlp.up.weight"
    assert names.target("head") == "lm_head"
    assert names.target("blocks.7.attn") == "blocks.7.attn"


@pytest.mark.parametrize(
    "option, message",
    [("nowhere.txt", "no readable file"), ("a=", "not a name pair"), ("a.*=b", r"same number of \*")],
)
def test_a_bad_pair_is_refused(option, message):
    with pytest.raises(InputError, match=message):
        NameMap.parse([option])
