"""Small models that real inference engines accept: DeepSeek's own head widths around a tiny body."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig, preset

# What the MLA kernels of vLLM and vLLM-Ascend are compiled for: a latent of 512 + 64 in the cache.
KV_LORA_RANK, QK_ROPE_HEAD_DIM, QK_NOPE_HEAD_DIM, V_HEAD_DIM = 512, 64, 128, 128
# The default of 0.02 makes distributions so flat that defects hide in them.
INITIALIZER_RANGE = 0.1


def engine_config(config: ModelConfig | str = "tiny-moonlight", **changes: object) -> ModelConfig:
    """``config`` (or the preset of that name) with head widths that engines have kernels for; ``changes`` come last.

    The ε of the latent norms becomes the 1e-6 of the published model code.
    """
    base = preset(config) if isinstance(config, str) else config
    widths = {
        "kv_lora_rank": KV_LORA_RANK,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "qk_nope_head_dim": QK_NOPE_HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "initializer_range": INITIALIZER_RANGE,
        # The experts' kernels of the CPU build take multiples of 32.
        "hidden_size": -(-base.hidden_size // 32) * 32,
    }
    return dataclasses.replace(base, **{**widths, **changes})


def make_engine_checkpoint(
    directory: str | Path, config: ModelConfig | None = None, *, seed: int = 1, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """Write a Hugging Face checkpoint of a freshly initialised model and return the model.

    The router's correction bias is drawn too: zeros would hide a bias that is not loaded.
    """
    from alignment.backends.weight_sync import stream_weights
    from alignment.weights.checkpoint import save_checkpoint

    model = CausalLM(config or engine_config(), dtype=dtype).init_weights(seed)
    save_checkpoint(directory, model.config, dict(stream_weights(model)))
    return model
