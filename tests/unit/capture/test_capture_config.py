"""What to capture: overrides, patterns and ranges, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.capture.config import CaptureConfig, split_overrides
from alignment.errors import InputError


def test_without_an_override_there_is_no_capture_and_nothing_is_taken_away():
    assert split_overrides(["trainer.seed=3", "data.shuffle=false"]) == (None, ["trainer.seed=3", "data.shuffle=false"])


def test_overrides_become_the_configuration_and_leave_the_rest():
    config, rest = split_overrides(
        [
            "trainer.seed=3", "capture.detail=tensor", "capture.stages=[old_log_prob,update_actor]",
            "+capture.step_start=2", "capture.modules=[model.layers.*,'re:lm_.*']", "capture.ranks=0",
        ]
    )  # fmt: skip
    assert rest == ["trainer.seed=3"]
    assert config == CaptureConfig(
        detail="tensor",
        stages=("old_log_prob", "update_actor"),
        step_start=2,
        modules=("model.layers.*", "re:lm_.*"),
        ranks=(0,),
    )


@pytest.mark.parametrize(
    ("overrides", "expected"), [(["capture=true"], CaptureConfig()), (["capture.level=L1", "capture=false"], None)]
)
def test_it_is_switched_as_a_whole(overrides, expected):
    assert split_overrides(overrides)[0] == expected


@given(
    level=st.sampled_from(["L0", "L1", "mix"]),
    stages=st.none() | st.lists(st.text("abc_", min_size=1)).map(tuple),
    start=st.none() | st.integers(0, 9),
    samples=st.booleans(),
)
def test_json_brings_a_configuration_to_other_processes_unchanged(level, stages, start, samples):
    config = CaptureConfig(level=level, stages=stages, step_start=start, samples=samples)
    assert CaptureConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("capture.detial=sketch", "capture.detial: there is no such key.*did you mean capture.detail"),
        ("capture.level=L2", r"capture.level: there is no such choice; expected L0 \| L1 \| mix; found L2"),
        ("capture.step_start=x", "capture.step_start: a value of another type; expected int"),
        ("capture.samples=1", "capture.samples: a value of another type; expected bool"),
        ("capture.step_end=-2", "capture.step_end: out of range"),
        ("capture.modules=['re:(']", "capture.modules: this is no regular expression"),
        ("capture.sketch_size=1000", "capture.sketch_size: the size of a sketch is a power of two"),
        ("capture=maybe", "capture: capture is on or off"),
        ("capture.stages=[a", "capture.stages: the value is not YAML"),
    ],
)
def test_what_means_nothing_is_refused(override, message):
    with pytest.raises(InputError, match=message):
        split_overrides([override])


@pytest.mark.parametrize("first", ["step", "token"])
def test_a_range_that_ends_before_it_starts_is_refused(first):
    with pytest.raises(InputError, match=f"capture.{first}_end: the range ends before it starts"):
        CaptureConfig(**{f"{first}_start": 3, f"{first}_end": 2})


def test_both_ends_of_a_range_are_taken():
    config = CaptureConfig(step_start=2, step_end=4)
    assert [s for s in range(7) if config.takes_step(s)] == [2, 3, 4]
