"""Advantages and returns against sums over tokens and groups: uneven groups, a group of one, equal rewards, padding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from alignment.faults.check import HALF_THE_DIGITS, Check, Finding, Setting, differs, expect
from alignment.faults.checks.losses import response_mask
from alignment.faults.reference import objectives
from alignment.numerics.random import portable_normal

STAGE = "advantage"
GROUPS = ("a", "b", "a", "c", "b", "a", "d", "d")


def _mask() -> Tensor:
    return torch.cat([response_mask(), response_mask().flip(0)])


def _on_padding(result: Tensor, mask: Tensor, place: str) -> list[Finding]:
    worst = result[mask == 0].abs().max()
    return expect(bool(worst == 0), stage=STAGE, place=place, evidence=f"{float(worst):.3g} on padding instead of 0")


def groups(setting: Setting) -> Iterator[Finding]:
    """Group-relative and leave-one-out advantages."""
    from alignment.rl import advantages as product

    mask = _mask()
    rewards = portable_normal((8, 8), seed=setting.seed, stream="advantages/rewards")
    totals = [math.fsum(x for x, m in zip(row, keep) if m) for row, keep in zip(rewards.tolist(), mask.tolist())]
    # group d: equal totals, which are no signal at all
    rewards[7] = 0
    first = int(mask[7].nonzero()[0])
    rewards[7, first] = totals[7] = totals[6]
    poisoned = rewards.masked_fill(mask == 0, math.nan)
    golden = {
        "grpo": (objectives.group_advantages(totals, GROUPS, normalise=True), {"norm_adv_by_std_in_grpo": True}),
        "grpo.unnormalised": (
            objectives.group_advantages(totals, GROUPS, normalise=False),
            {"norm_adv_by_std_in_grpo": False},
        ),
        "rloo": (objectives.leave_one_out(totals, GROUPS), {}),
    }
    for name, (expected, settings) in golden.items():
        function = product.rloo_advantages if name == "rloo" else product.grpo_advantages
        advantages, returns = function(poisoned, mask, GROUPS, **settings)
        spread = torch.tensor(expected, dtype=torch.float64)[:, None] * mask
        place = f"{name.split('.')[0]}_advantages"
        yield from _on_padding(advantages, mask, place)
        # equal rewards may leave rounding, which the division by 1e-6 would raise
        yield from differs(advantages[:6], spread[:6], stage=STAGE, place=place)
        yield from expect(
            float(advantages[6:].abs().max()) < HALF_THE_DIGITS,
            stage=STAGE,
            place=place,
            evidence=f"{float(advantages[6:].abs().max()):.3g} for a group of equal rewards",
        )
        yield from differs(returns, advantages, stage=STAGE, place=f"{place}.returns")
        order = torch.arange(7, -1, -1)
        moved = function(poisoned[order], mask[order], [GROUPS[i] for i in order.tolist()], **settings)[0]
        yield from differs(moved[order][:6], advantages[:6], stage=STAGE, place=place, what="samples in another order")


def estimation(setting: Setting) -> Iterator[Finding]:
    """Generalised advantage estimation with γ and λ below 1, whitened and not, across a hole of the mask."""
    from alignment.rl import advantages as product

    mask = _mask()
    rewards, values = (portable_normal((8, 8), seed=setting.seed, stream=f"advantages/{n}") for n in ("r", "v"))
    for gamma, lam in ((1.0, 1.0), (0.95, 0.9)):
        raw = objectives.gae(rewards.tolist(), values.tolist(), mask.tolist(), gamma=gamma, lam=lam)
        golden = torch.tensor(raw, dtype=torch.float64)
        poisoned = [x.masked_fill(mask == 0, math.nan) for x in (rewards, values)]
        for whiten in (False, True):
            expected = torch.tensor(objectives.whitened(raw, mask.tolist()), dtype=torch.float64) if whiten else golden
            found, returns = product.gae_advantages(*poisoned, mask, gamma=gamma, lam=lam, whiten=whiten)
            place = "gae_advantages.masked_whiten" if whiten else "gae_advantages"
            yield from _on_padding(found, mask, place)
            yield from differs(found, expected, stage=STAGE, place=place)
            yield from _on_padding(returns, mask, "gae_advantages.returns")
            yield from differs(returns, (golden + values) * mask, stage=STAGE, place="gae_advantages.returns")


def whitening(setting: Setting) -> Iterator[Finding]:
    """Whitening by itself."""
    from alignment.rl import advantages as product

    mask = _mask()
    drawn = portable_normal((8, 8), seed=setting.seed, stream="advantages/w")
    # the second variance is of the size of the constant beneath the root
    for values in (3.0 + drawn, 1e-4 * drawn):
        found = product.masked_whiten(values.masked_fill(mask == 0, 0.0), mask)
        yield from _on_padding(found, mask, "masked_whiten")
        golden = torch.tensor(objectives.whitened(values.tolist(), mask.tolist()), dtype=torch.float64)
        yield from differs(found, golden, stage=STAGE, place="masked_whiten")


def stage(setting: Setting) -> Iterator[Finding]:
    """The stage as the driver calls it, for every estimator and with the KL in the reward; no field is changed in
    place.
    """
    from alignment.rl import advantages as product
    from alignment.rl import batch as batches
    from alignment.rl import config

    mask = _mask()
    scores, values, old, reference = (
        portable_normal((8, 8), seed=setting.seed, stream=f"advantages/stage/{n}") for n in ("s", "v", "o", "r")
    )
    scores, old = scores * mask, old - 2
    fields = {
        "response_mask": mask,
        "token_level_scores": scores,
        "values": values,
        "old_log_probs": old,
        "ref_log_prob": old + reference,
    }
    batch = batches.Batch({k: v.clone() for k, v in fields.items()}, {"uid": list(GROUPS)})
    for estimator in ("grpo", "rloo", "gae"):
        for penalised in (False, True):
            algorithm = config.AlgorithmConfig(
                adv_estimator=estimator, use_kl_in_reward=penalised, gamma=0.97, lam=0.9, kl_penalty="kl"
            )
            done, _ = product.compute_advantages(batch, algorithm, kl_coef=0.3)
            rewards = scores - 0.3 * (fields["old_log_probs"] - fields["ref_log_prob"]) * mask if penalised else scores
            totals = [math.fsum(row) for row in (rewards * mask).tolist()]
            if estimator == "gae":
                raw = objectives.gae(rewards.tolist(), values.tolist(), mask.tolist(), gamma=0.97, lam=0.9)
                golden = torch.tensor(objectives.whitened(raw, mask.tolist()), dtype=torch.float64)
            else:
                per_sample = (
                    objectives.leave_one_out(totals, GROUPS)
                    if estimator == "rloo"
                    else objectives.group_advantages(totals, GROUPS, normalise=True)
                )
                golden = torch.tensor(per_sample, dtype=torch.float64)[:, None] * mask
            where = {"stage": STAGE, "what": f"{estimator}, KL in the reward: {penalised}"}
            yield from differs(done["token_level_rewards"], rewards, place="token_level_rewards", **where)
            yield from differs(done["advantages"], golden, place=f"compute_advantages.{estimator}", **where)
            for name, then in fields.items():
                same = torch.equal(batch[name], then)
                yield from expect(same, stage=STAGE, place=f"compute_advantages.{name}", evidence="changed in place")


CHECKS = (
    Check(
        name="advantages.whitening",
        layer="unit-op",
        cost=0.001,
        run=whitening,
        kept_because="the operator by itself, where the stage sees only its consequences",
    ),
    Check(
        name="advantages.groups",
        layer="unit-op",
        cost=0.004,
        run=groups,
        kept_because="group statistics are no entry of the catalogue",
    ),
    Check(
        name="advantages.estimation",
        layer="unit-op",
        cost=0.006,
        run=estimation,
        kept_because="γ and λ below 1 and masks with holes are no entry of the catalogue",
    ),
    Check(
        name="advantages.stage",
        layer="unit-op",
        cost=0.01,
        run=stage,
        kept_because="the estimators as the driver puts them together",
    ),
)
