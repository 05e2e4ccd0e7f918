"""The whole search on simulated stacks: every kind of cause, its proof, and what is said when no single step can be
named.
"""

from __future__ import annotations

import math

import pytest
from bisect_lab import NAMES, Numbered, SimulatedLab, places, stack
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.bisect.bayesian import Rates
from alignment.bisect.constraints import Constraints, Rule
from alignment.bisect.outcomes import Ending
from alignment.bisect.solver import MOST_CAUSES, StackSearch
from alignment.bisect.zones import Judgement, Zone


def named(answer):
    return [[(c.component, c.new.revision) for e in f.edges for c in e.changes] for f in answer.findings]


def line_of(days: int) -> list:
    return [stack(3 * d, 5 * d, 2 * d, 4 * d, name=f"day {d}") for d in range(days)]


def test_one_culprit_is_named_and_confirmed_both_ways():
    lab = SimulatedLab(lambda at: float(at["b"] >= 37))
    answer = lab.search(line_of(20))
    assert answer.ending is Ending.CULPRIT
    assert named(answer) == [[("b", "37")]]
    finding = answer.findings[0]
    assert (finding.kind, finding.necessary, finding.sufficient) == ("culprit", True, True)
    assert lab.counts["confirm"] == 2


@settings(max_examples=60, deadline=None)
@given(
    days=st.integers(2, 40),
    name=st.sampled_from(NAMES),
    at=st.integers(1, 10_000),
    skip=st.integers(0, 5),
    salt=st.integers(0, 99),
)
def test_the_cause_is_never_lost_and_the_bound_holds(days, name, at, skip, salt):
    """Whatever cannot be measured: the reported step always holds the true commit, and the search stays within its
    bound.
    """
    line = line_of(days)
    last = places(line[-1])
    commit = 1 + at % last[name]
    ends = (places(line[0]), last)

    def value(now):
        if skip and now not in ends and hash((salt, *sorted(now.items()))) % 20 < skip:
            return None
        return float(now[name] >= commit)

    lab = SimulatedLab(value)
    answer = lab.search(line)
    edge = answer.findings[0].edges[0]
    assert any(c.component == name and int(c.old.revision) < commit <= int(c.new.revision) for c in edge.changes)
    assert lab.counts["search"] <= answer.bound
    if not skip:
        assert answer.ending is Ending.CULPRIT
        sizes = edge.sizes.values()
        assert lab.counts["search"] <= sum(math.ceil(math.log2(n)) for n in sizes if n > 1)
    elif answer.ending is Ending.RANGE:
        assert edge.hidden > 0


def test_two_causes_are_both_named():
    lab = SimulatedLab(lambda at: float(at["a"] >= 20 or at["c"] >= 31))
    answer = lab.search(line_of(20))
    assert sorted(named(answer)) == [[("a", "20")], [("c", "31")]]
    first, second = answer.findings
    assert first.necessary is False and "still bad" in first.remarks[0]
    assert second.necessary is True


def test_an_interaction_is_reported_as_one():
    lab = SimulatedLab(lambda at: float(at["a"] >= 20 and at["d"] >= 50))
    answer = lab.search(line_of(20))
    assert [f.kind for f in answer.findings] == ["interaction"]
    assert sorted(named(answer)[0]) == [("a", "20"), ("d", "50")]
    assert answer.findings[0].sufficient is False and answer.findings[0].necessary is True


def test_three_changes_that_are_bad_only_together():
    lab = SimulatedLab(lambda at: float(at["a"] >= 20 and at["d"] >= 50 and at["b"] >= 11))
    answer = lab.search(line_of(20))
    assert sorted(named(answer)[0]) == [("a", "20"), ("b", "11"), ("d", "50")]


def test_a_value_in_between_is_split_and_not_tossed():
    lab = SimulatedLab(lambda at: 0.5 * (at["a"] >= 20) + 0.5 * (at["d"] >= 60))
    answer = lab.search(line_of(20))
    assert named(answer) == [[("a", "20")], [("d", "60")]]
    assert {f.kind for f in answer.findings} == {"contribution"}
    assert all(f.necessary and f.sufficient for f in answer.findings)


def test_what_hides_behind_unmeasurable_commits_is_a_range():
    lab = SimulatedLab(lambda at: None if at["b"] in (36, 37, 38) else float(at["b"] >= 37))
    answer = lab.search([stack(0, 0, 0, 0), stack(0, 60, 0, 0)])
    assert answer.ending is Ending.RANGE
    edge = answer.findings[0].edges[0]
    assert (edge.changes[0].old.revision, edge.changes[0].new.revision, edge.hidden) == ("35", "39", 3)


def test_a_long_broken_stretch_costs_logarithms():
    broken = range(100, 400)
    lab = SimulatedLab(lambda at: None if at["b"] in broken else float(at["b"] >= 450))
    answer = lab.search([stack(0, 0, 0, 0), stack(0, 512, 0, 0)])
    assert named(answer) == [[("b", "450")]]
    assert lab.counts["search"] < 2 * math.log2(512)


def test_unmeasurable_days_are_left_for_mixed_stacks():
    line = line_of(40)
    broken = {frozenset(places(s).items()) for s in line[5:35]}
    lab = SimulatedLab(lambda at: None if frozenset(at.items()) in broken else float(at["b"] >= 77))
    answer = lab.search(line)
    assert named(answer) == [[("b", "77")]]
    assert lab.counts["search"] <= answer.bound


def test_an_unmeasurable_mixture_is_gone_round():
    """Packages a and b together at the new version do not build; other mixtures tell the culprit all the same."""
    lab = SimulatedLab(lambda at: None if at["a"] and at["b"] and not at["d"] else float(at["c"] >= 1))
    answer = lab.search([stack(0, 0, 0, 0), stack(1, 1, 1, 1)])
    assert answer.ending is Ending.CULPRIT
    assert named(answer) == [[("c", "1")]]


def test_pins_that_move_together_are_one_step():
    rule = Rule(id="pair", when={"a": "1"}, require={"b": "1"}, source="test")

    def feasible(at):
        return at["a"] == at["b"]

    lab = SimulatedLab(
        lambda at: float(at["a"] >= 1) if feasible(at) else pytest.fail("an infeasible stack was probed")
    )
    constraints = Constraints((rule, Rule(id="back", when={"b": "1"}, require={"a": "1"}, source="test")))
    line = [_with_versions(stack(0, 0, 0, 0)), _with_versions(stack(1, 1, 1, 1))]
    answer = lab.search(line, constraints=constraints)
    edge = answer.findings[0].edges[0]
    assert [c.component for c in edge.changes] == ["a", "b"]
    assert edge.pinned and answer.ending is Ending.CULPRIT


def _with_versions(one):
    from dataclasses import replace

    return one.with_pins({n: replace(p, version=p.revision) for n, p in one.pins.items()}, name=one.name)


def test_a_flaky_commit_is_noticed_and_gone_round():
    """Commit 30 says the other thing the first time: the search goes wrong there, measures again, and finds commit
    50.
    """
    lab = SimulatedLab(lambda at: float(at["b"] >= 50), flaky=lambda at: at["b"] == 30)
    answer = lab.search([stack(0, 0, 0, 0), stack(0, 60, 0, 0)])
    assert named(answer) == [[("b", "50")]]
    without = SimulatedLab(lambda at: float(at["b"] >= 50), flaky=lambda at: at["b"] == 30)
    assert named(without.search([stack(0, 0, 0, 0), stack(0, 60, 0, 0)], recheck=False)) == [[("b", "30")]]


def test_more_causes_than_are_looked_for_are_admitted():
    lab = SimulatedLab(lambda at: float(any(at[n] >= 7 for n in NAMES) or at["a"] < -1))
    answer = lab.search(line_of(10))
    assert len(answer.findings) == MOST_CAUSES
    assert named(answer) == [[(c, "7")] for c in [n for f in named(answer) for n, _ in f]]


@pytest.mark.parametrize("parallel", [2, 3, 7])
def test_parallel_probes_divide_the_line_in_fewer_rounds(parallel):
    rounds = []

    class Counting(SimulatedLab):
        def judge(self, stacks, purpose):
            if purpose == "search":
                rounds.append(len(stacks))
            return super().judge(stacks, purpose)

    lab = Counting(lambda at: float(at["b"] >= 400))
    answer = lab.search([stack(0, 0, 0, 0), stack(0, 1000, 0, 0)], parallel=parallel)
    assert named(answer) == [[("b", "400")]]
    assert len(rounds) <= math.ceil(math.log(1000, parallel + 1)) and max(rounds) == parallel


def test_a_way_back_is_searched_as_well():
    lab = SimulatedLab(lambda at: float(at["b"] <= 12))
    answer = lab.search([stack(0, 40, 0, 0), stack(0, 0, 0, 0)])
    assert named(answer) == [[("b", "12")]]


def test_noisy_ends_are_searched_by_posterior():
    import random

    draw = random.Random(5)

    class Noisy(SimulatedLab):
        rates = Rates(false_bad=0.1, false_good=0.1)

        def sample(self, stacks, purpose):
            self.counts[purpose] += len(stacks)
            told = []
            for one in stacks:
                bad = (places(one)["b"] >= 23) ^ (draw.random() < 0.05)
                told.append(Judgement(zone=Zone.BAD if bad else Zone.GOOD, value=float(bad)))
            return told

        judge = sample

    lab = Noisy(lambda at: 0.0)
    line = [stack(0, 0, 0, 0), stack(0, 40, 3, 0)]
    answer = StackSearch(lab, line, Numbered()).run()
    assert named(answer) == [[("b", "23")]]
    edge = answer.findings[0].edges[0]
    assert edge.held >= 0.95 and answer.findings[0].necessary and answer.findings[0].sufficient


def test_images_that_differ_with_the_same_pins_are_said_to():
    from dataclasses import replace

    line = [stack(0, 0, name="first"), replace(stack(0, 0, name="second"), image="i@sha256:1")]
    lab = SimulatedLab(lambda at: 0.0)
    lab.known[line[1].digest] = Judgement(zone=Zone.BAD)
    lab.known[line[0].digest] = Judgement(zone=Zone.GOOD)
    answer = StackSearch(lab, line, Numbered()).run()
    assert "the same pins and different images" in answer.findings[0].remarks[0]
    assert answer.findings[0].components == ["image"] and answer.findings[0].necessary is None


def test_mixtures_are_named_by_what_they_bring():
    asked = []

    class Naming(SimulatedLab):
        def judge(self, stacks, purpose):
            asked.extend(s.name for s in stacks if purpose == "search")
            return super().judge(stacks, purpose)

    Naming(lambda at: float(at["b"] >= 1)).search([stack(0, 0, name="march"), stack(1, 1, name="today")])
    assert asked == ["march with a 1"]


def test_a_release_is_followed_into_its_commits():
    """Releases 1 to 9; between 6 and 7 lie commits 6.0 to 6.9, and 6.4 is the culprit."""
    from alignment.bisect.stack import Pin

    class Released(Numbered):
        def between(self, component, old, new):
            return [Pin(kind="release", version=str(v)) for v in range(int(old.version) + 1, int(new.version) + 1)]

        def inside(self, component, old, new):
            return [*(Pin(kind="git", revision=f"{old.version}.{i}") for i in range(10)), new]

    class Lab(SimulatedLab):
        def judge(self, stacks, purpose):
            told = []
            for one in stacks:
                pin = one.pins["a"]
                bad = float(pin.revision or pin.version) >= 6.4
                told.append(Judgement(zone=Zone.BAD if bad else Zone.GOOD, value=float(bad)))
            return told

        def recheck(self, stacks):
            return [True] * len(stacks)

    ends = [stack(0).with_pins({"a": Pin(kind="release", version=v)}, name=v) for v in ("1", "9")]
    answer = StackSearch(Lab(lambda at: 0.0), ends, Released()).run()
    edge = answer.findings[0].edges[0]
    assert [(c.old.revision, c.new.revision) for c in edge.changes] == [("6.3", "6.4")]
    assert set(edge.sizes) == {"releases and commits", "commits inside a release"}
