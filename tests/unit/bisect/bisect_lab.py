"""A simulated lab: packages are numbered commits, a function of the numbers says what a stack is."""

from __future__ import annotations

from collections import Counter

from alignment.bisect.components import Component
from alignment.bisect.solver import StackSearch
from alignment.bisect.stack import Pin, Stack
from alignment.bisect.zones import Judgement, Zone

NAMES = ("a", "b", "c", "d")
DEFINED = {n: Component(name=n, distribution=n, module=n) for n in NAMES}


class Numbered:
    """Every number between two revisions is a commit."""

    def inside(self, component, old, new):
        return [new]

    def between(self, component, old, new):
        step = 1 if int(new.revision) > int(old.revision) else -1
        return [
            *(Pin(kind="git", revision=str(r)) for r in range(int(old.revision) + step, int(new.revision), step)),
            new,
        ]


def stack(*places: int, name: str = "") -> Stack:
    """A stack with one number per package."""
    pins = {n: Pin(kind="git", revision=str(p)) for n, p in zip(NAMES, places)}
    return Stack(pins=pins, name=name or " ".join(map(str, places)), defined=DEFINED)


def places(one: Stack) -> dict[str, int]:
    return {n: int(p.revision) for n, p in one.pins.items()}


class SimulatedLab:
    """``value`` of the numbers: up to 0.25 good, from 0.75 bad, None unmeasurable. ``flaky`` stacks say the other
    thing first.
    """

    rates = None

    def __init__(self, value, flaky=lambda at: False) -> None:
        self.value, self.flaky, self.flagged = value, flaky, set()
        self.known: dict[str, Judgement] = {}
        self.asked: list[dict[str, int]] = []
        self.counts: Counter[str] = Counter()

    def judge(self, stacks, purpose):
        for one in stacks:
            if one.digest not in self.known:
                self.counts[purpose] += 1
                self.asked.append(places(one))
                self.known[one.digest] = self._judged(places(one), first=True)
        return [self.known[s.digest] for s in stacks]

    sample = judge

    def recheck(self, stacks):
        steady = []
        for one in stacks:
            same = self._judged(places(one), first=False).zone is self.known[one.digest].zone
            if not same:
                self.known[one.digest] = Judgement(zone=Zone.SKIP, reason="flaky")
            steady.append(same)
        return steady

    def _judged(self, at, *, first):
        value = self.value(at)
        if value is None:
            return Judgement(zone=Zone.SKIP, reason="build")
        if first and self.flaky(at):
            value = 1.0 - value
        zone = Zone.GOOD if value <= 0.25 else Zone.BAD if value >= 0.75 else Zone.AMBIGUOUS
        return Judgement(zone=zone, value=value)

    def search(self, line, **options):
        for end in (line[0], line[-1]):
            self.known[end.digest] = self._judged(places(end), first=False)
        return StackSearch(self, line, Numbered(), **options).run()
