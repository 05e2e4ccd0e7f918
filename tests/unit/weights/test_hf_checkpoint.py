"""Hugging Face checkpoints: round trips, and every way a folder can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import VALUE_ARCHITECTURE, preset
from alignment.models.value_model import ValueModel
from alignment.weights import checkpoint
from alignment.weights.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    iter_tensors,
    load_config,
    load_model,
    load_state,
    load_value_model,
    save_checkpoint,
    weights_hash,
)

CONFIG = replace(preset("tiny-deepseek"), num_hidden_layers=2, vocab_size=64)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(CONFIG).init_weights(1)


@pytest.fixture
def folder(tmp_path: Path, model: CausalLM) -> Path:
    """A checkpoint in one file."""
    save_checkpoint(tmp_path / "one", CONFIG, model.state_dict())
    return tmp_path / "one"


@pytest.fixture
def sharded(tmp_path: Path, model: CausalLM) -> Path:
    save_checkpoint(tmp_path / "many", CONFIG, model.state_dict(), max_shard_bytes=100_000)
    return tmp_path / "many"


def rewrite(file: Path, change: Callable[[dict], None]) -> None:
    """Write the tensors of ``file`` again after ``change``, as a foreign tool would: without our content hash."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("shard", [1, 50_000, 10**9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trips_are_exact(tmp_path, dtype, shard):
    source = CausalLM(CONFIG, dtype=dtype).init_weights(2)
    digest = save_checkpoint(tmp_path / "c", CONFIG, source.state_dict(), max_shard_bytes=shard)
    loaded = load_model(tmp_path / "c")
    assert loaded.config == CONFIG and loaded.dtype is dtype
    assert weights_hash(loaded.state_dict()) == weights_hash(source.state_dict()) == digest
    assert weights_hash(load_state(tmp_path / "c")) == digest
    assert (tmp_path / "c" / INDEX_FILE).exists() == (shard < 10**9)
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens), source(tokens))


def test_shards_keep_to_their_size_and_the_index_to_the_shards(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((sharded / INDEX_FILE).read_text())
    assert len(files) > 1 and {f.name for f in files} == set(index["weight_map"].values())
    for file in files:
        tensors = load_file(file)
        assert set(tensors) == {n for n, f in index["weight_map"].items() if f == file.name}
        assert sum(t.nbytes for t in tensors.values()) <= 100_000
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load_state(sharded).values())


def test_loading_can_change_the_dtype(folder, model):
    loaded = load_model(folder, dtype=torch.float64)
    assert all(torch.equal(loaded.state_dict()[n], t.double()) for n, t in model.state_dict().items())


def test_tensors_stream_one_by_one(sharded, monkeypatch):
    opened = []
    plain = checkpoint._open
    monkeypatch.setattr(checkpoint, "_open", lambda path: opened.append(path) or plain(path))
    stream = iter_tensors(sharded, verify=False)
    next(stream)
    scanned = len(opened)
    assert scanned == len(list(sharded.glob("*.safetensors"))) + 1
    assert {name for name, _ in stream} < set(load_state(sharded))


def test_tied_heads_are_not_stored(tmp_path):
    config = replace(CONFIG, tie_word_embeddings=True)
    source = CausalLM(config).init_weights(1)
    save_checkpoint(tmp_path / "tied", config, source.state_dict())
    assert "lm_head.weight" not in load_state(tmp_path / "tied")
    loaded = load_model(tmp_path / "tied")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert weights_hash(loaded.state_dict()) == weights_hash(source.state_dict())


def test_views_of_one_buffer_are_stored_each(tmp_path, model):
    flat = torch.cat([t.flatten() for t in model.state_dict().values()])
    parts = flat.split([t.numel() for t in model.state_dict().values()])
    views = {n: p.view_as(t) for (n, t), p in zip(model.state_dict().items(), parts, strict=True)}
    assert save_checkpoint(tmp_path / "v", CONFIG, views) == weights_hash(model.state_dict())


def test_critics_round_trip_and_are_not_policies(tmp_path, folder):
    critic = ValueModel(CONFIG).init_weights(3)
    save_checkpoint(tmp_path / "critic", CONFIG, critic.state_dict(), architecture=VALUE_ARCHITECTURE)
    assert weights_hash(load_value_model(tmp_path / "critic").state_dict()) == weights_hash(critic.state_dict())
    with pytest.raises(InputError, match="lacks the tensor lm_head.weight"):
        load_model(tmp_path / "critic")
    with pytest.raises(InputError, match=r"lacks the tensor score.bias \(and 1 more\)"):
        load_value_model(folder)


def test_the_hash_sees_names_shapes_dtypes_and_bytes_only():
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    digest = weights_hash(state)
    strided = {"b": state["b"], "a": state["a"].T.contiguous().T}
    assert not strided["a"].is_contiguous() and weights_hash(strided) == digest
    changes = [
        {**state, "c": torch.ones(1)},
        {"a": state["a"], "B": state["b"]},
        {**state, "a": state["a"].view(3, 2)},
        {**state, "b": state["b"].half()},
        {**state, "b": -state["b"]},
        {**state, "a": state["a"].nextafter(torch.tensor(9.0))},
    ]
    assert len({digest, *map(weights_hash, changes)}) == 1 + len(changes)


# Files that others wrote, or that something happened to


def test_tensors_that_published_checkpoints_add_are_passed_over(folder, model):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.layers.2.enorm.weight"] = torch.ones(64)

    rewrite(folder / SINGLE_FILE, change)
    assert weights_hash(load_model(folder).state_dict()) == weights_hash(model.state_dict())


DAMAGE = {
    "missing tensor": (
        lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
        r"lacks the tensor model.layers.1.mlp.experts.3.up_proj.weight; expected \[48, 64\]",
    ),
    "extra tensor": (
        lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(48, 64)}),
        r"model.safetensors: the checkpoint has a tensor model.layers.1.mlp.experts.8.up_proj.weight .* \[48, 64\]",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(63)}),
        r"model.safetensors: model.norm.weight: the shape does not fit .* expected \[64\]; found \[63\]",
    ),
    "vocabulary": (
        lambda t: t.update({n: torch.ones(65, 64) for n in ("model.embed_tokens.weight", "lm_head.weight")}),
        r"lm_head.weight: the vocabulary .* expected \[64, 64\] \(vocab_size, hidden_size\); found \[65, 64\]",
    ),
    "integers": (
        lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
        r"model.norm.weight: the tensor is not stored as a plain floating-point type; .* found I32.*dequantise",
    ),
    "fp8": (
        lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
        r"model.norm.weight: the tensor is not stored .* found F8_E4M3.*dequantise",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_tensors_that_do_not_fit_are_named(folder, name):
    change, message = DAMAGE[name]
    rewrite(folder / SINGLE_FILE, change)
    with pytest.raises(InputError, match=message) as error:
        load_model(folder)
    assert str(folder) in str(error.value)


def test_what_does_not_fit_is_not_written_either(tmp_path, model):
    state = {**model.state_dict(), "surplus": torch.ones(1)}
    with pytest.raises(InputError, match="has a tensor surplus"):
        save_checkpoint(tmp_path / "c", CONFIG, state)
    state = {**model.state_dict()}
    del state["lm_head.weight"]
    with pytest.raises(InputError, match="lacks the tensor lm_head.weight"):
        save_checkpoint(tmp_path / "c", CONFIG, state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 5, 400, -1])
def test_truncated_files_are_named(sharded, keep):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match=f"{file.name}: the file is damaged or is not a safetensors file; found"):
        load_model(sharded)


def test_a_flipped_bit_is_found_by_the_content_hash(folder, model):
    file = folder / SINGLE_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        InputError, match="model.safetensors: the tensors differ from those that were written; expected sha256:"
    ):
        load_model(folder)
    with pytest.raises(InputError, match="the tensors differ"):
        next(iter_tensors(folder))
    unverified = load_model(folder, verify=False)
    assert weights_hash(unverified.state_dict()) != weights_hash(model.state_dict())


def test_a_missing_shard_is_named(sharded):
    file = sorted(sharded.glob("*.safetensors"))[0]
    file.unlink()
    with pytest.raises(InputError, match=f"{file.name}: a file of the checkpoint is missing"):
        load_model(sharded)


def test_an_index_that_disagrees_with_its_shards_is_named(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    first, last = sorted(set(index["weight_map"].values()))[:: len(set(index["weight_map"].values())) - 1]
    moved = next(n for n, f in index["weight_map"].items() if f == first)
    index["weight_map"][moved] = last
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(
        InputError, match=f"{first}: the index and the file disagree about the tensor {moved}; expected in {last}"
    ):
        load_model(sharded)
    index["weight_map"][moved] = "../elsewhere.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(InputError, match="the index points outside its folder"):
        load_model(sharded)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("[]", "does not hold a JSON object"), ("{}", "no weight_map")]
)
def test_a_broken_index_is_named(sharded, content, message):
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(InputError, match=f"{INDEX_FILE}: .*{message}"):
        load_model(sharded)


def test_folders_without_or_with_two_checkpoints_are_refused(folder, sharded, tmp_path):
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(InputError, match="the folder holds two checkpoints"):
        load_state(folder)
    with pytest.raises(
        InputError, match="there are no weights here; expected model.safetensors or model.safetensors.index.json"
    ):
        load_state(tmp_path)
    with pytest.raises(InputError, match="config.json: a file of the checkpoint is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 63}, r"lm_head.weight: the vocabulary .* expected \[63, 64\].* found \[64, 64\]"),
        ({"num_hidden_layers": 3}, "lacks the tensor model.layers.2."),
        ({"model_type": "qwen3"}, "config.json: the configuration is of another architecture"),
    ],
)
def test_a_configuration_of_another_model_is_refused(folder, change, message):
    path = folder / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        load_model(folder)


def test_an_existing_folder_is_replaced_only_on_request(folder, model):
    before = weights_hash(load_state(folder))
    with pytest.raises(InputError, match="there is something at the place of the checkpoint already.*overwrite=True"):
        save_checkpoint(folder, CONFIG, model.state_dict())
    other = CausalLM(CONFIG).init_weights(9)
    save_checkpoint(folder, CONFIG, other.state_dict(), overwrite=True)
    assert weights_hash(load_state(folder)) == weights_hash(other.state_dict()) != before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_write_that_fails_leaves_the_old_checkpoint_and_nothing_else(folder, model, monkeypatch):
    before = weights_hash(load_state(folder))

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(InputError, match="the checkpoint cannot be written.*No space left on device"):
        save_checkpoint(folder, CONFIG, CausalLM(CONFIG).init_weights(9).state_dict(), overwrite=True)
    assert weights_hash(load_state(folder)) == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_replacement_that_fails_half_way_puts_the_old_checkpoint_back(folder, model, monkeypatch):
    before = weights_hash(load_state(folder))
    plain = Path.rename

    def rename(path, target):
        if ".writing-" in path.name:
            raise OSError(5, "Input/output error")
        return plain(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(InputError, match="the checkpoint cannot be written"):
        save_checkpoint(folder, CONFIG, CausalLM(CONFIG).init_weights(9).state_dict(), overwrite=True)
    assert weights_hash(load_state(folder)) == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


# transformers on the other side


@pytest.mark.parametrize("shard", [50_000, 10**9])
def test_transformers_reads_and_writes_the_same_files(tmp_path, shard):
    transformers = pytest.importorskip("transformers")
    source = CausalLM(CONFIG).init_weights(4)
    save_checkpoint(tmp_path / "ours", CONFIG, source.state_dict(), max_shard_bytes=shard)
    theirs, report = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "ours", torch_dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    assert weights_hash(load_state(tmp_path / "theirs")) == weights_hash(source.state_dict())
    assert load_config(tmp_path / "theirs") == CONFIG
    assert weights_hash(load_model(tmp_path / "theirs").state_dict()) == weights_hash(source.state_dict())


def test_transformers_reads_critics(tmp_path):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, VALUE_ARCHITECTURE):
        pytest.skip(f"transformers {transformers.__version__} has no {VALUE_ARCHITECTURE}")
    critic = ValueModel(CONFIG).init_weights(4)
    save_checkpoint(tmp_path / "critic", CONFIG, critic.state_dict(), architecture=VALUE_ARCHITECTURE)
    theirs, report = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "critic", torch_dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(8)[None]
    theirs.eval()
    with torch.no_grad():
        difference = (theirs(tokens).logits.squeeze(-1) - critic(tokens)).norm() / critic(tokens).norm()
    assert difference <= torch.finfo(torch.float32).eps * CONFIG.intermediate_size * CONFIG.num_hidden_layers
