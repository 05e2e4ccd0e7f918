from __future__ import annotations

import json

import pytest
import torch

from alignment.errors import InputError
from alignment.models.config import preset
from alignment.weights.checkpoint import expected_shapes, load_state, save_checkpoint
from alignment.weights.indexed_save import ROTARY_FREQUENCIES, check_index, read_index, save_stream

CONFIG = preset("tiny-deepseek")
EXTRA = "model.layers.1.self_attn.rotary_emb.inv_freq"


def state():
    return {
        name: torch.full(shape, float(i), dtype=torch.bfloat16)
        for i, (name, shape) in enumerate(expected_shapes(CONFIG).items())
    }


def with_rotary_frequencies(index):
    return {**index, EXTRA: index["model.layers.1.mlp.gate.weight"]}


@pytest.fixture
def source(tmp_path):
    save_checkpoint(tmp_path / "source", CONFIG, state(), max_shard_bytes=60_000)
    return tmp_path / "source"


def test_a_stream_lands_in_the_files_of_the_index(source, tmp_path):
    index = read_index(source)
    assert len(set(index.values())) > 2
    save_stream(tmp_path / "saved", CONFIG, state().items(), index=index)
    assert read_index(tmp_path / "saved") == index
    back = load_state(tmp_path / "saved")
    assert all(torch.equal(back[name], tensor) for name, tensor in state().items())


def test_a_key_that_training_never_produces_is_refused_with_its_file(source, tmp_path):
    index = with_rotary_frequencies(read_index(source))
    with pytest.raises(InputError) as refusal:
        save_stream(tmp_path / "saved", CONFIG, state().items(), index=index)
    assert EXTRA in str(refusal.value)
    assert index[EXTRA] in str(refusal.value)
    assert ROTARY_FREQUENCIES in str(refusal.value)
    assert not (tmp_path / "saved").exists()


def test_a_writer_that_waits_for_every_key_would_have_skipped_that_file(source):
    """What the refusal is about: the file is never complete, and every trained tensor in it is lost."""
    index = with_rotary_frequencies(read_index(source))
    waiting = {file: {key for key in index if index[key] == file} for file in set(index.values())}
    for name in state():
        waiting[index[name]].discard(name)
    assert [file for file, keys in waiting.items() if keys] == [index[EXTRA]]


def test_the_key_can_be_left_out_explicitly(source, tmp_path):
    index = with_rotary_frequencies(read_index(source))
    save_stream(tmp_path / "saved", CONFIG, state().items(), index=index, allow_missing=[ROTARY_FREQUENCIES])
    assert EXTRA not in json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())["weight_map"]
    assert load_state(tmp_path / "saved").keys() == state().keys()


def test_allowing_one_key_does_not_allow_another(source):
    index = {**read_index(source), "model.layers.0.self_attn.q_proj.bias": "model-00001-of-00002.safetensors"}
    with pytest.raises(InputError, match=r"q_proj\.bias"):
        check_index(index, CONFIG, allow_missing=[ROTARY_FREQUENCIES])


def test_a_stream_that_ends_early_writes_nothing(source, tmp_path):
    short = dict(list(state().items())[:-1])
    with pytest.raises(InputError, match=r"ended without the tensor lm_head\.weight"):
        save_stream(tmp_path / "saved", CONFIG, short.items(), index=read_index(source))
    assert not (tmp_path / "saved").exists()


def test_a_tensor_given_twice_is_refused(source, tmp_path):
    stream = [*state().items(), ("model.norm.weight", state()["model.norm.weight"])]
    with pytest.raises(InputError, match="no place for"):
        save_stream(tmp_path / "saved", CONFIG, stream, index=read_index(source))


def test_a_tensor_without_a_file_is_refused(source):
    index = read_index(source)
    del index["lm_head.weight"]
    with pytest.raises(InputError, match=r"no file for the tensor lm_head\.weight"):
        check_index(index, CONFIG)
