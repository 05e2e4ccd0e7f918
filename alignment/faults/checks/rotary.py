"""Rotary tables, rotations and the attention scale against complex arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.fault import OPERATOR
from alignment.faults.reference import rotary
from alignment.models import attention as product_attention
from alignment.models import config as product_config
from alignment.models import mla, partial_rope, rope
from alignment.models.config import YarnScaling
from alignment.numerics.precision import unit_roundoff

# The first one, small ones, both sides of 256 (where bfloat16 runs out of integers), powers of two and the last one.
POSITIONS = (0, 1, 2, 3, 17, 63, 64, 65, 200, 255, 256, 257, 259, 301, 511, 513, 699)

SCALINGS = {
    "plain": None,
    "yarn": toy.YARN.rope_scaling,
    "yarn with equal fields": dataclasses.replace(toy.YARN.rope_scaling, mscale=1.0, mscale_all_dim=1.0),
    "yarn without mscale_all_dim": dataclasses.replace(toy.YARN.rope_scaling, mscale=None, mscale_all_dim=None),
    "yarn as published": YarnScaling(
        factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0
    ),
}


def _configs() -> Iterator[tuple[str, product_config.ModelConfig]]:
    for name, scaling in SCALINGS.items():
        yield name, dataclasses.replace(toy.PLAIN, rope_scaling=scaling)


def table(setting: Setting) -> Iterator[Finding]:
    """cos and sin of every kind of rope at near and far positions, in float64 and rounded once to float32."""
    positions = torch.tensor([POSITIONS])
    for name, config in _configs():
        angle, size = rotary.angles(positions, config), rotary.amplitude(config)
        golden = (size * angle.cos(), size * angle.sin())
        for dtype in (torch.float64, torch.float32):
            # Rounded once: half a unit in the last place, of values up to the amplitude.
            bound = None if dtype == torch.float64 else unit_roundoff(dtype) * size * (1 + unit_roundoff(dtype))
            for what, found, right in zip(("cos", "sin"), rope.RotaryTable(config)(positions, dtype), golden):
                yield from differs(
                    found,
                    right,
                    stage=OPERATOR,
                    place="model.rotary",
                    what=f"{what}, {name}, {dtype}",
                    scale=1.0,
                    bound=bound,
                )
                yield from expect(
                    found.dtype == dtype,
                    stage=OPERATOR,
                    place="model.rotary",
                    evidence=f"{found.dtype} instead of {dtype}",
                )


def rotate(setting: Setting) -> Iterator[Finding]:
    """Rotation of one shared key head and of several query heads, away from position 0."""
    config = toy.PLAIN
    positions = torch.tensor([[0, 1, 5, 300], [7, 8, 9, 10]])
    angle = rotary.angles(positions, config)
    for heads, place in ((1, "self_attn.key.rotate_interleaved"), (3, "self_attn.query.rotate_interleaved")):
        x = toy.normal((2, heads, 4, config.qk_rope_head_dim), setting.seed, f"rotate {heads}")
        found = rope.rotate_interleaved(x, angle.cos(), angle.sin())
        yield from differs(found, rotary.turned(x, angle.unsqueeze(1)), stage=OPERATOR, place=place)


def partial(setting: Setting) -> Iterator[Finding]:
    """Only the first channels of a head rotate, in either pairing, with frequencies of their own width."""
    for interleaved in (True, False):
        for rotary_dim, head in ((4, 8), (6, 10), (8, 8)):
            positions = torch.tensor([[3, 4, 300]])
            config = dataclasses.replace(toy.PLAIN, qk_rope_head_dim=rotary_dim)
            angle = rotary.angles(positions, config)
            x = toy.normal((1, 2, 3, head), setting.seed, f"partial {rotary_dim}")
            cos, sin = partial_rope.partial_tables(positions, rotary_dim=rotary_dim, theta=config.rope_theta)
            found = partial_rope.rotate_partially(x, cos, sin, rotary_dim=rotary_dim, interleaved=interleaved)
            turned = rotary.turned(x[..., :rotary_dim], angle.unsqueeze(1), interleaved=interleaved)
            if interleaved:
                turned = torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)
            golden = torch.cat([turned, x[..., rotary_dim:]], dim=-1)
            yield from differs(
                found, golden, stage=OPERATOR, place="rope.rotate_partially", what=f"{rotary_dim} of {head} channels"
            )


def scale(setting: Setting) -> Iterator[Finding]:
    """The softmax scale of every kind of rope: the width of a whole query head, and mscale_all_dim twice."""
    for name, config in _configs():
        found, golden = mla.softmax_scale(config), rotary.softmax_scale(config)
        yield from differs(
            torch.tensor(found, dtype=torch.float64), torch.tensor(golden, dtype=torch.float64),
            stage="old_log_prob", place="self_attn.softmax_scale", what=name,
        )  # fmt: skip


def positions(setting: Setting) -> Iterator[Finding]:
    """Position ids count the real tokens of each row and segment from 0, exactly, beyond 256 as well."""
    mask = torch.ones(3, 300, dtype=torch.int64)
    mask[1, :7] = 0
    mask[2, 290:] = 0
    segments = torch.zeros(3, 300, dtype=torch.int64)
    for row, cuts in enumerate(((5, 11, 280), (100,), (3, 270))):
        for cut in cuts:
            segments[row, cut:] += 1
    for what, ids in (("padding", None), ("packing", segments)):
        found = product_attention.default_positions(mask, ids)
        golden = torch.zeros_like(mask)
        for row in range(3):
            seen: dict[int, int] = {}
            for column in range(300):
                segment = int(ids[row, column]) if ids is not None else 0
                if mask[row, column]:
                    golden[row, column] = seen.get(segment, 0)
                    seen[segment] = seen.get(segment, 0) + 1
        wrong = (found.to(torch.float64) != golden.double()) & (mask > 0)
        yield from expect(
            not bool(wrong.any()) and not found.is_floating_point(),
            stage=OPERATOR,
            place="position_ids",
            evidence=f"{what}: {int(wrong.sum())} positions are wrong, the first at {wrong.nonzero()[:1].tolist()}",
        )


CHECKS = (
    Check(
        name="rotary.table",
        layer="unit-op",
        cost=0.01,
        run=table,
        kept_because="it names the table, where keys and logits see only its consequences",
    ),  # fmt: skip
    Check(
        name="rotary.rotate",
        layer="unit-op",
        cost=0.001,
        run=rotate,
        kept_because="it names the rotation, and whether it is of the query or the key",
    ),  # fmt: skip
    Check(name="rotary.partial", layer="unit-op", cost=0.002, run=partial),
    Check(
        name="attention.scale",
        layer="unit-op",
        cost=0.001,
        run=scale,
        kept_because="it names the scale in a millisecond, where the model sees logits",
    ),  # fmt: skip
    Check(
        name="attention.positions",
        layer="unit-op",
        cost=0.003,
        run=positions,
        kept_because="it names the positions, where rotary tables and logits see only their consequences",
    ),  # fmt: skip
)
