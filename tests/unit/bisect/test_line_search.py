"""Choosing where to measure next."""

from __future__ import annotations

import math

from bisect_lab import stack
from hypothesis import given
from hypothesis import strategies as st

from alignment.bisect.line_search import Step, choose, rounds


def test_one_place_is_the_middle():
    assert choose([1, 2, 3, 4, 5], 1) == [3]


def test_several_places_divide_evenly():
    assert choose(list(range(1, 8)), 3) == [2, 4, 6]


def test_no_more_places_than_there_are():
    assert choose([4, 9], 5) == [4, 9]


@given(st.lists(st.floats(0, 100), min_size=2, max_size=70))
def test_weights_never_cost_a_round(weights):
    """Neither part may need more halvings than the larger half of an even division does."""
    live = list(range(1, len(weights)))
    place = choose(live, 1, weights)[0]
    left, right = place, len(weights) - place
    assert max(rounds(left), rounds(right)) <= rounds(len(weights)) - 1


def test_weights_move_the_division():
    assert choose(list(range(1, 6)), 1, [1, 1, 1, 1, 1, 50]) == [4]
    assert choose(list(range(1, 6)), 1, [50, 1, 1, 1, 1, 1]) == [2]


@given(st.integers(1, 5000), st.integers(1, 9))
def test_rounds_are_the_ceiling_of_the_logarithm(candidates, parallel):
    count = rounds(candidates, parallel)
    assert (parallel + 1) ** count >= candidates and (count == 0 or (parallel + 1) ** (count - 1) < candidates)


def test_the_bound_of_a_search():
    step = Step(low=stack(0), high=stack(1), line=59, skips=2)
    assert step.bound() == math.ceil(math.log2(59)) + 4
