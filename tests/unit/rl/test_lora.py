"""The adapter: it starts as nothing, trains alone, merges exactly, and is peft's LoRA."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rl_cases import philox

from alignment.backends.training import OptimizerConfig
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.rl.lora import LoraModel, LoraSettings, LoraTrainingEngine
from alignment.weights.checkpoint import load_model

CONFIG = dataclasses.replace(preset("tiny-moonlight"), num_hidden_layers=2, vocab_size=40)
IDS = torch.tensor([[1, 5, 7, 9], [2, 4, 6, 8]])


def model() -> CausalLM:
    return CausalLM(CONFIG, dtype=torch.float64).init_weights(3)


def trained(settings: LoraSettings | None = None, base: CausalLM | None = None) -> LoraModel:
    adapted = LoraModel(base or model(), settings or LoraSettings(rank=3))
    rng = philox(5)
    with torch.no_grad():
        for parameter in adapted.up.values():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)) * 0.1)
    return adapted


def test_a_fresh_adapter_changes_nothing():
    base = model()
    assert torch.equal(LoraModel(base, LoraSettings())(IDS), base(IDS))


def test_only_the_adapter_gets_gradients():
    adapted = trained()
    adapted(IDS).sum().backward()
    assert all((p.grad is not None) == (not n.startswith("base_model.")) for n, p in adapted.named_parameters())


def test_merging_is_exact_and_the_base_stays():
    """The merged weights in a plain model give the adapter's logits bit for bit: what a weight sync sends is what was trained."""
    adapted, plain = trained(), model()
    before = plain(IDS)
    plain.load_state_dict(dict(adapted.merged_state()))
    assert torch.equal(plain(IDS), adapted(IDS))
    assert torch.equal(adapted.base(IDS), before) and not torch.equal(adapted(IDS), before)
    assert set(dict(adapted.merged_state())) == set(plain.state_dict())


def test_the_merge_is_alpha_over_r_times_b_a():
    adapted = trained(LoraSettings(rank=2, alpha=6.0, target_modules=("o_proj",)))
    assert all(name.endswith("o_proj.weight") for name in adapted.targets)
    name = adapted.targets[0]
    key = name.replace(".", "/")
    expected = adapted.base_model.get_parameter(name) + 3.0 * (adapted.up[key] @ adapted.down[key])
    assert torch.equal(adapted.merged_weight(name), expected)


def test_targets():
    everything = LoraModel(model(), LoraSettings()).targets
    assert not any(part in name for name in everything for part in ("embed_tokens", "lm_head", "mlp.gate.weight"))
    pattern = LoraModel(model(), LoraSettings(target_modules=("*.layers.1.self_attn.*",))).targets
    assert pattern and all(".layers.1.self_attn." in name for name in pattern)
    with pytest.raises(
        InputError, match="gkd.lora.target_modules: no weight of the model is adapted; expected all-linear, or"
    ):
        LoraModel(model(), LoraSettings(target_modules=("qkv",)))


def test_the_same_seed_draws_the_same_adapter():
    one, two = (LoraModel(model(), LoraSettings(seed=s)).down for s in (1, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.values(), two.values()))


def test_an_engine_trains_saves_and_exports(tmp_path):
    def outputs(callable_model, micro_batch):
        return {"x": callable_model(micro_batch["input_ids"])[..., 0]}

    def engine() -> LoraTrainingEngine:
        return LoraTrainingEngine(
            LoraModel(model(), LoraSettings(rank=2)), optimizer=OptimizerConfig(lr=1e-2), outputs=outputs, device="cpu"
        )

    first = engine()
    base = {n: t.clone() for n, t in first.model.base_model.state_dict().items()}
    for _ in range(2):
        first.update([{"input_ids": IDS}], lambda o, m: (o["x"].sum(), {}), stage="update_student")
    assert all(torch.equal(t, base[n]) for n, t in first.model.base_model.state_dict().items())
    exported = dict(first.export_weights())
    assert exported.keys() == base.keys() and any(not torch.equal(exported[n], base[n]) for n in base)
    [taught] = first.forward_base([{"input_ids": IDS}], outputs, stage="teacher_log_prob")
    assert torch.equal(taught["x"], model()(IDS)[..., 0])
    first.save_state(tmp_path)
    second = engine()
    second.load_state(tmp_path)
    assert all(torch.equal(a, exported[n]) for n, a in second.export_weights())
    saved = load_model(tmp_path, dtype=torch.float64, device="cpu").state_dict()
    assert saved.keys() == base.keys() and all(torch.equal(saved[n], t) for n, t in exported.items())
    for resumed in (first, second):
        resumed.update([{"input_ids": IDS}], lambda o, m: (o["x"].sum(), {}), stage="update_student")
    assert all(torch.equal(t, first.model.state_dict()[n]) for n, t in second.model.state_dict().items())
    (tmp_path / "lora.safetensors").unlink()
    with pytest.raises(InputError, match="lora.safetensors: the checkpoint lacks a file"):
        engine().load_state(tmp_path)


@pytest.mark.engine
def test_peft_agrees():
    peft = pytest.importorskip("peft")
    adapted = trained(LoraSettings(rank=3, alpha=6.0, target_modules=("o_proj",)))

    theirs = peft.get_peft_model(
        torch.nn.Sequential(model()), peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=["o_proj"], lora_dropout=0.0)
    )
    places = dict(theirs.named_modules())
    with torch.no_grad():
        for name in adapted.targets:
            key = name.replace(".", "/")
            layer = places[f"base_model.model.0.{name.removesuffix('.weight')}"]
            layer.lora_A["default"].weight.copy_(adapted.down[key])
            layer.lora_B["default"].weight.copy_(adapted.up[key])
    expected, found = theirs(IDS).detach(), adapted(IDS).detach()
    # W·x + (α/r)·B·(A·x) adds in another order than (W + (α/r)·B·A)·x, layer after layer.
    terms = CONFIG.hidden_size * CONFIG.num_hidden_layers * CONFIG.num_attention_heads * CONFIG.v_head_dim
    assert (expected - found).abs().max() <= torch.finfo(torch.float64).eps * terms * float(found.abs().max())
    with theirs.disable_adapter():
        assert torch.allclose(theirs(IDS), adapted.base(IDS), rtol=0, atol=torch.finfo(torch.float64).eps * terms)
