"""The one map between Hugging Face's and megatron-core's names for the parameters of a DeepSeek-V3-style model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from alignment.models.config import ModelConfig


class Split(Enum):
    """How a parameter is cut over the ranks of its tensor parallel group."""

    REPLICATED = "every rank holds all of it"
    ROWS = "the output dimension (0) is cut: a column-parallel linear, or the vocabulary"
    COLUMNS = "the input dimension (1) is cut: a row-parallel linear"
    GATED = "gate and up projection, each cut by rows and stacked on every rank: [gate_r; up_r]"


class Naming(Enum):
    """What a layer specification of megatron-core calls the same parameter."""

    LOCAL = "megatron-core's own modules, with down projections of latent attention that every rank holds whole"
    LOCAL_GATHERED = (
        "megatron-core's own modules throughout: the down projections are cut by rows, their output gathered"
    )
    TRANSFORMER_ENGINE = "Transformer Engine's fused norm + linear modules, one linear per expert"
    TRANSFORMER_ENGINE_GROUPED = "the same with grouped expert linears"


@dataclass(frozen=True, kw_only=True)
class MegatronParameter:
    """One parameter of the whole model, before any pipeline stage or rank is chosen.

    Attributes:
        hf_names: where its values are in a Hugging Face checkpoint; two for :attr:`Split.GATED`, else one.
        suffix: megatron-core's name behind ``decoder.layers.<i>.`` for a layer's parameter, else the whole name, in the
            local specification; of a routed expert, the part behind the expert.
        layer: index from 0, None outside the decoder layers.
        expert: global index of the routed expert, or None.
        stage: ``first`` or ``last`` pipeline stage for what is outside the layers, else None.
        split: how tensor parallel ranks (of a routed expert: *expert* tensor parallel ranks) cut it.
        is_buffer: whether it is no parameter but state the optimizer never sees.
        fused_norm: Transformer Engine's name of a norm that it keeps inside the linear behind it; None for what it
            names alike.
    """

    hf_names: tuple[str, ...]
    suffix: str
    split: Split
    layer: int | None = None
    expert: int | None = None
    stage: str | None = None
    is_buffer: bool = False
    fused_norm: str | None = None

    @property
    def name(self) -> str:
        """A name unique in the whole model: megatron-core's, with global layer and expert numbers."""
        if self.layer is None:
            return self.suffix
        if self.expert is None:
            return f"decoder.layers.{self.layer}.{self.suffix}"
        return f"decoder.layers.{self.layer}.mlp.experts.local_experts.{self.expert}.{self.suffix}"

    def local_name(self, naming: Naming, *, layer: int | None = None, expert: int | None = None) -> str:
        """megatron-core's name on one rank.

        Args:
            layer: index within the model chunk that holds it.
            expert: index among the experts of the rank.
        """
        if self.layer is None:
            return self.suffix
        prefix = f"decoder.layers.{layer}."
        if self.expert is not None:
            if naming is Naming.TRANSFORMER_ENGINE_GROUPED:
                return f"{prefix}mlp.experts.{self.suffix}{expert}"
            return f"{prefix}mlp.experts.local_experts.{expert}.{self.suffix}"
        plain = naming in (Naming.LOCAL, Naming.LOCAL_GATHERED)
        return prefix + (self.suffix if plain else self.fused_norm or self.suffix)


def megatron_parameters(config: ModelConfig, naming: Naming = Naming.LOCAL) -> Iterator[MegatronParameter]:
    """Every parameter (and the router's bias) of ``config`` in the order of the forward pass.

    The names are those of megatron-core's ``GPTModel`` with multi-latent attention; compare
    ``mbridge/models/deepseek_v3.py``, against which the map is tested.
    """
    yield MegatronParameter(
        hf_names=("model.embed_tokens.weight",),
        suffix="embedding.word_embeddings.weight",
        split=Split.ROWS,
        stage="first",
    )
    for layer in range(config.num_hidden_layers):
        yield from _attention(config, layer, Split.ROWS if naming is Naming.LOCAL_GATHERED else Split.REPLICATED)
        yield from _moe(config, layer) if config.is_moe_layer(layer) else _dense(layer)
    yield MegatronParameter(
        hf_names=("model.norm.weight",), suffix="decoder.final_layernorm.weight", split=Split.REPLICATED, stage="last"
    )
    if not config.tie_word_embeddings:
        yield MegatronParameter(
            hf_names=("lm_head.weight",), suffix="output_layer.weight", split=Split.ROWS, stage="last"
        )


_LATENT_NORMS = {
    "q_layernorm": "self_attention.linear_q_up_proj.layer_norm_weight",
    "kv_layernorm": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


def _attention(config: ModelConfig, layer: int, down: Split) -> Iterator[MegatronParameter]:
    query = (
        [("q_proj", "linear_q_proj", Split.ROWS)]
        if config.q_lora_rank is None
        else [
            ("q_a_proj", "linear_q_down_proj", down),
            ("q_a_layernorm", "q_layernorm", Split.REPLICATED),
            ("q_b_proj", "linear_q_up_proj", Split.ROWS),
        ]
    )
    yield _of_layer(layer, "input_layernorm", "input_layernorm", Split.REPLICATED)
    for hf, megatron, split in (
        *query,
        ("kv_a_proj_with_mqa", "linear_kv_down_proj", down),
        ("kv_a_layernorm", "kv_layernorm", Split.REPLICATED),
        ("kv_b_proj", "linear_kv_up_proj", Split.ROWS),
        ("o_proj", "linear_proj", Split.COLUMNS),
    ):
        yield MegatronParameter(
            hf_names=(f"model.layers.{layer}.self_attn.{hf}.weight",),
            suffix=f"self_attention.{megatron}.weight",
            split=split,
            layer=layer,
            fused_norm=_LATENT_NORMS.get(megatron),
        )


def _dense(layer: int) -> Iterator[MegatronParameter]:
    yield MegatronParameter(
        hf_names=(f"model.layers.{layer}.post_attention_layernorm.weight",),
        suffix="pre_mlp_layernorm.weight",
        split=Split.REPLICATED,
        layer=layer,
        fused_norm="mlp.linear_fc1.layer_norm_weight",
    )
    yield from _mlp(layer, "mlp", "mlp")


def _moe(config: ModelConfig, layer: int) -> Iterator[MegatronParameter]:
    yield _of_layer(layer, "post_attention_layernorm", "pre_mlp_layernorm", Split.REPLICATED)
    yield _of_layer(layer, "mlp.gate", "mlp.router", Split.REPLICATED)
    yield MegatronParameter(
        hf_names=(f"model.layers.{layer}.mlp.gate.e_score_correction_bias",),
        suffix="mlp.router.expert_bias",
        split=Split.REPLICATED,
        layer=layer,
        is_buffer=True,
    )
    if config.n_shared_experts:
        yield from _mlp(layer, "mlp.shared_experts", "mlp.shared_experts")
    for expert in range(config.n_routed_experts):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        yield MegatronParameter(
            hf_names=(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
            suffix="linear_fc1.weight",
            split=Split.GATED,
            layer=layer,
            expert=expert,
        )
        yield MegatronParameter(
            hf_names=(f"{prefix}.down_proj.weight",),
            suffix="linear_fc2.weight",
            split=Split.COLUMNS,
            layer=layer,
            expert=expert,
        )


def _mlp(layer: int, hf: str, megatron: str) -> Iterator[MegatronParameter]:
    prefix = f"model.layers.{layer}.{hf}"
    yield MegatronParameter(
        hf_names=(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
        suffix=f"{megatron}.linear_fc1.weight",
        split=Split.GATED,
        layer=layer,
    )
    yield _of_layer(layer, f"{hf}.down_proj", f"{megatron}.linear_fc2", Split.COLUMNS)


def _of_layer(layer: int, hf: str, megatron: str, split: Split) -> MegatronParameter:
    return MegatronParameter(
        hf_names=(f"model.layers.{layer}.{hf}.weight",), suffix=f"{megatron}.weight", split=split, layer=layer
    )
