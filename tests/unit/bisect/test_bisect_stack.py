"""Stack files: what they may say, and the sentence for everything they may not."""

from __future__ import annotations

import pytest

from alignment.bisect.components import COMPONENTS
from alignment.bisect.outcomes import BisectError, Ending
from alignment.bisect.stack import Pin, in_time, load_stack, load_stacks, save_stack, stack_from_data
from alignment.errors import InputError

KNOWN = (
    "driver", "firmware", "CANN", "python", "torch", "torch_npu", "triton-ascend", "vllm", "vllm-ascend", "MindSpeed",
    "megatron-core", "mbridge", "verl", "transformers", "ray", "numpy",
)  # fmt: skip


def data(**components):
    return {"schema": 1, "name": "s", "components": components or {"torch": "2.7.1"}}


def test_the_components_of_the_issue_are_known():
    assert set(KNOWN) <= set(COMPONENTS)


def test_names_are_one_however_they_are_spelled():
    stack = stack_from_data(data(**{"Torch-NPU": "2.7.1", "cann": "8.2.RC2", "mindspeed": "2.2.0_core_r0.12.1"}))
    assert set(stack.pins) == {"torch_npu", "CANN", "MindSpeed"}
    assert stack.pins["CANN"].kind == "fact" and stack.pins["torch_npu"].kind == "release"


def test_a_stack_goes_round_through_its_file(tmp_path):
    pins = {
        "verl": {"git": None, "revision": "e2d45b00e", "version": "0.7.0.dev0", "date": "2025-11-20"},
        "driver": "24.1.0.3",
        "torch": {"release": "2.7.1"},
        "mine": {"git": "/a/clone", "revision": "abc"},
    }
    raw = {
        **data(**pins),
        "date": "2025-12-01",
        "image": "r/i@sha256:" + "0" * 64,
        "define": {"mine": {"module": "my.own"}},
    }
    stack = stack_from_data(raw)
    assert stack.pins["verl"] == Pin(
        kind="git",
        version="0.7.0.dev0",
        revision="e2d45b00e",
        repository=COMPONENTS["verl"].repository,
        date="2025-11-20",
    )
    save_stack(stack, tmp_path / "s.yaml")
    assert load_stack(tmp_path / "s.yaml") == stack
    assert load_stack(tmp_path / "s.yaml").digest == stack.digest


def test_toml_says_the_same_as_yaml(tmp_path):
    pytest.importorskip("tomllib")
    (tmp_path / "s.toml").write_text('schema = 1\nname = "s"\n[components]\ntorch = "2.7.1"\n')
    assert load_stack(tmp_path / "s.toml").digest == stack_from_data(data()).digest


def test_the_identity_is_pins_and_image():
    one, other = stack_from_data(data()), stack_from_data({**data(), "name": "t", "date": "2025-01-01", "notes": "n"})
    assert one.digest == other.digest
    assert stack_from_data({**data(), "image": "i@sha256:" + "1" * 64}).digest != one.digest


def test_changed_goes_from_the_ground_up():
    one = stack_from_data(data(torch="2.7.1", CANN="8.2.RC1", verl="0.6"))
    other = stack_from_data(data(torch="2.8.0", CANN="8.3.RC1", verl="0.6", ray="2.40"))
    assert one.changed(other) == ["CANN", "torch", "ray"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "not a stack file"),
        ({"schema": 2, "components": {"torch": "1"}}, "of another schema; expected schema: 1; found 2"),
        ({"schema": 1, "componets": {"torch": "1"}}, "unknown key; expected components?; found componets"),
        ({"schema": 1, "components": {}}, "a stack without components"),
        (data(python=3.1), "a version has to be quoted, or 3.10 becomes 3.1"),
        (data(torch={"release": "2", "git": "x"}), "exactly one of release, git and fact; found release, git"),
        (data(torch={"relase": "2"}), "unknown key; expected release?"),
        (data(torch={"git": None}), "a git pin needs its revision, quoted"),
        (data(CANN={"git": None, "revision": "a"}), "is an external fact and has no commits"),
        (data(CANN={"release": "8"}), "is an external fact and cannot be installed"),
        (data(torch="1", Torch="2"), "a component is pinned twice; found torch and Torch"),
        ({**data(), "date": "yesterday"}, "not a date; expected 2025-08-07; found yesterday"),
        ({**data(), "define": {"mine": {"modul": "x"}}}, "unknown key; expected module?"),
    ],
)
def test_what_a_stack_file_may_not_say(raw, message):
    with pytest.raises(InputError) as caught:
        stack_from_data(raw, where="s.yaml")
    assert message in str(caught.value) and "s.yaml" in str(caught.value)


def test_an_unknown_component_is_named_with_the_nearest():
    with pytest.raises(BisectError) as caught:
        stack_from_data(data(**{"vllm-ascent": "0.10"}), where="s.yaml")
    assert caught.value.ending is Ending.UNKNOWN_COMPONENT
    assert "there is no such component; expected vllm-ascend?; found vllm-ascent" in str(caught.value)


def test_a_file_that_is_no_yaml(tmp_path):
    (tmp_path / "s.yaml").write_text("a: [")
    with pytest.raises(InputError, match="not YAML"):
        load_stack(tmp_path / "s.yaml")
    with pytest.raises(InputError, match="does not exist"):
        load_stack(tmp_path / "other.yaml")


def test_dated_stacks_come_in_time_and_once(tmp_path):
    for name, day, version in (
        ("b", "2025-02-01", "2"),
        ("a", "2025-03-01", "3"),
        ("c", "2025-01-01", "1"),
        ("d", "2025-02-02", "2"),
    ):
        (tmp_path / f"{name}.yaml").write_text(
            f'schema: 1\nname: {name}\ndate: {day}\ncomponents: {{ray: "{version}"}}\n'
        )
    assert [s.name for s in load_stacks(tmp_path)] == ["c", "b", "a"]
    (tmp_path / "e.yaml").write_text('schema: 1\ncomponents: {ray: "9"}\n')
    with pytest.raises(InputError, match="a dated stack has no date"):
        load_stacks(tmp_path)


def test_the_shipped_stack_is_that_of_the_field_notes():
    stack = load_stack("shipped:deepseek-v3-671b-dapo-a2")
    found = {n: p.version for n, p in stack.pins.items()}
    assert found == {
        "driver": "24.1.0.3", "python": "3.10.12", "CANN": "8.2.RC2", "torch": "2.7.1", "torch_npu": "2.7.1",
        "transformers": "4.53.3", "vllm": "0.10.0", "vllm-ascend": "0.10.0rc1", "verl": "0.7.0.dev0",
        "megatron-core": "0.12.1", "MindSpeed": "2.2.0_core_r0.12.1", "mbridge": "0.13.1",
    }  # fmt: skip
    with pytest.raises(InputError, match="there is no such shipped stack.*deepseek"):
        load_stack("shipped:other")


def test_a_stack_that_was_mixed_has_no_image():
    stack = stack_from_data({**data(), "image": "i@sha256:" + "1" * 64})
    assert stack.with_pins({"torch": Pin(kind="release", version="2.8.0")}).image == ""
    assert in_time([stack, stack]) == [stack]
