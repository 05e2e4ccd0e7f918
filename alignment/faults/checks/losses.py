"""Losses and penalties, value and derivative, against loops over tokens: far from every comfortable setting.

Ratios lie on both sides of every bound, the KL is far from 0, lengths are unequal, one mask has a hole (a turn of the
environment), a mini batch is cut into parts, and padding holds NaN or numbers that no exponential survives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.reference import objectives
from alignment.numerics.random import portable_normal

UPDATE, ADVANTAGE = "actor_update", "advantage"
LOG_RATIOS = (-25.0, -0.7, -0.1, 0.0, 0.05, 0.5, 1.6, 23.0)
ADVANTAGES = (1.3, -0.7, 0.4, -2.1)
LENGTHS = (8, 8, 5, 3)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
BOUNDS = {"low": 0.2, "high": 0.28, "c": 3.0}
KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "k3+")
SCALE_FACTOR = 11
SENTINEL = 1e4
"""What padding holds in public code (ms-swift, verl): e to it is infinite."""


def response_mask() -> Tensor:
    """[4, 8] of unequal lengths, the first row with a hole."""
    mask = (torch.arange(8) < torch.tensor(LENGTHS)[:, None]).long()
    mask[0, 3] = 0
    return mask


def samples(seed: int) -> dict[str, Tensor]:
    """Fields of an update: every ratio of :data:`LOG_RATIOS` under every sign of the advantage."""
    old = -1.0 - portable_normal((4, 8), seed=seed, stream="losses/old").abs()
    rolled = torch.stack([torch.tensor(LOG_RATIOS, dtype=torch.float64).roll(shift) for shift in (0, 0, 3, 5)])
    drift = 0.3 * portable_normal((4, 8), seed=seed, stream="losses/ref")
    fields = {
        "log_probs": old + rolled,
        "old_log_probs": old,
        "ref_log_prob": old + rolled - torch.tensor([2.5, -1.5, 0.7, -3.0] * 2, dtype=torch.float64) + drift,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(4, 8).clone(),
        "entropy": portable_normal((4, 8), seed=seed, stream="losses/entropy").abs(),
        "response_mask": response_mask(),
    }
    pad = fields["response_mask"] == 0
    for name, filler in (("old_log_probs", math.nan), ("ref_log_prob", SENTINEL), ("advantages", math.nan)):
        fields[name] = fields[name].masked_fill(pad, filler)
    fields["log_probs"] = fields["log_probs"].masked_fill(pad, -SENTINEL)
    return fields


def by_token(function: Callable[..., objectives.Pair], fields: list[Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Value and derivative of a token's loss, [b, r]; 0 at padding."""
    pairs = [
        [function(*values) if m else (0.0, 0.0) for *values, m in zip(*row)]
        for row in zip(*(f.tolist() for f in fields), mask.tolist())
    ]
    both = torch.tensor(pairs, dtype=torch.float64)
    return both[..., 0], both[..., 1]


def weights_of(mask: Tensor, mode: str, whole: Tensor | None = None) -> Tensor:
    """The reference's weight of each token, for a part of the mini batch ``whole``."""
    whole = mask if whole is None else whole
    lengths = whole.sum(1)
    rows = objectives.token_weights(
        mask.tolist(), mode, tokens=int(lengths.sum()), sequences=int((lengths > 0).sum()), width=SCALE_FACTOR
    )
    return torch.tensor(rows, dtype=torch.float64)


def aggregation(setting: Setting) -> Iterator[Finding]:
    """One number from a loss per token, of the whole mini batch and of parts of it, which have to add up."""
    from alignment.rl import aggregation as product

    values, mask = portable_normal((4, 8), seed=setting.seed, stream="losses/mat"), response_mask()
    values = values.masked_fill(mask == 0, math.nan)
    counts = product.Counts.of(mask)
    lengths = mask.sum(1)
    yield from expect(
        (counts.tokens, counts.sequences) == (int(lengths.sum()), len(lengths)),
        stage=UPDATE,
        place="aggregation.Counts",
        evidence=f"{counts} of a mask with {lengths.tolist()} tokens",
    )
    total = product.Counts(tokens=5, sequences=2) + product.Counts(tokens=7, sequences=3)
    yield from expect(
        (total.tokens, total.sequences) == (12, 5),
        stage=UPDATE,
        place="aggregation.Counts",
        evidence=f"a sum of {total}",
    )
    for mode in MODES:
        how = {"loss_scale_factor": SCALE_FACTOR}
        golden = (weights_of(mask, mode) * values.nan_to_num()).sum()
        found = product.agg_loss(values, mask, mode, **how)
        yield from differs(found, golden, stage=UPDATE, place=f"agg_loss.{mode}", what="one micro batch")
        for rows in ((slice(0, 1), slice(1, 4)), tuple(slice(i, i + 1) for i in range(4))):
            shares = [product.agg_loss(values[r], mask[r], mode, counts=counts, **how) for r in rows]
            yield from differs(
                torch.stack(shares).sum(),
                golden,
                stage=UPDATE,
                place=f"agg_loss.{mode}",
                what=f"{len(rows)} micro batches",
                ratios={"micro-batches": len(rows)},
            )
    found = product.masked_mean(values, mask)
    yield from differs(found, values.nan_to_num().sum() / mask.sum(), stage=UPDATE, place="aggregation.masked_mean")
    grown = torch.nn.functional.pad(values, (0, 3), value=math.inf), torch.nn.functional.pad(mask, (0, 3))
    for mode in MODES[:3]:
        yield from differs(
            product.agg_loss(*grown, mode),
            product.agg_loss(values, mask, mode),
            stage=UPDATE,
            place=f"agg_loss.{mode}",
            what="more padding",
        )


def policy(setting: Setting) -> Iterator[Finding]:
    """The clipped policy loss region by region: each bound where it, and only it, decides."""
    from alignment.rl import losses as product

    fields = samples(setting.seed)
    names = ("log_probs", "old_log_probs", "advantages")
    numbers = [fields[name] for name in names]
    mask = fields["response_mask"]
    bounds = {"clip_ratio_low": BOUNDS["low"], "clip_ratio_high": BOUNDS["high"], "clip_ratio_c": BOUNDS["c"]}
    value, slope = by_token(lambda *x: objectives.policy_token(*x, **BOUNDS), numbers, mask)
    regions = [
        [objectives.policy_region(*x, **BOUNDS) if m else "" for *x, m in zip(*row)]
        for row in zip(*(f.tolist() for f in numbers), mask.tolist())
    ]
    for region in ("ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        here = torch.tensor([[int(name == region) for name in row] for row in regions])
        yield from _loss_and_slope(
            lambda x, here=here: product.policy_loss(x, *numbers[1:], here, **bounds)[0],
            fields["log_probs"],
            here,
            (value * here).sum() / here.sum(),
            slope * here / here.sum(),
            place=f"policy_loss.{region}",
        )
    for mode in MODES:
        weight = weights_of(mask, mode)
        yield from _loss_and_slope(
            lambda x, mode=mode: product.policy_loss(
                x, *numbers[1:], mask, loss_agg_mode=mode, loss_scale_factor=SCALE_FACTOR, **bounds
            )[0],
            fields["log_probs"],
            mask,
            (weight * value).sum(),
            weight * slope,
            place=f"policy_loss.{mode}",
        )


def value(setting: Setting) -> Iterator[Finding]:
    """The clipped value loss."""
    from alignment.rl import losses as product

    seed, mask = setting.seed, response_mask()
    old, target, step = (portable_normal((4, 8), seed=seed, stream=f"losses/{n}") for n in ("v", "R", "s"))
    fields = [old + 0.8 * step, old, target]
    per_token, slope = by_token(lambda *x: objectives.value_token(*x, clip=0.5), fields, mask)
    pad = mask == 0
    others = [f.masked_fill(pad, math.nan) for f in fields[1:]]
    for mode in MODES:
        weight = weights_of(mask, mode)
        yield from _loss_and_slope(
            lambda x, mode=mode: product.value_loss(
                x, *others, mask, cliprange_value=0.5, loss_agg_mode=mode, loss_scale_factor=SCALE_FACTOR
            )[0],
            fields[0],
            mask,
            (weight * per_token).sum(),
            weight * slope,
            place=f"value_loss.{mode}",
        )


def actor(setting: Setting) -> Iterator[Finding]:
    """The whole loss of the policy update, term by term, as an engine calls it on the parts of a mini batch."""
    from alignment.rl import aggregation, config
    from alignment.rl import losses as product

    fields = samples(setting.seed)
    mask = fields["response_mask"]
    counts = aggregation.Counts(tokens=int(mask.sum()), sequences=len(mask))
    batch = {name: fields[name] for name in ("old_log_probs", "advantages", "response_mask", "ref_log_prob")}
    numbers = [fields[n] for n in ("log_probs", "old_log_probs", "advantages")]
    base, base_slope = by_token(lambda *x: objectives.policy_token(*x, **BOUNDS), numbers, mask)
    zero = torch.zeros_like(base)
    common = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_scale_factor": SCALE_FACTOR}
    plans: list[tuple[str, str, dict, Tensor, Tensor, Tensor]] = []
    for mode in MODES:
        plans.append(("policy", mode, {}, base, base_slope, zero))
    plans.append(
        ("entropy_coeff", MODES[0], {"entropy_coeff": 0.3}, base - 0.3 * fields["entropy"], base_slope, zero - 0.3)
    )
    for i, kind in enumerate(KL_KINDS):
        kl, kl_slope = by_token(
            lambda a, b, kind=kind: objectives.kl_token(a, b, kind), [fields["log_probs"], fields["ref_log_prob"]], mask
        )
        more = {"use_kl_loss": True, "kl_loss_coef": 0.4, "kl_loss_type": kind}
        plans.append(("kl_loss", MODES[i % 4], more, base + 0.4 * kl, base_slope + 0.4 * kl_slope, zero))
    for term, mode, more, values, slopes, entropy_slope in plans:
        loss = product.ActorLoss(config=config.ActorConfig(loss_agg_mode=mode, **common, **more), counts=counts)
        weight = weights_of(mask, mode)
        log_probs = fields["log_probs"].clone().requires_grad_()
        entropy = fields["entropy"].clone().requires_grad_()
        shares = []
        for rows in (slice(0, 1), slice(1, 4)):
            outputs = {"log_probs": log_probs[rows], "entropy": entropy[rows]}
            shares.append(loss(outputs, {name: f[rows] for name, f in batch.items()})[0])
        total = torch.stack(shares).sum()
        place, ratios = f"actor_loss.{term}", {"micro-batches": 2}
        yield from differs(
            total,
            (weight * values).sum(),
            stage=UPDATE,
            place=place,
            what=f"value, {mode}",
            ratios=ratios,
            scale=float((weight * values).abs().sum()),
        )
        found = torch.autograd.grad(total, (log_probs, entropy), allow_unused=True)
        for name, gradient, golden in zip(("log_probs", "entropy"), found, (weight * slopes, weight * entropy_slope)):
            gradient = torch.zeros_like(golden) if gradient is None else gradient
            yield from differs(
                gradient, golden, stage=UPDATE, place=place, what=f"gradient of {name}, {mode}", ratios=ratios
            )
    critic = config.CriticConfig(cliprange_value=0.5, loss_agg_mode="token-mean")
    old, target, new = (portable_normal((4, 8), seed=setting.seed, stream=f"losses/{n}") for n in ("v", "R", "new"))
    per_token, slope = by_token(lambda *x: objectives.value_token(*x, clip=0.5), [new, old, target], mask)
    loss = product.CriticLoss(config=critic, counts=counts)
    vpreds = new.clone().requires_grad_()
    parts = [
        loss({"values": vpreds[rows]}, {"values": old[rows], "returns": target[rows], "response_mask": mask[rows]})[0]
        for rows in (slice(0, 2), slice(2, 4))
    ]
    total = torch.stack(parts).sum()
    yield from differs(
        total, per_token.sum() / mask.sum(), stage=UPDATE, place="critic_loss", ratios={"micro-batches": 2}
    )
    (gradient,) = torch.autograd.grad(total, vpreds)
    yield from differs(gradient, slope / mask.sum(), stage=UPDATE, place="critic_loss", what="gradient of values")


def divergence(setting: Setting) -> Iterator[Finding]:
    """Every estimator of the KL, value and derivative, near 0, far from it and beyond its clamps."""
    from alignment.rl import kl as product
    from alignment.rl import weighted_kl

    gaps = torch.tensor([-24.0, -9.0, -1.5, -1e-3, 0.0, 1e-3, 0.8, 2.0, 21.0], dtype=torch.float64)
    reference = -2.0 - portable_normal((9,), seed=setting.seed, stream="losses/reference").abs()
    log_probs = reference + gaps
    everywhere = torch.ones(1, 9)
    for kind in KL_KINDS:
        keep = gaps != 0 if kind == "abs" else torch.ones(9, dtype=torch.bool)
        values, slopes = by_token(
            lambda a, b, kind=kind: objectives.kl_token(a, b, kind), [log_probs[None], reference[None]], everywhere
        )
        yield from _vector(
            lambda x, kind=kind: product.kl_penalty(x, reference, kind),
            log_probs,
            values[0],
            slopes[0],
            keep,
            stage=UPDATE,
            place=f"kl_penalty.{kind}",
        )
    behaviour = log_probs - torch.tensor([0.3, -0.8, 1.1] * 3, dtype=torch.float64)
    values, slopes = by_token(
        objectives.weighted_kl_token, [log_probs[None], reference[None], behaviour[None]], everywhere
    )
    yield from _vector(
        lambda x: weighted_kl.weighted_kl(x, reference, behaviour),
        log_probs,
        values[0],
        slopes[0],
        torch.ones(9, dtype=torch.bool),
        stage=UPDATE,
        place="weighted_kl",
    )


def reward_penalty(setting: Setting) -> Iterator[Finding]:
    """The KL inside the reward, and its controller; called twice, on inputs that have to stay what they are."""
    from alignment.rl import kl as product

    fields = samples(setting.seed)
    mask = fields["response_mask"]
    scores = portable_normal((4, 8), seed=setting.seed, stream="losses/scores") * mask
    inputs = [scores, fields["log_probs"], fields["ref_log_prob"], mask]
    before = [t.clone() for t in inputs]
    for kind in ("kl", "abs", "mse", "low_var_kl"):
        values, _ = by_token(lambda a, b, kind=kind: objectives.kl_token(a, b, kind), inputs[1:3], mask)
        golden = before[0] - 0.4 * values * mask
        mean = objectives.mean_by_sequence(values.tolist(), mask.tolist())
        for attempt in ("first", "second"):
            rewards, current = product.apply_kl_penalty(*inputs, kind=kind, kl_coef=0.4)
            place = f"apply_kl_penalty.{kind}"
            yield from differs(rewards, golden, stage=ADVANTAGE, place=f"{place}.rewards", what=f"{attempt} call")
            found = torch.tensor(current, dtype=torch.float64)
            what = f"the KL the controller sees, {attempt} call"
            yield from differs(
                found, torch.tensor(mean, dtype=torch.float64), stage=ADVANTAGE, place=f"{place}.kl", what=what
            )
        for name, now, then in zip(("scores", "old_log_probs", "ref_log_prob"), inputs, before):
            same = torch.equal(now.nan_to_num(), then.nan_to_num())
            yield from expect(same, stage=ADVANTAGE, place=f"apply_kl_penalty.{name}", evidence="changed in place")
    control = product.KlController(kind="adaptive", kl_coef=0.2, target_kl=0.1, horizon=100)
    golden = 0.2
    for kl, count in ((0.35, 8), (0.09, 16), (0.0, 4)):
        control.update(kl, count)
        golden *= 1 + min(max(kl / 0.1 - 1, -0.2), 0.2) * count / 100
    yield from differs(
        torch.tensor(control.value), torch.tensor(golden), stage=ADVANTAGE, place="KlController", bound=1e-6
    )


def _loss_and_slope(
    function: Callable[[Tensor], Tensor], at: Tensor, mask: Tensor, golden: Tensor, slope: Tensor, *, place: str
) -> Iterable[Finding]:
    x = at.clone().requires_grad_()
    loss = function(x)
    yield from differs(loss, golden, stage=UPDATE, place=place, what="value", scale=float(golden.abs()) or 1.0)
    (gradient,) = torch.autograd.grad(loss, x)
    yield from differs(gradient, slope, stage=UPDATE, place=place, what="gradient")


def _vector(
    function: Callable[[Tensor], Tensor], at: Tensor, values: Tensor, slopes: Tensor, keep: Tensor, **where: str
) -> Iterable[Finding]:
    x = at.clone().requires_grad_()
    found = function(x)
    yield from differs(found, values, what="value", **where)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    yield from differs(gradient[keep], slopes[keep], what="gradient", **where)


CHECKS = (
    Check(
        name="losses.aggregation",
        layer="unit-op",
        cost=0.003,
        run=aggregation,
        kept_because="it names the mode, where losses see only its consequences",
    ),
    Check(name="losses.divergence", layer="unit-op", cost=0.005, run=divergence),
    Check(
        name="losses.policy",
        layer="unit-op",
        cost=0.006,
        run=policy,
        kept_because="it names the bound, where the whole loss only differs",
    ),
    Check(
        name="losses.value",
        layer="unit-op",
        cost=0.004,
        run=value,
        kept_because="the value loss is no entry of the catalogue",
    ),
    Check(name="losses.reward_penalty", layer="unit-op", cost=0.005, run=reward_penalty),
    Check(
        name="losses.actor",
        layer="unit-op",
        cost=0.02,
        run=actor,
        kept_because="it names the term, where gradients of parameters only differ",
    ),
)
