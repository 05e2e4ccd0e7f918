"""One name for one module, whoever implements it: Hugging Face's, from those of megatron-core, vLLM and wrappers.

The tables repeat, for module paths, what :mod:`alignment.weights.megatron_names` and
:mod:`alignment.weights.vllm_names` say of parameters (a test holds them together); they are spelled out here because
comparing must not import torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from alignment.errors import InputError

WRAPPERS = (
    "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module", "module", "base_model",
)  # fmt: skip
"""Path elements that wrappers put in front of what they wrap; they compute nothing."""

_WHOLE = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "decoder": "model",
    "language_model.model": "model",
    "language_model.lm_head": "lm_head",
    "transformer.wte": "model.embed_tokens",
}
_PREFIXES = (("decoder.layers.", "model.layers."), ("language_model.model.", "model."), ("layers.", "model.layers."))
_PARTS = {
    "self_attention": "self_attn",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "linear_proj": "o_proj",
    "linear_qkv": "qkv_proj",
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_fc1": "gate_up_proj",
    "linear_fc2": "down_proj",
    "router": "gate",
    "local_experts": "",
    "expert_bias": "e_score_correction_bias",
}
_LATENT_NORMS = {"q_layernorm": "q_a_layernorm", "kv_layernorm": "kv_a_layernorm"}

_FIRST = frozenset(name.split(".")[0] for name in _WHOLE) | {prefix.split(".")[0] for prefix, _ in _PREFIXES}
_TELLING = frozenset(_PARTS) | frozenset(WRAPPERS) | frozenset(_LATENT_NORMS)

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Fused linear layers and the parts that Hugging Face names, in the order of their output features."""

STACKED = {"gate_up_proj": (("gate_proj", "up_proj"), ("gate_up_proj",)), "down_proj": (("down_proj",),)}
"""Parameters of ``experts`` that hold a weight of all of them, [expert, out, in], as transformers does since version 5,
and the layers of one expert whose weights follow one another in it, in whichever way the other side names them."""

ABSORBED = {"kv_b_proj": "{parent} multiplies its weight into queries and values itself, and that weight is compared"}
"""Layers that some implementations derive matrices from and do not call, and why a call may be missing there. It has to
be seen in the capture: the weight is recorded under the layer's name although the layer never ran."""


def canonical(name: str) -> str:
    """Hugging Face's path of the module or parameter ``name``, which is returned as it is where nothing is known."""
    parts = name.split(".")
    if _TELLING.isdisjoint(parts) and parts[0] not in _FIRST:
        return name
    name = ".".join(part for part in parts if part not in WRAPPERS)
    if name in _WHOLE:
        return _WHOLE[name]
    head, _, leaf = name.rpartition(".")
    if head in _WHOLE and leaf in ("weight", "bias"):
        return f"{_WHOLE[head]}.{leaf}"
    megatron = name.startswith("decoder.layers.")
    for old, new in _PREFIXES:
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    out = []
    for part in name.split("."):
        part = _PARTS.get(part, part)
        if megatron:
            part = _LATENT_NORMS.get(part, part)
        if part:
            out.append(part)
    return ".".join(out)


class NameMap:
    """Canonical names with the user's own pairs in front.

    Args:
        rules: golden pattern → target pattern: plain names, or with ``*`` that stand for the same text on both sides
            (``encoder.*.attn=blocks.*.attention``).
    """

    def __init__(self, rules: Mapping[str, str] | None = None) -> None:
        self._cache: dict[str, str] = {}
        self.rules: list[tuple[re.Pattern[str], str]] = []
        for golden, target in (rules or {}).items():
            if golden.count("*") != target.count("*"):
                raise InputError(
                    "both sides of a name pair need the same number of *",
                    where="--map",
                    expected="GOLDEN=TARGET",
                    found=f"{golden}={target}",
                )
            pattern = re.escape(target).replace(r"\*", "(.*?)")
            self.rules.append((re.compile(pattern + r"(\..*)?\Z"), golden))

    @classmethod
    def parse(cls, options: Sequence[str]) -> NameMap:
        """From ``GOLDEN=TARGET`` options or a file of such lines (``#`` comments).

        Raises:
            InputError: neither a pair nor a readable file.
        """
        rules: dict[str, str] = {}
        for option in options:
            lines = [option]
            if "=" not in option:
                try:
                    lines = Path(option).read_text(encoding="utf-8").splitlines()
                except (OSError, UnicodeDecodeError) as error:
                    raise InputError(
                        "no name pair and no readable file",
                        where="--map",
                        expected="GOLDEN=TARGET or a file",
                        found=option,
                    ) from error
            for line in lines:
                line = line.partition("#")[0].strip()
                if line:
                    golden, equals, target = line.partition("=")
                    if not equals or not golden.strip() or not target.strip():
                        raise InputError("not a name pair", where="--map", expected="GOLDEN=TARGET", found=line)
                    rules[golden.strip()] = target.strip()
        return cls(rules)

    def golden(self, name: str) -> str:
        """The common name of a module of golden."""
        held = self._cache.get(name)
        if held is None:
            held = self._cache[name] = canonical(name)
        return held

    def target(self, name: str) -> str:
        """The common name of a module of the target."""
        for pattern, golden in self.rules:
            match = pattern.match(name)
            if match is not None:
                *stars, rest = match.groups()
                for star in stars:
                    golden = golden.replace("*", star, 1)
                return self.golden(golden + (rest or ""))
        return self.golden(name)


def no_common_names(golden: Iterable[str], target: Iterable[str]) -> InputError:
    """The error for two captures that share no module, with the nearest names of both."""
    first, second = sorted(golden), sorted(target)
    near = next(((a, m[0]) for a in first if (m := difflib.get_close_matches(a, second, n=1, cutoff=0.3))), None)
    example = (
        f"{near[0]}={near[1]}" if near else f"{first[0] if first else 'GOLDEN'}={second[0] if second else 'TARGET'}"
    )
    return InputError(
        "the two captures have no module in common",
        where="compare",
        expected=", ".join(first[:3]) or "modules in golden",
        found=", ".join(second[:3]) or "no modules in the target",
        next_step=f"name the pairs, for example --map '{example}'",
    )


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a shell pattern of ``patterns`` matches ``name``."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
