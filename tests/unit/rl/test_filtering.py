from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import philox

from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.config import FilterGroupsConfig
from alignment.rl.filtering import DynamicSampling, group_statistics, metric_values
from alignment.rl.metrics import sampling_metrics

LAW = settings(max_examples=40, deadline=None, derandomize=True)


def scored(groups: dict[str, list[float]], *, score: dict[str, list[float]] | None = None) -> Batch:
    """One group per name with the given correctness; the score is 2·acc − 1 unless given."""
    uid = [name for name, acc in groups.items() for _ in acc]
    acc = [x for values in groups.values() for x in values]
    rewards = [x for values in score.values() for x in values] if score else [2 * a - 1 for a in acc]
    mask = torch.ones(len(uid), 3, dtype=torch.int64)
    mask[::2, 2] = 0
    scores = torch.zeros(len(uid), 3)
    scores[:, 0] = torch.tensor(rewards)
    return Batch(
        {"response_mask": mask, "token_level_scores": scores},
        {"uid": uid, "prompt_id": [f"p-{u}" for u in uid], "acc": acc, "score": rewards, "row": list(range(len(uid)))},
    )


def sampling(**settings) -> DynamicSampling:
    return DynamicSampling(FilterGroupsConfig(**{"enable": True, **settings}), train_batch_size=2, gen_batch_size=3)


def test_only_groups_that_vary_are_kept():
    groups = group_statistics(scored({"wrong": [0, 0], "mixed": [0, 1], "right": [1, 1], "one": [1]}))
    assert [g.uid for g in groups if g.kept] == ["mixed", "one"]
    mixed = groups[1]
    assert (mixed.prompt_id, mixed.size, mixed.mean, mixed.variance, mixed.acc) == ("p-mixed", 2, 0.0, 2.0, 0.5)
    assert mixed.response_length == 2.5
    assert groups[3].variance == 0.0


def test_equal_values_are_equal_whatever_rounding_says():
    values = [0.1, 0.1, 0.1]
    assert np.std(values) > 0  # the test verl makes would keep this group
    assert not group_statistics(scored({"g": [0, 0, 0]}, score={"g": values}), "score")[0].kept


@LAW
@given(seed=st.integers(0, 2**32))
def test_statistics_against_numpy_and_in_any_order(seed):
    rng = philox(seed)
    scores = {f"g{i}": rng.standard_normal(4).tolist() for i in range(3)}
    batch = scored({k: [0.0] * 4 for k in scores}, score=scores)
    for g in group_statistics(batch, "score"):
        eps = np.finfo(float).eps * 16 * sum(x * x + abs(x) for x in scores[g.uid])
        assert abs(g.mean - np.mean(scores[g.uid])) <= eps
        assert abs(g.variance - np.var(scores[g.uid], ddof=1)) <= eps
        assert g.kept
    shuffled = batch[rng.permutation(12).tolist()]
    by_uid = {g.uid: g for g in group_statistics(batch, "score")}
    for g in group_statistics(shuffled, "score"):
        assert (g.mean, g.variance, g.kept) == (by_uid[g.uid].mean, by_uid[g.uid].variance, by_uid[g.uid].kept)


def test_metrics_of_the_filter():
    batch = scored({"g": [0, 1]})
    assert metric_values(batch, "acc") == [0.0, 1.0]
    assert metric_values(batch, "score") == [-1.0, 1.0]
    assert metric_values(batch, "seq_reward") == metric_values(batch, "seq_final_reward") == [-1.0, 1.0]
    final = batch.add({"token_level_rewards": batch["token_level_scores"] * 2})
    assert metric_values(final, "seq_final_reward") == [-2.0, 2.0]
    assert metric_values(final, "seq_reward") == [-1.0, 1.0]
    with pytest.raises(InputError, match="unknown filter metric; expected acc | score .*; found len"):
        metric_values(batch, "len")
    with pytest.raises(InputError, match="no such field"):
        metric_values(batch.drop(["acc"]), "acc")


def test_overlong_shaping_can_make_a_group_vary():
    batch = scored({"g": [1, 1]})
    shaped = batch.add({"token_level_scores": batch["token_level_scores"] - torch.tensor([[0.5, 0, 0], [0, 0, 0]])})
    assert not group_statistics(shaped, "acc")[0].kept
    assert group_statistics(shaped, "seq_reward")[0].kept


def test_regeneration_until_enough_groups_qualify():
    s = sampling()
    assert s.prompts_wanted() == 3
    s.offer(scored({"a": [0, 0], "b": [0, 1], "c": [1, 1]}))
    assert s.prompts_wanted() == 3
    s.offer(scored({"d": [1, 0], "e": [0, 1], "f": [1, 1]}))
    assert s.prompts_wanted() == 0
    batch = s.take()
    assert batch["uid"] == ["b", "b", "d", "d"] and batch["row"] == [2, 3, 0, 1]
    assert (s.kept_fraction, s.filled, s.rounds) == (0.5, 0, 2)
    assert len(s.compared) == 6


def test_rounds_are_bounded_and_the_batch_is_filled():
    s = sampling(max_num_gen_batches=2)
    for names in ("abc", "def"):
        assert s.prompts_wanted() == 3
        s.offer(scored({name: [0, int(name == "e")] for name in names}))
    assert s.prompts_wanted() == 0
    assert s.take()["uid"] == ["e", "e", "a", "a"]
    assert s.filled == 1


def test_rounds_without_a_bound():
    s = sampling(max_num_gen_batches=0)
    for i in range(20):
        assert s.prompts_wanted() == 3
        s.offer(scored({f"{i}{name}": [0, 0] for name in "abc"}))
    assert s.prompts_wanted() == 3


def test_reserve_is_asked_for_once_and_compared_by_its_first_round():
    s = sampling(mode="reserve", reserve_size=4)
    assert s.prompts_wanted() == 2
    s.offer(scored({"a": [0, 0], "b": [0, 1]}))
    assert s.prompts_wanted() == 4
    s.offer(scored({"c": [0, 0], "d": [1, 1], "e": [0, 0], "f": [1, 1]}))
    assert s.prompts_wanted() == 0
    assert s.take()["uid"] == ["b", "b", "a", "a"]
    assert [g.uid for g in s.compared] == ["a", "b"]
    full = sampling(mode="reserve", reserve_size=4)
    full.offer(scored({"a": [0, 1], "b": [0, 1]}))
    assert full.prompts_wanted() == 0


def test_without_filtering_one_round_is_everything():
    s = DynamicSampling(FilterGroupsConfig(), train_batch_size=2, gen_batch_size=3)
    assert s.prompts_wanted() == 2
    s.offer(scored({"a": [0, 0], "b": [1, 1]}).drop(["acc"]))
    assert s.prompts_wanted() == 0
    assert s.take()["uid"] == ["a", "a", "b", "b"] and s.kept_fraction == 1.0


def test_metrics_before_and_after_the_filter():
    s = sampling()
    s.offer(scored({"a": [0, 0], "b": [0, 1], "c": [1, 0]}))
    metrics = sampling_metrics(s, s.take())
    assert metrics == {
        "reward/before_filter": -2 / 6,
        "reward/after_filter": 0.0,
        "acc/before_filter": 2 / 6,
        "acc/after_filter": 0.5,
        "response_length/before_filter": 2.5,
        "filter/kept_fraction": 2 / 3,
        "filter/num_gen_batches": 1.0,
        "filter/filled": 0.0,
    }


def test_errors():
    s = sampling()
    s.offer(scored({"a": [0, 1]}))
    with pytest.raises(InputError, match="two rounds share a uid; expected a new uid per prompt; found a"):
        s.offer(scored({"a": [0, 1]}))
    with pytest.raises(InputError, match="the step has too few groups; expected 2; found 1"):
        s.take()
