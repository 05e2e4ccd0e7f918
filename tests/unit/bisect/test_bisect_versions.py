"""Versions as the ecosystem writes them."""

from __future__ import annotations

import pytest

from alignment.bisect.versions import order, same, satisfies


@pytest.mark.parametrize(
    ("version", "requirement", "met"),
    [
        ("8.2.RC2", ">=8.2.RC1,<8.3", True),
        ("8.1.RC1", ">=8.2.RC1", False),
        ("2.7.1.post1", "==2.7.1.*", True),
        ("2.7.1.dev20250724", "==2.7.1.*", True),
        ("2.7.1+cpu", "==2.7.1", True),
        ("0.10.0rc1", ">=0.9.1rc1,<=0.13.0", True),
        ("2.2.0_core_r0.12.1", "*core_r0.12*", True),
        ("2.2.0_core_r0.12.1", "*core_r0.13*", False),
        ("25.0.rc1.1", ">=25.0.rc1,<25.1", True),
        ("24.1.0.3", ">=24.1.rc3", True),
        ("2.2.0_core_r0.12.1", "==2.2.0_core_r0.12.1", True),
    ],
)
def test_requirements(version, requirement, met):
    assert satisfies(version, requirement) is met


def test_candidates_sort_before_finals():
    assert sorted(["8.2.0", "8.2.RC1", "8.1.RC1", "8.2.RC2"], key=order) == ["8.1.RC1", "8.2.RC1", "8.2.RC2", "8.2.0"]
    assert sorted(["25.0.1x1", "25.0.rc1x", "24.9x"], key=order)[0] == "24.9x"


def test_a_local_label_counts_where_it_was_wanted():
    assert same("2.7.1+cpu", "2.7.1") and not same("2.7.1", "2.7.1+cpu") and same("8.2.RC1", "8.2rc1")
    assert not same("2.2.0_core_r0.12.1", "2.2.0")
