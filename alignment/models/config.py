"""The shape of a DeepSeek-V3-style model, in the field names of Hugging Face's ``DeepseekV3Config``."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alignment.errors import InputError

ARCHITECTURE = "DeepseekV3ForCausalLM"
VALUE_ARCHITECTURE = "DeepseekV3ForTokenClassification"


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN context extension (Peng et al. 2023, arXiv:2309.00071) as DeepSeek parametrises it.

    ``mscale`` and ``mscale_all_dim`` act in two places: their ratio multiplies the cos/sin table, and the square of the
    factor of ``mscale_all_dim`` multiplies the softmax scale (DeepSeek-V3, ``modeling_deepseek.py``). ``None`` means
    the key is absent from the checkpoint's configuration.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow"):
            _require_number(f"rope_scaling.{name}", getattr(self, name), above=0)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _require_number(f"rope_scaling.{name}", getattr(self, name))
        _require_integer("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings, 1)
        if self.factor < 1:
            raise _invalid("rope_scaling.factor", "a number of at least 1", self.factor)
        if self.beta_slow >= self.beta_fast:
            raise _invalid("rope_scaling.beta_slow", f"less than beta_fast={self.beta_fast}", self.beta_slow)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A DeepSeek/Moonlight-style decoder: MLA, sigmoid-routed MoE after ``first_k_dense_replace`` dense layers.

    Every field but two is a key of Hugging Face's ``config.json``. ``latent_norm_eps`` is the ε of the two latent norms
    (``q_a_layernorm``, ``kv_a_layernorm``): the published model code leaves it at 1e-6 whatever ``rms_norm_eps``
    says, while some engines use ``rms_norm_eps`` for them. ``hf_extra`` keeps the bookkeeping keys of a configuration
    that was read, so that writing it back loses nothing; it takes no part in comparisons.

    Raises:
        InputError: a value that no such model can have; the message names the field.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    first_k_dense_replace: int = 1
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: float = 1e-6
    latent_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    hf_extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _require_integer(name, getattr(self, name), 1)
        for name in ("n_shared_experts", "first_k_dense_replace"):
            _require_integer(name, getattr(self, name), 0)
        if self.q_lora_rank is not None:
            _require_integer("q_lora_rank", self.q_lora_rank, 1)
        for name in ("rms_norm_eps", "latent_norm_eps", "routed_scaling_factor", "initializer_range"):
            _require_number(name, getattr(self, name), above=0)
        # The base of a geometric series of wavelengths.
        _require_number("rope_theta", self.rope_theta, above=1)
        for name in ("norm_topk_prob", "tie_word_embeddings"):
            if type(getattr(self, name)) is not bool:
                raise _invalid(name, "true or false", repr(getattr(self, name)))
        if self.qk_rope_head_dim % 2:
            raise _invalid("qk_rope_head_dim", "an even width (rotary pairs)", self.qk_rope_head_dim)
        if self.scoring_func != "sigmoid":
            raise _invalid("scoring_func", "'sigmoid'", repr(self.scoring_func))
        if self.topk_method != "noaux_tc":
            raise _invalid("topk_method", "'noaux_tc'", repr(self.topk_method))
        self._validate_groups()

    def _validate_groups(self) -> None:
        if self.n_routed_experts % self.n_group:
            raise _invalid("n_group", f"a divisor of n_routed_experts={self.n_routed_experts}", self.n_group)
        if self.n_routed_experts // self.n_group < 2:
            raise _invalid(
                "n_group", "at least two experts per group (a group scores the sum of its best two)", self.n_group
            )
        if self.topk_group > self.n_group:
            raise _invalid("topk_group", f"at most n_group={self.n_group}", self.topk_group)
        selectable = self.topk_group * (self.n_routed_experts // self.n_group)
        if self.num_experts_per_tok > selectable:
            raise _invalid(
                "num_experts_per_tok",
                f"at most the {selectable} experts of topk_group groups",
                self.num_experts_per_tok,
            )

    @property
    def q_head_dim(self) -> int:
        """Width of one query (and key) head: ``qk_nope_head_dim + qk_rope_head_dim``."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (from 0) holds routed experts."""
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, where: object = "config.json") -> ModelConfig:
        """Read a ``config.json`` as transformers 4 (``rope_scaling``) or 5 (``rope_parameters``) writes it.

        Keys that say nothing about the computation are kept in ``hf_extra``. A key that asks for a computation this
        model does not do is refused, and so is another architecture.

        Raises:
            InputError: another architecture, an unsupported setting, or a missing or invalid field.
        """
        _refuse_other_architecture(hf, where)
        names = {f.name for f in dataclasses.fields(cls)} - {"hf_extra"}
        values = {name: hf[name] for name in names & hf.keys()}
        values["rope_theta"], yarn = _read_rope(hf, where)
        for name in [name for name in values if values[name] is None]:
            del values[name]
            if name in _HF_NULL:
                values[name] = _HF_NULL[name]
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
        missing = [name for name in (*required, *_HF_REQUIRED) if values.get(name) is None]
        if missing:
            close = difflib.get_close_matches(missing[0], hf.keys(), n=1)
            raise InputError(
                f"the configuration has no {missing[0]!r}",
                where=where,
                expected=f"the keys {', '.join(missing)}",
                next_step=f"is {close[0]!r} a misspelling of it?" if close else None,
            )
        extra = {k: v for k, v in hf.items() if k not in names and k not in _HF_DERIVED}
        try:
            values["rope_scaling"] = None if yarn is None else YarnScaling(**yarn)
            return cls(**values, hf_extra=extra)
        except InputError as error:
            raise InputError(
                error.problem, where=f"{where}: {error.where}", expected=error.expected, found=error.found
            ) from None

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this model, readable by transformers 4.53 and later and by inference engines."""
        hf = dict(self.hf_extra)
        for f in dataclasses.fields(self):
            if f.name not in ("hf_extra", "rope_scaling"):
                hf[f.name] = getattr(self, f.name)
        if isinstance(self.eos_token_id, tuple):
            hf["eos_token_id"] = list(self.eos_token_id)
        hf["rope_scaling"] = None
        if self.rope_scaling is not None:
            scaling = {k: v for k, v in dataclasses.asdict(self.rope_scaling).items() if v is not None}
            # Both spellings of the kind: the published checkpoints say "type", transformers since 4.45 says
            # "rope_type".
            hf["rope_scaling"] = {"type": "yarn", "rope_type": "yarn", **scaling}
        hf.setdefault("architectures", [ARCHITECTURE])
        return {
            **hf,
            "model_type": "deepseek_v3",
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": self.hf_extra.get("num_nextn_predict_layers", 0),
        }


_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "n_routed_experts", "num_experts_per_tok", "kv_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "n_group", "topk_group", "max_position_embeddings",
)  # fmt: skip

# Fields whose default here is not the default of transformers' DeepseekV3Config: reading a file must not guess them.
_HF_REQUIRED = ("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "first_k_dense_replace")

# What null stands for where that is not the default.
_HF_NULL = {"n_group": 1, "topk_group": 1, "n_shared_experts": 0}

# Keys written from other fields or from the tensors, so that a kept copy could contradict them.
_HF_DERIVED = {
    "rope_parameters", "model_type", "num_key_value_heads", "hidden_act", "attention_bias", "attention_dropout",
    "moe_layer_freq", "torch_dtype", "dtype", "quantization_config", "head_dim", "qk_head_dim", "num_local_experts",
    "rope_interleave",
}  # fmt: skip

# Settings of the published model code that would change the computation, and the only value computed here.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "moe_layer_freq": 1,
    "rope_interleave": True,
}


def _invalid(name: str, expected: str, found: object) -> InputError:
    return InputError("invalid model configuration", where=name, expected=expected, found=found)


def _require_integer(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise _invalid(name, f"an integer of at least {least}", repr(value))


def _require_number(name: str, value: object, *, above: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < math.inf:
        expected = "a number" if above == -math.inf else f"a number greater than {above}"
        raise _invalid(name, expected, repr(value))


def _refuse_other_architecture(hf: Mapping[str, Any], where: object) -> None:
    if hf.get("model_type", "deepseek_v3") != "deepseek_v3":
        raise InputError(
            "the configuration is of another architecture",
            where=where,
            expected="model_type 'deepseek_v3'",
            found=repr(hf["model_type"]),
        )
    architectures = hf.get("architectures") or [ARCHITECTURE]
    named = set(map(str, architectures)) if isinstance(architectures, (list, tuple)) else {str(architectures)}
    if not {ARCHITECTURE, VALUE_ARCHITECTURE} & named:
        raise InputError(
            "the configuration is of another architecture",
            where=where,
            expected=ARCHITECTURE,
            found=", ".join(sorted(named)),
        )
    for name, only in _FIXED.items():
        if hf.get(name, only) is not None and hf.get(name, only) != only:
            raise InputError(
                "the golden model does not compute this setting",
                where=f"{where}: {name}",
                expected=only,
                found=hf[name],
            )
    heads = hf.get("num_attention_heads")
    if hf.get("num_key_value_heads") not in (None, heads):
        raise InputError(
            "latent attention has as many key heads as query heads",
            where=f"{where}: num_key_value_heads",
            expected=heads,
            found=hf["num_key_value_heads"],
        )


def _read_rope(hf: Mapping[str, Any], where: object) -> tuple[float, dict[str, Any] | None]:
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise InputError("rope settings are no mapping", where=f"{where}: rope_scaling", found=repr(parameters))
    theta = parameters.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise InputError(
            "unknown rope kind", where=f"{where}: rope_scaling", expected="'default' or 'yarn'", found=repr(kind)
        )
    known = {f.name for f in dataclasses.fields(YarnScaling)}
    unknown = parameters.keys() - known - {"type", "rope_type", "rope_theta"}
    # These two have a value under which they change nothing, and transformers 5 may write them.
    unknown -= {
        k for k, neutral in (("truncate", True), ("attention_factor", None)) if parameters.get(k, neutral) is neutral
    }
    if unknown:
        name = min(unknown)
        close = difflib.get_close_matches(name, known, n=1)
        raise InputError(
            f"unknown yarn parameter {name!r}",
            where=f"{where}: rope_scaling",
            expected=", ".join(sorted(known)),
            next_step=f"did you mean {close[0]!r}?" if close else None,
        )
    for name in ("factor", "original_max_position_embeddings"):
        if parameters.get(name) is None:
            raise InputError(f"yarn needs {name!r}", where=f"{where}: rope_scaling", found=sorted(parameters))
    return theta, {k: v for k, v in parameters.items() if k in known and v is not None}


PRESETS: dict[str, ModelConfig] = {
    # Small enough to be trained by reinforcement learning on one CPU core. Every head width differs from the others,
    # so that code that takes one for another fails on it.
    "tiny-moonlight": ModelConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        kv_lora_rank=40,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=28,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        rope_theta=50000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    # Every branch Moonlight does not take: yarn with two different mscale fields, a query latent, groups.
    "tiny-deepseek": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=144,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        kv_lora_rank=28,
        q_lora_rank=36,
        qk_rope_head_dim=16,
        qk_nope_head_dim=24,
        v_head_dim=20,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_theta=10000.0,
        rope_scaling=YarnScaling(
            factor=8.0,
            original_max_position_embeddings=64,
            beta_fast=4.0,
            beta_slow=1.0,
            mscale=0.707,
            mscale_all_dim=1.3,
        ),
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    # https://huggingface.co/moonshotai/Moonlight-16B-A3B/blob/main/config.json
    "moonlight-16b-a3b": ModelConfig(
        vocab_size=163840,
        hidden_size=2048,
        intermediate_size=11264,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        n_shared_experts=2,
        n_routed_experts=64,
        num_experts_per_tok=6,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        rope_theta=50000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        bos_token_id=163584,
        eos_token_id=163586,
    ),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json (without its multi-token-prediction layer)
    "deepseek-v3-671b": ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        n_shared_experts=1,
        n_routed_experts=256,
        num_experts_per_tok=8,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        rope_theta=10000.0,
        rope_scaling=YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
        max_position_embeddings=163840,
        bos_token_id=0,
        eos_token_id=1,
    ),
}


def preset(name: str) -> ModelConfig:
    """The preset called ``name``; change it with ``dataclasses.replace``.

    Raises:
        InputError: no preset has that name; the message proposes the nearest one.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        raise InputError(
            f"no model preset is called {name!r}",
            expected=", ".join(PRESETS),
            next_step=f"did you mean {close[0]!r}?" if close else None,
        )
    return PRESETS[name]
