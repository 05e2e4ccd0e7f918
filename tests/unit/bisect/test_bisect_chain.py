"""Chains of feasible stacks."""

from __future__ import annotations

from bisect_lab import stack
from hypothesis import given
from hypothesis import strategies as st

from alignment.bisect.chain import chain_between
from alignment.bisect.constraints import load_constraints
from alignment.bisect.stack import Pin, stack_from_data


def paths_of(low, high):
    return {n: [high.pins[n]] for n in low.changed(high)}


def test_without_constraints_every_step_moves_one_package():
    low, high = stack(0, 0, 0, 0), stack(1, 1, 1, 1)
    chain = chain_between(low, high, paths_of(low, high), lambda s: True)
    assert [len(a.changed(b)) for a, b in zip(chain, chain[1:])] == [1, 1, 1, 1]
    assert chain[0] is low and chain[-1] is high


@given(st.sets(st.integers(1, 14)))
def test_a_chain_holds_feasible_stacks_only_and_always_exists(feasible_masks):
    low, high = stack(0, 0, 0, 0), stack(1, 1, 1, 1)

    def feasible(one):
        return sum(int(p.revision) << i for i, p in enumerate(one.pins.values())) in feasible_masks

    chain = chain_between(low, high, paths_of(low, high), feasible)
    assert all(feasible(s) for s in chain[1:-1])
    assert chain[0] is low and chain[-1] is high
    for a, b in zip(chain, chain[1:]):
        assert a.changed(b)
        assert all(int(b.pins[n].revision) >= int(a.pins[n].revision) for n in a.pins)


def test_the_public_matrices_make_groups():
    """From vllm-ascend 0.9.1 to 0.11.0: torch, torch_npu, vllm and vllm-ascend are pinned together, verl and ray are
    not.
    """
    old = {
        "torch": "2.5.1",
        "torch_npu": "2.5.1.post1",
        "vllm": "0.9.1",
        "vllm-ascend": "0.9.1",
        "verl": "0.5.0",
        "ray": "2.46.0",
    }
    new = {
        "torch": "2.7.1",
        "torch_npu": "2.7.1",
        "vllm": "0.11.0",
        "vllm-ascend": "0.11.0",
        "verl": "0.6.1",
        "ray": "2.50.0",
    }
    low, high = (stack_from_data({"schema": 1, "components": c}) for c in (old, new))
    rules = load_constraints()
    chain = chain_between(low, high, paths_of(low, high), lambda s: rules.violation(s) is None)
    steps = [set(a.changed(b)) for a, b in zip(chain, chain[1:])]
    assert {"torch", "torch_npu", "vllm", "vllm-ascend"} in steps and {"verl"} in steps and {"ray"} in steps


def test_older_changes_go_first():
    low = stack(0, 0, 0)
    new = {
        n: Pin(kind="git", revision="1", date=d)
        for n, d in (("a", "2025-03-01"), ("b", "2025-01-01"), ("c", "2025-02-01"))
    }
    high = low.with_pins(new)
    chain = chain_between(low, high, {n: [p] for n, p in new.items()}, lambda s: True)
    assert [a.changed(b) for a, b in zip(chain, chain[1:])] == [["b"], ["c"], ["a"]]


def test_a_chain_avoids_what_it_is_told_to():
    low, high = stack(0, 0, 0), stack(1, 1, 1)
    first = chain_between(low, high, paths_of(low, high), lambda s: True)
    other = chain_between(low, high, paths_of(low, high), lambda s: True, without={first[1].digest})
    assert len(other) == 4 and other[1].digest != first[1].digest
