"""What a rollout engine is to the rest: generation, weight updates, sleep, and a probe of both its paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.config import ModelConfig

LOAD_FORMATS = ("dummy", "safetensors", "auto")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How responses are drawn, in vLLM's names. Order of the filters: temperature, ``top_k``, ``top_p``.

    Attributes:
        temperature: logits are divided by it; 0 is greedy.
        top_p: smallest set of most likely tokens whose probability reaches it; 1 keeps all.
        top_k: number of most likely tokens kept; -1 keeps all.
        max_new_tokens: tokens per response at most (verl's ``response_length``).
        eos_token_id: a response ends with (and contains) one of these; None never ends early.
        pad_token_id: fills responses behind their end.
        seed: seed of the keyed draws; a token is a function of (seed, key of its sample, its position).

    Raises:
        InputError: a value out of range, named.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 16
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 or at least 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
        ):
            if not holds:
                raise InputError("invalid sampling parameter", where=name, expected=expected, found=getattr(self, name))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a response."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the rollout stage adds to a batch.

    Attributes:
        responses: int64 ``[b, r]``, r = ``max_new_tokens``, right padded with ``pad_token_id``.
        response_mask: int64 ``[b, r]``, one up to and including the end-of-sequence token.
        log_probs: float32 ``[b, r]``, natural log-probability of each token *under the distribution it was drawn from*:
            after temperature, top_k and top_p (vLLM's ``logprobs_mode=processed_logprobs``), 0 at padding. Without
            truncation (top_k = -1, top_p = 1) it is log_softmax(logits / temperature), the quantity verl keeps as
            ``rollout_log_probs`` and compares with ``old_log_probs``. Greedy tokens are given at temperature 1.
    """

    responses: Tensor
    response_mask: Tensor
    log_probs: Tensor


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Log-probabilities of given response tokens by both paths of an engine, each ``[b, r]``, float32 at least.

    ``prefill``: the whole sequence in one forward. ``decode``: the prompt in one forward, then each response token
    forced through a real decode step; its first column therefore comes from the prefill path. Columns behind a
    response's end are 0. Temperature is 1.
    """

    prefill: Tensor
    decode: Tensor


@dataclass(frozen=True, kw_only=True)
class DerivedTensor:
    """A tensor an engine computed from its parameters after loading, such as MLA's ``w_uk_t`` and ``w_uv``.

    Attributes:
        tensor: as the engine holds and uses it.
        recompute: computes it anew from the parameters as they are now, into fresh memory.
        module: the module it belongs to, for example ``model.layers.0.self_attn``.
        quantity: its name there, for example ``w_uv``.
        sources: names of the parameters it is computed from.
    """

    tensor: Tensor
    recompute: Callable[[], Tensor]
    module: str
    quantity: str
    sources: tuple[str, ...]


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine that generates with weights a trainer sends. Constructors take one of :data:`LOAD_FORMATS`."""

    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], *, post_process: bool = True, partial: bool = False
    ) -> None:
        """Write the streamed tensors into the engine's own, in place and one at a time.

        Args:
            stream: (name, tensor) pairs in the names of the checkpoint.
            post_process: recompute derived tensors afterwards. False reproduces engines that do it at start-up only.
            partial: allow tensors to be left out.

        Raises:
            InputError: a missing, extra or repeated name, another shape or dtype, or the engine is asleep.
        """

    def generate(self, prompts: Tensor, attention_mask: Tensor, params: SamplingParams, keys: Tensor) -> Generation:
        """One response per row of ``prompts`` ``[b, p]`` (left padded); ``keys`` int64 ``[b]`` identify the samples."""

    def probe(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Probe:
        """Log-probabilities of the last ``response_length`` tokens of ``input_ids`` ``[b, p + r]`` by both paths."""

    def sleep(self, level: int = 1) -> None:
        """Give the device memory back: level 1 keeps the weights on the host, level 2 destroys them."""

    def wake(self) -> None:
        """Take the memory again. After level 2 all weights must be synced before the engine may be used."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as the engine holds it, parameters and persistent buffers, in the names of the checkpoint."""

    def derived_tensors(self) -> Mapping[str, DerivedTensor]:
        """The declared derived tensors by full name."""

    def constant_tensors(self) -> Mapping[str, str]:
        """Tensors that no weight influences, by full name with the reason (for example a rotary table)."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The engine's modules, for the search for undeclared tensors."""


def check_load_format(load_format: str, checkpoint: object) -> None:
    """Refuse an unknown ``load_format``, or one that needs a checkpoint where there is none."""
    if load_format not in LOAD_FORMATS:
        raise InputError(
            "unknown load_format", where="load_format", expected=", ".join(LOAD_FORMATS), found=load_format
        )
    if load_format != "dummy" and checkpoint is None:
        raise InputError(
            f"load_format={load_format} needs a checkpoint",
            where="load_format",
            expected="a checkpoint directory",
            next_step="pass checkpoint=, or load_format=dummy if a trainer sends the weights",
        )


def model_config_of(config: ModelConfig | None, checkpoint: str | Path | None) -> ModelConfig:
    """``config``, else the one of ``checkpoint``."""
    if config is not None:
        return config
    if checkpoint is None:
        raise InputError("the engine needs a model", where="config", expected="a ModelConfig or a checkpoint directory")
    from alignment.weights.checkpoint import load_config

    return load_config(checkpoint)


def check_streamed(name: str, tensor: Tensor, held: Mapping[str, Tensor], seen: set[str]) -> None:
    """Refuse a streamed tensor that the engine does not hold in that shape and dtype, or that came before."""
    where = f"update_weights: {name}"
    if name not in held:
        import difflib

        near = difflib.get_close_matches(name, held, n=1)
        raise InputError(
            "the engine has no such tensor",
            where=where,
            next_step=f"did you mean {near[0]!r}?" if near else None,
        )
    if name in seen:
        raise InputError("the tensor was streamed twice", where=where, expected="each name once")
    mine = held[name]
    if tensor.shape != mine.shape:
        raise InputError("another shape", where=where, expected=list(mine.shape), found=list(tensor.shape))
    if tensor.dtype != mine.dtype:
        raise InputError(
            "another dtype",
            where=where,
            expected=mine.dtype,
            found=tensor.dtype,
            next_step="cast on the sending side, where the rounding is visible",
        )


def check_prompts(prompts: Tensor, attention_mask: Tensor, keys: Tensor) -> None:
    """Refuse prompts that are not left padded or do not belong to their mask and keys."""
    if prompts.ndim != 2 or attention_mask.shape != prompts.shape or keys.shape != prompts.shape[:1]:
        raise InputError(
            "prompts, mask and keys do not belong together",
            where="prompts",
            expected="prompts [b, p], attention_mask [b, p], keys [b]",
            found=f"{list(prompts.shape)}, {list(attention_mask.shape)}, {list(keys.shape)}",
        )
    real = attention_mask.bool()
    if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise InputError(
            "prompts must be left padded", where="attention_mask", expected="zeros, then ones up to the last column"
        )
