"""The smallest set of changes that is bad together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignment.bisect.ddmin import ddmin


@given(st.sets(st.integers(0, 15), min_size=1, max_size=5))
def test_exactly_the_needed_changes_remain(needed):
    assert set(ddmin(list(range(16)), lambda kept: needed <= set(kept))) == needed


def test_what_cannot_be_told_is_not_taken_as_bad():
    found = ddmin([1, 2, 3, 4], lambda kept: None if len(kept) == 2 else {1, 2} <= set(kept))
    assert {1, 2} <= set(found)


def test_nothing_is_asked_twice():
    asked = []
    ddmin(list(range(8)), lambda kept: asked.append(kept) or {1, 6} <= set(kept))
    assert len(asked) == len(set(asked))


def test_one_change_is_left_alone():
    assert ddmin(["only"], lambda kept: False) == ("only",)
