from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import philox, random_cut, random_masked, rounding

from alignment.errors import InputError
from alignment.rl.aggregation import LOSS_AGG_MODES, Counts, agg_loss
from alignment.rl.config import ActorConfig, CriticConfig
from alignment.rl.kl import kl_penalty
from alignment.rl.losses import ActorLoss, CriticLoss, policy_loss, value_loss

LAW = settings(max_examples=40, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32)
LOW, HIGH, C = 0.2, 0.28, 3.0


def policy_case(seed, b=5, r=6):
    """Log-ratios wide enough that every branch of the objective is taken."""
    rng = philox(seed)
    _, mask = random_masked(b, r, seed)
    old = torch.from_numpy(-rng.exponential(1.0, (b, r)))
    new = old + torch.from_numpy(rng.normal(0.0, 0.8, (b, r)))
    return new, old, torch.from_numpy(rng.standard_normal((b, r))), mask


def printed_objective(ratio, advantage, low=LOW, high=HIGH, c=C):
    """One token of the objective to be maximised: PPO's min, and dual clip's max for negative advantages."""
    value = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return max(value, c * advantage) if advantage < 0 else value


def numpy_policy_loss(new, old, advantages, mask, objective=printed_objective):
    tokens = [(i, t) for i in range(len(new)) for t in range(new.shape[1]) if mask[i, t]]
    per_token = [-objective(math.exp(float(new[p] - old[p])), float(advantages[p])) for p in tokens]
    return math.fsum(per_token) / len(tokens), math.fsum(map(abs, per_token)) / len(tokens)


def check_policy_loss(objective, seed):
    new, old, advantages, mask = policy_case(seed)
    found, _ = policy_loss(new, old, advantages, mask, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=C)
    expected, magnitude = numpy_policy_loss(new, old, advantages, mask, objective)
    assert abs(found.item() - expected) <= rounding(torch.float64, new.numel(), magnitude)


@LAW
@given(seed=SEEDS)
def test_policy_loss_against_its_cases(seed):
    check_policy_loss(printed_objective, seed)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ratio, a: printed_objective(ratio, a, high=LOW),  # symmetric clip
        lambda ratio, a: printed_objective(ratio, a, low=HIGH),  # bounds swapped
        lambda ratio, a: printed_objective(ratio, a, c=math.inf),  # no dual clip
        lambda ratio, a: max(printed_objective(ratio, a), C * a),  # dual clip for every advantage
        lambda ratio, a: min(max(ratio, 1 - LOW), 1 + HIGH) * a,  # always clipped
        lambda ratio, a: printed_objective(1 / ratio, a),  # ratio upside down
        lambda ratio, a: -printed_objective(ratio, -a),  # wrong sign
    ],
    ids=["symmetric", "swapped", "no dual clip", "dual clip above", "always clipped", "inverse ratio", "sign"],
)
def test_policy_loss_check_sees_a_wrong_objective(wrong):
    with pytest.raises(AssertionError):
        for seed in range(4):
            check_policy_loss(wrong, seed)


def one_token(ratio, advantage):
    log_prob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    loss, metrics = policy_loss(
        log_prob,
        old,
        torch.tensor([[advantage]], dtype=torch.float64),
        mask,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=C,
    )
    loss.backward()
    return loss.item(), log_prob.grad.item(), metrics["pg_clipfrac"].item(), metrics["pg_clipfrac_lower"].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "dual"),
    [
        (1.0, 2.0, -2.0, -2.0, 0.0, 0.0),  # first on-policy update: the gradient is −A
        (1.25, 1.0, -1.25, -1.25, 0.0, 0.0),  # inside clip-higher, outside a symmetric 0.2
        (1.5, 1.0, -1.28, 0.0, 1.0, 0.0),  # clipped above
        (0.5, 1.0, -0.5, -0.5, 0.0, 0.0),  # a good token made less likely is not held back
        (0.5, -1.0, 0.8, 0.0, 1.0, 0.0),  # clipped below
        (2.0, -1.0, 2.0, 2.0, 0.0, 0.0),  # a bad token made more likely is pushed back
        (5.0, -1.0, 3.0, 0.0, 0.0, 1.0),  # dual clip
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, gradient, clipped, dual):
    found = one_token(ratio, advantage)
    eps = torch.finfo(torch.float64).eps * 8
    assert found == (pytest.approx(loss, abs=eps), pytest.approx(gradient, abs=eps), clipped, dual)


def test_on_policy_metrics_vanish_exactly():
    new, _, advantages, mask = policy_case(1)
    loss, metrics = policy_loss(new, new.clone(), advantages, mask)
    assert {name: value.item() for name, value in metrics.items()} == {
        "pg_clipfrac": 0.0,
        "pg_clipfrac_lower": 0.0,
        "ppo_kl": 0.0,
    }
    assert loss.item() == agg_loss(-advantages, mask, "token-mean").item()


@LAW
@given(seed=SEEDS)
def test_policy_metrics_against_numpy(seed):
    new, old, advantages, mask = (x.numpy() for x in policy_case(seed))
    _, metrics = policy_loss(*policy_case(seed), clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=C)
    keep = mask != 0
    ratio, a = np.exp(new - old)[keep], advantages[keep]
    clipped = ((a > 0) & (ratio > 1 + HIGH)) | ((a < 0) & (ratio < 1 - LOW))
    dual = (a < 0) & (ratio > C)
    bound = rounding(torch.float64, keep.sum(), 1.0)
    assert abs(metrics["pg_clipfrac"].item() - clipped.mean()) <= bound
    assert abs(metrics["pg_clipfrac_lower"].item() - dual.mean()) <= bound
    assert abs(metrics["ppo_kl"].item() - (old - new)[keep].mean()) <= bound * np.abs(old - new).sum()


def test_extreme_log_ratios_stay_finite():
    log_prob = torch.tensor([[0.0, -500.0]], requires_grad=True)
    old = torch.tensor([[-500.0, 0.0]])
    loss, metrics = policy_loss(log_prob, old, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2), clip_ratio_c=10.0)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(log_prob.grad).all()
    assert metrics["ppo_kl"].item() == 0.0  # +20 and −20


def test_padding_reaches_neither_loss_nor_gradient():
    new, old, advantages, mask = policy_case(2)
    clean = new.clone().requires_grad_()
    policy_loss(clean, old, advantages, mask)[0].backward()
    for junk in (float("nan"), float("inf"), -float("inf"), 1e30):
        poisoned = [torch.where(mask != 0, x, junk) for x in (new, old, advantages)]
        leaf = poisoned[0].requires_grad_()
        loss, metrics = policy_loss(leaf, poisoned[1], poisoned[2], mask)
        loss.backward()
        assert torch.equal(leaf.grad, clean.grad) and leaf.grad[mask == 0].count_nonzero() == 0
        assert all(torch.isfinite(x) for x in metrics.values())


def value_case(seed, b=5, r=6):
    rng = philox(seed)
    _, mask = random_masked(b, r, seed)
    return *(torch.from_numpy(rng.standard_normal((b, r))) for _ in range(3)), mask


def printed_value(new, old, target, clip=0.5):
    return 0.5 * max((new - target) ** 2, (min(max(new, old - clip), old + clip) - target) ** 2)


def check_value_loss(per_token, seed):
    new, old, target, mask = value_case(seed)
    found, metrics = value_loss(new, old, target, mask, cliprange_value=0.5)
    places = [tuple(p) for p in mask.nonzero().tolist()]
    terms = [per_token(float(new[p]), float(old[p]), float(target[p])) for p in places]
    assert abs(found.item() - math.fsum(terms) / len(terms)) <= rounding(
        torch.float64, len(terms), math.fsum(terms) / len(terms)
    )
    assert metrics["vpred_mean"].item() == pytest.approx(
        float(new[mask != 0].mean()), abs=rounding(torch.float64, 30, float(new.abs().sum()))
    )


@LAW
@given(seed=SEEDS)
def test_value_loss_against_its_definition(seed):
    check_value_loss(printed_value, seed)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda new, old, target: 2 * printed_value(new, old, target),
        lambda new, old, target: printed_value(new, old, target, clip=math.inf),
        lambda new, old, target: 0.5 * (min(max(new, old - 0.5), old + 0.5) - target) ** 2,
        lambda new, old, target: printed_value(new, target, old),
    ],
    ids=["no half", "no clip", "always clipped", "swapped"],
)
def test_value_loss_check_sees_a_wrong_loss(wrong):
    with pytest.raises(AssertionError):
        check_value_loss(wrong, 1)


def test_value_loss_by_hand():
    new = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss, metrics = value_loss(
        new, torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2), cliprange_value=0.5
    )
    loss.backward()
    # token 0 moved beyond the clip: ½ · (0.5 − 1)² without a gradient; token 1: ½ · (0 − 1)²
    assert loss.item() == 0.5 * (0.25 + 1.0) / 2
    assert new.grad.tolist() == [[0.0, -0.5]]
    assert metrics["vf_clipfrac"].item() == 0.5


def actor_case(seed):
    new, old, advantages, mask = policy_case(seed, b=6, r=5)
    rng = philox(seed + 1)
    entropy = torch.from_numpy(rng.uniform(0.0, 2.0, new.shape))
    fields = {
        "old_log_probs": old,
        "advantages": advantages,
        "response_mask": mask,
        "ref_log_prob": old + torch.from_numpy(rng.normal(0.0, 0.3, new.shape)),
    }
    return {"log_probs": new, "entropy": entropy}, fields


def gather(run, tensors, fields, cut, counts):
    """Loss, metrics and gradients of a cut of the batch, added up."""
    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
    total, metrics = 0.0, {}
    for rows in cut:
        loss, share = run({k: v[rows] for k, v in leaves.items()}, {k: v[rows] for k, v in fields.items()})
        loss.backward()
        total += loss.item()
        for name, value in share.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return total, metrics, {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}


class MeanOfMeans(ActorLoss):
    """Each micro batch normalised by its own counts and weighed by its share of the sequences."""

    def __call__(self, outputs, micro_batch):
        own = Counts.of(micro_batch["response_mask"])
        loss, metrics = ActorLoss(config=self.config, counts=own)(outputs, micro_batch)
        weight = own.sequences / self.counts.sequences
        return loss * weight, {k: v * weight for k, v in metrics.items()}


def check_partition(make, mode, seed):
    config = ActorConfig(
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        loss_agg_mode=mode,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coeff=0.01,
        loss_scale_factor=8,
    )
    outputs, fields = actor_case(seed)
    counts = Counts.of(fields["response_mask"])
    run = make(config=config, counts=counts)
    whole = gather(run, outputs, fields, [list(range(6))], counts)
    parts = gather(run, outputs, fields, random_cut(6, seed), counts)
    magnitude = sum(float(x.abs().sum()) for x in (*outputs.values(), *fields.values())) * math.exp(4.0)
    bound = rounding(torch.float64, 30, magnitude)
    assert abs(whole[0] - parts[0]) <= bound
    assert whole[1].keys() == parts[1].keys()
    for name in whole[1]:
        assert abs(whole[1][name] - parts[1][name]) <= bound, name
    for name in outputs:
        assert torch.equal(whole[2][name], parts[2][name]), name


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@LAW
@given(seed=SEEDS)
def test_actor_loss_and_metrics_do_not_depend_on_the_cut(mode, seed):
    check_partition(ActorLoss, mode, seed)


def test_partition_check_sees_a_mean_of_means():
    with pytest.raises(AssertionError):
        check_partition(MeanOfMeans, "token-mean", 2)


@LAW
@given(seed=SEEDS)
def test_critic_loss_and_metrics_do_not_depend_on_the_cut(seed):
    new, old, target, mask = value_case(seed, b=6, r=5)
    counts = Counts.of(mask)
    run = CriticLoss(config=CriticConfig(), counts=counts)
    fields = {"values": old, "returns": target, "response_mask": mask}
    whole = gather(run, {"values": new}, fields, [list(range(6))], counts)
    parts = gather(run, {"values": new}, fields, random_cut(6, seed), counts)
    bound = rounding(torch.float64, 30, float((new.abs() + old.abs() + target.abs()).square().sum()))
    assert set(whole[1]) == {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"}
    assert abs(whole[0] - parts[0]) <= bound
    for name in whole[1]:
        assert abs(whole[1][name] - parts[1][name]) <= bound
    assert torch.equal(whole[2]["values"], parts[2]["values"])


@LAW
@given(seed=SEEDS)
def test_padding_amount_and_order_do_not_matter(seed):
    outputs, fields = actor_case(seed)
    mask = fields["response_mask"]
    run = ActorLoss(config=ActorConfig(use_kl_loss=True, loss_scale_factor=8), counts=Counts.of(mask))
    loss, metrics = run(outputs, fields)
    bound = rounding(torch.float64, 30, float(sum(x.abs().sum() for x in fields.values())) * math.exp(4.0))

    def pad(tensors):
        return {
            k: torch.nn.functional.pad(v, (0, 3), value=0 if k == "response_mask" else -7) for k, v in tensors.items()
        }

    order = philox(seed).permutation(6).tolist()
    for other_outputs, other_fields in (
        (pad(outputs), pad(fields)),
        ({k: v[order] for k, v in outputs.items()}, {k: v[order] for k, v in fields.items()}),
    ):
        other, other_metrics = run(other_outputs, other_fields)
        assert abs(other.item() - loss.item()) <= bound
        for name, value in metrics.items():
            assert abs(other_metrics[name].item() - value.item()) <= bound


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_actor_loss_is_the_sum_of_its_parts(mode):
    outputs, fields = actor_case(3)
    mask = fields["response_mask"]
    counts = Counts.of(mask)
    config = ActorConfig(
        clip_ratio_high=HIGH,
        use_kl_loss=True,
        kl_loss_type="k3",
        kl_loss_coef=0.5,
        entropy_coeff=0.25,
        loss_agg_mode=mode,
        loss_scale_factor=8,
    )
    loss, metrics = ActorLoss(config=config, counts=counts)(outputs, fields)
    how = {"loss_agg_mode": mode, "loss_scale_factor": 8}
    pg, _ = policy_loss(
        outputs["log_probs"], fields["old_log_probs"], fields["advantages"], mask, clip_ratio_high=HIGH, **how
    )
    kl = agg_loss(kl_penalty(outputs["log_probs"], fields["ref_log_prob"], "k3"), mask, **how)
    entropy = agg_loss(outputs["entropy"], mask, **how)
    assert loss.item() == (pg - 0.25 * entropy + 0.5 * kl).item()
    assert metrics["actor/pg_loss"] == pg and metrics["actor/kl_loss"] == kl and metrics["actor/entropy"] == entropy
    assert metrics["actor/loss"] == loss and not metrics["actor/loss"].requires_grad
    k1, _ = ActorLoss(config=dataclasses.replace(config, kl_loss_type="k1"), counts=counts)(outputs, fields)
    assert k1.item() != loss.item()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_critic_loss_follows_its_configuration(mode):
    new, old, target, mask = value_case(3)
    run = CriticLoss(
        config=CriticConfig(loss_agg_mode=mode, cliprange_value=0.25), counts=Counts.of(mask), loss_scale_factor=8
    )
    loss, metrics = run({"values": new}, {"values": old, "returns": target, "response_mask": mask})
    expected, _ = value_loss(new, old, target, mask, cliprange_value=0.25, loss_agg_mode=mode, loss_scale_factor=8)
    assert loss == metrics["critic/vf_loss"] == expected


def test_actor_loss_reports_what_it_is_asked_for():
    outputs, fields = actor_case(4)
    counts = Counts.of(fields["response_mask"])
    plain = {k: v for k, v in fields.items() if k != "ref_log_prob"}
    _, metrics = ActorLoss(config=ActorConfig(), counts=counts)(outputs, plain)
    assert set(metrics) == {
        "actor/loss",
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/entropy",
    }
    with pytest.raises(InputError, match="update_actor, ref_log_prob: the KL loss needs the reference's log-probs"):
        ActorLoss(config=ActorConfig(use_kl_loss=True), counts=counts)(outputs, plain)
    with pytest.raises(
        InputError, match="clip_ratio_c: dual clip bounds the ratio from above; expected > 1; found 1.0"
    ):
        policy_loss(
            outputs["log_probs"],
            fields["old_log_probs"],
            fields["advantages"],
            fields["response_mask"],
            clip_ratio_c=1.0,
        )


def test_kl_loss_vanishes_at_step_zero():
    outputs, fields = actor_case(5)
    fields = {**fields, "old_log_probs": outputs["log_probs"], "ref_log_prob": outputs["log_probs"]}
    for kind in ("k1", "k2", "k3", "abs"):
        config = ActorConfig(use_kl_loss=True, kl_loss_type=kind)
        _, metrics = ActorLoss(config=config, counts=Counts.of(fields["response_mask"]))(outputs, fields)
        assert metrics["actor/kl_loss"].item() == 0.0 and metrics["actor/ppo_kl"].item() == 0.0


def test_prompt_tokens_in_the_mask_change_the_loss():
    """What a mask that covers prompt tokens does: the tokens in front of the response enter sum and count."""
    outputs, fields = actor_case(6)
    mask = torch.zeros_like(fields["response_mask"])
    mask[:, 2:4] = 1
    leaked = mask.clone()
    leaked[:, 1] = 1
    for mode in LOSS_AGG_MODES:
        right, wrong = (
            ActorLoss(config=ActorConfig(loss_agg_mode=mode), counts=Counts.of(m))(
                outputs, {**fields, "response_mask": m}
            )[0]
            for m in (mask, leaked)
        )
        assert right.item() != wrong.item()


@LAW
@given(seed=SEEDS)
def test_packed_tokens_give_the_token_mean_of_the_padded_batch(seed):
    """All response tokens in one row without padding, as engines that remove padding lay them out."""
    new, old, advantages, mask = policy_case(seed)
    loss, metrics = policy_loss(new, old, advantages, mask)
    packed = [x[mask != 0].unsqueeze(0) for x in (new, old, advantages, mask)]
    packed_loss, packed_metrics = policy_loss(*packed)
    bound = rounding(torch.float64, new.numel(), float(advantages.abs().sum()) * math.exp(4.0))
    assert abs(packed_loss.item() - loss.item()) <= bound
    for name, value in metrics.items():
        assert abs(packed_metrics[name].item() - value.item()) <= bound, name


@LAW
@given(seed=SEEDS)
def test_scaling_the_advantages_scales_the_loss(seed):
    new, old, advantages, mask = policy_case(seed)
    loss, metrics = policy_loss(new, old, advantages, mask)
    scaled, same = policy_loss(new, old, 4.0 * advantages, mask)
    assert scaled.item() == 4.0 * loss.item()
    assert {k: v.item() for k, v in same.items()} == {k: v.item() for k, v in metrics.items()}
