"""The one table of exit codes says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from alignment.bisect.observation import ABORT, BAD, GOOD, INFRASTRUCTURE, SKIP
from alignment.bisect.outcomes import Ending
from alignment.numerics.verdict import ALIGNED, MISALIGNED, USAGE

TEXT = (Path(__file__).parents[3] / "docs" / "bisect.md").read_text(encoding="utf-8")


def codes(section: str) -> set[str]:
    table = TEXT.split(section, 1)[1].split("\n\n|", 1)[1].split("\n\n", 1)[0]
    return set(re.findall(r"^\|? *(≥ 128|\d+) \|", table, flags=re.MULTILINE))


def test_every_ending_is_in_the_table_and_nothing_else():
    assert codes("## Exit codes") == {str(int(e)) for e in Ending} | {str(c) for c in (ALIGNED, MISALIGNED, USAGE)}


def test_bisections_own_codes_are_10_and_up():
    assert all(e >= 10 for e in Ending if e is not Ending.CULPRIT)
    assert (Ending.RANGE, Ending.NOT_SEPARABLE, Ending.ABORTED) == (10, 11, 12)


def test_the_codes_of_a_probe():
    assert codes("**Inside a probe**") == {str(c) for c in (GOOD, BAD, INFRASTRUCTURE, SKIP)} | {f"≥ {ABORT}"}


def test_the_design_example_is_the_bound_that_is_computed():
    from alignment.bisect.bisection import Plan

    assert Plan(stacks=59, packages=7, candidates=64, end_runs=2, changes=()).bound == 21
    assert "21 for 60 nightlies, 7 packages and 64 commits" in TEXT
