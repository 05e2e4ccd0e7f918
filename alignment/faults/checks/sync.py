"""Trainer to engine: after every one of several updates the engine computes with the trainer's weights, on every path.

The truth is the trainer's state and the float64 reference on it; the exporter is judged, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from alignment.backends import golden_rollout, prefix_cache, weight_sync
from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, differs
from alignment.faults.checks.weights import same_tensors
from alignment.faults.observation import Observed, first_divergence, observed
from alignment.faults.reference import language_model
from alignment.numerics.precision import unit_roundoff

# What happens before each of four updates, and by how much the weights move: also by less than any noise.
HISTORY = (("", 0.0), ("", 0.1), ("sleep 1", 1e-6), ("sleep 2", 0.1))


@lru_cache(maxsize=32)
def _weights(name: str, seed: int, update: int) -> dict[str, Tensor]:
    """The trainer's weights after ``update``."""
    if update == 0:
        return toy.weights(name, seed)
    before, moved = _weights(name, seed, update - 1), toy.weights(name, seed + 100 * update)
    size = HISTORY[update][1]
    return {key: tensor + size * moved[key] for key, tensor in before.items()}


@lru_cache(maxsize=64)
def _golden(name: str, seed: int, update: int, row: int) -> dict[str, Tensor]:
    batch = _batch(name, seed)
    with torch.no_grad():
        return language_model.forward(batch.sequences[row], _weights(name, seed, update), toy.MODELS[name])


def _batch(name: str, seed: int) -> toy.Ragged:
    return toy.ragged(name, seed, prompts=(5, 2, 4), responses=(2, 3, 1))


def _trainer(name: str, seed: int, update: int, trainer) -> None:
    state = trainer.state_dict()
    with torch.no_grad():
        for key, tensor in _weights(name, seed, update).items():
            state[key].copy_(tensor)


def _histories(name: str, setting: Setting) -> Iterator[tuple[str, int, golden_rollout.GoldenRollout]]:
    """An engine that starts from weights of its own, after each of its updates."""
    trainer = toy.model(name, setting.seed)
    engine = golden_rollout.GoldenRollout(toy.MODELS[name], dtype=torch.float64, seed=setting.seed + 7)
    for update, (before, _) in enumerate(HISTORY):
        _trainer(name, setting.seed, update, trainer)
        if before:
            engine.sleep(int(before[-1]))
            engine.wake()
        engine.update_weights(weight_sync.stream_weights(trainer))
        yield f"{name}, update {update + 1}{f' after {before}' if before else ''}", update, engine
    engine.sleep(1)
    engine.wake()
    yield f"{name}, woken without an update", len(HISTORY) - 1, engine


def tensors(setting: Setting) -> Iterator[Finding]:
    """Every tensor the engine's modules hold: parameters and buffers bitwise, derived ones recomputed, others
    declared.
    """
    for name, config in toy.MODELS.items():
        for what, update, engine in _histories(name, setting):
            truth = _weights(name, setting.seed, update)
            held: dict[str, Tensor] = {}
            for path, module in engine.named_modules():
                for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                    held[f"{path}.{key}"] = tensor
            if config.tie_word_embeddings:
                # Tied or kept twice: the head is the embedding.
                head = held.pop("lm_head.weight")
                yield from differs(
                    head,
                    truth["model.embed_tokens.weight"],
                    stage="weight_sync",
                    place="lm_head.weight",
                    what=what,
                    bound=0.0,
                )
            rounded = _declared_rounding(held, truth, setting)
            wrong = [
                *_rounded_tensors(held, truth, rounded, what),
                *same_tensors(
                    {k: t for k, t in held.items() if k not in rounded},
                    {k: t for k, t in truth.items() if k not in rounded},
                    stage="weight_sync",
                    what=what,
                ),
            ]
            yield from wrong
            truth = {**truth, **{k: held[k] for k in rounded}}
            for path, derived in engine.derived_tensors().items():
                golden = _derived(truth, derived.module, derived.quantity, config)
                yield from differs(derived.tensor, golden, stage="weight_sync", place=path, what=what, bound=0.0)
            for path in weight_sync.undeclared_tensors(engine):
                yield Finding(
                    stage="weight_sync", place=path, evidence=f"{what}: no update reaches it, and it is not declared"
                )
            if wrong:
                break


def _declared_rounding(held: dict[str, Tensor], truth: dict[str, Tensor], setting: Setting) -> list[str]:
    """Names of the tensors that the declared precision of the rollout rounds: the linear layers of an FP8 one."""
    if not (setting.precision.rollout or "").startswith("float8"):
        return []
    return [name for name in truth if "_proj" in name and name in held]


def _rounded_tensors(held, truth, names: list[str], what: str) -> Iterator[Finding]:
    """What is rounded by declaration is within half a unit of the last place of its block's largest value."""
    for name in names:
        # One rounding to e4m3 in blocks of up to 128 × 128, which hold these matrices whole, and one to bfloat16.
        bound = unit_roundoff("float8_e4m3fn") + 2 * unit_roundoff("bfloat16")
        off = differs(
            held[name], truth[name], stage="weight_sync", place=name, what=f"{what}, declared in FP8", bound=bound
        )
        yield from off
        size = truth[name].abs().clamp_min(float(truth[name].abs().max()) * 2.0**-14)
        share = float(((held[name] - truth[name]).abs() / size).mean())
        # Half a unit of the last place is at most 2^-4 of a number, and half of that on average.
        if not off and share > unit_roundoff("float8_e4m3fn"):
            evidence = (
                f"{what}: off by {share:.2g} of its values on average: these are not the trainer's weights in FP8"
            )
            yield Finding(stage="weight_sync", place=name, evidence=evidence)


def _derived(truth: dict[str, Tensor], module: str, quantity: str, config) -> Tensor:
    """``w_uk_t`` [h, nope, rank] or ``w_uv`` [h, rank, v] from the rows of ``kv_b_proj``."""
    weight = truth[f"{module}.kv_b_proj.weight"]
    size = config.qk_nope_head_dim + config.v_head_dim
    heads = []
    for head in range(config.num_attention_heads):
        rows = weight[head * size : (head + 1) * size]
        heads.append(rows[: config.qk_nope_head_dim] if quantity == "w_uk_t" else rows[config.qk_nope_head_dim :].T)
    return torch.stack(heads)


def probes(setting: Setting) -> Iterator[Finding]:
    """The engine's own forward after every update: every module of it, prefilled and decoded, and its log-probs."""
    for name in toy.MODELS:
        batch = _batch(name, setting.seed)
        for what, update, engine in _histories(name, setting):
            goldens = _goldens(engine, name, setting, update)
            rows = [(row, batch.attention_mask[row].bool(), golden) for row, golden in enumerate(goldens)]
            root = dict(engine.named_modules())[""]
            # Rows that end early would be dropped; the probe keeps them all, so outputs stay in the order of the batch.
            with observed(root) as found:
                probe = engine.probe(batch.input_ids, batch.attention_mask, batch.response)
            whole, steps = _by_path(found)
            wrong = [
                *first_divergence(whole, _trunk(rows, None), stage="rollout", batch=len(rows), expanded=False),
                *first_divergence(
                    steps, _trunk(rows, batch.input_ids.shape[1] - 1), stage="rollout", batch=len(rows), expanded=False
                ),
            ]
            for path, values in (("prefill", probe.prefill), ("decode", probe.decode)):
                for row, golden in enumerate(goldens):
                    p, r = batch.prompt_lengths[row], batch.response_lengths[row]
                    right = language_model.log_softmax(golden["lm_head"][p - 1 : p + r - 1])
                    right = right[torch.arange(r), batch.sequences[row][p:]]
                    wrong += differs(
                        values[row, :r], right, stage="rollout", place="lm_head.log_prob", what=f"{path}, row {row}"
                    )
            yield from (
                Finding(stage=finding.stage, place=finding.place, evidence=f"{what}: {finding.evidence}")
                for finding in wrong
            )
            if wrong:
                break


def _goldens(engine, name: str, setting: Setting, update: int) -> list[dict[str, Tensor]]:
    """The reference on the trainer's weights; on the engine's own where the rollout declares that it rounds them."""
    batch = _batch(name, setting.seed)
    if not (setting.precision.rollout or "").startswith("float8"):
        return [_golden(name, setting.seed, update, row) for row in range(len(batch.sequences))]
    held = {key: tensor.double() for key, tensor in engine.named_parameters()}
    with torch.no_grad():
        return [language_model.forward(ids, held, toy.MODELS[name]) for ids in batch.sequences]


def _trunk(rows, fed: int | None):
    """The rows without the head, which an engine computes for the last tokens alone, and without the columns behind
    ``fed``: the last token of a forced response is a target and no input.
    """
    cut = []
    for row, real, golden in rows:
        kept = real if fed is None else real[:fed]
        cut.append((row, kept, {path: t[..., : int(kept.sum()), :] for path, t in golden.items() if path != "lm_head"}))
    return cut


def _by_path(found: Observed) -> tuple[Observed, Observed]:
    """The first forward (the whole sequence, prefilled), and those after it (the prompt, then token by token)."""
    whole, steps = Observed(), Observed()
    for path, parts in found.calls.items():
        whole.calls[path], steps.calls[path] = parts[:1], parts[1:]
    return whole, steps


def prefix(setting: Setting) -> Iterator[Finding]:
    """A prompt that comes again after an update, and after a sleep, is answered by the new weights."""
    for name in ("plain",):
        batch = _batch(name, setting.seed)
        trainer = toy.model(name, setting.seed)
        engine = prefix_cache.PrefixCachingRollout(toy.MODELS[name], dtype=torch.float64, seed=setting.seed + 7)
        for update in range(len(HISTORY)):
            _trainer(name, setting.seed, update, trainer)
            if update == len(HISTORY) - 1:
                engine.sleep(1)
                engine.wake()
            engine.update_weights(weight_sync.stream_weights(trainer))
            for again in range(2):
                p, ids = batch.prompt_lengths[0], batch.sequences[0]
                found = engine.forced_log_probs(ids[:p], ids[p:])
                logits = _golden(name, setting.seed, update, 0)["lm_head"][p - 1 : -1]
                right = language_model.log_softmax(logits)[torch.arange(len(ids) - p), ids[p:]]
                yield from differs(
                    found,
                    right,
                    stage="rollout",
                    place="prefix_cache",
                    what=f"{name}, update {update + 1}, time {again + 1}",
                )


CHECKS = (
    Check(
        name="sync.tensors",
        layer="weight-sync",
        cost=0.1,
        run=tensors,
        kept_because="steps below all noise: what is a copy is equal bit by bit",
    ),  # fmt: skip
    Check(
        name="sync.probes",
        layer="weight-sync",
        cost=0.4,
        run=probes,
        kept_because="what no walk over tensors sees: closures, captured buffers, another path",
    ),  # fmt: skip
    Check(name="sync.prefix_cache", layer="rollout-vs-train-logprob", cost=0.1, run=prefix),
)
