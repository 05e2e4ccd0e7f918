"""The search over whole stacks: dated stacks, then packages, then releases or commits, then the proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from alignment.bisect.bayesian import CONFIDENCE, Rates, settle
from alignment.bisect.chain import chain_between
from alignment.bisect.constraints import Constraints
from alignment.bisect.ddmin import ddmin
from alignment.bisect.history import History
from alignment.bisect.line_search import Step, rounds, search_line, search_line_noisy
from alignment.bisect.outcomes import Ending
from alignment.bisect.stack import Pin, Stack
from alignment.bisect.zones import Judgement, Zone

GOOD_ONLY = frozenset({Zone.GOOD})
NOT_BAD = frozenset({Zone.GOOD, Zone.AMBIGUOUS})
# Causes looked for one after another before the search says that there are more: each costs a whole search.
MOST_CAUSES = 4
# Unmeasurable dated stacks in a row after which the search goes on with stacks mixed out of the two around them.
PATIENCE = 3


class Lab(Protocol):
    """Measures stacks.

    ``judge`` answers for each stack, from memory where it was measured before. ``sample`` measures once more each.
    ``recheck`` measures again and says whether each stack is as before; one that is not is a skip from then on.
    ``rates`` are set where the ends were found to be noisy. ``purpose`` is shown and counted: search or confirm.
    """

    rates: Rates | None

    def judge(self, stacks: Sequence[Stack], purpose: str) -> list[Judgement]: ...
    def sample(self, stacks: Sequence[Stack], purpose: str) -> list[Judgement]: ...
    def recheck(self, stacks: Sequence[Stack]) -> list[bool]: ...


@dataclass(frozen=True, kw_only=True)
class Change:
    """One component's move from one pin to another; None where a stack does not have the component."""

    component: str
    old: Pin | None
    new: Pin | None

    def __str__(self) -> str:
        return f"{self.component} {self.old or 'absent'} → {self.new or 'absent'}"


# Two images with the same pins: what differs is in no stack file.
IMAGE_ONLY = Change(component="image", old=Pin(kind="fact", version="one"), new=Pin(kind="fact", version="another"))


@dataclass
class Edge:
    """A step that changes the result, with the last low and the first high stack around it.

    ``hidden`` counts stacks inside the step that could not be measured; ``pinned`` tells that its components cannot
    move one by one. ``sizes`` are the numbers of candidates of each stage by its name.
    """

    low: Stack
    high: Stack
    changes: tuple[Change, ...]
    hidden: int = 0
    pinned: bool = False
    held: float = 1.0
    sizes: dict[str, int] = field(default_factory=dict)
    skips: int = 0
    bound: int = 0
    index: int = 0
    low_value: float | None = None
    high_value: float | None = None
    high_zone: Zone = Zone.BAD

    @property
    def exact(self) -> bool:
        """Nothing unmeasured is left inside."""
        return self.hidden == 0

    def __str__(self) -> str:
        return ", ".join(map(str, self.changes))


@dataclass
class Finding:
    """A cause: one edge, or several that are bad only together.

    ``kind`` is culprit, contribution (it accounts for a part of the way from good to bad) or interaction.
    ``necessary``: the bad end without it is not bad; ``sufficient``: the good end with it is not good; None where
    that cannot be told, with the reason in ``remarks``.
    """

    kind: str
    edges: list[Edge]
    necessary: bool | None = None
    sufficient: bool | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def components(self) -> list[str]:
        return list(dict.fromkeys(c.component for e in self.edges for c in e.changes))

    def __str__(self) -> str:
        return " together with ".join(f"({e})" if len(e.changes) > 1 else str(e) for e in self.edges)


@dataclass
class Answer:
    """What a search found; ``bound`` is the most search probes it may have taken."""

    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    bound: int = 0

    @property
    def ending(self) -> Ending:
        """CULPRIT where every cause is one step, RANGE where something unmeasured hides inside one."""
        named = self.findings and all(e.exact for f in self.findings for e in f.edges)
        return Ending.CULPRIT if named else Ending.RANGE


class StackSearch:
    """Finds what turned good into bad between the first and the last of ``stacks`` (in time), and proves it.

    Algorithm and bounds: ``docs/bisect.md``. The same answers of the lab always give the same search.
    """

    def __init__(
        self,
        lab: Lab,
        stacks: Sequence[Stack],
        history: History,
        constraints: Constraints = Constraints(),
        *,
        parallel: int = 1,
        recheck: bool = True,
        say: Callable[..., None] = lambda line, left=0: None,
    ) -> None:
        self._lab, self._stacks, self._history = lab, list(stacks), history
        self._constraints, self._parallel, self._recheck, self._say = constraints, parallel, recheck, say
        self._notes: list[str] = []
        self._paths: dict[tuple, list[Pin | None]] = {}

    # The whole.

    def run(self) -> Answer:
        """The findings, first cause first."""
        line, findings = self._stacks, []
        good, bad = line[0], line[-1]
        for _ in range(MOST_CAUSES):
            edges = self._explain(line)
            findings += self._confirmed(edges, good, bad)
            reverted = self._reverted(bad, edges)
            if reverted is None:
                break
            zone = self._zone(reverted, "confirm").zone
            if zone not in (Zone.BAD, Zone.AMBIGUOUS):
                break
            self._say(f"without {'; '.join(map(str, edges))} the bad end is still {zone.value}: a second cause")
            line = self._without(line, edges, reverted)
            bad = reverted
        else:
            self._notes.append(f"after {MOST_CAUSES} causes the bad end without them is still not good: there are more")
        return Answer(findings=findings, notes=self._notes, bound=sum(e.bound for f in findings for e in f.edges))

    def _explain(self, line: list[Stack]) -> list[Edge]:
        """The steps from good to bad along a line: one, or two where the value rests in between."""
        edges = [self._steady(line, GOOD_ONLY)]
        first = edges[0]
        if first.high_zone is Zone.AMBIGUOUS and self._zone(line[-1]).zone is Zone.BAD:
            self._say(f"{first} leads only part of the way; looking for the rest")
            rest = [s for s in line[first.index :] if s.digest != first.high.digest]
            short = [first.high, *rest]
            second = self._steady(short, NOT_BAD)
            # Its place is counted on the shortened line; who reads it has the whole one.
            place = next((i for i, s in enumerate(line) if s.digest == short[second.index].digest), first.index)
            edges.append(replace(second, index=place))
        return edges

    # One search.

    def _steady(self, line: list[Stack], low_zones: frozenset[Zone]) -> Edge:
        """The step whose two sides are the same when they are measured again. A flaky stack is a skip from then on."""
        while True:
            edge = self._find(line, low_zones)
            ends = {line[0].digest, line[-1].digest}  # measured repeatedly before the search
            sides = [s for s in (edge.low, edge.high) if s.digest not in ends]
            if not self._recheck or self._lab.rates is not None or not sides or all(self._lab.recheck(sides)):
                return edge

    def _find(self, line: list[Stack], low_zones: frozenset[Zone]) -> Edge:
        sizes: dict[str, int] = {}
        steps: list[Step] = []

        def walk(stage: str, points: list[Stack], rebuild=None, patience: float = math.inf, weigh=None) -> Step:
            sizes[stage] = len(points) - 1
            left = rounds(len(points) - 1, self._parallel)
            self._say(f"{stage}: {len(points) - 1} candidates, at most {left} rounds", left)
            step = self._search(points, low_zones, rebuild, patience, weigh)
            steps.append(step)
            return step

        low, high, index, hidden = line[0], line[-1], len(line) - 1, 0
        if len(line) > 2:
            step = walk("dated stacks", line, patience=PATIENCE, weigh=self._weight)
            low, high = step.low, step.high
            index = next(i for i, s in enumerate(line) if s.digest == high.digest)
        paths = {n: [high.pins.get(n)] for n in low.changed(high)}
        base = low
        if len(paths) > 1:

            def rebuild(low: Stack, high: Stack, dead: frozenset[str]) -> list[Stack]:
                return self._chain(low, high, {n: [high.pins.get(n)] for n in low.changed(high)}, base, dead)

            step = walk("packages", self._chain(low, high, paths, base), rebuild, weigh=self._weight)
            low, high, hidden = step.low, step.high, self._hidden(step)
        if hidden == 0:
            paths = {n: self._path(low, high, n) for n in low.changed(high)}
            points = self._chain(low, high, paths, base)
            if len(points) > 2:
                step = walk("releases and commits", points)
                low, high, hidden = step.low, step.high, len(step.skipped)
        names = low.changed(high)
        if hidden == 0 and len(names) == 1 and names[0] in low.pins and names[0] in high.pins:
            # The ends of this line are the two releases as they were measured, so a flip lies on it even where a
            # release is not what its tag says.
            old, new = low.pins[names[0]], high.pins[names[0]]
            points = self._chain(low, high, {names[0]: self._history.inside(high.component(names[0]), old, new)}, base)
            if len(points) > 2:
                step = walk("commits inside a release", points)
                low, high, hidden = step.low, step.high, len(step.skipped)
        names = low.changed(high)
        judged = self._zone(high)
        return Edge(
            low=low,
            high=high,
            index=index,
            hidden=hidden,
            pinned=len(names) > 1 and hidden == 0,
            sizes=sizes,
            changes=tuple(Change(component=n, old=low.pins.get(n), new=high.pins.get(n)) for n in names)
            or (IMAGE_ONLY,),
            held=min((s.held for s in steps), default=1.0),
            skips=sum(s.skips for s in steps),
            bound=sum(s.bound(self._parallel) for s in steps),
            low_value=self._zone(low).value,
            high_value=judged.value,
            high_zone=judged.zone if judged.zone in (Zone.BAD, Zone.AMBIGUOUS) else Zone.BAD,
        )

    def _hidden(self, step: Step) -> int:
        """Packages that a skip, and not a pin, keeps from being told apart."""
        names = step.low.changed(step.high)
        if len(names) < 2:
            return 0
        feasible = [n for n in names if self._feasible(step.low.with_pins({n: step.high.pins.get(n)}))]
        return len(names) if step.skips and feasible else 0

    def _path(self, low: Stack, high: Stack, name: str) -> list[Pin | None]:
        old, new = low.pins.get(name), high.pins.get(name)
        if old is None or new is None:
            return [new]
        asked = (name, old.identity, new.identity)
        if asked not in self._paths:
            component = high.component(name)
            self._paths[asked] = [new] if component.external else list(self._history.between(component, old, new))
        return self._paths[asked]

    def _weight(self, low: Stack, high: Stack) -> float:
        """How many releases or commits a step between two stacks holds."""
        return sum(len(self._path(low, high, n)) for n in low.changed(high))

    def _search(self, points: list[Stack], low_zones: frozenset[Zone], rebuild, patience: float, weigh) -> Step:
        rates = self._lab.rates
        if rates is None:
            return search_line(
                points,
                lambda s: self._lab.judge(s, "search"),
                low_zones,
                parallel=self._parallel,
                patience=patience,
                rebuild=rebuild,
                weigh=weigh,
            )
        # Three stages at most share the permitted error.
        confidence = 1 - (1 - CONFIDENCE) / 3
        return search_line_noisy(
            points,
            lambda s: self._lab.sample(s, "search"),
            low_zones,
            rates,
            parallel=self._parallel,
            confidence=confidence,
        )

    def _chain(self, low: Stack, high: Stack, paths, base: Stack, dead: frozenset[str] = frozenset()) -> list[Stack]:
        """The chain between two stacks, its mixtures named by what they have that ``base`` has not."""
        low_end, *mixtures, high_end = chain_between(low, high, paths, self._feasible, without=dead)
        return [low_end, *(self._named(m, base) for m in mixtures), high_end]

    @staticmethod
    def _named(mixture: Stack, base: Stack) -> Stack:
        brought = ", ".join(f"{n} {mixture.pins.get(n) or 'absent'}" for n in base.changed(mixture))
        return replace(mixture, name=f"{base} with {brought}")

    def _feasible(self, stack: Stack) -> bool:
        return self._constraints.violation(stack) is None

    def _zone(self, stack: Stack, purpose: str = "confirm") -> Judgement:
        """Good or bad, settled by repetition where the test is noisy."""
        if self._lab.rates is None:
            return self._lab.judge([stack], purpose)[0]
        last: list[Judgement] = []

        def once() -> bool | None:
            last[:] = self._lab.sample([stack], purpose)
            return None if last[0].zone is Zone.SKIP else last[0].zone not in GOOD_ONLY

        bad = settle(once, self._lab.rates)
        if bad is None:
            return Judgement(zone=Zone.SKIP, reason=last[0].reason or "noise", detail=last[0].detail)
        return Judgement(zone=Zone.BAD if bad else Zone.GOOD, value=last[0].value)

    # The proof.

    def _reverted(self, bad: Stack, edges: list[Edge]) -> Stack | None:
        """The bad end with every found change taken back; None where that cannot exist."""
        if any(IMAGE_ONLY in e.changes for e in edges):
            return None
        stack = bad.with_pins(
            {c.component: c.old for e in reversed(edges) for c in e.changes}, name="bad end without the found changes"
        )
        if stack.digest == bad.digest or not self._feasible(stack):
            return None
        return stack

    def _confirmed(self, edges: list[Edge], good: Stack, bad: Stack) -> list[Finding]:
        findings = []
        for edge in edges:
            kind = "contribution" if len(edges) > 1 or edge.high_zone is Zone.AMBIGUOUS else "culprit"
            finding = Finding(kind=kind, edges=[edge])
            findings.append(finding)
            if IMAGE_ONLY in edge.changes:
                finding.remarks.append(
                    f"{edge.low} and {edge.high} have the same pins and different images: freeze both and compare"
                )
                continue
            self._necessity(finding, edge, bad)
            self._sufficiency(finding, edge, good)
        return findings

    def _necessity(self, finding: Finding, edge: Edge, bad: Stack) -> None:
        zone = self._counterfactual(finding, bad, {c.component: c.old for c in edge.changes}, "bad end without it")
        if zone is not None:
            finding.necessary = zone is Zone.GOOD or (finding.kind == "contribution" and zone is Zone.AMBIGUOUS)
            if not finding.necessary:
                finding.remarks.append(f"the bad end without it is still {zone.value}: it is not the only cause")

    def _sufficiency(self, finding: Finding, edge: Edge, good: Stack) -> None:
        zone = self._counterfactual(finding, good, {c.component: c.new for c in edge.changes}, "good end with it")
        if zone is None:
            return
        finding.sufficient = zone is not Zone.GOOD
        if zone is Zone.GOOD:
            self._interaction(finding, edge, good)

    def _counterfactual(self, finding: Finding, end: Stack, pins: dict[str, Pin | None], name: str) -> Zone | None:
        stack = end.with_pins(pins, name=name)
        if stack.digest != end.digest:
            reason = self._constraints.violation(stack)
            if reason is not None:
                finding.remarks.append(f"not to be confirmed, the {name} cannot exist: {reason}")
                return None
        judged = self._zone(stack)
        if judged.zone is Zone.SKIP:
            finding.remarks.append(
                f"not confirmed, the {name} could not be measured: {judged.reason} {judged.detail}".rstrip()
            )
            return None
        return judged.zone

    def _interaction(self, finding: Finding, edge: Edge, good: Stack) -> None:
        """The culprit alone leaves the good end good: what else has to change for it to be bad?"""
        own = {c.component: c.new for c in edge.changes}
        others = [n for n in good.changed(edge.high) if n not in own]
        self._say(f"{edge} alone is not bad on the good end; looking for its partners among {', '.join(others)}")

        def stack_with(names: Sequence[str]) -> Stack:
            return good.with_pins({**own, **{n: edge.high.pins.get(n) for n in names}})

        def bad(names: Sequence[str]) -> bool | None:
            stack = stack_with(names)
            if not self._feasible(stack):
                return None
            zone = self._zone(stack).zone
            return None if zone is Zone.SKIP else zone is not Zone.GOOD

        partners = list(ddmin(others, bad))
        for name in partners:
            rest = [n for n in partners if n != name]
            low, high = stack_with(rest), stack_with(partners)
            if not self._feasible(low) or self._zone(low).zone is not Zone.GOOD:
                low_pin = good.pins.get(name)
                finding.remarks.append(f"{name}: its part could not be narrowed down")
                finding.edges.append(
                    self._edge_of(low, high, (Change(component=name, old=low_pin, new=high.pins.get(name)),))
                )
                continue
            finding.edges.append(self._find([low, high], GOOD_ONLY))
        if partners:
            finding.kind = "interaction"
        else:
            finding.remarks.append("the good end with it is good, and no other change was found that makes it bad")

    def _edge_of(self, low: Stack, high: Stack, changes: tuple[Change, ...]) -> Edge:
        return Edge(low=low, high=high, changes=changes, hidden=1)

    def _without(self, line: list[Stack], edges: list[Edge], bad: Stack) -> list[Stack]:
        """The dated stacks as they would be had the found changes never come: the line of the next search."""
        reverted = [line[0]]
        for i, stack in enumerate(line[1:-1], start=1):
            late = [e for e in edges if i >= e.index]
            pins = {c.component: c.old for e in reversed(late) for c in e.changes}
            candidate = stack.with_pins(pins, name=f"{stack.name} without the found changes") if pins else stack
            if candidate.digest not in (reverted[-1].digest, bad.digest) and self._feasible(candidate):
                reverted.append(candidate)
        return [*reverted, bad]
