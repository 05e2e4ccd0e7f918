"""The small models and ragged batches the checks run on: float64, milliseconds, and hard where real ones are
comfortable.

Square experts (``moe_intermediate_size = hidden_size``), every head width different, a router bias far from zero,
grouped and plain routing, plain rope and YaRN with two mscale fields, a tied and an untied head, left and right
padding, rows of unequal length, and a sequence that leaves the first 256 positions.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch
from torch import Tensor

from alignment.models.config import ModelConfig, YarnScaling
from alignment.numerics.random import portable_integers, portable_normal

PLAIN = ModelConfig(
    vocab_size=60, hidden_size=24, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=3, kv_lora_rank=14,
    qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, routed_scaling_factor=2.446, rope_theta=50000.0,
    rms_norm_eps=1e-5, latent_norm_eps=1e-6, max_position_embeddings=700, initializer_range=0.3,
    bos_token_id=1, eos_token_id=(2, 3), pad_token_id=0,
)  # fmt: skip
"""Moonlight's branches: plain rope, no query latent, one group of experts, an untied head."""

YARN = dataclasses.replace(
    PLAIN, q_lora_rank=18, n_group=4, topk_group=2, rope_theta=10000.0, routed_scaling_factor=2.5,
    rope_scaling=YarnScaling(
        factor=8.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=1.3
    ),
    tie_word_embeddings=True, num_hidden_layers=3,
)  # fmt: skip
"""DeepSeek's branches: YaRN, a query latent, groups of experts, and a tied head."""

MODELS = {"plain": PLAIN, "yarn": YARN}


@lru_cache(maxsize=16)
def weights(name: str, seed: int, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Tensors of a model by their names in a checkpoint, float64; a tied head is not among them.

    Norm weights are around 1, the router's bias is of the size of its scores.
    """
    from alignment.weights.checkpoint import expected_shapes

    config = MODELS[name]
    made = {}
    for key, shape in expected_shapes(config).items():
        values = portable_normal(shape, seed=seed, stream=f"toy/{key}")
        if key.endswith("norm.weight"):
            values = 1 + 0.3 * values
        elif key.endswith("e_score_correction_bias"):
            values = 0.5 * values
        elif "embed_tokens" in key or "lm_head" in key:
            values = 0.5 * values
        else:
            values = values * scale / shape[-1] ** 0.5
        made[key] = values
    return made


def model(name: str, seed: int, *, dtype: torch.dtype = torch.float64, scale: float = 1.0):
    """The product's model with :func:`weights`."""
    from alignment.models import causal_lm

    made = causal_lm.CausalLM(MODELS[name], dtype=dtype)
    state = made.state_dict()
    with torch.no_grad():
        for key, tensor in weights(name, seed, scale=scale).items():
            state[key].copy_(tensor)
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ragged:
    """Sequences of unequal length in a padded batch: prompts left padded, responses right padded.

    Attributes:
        sequences: the real tokens of each row.
        input_ids, attention_mask: ``[b, p + r]``.
        prompt_lengths, response_lengths: real tokens of each.
        prompt, response: padded widths p and r.
    """

    sequences: tuple[Tensor, ...]
    input_ids: Tensor
    attention_mask: Tensor
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    prompt: int
    response: int

    @property
    def response_mask(self) -> Tensor:
        return self.attention_mask[:, self.prompt :]

    @property
    def position_ids(self) -> Tensor:
        return (self.attention_mask.cumsum(-1) - 1).clamp_min(0)


@lru_cache(maxsize=64)
def ragged(
    name: str,
    seed: int,
    *,
    prompts: tuple[int, ...] = (5, 2, 7),
    responses: tuple[int, ...] = (4, 6, 1),
    extra: int = 1,
) -> Ragged:
    """Random sequences; the batch is ``extra`` wider than the longest on either side."""
    width, answer = max(prompts) + extra, max(responses) + extra
    ids = torch.full((len(prompts), width + answer), MODELS[name].pad_token_id)
    mask = torch.zeros_like(ids)
    sequences = []
    for row, (p, r) in enumerate(zip(prompts, responses)):
        tokens = portable_integers(4, MODELS[name].vocab_size, (p + r,), seed=seed, stream=f"toy/tokens {row}")
        ids[row, width - p : width + r], mask[row, width - p : width + r] = tokens, 1
        sequences.append(tokens)
    return Ragged(
        sequences=tuple(sequences), input_ids=ids, attention_mask=mask, prompt_lengths=prompts,
        response_lengths=responses, prompt=width, response=answer,
    )  # fmt: skip


def normal(shape: tuple[int, ...], seed: int, stream: str, *, scale: float = 1.0) -> Tensor:
    """Portable normals in float64."""
    return scale * portable_normal(shape, seed=seed, stream=f"toy/{stream}")
