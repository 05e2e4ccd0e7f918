"""FP8 → BF16: against NumPy in float64, against a re-quantised round trip, and with every damage named."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from alignment.errors import InputError
from alignment.models.config import preset
from alignment.numerics.random import portable_integers, portable_uniform
from alignment.weights import fp8
from alignment.weights.fp8 import convert_fp8_checkpoint, dequantize, quantize

EDGES = ((128, 128), (256, 384), (1, 1), (127, 129), (129, 127), (300, 1), (1, 300), (576, 200))


def codes(shape, *, seed: int, stream: str) -> torch.Tensor:
    """FP8 numbers with every code but the two NaNs equally likely."""
    drawn = portable_integers(0, 254, shape, seed=seed, stream=stream)
    finite = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F])
    return finite[drawn].to(torch.uint8).view(torch.float8_e4m3fn)


def scales(weight: tuple[int, int], block=(128, 128), *, stream: str) -> torch.Tensor:
    shape = [math.ceil(side / width) for side, width in zip(weight, block)]
    return torch.exp2(portable_uniform(shape, seed=3, stream=stream) * 30 - 20).float()


def oracle(weight: torch.Tensor, scale: torch.Tensor, block=(128, 128)) -> np.ndarray:
    """The bits of BF16 by hand: e4m3 from its bit fields, the product in float64, rounded to float32 and then to
    BF16."""
    code = weight.view(torch.uint8).numpy().astype(np.int64)
    sign, exponent, fraction = code >> 7, (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(sign == 1, -value, value)
    rows, columns = np.indices(code.shape)
    product = value * scale.double().numpy()[rows // block[0], columns // block[1]]
    bits = product.astype(np.float32).view(np.uint32).astype(np.int64)
    nearest_even = bits + 0x7FFF + ((bits >> 16) & 1)
    return (nearest_even >> 16).astype(np.uint16)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_dequantised_bits_are_the_oracles(shape):
    weight, scale = codes(shape, seed=1, stream=f"w{shape}"), scales(shape, stream=f"s{shape}")
    assert np.array_equal(bits_of(dequantize(weight, scale)), oracle(weight, scale))


def test_every_code_is_read_as_torch_reads_it():
    every = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    result = dequantize(every.view(1, -1), torch.ones(1, 2))
    assert torch.equal(result.view(torch.int16), every.view(1, -1).to(torch.bfloat16).view(torch.int16))


@pytest.mark.parametrize("block", [(64, 32), (1, 128), (128, 1), (300, 300)], ids=str)
def test_other_block_sizes(block):
    weight, scale = codes((200, 150), seed=2, stream="w"), scales((200, 150), block, stream="s")
    assert np.array_equal(bits_of(dequantize(weight, scale, block=block)), oracle(weight, scale, block))


def test_a_transposed_scale_is_another_result():
    weight, scale = codes((256, 256), seed=4, stream="w"), scales((256, 256), stream="s")
    assert not np.array_equal(bits_of(dequantize(weight, scale.t().contiguous())), oracle(weight, scale))


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_requantising_gives_back_what_was_there(shape):
    """BF16 keeps e4m3's 4 significant bits through a product rounded to 8, so the codes come back exactly."""
    weight, first = quantize(portable_uniform(shape, seed=5, stream="w") - 0.5)
    plain = dequantize(weight, first)
    again, _ = quantize(plain)
    assert torch.equal(again.view(torch.uint8), weight.view(torch.uint8))
    # Within half a step of e4m3 below its largest binade, whose width is 2⁻³ of the number.
    original = portable_uniform(shape, seed=5, stream="w") - 0.5
    largest = float(original.abs().max())
    step = largest * float(torch.finfo(torch.float8_e4m3fn).eps) / 2
    assert float((plain.double() - original).abs().max()) <= step


class Source:
    """A quantised checkpoint of two shards, with one scale in another shard than its weight."""

    def __init__(self, folder, block=(128, 128)):
        self.folder, self.block = folder, block
        folder.mkdir()
        shapes = {"a.weight": (300, 200), "b.weight": (128, 260), "c.weight": (5, 7)}
        self.weights = {n: codes(s, seed=6, stream=n) for n, s in shapes.items()}
        self.scales = {n: scales(s, block, stream=n) for n, s in shapes.items()}
        self.plain = {
            "norm.weight": portable_uniform((7,), seed=7, stream="norm").to(torch.bfloat16),
            "gate.bias": portable_uniform((3,), seed=7, stream="bias").float(),
        }
        self.shards = {
            "model-00001-of-00002.safetensors": {
                "a.weight": self.weights["a.weight"],
                "b.weight_scale_inv": self.scales["b.weight"],
                "norm.weight": self.plain["norm.weight"],
                "a.weight_scale_inv": self.scales["a.weight"],
            },
            "model-00002-of-00002.safetensors": {
                "b.weight": self.weights["b.weight"],
                "c.weight": self.weights["c.weight"],
                "c.weight_scale_inv": self.scales["c.weight"],
                "gate.bias": self.plain["gate.bias"],
            },
        }
        self.config = {
            **preset("tiny-deepseek").to_hf(),
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block),
            },
        }  # fmt: skip
        (folder / "tokenizer_config.json").write_text("{}")
        self.write()

    def write(self):
        for file, tensors in self.shards.items():
            save_file(tensors, self.folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {n: f for f, tensors in self.shards.items() for n in tensors}}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (self.folder / "config.json").write_text(json.dumps(self.config))
        return self

    def move(self, name, value):
        for tensors in self.shards.values():
            if name in tensors:
                tensors[name] = value
        return self.write()


@pytest.fixture
def source(tmp_path):
    return Source(tmp_path / "fp8")


def test_a_sharded_checkpoint(source, tmp_path):
    seen = []
    report = convert_fp8_checkpoint(source.folder, tmp_path / "bf16", progress=lambda *p: seen.append(p))
    out = tmp_path / "bf16"
    assert (report.dequantized, report.copied, report.files, report.kept) == (3, 2, 2, 0)
    assert seen[-1] == ("model-00002-of-00002.safetensors", report.nbytes, report.nbytes)
    found = {}
    for file in source.shards:
        assert (out / file).is_file()
        found |= load_file(out / file)
    assert found.keys() == source.weights.keys() | source.plain.keys()
    for name, weight in source.weights.items():
        assert np.array_equal(bits_of(found[name]), oracle(weight, source.scales[name])), name
    for name, tensor in source.plain.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert index["weight_map"] == {
        n: f for f, tensors in source.shards.items() for n in tensors if not n.endswith("_scale_inv")
    }
    expected = {k: v for k, v in source.config.items() if k != "quantization_config"}
    assert json.loads((out / "config.json").read_text()) == expected
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_a_block_size_from_the_configuration(tmp_path):
    source = Source(tmp_path / "fp8", block=(64, 32))
    convert_fp8_checkpoint(source.folder, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model-00001-of-00002.safetensors", framework="pt") as file:
        found = file.get_tensor("a.weight")
    assert np.array_equal(bits_of(found), oracle(source.weights["a.weight"], source.scales["a.weight"], (64, 32)))


def test_row_blocks_that_do_not_fit_the_buffer_at_once(source, tmp_path, monkeypatch):
    monkeypatch.setattr(fp8, "_BUFFER_BYTES", 100)
    convert_fp8_checkpoint(source.folder, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model-00001-of-00002.safetensors")
    assert np.array_equal(bits_of(found["a.weight"]), oracle(source.weights["a.weight"], source.scales["a.weight"]))


def test_the_golden_model_loads_what_was_converted(tmp_path):
    from alignment.models.causal_lm import CausalLM
    from alignment.weights.checkpoint import load_model, save_checkpoint

    config = preset("tiny-deepseek")
    model = CausalLM(config, dtype=torch.bfloat16)
    model.init_weights(8)
    save_checkpoint(tmp_path / "src", config, model.state_dict())
    path = tmp_path / "src" / "model.safetensors"
    stored, expected = {}, {}
    for name, tensor in load_file(path).items():
        if "proj" in name:
            stored[name], stored[name + "_scale_inv"] = quantize(tensor)
            expected[name] = oracle(stored[name], stored[name + "_scale_inv"])
        else:
            stored[name] = tensor
    save_file(stored, path)
    hf = json.loads((tmp_path / "src" / "config.json").read_text())
    hf["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "src" / "config.json").write_text(json.dumps(hf))
    convert_fp8_checkpoint(tmp_path / "src", tmp_path / "dst")
    loaded = load_model(tmp_path / "dst").state_dict()
    assert all(np.array_equal(bits_of(loaded[name]), expected[name]) for name in expected) and expected


def test_a_conversion_goes_on_where_it_was(source, tmp_path):
    out = tmp_path / "out"
    convert_fp8_checkpoint(source.folder, out)
    before = (out / "model-00001-of-00002.safetensors").stat()
    (out / "model-00002-of-00002.safetensors").unlink()
    (out / "config.json").unlink()
    (out / ".model-00002-of-00002.safetensors.half").write_bytes(b"half")
    report = convert_fp8_checkpoint(source.folder, out)
    assert (report.kept, report.files) == (1, 2)
    assert (out / "model-00001-of-00002.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    found = load_file(out / "model-00002-of-00002.safetensors")
    assert np.array_equal(bits_of(found["b.weight"]), oracle(source.weights["b.weight"], source.scales["b.weight"]))
    assert (out / "config.json").is_file() and not list(out.glob(".model*"))


KILLED = """
import os, signal, sys
from alignment.weights.fp8 import convert_fp8_checkpoint
def die(file, done, total):
    if file.startswith("model-00002"):
        os.kill(os.getpid(), signal.SIGKILL)
convert_fp8_checkpoint(sys.argv[1], sys.argv[2], progress=die)
"""


def test_a_killed_conversion_leaves_whole_files_and_is_taken_up(source, tmp_path):
    out = tmp_path / "out"
    ended = subprocess.run([sys.executable, "-c", KILLED, source.folder, out], timeout=600)
    assert ended.returncode == -signal.SIGKILL
    assert (out / "model-00001-of-00002.safetensors").is_file()
    assert not (out / "model-00002-of-00002.safetensors").exists() and not (out / "config.json").exists()
    assert convert_fp8_checkpoint(source.folder, out).kept == 1
    assert {p.name for p in out.iterdir()} == {
        "config.json", "model.safetensors.index.json", "tokenizer_config.json", *source.shards,
    }  # fmt: skip


def test_a_changed_source_is_not_mixed_with_what_was_converted_before(source, tmp_path):
    convert_fp8_checkpoint(source.folder, tmp_path / "out")
    source.move("norm.weight", source.plain["norm.weight"] * 2)
    time.sleep(0.01)
    source.write()
    with pytest.raises(
        InputError, match="model-00001-of-00002.safetensors: there is a file that does not come from this"
    ):
        convert_fp8_checkpoint(source.folder, tmp_path / "out")


def break_scale_missing(source):
    del source.shards["model-00001-of-00002.safetensors"]["b.weight_scale_inv"]
    source.write()


def break_scale_shape(source):
    source.move("a.weight_scale_inv", source.scales["a.weight"].t().contiguous())


def break_scale_nan(source):
    source.scales["a.weight"][1, 0] = math.nan
    source.write()


def break_scale_negative(source):
    source.scales["a.weight"][2, 1] = -1.0
    source.write()


def break_weight_nan(source):
    source.weights["b.weight"].view(torch.uint8)[3, 200] = 0x7F
    source.write()


def break_range(source):
    source.scales["b.weight"][0, 0] = 3e38
    source.write()


def break_scale_alone(source):
    source.move("a.weight", torch.ones(300, 200, dtype=torch.bfloat16))


def break_quant_method(source):
    source.config["quantization_config"]["quant_method"] = "awq"
    source.write()


def break_block(source):
    source.config["quantization_config"]["weight_block_size"] = None
    source.write()


def break_not_quantised(source):
    del source.config["quantization_config"]
    source.write()


def break_truncated(source):
    path = source.folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def break_index(source):
    path = source.folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_scale_missing, r"00002.safetensors: b.weight: the FP8 weight has no scale b.weight_scale_inv"),
        (
            break_scale_shape,
            r"a.weight_scale_inv: the scale does not fit its weight; expected \[3, 2\] for .*found \[2, 3\]",
        ),
        (break_scale_nan, r"a.weight_scale_inv: a scale is not a positive number.*found nan at block \[1, 0\]"),
        (break_scale_negative, r"a.weight_scale_inv: a scale is not a positive number.*found -1.0 at block \[2, 1\]"),
        (break_weight_nan, r"00002.safetensors: b.weight: the weight holds NaN"),
        (break_range, r"b.weight: weight times scale leaves the range of BF16"),
        (break_scale_alone, r"a.weight_scale_inv: a scale without an FP8 weight"),
        (
            break_quant_method,
            r"quantization_config.quant_method: another kind of quantisation; expected fp8; found awq",
        ),
        (break_block, r"weight_block_size: the weights are not scaled by blocks; expected two positive integers"),
        (break_not_quantised, r"config.json: the checkpoint is not quantised"),
        (break_truncated, r"00002.safetensors: the file is damaged"),
        (break_index, r"00001-of-00002.safetensors: the index and the file disagree about the tensor ghost.weight"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_damage_is_named_and_nothing_looks_finished(source, tmp_path, damage, message):
    damage(source)
    with pytest.raises(InputError, match=message):
        convert_fp8_checkpoint(source.folder, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    assert not list((tmp_path / "out").glob(".model*"))


def test_a_folder_cannot_be_converted_into_itself(source):
    with pytest.raises(InputError, match="needs a folder of its own"):
        convert_fp8_checkpoint(source.folder, source.folder)


def test_too_little_room_is_refused_before_writing(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fp8.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(InputError, match="the disk has too little room; expected .* bytes; found 10"):
        convert_fp8_checkpoint(source.folder, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
