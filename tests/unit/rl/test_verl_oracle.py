"""verl's own maths as an oracle of ours: losses, aggregation, KL, advantages, overlong reward, train/rollout gap.

Both compute in float64 from the same inputs; they may differ by the rounding of one sum over the batch. Each comparison
is also made with one deliberately wrong number, which it has to see.
"""

from __future__ import annotations

import asyncio
import types

import numpy as np
import pytest
import torch

from alignment.rl.advantages import gae_advantages, grpo_advantages, rloo_advantages
from alignment.rl.aggregation import LOSS_AGG_MODES, Counts, agg_loss
from alignment.rl.kl import ESTIMATORS, kl_penalty
from alignment.rl.losses import policy_loss, value_loss
from alignment.rl.metrics import log_prob_gap
from alignment.rl.shaping import overlong_reward

pytestmark = pytest.mark.engine

B, R, N = 8, 13, 4
EPS = torch.finfo(torch.float64).eps
# A sum over the batch, twice, and a handful of roundings of each term; values are below 10.
BOUND = 2 * B * R * EPS * 10
# verl divides by n + 1e-8 tokens and by std + 1e-6: the former is a difference in formula.
VERL_TOKEN_EPSILON = 1e-8


@pytest.fixture(scope="module")
def core_algos():
    """verl's maths; importing it takes seconds, which collecting the tests must not."""
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")


def batch(seed: int = 3) -> dict[str, torch.Tensor]:
    """Log-probs whose ratios leave both clip bounds, advantages of both signs, ragged responses, one of them empty."""
    rng = np.random.Generator(np.random.Philox(seed))
    lengths = np.array([13, 1, 7, 0, 5, 13, 9, 2])
    mask = torch.from_numpy((np.arange(R) < lengths[:, None]).astype(np.int64))
    old = torch.from_numpy(rng.uniform(-4.0, -0.1, (B, R)))
    return {
        "mask": mask,
        "old": old,
        "new": old + torch.from_numpy(rng.normal(0.0, 1.2, (B, R))),
        "ref": old + torch.from_numpy(rng.normal(0.0, 0.7, (B, R))),
        "advantages": torch.from_numpy(rng.normal(0.0, 1.0, (B, R))),
        "values": torch.from_numpy(rng.normal(0.0, 1.0, (B, R))),
        "vpreds": torch.from_numpy(rng.normal(0.0, 1.0, (B, R))),
        "rewards": torch.from_numpy(rng.integers(-1, 2, (B, R)).astype(np.float64)) * mask,
    }


def apart(x, y) -> float:
    return float((torch.as_tensor(x, dtype=torch.float64) - torch.as_tensor(y, dtype=torch.float64)).abs().max())


def actor_config(*, low=0.2, high=0.28, c=10.0):
    values = {"clip_ratio": 0.2, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c}
    return types.SimpleNamespace(
        **values, global_batch_info={}, get=lambda name, default=None: values.get(name, default)
    )


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


@pytest.mark.parametrize("c", [1.5, 10.0])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_policy_loss_and_its_gradient(core_algos, mode, c):
    data = batch()
    leaves = [data["new"].clone().requires_grad_() for _ in range(2)]
    loss, metrics = policy_loss(
        leaves[0], data["old"], data["advantages"], data["mask"], clip_ratio_c=c, loss_agg_mode=mode
    )
    verl = core_algos.get_policy_loss_fn("vanilla")
    theirs, their_metrics = verl(
        data["old"], leaves[1], data["advantages"], data["mask"], mode, config=actor_config(c=c)
    )
    # where each sequence has a mean of its own, verl's ε takes a share of 1e-8 of it
    bound = BOUND + (VERL_TOKEN_EPSILON * 10 if mode == "seq-mean-token-mean" else 0.0)
    assert apart(loss.detach(), theirs.detach()) <= bound
    assert apart(gradient(loss, leaves[0]), gradient(theirs, leaves[1])) <= bound
    for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        single = torch.finfo(torch.float32).eps * 20
        assert apart(metrics[name], their_metrics[f"actor/{name}"]) <= single, name
    assert 0 < float(metrics["pg_clipfrac"]) and (c == 10.0 or float(metrics["pg_clipfrac_lower"]) > 0)
    wrong, _ = policy_loss(
        data["new"],
        data["old"],
        data["advantages"],
        data["mask"],
        clip_ratio_high=0.2,
        clip_ratio_c=c,
        loss_agg_mode=mode,
    )
    assert apart(wrong, theirs.detach()) > bound


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_aggregation_over_parts_and_ranks(core_algos, mode):
    data = batch()
    counts = Counts.of(data["mask"])
    bound = BOUND + (VERL_TOKEN_EPSILON * 10 if mode == "seq-mean-token-mean" else 0.0)
    global_counts = {"batch_num_tokens": counts.tokens, "global_batch_size": counts.sequences}
    for part in (slice(0, 3), slice(3, 8)):
        ours = agg_loss(data["advantages"][part], data["mask"][part], mode, counts=counts, loss_scale_factor=11)
        theirs = core_algos.agg_loss(
            data["advantages"][part], data["mask"][part], mode, dp_size=2, loss_scale_factor=11, **global_counts
        )
        # verl multiplies by the ranks because FSDP averages gradients over them
        assert apart(2 * ours, theirs) <= bound
        own = agg_loss(data["advantages"][part], data["mask"][part], mode, loss_scale_factor=11)
        assert apart(2 * own, theirs) > bound, "counts of the part instead of the whole"


@pytest.mark.parametrize("kind", sorted(ESTIMATORS))
def test_kl_estimators_and_their_gradients(core_algos, kind):
    data = batch()
    leaves = [data["new"].clone().requires_grad_() for _ in range(2)]
    ours, theirs = kl_penalty(leaves[0], data["ref"], kind), core_algos.kl_penalty(leaves[1], data["ref"], kind)
    scale = max(1.0, float(theirs.detach().abs().max()))
    assert apart(ours.detach(), theirs.detach()) <= 4 * EPS * scale
    assert apart(gradient(ours.sum(), leaves[0]), gradient(theirs.sum(), leaves[1])) <= 4 * EPS * scale
    swapped = kl_penalty(data["ref"], data["new"], kind)
    if ESTIMATORS[kind] not in ("abs", "k2"):
        assert apart(swapped, theirs.detach()) > 4 * EPS * scale


@pytest.mark.parametrize("far", [-30.0, 30.0])
def test_the_clamps_of_k3(core_algos, far):
    at = torch.zeros(1, dtype=torch.float64)
    there = at + far
    assert apart(kl_penalty(there, at, "k3"), core_algos.kl_penalty(there, at, "k3")) == 0.0


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_advantages(core_algos, by_std):
    data, uid = batch(), ["a", "b", "a", "b", "a", "b", "a", "c"]
    ours, _ = grpo_advantages(data["rewards"], data["mask"], uid, norm_adv_by_std_in_grpo=by_std)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        data["rewards"].clone(), data["mask"], np.array(uid), norm_adv_by_std_in_grpo=by_std
    )
    assert apart(ours[:-1], theirs[:-1]) <= BOUND
    # verl divides the group of one by a float32 of 1 + 1e-6, whatever the dtype of the rewards
    alone = torch.finfo(torch.float32).eps * 10
    assert apart(ours[-1], theirs[-1]) <= (alone if by_std else BOUND)
    wrong, _ = grpo_advantages(data["rewards"], data["mask"], ["a"] * B, norm_adv_by_std_in_grpo=by_std)
    assert apart(wrong, theirs) > BOUND


def test_rloo_advantages(core_algos):
    data, uid = batch(), ["a", "b", "a", "b", "a", "b", "a", "c"]
    ours, _ = rloo_advantages(data["rewards"], data["mask"], uid)
    theirs, _ = core_algos.compute_rloo_outcome_advantage(data["rewards"].clone(), data["mask"], np.array(uid))
    assert apart(ours, theirs) <= BOUND
    assert apart(grpo_advantages(data["rewards"], data["mask"], uid)[0], theirs) > BOUND


def test_generalised_advantages_and_returns(core_algos):
    data = batch()
    ours = gae_advantages(data["rewards"], data["values"], data["mask"], gamma=0.97, lam=0.9)
    theirs = core_algos.compute_gae_advantage_return(data["rewards"], data["values"], data["mask"].double(), 0.97, 0.9)
    on = data["mask"] != 0
    # the recursion sums up to R terms; verl's means divide by n + 1e-8 tokens
    assert apart(ours[0][on], theirs[0][on]) <= R * BOUND + 10 * VERL_TOKEN_EPSILON / int(on.sum())
    assert apart(ours[1][on], theirs[1][on]) <= R * BOUND
    wrong = gae_advantages(data["rewards"], data["values"], data["mask"], gamma=0.97, lam=1.0)
    assert apart(wrong[1][on], theirs[1][on]) > R * BOUND


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss(core_algos, mode):
    data = batch()
    # verl's mask may be a number or a truth value; its value loss multiplies with it
    ours, metrics = value_loss(data["vpreds"], data["values"], data["advantages"], data["mask"], loss_agg_mode=mode)
    theirs, clipped = core_algos.compute_value_loss(
        data["vpreds"], data["advantages"], data["values"], data["mask"], 0.5, mode
    )
    bound = BOUND + (VERL_TOKEN_EPSILON * 10 if mode == "seq-mean-token-mean" else 0.0)
    assert apart(ours, theirs) <= bound
    assert apart(metrics["vf_clipfrac"], clipped) <= torch.finfo(torch.float32).eps
    wrong, _ = value_loss(
        data["vpreds"], data["values"], data["advantages"], data["mask"], cliprange_value=0.2, loss_agg_mode=mode
    )
    assert apart(wrong, theirs) > bound


def dapo_reward(length: int, *, score: float, limit: int, buffer: int, factor: float) -> float:
    """What verl's DAPO reward manager gives a response of this length."""
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    kwargs = {"overlong_buffer_cfg": {"enable": True, "len": buffer, "penalty_factor": factor, "log": True}}
    config = OmegaConf.create({"reward": {"reward_kwargs": {**kwargs, "max_resp_len": limit}}})
    tokenizer = types.SimpleNamespace(decode=lambda ids, **_: "text")
    mask = torch.zeros(1, 2 + limit, dtype=torch.int64)
    mask[0, : 2 + length] = 1
    data = DataProto.from_dict(
        tensors={"responses": torch.ones(1, limit, dtype=torch.int64), "attention_mask": mask},
        non_tensors={
            "data_source": np.array(["x"], dtype=object),
            "reward_model": np.array([{"ground_truth": "1"}], dtype=object),
        },
    )

    async def run():
        manager = DAPORewardManager(config, tokenizer, lambda **_: score)
        manager.loop = asyncio.get_running_loop()
        return await manager.run_single(data)

    return float(asyncio.run(run())["reward_score"])


@pytest.mark.parametrize("length", range(1, 11))
def test_the_overlong_reward_of_the_dapo_manager(core_algos, length):
    theirs = dapo_reward(length, score=1.0, limit=10, buffer=4, factor=0.7)
    # verl's length is an int64 tensor, so its quotient is a float32
    bound = 4 * torch.finfo(torch.float32).eps
    ours = 1.0 + overlong_reward(length, max_response_length=10, buffer_len=4, penalty_factor=0.7)
    assert ours == pytest.approx(theirs, abs=bound)
    wrong = 1.0 + overlong_reward(length, max_response_length=10, buffer_len=5, penalty_factor=0.7)
    assert (abs(wrong - theirs) > bound) == (5 < length < 10), "at both ends of the buffer its width does not matter"


def test_the_gap_between_trainer_and_engine(core_algos):
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    data = batch()
    new = data["old"] + 0.01 * (data["new"] - data["old"])
    ours = log_prob_gap(new, data["old"], data["mask"])
    proto = DataProto.from_dict(
        tensors={
            "old_log_probs": new, "rollout_log_probs": data["old"], "response_mask": data["mask"],
            "responses": torch.zeros(B, R, dtype=torch.int64),
        }
    )  # fmt: skip
    debug = calculate_debug_metrics(proto)
    name = "training/rollout_actor_probs_pearson_corr"
    assert ours[name] == pytest.approx(debug[name], abs=BOUND)
    # verl's other three are about probabilities, not log-probs
    on = data["mask"] != 0
    assert debug["training/rollout_probs_diff_max"] == pytest.approx(
        float((new.exp() - data["old"].exp()).abs()[on].max()), abs=BOUND
    )
    keep = [i for i in range(B) if on[i].any()]
    metrics = compute_offpolicy_metrics(new[keep], data["old"][keep], on[keep])
    assert -ours["training/rollout_log_probs_diff_mean"] == pytest.approx(float(metrics["kl"]), abs=BOUND)
    assert ours["training/rollout_log_probs_abs_diff_mean"] != pytest.approx(abs(float(metrics["kl"])), abs=BOUND)
