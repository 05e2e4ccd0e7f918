"""Layer cutting: what is kept is bit for bit what was there, under its new number, and engines compute with it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.random import portable_integers
from alignment.weights.checkpoint import load_config, load_model, load_state, save_checkpoint
from alignment.weights.cut import cut_checkpoint
from alignment.weights.fp8 import convert_fp8_checkpoint, quantize

CONFIG = dataclasses.replace(preset("tiny-deepseek"), num_hidden_layers=6, first_k_dense_replace=2)


@pytest.fixture(scope="module")
def model():
    model = CausalLM(CONFIG, dtype=torch.float32)
    model.init_weights(11)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # Initialised alike in every layer, where no test would see them change places.
            if name.endswith(("norm.weight", "layernorm.weight", "correction_bias")):
                tensor.add_(torch.linspace(0, 0.1, tensor.numel()) * (1 + len(name) % 5))
    return model


@pytest.fixture
def source(tmp_path, model):
    save_checkpoint(tmp_path / "src", CONFIG, model.state_dict(), max_shard_bytes=200_000)
    (tmp_path / "src" / "tokenizer.json").write_text("{}")
    return tmp_path / "src"


def chosen(model, layers):
    """The golden model of the same layers, taken from the module list by hand."""
    dense = sum(layer < CONFIG.first_k_dense_replace for layer in layers)
    config = dataclasses.replace(CONFIG, num_hidden_layers=len(layers), first_k_dense_replace=dense)
    small = CausalLM(config, dtype=torch.float32)
    small.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    small.model.norm.load_state_dict(model.model.norm.state_dict())
    small.lm_head.load_state_dict(model.lm_head.state_dict())
    for new, old in enumerate(layers):
        small.model.layers[new].load_state_dict(model.model.layers[old].state_dict())
    return small


def tokens():
    return portable_integers(0, CONFIG.vocab_size, (2, 9), seed=1, stream="tokens")


@pytest.mark.parametrize("layers", [(0, 3, 5), (1, 4), (0, 1), (2, 3), (1, 0, 5, 2), range(6)], ids=str)
def test_the_cut_model_is_the_model_of_the_kept_layers(source, tmp_path, model, layers):
    report = cut_checkpoint(source, tmp_path / "cut", layers=layers)
    loaded, expected = load_model(tmp_path / "cut"), chosen(model, layers)
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in expected.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(tokens()), expected(tokens()))
    assert report.layers == tuple(layers) and report.nbytes == sum(
        t.nbytes for t in load_state(tmp_path / "cut").values()
    )
    assert report.first_k_dense_replace == load_config(tmp_path / "cut").first_k_dense_replace


def test_another_layer_gives_other_logits(source, tmp_path, model):
    cut_checkpoint(source, tmp_path / "cut", layers=(0, 3, 5))
    with torch.no_grad():
        assert not torch.equal(load_model(tmp_path / "cut")(tokens()), chosen(model, (0, 4, 5))(tokens()))


def test_transformers_computes_the_same(source, tmp_path, model):
    transformers = pytest.importorskip("transformers")
    major = int(transformers.__version__.split(".")[0])
    cut_checkpoint(source, tmp_path / "cut", layers=(0, 3, 5))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "cut", attn_implementation="eager", **{"dtype" if major >= 5 else "torch_dtype": torch.float64}
    )
    # The grouped kernels of transformers 5 know no float64.
    loaded.config._experts_implementation = "eager"
    assert loaded.config.num_hidden_layers == 3 and loaded.config.first_k_dense_replace == 1
    expected = chosen(model, (0, 3, 5)).double()
    with torch.no_grad():
        reference, found = expected(tokens()), loaded(tokens()).logits
    # Both in float64 (transformers takes norms, rope tables and the router in float32): every layer rounds a handful
    # of times.
    roundings = 16 * len(loaded.model.layers)
    bound = roundings * float(torch.finfo(torch.float32).eps)
    assert float((found - reference).norm() / reference.norm()) <= bound


def test_files_index_and_configuration(source, tmp_path):
    before = json.loads((source / "config.json").read_text())
    report = cut_checkpoint(source, tmp_path / "cut", layers=(1, 4, 2), max_shard_bytes=200_000)
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    changed = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    assert config == {**before, **changed}
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.nbytes < report.source_bytes
    files = sorted(p.name for p in (tmp_path / "cut").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 1
    for file in files:
        assert load_file(tmp_path / "cut" / file).keys() == {n for n, f in index["weight_map"].items() if f == file}
    assert (tmp_path / "cut" / "tokenizer.json").is_file()


def with_mtp(source):
    """Behind the last layer a multi-token-prediction layer, as published checkpoints have it."""
    path = sorted(source.glob("*.safetensors"))[-1]
    tensors = load_file(path)
    extra = {"model.layers.6.eh_proj.weight": torch.ones(4, 8), "model.layers.6.input_layernorm.weight": torch.ones(4)}
    save_file({**tensors, **extra}, path, metadata={"format": "pt"})
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, path.name)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    hf = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**hf, "num_nextn_predict_layers": 1}))
    return extra


def test_prediction_layers_are_left_out_or_kept(source, tmp_path):
    extra = with_mtp(source)
    cut_checkpoint(source, tmp_path / "without", layers=(0, 5))
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not any("eh_proj" in name for name in load_state(tmp_path / "without"))
    report = cut_checkpoint(source, tmp_path / "with", layers=(0, 5), keep_mtp=True)
    assert report.mtp_layers == (6,)
    assert json.loads((tmp_path / "with" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    kept = load_state(tmp_path / "with")
    assert torch.equal(kept["model.layers.2.eh_proj.weight"], extra["model.layers.6.eh_proj.weight"])
    load_model(tmp_path / "with")


def test_fp8_scales_come_along(source, tmp_path):
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for path in source.glob("*.safetensors"):
        stored = {}
        for name, tensor in load_file(path).items():
            stored[name] = tensor.to(torch.bfloat16) if "correction_bias" not in name else tensor
            if "proj" in name:
                stored[name], stored[name + "_scale_inv"] = quantize(tensor)
                index["weight_map"][name + "_scale_inv"] = path.name
        save_file(stored, path, metadata={"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    hf = json.loads((source / "config.json").read_text())
    hf["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate", "model.layers.4.mlp.gate"],
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(hf))
    cut_checkpoint(source, tmp_path / "cut", layers=(0, 4))
    quantization = json.loads((tmp_path / "cut" / "config.json").read_text())["quantization_config"]
    assert quantization["modules_to_not_convert"] == ["lm_head", "model.layers.1.mlp.gate"]
    convert_fp8_checkpoint(source, tmp_path / "whole")
    convert_fp8_checkpoint(tmp_path / "cut", tmp_path / "part")
    cut_checkpoint(tmp_path / "whole", tmp_path / "expected", layers=(0, 4))
    found, expected = load_state(tmp_path / "part"), load_state(tmp_path / "expected")
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    load_model(tmp_path / "part")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            (3, 0),
            r"dense layer 0 would come after MoE layer 3.*the dense layers \(0 to 1\) first; found 3,0\. Next: .*0,3",
        ),
        ((0, 6), r"the checkpoint has no such layer; expected 0 to 5; found 6"),
        ((-1,), r"the checkpoint has no such layer; expected 0 to 5; found -1"),
        ((0, 3, 3), r"layers: a layer is named twice; found 3"),
        ((), r"layers: no layer is to be kept"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_kept(source, tmp_path, layers, message):
    with pytest.raises(InputError, match=message):
        cut_checkpoint(source, tmp_path / "cut", layers=layers)
    assert not (tmp_path / "cut").exists()


def test_a_configuration_that_contradicts_the_tensors(source, tmp_path):
    hf = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**hf, "first_k_dense_replace": 1}))
    with pytest.raises(InputError, match=r"the kept layers lack the tensor model.layers.0.mlp"):
        cut_checkpoint(source, tmp_path / "cut", layers=(1,))


def test_prediction_layers_that_are_not_there(source, tmp_path):
    with pytest.raises(InputError, match="holds no multi-token-prediction layer"):
        cut_checkpoint(source, tmp_path / "cut", layers=(0,), keep_mtp=True)


def test_a_folder_with_something_in_it_is_left_alone(source, tmp_path):
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "notes").write_text("mine")
    with pytest.raises(InputError, match="there is something at the place of the checkpoint already"):
        cut_checkpoint(source, tmp_path / "cut", layers=(0,))
    assert (tmp_path / "cut" / "notes").read_text() == "mine"


def test_a_damaged_shard_leaves_nothing(source, tmp_path):
    path = sorted(source.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{path.name}: the file is damaged"):
        cut_checkpoint(source, tmp_path / "cut", layers=(0, 3))
    assert {p.name for p in tmp_path.iterdir()} == {"src"}
