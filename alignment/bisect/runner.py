"""Carries a bisection out: builds stacks, probes them, remembers everything, and goes on where it was killed."""

from __future__ import annotations

import hashlib
import json
import queue
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from alignment.bisect.bayesian import Rates
from alignment.bisect.clusters import Clusters, make_clusters, pin_signature
from alignment.bisect.components import COMPONENTS
from alignment.bisect.constraints import Constraints, Rule
from alignment.bisect.frozen_suite import FrozenSuite
from alignment.bisect.history import KnownHistory
from alignment.bisect.journal import Journal, probe_key
from alignment.bisect.observation import Observation, Result, skip
from alignment.bisect.outcomes import BisectError, Ending
from alignment.bisect.probe import NOTHING_COLLECTED, Probe, order_by_cost
from alignment.bisect.providers.base import NotBuilt, Provider, facts_inside, verify
from alignment.bisect.solver import Answer, StackSearch
from alignment.bisect.stack import Stack, stack_from_data
from alignment.bisect.zones import Judgement, Zone
from alignment.errors import InputError

END_RUNS = 2
NOISY_END_RUNS = 20
# A failed node or registry is asked again after so many seconds, doubled each time.
RETRY_SECONDS = (5.0, 20.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a bisection is about: enough to begin it, to go on with it and to replay it.

    ``stacks`` in time, the bad end last. ``good_known``: the first one is the good end; else it is looked for
    backwards. ``end_runs`` and ``noisy_end_runs``: how often each end is measured, before and after it proves noisy.
    """

    stacks: tuple[Stack, ...]
    probes: tuple[Probe, ...]
    good_known: bool = True
    rules: tuple[Rule, ...] = ()
    releases: Mapping[str, list[str]] = field(default_factory=dict)
    repositories: Mapping[str, str] = field(default_factory=dict)
    prereleases: bool = False
    parallel: int = 1
    end_runs: int = END_RUNS
    noisy_end_runs: int = NOISY_END_RUNS
    recheck: bool = True
    provider: Mapping[str, Any] = field(default_factory=dict)
    data: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        return {
            **{k: v for k, v in asdict(self).items() if k not in ("stacks", "probes", "rules")},
            "stacks": [s.to_data() for s in self.stacks],
            "probes": [asdict(p) for p in self.probes],
            "rules": [asdict(r) for r in self.rules],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Settings:
        data = dict(data)
        data["stacks"] = tuple(stack_from_data(s, where="journal") for s in data["stacks"])
        data["probes"] = tuple(Probe(**p) for p in data["probes"])
        data["rules"] = tuple(Rule(**r) for r in data["rules"])
        data["data"] = tuple(data["data"])
        return cls(**data)

    @property
    def digest(self) -> str:
        """Two bisections are the same when this is."""
        return hashlib.sha256(json.dumps(self.to_data(), sort_keys=True).encode()).hexdigest()


class Nodes(Protocol):
    """Where probes run: here in threads, or on the nodes of a cluster."""

    def run(self, jobs: Sequence[Callable[[int], Observation]]) -> list[Observation]: ...


class Threads:
    """Jobs in threads of this process, each with a slot of its own."""

    def __init__(self, count: int) -> None:
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._count = count
        for slot in range(count):
            self._slots.put(slot)

    def run(self, jobs: Sequence[Callable[[int], Observation]]) -> list[Observation]:
        if len(jobs) == 1:
            return [self._one(jobs[0])]
        with ThreadPoolExecutor(max_workers=self._count) as pool:
            return list(pool.map(self._one, jobs))

    def _one(self, job: Callable[[int], Observation]) -> Observation:
        slot = self._slots.get()
        try:
            return job(slot)
        finally:
            self._slots.put(slot)


def measure_once(provider: Provider, probe: Probe, stack: Stack, slot: int, suite: Path, scratch: Path) -> Observation:
    """Builds a stack, verifies that it is that stack, and probes it once. Runs wherever ``Nodes`` puts it."""
    try:
        environment = provider.prepare(stack, slot=slot)
        facts = [n for n in stack.pins if n in COMPONENTS and COMPONENTS[n].external]
        wrong = verify(environment, stack, facts_inside(environment, facts, suite))
    except NotBuilt as error:
        if error.transient:
            return Observation(result=Result.INFRASTRUCTURE, reason="infrastructure", detail=error.detail)
        return skip(error.reason, error.detail)
    if wrong:
        return skip("environment", "; ".join(wrong), build_seconds=environment.seconds)
    seen = probe.run(environment, suite=suite, scratch=scratch)
    return replace(seen, build_seconds=environment.seconds)


class Session:
    """One bisection with its journal. It is the lab of the solver: every answer comes out of the journal or goes into
    it first.

    With ``replay`` nothing is measured: what the journal does not hold is an error.
    """

    def __init__(
        self,
        journal: Journal,
        settings: Settings,
        provider: Provider | None,
        suite: FrozenSuite,
        *,
        hardware: str,
        data_digest: str = "",
        nodes: Nodes | None = None,
        replay: bool = False,
        measure: Callable[..., Observation] = measure_once,
        say: Callable[[str], None] = lambda line: None,
        index: Callable[[str], list[str]] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.journal, self.settings, self.provider, self.suite = journal, settings, provider, suite
        self.hardware, self.data_digest, self.replay, self._say, self._sleep = hardware, data_digest, replay, say, sleep
        self.nodes, self._measure_once = nodes or Threads(settings.parallel), measure
        self.rates: Rates | None = None
        self.clusters: Clusters | None = None
        self.probe = settings.probes[0]
        self.counts: Counter[str] = Counter()
        self._known = journal.observations()
        self._given_up: dict[str, Observation] = {}
        self._samples: Counter[str] = Counter()
        self._flaky: set[str] = set()
        self._used: set[str] = set()
        self._index = index
        self._environment = provider.identity if provider else next((e["identity"] for e in journal.of("provider")), "")
        if provider and not replay and journal.last("provider") is None:
            journal.append(
                "provider",
                identity=provider.identity,
                hardware=hardware,
                suite=suite.digest,
                commit=suite.commit,
                data=data_digest,
            )

    # The whole.

    def run(self) -> Answer:
        """Ends, search, proof. The answer is in the journal when this returns."""
        self.note("stage", f"{len(self.settings.stacks)} stacks, probe {self.settings.probes[0].text}")
        self._only_different_ends()
        constraints, notes = Constraints(self.settings.rules).for_ends(self._ends())
        stacks = self._verified()
        search = StackSearch(
            self,
            stacks,
            self.history(),
            constraints,
            parallel=self.settings.parallel,
            recheck=self.settings.recheck,
            say=lambda text, left=0: self.note("stage", text, left),
        )
        answer = search.run()
        answer.notes[:0] = notes
        return answer

    def history(self) -> KnownHistory:
        """Releases and commits between pins; what an index says is remembered."""
        return KnownHistory(
            releases=self.settings.releases,
            prereleases=self.settings.prereleases,
            index=None if self.replay else self._index,
            repositories={n: Path(p) for n, p in self.settings.repositories.items()},
            recall=self.journal.recall,
            remember=(lambda q, a: None) if self.replay else self.journal.remember,
        )

    def note(self, kind: str, text: str, left: int = 0) -> None:
        """Says a line, and journals it the first time; ``left`` rounds of probes are said with their time."""
        seconds = expected_seconds(self.journal, left) if left else None
        self._say(text + (f", about {seconds:.0f} s" if seconds else ""))
        if not self.replay and not any(e["text"] == text for e in self.journal.of(kind) if "text" in e):
            self.journal.append(kind, text=text)

    def _ends(self) -> list[Stack]:
        return (
            [self.settings.stacks[0], self.settings.stacks[-1]]
            if self.settings.good_known
            else [self.settings.stacks[-1]]
        )

    def _only_different_ends(self) -> None:
        stacks = self.settings.stacks
        fixed = {
            n for a, b in zip(stacks, stacks[1:]) for n in a.changed(b) if n in COMPONENTS and COMPONENTS[n].external
        }
        if fixed and self.provider is not None and self.provider.name in ("venv", "git"):
            raise InputError(
                f"virtual environments cannot change {', '.join(sorted(fixed))}",
                where="--provider",
                expected="container or command",
                found=self.provider.name,
            )
        if len(stacks) < 2 or stacks[0].digest == stacks[-1].digest:
            raise BisectError(
                "the two ends are the same stack, so nothing can have changed between them",
                ending=Ending.ENDS_EQUAL,
                where=f"{stacks[0]} and {stacks[-1]}",
                next_step="compare the machines and the data: alignment triage",
            )

    # The ends.

    def _verified(self) -> list[Stack]:
        """The stacks from a good end to a bad end, for the cheapest probe that tells them apart."""
        last: BisectError | None = None
        probes = order_by_cost(self.settings.probes)
        for probe in probes:
            self.probe, self.rates, self.clusters, self._samples = probe, None, None, Counter()
            if len(probes) > 1:
                self.note("stage", f"does the {probe.layer} probe tell the ends apart? {probe.text}")
            try:
                return self._verify_ends(list(self.settings.stacks))
            except BisectError as error:
                cheap = error.ending in (
                    Ending.NOT_SEPARABLE,
                    Ending.BAD_END_IS_GOOD,
                    Ending.GOOD_END_IS_BAD,
                    Ending.END_NOT_MEASURED,
                )
                if not cheap or probe is probes[-1]:
                    raise
                self.note("stage", f"it does not: {error}")
                last = error
        raise last or InputError("no probe is given", where="--probe")

    def _verify_ends(self, stacks: list[Stack]) -> list[Stack]:
        bad_runs = self._runs(stacks[-1], "bad end", self.settings.end_runs)
        if not self.probe.by_value and all(o.result is Result.GOOD for o in bad_runs):
            raise BisectError(
                "the bad end is good: the probe passes on it, so there is nothing to find",
                ending=Ending.BAD_END_IS_GOOD,
                where=str(stacks[-1]),
                found=f"{len(bad_runs)} of {len(bad_runs)} runs passed",
            )
        if not self.settings.good_known:
            stacks = self._back_off(stacks, bad_runs)
        good_runs = self._runs(stacks[0], "good end", self.settings.end_runs)
        if not self.probe.by_value and self._mixed(good_runs, bad_runs):
            good_runs = self._runs(stacks[0], "good end", self.settings.noisy_end_runs)
            bad_runs = self._runs(stacks[-1], "bad end", self.settings.noisy_end_runs)
            self.rates = self._rates_of(good_runs, bad_runs, stacks)
        elif not self.probe.by_value and all(o.result is Result.BAD for o in good_runs):
            self._refuse_good_end(stacks[0], good_runs, bad_runs)
        self.clusters = make_clusters(good_runs, bad_runs, check=self.probe.check)
        told = self.clusters.to_data()
        if not self.replay and (self.journal.last("clusters") or {}).get("clusters") != told:
            rates = asdict(self.rates) if self.rates else None
            self.journal.append("clusters", clusters=told, probe=asdict(self.probe), rates=rates)
        signature = f", failing as {self.clusters.signature}" if self.clusters.signature else ""
        noisy = (
            f"; noisy: {self.rates.false_bad:.0%} / {self.rates.false_good:.0%} of the results lie"
            if self.rates
            else ""
        )
        self.note("stage", f"the ends are verified{signature}{noisy}")
        return stacks

    def _refuse_good_end(self, stack: Stack, good: Sequence[Observation], bad: Sequence[Observation]) -> None:
        expected = pin_signature(bad, self.probe.check)
        found = (
            "; ".join(sorted({str(f) for o in good for f in o.failures})) or f"{len(good)} of {len(good)} runs failed"
        )
        if expected is not None and not any(expected.matches(f) for o in good for f in o.failures):
            raise BisectError(
                "the good end fails in another way than the bad end, so nothing was measured on it",
                ending=Ending.END_NOT_MEASURED,
                where=str(stack),
                expected=f"a pass, or a failure as {expected}",
                found=f"{found}: {good[0].output[-300:]}",
            )
        raise BisectError(
            "the good end is bad: the probe fails on it too",
            ending=Ending.GOOD_END_IS_BAD,
            where=str(stack),
            found=found,
            next_step="go further back, or leave --good out to have a good end looked for",
        )

    def _runs(self, stack: Stack, what: str, count: int) -> list[Observation]:
        runs = self._observe([(stack, repeat) for repeat in range(count)], "ends")
        self._samples[stack.digest] = max(self._samples[stack.digest], count)
        unfit = [o for o in runs if o.result in (Result.SKIP, Result.INFRASTRUCTURE)]
        if unfit:
            raise BisectError(
                f"the {what} could not be measured",
                ending=Ending.END_NOT_MEASURED,
                where=str(stack),
                found=f"{unfit[0].reason}: {unfit[0].detail}",
            )
        return runs

    @staticmethod
    def _mixed(good: Sequence[Observation], bad: Sequence[Observation]) -> bool:
        return len({o.result for o in good}) > 1 or len({o.result for o in bad}) > 1

    @staticmethod
    def _rates_of(good: Sequence[Observation], bad: Sequence[Observation], stacks: Sequence[Stack]) -> Rates:
        """Pessimistic rates from repeated ends; refuses ends whose failure rates overlap (Fisher's exact test)."""
        from scipy.stats import fisher_exact

        failed_good, failed_bad = (sum(o.result is Result.BAD for o in runs) for runs in (good, bad))
        table = [[failed_bad, len(bad) - failed_bad], [failed_good, len(good) - failed_good]]
        chance = float(fisher_exact(table, alternative="greater")[1])
        rates = Rates.pessimistic(failed_good, len(good), len(bad) - failed_bad, len(bad))
        if chance > 0.01 or not rates.informative:
            raise BisectError(
                "the two ends cannot be told apart: both fail now and then",
                ending=Ending.NOT_SEPARABLE,
                where=f"{stacks[0]} and {stacks[-1]}",
                expected="failure rates that differ (Fisher's exact test, one per cent)",
                found=f"{failed_good} of {len(good)} runs of the good end failed, "
                f"{failed_bad} of {len(bad)} of the bad end",
                next_step="make the probe deterministic, or run each end more often (--noisy-end-runs)",
            )
        return rates

    def _back_off(self, stacks: list[Stack], bad_runs: Sequence[Observation]) -> list[Stack]:
        """A good end 1, 2, 4, … days before the bad one; what is bad on the way becomes the new bad end."""
        from datetime import date

        judge = Clusters(signature=None, verdicts=True)
        high, days = len(stacks) - 1, 1
        newest = date.fromisoformat(stacks[-1].date)
        while True:
            target = next(
                (i for i in range(high - 1, -1, -1) if (newest - date.fromisoformat(stacks[i].date)).days >= days), 0
            )
            self.note(
                "stage",
                f"is {stacks[target]} good, {(newest - date.fromisoformat(stacks[target].date)).days} days before?",
            )
            seen = self._observe([(stacks[target], 0)], "search")[0]
            zone = judge.judge(seen).zone
            if zone is Zone.GOOD:
                return stacks[target : high + 1]
            if target == 0:
                raise BisectError(
                    "no good end was found: the oldest stack is not good either"
                    if zone is Zone.BAD
                    else "no good end was found: the oldest stack could not be measured",
                    ending=Ending.GOOD_END_IS_BAD if zone is Zone.BAD else Ending.END_NOT_MEASURED,
                    where=str(stacks[0]),
                    next_step="give older stack files",
                )
            if zone is Zone.BAD:
                high = target
            days *= 2

    # The lab of the solver.

    def judge(self, stacks: Sequence[Stack], purpose: str) -> list[Judgement]:
        seen = self._observe([(s, 0) for s in stacks], purpose)
        return [self._judged(s, o) for s, o in zip(stacks, seen)]

    def sample(self, stacks: Sequence[Stack], purpose: str) -> list[Judgement]:
        wanted = []
        for stack in stacks:
            wanted.append((stack, self._samples[stack.digest]))
            self._samples[stack.digest] += 1
        return [self._judged(s, o) for (s, _), o in zip(wanted, self._observe(wanted, purpose))]

    def recheck(self, stacks: Sequence[Stack]) -> list[bool]:
        """Measures again; a stack whose two results differ is flaky, and unmeasurable from now on."""
        again = self._observe([(s, 1) for s in stacks], "recheck")
        steady = []
        for stack, second in zip(stacks, again):
            first = self.judge([stack], "recheck")[0]
            now = self._judged(stack, second)
            same = now.zone is Zone.SKIP or now.zone is first.zone
            if not same:
                self._flaky.add(stack.digest)
                self.note("stage", f"{stack} is flaky: {first.zone.value}, then {now.zone.value}")
            steady.append(same)
        return steady

    def _judged(self, stack: Stack, seen: Observation) -> Judgement:
        if stack.digest in self._flaky:
            return Judgement(zone=Zone.SKIP, reason="flaky", detail="two runs of it disagree")
        return self.clusters.judge(seen)

    # Measuring.

    def key(self, stack: Stack, repeat: int) -> str:
        return probe_key(
            stack=stack.digest,
            suite=self.suite.digest,
            check=self.probe.identity,
            hardware=self.hardware,
            environment=self._environment,
            data=self.data_digest,
            repeat=repeat,
        )

    def _observe(self, wanted: Sequence[tuple[Stack, int]], purpose: str) -> list[Observation]:
        """Observations in order: from the journal, else measured now, as many at once as are allowed."""
        keys = [self.key(s, r) for s, r in wanted]
        missing = [i for i, k in enumerate(keys) if k not in self._known and k not in self._given_up]
        for key in keys:
            if key not in self._used:
                self._used.add(key)
                self.counts[purpose] += 1
        if missing and self.replay:
            stack, repeat = wanted[missing[0]]
            raise InputError(
                "the journal ends here: the next probe was not finished",
                where=self.journal.path,
                found=f"{stack}, run {repeat + 1}",
            )
        if missing:
            for i, seen in zip(missing, self.nodes.run([self._job(*wanted[i], keys[i], purpose) for i in missing])):
                if seen.result is Result.ABORT:
                    raise BisectError(
                        "the probe collects nothing"
                        if seen.reason == NOTHING_COLLECTED
                        else "the probe ended the bisection",
                        ending=Ending.NOTHING_COLLECTED if seen.reason == NOTHING_COLLECTED else Ending.ABORTED,
                        where=self.probe.text,
                        found=seen.detail,
                    )
                if keys[i] not in self._known:
                    self._given_up[keys[i]] = seen
        return [self._known.get(k) or self._given_up[k] for k in keys]

    def _job(self, stack: Stack, repeat: int, key: str, purpose: str) -> Callable[[int], Observation]:
        def job(slot: int) -> Observation:
            for wait in (*RETRY_SECONDS, None):
                seen = self._measure(stack, slot)
                self._record(stack, repeat, key, purpose, seen)
                if seen.result is not Result.INFRASTRUCTURE:
                    break
                if wait is not None:
                    self._say(f"infrastructure: {seen.detail}; again in {wait:.0f} s")
                    self._sleep(wait)
            else:
                return seen
            if seen.result is not Result.INFRASTRUCTURE and seen.result is not Result.ABORT:
                self._known[key] = seen
            return seen

        return job

    def _measure(self, stack: Stack, slot: int) -> Observation:
        return self._measure_once(
            self.provider, self.probe, stack, slot, self.suite.folder, self.journal.directory / "scratch"
        )

    def _record(self, stack: Stack, repeat: int, key: str, purpose: str, seen: Observation) -> None:
        self.journal.append(
            "probe",
            key=key,
            stack=stack.digest,
            name=str(stack),
            pins={n: str(p) for n, p in stack.pins.items()},
            repeat=repeat,
            purpose=purpose,
            check=self.probe.text,
            observation=seen.to_data(),
        )
        judged = self._judged(stack, seen) if self.clusters is not None else None
        told = judged.zone.value if judged else seen.result.value
        reason = (judged.reason if judged else "") or seen.reason
        value = f", {seen.value:.6g}" if seen.value is not None else ""
        took = seen.seconds + seen.build_seconds
        self._say(f"{purpose}: {stack}: {told}{f' ({reason})' if reason else ''}{value}, {took:.1f} s")


def expected_seconds(journal: Journal, probes: int, parallel: int = 1) -> float | None:
    """Median time of the finished probes times the number of rounds; None before the first."""
    past = [
        e["observation"].get("seconds", 0.0) + e["observation"].get("build_seconds", 0.0) for e in journal.of("probe")
    ]
    return statistics.median(past) * -(-probes // parallel) if past else None


def hardware_of_this_machine() -> str:
    """Architecture, processor and accelerators in one line, without importing torch."""
    import platform

    from alignment.devices.fingerprint import command_output, nvidia_driver_version, parse_cpu_model, parse_npu_smi

    try:
        cpu = parse_cpu_model(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        cpu = None
    text = command_output("npu-smi", "info")
    chips = [c.name for c in parse_npu_smi(text).chips] if text and "npu-smi" in text else []
    nvidia = nvidia_driver_version()
    return " · ".join(
        [
            platform.machine(),
            cpu or platform.processor(),
            *chips,
            *([f"nvidia {nvidia}"] if nvidia != "unknown" else []),
        ]
    )
