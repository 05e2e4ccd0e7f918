"""Whether stored baselines are whole, belong to today's cases, and still hold what the golden model computes."""

from __future__ import annotations

from dataclasses import dataclass

from alignment.backends.catalogue import cases
from alignment.baseline.check import golden_faults
from alignment.baseline.runs import REPLAY_FILE, load_curves, load_replay
from alignment.baseline.store import BaselineStore, inputs_hash, load, require_same_case
from alignment.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with the baselines; ``severity`` is ``error``, or ``note`` for what only takes space."""

    severity: str
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.problem}"


def verify(store: BaselineStore, *, recompute: bool = True) -> list[Finding]:
    """Everything wrong with the baselines in ``store``: damaged files, other configurations, other inputs, stale golden values.

    Args:
        recompute: also compute every golden value anew (seconds for all cases).
    """
    known = {case.id: case for case in cases()}
    findings, golden_seen = [], set()
    for path in store.paths():
        try:
            file = load(path)
        except InputError as error:
            findings.append(Finding(severity="error", where=str(path), problem=str(error)))
            continue
        for key, entry in file.entries.items():
            case = known.get(entry.case_id)
            if case is None:
                findings.append(Finding(severity="note", where=f"{path}: {key}", problem="no case uses this baseline"))
                continue
            inputs = case.inputs()
            try:
                require_same_case(entry, case.identity(), inputs_hash(inputs), where=path)
            except InputError as error:
                findings.append(Finding(severity="error", where=f"{path}: {key}", problem=str(error)))
                continue
            if recompute and (path, case.id) not in golden_seen:
                golden_seen.add((path, case.id))
                findings += [
                    Finding(severity="error", where=f"{path}: {key}", problem=f"{quantity.name}: {measure.name} = {measure.value:.3g}")
                    for quantity, measure in golden_faults(case, inputs, file.golden(case.id))
                ]
    findings += _damaged_runs(store)
    if not store.paths(layer="unit"):
        findings.append(
            Finding(severity="error", where=str(store.root), problem="there is no unit baseline: alignment baseline record")
        )
    return findings


def _damaged_runs(store: BaselineStore) -> list[Finding]:
    found = []
    for pattern, read in (("*/*/e2e/*.curves.json", load_curves), (f"*/*/e2e/*.replay/{REPLAY_FILE}", load_replay)):
        for path in sorted(store.root.glob(pattern)):
            try:
                read(path)
            except InputError as error:
                found.append(Finding(severity="error", where=str(path), problem=str(error)))
    return found


def unused(store: BaselineStore) -> list[str]:
    """Stored entries that no case of the catalogue asks for."""
    known = {case.id for case in cases()}
    return [
        f"{file.path.relative_to(store.root)}: {key}"
        for file in store.files()
        for key, entry in file.entries.items()
        if entry.case_id not in known
    ]


def missing(store: BaselineStore, *, kind: str) -> list[str]:
    """Ids of cases that no stored baseline of a kind of device covers."""
    covered = {entry.case_id for file in store.files(kind=kind) for entry in file.entries.values()}
    return [case.id for case in cases() if case.id not in covered]
