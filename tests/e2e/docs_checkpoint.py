"""Makes a checkpoint as the pages take one for granted: 61 layers deep, block-scaled FP8, and otherwise small.

python tests/e2e/docs_checkpoint.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.weights.checkpoint import save_checkpoint
from alignment.weights.fp8 import quantize


def write(folder: Path) -> None:
    config = dataclasses.replace(preset("tiny-deepseek"), num_hidden_layers=61)
    model = CausalLM(config, dtype=torch.float32)
    model.init_weights(1)
    save_checkpoint(folder, config, model.state_dict(), max_shard_bytes=4 << 20)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in folder.glob("*.safetensors"):
        stored = {}
        for name, tensor in load_file(path).items():
            stored[name] = tensor if "correction_bias" in name else tensor.to(torch.bfloat16)
            if "proj" in name:
                stored[name], stored[f"{name}_scale_inv"] = quantize(tensor)
                index["weight_map"][f"{name}_scale_inv"] = path.name
        save_file(stored, path, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
