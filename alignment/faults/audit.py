"""Runs the catalogue of faults against the checks: which check catches which fault, where it puts it, and what it
cries wolf at.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from alignment.errors import InputError
from alignment.faults.catalogue import all_faults, find_faults
from alignment.faults.check import LAYERS, Check, Finding, Setting
from alignment.faults.checks import all_checks
from alignment.faults.fault import STAGES, Fault

BENIGN_SEEDS = 20
UNDECLARED = "not said"
"""Culprit of a context manager, which declares nothing: where it is placed is shown and not judged."""
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault of the matrix. ``placed`` and ``by_cheapest_layer`` speak of the first check that caught it."""

    fault: str
    category: str
    caught: bool
    check: str = ""
    layer: str = ""
    stage: str = ""
    place: str = ""
    evidence: str = ""
    placed: bool = False
    by_cheapest_layer: bool = False
    expected_layer: str
    culprit: str
    seconds: float
    all_checks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A benign difference that a check took for a fault."""

    fault: str
    seed: int
    finding: str


@dataclass(kw_only=True)
class Audit:
    """What an audit found.

    Attributes:
        rows: one per defect.
        clean: what the checks found without any fault; anything here makes the rest worthless.
        alarms: false ones, on the benign set.
        benign_runs: number of (benign difference, seed) pairs that ran.
        seconds: of the whole audit.
        checks: names of the checks.
        ablated: whether every fault was run against every check, so that ``all_checks`` of the rows is filled in.
    """

    rows: list[Row] = field(default_factory=list)
    clean: list[Finding] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    benign_runs: int = 0
    seconds: float = 0.0
    checks: tuple[Check, ...] = ()
    ablated: bool = False

    @property
    def caught(self) -> int:
        return sum(row.caught for row in self.rows)

    @property
    def placed(self) -> int:
        return sum(row.placed for row in self.rows)

    @property
    def by_cheapest_layer(self) -> int:
        return sum(row.by_cheapest_layer for row in self.rows)

    @property
    def passes(self) -> bool:
        """All caught, nothing cried wolf at, and nothing wrong without a fault."""
        return self.caught == len(self.rows) and not self.alarms and not self.clean

    def only_catch(self) -> dict[str, list[str]]:
        """By check, the faults that no other check catches (needs ``ablated``)."""
        alone: dict[str, list[str]] = {check.name: [] for check in self.checks}
        for row in self.rows:
            if len(row.all_checks) == 1:
                alone[row.all_checks[0]].append(row.fault)
        return alone

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data: dict[str, Any] = {
            "defects": len(self.rows),
            "caught": self.caught,
            "placed": self.placed,
            "by_cheapest_layer": self.by_cheapest_layer,
            "benign_runs": self.benign_runs,
            "false_alarms": len(self.alarms),
            "seconds": round(self.seconds, 3),
            "clean": [str(finding) for finding in self.clean],
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "matrix": [asdict(row) for row in self.rows],
        }
        if self.ablated:
            data["only_catch"] = self.only_catch()
        return data


def audit(
    faults: Sequence[Fault],
    checks: Sequence[Check],
    *,
    seeds: int = BENIGN_SEEDS,
    ablation: bool = False,
    jobs: int = 1,
    progress: Progress = lambda line: None,
) -> Audit:
    """The checks without a fault, then each fault until a check catches it, then the benign differences over ``seeds``.

    Args:
        ablation: run every check against every fault, also after the first catch.
        jobs: processes that share the work; faults and checks that are not of the catalogue are run in this one.
        progress: told about everything that is done.
    """
    begun = time.perf_counter()
    result = Audit(checks=tuple(checks), ablated=ablation)
    for check in checks:
        result.clean += check.findings()
    progress("without a fault")
    defects = [fault for fault in faults if not fault.benign]
    benign = [fault for fault in faults if fault.benign]
    # Seed by seed, so that what checks keep of a seed's references serves all differences.
    runs = [(fault, seed) for seed in range(seeds) for fault in benign]
    with _workers(jobs, checks) as workers:
        rows = [workers.submit(catch, fault, ablation=ablation) for fault in defects]
        # All differences of one seed in one process, for the same reason.
        alarmed = [workers.submit(alarms_of_seed, benign, seed) for seed in (range(seeds) if benign else ())]
        for fault, row in zip(defects, rows):
            result.rows.append(row())
            progress(fault.id)
        for found in alarmed:
            result.alarms += found()
            for fault in benign:
                progress(fault.id)
    result.benign_runs = len(runs)
    result.seconds = time.perf_counter() - begun
    return result


class _Here:
    """Runs what is submitted in this process, when its result is asked for."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.checks = checks

    def submit(self, work: Callable, what: Any, *arguments: Any, **options: Any) -> Callable[[], Any]:
        return lambda: work(what, *arguments, checks=self.checks, **options)


class _Pool(_Here):
    """Runs faults of the catalogue in worker processes, others here."""

    def __init__(self, checks: Sequence[Check], pool: ProcessPoolExecutor) -> None:
        super().__init__(checks)
        self.pool = pool
        self.known = {id(fault) for fault in all_faults()}

    def submit(self, work: Callable, what: Any, *arguments: Any, **options: Any) -> Callable[[], Any]:
        group = [what] if isinstance(what, Fault) else what
        if any(id(fault) not in self.known for fault in group):
            return super().submit(work, what, *arguments, **options)
        ids = what.id if isinstance(what, Fault) else [fault.id for fault in what]
        return self.pool.submit(_in_worker, work, ids, arguments, options).result


@contextmanager
def _workers(jobs: int, checks: Sequence[Check]) -> Iterator[_Here]:
    if jobs <= 1 or tuple(checks) != all_checks():
        yield _Here(checks)
        return
    # A fresh interpreter per worker: a forked one would inherit the locks of PyTorch's threads.
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare_worker
    ) as pool:
        yield _Pool(checks, pool)


def _prepare_worker() -> None:
    import torch

    torch.set_num_threads(1)
    # What modules bind at their first use is bound without a fault.
    for check in all_checks():
        check.findings()


def _in_worker(work: Callable, ids: str | list[str], arguments: tuple, options: dict) -> Any:
    what = find_faults([ids])[0] if isinstance(ids, str) else list(find_faults(ids))
    return work(what, *arguments, checks=all_checks(), **options)


def catch(fault: Fault, checks: Iterable[Check], *, ablation: bool = False) -> Row:
    """The first of ``checks`` that finds ``fault``, and what it says."""
    begun = time.perf_counter()
    catchers: list[str] = []
    first: tuple[Check, Finding] | None = None
    first_seconds = 0.0
    with fault():
        for check in checks:
            found = check.findings()
            if not found:
                continue
            catchers.append(check.name)
            if first is None:
                first, first_seconds = (check, found[0]), time.perf_counter() - begun
            if not ablation:
                break
    expected = {"fault": fault.id, "category": fault.category, "expected_layer": fault.layer, "culprit": fault.culprit}
    if first is None:
        return Row(**expected, caught=False, seconds=time.perf_counter() - begun)
    check, finding = first
    return Row(
        **expected,
        caught=True,
        check=check.name,
        layer=check.layer,
        stage=finding.stage,
        place=finding.place,
        evidence=finding.evidence,
        placed=fault.is_placed_by(finding),
        by_cheapest_layer=LAYERS.index(check.layer) <= LAYERS.index(fault.layer),
        seconds=first_seconds,
        all_checks=tuple(catchers) if ablation else (),
    )


def alarms_of_seed(faults: Sequence[Fault], seed: int, *, checks: Iterable[Check]) -> list[Alarm]:
    """:func:`alarms` of several benign differences."""
    return [alarm for fault in faults for alarm in alarms(fault, checks, seed)]


def alarms(fault: Fault, checks: Iterable[Check], seed: int) -> list[Alarm]:
    """What the checks say under a benign difference and the arithmetic it is declared with."""
    setting = Setting(seed=seed) if fault.declares is None else Setting(seed=seed, precision=fault.declares)
    with fault():
        found = [finding for check in checks for finding in check.findings(setting)]
    return [Alarm(fault=fault.id, seed=seed, finding=f"{one.check}: {one}") for one in found]


def faults_named(specs: Sequence[str]) -> list[Fault]:
    """The faults an audit is asked for: ids, or ``path.py:object`` where the object is a fault or a context manager.

    Raises:
        InputError: see :func:`alignment.faults.injection.load_fault`.
    """
    from alignment.faults.injection import load_fault

    chosen = []
    for spec in specs:
        loaded = load_fault(spec)
        if not isinstance(loaded, Fault):
            loaded = Fault(
                id=spec, title=spec, source="the command line", category="outside", stage=STAGES, culprit=UNDECLARED,
                layer=LAYERS[-1], setting="not said", why="not said", apply=loaded,
            )  # fmt: skip
        chosen.append(loaded)
    return chosen


def choose(faults: Sequence[Fault], categories: Sequence[str]) -> list[Fault]:
    """The faults of these categories, or all.

    Raises:
        InputError: an unknown category.
    """
    known = sorted({fault.category for fault in faults})
    for category in categories:
        if category not in known:
            raise InputError("there is no such category", where="--category", expected=", ".join(known), found=category)
    return [fault for fault in faults if not categories or fault.category in categories]
