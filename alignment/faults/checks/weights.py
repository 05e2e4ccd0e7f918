"""Weights on their way: configuration, checkpoint, FP8, layouts, buckets. What is a copy is equal bit by bit."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.reference import blocks, language_model, rotary
from alignment.models import attention, fused_mla, mla
from alignment.models import config as model_config
from alignment.numerics.precision import unit_roundoff
from alignment.weights import (
    buckets,
    checkpoint,
    fp8,
    fp8_rollout,
    fp8_scaling,
    fused_mla_weights,
    fused_qkv,
    megatron_layout,
)  # fmt: skip

YARN_KEYS = {
    "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 0.707,
    "mscale_all_dim": 1.3,
}  # fmt: skip


def same_tensors(found: dict[str, Tensor], sent: dict[str, Tensor], *, stage: str, what: str = "") -> Iterator[Finding]:
    """One finding per tensor that is missing, foreign, or not equal bit by bit, in the order they were sent."""
    for name in [*sent, *(name for name in found if name not in sent)]:
        mine, right = found.get(name), sent.get(name)
        if mine is None or right is None:
            evidence = f"{what}: {'it did not arrive' if mine is None else 'it was not sent'}"
            yield Finding(stage=stage, place=name, evidence=evidence)
        elif mine.shape != right.shape or mine.dtype != right.dtype:
            evidence = f"{what}: {mine.dtype} {list(mine.shape)} instead of {right.dtype} {list(right.shape)}"
            yield Finding(stage=stage, place=name, evidence=evidence)
        else:
            yield from differs(
                mine.detach().double(), right.detach().double(), stage=stage, place=name, what=what, bound=0.0
            )


def read_config(setting: Setting) -> Iterator[Finding]:
    """Every field of a ``config.json``, in the spellings of transformers 4 and 5, and after writing and reading
    again.
    """
    for name, config in {**toy.MODELS, "theta": dataclasses.replace(toy.PLAIN, rope_theta=7e5)}.items():
        plain = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if field.name not in ("hf_extra", "rope_scaling", "rope_theta")
        }
        plain |= {"model_type": "deepseek_v3", "eos_token_id": list(config.eos_token_id)}
        yarn = {"type": "yarn", **YARN_KEYS} if config.rope_scaling else None
        kind = {"rope_type": "yarn", **YARN_KEYS} if config.rope_scaling else {"rope_type": "default"}
        spellings = {
            "transformers 4": {**plain, "rope_theta": config.rope_theta, "rope_scaling": yarn},
            "transformers 5": {**plain, "rope_parameters": {**kind, "rope_theta": config.rope_theta}},
            "written by itself": config.to_hf(),
        }
        for spelling, hf in spellings.items():
            found = model_config.ModelConfig.from_hf(hf)
            for field in dataclasses.fields(config):
                mine, right = getattr(found, field.name), getattr(config, field.name)
                if field.name != "hf_extra" and mine != right:
                    yield Finding(
                        stage="old_log_prob", place=f"config.{field.name}",
                        evidence=f"{name}, {spelling}: read as {mine}, it says {right}",
                    )  # fmt: skip


def load_checkpoint(setting: Setting) -> Iterator[Finding]:
    """What is written is in the files, what is loaded is what the files say, and loading changes no file."""
    from safetensors.torch import load_file

    for name, config in toy.MODELS.items():
        sent = toy.weights(name, setting.seed)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "checkpoint"
            checkpoint.save_checkpoint(path, config, sent, max_shard_bytes=20_000)
            written = {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
            yield from same_tensors(written, sent, stage="checkpoint", what=f"{name}, written")
            model = checkpoint.load_model(path)
            held = {k: v for k, v in model.state_dict().items() if k in sent}
            yield from same_tensors(held, sent, stage="checkpoint", what=f"{name}, loaded")
            again = {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
            yield from same_tensors(again, sent, stage="checkpoint", what=f"{name}, after loading")


def fp8_blocks(setting: Setting) -> Iterator[Finding]:
    """Scales and values of whole and of ragged blocks, one of them all zeros, one of tiny numbers."""
    for shape, block in (((6, 8), (2, 4)), ((7, 9), (4, 4)), ((5, 3), (4, 2)), ((130, 6), (128, 128))):
        weight = toy.normal(shape, setting.seed, f"fp8 {shape}").float()
        weight[: block[0], : block[1]] = 0.0
        weight[-1] *= 2.0**-20
        codes, scale = fp8.quantize(weight, block=block)
        golden = blocks.scales(weight, block)
        what = f"{shape[0]} × {shape[1]} in blocks of {block[0]} × {block[1]}"
        yield from differs(
            scale.double() / golden if scale.shape == golden.shape else scale,
            torch.ones_like(golden),
            stage="weight_sync",
            place="fp8.quantize.scale",
            what=what,
            bound=4 * unit_roundoff("float32"),
        )
        # Half a unit in the last place of a code relative to its size; of the smallest codes, half of 2^-9 scales.
        error = (blocks.scaled(codes, golden, block) - weight.double()).abs()
        step = blocks.scaled(torch.ones(shape), golden, block) * 2.0**-10
        room = torch.maximum(unit_roundoff("float8_e4m3fn") * weight.double().abs(), step)
        wrong = ~(error <= room * (1 + 4 * unit_roundoff("float32")))
        yield from expect(
            not bool(wrong.any()),
            stage="weight_sync",
            place="fp8.quantize",
            evidence=f"{what}: {int(wrong.sum())} of {wrong.numel()} values are off by more than e4m3, "
            f"first {wrong.nonzero()[:1].tolist()}",
        )
        given = toy.normal(shape, setting.seed, "fp8 codes", scale=20.0).float().to(torch.float8_e4m3fn)
        factors = toy.normal(tuple(golden.shape), setting.seed, "fp8 scales").abs().float() + 0.1
        found = fp8.dequantize(given, factors, block=block)
        yield from differs(
            found, blocks.scaled(given, factors, block), stage="checkpoint", place="fp8.dequantize", what=what,
            bound=2 * unit_roundoff("bfloat16"),
        )  # fmt: skip


def fp8_history(setting: Setting) -> Iterator[Finding]:
    """Delayed scaling: every step of a run of growing and shrinking tensors is finite and as exact as its scale
    allows.
    """
    subject = fp8_scaling.DelayedScaling(history=3)
    seen: list[float] = []
    for step, size in enumerate((1.0, 0.1, 5.0, 5.0, 0.01, 0.01, 0.01, 0.01)):
        values = size * toy.normal((5, 7), setting.seed, f"step {step}")
        seen.append(float(values.abs().max()))
        codes, scale = subject.quantize(values)
        largest = max(seen[-3:])
        found = codes.float().double() * scale.double()
        yield from differs(
            found, values, stage="actor_update", place="fp8_scaling.scale", what=f"step {step}", scale=largest,
            bound=unit_roundoff("float8_e4m3fn"),
        )  # fmt: skip
        yield from differs(
            scale.double(), torch.tensor(largest / blocks.LARGEST, dtype=torch.float64), stage="actor_update",
            place="fp8_scaling.scale", what=f"step {step}", bound=4 * unit_roundoff("float32"),
        )  # fmt: skip


def fp8_policy(setting: Setting) -> Iterator[Finding]:
    """An FP8 rollout rounds its linear layers and nothing else: router, norms, embedding and head arrive as they
    are.
    """
    for name in toy.MODELS:
        sent = {key: tensor.bfloat16() for key, tensor in toy.weights(name, setting.seed).items()}
        found = fp8_rollout.effective_weights(iter(sent.items()), block=(16, 16))
        for key, tensor in sent.items():
            linear = tensor.ndim == 2 and ("_proj" in key)
            if key not in found:
                yield Finding(stage="weight_sync", place=key, evidence="it did not arrive")
            elif linear:
                scale = blocks.scales(tensor, (16, 16))
                room = blocks.scaled(torch.full(tensor.shape, blocks.LARGEST), scale, (16, 16))
                off = (found[key].double() - tensor.double()).abs() / room
                # Half a unit in the last place of the largest code, and one rounding to bfloat16.
                bound = unit_roundoff("float8_e4m3fn") + 2 * unit_roundoff("bfloat16")
                yield from expect(
                    bool((off <= bound).all()), stage="weight_sync", place=key,
                    evidence=f"off by {float(off.max()):.3g} of its block's largest value, bound {bound:.3g}",
                )  # fmt: skip
            else:
                yield from differs(
                    found[key], tensor, stage="weight_sync", place=key, what="not a linear layer", bound=0.0
                )


def in_buckets(setting: Setting) -> Iterator[Finding]:
    """Tensors through one small buffer: transposed, sliced and expanded ones, several dtypes, several fillings."""
    base = toy.normal((6, 4), setting.seed, "buckets")
    sent = {
        "a.weight": base.float(),
        "b.transposed": base.float().T,
        "c.column": base.float()[:, 1:3],
        "d.bfloat16": base.bfloat16().T,
        "e.expanded": base.float()[0].expand(3, 4),
        "f.scalar": base[0, 0].float(),
        **{f"g.{i}": toy.normal((3, 3), setting.seed, f"bucket {i}").float() for i in range(6)},
        "h.integers": torch.arange(5),
    }
    # The consumer keeps everything before it reads anything.
    found = list(buckets.through_buckets(iter(sent.items()), size=128))
    yield from (
        Finding(stage=f.stage, place=f"buckets.{f.place}", evidence=f.evidence)
        for f in same_tensors(dict(found), sent, stage="weight_sync", what="through a buffer of 128 bytes")
    )


SIZES = {
    "TP 2": {"tensor_model_parallel_size": 2},
    "TP 2, EP 2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "TP 2, EP 2, ETP 2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
    "EP 4": {"expert_model_parallel_size": 4},
    "PP 2": {"pipeline_model_parallel_size": 2},
}

ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")


def megatron(setting: Setting) -> Iterator[Finding]:
    """What every rank holds of every tensor, by rows or by columns, and the checkpoint that the ranks give back."""
    for label, sizes in SIZES.items():
        layout = megatron_layout.ParallelSizes(**sizes)
        for name, config in toy.MODELS.items():
            if config.tie_word_embeddings and layout.pipeline_model_parallel_size > 1:
                continue
            sent = toy.weights(name, setting.seed)
            states = {}
            for place in megatron_layout.places(layout):
                held = {}
                for local, tensor in megatron_layout.to_megatron(config, layout, place, iter(sent.items())):
                    held[local.chunk, local.name] = tensor
                    yield from _shard(local.parameter, tensor, sent, place, layout, f"{name}, {label}")
                states[place] = held
            back = dict(megatron_layout.to_hugging_face(config, megatron_layout.fetch_from(config, layout, states)))
            yield from same_tensors(back, sent, stage="checkpoint", what=f"{name}, {label}, merged")


def _shard(parameter, tensor: Tensor, sent: dict[str, Tensor], place, layout, what: str) -> Iterator[Finding]:
    routed = parameter.expert is not None
    rank, size = (place.expert_tensor, layout.expert_tensor) if routed else (place.tensor, layout.tensor)
    parts = []
    for name in parameter.hf_names:
        whole, leaf = sent[name], name.split(".")[-2]
        if leaf in ROWS:
            step = whole.shape[0] // size
            parts.append(whole[rank * step : (rank + 1) * step])
        elif leaf in COLUMNS:
            step = whole.shape[1] // size
            parts.append(whole[:, rank * step : (rank + 1) * step])
        else:
            parts.append(whole)
    yield from differs(
        tensor,
        torch.cat(parts),
        stage="checkpoint",
        place=parameter.hf_names[0],
        what=f"{what}, rank {rank}",
        bound=0.0,
    )


def qkv(setting: Setting) -> Iterator[Finding]:
    """Fused projections hold [queries, key, value] group by group, and come back the same from any number of ranks."""
    groups, ratio, width, hidden = 4, 3, 2, 5
    q = toy.normal((groups * ratio * width, hidden), setting.seed, "qkv q")
    k, v = (toy.normal((groups * width, hidden), setting.seed, f"qkv {n}") for n in "kv")
    golden = []
    for group in range(groups):
        for head in range(ratio):
            start = (group * ratio + head) * width
            golden.append(q[start : start + width])
        golden += [k[group * width : (group + 1) * width], v[group * width : (group + 1) * width]]
    golden = torch.cat(golden)
    place = "self_attn.qkv_proj"
    yield from differs(fused_qkv.fuse_qkv(q, k, v, groups=groups), golden, stage="weight_sync", place=place, bound=0.0)
    for ranks in (1, 2, 4):
        shards = fused_qkv.shard_qkv(golden, ranks=ranks)
        found = fused_qkv.merge_qkv(shards, groups=groups, head_dim=width)
        for what, mine, right in zip(("q", "k", "v"), found, (q, k, v)):
            yield from differs(mine, right, stage="weight_sync", place=f"{place}.{what}", what=f"TP {ranks}", bound=0.0)


def fused_attention(setting: Setting) -> Iterator[Finding]:
    """MLA's fused pre-processing on reordered weights gives the queries, latents and keys of the plain one."""
    for name, config in toy.MODELS.items():
        weights = toy.weights(name, setting.seed)
        subject = toy.model(name, setting.seed).model.layers[1].self_attn
        x = toy.normal((6, config.hidden_size), setting.seed, "fused x")
        positions = torch.tensor([0, 1, 2, 5, 90, 300])
        with torch.no_grad():
            golden = language_model.latent_attention(x, weights, "model.layers.1.self_attn", config, positions)
        angle, size = rotary.angles(positions[None], config), rotary.amplitude(config)
        context = mla.AttentionContext(
            cos=size * angle.cos(),
            sin=size * angle.sin(),
            mask=attention.attention_mask_from(torch.ones(1, 6, dtype=torch.int64)),
        )
        with torch.no_grad():
            fused = fused_mla_weights.fused_mla_weights(subject)
            q_nope, q_rope, latent, k_rope = fused_mla.fused_preprocess(subject, fused, x[None], context)
        at = "model.layers.1.self_attn"
        query = torch.cat([q_nope, q_rope], dim=-1)[0]
        yield from differs(
            latent[0], golden["latent"], stage="rollout", place=f"{at}.kv_a_proj_with_mqa", what=f"{name}, latent"
        )
        key = golden["key"][0][:, config.qk_nope_head_dim :]
        yield from differs(
            k_rope[0], key, stage="rollout", place=f"{at}.kv_a_proj_with_mqa", what=f"{name}, rotated key"
        )
        yield from differs(query, golden["query"], stage="rollout", place=f"{at}.q_proj", what=f"{name}, query")


CHECKS = (
    Check(
        name="weights.fp8_blocks",
        layer="unit-op",
        cost=0.01,
        run=fp8_blocks,
        kept_because="it names quantisation or its inverse",
    ),  # fmt: skip
    Check(name="weights.fp8_history", layer="unit-op", cost=0.003, run=fp8_history),
    Check(name="weights.config", layer="unit-op", cost=0.002, run=read_config),
    Check(
        name="weights.fused_attention",
        layer="layer-logits",
        cost=0.02,
        run=fused_attention,
        kept_because="derived weights of a fused kernel, by themselves",
    ),  # fmt: skip
    Check(name="weights.fp8_policy", layer="layer-logits", cost=0.03, run=fp8_policy),
    Check(name="weights.buckets", layer="weight-sync", cost=0.003, run=in_buckets),
    Check(name="weights.qkv", layer="weight-sync", cost=0.002, run=qkv),
    Check(
        name="weights.checkpoint",
        layer="unit-op",
        cost=0.1,
        run=load_checkpoint,
        kept_because="a file and its copy by themselves, where models only differ",
    ),  # fmt: skip
    Check(
        name="weights.megatron",
        layer="weight-sync",
        cost=0.1,
        run=megatron,
        kept_because="what every rank holds, which a round trip alone does not show",
    ),  # fmt: skip
)
