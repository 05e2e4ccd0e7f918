"""The catalogue of layer cases: a dense and a MoE decoder layer of each tiny model, and the tiny models as a whole."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch

from alignment.backends.case import DTYPES, Case, Draw, Quantity, Tensors
from alignment.backends.golden_layers import ADAMW, causal_lm, decided_tokens, decoder_layer, undecided_tokens
from alignment.backends.routing import NEAR_TIE_ROUNDOFFS
from alignment.errors import InputError
from alignment.models.block import DecoderLayer
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig, preset
from alignment.numerics.precision import unit_roundoff

SEED = 20250829
PRESETS = ("tiny-moonlight", "tiny-deepseek")
# Left padding in one row, right padding in the other: slots and positions differ in both.
MASK = torch.tensor([[0] * 3 + [1] * 9, [1] * 10 + [0] * 2])
# Longer for the whole models, so that every expert of every layer gets tokens.
MODEL_MASK = torch.tensor([[0] * 3 + [1] * 16, [1] * 17 + [0] * 2])
MOST_DRAWS = 500


@cache
def layer_cases() -> tuple[Case, ...]:
    """Every layer case, in the order of the catalogue."""
    made = []
    for dtype in DTYPES:
        for name in PRESETS:
            config = preset(name)
            made.append(_layer_case(name, config, 0, dtype))
            made.append(_layer_case(name, config, config.first_k_dense_replace, dtype))
            made.append(_model_case(name, config, dtype))
    return tuple(made)


@cache
def _layer_tensors(name: str, index: int) -> tuple[dict[str, torch.Size], tuple[str, ...]]:
    """Shapes of a layer's tensors and the names of its parameters, without their memory."""
    return _tensors_of(DecoderLayer(preset(name), index, dtype=torch.float32, device="meta"))


@cache
def _model_tensors(name: str) -> tuple[dict[str, torch.Size], tuple[str, ...]]:
    return _tensors_of(CausalLM(preset(name), dtype=torch.float32, device="meta"))


def _tensors_of(module: torch.nn.Module) -> tuple[dict[str, torch.Size], tuple[str, ...]]:
    shapes = {key: tensor.shape for key, tensor in module.state_dict().items()}
    return shapes, tuple(key for key, _ in module.named_parameters())


def _weights(draw: Draw, shapes: dict[str, torch.Size], config: ModelConfig) -> Tensors:
    """Weights by name, as :func:`alignment.models.backbone.init_weights` distributes them."""
    drawn = {}
    for name, shape in shapes.items():
        wide = torch.float32 if name.endswith("e_score_correction_bias") else None
        values = draw.normal(f"weight.{name}", *shape, scale=config.initializer_range, dtype=torch.float64)
        if name.endswith("norm.weight"):
            values = values + 1
        drawn[f"weight.{name}"] = values.to(wide or draw.dtype)
    return drawn


def _attributes(name: str, config: ModelConfig) -> dict:
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k != "hf_extra"}
    return {"preset": name, "config": fields}


def _layer_case(name: str, config: ModelConfig, index: int, dtype: str) -> Case:
    moe = config.is_moe_layer(index)
    attributes = {**_attributes(name, config), "layer_index": index}
    shapes, parameters = _layer_tensors(name, index)

    def build(draw: Draw) -> Tensors:
        inputs = {
            "hidden": draw.normal("hidden", *MASK.shape, config.hidden_size),
            "attention_mask": MASK,
            "position_ids": (MASK.cumsum(-1) - 1).clamp_min(0),
            **_weights(draw, shapes, config),
        }
        decided = decided_tokens(inputs, attributes, NEAR_TIE_ROUNDOFFS * unit_roundoff(dtype))
        cotangent = draw.normal("cotangent", *MASK.shape, config.hidden_size)
        return {**inputs, "decided": decided, "cotangent.output": cotangent * decided[..., None].to(cotangent.dtype)}

    return Case(
        operator="decoder_layer",
        variant=f"{name}-{'moe' if moe else 'dense'}",
        dtype=dtype,
        seed=SEED,
        layer="layer",
        stage="decoder layer",
        build=build,
        golden=lambda inputs, given: decoder_layer(inputs, given),
        quantities=(*_forward_quantities(config, index), *_gradient_quantities(config, index, parameters)),
        batched=("hidden", "attention_mask", "position_ids", "decided", "cotangent.output"),
        batched_outputs=(
            "input_layernorm", "q_a_layernorm", "kv_a_layernorm", "query", "key", "core", "self_attn",
            "post_attention_layernorm", "mlp", "output",
        ),
        attributes=attributes,
    )  # fmt: skip


def _forward_quantities(config: ModelConfig, index: int) -> tuple[Quantity, ...]:
    """In order of computation."""
    at = f"layers.{index}"
    hidden, latent = config.hidden_size, config.kv_lora_rank
    inner = config.moe_intermediate_size if config.is_moe_layer(index) else config.intermediate_size
    steps = [Quantity(name="input_layernorm", module=f"{at}.input_layernorm", reduction_length=hidden)]
    if config.q_lora_rank is not None:
        steps.append(Quantity(name="q_a_layernorm", module=f"{at}.self_attn.q_a_layernorm", reduction_length=hidden))
    steps += [
        Quantity(name="query", module=f"{at}.self_attn.query", reduction_length=config.q_lora_rank or hidden),
        Quantity(name="kv_a_layernorm", module=f"{at}.self_attn.kv_a_layernorm", reduction_length=hidden),
        Quantity(name="key", module=f"{at}.self_attn.key", reduction_length=latent),
        Quantity(name="core", module=f"{at}.self_attn.core", reduction_length=config.q_head_dim),
        Quantity(
            name="self_attn",
            module=f"{at}.self_attn.o_proj",
            reduction_length=config.num_attention_heads * config.v_head_dim,
        ),
        Quantity(name="post_attention_layernorm", module=f"{at}.post_attention_layernorm", reduction_length=hidden),
    ]
    if config.is_moe_layer(index):
        gate = f"{at}.mlp.gate"
        steps += [
            Quantity(name="router_scores", module=gate, reduction_length=hidden, dtype="float32"),
            Quantity(name="router_selected", module=gate, kind="choice", scores="router_scores", dtype="float32"),
            Quantity(name="router_weights", module=gate, reduction_length=hidden, dtype="float32"),
        ]
    return (
        *steps,
        Quantity(name="mlp", module=f"{at}.mlp", reduction_length=inner),
        Quantity(name="output", module=at, reduction_length=inner),
    )


def _gradient_quantities(config: ModelConfig, index: int, parameters: tuple[str, ...]) -> tuple[Quantity, ...]:
    """In the order backward makes them: from the output to the input."""
    merged = {}
    for name in parameters:
        head, expert, rest = name.partition("mlp.experts.")
        merged[f"{head}mlp.experts.{rest.split('.', 1)[1]}" if expert else name] = None
    order = ("mlp.", "post_attention_layernorm", "self_attn.o_proj", "self_attn.", "input_layernorm")

    def place(name: str) -> int:
        return next(i for i, prefix in enumerate(order) if name.startswith(prefix))

    tokens = MASK.numel()
    return (
        *(
            Quantity(
                name=f"grad.{name}",
                module=f"layers.{index}.{name.removesuffix('.weight')}",
                reduction_length=tokens,
                kind="sketch",
            )
            for name in sorted(merged, key=place)
        ),
        Quantity(name="grad.hidden", module=f"layers.{index}", reduction_length=config.hidden_size),
    )


def _decided_ids(draw: Draw, config: ModelConfig, weights: Tensors, margin: float) -> torch.Tensor:
    """Token ids none of which any layer routes by a near-tie; those it does are drawn anew, again and again.

    One flipped choice moves the logits of a bfloat16 model by a tenth of their size. That is no fault, but a budget that
    allowed for it would hide faults.
    """
    model = CausalLM(config, dtype=torch.float64)
    model.load_state_dict({name.removeprefix("weight."): tensor for name, tensor in weights.items()})
    ids = torch.full(MODEL_MASK.shape, config.pad_token_id or 0)
    redrawn = MODEL_MASK.bool()
    for attempt in range(MOST_DRAWS):
        drawn = draw.integers(f"input_ids {attempt}", *MODEL_MASK.shape, low=3, high=config.vocab_size)
        ids = torch.where(redrawn, drawn, ids)
        redrawn = undecided_tokens(model, ids, MODEL_MASK, margin)
        if not redrawn.any():
            return ids
    raise InputError("no token ids without near-ties were found", where="inputs", found=f"{MOST_DRAWS} draws")


def _model_case(name: str, config: ModelConfig, dtype: str) -> Case:
    shapes, parameters = _model_tensors(name)

    def build(draw: Draw) -> Tensors:
        weights = _weights(draw, shapes, config)
        return {
            "input_ids": _decided_ids(draw, config, weights, NEAR_TIE_ROUNDOFFS * unit_roundoff(dtype)),
            "attention_mask": MODEL_MASK,
            **weights,
        }

    hidden, tokens = config.hidden_size, MODEL_MASK.numel()
    return Case(
        operator="causal_lm",
        variant=name,
        dtype=dtype,
        seed=SEED,
        layer="layer",
        stage="model",
        build=build,
        golden=lambda inputs, given: causal_lm(inputs, given),
        quantities=(
            *(
                Quantity(name=f"layers.{i}", module=f"model.layers.{i}", reduction_length=hidden, kind="sketch")
                for i in range(config.num_hidden_layers)
            ),
            Quantity(name="logits", module="lm_head", reduction_length=hidden),
            Quantity(name="loss", module="loss", reduction_length=config.vocab_size, dtype="float32"),
            Quantity(
                name="grad_norms",
                module="backward",
                kind="table",
                labels=tuple(sorted(parameters)),
                reduction_length=tokens,
                dtype="float32",
            ),
            Quantity(name="grad_norm", module="backward", reduction_length=tokens, dtype="float32"),
            Quantity(name="adamw_update", module="optimizer", reduction_length=tokens, dtype="float32"),
        ),
        batched=("input_ids", "attention_mask"),
        # Moving the rows of the embedding moves the hidden states that enter the first layer.
        perturbed=("weight.model.embed_tokens.weight",),
        batched_outputs=("logits", *(f"layers.{i}" for i in range(config.num_hidden_layers))),
        attributes={**_attributes(name, config), "adamw": ADAMW},
    )
