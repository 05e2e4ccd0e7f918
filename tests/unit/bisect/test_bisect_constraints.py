"""Which versions go together."""

from __future__ import annotations

import pytest

from alignment.bisect.constraints import SHIPPED, Constraints, load_constraints, read_rules
from alignment.bisect.outcomes import BisectError, Ending
from alignment.bisect.stack import load_stack, stack_from_data
from alignment.errors import InputError


def stack(**components):
    return stack_from_data({"schema": 1, "name": "s", "components": components})


@pytest.fixture(scope="module")
def shipped() -> Constraints:
    return load_constraints()


@pytest.mark.parametrize(
    ("components", "names"),
    [
        ({"torch": "2.7.1", "torch_npu": "2.6.0"}, ("torch_npu 2.6.0", "torch ==2.6.0")),
        ({"vllm-ascend": "0.11.0rc1", "vllm": "0.10.0"}, ("vllm ==0.11.0", "0.10.0")),
        ({"vllm-ascend": "0.10.0rc1", "torch_npu": "2.5.1"}, ("torch_npu ==2.7.1.*",)),
        ({"MindSpeed": "2.2.0_core_r0.12.1", "megatron-core": "0.13.0"}, ("megatron-core ==0.12.*",)),
        ({"verl": "0.7.0", "transformers": "5.0.0"}, ("transformers <5",)),
        ({"torch_npu": "2.8.0", "CANN": "8.2.RC1"}, ("CANN ==8.3.RC1",)),
        ({"vllm-ascend": "0.9.1", "python": "3.12.3"}, ("python >=3.9,<3.12",)),
    ],
)
def test_the_public_matrices_bind(shipped, components, names):
    reason = shipped.violation(stack(**components))
    assert reason is not None and all(name in reason for name in names)
    assert "http" in reason


def test_stacks_that_exist_are_feasible(shipped):
    for components in (
        {
            "vllm-ascend": "0.11.0rc1",
            "vllm": "0.11.0",
            "torch": "2.7.1",
            "torch_npu": "2.7.1",
            "CANN": "8.3.RC1",
            "python": "3.11.7",
        },
        {"torch_npu": "2.5.1.post1", "torch": "2.5.1", "CANN": "8.2.RC1"},
        {"MindSpeed": "core_r0.12.1", "megatron-core": "0.12.1"},
        {"torch": "2.13.0"},
    ):
        assert shipped.violation(stack(**components)) is None


def test_the_field_stack_is_feasible_and_its_liberty_is_noted(shipped):
    """CANN 8.2.RC2 under torch_npu 2.7.1 is no published pair: a recommendation, which the stack shows not to bind."""
    kept, notes = shipped.for_ends([load_stack("shipped:deepseek-v3-671b-dapo-a2")])
    assert len(kept.rules) == len(shipped.rules) - len(notes)
    assert any("does without the recommendation torch_npu: torch_npu 2.7.1" in note for note in notes)


def test_an_end_that_breaks_a_strict_rule_is_refused(shipped):
    with pytest.raises(BisectError) as caught:
        shipped.for_ends([stack(torch="2.7.1", torch_npu="2.6.0")])
    assert caught.value.ending is Ending.END_INFEASIBLE
    assert (
        "its versions do not go together; found torch_npu 2.6.0 goes with torch ==2.6.0, not with torch 2.7.1"
        in str(caught.value)
    )


def test_revisions_without_a_version_are_not_judged(shipped):
    git = {"git": None, "revision": "abc"}
    assert shipped.violation(stack(**{"vllm-ascend": git, "vllm": "0.1"})) is None
    assert shipped.violation(stack(**{"vllm-ascend": {**git, "version": "0.11.0"}, "vllm": "0.1"})) is not None


def test_every_shipped_rule_has_a_source():
    for path in SHIPPED.glob("*.yaml"):
        assert all(rule.source.startswith("https://") for rule in read_rules(path))


def test_users_extend_and_drop(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        'schema: 1\nsource: us\nrules:\n  - {when: {ray: ">=2.40"}, require: {numpy: "<2"}}\n'
    )
    mine = load_constraints(["shipped", str(tmp_path / "mine.yaml")])
    assert (
        mine.violation(stack(ray="2.50.0", numpy="2.1.0"))
        == "ray 2.50.0 goes with numpy <2, not with numpy 2.1.0 (mine-1, us)"
    )
    assert load_constraints(["shipped", "none"]).rules == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 3\n", "constraints of another schema"),
        ("schema: 1\nrules: [{when: {ray: '1'}, require: {numpy: '1'}}]\n", "a rule without a source"),
        ("schema: 1\nsource: x\nrules: [{when: {ray: '1'}}]\n", "a rule without `require`"),
        (
            "schema: 1\nsource: x\nrules: [{when: {ray: '1'}, requires: {numpy: '1'}}]\n",
            "unknown key; expected require?",
        ),
        ("schema: 1\nsource: x\nrules: [{when: {ray: '>=='}, require: {numpy: '1'}}]\n", "not a version requirement"),
        ("schema: 1\nsource: x\nmatrix: [{columns: [ray, numpy], rows: [['1']]}]\n", "a row has another length"),
        (
            "schema: 1\nsource: x\nrules: [{when: {rey: '1'}, require: {numpy: '1'}}]\n",
            "there is no such component; expected ray?",
        ),
    ],
)
def test_what_a_constraint_file_may_not_say(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_rules(tmp_path / "c.yaml")
    assert message in str(caught.value)
