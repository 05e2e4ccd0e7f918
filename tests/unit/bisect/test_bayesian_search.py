"""Searching with a test that lies at known rates."""

from __future__ import annotations

import random

import numpy as np
import pytest

from alignment.bisect.bayesian import CONFIDENCE, EdgePosterior, Rates, probe_limit, search_noisy, settle


def sampler(culprit: int, rate: float, seed: int, counted: list):
    draw = random.Random(seed)

    def sample(points):
        counted.append(len(points))
        return [(p > culprit) ^ (draw.random() < rate) for p in points]

    return sample


def test_a_lying_test_still_names_the_culprit():
    right, counted = 0, []
    for seed in range(60):
        low, high, held = search_noisy(
            list(range(65)), sampler(41, 0.05, seed, counted), Rates(false_bad=0.09, false_good=0.09)
        )
        right += (low, high) == (41, 42)
        assert held >= CONFIDENCE
    # The posterior promises 95 %; 60 seeds at that rate fall below 52 with a chance of 0.5 %.
    assert right >= 52
    assert sum(counted) / 60 < 13


def test_plain_halving_under_the_same_noise_is_wrong_far_more_often():
    wrong = 0
    for seed in range(60):
        sample, low, high = sampler(41, 0.05, seed, []), 0, 64
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if sample([middle])[0] else (middle, high)
        wrong += (low, high) != (41, 42)
    assert wrong > 8


def test_the_posterior_is_bayes_rule():
    rates = Rates(false_bad=0.1, false_good=0.2)
    posterior = EdgePosterior(4, rates)
    posterior.update(2, bad=True)
    by_hand = np.array([0.8, 0.8, 0.1, 0.1])
    assert posterior.mass == pytest.approx(by_hand / by_hand.sum(), rel=8 * np.finfo(float).eps)


def test_unmeasurable_points_make_a_group():
    posterior = EdgePosterior(4, Rates(false_bad=0.01, false_good=0.01))
    posterior.skip(2)
    for _ in range(3):
        posterior.update(1, bad=False)
        posterior.update(3, bad=True)
    group, held = posterior.best()
    assert (group.start, group.stop) == (1, 3) and held > CONFIDENCE
    assert posterior.choose() != [2]


def test_simultaneous_points_differ():
    chosen = EdgePosterior(64, Rates(false_bad=0.05, false_good=0.05)).choose(3)
    assert len(set(chosen)) == 3 and 32 in chosen


def test_the_limit_ends_a_search_that_learns_nothing():
    rates = Rates(false_bad=0.45, false_good=0.45)
    draw, counted = random.Random(1), []

    def coin(points):
        counted.append(len(points))
        return [draw.random() < 0.5 for _ in points]

    low, high, held = search_noisy(list(range(9)), coin, rates)
    assert 0 <= low < high <= 8 and sum(counted) <= probe_limit(8, rates)


def test_rates_are_pessimistic():
    rates = Rates.pessimistic(0, 10, 1, 10)
    assert rates.false_bad == 1 / 12 and rates.false_good == 2 / 12
    assert not Rates(false_bad=0.5, false_good=0.5).informative


def test_one_stack_is_settled_by_repetition():
    rates = Rates(false_bad=0.1, false_good=0.1)
    draw = random.Random(3)
    told = [settle(lambda: draw.random() > 0.05, rates) for _ in range(40)]
    assert told.count(True) >= 38
    assert settle(lambda: None, rates) is None
