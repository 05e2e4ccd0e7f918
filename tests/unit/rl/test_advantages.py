from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import build_batch, philox, random_masked, rounding

from alignment.errors import InputError
from alignment.rl.advantages import compute_advantages, gae_advantages, grpo_advantages, masked_whiten, rloo_advantages
from alignment.rl.config import AlgorithmConfig, KlControlConfig

LAW = settings(max_examples=40, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32)
EPSILON = 1e-6


def outcome(b, r, seed):
    """Rewards on the last token of random responses, in groups of uneven size that are not adjacent."""
    rng = philox(seed)
    _, mask = random_masked(b, r, seed)
    rewards = torch.zeros(b, r, dtype=torch.float64)
    rewards[torch.arange(b), mask.sum(1) - 1] = torch.from_numpy(rng.standard_normal(b))
    return rewards, mask, [f"g{i}" for i in rng.integers(0, 3, b)]


def numpy_grpo(rewards, mask, uid, *, ddof=1, normalise=True):
    """Standardised by SciPy's z-scores per group."""
    scores = (rewards * mask).sum(1).numpy()
    result = np.zeros(len(scores))
    for g in set(uid):
        rows = [i for i, u in enumerate(uid) if u == g]
        values = scores[rows]
        if len(rows) == 1:
            result[rows] = values / (1 + EPSILON) if normalise else values
        elif normalise:
            std = values.std(ddof=ddof)
            result[rows] = scipy.stats.zscore(values, ddof=ddof) * std / (std + EPSILON)
        else:
            result[rows] = values - values.mean()
    return result[:, None] * mask.numpy()


def check_grpo(oracle, seed, normalise=True):
    rewards, mask, uid = outcome(8, 5, seed)
    found, returns = grpo_advantages(rewards, mask, uid, norm_adv_by_std_in_grpo=normalise)
    assert torch.equal(found, returns)
    # Standardising divides by a spread that may be small, which magnifies the rounding of the deviations.
    scores = (rewards * mask).sum(1)
    spread = min(float(scores[[u == g for u in uid]].std()) for g in set(uid) if uid.count(g) > 1) if normalise else 1.0
    bound = rounding(torch.float64, 16, float(rewards.abs().sum()) * max(1.0, 1 / spread) ** 2)
    assert np.abs(found.numpy() - oracle(rewards, mask, uid, normalise=normalise)).max() <= bound


@pytest.mark.parametrize("normalise", [True, False])
@LAW
@given(seed=SEEDS)
def test_grpo_is_the_group_z_score(normalise, seed):
    check_grpo(numpy_grpo, seed, normalise)


def test_grpo_check_sees_the_biased_standard_deviation():
    with pytest.raises(AssertionError):
        check_grpo(lambda *a, **k: numpy_grpo(*a, ddof=0, **k), 1)


def test_grpo_check_sees_groups_that_are_mixed_up():
    with pytest.raises(AssertionError):
        check_grpo(lambda rewards, mask, uid, **k: numpy_grpo(rewards, mask, ["g"] * len(uid), **k), 1)


def test_grpo_by_hand():
    rewards = torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    plain, _ = grpo_advantages(rewards, mask, ["a", "a", "b"], norm_adv_by_std_in_grpo=False)
    assert plain.tolist() == [[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [3.0, 3.0, 3.0]]
    normed, _ = grpo_advantages(rewards, mask, ["a", "a", "b"], epsilon=0.0)
    assert normed.tolist()[0] == pytest.approx([2**-0.5, 2**-0.5, 0.0], abs=torch.finfo(torch.float32).eps)
    assert normed.tolist()[2] == [3.0, 3.0, 3.0]
    assert normed.dtype == torch.float32


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1.0 + 1 / 3])
@pytest.mark.parametrize("n", [2, 3, 7])
def test_equal_rewards_have_exactly_no_advantage(value, n):
    rewards, mask = torch.full((n, 1), value, dtype=torch.float64), torch.ones(n, 1)
    for estimator in (grpo_advantages, rloo_advantages):
        assert estimator(rewards, mask, ["g"] * n)[0].count_nonzero() == 0


@LAW
@given(seed=SEEDS)
def test_rloo_is_leave_one_out(seed):
    rewards, mask, uid = outcome(8, 5, seed)
    found, _ = rloo_advantages(rewards, mask, uid)
    scores = (rewards * mask).sum(1)
    bound = rounding(torch.float64, 16, float(scores.abs().sum()))
    for i, name in enumerate(uid):
        others = [float(scores[j]) for j, u in enumerate(uid) if u == name and j != i]
        expected = float(scores[i]) - (np.mean(others) if others else 0.0)
        assert (found[i] - float(expected) * mask[i].double()).abs().max() <= bound


@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages])
@LAW
@given(seed=SEEDS)
def test_group_advantages_laws(estimator, seed):
    rewards, mask, uid = outcome(8, 5, seed)
    found, _ = estimator(rewards, mask, uid)
    order = philox(seed + 1).permutation(8).tolist()
    permuted, _ = estimator(rewards[order], mask[order], [uid[i] for i in order])
    scores = (rewards * mask).sum(1)
    groups = [scores[[u == g for u in uid]] for g in set(uid)]
    spread = min([1.0] + [float(x.std()) for x in groups if len(x) > 1])
    bound = rounding(torch.float64, 16, float(scores.abs().sum()) / spread**2)
    assert (permuted - found[order]).abs().max() <= bound  # permutation equivariance
    wide, _ = estimator(torch.nn.functional.pad(rewards, (0, 2), value=9.0), torch.nn.functional.pad(mask, (0, 2)), uid)
    assert torch.equal(wide[:, :5], found) and wide[:, 5:].count_nonzero() == 0  # padding
    for name in set(uid):
        rows = [u == name for u in uid]
        if sum(rows) > 1:
            assert (
                found[rows].gather(1, (mask[rows].sum(1) - 1).unsqueeze(1)).sum().abs() <= bound
            )  # sums to 0 over a group


def test_scale_and_shift_laws_are_exact_for_powers_of_two():
    rewards, mask, uid = outcome(8, 5, 3)
    plain, _ = grpo_advantages(rewards, mask, uid, norm_adv_by_std_in_grpo=False)
    scaled, _ = grpo_advantages(4 * rewards, mask, uid, norm_adv_by_std_in_grpo=False)
    assert torch.equal(scaled, 4 * plain)
    standard, _ = grpo_advantages(rewards, mask, uid, epsilon=0.0)
    rescaled, _ = grpo_advantages(4 * rewards, mask, uid, epsilon=0.0)
    groups_of_one = [uid.count(u) == 1 for u in uid]
    keep = [not x for x in groups_of_one]
    assert torch.equal(rescaled[keep], standard[keep])


def recursive_gae(rewards, values, mask, gamma, lam):
    """The definition as a double sum: A_t = Σ_l (γλ)^l δ_{t+l}, returns A + V."""
    b, r = rewards.shape
    advantages = np.zeros((b, r))
    for i in range(b):
        steps = [t for t in range(r) if mask[i, t]]
        for a, t in enumerate(steps):
            for k, u in enumerate(steps[a:]):
                later = steps[a + k + 1] if a + k + 1 < len(steps) else None
                following = values[i, later] if later is not None else 0.0
                delta = rewards[i, u] + gamma * following - values[i, u]
                advantages[i, t] += (gamma * lam) ** k * delta
    return advantages, (advantages + values) * mask


def check_gae(estimate, seed, gamma=0.9, lam=0.8):
    rewards, mask = random_masked(4, 6, seed)
    values, _ = random_masked(4, 6, seed + 1)
    mask[:, 1] *= seed % 2  # every other seed has a token in the middle that the policy did not write
    rewards, values = rewards * mask, values * mask
    found = estimate(rewards, values, mask, gamma=gamma, lam=lam)
    expected = recursive_gae(rewards.numpy(), values.numpy(), mask.numpy(), gamma, lam)
    bound = rounding(torch.float64, 36, float(rewards.abs().sum() + 2 * values.abs().sum()))
    for a, e in zip(found, expected):
        assert np.abs(a.numpy() - e).max() <= bound


def unwhitened(*args, **kwargs):
    return gae_advantages(*args, **kwargs, whiten=False)


@LAW
@given(seed=SEEDS)
def test_gae_is_the_sum_of_its_definition(seed):
    check_gae(unwhitened, seed)


def test_gae_check_sees_a_value_bootstrapped_from_padding():
    def bootstrapped(rewards, values, mask, *, gamma, lam):
        return gae_advantages(
            rewards, torch.where(mask != 0, values, 1.0), torch.ones_like(mask), gamma=gamma, lam=lam, whiten=False
        )

    with pytest.raises(AssertionError):
        check_gae(bootstrapped, 1)


def test_gae_check_sees_a_swapped_lambda():
    with pytest.raises(AssertionError):
        check_gae(lambda *a, gamma, lam: unwhitened(*a, gamma=lam, lam=gamma), 1)


def test_gae_by_hand():
    rewards = torch.tensor([[0.0, 1.0, 7.0]])
    values = torch.tensor([[0.5, 0.25, 7.0]])
    mask = torch.tensor([[1, 1, 0]])
    advantages, returns = gae_advantages(rewards, values, mask, gamma=1.0, lam=0.5, whiten=False)
    # δ = (0 + 0.25 − 0.5, 1 − 0.25) = (−0.25, 0.75); A = (−0.25 + 0.5 · 0.75, 0.75)
    assert advantages.tolist() == [[0.125, 0.75, 0.0]]
    assert returns.tolist() == [[0.625, 1.0, 0.0]]


def test_gae_with_lambda_one_is_the_return_and_with_zero_the_td_error():
    rewards, mask = random_masked(3, 4, 5)
    values, _ = random_masked(3, 4, 6)
    bound = rounding(torch.float64, 12, float(rewards.abs().sum() + values.abs().sum()))
    _, returns = unwhitened(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = (rewards * mask).flip(1).cumsum(1).flip(1) * mask
    assert (returns - to_go).abs().max() <= bound
    td, _ = unwhitened(rewards, values, mask, gamma=1.0, lam=0.0)
    after = torch.nn.functional.pad(values * mask, (0, 1))[:, 1:]
    assert (td - (rewards + after - values) * mask).abs().max() <= bound


@LAW
@given(seed=SEEDS)
def test_whitening(seed):
    values, mask = random_masked(4, 5, seed)
    mask[0, :2] = 1
    found = masked_whiten(values, mask)
    inside = values[mask != 0]
    expected = scipy.stats.zscore(inside.numpy(), ddof=1) * np.sqrt(
        inside.numpy().var(ddof=1) / (inside.numpy().var(ddof=1) + 1e-8)
    )
    spread = min(1.0, float(inside.std()))
    assert np.abs(found[mask != 0].numpy() - expected).max() <= rounding(
        torch.float64, 40, float(inside.abs().sum()) / spread**2
    )
    assert found[mask == 0].count_nonzero() == 0
    poisoned = torch.where(mask != 0, values, float("nan"))
    assert torch.equal(masked_whiten(poisoned, mask), found)


def test_whitened_advantages_leave_the_returns_alone():
    rewards, mask = random_masked(4, 5, 2)
    values, _ = random_masked(4, 5, 3)
    white, returns = gae_advantages(rewards, values, mask)
    plain, same = unwhitened(rewards, values, mask)
    assert torch.equal(returns, same)
    assert torch.equal(white, masked_whiten(plain, mask))


def test_stage_adds_its_fields():
    batch = build_batch().drop(["token_level_rewards", "advantages", "returns"])
    grpo, metrics = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo"))
    assert metrics == {}
    assert torch.equal(grpo["token_level_rewards"], batch["token_level_scores"])
    assert torch.equal(
        grpo["advantages"], grpo_advantages(batch["token_level_scores"], batch["response_mask"], batch["uid"])[0]
    )
    rloo, _ = compute_advantages(batch, AlgorithmConfig(adv_estimator="rloo"))
    assert torch.equal(
        rloo["advantages"], rloo_advantages(batch["token_level_scores"], batch["response_mask"], batch["uid"])[0]
    )
    plain, _ = compute_advantages(batch, AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    assert not torch.equal(plain["advantages"], grpo["advantages"])


def test_stage_with_gae_and_kl_in_the_reward():
    batch = build_batch()
    settings_ = AlgorithmConfig(
        adv_estimator="gae", lam=0.5, use_kl_in_reward=True, kl_penalty="k1", kl_ctrl=KlControlConfig(kl_coef=0.5)
    )
    found, metrics = compute_advantages(batch, settings_)
    difference = batch["old_log_probs"] - batch["ref_log_prob"]
    rewards = batch["token_level_scores"] - 0.5 * difference
    assert torch.equal(found["token_level_rewards"], torch.where(batch["response_mask"] != 0, rewards, 0.0))
    advantages, returns = gae_advantages(rewards, batch["values"], batch["response_mask"], lam=0.5)
    assert torch.equal(found["advantages"], advantages) and torch.equal(found["returns"], returns)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    _, steered = compute_advantages(batch, settings_, kl_coef=0.25)
    assert steered["actor/reward_kl_penalty_coeff"] == 0.25
    assert steered["actor/reward_kl_penalty"] == metrics["actor/reward_kl_penalty"]


def test_errors():
    with pytest.raises(InputError, match="uid: there is one uid per sample; expected 2; found 1"):
        grpo_advantages(torch.zeros(2, 1), torch.ones(2, 1), ["a"])
    with pytest.raises(InputError, match="whitening needs a variance; expected at least two response tokens; found 1"):
        gae_advantages(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
