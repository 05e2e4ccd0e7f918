"""The whole model against the float64 reference of each sequence: training forward, gradients, prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, differs
from alignment.faults.observation import first_divergence, observed
from alignment.faults.reference import language_model, rotary
from alignment.numerics.precision import unit_roundoff

LONG = 290


@lru_cache(maxsize=64)
def _golden(name: str, seed: int, row: int) -> dict[str, Tensor]:
    batch = toy.ragged(name, seed)
    with torch.no_grad():
        return language_model.forward(batch.sequences[row], toy.weights(name, seed), toy.MODELS[name])


def _rows(name: str, seed: int) -> list[tuple[int, Tensor, dict[str, Tensor]]]:
    batch = toy.ragged(name, seed)
    return [(row, batch.attention_mask[row].bool(), _golden(name, seed, row)) for row in range(len(batch.sequences))]


def forward(setting: Setting) -> Iterator[Finding]:
    """Every module on a ragged batch, padded on both sides."""
    for name, config in toy.MODELS.items():
        batch, model = toy.ragged(name, setting.seed), toy.model(name, setting.seed)
        with torch.no_grad(), observed(model) as found:
            model(batch.input_ids, attention_mask=batch.attention_mask)
        yield from first_divergence(
            found,
            _rows(name, setting.seed),
            stage="old_log_prob",
            batch=len(batch.sequences),
            scale=rotary.softmax_scale(config),
        )


def packed(setting: Setting) -> Iterator[Finding]:
    """Two packs with other boundaries in each, position ids and masks from the segments alone."""
    for name in toy.MODELS:
        batch, model = toy.ragged(name, setting.seed), toy.model(name, setting.seed)
        order = ((0, 1, 2), (2, 0, 1))
        ids = torch.stack([torch.cat([batch.sequences[i] for i in row]) for row in order])
        segments = torch.stack(
            [torch.cat([torch.full((len(batch.sequences[i]),), n + 1) for n, i in enumerate(row)]) for row in order]
        )
        with torch.no_grad(), observed(model) as found:
            model(ids, segment_ids=segments)
        rows = [
            (place, segments[place] == n + 1, _golden(name, setting.seed, i))
            for place, row in enumerate(order)
            for n, i in enumerate(row)
        ]
        for finding in first_divergence(found, rows, stage="old_log_prob", batch=2):
            yield Finding(
                stage=finding.stage, place=f"segment_ids · {finding.place}", evidence=f"packed {finding.evidence}"
            )


def long(setting: Setting) -> Iterator[Finding]:
    """Logits of a sequence that leaves the first 256 positions."""
    for name, config in toy.MODELS.items():
        batch = toy.ragged(name, setting.seed, prompts=(LONG,), responses=(1,), extra=0)
        with torch.no_grad():
            found = toy.model(name, setting.seed)(batch.input_ids)[0]
        yield from differs(
            found, _long_logits(name, setting.seed), stage="old_log_prob", place="model.rotary", what="290 tokens"
        )


@lru_cache(maxsize=8)
def _long_logits(name: str, seed: int) -> Tensor:
    batch = toy.ragged(name, seed, prompts=(LONG,), responses=(1,), extra=0)
    with torch.no_grad():
        return language_model.forward(batch.sequences[0], toy.weights(name, seed), toy.MODELS[name])["lm_head"]


def float32(setting: Setting) -> Iterator[Finding]:
    """The model in float32: nothing in it has fewer digits than declared.

    A result that has lost half of its digits (√u) was rounded to something narrower on the way.
    """
    if setting.precision.matmul != "ieee" or setting.precision.compute != "float32":
        return
    for name, config in toy.MODELS.items():
        batch, model = toy.ragged(name, setting.seed), toy.model(name, setting.seed, dtype=torch.float32)
        with torch.no_grad(), observed(model) as found:
            model(batch.input_ids, attention_mask=batch.attention_mask)
        yield from first_divergence(
            found,
            _rows(name, setting.seed),
            stage="old_log_prob",
            batch=len(batch.sequences),
            bound=unit_roundoff("float32") ** 0.5,
        )


def gradients(setting: Setting) -> Iterator[Finding]:
    """The gradient of every parameter under a weighted sum of log-probs."""
    for name, config in toy.MODELS.items():
        batch, model = toy.ragged(name, setting.seed), toy.model(name, setting.seed)
        golden = _golden_gradients(name, setting.seed)
        logits = model(batch.input_ids, attention_mask=batch.attention_mask)
        loss = sum(
            (cotangent * language_model.log_softmax(logits[row][batch.attention_mask[row].bool()])).sum()
            for row, cotangent in enumerate(_cotangents(name, setting.seed))
        )
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for key, gradient in reversed(list(zip(parameters, found))):
            gradient = torch.zeros_like(parameters[key]) if gradient is None else gradient
            yield from differs(gradient, golden[key], stage="actor_update", place=key, what="gradient")


def _cotangents(name: str, seed: int) -> list[Tensor]:
    batch = toy.ragged(name, seed)
    size = toy.MODELS[name].vocab_size
    return [toy.normal((len(ids), size), seed, f"cotangent {row}") for row, ids in enumerate(batch.sequences)]


@lru_cache(maxsize=8)
def _golden_gradients(name: str, seed: int) -> dict[str, Tensor]:
    batch = toy.ragged(name, seed)
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in toy.weights(name, seed).items()}
    loss = sum(
        (cotangent * language_model.log_softmax(language_model.forward(ids, leaves, toy.MODELS[name])["lm_head"])).sum()
        for ids, cotangent in zip(batch.sequences, _cotangents(name, seed))
    )
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {key: torch.zeros_like(leaves[key]) if g is None else g for key, g in zip(leaves, found)}


def decode(setting: Setting) -> Iterator[Finding]:
    """Every module when prompts are prefilled and responses decoded token by token, with rows that end early."""
    for name in toy.MODELS:
        yield from _stepwise(name, setting, chunk=None)


def chunked(setting: Setting) -> Iterator[Finding]:
    """The same when the prompt comes in two chunks, and when it is prefilled in the absorbed form."""
    for name in toy.MODELS:
        yield from _stepwise(name, setting, chunk=3)


def _stepwise(name: str, setting: Setting, *, chunk: int | None) -> list[Finding]:
    batch, model = toy.ragged(name, setting.seed), toy.model(name, setting.seed)
    model.absorb(contiguous=True)
    ids, mask, prompt = batch.input_ids, batch.attention_mask, batch.prompt
    # Room behind the last token, as caches rounded up to whole blocks have it.
    cache = model.new_cache(len(ids), ids.shape[1] + 5)
    with torch.no_grad(), observed(model) as found:
        cuts = [0, prompt] if chunk is None else [0, chunk, prompt]
        for start, end in zip(cuts, cuts[1:]):
            model.prefill(ids[:, start:end], cache, attention_mask=mask[:, start:end], absorbed=chunk is not None)
        for column in range(prompt, ids.shape[1]):
            now = slice(column, column + 1)
            model.decode(ids[:, now], cache, attention_mask=mask[:, now])
    return first_divergence(
        found, _rows(name, setting.seed), stage="rollout", batch=len(batch.sequences), expanded=False
    )


CHECKS = (
    Check(
        name="model.forward",
        layer="layer-logits",
        cost=0.05,
        run=forward,
        kept_because="it finds the first module that is wrong, whatever is wrong with it",
    ),  # fmt: skip
    Check(
        name="model.packed",
        layer="layer-logits",
        cost=0.06,
        run=packed,
        kept_because="it is the only one that packs in a batch of the whole model",
    ),  # fmt: skip
    Check(
        name="model.float32",
        layer="layer-logits",
        cost=0.051,
        run=float32,
        kept_because="rounding that float64 models do not do",
    ),  # fmt: skip
    Check(
        name="model.decode",
        layer="layer-logits",
        cost=0.1,
        run=decode,
        kept_because="the decode path of a bare model, before any engine",
    ),  # fmt: skip
    Check(
        name="model.chunked_prefill",
        layer="layer-logits",
        cost=0.11,
        run=chunked,
        kept_because="queries that begin inside the cache are no entry of the catalogue",
    ),  # fmt: skip
    Check(
        name="model.long",
        layer="layer-logits",
        cost=0.12,
        run=long,
        kept_because="positions beyond 256 through all layers; windows and block sizes are no entry of the catalogue",
    ),  # fmt: skip
    Check(
        name="model.gradients",
        layer="layer-grad",
        cost=0.1,
        run=gradients,
        kept_because="a wrong gradient behind a right forward, of any parameter",
    ),  # fmt: skip
)
