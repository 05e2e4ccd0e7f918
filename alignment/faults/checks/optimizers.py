"""Schedules and the distributed optimizer against the textbook: several steps, ranks, buckets, groups, scales,
loads, chains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.reference import optimizer as textbook
from alignment.numerics.random import portable_normal

UPDATE, CHECKPOINT = "actor_update", "checkpoint"
SHAPES = {"a.weight": (5, 3), "norm": (7,), "b.weight": (6, 4), "c.bias": (2,)}
SCHEDULE = {"lr": 0.03, "lr_warmup_steps": 2, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1, "total_steps": 8}
DECAY = 0.2


def schedules(setting: Setting) -> Iterator[Finding]:
    """The learning rate of every update: warm-up, constant, cosine with and without a floor, and beyond the end."""
    from alignment.backends import training

    for warmup in (0, 3):
        for kind, low in (("constant", 0.0), ("cosine", 0.0), ("cosine", 0.25)):
            config = training.OptimizerConfig(
                lr=0.02, lr_warmup_steps=warmup, lr_scheduler_type=kind, min_lr_ratio=low, total_steps=10
            )
            rates = [config.learning_rate(update) for update in range(13)]
            golden = [
                textbook.learning_rate(update, lr=0.02, warmup=warmup, kind=kind, min_ratio=low, total=10)
                for update in range(13)
            ]
            yield from differs(
                torch.tensor(rates, dtype=torch.float64),
                torch.tensor(golden, dtype=torch.float64),
                stage=UPDATE,
                place="optimizer.learning_rate",
                what=f"{kind}, warm-up {warmup}, floor {low:g}",
            )


def operator(setting: Setting) -> Iterator[Finding]:
    """The AdamW step by itself, over steps whose moments and corrections differ."""
    from alignment.backends import golden_training as product

    weight = portable_normal((4, 3), seed=setting.seed, stream="optimizers/adamw")
    reference = textbook.AdamW({"w": weight}, (0.8, 0.95), 1e-3)
    held, m, v = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 5):
        gradient = portable_normal((4, 3), seed=setting.seed, stream=f"optimizers/adamw/{step}") / step
        lr = 0.1 / step
        product.adamw_step(
            held, gradient.clone(), m, v, step=step, lr=lr, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3
        )
        reference.step({"w": gradient}, lr=lr, decay={"w": 0.3}, max_norm=0.0)
        for name, found, right in (("exp_avg", m, reference.m["w"]), ("exp_avg_sq", v, reference.v["w"])):
            yield from differs(found, right, stage=UPDATE, place=f"adamw_step.{name}", what=f"step {step}")
        yield from differs(held, reference.weights["w"], stage=UPDATE, place="adamw_step.weight", what=f"step {step}")


def _gradients(seed: int, step: int) -> dict[str, Tensor]:
    return {n: portable_normal(s, seed=seed, stream=f"optimizers/{n}/{step}") for n, s in SHAPES.items()}


def _weights(seed: int) -> dict[str, Tensor]:
    return {n: portable_normal(s, seed=seed, stream=f"optimizers/{n}") for n, s in SHAPES.items()}


def _shares(gradients: dict[str, Tensor], dp: int, scale: float) -> list[dict[str, Tensor]]:
    """The gradients as unequal parts of ``dp`` ranks, of scaled losses."""
    parts = [(r + 1) / (dp * (dp + 1) / 2) for r in range(dp)]
    return [{n: part * scale * g for n, g in gradients.items()} for part in parts]


def _decay() -> dict[str, float]:
    return {n: DECAY if len(s) > 1 else 0.0 for n, s in SHAPES.items()}


def _built(product: Any, config: Any, weights: dict[str, Tensor], *, dp: int, scale: float = 1.0) -> Any:
    scaler = product.LossScaler(scale=scale)
    return product.DistributedOptimizer(weights, config=config, dp=dp, bucket_size=16, scaler=scaler)


def steps(setting: Setting) -> Iterator[Finding]:
    """Weights, norm and rates over several steps, with and without clipping; an overflow on one rank moves nothing."""
    from alignment.backends import distributed_optimizer as product
    from alignment.backends.training import OptimizerConfig

    for dp, clip, scale in ((1, 0.5, 1.0), (3, 0.5, 256.0), (2, 0.0, 1.0)):
        config = OptimizerConfig(betas=(0.8, 0.9), eps=1e-6, weight_decay=DECAY, clip_grad=clip, **SCHEDULE)
        held = _weights(setting.seed)
        golden = textbook.AdamW(held, config.betas, config.eps)
        optimizer = _built(product, config, held, dp=dp, scale=scale)
        scheduler = product.Scheduler(optimizer, config)
        for step in range(4):
            gradients = _gradients(setting.seed, step)
            if step == 2:
                bad = _shares(gradients, dp, scale)
                bad[-1]["norm"][3] = torch.inf
                before = {n: w.clone() for n, w in held.items()}
                optimizer.reduce(bad)
                report = optimizer.step()
                moved = [n for n, w in held.items() if not torch.equal(w, before[n])]
                yield from expect(
                    report.skipped and not moved,
                    stage=UPDATE,
                    place="distributed_optimizer.is_finite",
                    evidence=f"an overflow: skipped {report.skipped}, moved {moved}",
                )
            optimizer.reduce(_shares(gradients, dp, scale))
            report = optimizer.step()
            scheduler.step()
            lr = textbook.learning_rate(step, lr=0.03, warmup=2, kind="cosine", min_ratio=0.1, total=8)
            norm = golden.step(gradients, lr=lr, decay=_decay(), max_norm=clip)
            what = f"step {step}, DP = {dp}"
            ratios = {"DP": dp} if dp > 1 else {}
            for place, found, right in (
                ("gradient_norm", report.grad_norm, norm),
                ("learning_rate", report.learning_rates[0], lr),
            ):
                yield from differs(
                    torch.tensor(found, dtype=torch.float64),
                    torch.tensor(right, dtype=torch.float64),
                    stage=UPDATE,
                    place=f"distributed_optimizer.{place}",
                    what=what,
                    ratios=ratios,
                )
            for name, right in golden.weights.items():
                yield from differs(
                    held[name], right, stage=UPDATE, place=f"distributed_optimizer.step.gather.{name}", what=what
                )


def loading(setting: Setting) -> Iterator[Finding]:
    """After weights were loaded into the model, and after a resume on another number of ranks, steps go on from
    there.
    """
    from alignment.backends import distributed_optimizer as product
    from alignment.backends.training import OptimizerConfig

    seed = setting.seed
    config = OptimizerConfig(betas=(0.8, 0.9), eps=1e-6, weight_decay=DECAY, clip_grad=0.5, **SCHEDULE)
    held, loaded = _weights(seed), {n: w + 0.7 for n, w in _weights(seed + 1).items()}
    optimizer = _built(product, config, held, dp=2)
    optimizer.load_model(loaded)
    golden = textbook.AdamW(loaded, config.betas, config.eps)
    scheduler = product.Scheduler(optimizer, config)

    def step(number: int, one: Any, clock: Any, dp: int) -> None:
        one.reduce(_shares(_gradients(seed, number), dp, 1.0))
        one.step()
        clock.step()
        lr = textbook.learning_rate(number, lr=0.03, warmup=2, kind="cosine", min_ratio=0.1, total=8)
        golden.step(_gradients(seed, number), lr=lr, decay=_decay(), max_norm=0.5)

    step(0, optimizer, scheduler, 2)
    for name, right in golden.weights.items():
        yield from differs(
            held[name],
            right,
            stage=CHECKPOINT,
            place=f"distributed_optimizer.main_weights.{name}",
            what="first step after loading",
        )
    step(1, optimizer, scheduler, 2)
    fresh = {n: w.clone() for n, w in held.items()}
    state, position = optimizer.state_dict(), scheduler.state_dict()
    # What was saved is not what happens afterwards: the run that saved goes on.
    optimizer.reduce(_shares(_gradients(seed, 7), 2, 1.0))
    optimizer.step()
    resumed = _built(product, config, fresh, dp=3)
    resumed.load_state_dict(state)
    clock = product.Scheduler(resumed, config)
    clock.load_state_dict(position)
    step(2, resumed, clock, 3)
    for name, right in golden.weights.items():
        yield from differs(
            fresh[name],
            right,
            stage=CHECKPOINT,
            place=f"distributed_optimizer.load_state_dict.{name}",
            what="first step after a resume",
        )


def chains(setting: Setting) -> Iterator[Finding]:
    """A scheduler over a chain moves the rates the chained optimizers use, before and after a load."""
    from alignment.backends import distributed_optimizer as product
    from alignment.backends.training import OptimizerConfig

    config = OptimizerConfig(betas=(0.8, 0.9), eps=1e-6, weight_decay=DECAY, clip_grad=0.5, **SCHEDULE)
    weights = [_weights(setting.seed + i) for i in range(2)]
    members = [_built(product, config, w, dp=1 + i) for i, w in enumerate(weights)]
    chain = product.ChainedOptimizer(members)
    scheduler = product.Scheduler(chain, config)
    goldens = [textbook.AdamW(w, config.betas, config.eps) for w in weights]
    for step in range(4):
        if step == 2:
            chain.load_state_dict(chain.state_dict())
        lr = textbook.learning_rate(step, lr=0.03, warmup=2, kind="cosine", min_ratio=0.1, total=8)
        stage = UPDATE if step < 2 else CHECKPOINT
        what = f"step {step}" + (", after a load" if step >= 2 else "")
        rates = torch.tensor([g["lr"] for m in members for g in m.param_groups], dtype=torch.float64)
        yield from differs(
            rates, torch.full_like(rates, lr), stage=stage, place="param_groups.learning_rate", what=what
        )
        norms: list[float] = []
        for i, (member, golden) in enumerate(zip(members, goldens)):
            gradients = _gradients(setting.seed + i, step)
            member.reduce(_shares(gradients, 1 + i, 1.0))
            norms.append(golden.step(gradients, lr=lr, decay=_decay(), max_norm=0.5))
        reports = chain.step()
        scheduler.step()
        found = torch.tensor([report.grad_norm for report in reports], dtype=torch.float64)
        right = torch.tensor(norms, dtype=torch.float64)
        yield from differs(found, right, stage=stage, place="distributed_optimizer.gradient_norm", what=what)
        for i, (held, golden) in enumerate(zip(weights, goldens)):
            for name, right in golden.weights.items():
                place = f"distributed_optimizer.step.gather.{i}.{name}"
                yield from differs(held[name], right, stage=stage, place=place, what=what)


def scales(setting: Setting) -> Iterator[Finding]:
    """A dynamic loss scale over good steps and overflows, and through a save."""
    from alignment.backends import distributed_optimizer as product

    scaler, golden, good = product.LossScaler(scale=16.0, window=3), 16.0, 0
    for step, overflow in enumerate((0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0)):
        scaler.update(overflow=bool(overflow))
        good = 0 if overflow else good + 1
        golden = max(1.0, golden / 2) if overflow else golden * 2 if good == 3 else golden
        good = 0 if good == 3 else good
        yield from expect(
            scaler.scale == golden,
            stage=UPDATE,
            place="distributed_optimizer.LossScaler",
            evidence=f"step {step}: {scaler.scale} instead of {golden}",
        )
        again = product.LossScaler(scale=1.0, window=3)
        again.load_state_dict(scaler.state_dict())
        scaler = again


CHECKS = (
    Check(
        name="optimizers.operator",
        layer="unit-op",
        cost=0.001,
        run=operator,
        kept_because="it names the operator that every optimizer here steps with",
    ),
    Check(
        name="optimizers.scales",
        layer="unit-op",
        cost=0.001,
        run=scales,
        kept_because="loss scales are no entry of the catalogue",
    ),
    Check(
        name="optimizers.schedules",
        layer="unit-op",
        cost=0.001,
        run=schedules,
        kept_because="every schedule at every update, where steps see a few",
    ),
    Check(name="optimizers.chains", layer="unit-op", cost=0.02, run=chains),
    Check(name="optimizers.loading", layer="layer-grad", cost=0.015, run=loading),
    Check(
        name="optimizers.steps",
        layer="layer-grad",
        cost=0.04,
        run=steps,
        kept_because="clipping, overflow and loss scales over ranks are no entry of the catalogue",
    ),
)
