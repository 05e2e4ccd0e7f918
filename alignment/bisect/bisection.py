"""Begin a bisection, go on with it, plan it without doing it, and replay it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.bisect.chain import chain_between
from alignment.bisect.constraints import Constraints
from alignment.bisect.frozen_suite import ROOT, FrozenSuite, files_digest, freeze_suite
from alignment.bisect.history import KnownHistory, index_releases
from alignment.bisect.journal import FILE, SCHEMA, Journal
from alignment.bisect.known_bad import load_known_bad
from alignment.bisect.line_search import rounds
from alignment.bisect.outcomes import BisectError, Ending
from alignment.bisect.providers.choice import make_provider
from alignment.bisect.report import write_report
from alignment.bisect.runner import Session, Settings, Threads, expected_seconds, hardware_of_this_machine, measure_once
from alignment.bisect.stack import Stack, in_time
from alignment.bisect.words import answer_data
from alignment.errors import InputError

SUITE, SCRATCH = "suite", "scratch"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a bisection would do: candidates of each stage, the chain of packages, and the most probes it may take."""

    stacks: int
    packages: int
    candidates: int
    end_runs: int
    changes: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def bound(self) -> int:
        """2·n₀ + ⌈log2 S⌉ + ⌈log2 m⌉ + ⌈log2 C⌉ + 2, for one cause without skips and noise."""
        return 2 * self.end_runs + self.search + 2

    @property
    def search(self) -> int:
        return rounds(self.stacks) + rounds(self.packages) + rounds(self.candidates)

    def lines(self) -> list[str]:
        """The plan for people."""
        return [
            *self.changes,
            f"steps between dated stacks: {self.stacks}; between packages: at most {self.packages}; "
            f"of one package: at most {self.candidates}",
            f"at most {self.bound} probes: 2·{self.end_runs} at the ends + "
            f"{rounds(self.stacks)} + {rounds(self.packages)} + {rounds(self.candidates)} in the search "
            "+ 2 for the proof",
            "beyond: 2 for each stack that cannot be measured, 2 to measure the step again, "
            "and another search for each further cause",
            *self.notes,
        ]


def make_plan(settings: Settings, *, index: Callable[[str], list[str]] | None = index_releases) -> Plan:
    """The plan; nothing is built and nothing measured (an index may be asked for its releases).

    Raises:
        BisectError: the ends are equal or infeasible.
    """
    stacks = list(settings.stacks)
    good, bad = stacks[0], stacks[-1]
    if good.digest == bad.digest:
        raise BisectError(
            "the two ends are the same stack, so nothing can have changed between them",
            ending=Ending.ENDS_EQUAL,
            where=f"{good} and {bad}",
        )
    constraints, notes = Constraints(settings.rules).for_ends([good, bad] if settings.good_known else [bad])
    answers: dict[str, list] = {}
    history = KnownHistory(
        releases=settings.releases,
        prereleases=settings.prereleases,
        index=index,
        repositories={n: Path(p) for n, p in settings.repositories.items()},
        recall=answers.get,
        remember=answers.__setitem__,
    )

    def feasible(stack: Stack) -> bool:
        return constraints.violation(stack) is None

    def path(low: Stack, high: Stack, name: str) -> list:
        old, new = low.pins.get(name), high.pins.get(name)
        external = high.component(name).external if name in high.pins else True
        return [new] if old is None or new is None or external else history.between(high.component(name), old, new)

    packages = candidates = 1
    for low, high in zip(stacks, stacks[1:]):
        names = low.changed(high)
        packages = max(packages, len(chain_between(low, high, {n: [high.pins.get(n)] for n in names}, feasible)) - 1)
        candidates = max(candidates, *(len(path(low, high, n)) for n in names)) if names else candidates
    notes += [
        f"known bad: {entry.title} ({entry.id})"
        for entry in load_known_bad()
        if entry.matches(bad) > entry.matches(good)
    ]
    changes = []
    for name in good.changed(bad):
        count = len(path(good, bad, name))
        changes.append(
            f"{name}: {good.pins.get(name) or 'absent'} → {bad.pins.get(name) or 'absent'}"
            + (f" ({count} steps)" if count > 1 else "")
        )
    return Plan(
        stacks=len(stacks) - 1,
        packages=packages,
        candidates=candidates,
        end_runs=settings.end_runs,
        changes=tuple(changes),
        notes=tuple(notes),
    )


def order_stacks(good: Stack | None, bad: Stack, dated: Sequence[Stack]) -> tuple[Stack, ...]:
    """Good end, the dated stacks between the ends in time, bad end.

    Raises:
        InputError: without a good end there is nothing to look back through.
    """
    if good is None:
        if not dated:
            raise InputError(
                "neither a good end nor older stacks are given",
                where="--good",
                next_step="give --good A.yaml or --stacks FOLDER",
            )
        older = [s for s in in_time(list(dated)) if s.digest != bad.digest and (not bad.date or s.date <= bad.date)]
        if not older:
            raise InputError(
                "no stack of the folder is older than the bad end", where="--stacks", found=f"bad end of {bad.date}"
            )
        if not bad.date:
            raise InputError(
                "the bad end has no date, so none is so many days before it",
                where=str(bad),
                expected="date: 2025-08-07",
            )
        return (*older, bad)
    between = [
        s
        for s in in_time(list(dated))
        if s.digest not in (good.digest, bad.digest)
        and (not good.date or s.date >= good.date)
        and (not bad.date or s.date <= bad.date)
    ]
    return (good, *between, bad)


def open_journal(directory: Path, settings: Settings | None) -> tuple[Journal, Settings]:
    """The journal of a new bisection, or of one to go on with.

    Raises:
        InputError: the folder holds another bisection, or none and there are no settings.
    """
    if settings is None and not (directory / FILE).is_file():
        raise InputError(
            "there is no bisection to go on with", where=directory, next_step="give --good, --bad and --probe"
        )
    journal = Journal(directory)
    begun = journal.settings()
    if begun is None:
        journal.append("begin", schema=SCHEMA, settings=settings.to_data())
        return journal, settings
    before = Settings.from_data(begun)
    if settings is not None and settings.digest != before.digest:
        journal.close()
        raise InputError(
            "the folder holds another bisection",
            where=directory,
            next_step="name another --state, or leave the other options out to go on with it",
        )
    return journal, before


def carry_out(
    directory: Path,
    settings: Settings | None,
    *,
    cache: Path,
    suite_source: Path = ROOT,
    ray_address: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    index: Callable[[str], list[str]] | None = index_releases,
    sleep: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """The whole of a bisection; killed at any moment, the same call goes on.

    Returns:
        The answer as :func:`alignment.bisect.words.answer_data` stores it; the page is written beside the journal.

    Raises:
        BisectError: with the ending that is the exit code.
    """
    # Tools are run in other folders than this process.
    directory, cache = Path(directory).resolve(), Path(cache).expanduser().resolve()
    journal, settings = open_journal(directory, settings)
    try:
        shutil.rmtree(directory / SCRATCH, ignore_errors=True)
        suite = freeze_suite(directory / SUITE, source=suite_source)
        provider = make_provider(
            settings.provider,
            cache=cache,
            repositories=settings.repositories,
            slots=settings.parallel,
            stacks=settings.stacks,
            mounts=(directory.resolve(),),
        )
        extra: dict[str, Any] = {} if sleep is None else {"sleep": sleep}
        measure = measure_once
        if ray_address is not None:
            from alignment.bisect.ray_nodes import RayMeasure

            measure = RayMeasure(suite, address=ray_address)
            say(f"{measure.nodes} nodes")
        session = Session(
            journal,
            settings,
            provider,
            suite,
            hardware=hardware_of_this_machine(),
            data_digest=files_digest(map(Path, settings.data)),
            nodes=Threads(settings.parallel),
            measure=measure,
            say=say,
            index=index,
            **extra,
        )
        try:
            answer = session.run()
        except BisectError as error:
            journal.append("ended", error=str(error), ending=error.ending.name.lower())
            write_report(journal)
            raise
        data = answer_data(answer, session.counts, repositories=settings.repositories)
        stored = json.loads(json.dumps(data))
        if (journal.last("answer_found") or {}).get("answer") != stored:
            journal.append("answer_found", answer=stored)
        write_report(journal)
        return data
    finally:
        journal.close()


def replay(directory: Path) -> dict[str, Any]:
    """Derives the answer again from the journal alone.

    Raises:
        InputError: the journal ends before the answer, or says something else than it did.
    """
    journal = Journal(directory, write=False)
    settings = Settings.from_data(journal.settings() or {})
    told = journal.last("provider")
    if told is None:
        raise InputError("nothing was measured yet", where=directory)
    suite = FrozenSuite(folder=directory / SUITE, commit=told["commit"], digest=told["suite"])
    session = Session(journal, settings, None, suite, hardware=told["hardware"], data_digest=told["data"], replay=True)
    data = json.loads(json.dumps(answer_data(session.run(), session.counts, repositories=settings.repositories)))
    stored = (journal.last("answer_found") or {}).get("answer")
    if stored is not None and _essence(stored) != _essence(data):
        raise InputError(
            "the journal gives another answer than it gave before",
            where=journal.path,
            expected=stored["words"],
            found=data["words"],
        )
    return data


def _essence(answer: dict[str, Any]) -> list:
    return [answer["ending"], [[e["changes"] for e in f["edges"]] for f in answer["findings"]]]


def status(directory: Path) -> dict[str, Any]:
    """How far a bisection is: counts, the last stage, what is left at most and how long that should take."""
    journal = Journal(directory, write=False)
    settings = Settings.from_data(journal.settings() or {})
    probes = list(journal.of("probe"))
    counts: dict[str, int] = {}
    for event in probes:
        counts[event["purpose"]] = counts.get(event["purpose"], 0) + 1
    stages = [e["text"] for e in journal.of("stage")]
    answer = (journal.last("answer_found") or {}).get("answer")
    try:
        recall = journal.recall
        plan = make_plan(settings, index=lambda name: recall(f"releases of {name}") or [])
        left = 0 if answer else max(plan.bound - len(probes), 1)
    except InputError:
        plan, left = None, None
    eta = expected_seconds(journal, left, settings.parallel) if left else None
    return {
        "state": str(directory),
        "finished": answer is not None,
        "probe": settings.probes[0].text,
        "good": str(settings.stacks[0]),
        "bad": str(settings.stacks[-1]),
        "probes": counts,
        "stage": stages[-1] if stages else "",
        "bound": plan.bound if plan else None,
        "left_at_most": left,
        "seconds_left": None if eta is None or not math.isfinite(eta) else round(eta),
        "answer": answer["words"] if answer else None,
        "ended": (journal.last("ended") or {}).get("error") if not answer else None,
    }
