"""KV caches against the simplest thing that remembers: a list of keys per request."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from alignment.backends import paged_cache
from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.models import cache as latent_cache
from alignment.models import fp8_cache
from alignment.numerics.precision import unit_roundoff


def paged(setting: Setting) -> Iterator[Finding]:
    """A random history of requests that come, grow and end; batches shrink and grow, blocks are given out again."""
    width, chance = 3, random.Random(setting.seed)
    subject = paged_cache.PagedCache(blocks=40, block_size=2, width=width, batch=6, dtype=torch.float64)
    golden: dict[str, list[Tensor]] = {}
    for step in range(40):
        for request in list(golden):
            if chance.random() < 0.12:
                subject.finish(request)
                del golden[request]
        if len(golden) < 6 and chance.random() < 0.6:
            golden[f"request {step}"] = []
        running = [request for request in golden if chance.random() < 0.7 or not golden[request]]
        if running:
            keys = {r: toy.normal((width,), setting.seed, f"paged {step} {r}") for r in running}
            subject.append(keys)
            for request, key in keys.items():
                golden[request].append(key)
        for request, keys in golden.items():
            if keys:
                wrong = differs(
                    subject.read(request), torch.stack(keys), stage="rollout", place="kv_cache.slot_mapping",
                    what=f"{request} after step {step}", bound=0.0,
                )  # fmt: skip
                if wrong:
                    yield from wrong
                    return


def latent(setting: Setting) -> Iterator[Finding]:
    """Rows of the latent cache keep their own tokens, also after rows were dropped and repeated."""
    config = toy.PLAIN
    subject = latent_cache.LatentCache(config, batch_size=3, capacity=9, dtype=torch.float64)
    parts = []
    for step, new in enumerate((4, 1, 2)):
        mask = (toy.normal((len(subject.mask), new), setting.seed, f"mask {step}") > 0).long()
        subject.extend(mask)
        latents = toy.normal((len(mask), new, config.kv_lora_rank), setting.seed, f"latent {step}")
        keys = toy.normal((len(mask), new, config.qk_rope_head_dim), setting.seed, f"key {step}")
        parts.append((latents, keys, mask))
        for layer in range(config.num_hidden_layers):
            found = subject.write(layer, latents + layer, keys - layer)
            golden = (torch.cat([p[0] for p in parts], 1) + layer, torch.cat([p[1] for p in parts], 1) - layer)
            for what, a, b in zip(("latent", "rope_key"), found, golden):
                yield from differs(a, b, stage="rollout", place=f"kv_cache.{what}", what=f"layer {layer}", bound=0.0)
        real = torch.cat([p[2] for p in parts], 1)
        yield from expect(
            torch.equal(subject.mask[:, : subject.length].long(), real)
            and torch.equal(subject.real_tokens(), real.sum(1)),
            stage="rollout",
            place="kv_cache.mask",
            evidence="real tokens are taken for padding, or padding for real tokens",
        )
        if step == 0:
            rows = torch.tensor([2, 0, 0])
            subject = subject.select(rows)
            parts = [tuple(tensor[rows] for tensor in part) for part in parts]


def fp8_scales(setting: Setting) -> Iterator[Finding]:
    """Keys that grow from update to update: with the scales of each update their error stays that of e4m3."""
    caches = {"model.layers.0": fp8_cache.Fp8KeyValues(), "model.layers.1": fp8_cache.Fp8KeyValues()}
    for update, growth in enumerate((1.0, 1.6, 4.0, 0.02)):
        keys = {name: growth * toy.normal((16, 8), setting.seed, f"keys {name}") for name in caches}
        scales = {name: fp8_cache.Fp8KeyValues().calibrate(values) for name, values in keys.items()}
        fp8_cache.push_scales(scales, caches)
        for name, cache in caches.items():
            found = cache.read(cache.store(keys[name]), torch.float64)
            # A code is off by half a unit of its last place at most: relative to the largest key.
            yield from differs(
                found, keys[name], stage="rollout", place=f"{name}.kv_cache.k_scale",
                what=f"update {update}", bound=unit_roundoff("float8_e4m3fn"),
            )  # fmt: skip
            exact = float(keys[name].abs().max()) / float(torch.finfo(torch.float8_e4m3fn).max)
            yield from differs(
                cache.scale.double(), torch.tensor(exact, dtype=torch.float64), stage="weight_sync",
                place=f"{name}.kv_cache.k_scale", what=f"update {update}", bound=4 * unit_roundoff("float32"),
            )  # fmt: skip


CHECKS = (
    Check(name="cache.paged", layer="layer-logits", cost=0.01, run=paged),
    Check(
        name="cache.latent",
        layer="layer-logits",
        cost=0.005,
        run=latent,
        kept_because="rows that are dropped and repeated are no entry of the catalogue",
    ),  # fmt: skip
    Check(name="cache.fp8_scales", layer="unit-op", cost=0.002, run=fp8_scales),
)
