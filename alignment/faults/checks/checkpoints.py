"""Saved models: every tensor comes back whatever the index lists, and each model is built from its own
configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from alignment.errors import InputError
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.checks.parallel_layouts import bound_of
from alignment.faults.reference import language_model
from alignment.faults.scratch import scratch
from alignment.numerics.random import portable_integers

CHECKPOINT, TEACHER = "checkpoint", "teacher"


def small_config(**changes):
    """A model of two layers with every field of the family, changed where asked."""
    from alignment.models.config import preset

    small = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "num_attention_heads": 2,
        "first_k_dense_replace": 1,
    }
    return dataclasses.replace(preset("tiny-deepseek"), **{**small, **changes})


def exports(setting: Setting) -> Iterator[Finding]:
    """Stream into the files of an index that also lists what training never makes; read back, tensor by tensor."""
    from alignment.models.causal_lm import CausalLM
    from alignment.weights import checkpoint, indexed_save

    config = small_config(first_k_dense_replace=2)
    state = CausalLM(config, dtype=torch.float32).init_weights(setting.seed).state_dict()
    names = sorted(state)
    index = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    phantoms = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": file for i, file in enumerate(sorted(set(index.values())))
    }
    for label, listed in (("a plain index", index), ("an index with inv_freq", {**index, **phantoms})):
        with scratch() as folder:
            target = folder / "out"
            indexed_save.save_stream(
                target, config, iter(state.items()), index=listed, allow_missing=[indexed_save.ROTARY_FREQUENCIES]
            )
            found = checkpoint.load_state(target)
            yield from _same(found, state, f"indexed_save, {label}")
    with scratch() as folder:
        checkpoint.save_checkpoint(folder / "out", config, state, max_shard_bytes=4096)
        yield from _same(checkpoint.load_state(folder / "out"), state, "save_checkpoint")


def _same(found: dict, state: dict, label: str) -> Iterator[Finding]:
    place = "indexed_save" if label.startswith("indexed") else "save_checkpoint"
    missing = sorted(state.keys() - found.keys())
    yield from expect(
        not missing,
        stage=CHECKPOINT,
        place=f"{place}.{(missing or [''])[0]}",
        evidence=f"{label}: {len(missing)} of {len(state)} tensors are missing",
    )
    for name, tensor in state.items():
        if name in found:
            same = torch.equal(found[name], tensor)
            yield from expect(same, stage=CHECKPOINT, place=f"{place}.{name}", evidence=f"{label}: other values")


def two_models(setting: Setting) -> Iterator[Finding]:
    """A second model in the same process has its own configuration and computes by it, as the first one still does."""
    from alignment.models.causal_lm import CausalLM
    from alignment.weights import checkpoint

    student = small_config()
    # dense, so that no rounding that is declared flips an expert; what experts are told is in the configuration
    student = dataclasses.replace(student, first_k_dense_replace=2)
    teacher = small_config(
        num_hidden_layers=3,
        num_attention_heads=4,
        rms_norm_eps=1e-2,
        rope_theta=700.0,
        n_routed_experts=6,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        rope_scaling=None,
        routed_scaling_factor=1.3,
        first_k_dense_replace=3,
    )
    ids = portable_integers(3, 31, (2, 11), seed=setting.seed, stream="checkpoints/ids")
    with scratch() as folder:
        plans = {}
        for name, config in (("student", student), ("teacher", teacher)):
            weights = CausalLM(config, dtype=torch.float32).init_weights(setting.seed).state_dict()
            checkpoint.save_checkpoint(folder / name, config, weights)
            plans[name] = (config, {k: v.double() for k, v in weights.items()})
        models = {name: checkpoint.load_model(folder / name, dtype=torch.float64) for name in plans}
    for name, (config, weights) in plans.items():
        stage = TEACHER if name == "teacher" else "ref_log_prob"
        built = models[name].config
        for entry in dataclasses.fields(config):
            if entry.name == "hf_extra":
                continue  # carried along, not computed with
            mine, right = getattr(built, entry.name), getattr(config, entry.name)
            yield from expect(
                mine == right,
                stage=stage,
                place=f"load_model.config.{entry.name}",
                evidence=f"the {name} was built with {mine} instead of {right}",
            )
        with torch.no_grad():
            found = models[name](ids)
        golden = torch.stack([language_model.forward(row, weights, config)["lm_head"] for row in ids])
        bound = bound_of(setting, config.hidden_size * config.num_hidden_layers)
        yield from differs(found, golden, stage=stage, place="load_model.logits", what=name, bound=bound)


def resumes(setting: Setting) -> Iterator[Finding]:
    """The newest finished checkpoint is found, by number; older ones go, unfinished ones are never taken."""
    from alignment.rl import checkpoint as product

    def write(directory) -> None:
        (directory / "weights").write_text(directory.name)

    with scratch() as folder:
        for step in (9, 10, 100):
            product.save(folder, step, state={"config": {"a": step}, "kl_coef": 0.1 * step}, write=write, keep=2)
        (folder / ".unfinished_global_step_200").mkdir()
        (folder / ".unfinished_global_step_200" / "state.json").write_text("{}")
        steps = product.finished(folder)
        where = {"stage": CHECKPOINT}
        yield from expect(steps == [10, 100], place="checkpoint.save", evidence=f"steps {steps}", **where)
        found = product.find(folder, resume_mode="auto")
        name = found.name if found else None
        yield from expect(name == "global_step_100", place="checkpoint.find", evidence=f"{name}", **where)
        none = product.find(folder, resume_mode="disable")
        yield from expect(none is None, place="checkpoint.find", evidence=f"disabled: {none}", **where)
        if found:
            state = product.read_state(found, config={"a": 100})
            right = (100, 0.1 * 100)
            held = (state.get("step"), state.get("kl_coef"))
            yield from expect(held == right, place="checkpoint.read_state", evidence=f"{held}", **where)
            try:
                product.read_state(found, config={"a": 1})
                yield Finding(place="checkpoint.read_state", evidence="another configuration is let through", **where)
            except InputError:
                pass


CHECKS = (
    Check(
        name="checkpoints.resumes",
        layer="unit-op",
        cost=0.01,
        run=resumes,
        kept_because="a resume from the wrong step is no entry of the catalogue, and looks like a jump of the curve",
    ),
    Check(name="checkpoints.exports", layer="weight-sync", cost=0.03, run=exports),
    Check(name="checkpoints.two_models", layer="layer-logits", cost=0.06, run=two_models),
)
