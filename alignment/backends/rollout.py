"""What a rollout engine is to the rest: generation, weight updates, sleep, and a probe of both its paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from alignment.errors import InputError

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
