"""A stack file against what is installed: versions, revisions, and what a stack defines itself."""

from __future__ import annotations

import pytest

from alignment.bisect.freeze import differences, differences_here
from alignment.bisect.stack import Pin, Stack, stack_from_data


def stack(**pins):
    return Stack(pins={name.replace("_", "-") if name != "torch_npu" else name: pin for name, pin in pins.items()})


def release(version):
    return Pin(kind="release", version=version)


def test_an_installation_that_is_what_its_stack_says_passes():
    wanted = stack(python=release("3.11"), torch=release("2.13.0"), verl=Pin(kind="git", revision="e2d45b0"))
    here = stack(python=release("3.11.7"), torch=release("2.13.0+cpu"), verl=Pin(kind="git", revision="e2d45b00e514"))
    assert differences(wanted, here) == []


@pytest.mark.parametrize(
    "here, line",
    [
        ({"torch": release("2.13.1")}, "torch: expected 2.13.0, found 2.13.1"),
        ({}, "torch: 2.13.0 is not installed"),
        ({"torch": release("2.13.0.post1")}, "torch: expected 2.13.0, found 2.13.0.post1"),
        ({"torch": release("2.13.0rc1")}, "torch: expected 2.13.0, found 2.13.0rc1"),
    ],
)
def test_an_installation_of_another_version_is_named(here, line):
    assert differences(stack(torch=release("2.13.0")), stack(**here)) == [line]


def test_another_revision_is_named():
    wanted = stack(verl=Pin(kind="git", revision="e2d45b0"))
    here = stack(verl=Pin(kind="git", revision="a25e413"))
    assert differences(wanted, here) == ["verl: expected e2d45b0, found a25e413"]


def test_the_driver_is_the_node_s():
    wanted = stack(driver=Pin(kind="fact", version="24.1.0.3"))
    assert differences(wanted, stack()) == []


def test_what_is_installed_here_is_found_with_the_packages_a_stack_defines():
    import pytest as installed

    data = {"schema": 1, "components": {"pytest": installed.__version__}, "define": {"pytest": None}}
    assert differences_here(stack_from_data(data)) == []
    data["components"]["pytest"] = "1.0"
    assert differences_here(stack_from_data(data)) == [f"pytest: expected 1.0, found {installed.__version__}"]
