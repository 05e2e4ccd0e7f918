from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import build_batch, philox, random_cut, random_masked, rounding

from alignment.errors import InputError
from alignment.rl.aggregation import Counts
from alignment.rl.config import ActorConfig, CriticConfig, FilterGroupsConfig
from alignment.rl.filtering import DynamicSampling
from alignment.rl.losses import ActorLoss, CriticLoss
from alignment.rl.metrics import METRICS, add_shares, batch_metrics, log_prob_gap, mean_over_updates, sampling_metrics

LAW = settings(max_examples=40, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32)
GAP = "training/rollout_log_probs_"
PEARSON = "training/rollout_actor_probs_pearson_corr"


def gap_case(seed, b=4, r=6):
    rng = philox(seed)
    _, mask = random_masked(b, r, seed)
    mask[0, :3] = 1
    train = torch.from_numpy(-rng.exponential(1.0, (b, r)))
    return train, train + torch.from_numpy(rng.normal(0.0, 0.05, (b, r))), mask


def check_gap(compute, seed):
    train, rollout, mask = gap_case(seed)
    found = compute(train, rollout, mask)
    x, y = train[mask != 0].numpy(), rollout[mask != 0].numpy()
    bound = rounding(torch.float64, x.size, float(np.abs(x).sum() + np.abs(y).sum()))
    assert abs(found[GAP + "abs_diff_mean"] - np.abs(x - y).mean()) <= bound
    assert abs(found[GAP + "diff_mean"] - (x - y).mean()) <= bound
    assert found[GAP + "diff_max"] == np.abs(x - y).max()
    p, q = np.exp(x), np.exp(y)
    spread = p.std() * q.std()
    assert abs(found[PEARSON] - scipy.stats.pearsonr(p, q).statistic) <= bound / spread


@LAW
@given(seed=SEEDS)
def test_gap_against_scipy(seed):
    check_gap(log_prob_gap, seed)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda train, rollout, mask: log_prob_gap(rollout, train, mask),
        lambda train, rollout, mask: log_prob_gap(train, rollout, torch.ones_like(mask)),
        lambda train, rollout, mask: {
            **log_prob_gap(train, rollout, mask),
            PEARSON: float(np.corrcoef(train[mask != 0].numpy(), rollout[mask != 0].numpy())[0, 1]),
        },
        lambda train, rollout, mask: {
            **log_prob_gap(train, rollout, mask),
            GAP + "abs_diff_mean": math.fsum(
                log_prob_gap(train[i : i + 1], rollout[i : i + 1], mask[i : i + 1])[GAP + "abs_diff_mean"]
                for i in range(4)
            )
            / 4,
        },
    ],
    ids=["sign", "padding", "correlation of log-probs", "mean of means"],
)
def test_gap_check_sees_a_wrong_metric(wrong):
    with pytest.raises(AssertionError):
        check_gap(wrong, 1)


@LAW
@given(seed=SEEDS)
def test_gap_is_bitwise_free_of_order_and_padding(seed):
    train, rollout, mask = gap_case(seed)
    plain = log_prob_gap(train, rollout, mask)
    order = philox(seed).permutation(4).tolist()
    assert log_prob_gap(train[order], rollout[order], mask[order]) == plain
    wide = [torch.nn.functional.pad(x, (0, 2), value=v) for x, v in ((train, float("nan")), (rollout, 1.0), (mask, 0))]
    assert log_prob_gap(*wide) == plain


def test_gap_by_hand_and_at_its_edges():
    train, rollout = torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-1.5, -1.0, 5.0]])
    mask = torch.tensor([[1, 1, 0]])
    found = log_prob_gap(train, rollout, mask)
    assert (found[GAP + "abs_diff_mean"], found[GAP + "diff_mean"], found[GAP + "diff_max"]) == (0.75, -0.25, 1.0)
    same = log_prob_gap(train, train, mask)
    assert same == {GAP + "abs_diff_mean": 0.0, GAP + "diff_mean": 0.0, GAP + "diff_max": 0.0, PEARSON: 1.0}
    assert PEARSON not in log_prob_gap(torch.zeros(1, 3), rollout, mask)
    with pytest.raises(InputError, match="there are no response tokens"):
        log_prob_gap(train, rollout, torch.zeros(1, 3))
    with pytest.raises(InputError, match="a log-prob is not finite"):
        log_prob_gap(train, torch.full((1, 3), -math.inf), mask)


def test_batch_metrics_by_hand():
    batch = build_batch(lengths=(3, 5, 1, 4), prompt_lengths=(2, 4))
    metrics = batch_metrics(batch)
    assert metrics["response_length/mean"] == 13 / 4
    assert (metrics["response_length/min"], metrics["response_length/max"]) == (1, 5)
    assert metrics["response_length/clip_ratio"] == 0.25
    assert (metrics["prompt_length/mean"], metrics["prompt_length/min"], metrics["prompt_length/max"]) == (
        3.0,
        2.0,
        4.0,
    )
    assert (metrics["critic/score/mean"], metrics["critic/rewards/max"]) == (0.5, 1.0)
    inside = batch["advantages"][batch["response_mask"] != 0].numpy()
    assert abs(metrics["critic/advantages/mean"] - inside.mean()) <= rounding(
        torch.float64, 13, float(np.abs(inside).sum())
    )
    assert metrics["critic/advantages/max"] == inside.max()
    assert "critic/returns/mean" not in batch_metrics(batch.drop(["returns"]))


@LAW
@given(seed=SEEDS)
def test_batch_metrics_are_bitwise_free_of_order_and_padding(seed):
    batch = build_batch(seed=seed)
    order = philox(seed).permutation(4).tolist()
    assert batch_metrics(batch[order]) == batch_metrics(batch)
    per_token = [k for k, v in batch.tensors.items() if v.shape[1] == 5]
    longer = {k: torch.nn.functional.pad(batch[k], (0, 2)) for k in (*per_token, "attention_mask")}
    padded = batch.add(longer, info={"max_response_length": 5})
    assert batch_metrics(padded) == batch_metrics(batch.add(info={"max_response_length": 5}))


def test_updates_weigh_the_same_and_shares_add_up():
    assert add_shares([{"a": 0.25, "b": 1.0}, {"a": 0.5}]) == {"a": 0.75, "b": 1.0}
    assert mean_over_updates([{"a": 1.0}, {"a": 4.0}]) == {"a": 2.5}
    with pytest.raises(InputError, match="a step without updates has no update metrics"):
        mean_over_updates([])
    with pytest.raises(
        InputError, match=r"update 1 reports other metrics than update 0; expected \['a'\]; found \['b'\]"
    ):
        mean_over_updates([{"a": 1.0}, {"b": 1.0}])


@LAW
@given(seed=SEEDS)
def test_shares_of_any_cut_give_the_metrics_of_the_whole(seed):
    rng = philox(seed)
    values, mask = random_masked(6, 5, seed)
    outputs = {"log_probs": values - 3.0, "entropy": values.abs()}
    fields = {
        "old_log_probs": values - 3.0 + torch.from_numpy(rng.normal(0, 0.3, (6, 5))),
        "advantages": values.flip(0),
        "response_mask": mask,
    }
    run = ActorLoss(config=ActorConfig(), counts=Counts.of(mask))

    def share(rows):
        return {
            k: float(v)
            for k, v in run({k: v[rows] for k, v in outputs.items()}, {k: v[rows] for k, v in fields.items()})[
                1
            ].items()
        }

    whole, parts = share(list(range(6))), add_shares(share(rows) for rows in random_cut(6, seed))
    bound = rounding(torch.float64, 30, float(values.abs().sum()) * math.exp(3.0))
    assert whole.keys() == parts.keys()
    assert all(abs(whole[k] - parts[k]) <= bound for k in whole)


def test_every_metric_is_in_the_table():
    batch = build_batch()
    sampling = DynamicSampling(FilterGroupsConfig(enable=True), train_batch_size=2)
    sampling.offer(batch)
    mask = batch["response_mask"]
    counts = Counts.of(mask)
    outputs = {"log_probs": batch["old_log_probs"], "entropy": batch["entropys"], "values": batch["values"]}
    actor = ActorLoss(config=ActorConfig(use_kl_loss=True), counts=counts)(outputs, batch.tensors)[1]
    critic = CriticLoss(config=CriticConfig(), counts=counts)(outputs, batch.tensors)[1]
    produced = {
        *batch_metrics(batch),
        *sampling_metrics(sampling, sampling.take()),
        *log_prob_gap(batch["old_log_probs"], batch["rollout_log_probs"], mask),
        *actor,
        *critic,
    }
    assert produced <= set(METRICS)
    engine = {
        "actor/grad_norm",
        "actor/lr",
        "actor/pg_scale",
        "critic/grad_norm",
        "critic/lr",
        "actor/reward_kl_penalty",
        "actor/reward_kl_penalty_coeff",
    }
    assert set(METRICS) - produced == engine
    assert all(m.reduction and m.meaning for m in METRICS.values())
