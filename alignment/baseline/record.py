"""Recording: measure the noise of a device, store it with the golden values, and show what changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from alignment.backends.case import Case
from alignment.backends.subject import Subject, get_subject
from alignment.baseline.diff import Change, changes
from alignment.baseline.measure import root_mean_square
from alignment.baseline.noise import budgets, measure_noise, refuse_lost_digits
from alignment.baseline.provenance import (
    COMMIT_VARIABLE,
    DIRTY,
    Provenance,
    provenance_of,
    source_commit,
    tensors_hash,
)
from alignment.baseline.store import BaselineStore, Entry, entry_hashes, golden_tensors, inputs_hash, load, packed
from alignment.devices.base import Device
from alignment.errors import InputError, UnavailableError

# For tests only: a baseline from a dirty tree cannot be traced back to its sources.
ALLOW_DIRTY = "ALIGNMENT_RECORD_FROM_DIRTY_TREE"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What one recording did: the entries, the files they went to, and every value that changed."""

    entries: tuple[Entry, ...]
    files: tuple[Path, ...]
    changes: tuple[Change, ...]


def refuse_unfit(device: Device) -> None:
    """Refuses to record from an emulated device or from sources that no commit holds.

    Raises:
        InputError: with what to do about it.
    """
    if device.emulated:
        raise InputError(
            "results of an emulated device are never a baseline", where=device.label, next_step="record on the device itself"
        )
    commit = source_commit()
    if os.environ.get(ALLOW_DIRTY) == "1":
        return
    if commit.endswith(DIRTY):
        raise InputError(
            "a baseline is not recorded from a dirty tree: nobody could tell later what made it",
            where="git status",
            expected="no change outside baselines/",
            found=commit,
            next_step="commit the change, then record",
        )
    if commit == "unknown":
        raise InputError(
            "the commit of the sources is unknown here",
            where=COMMIT_VARIABLE,
            next_step=f"{COMMIT_VARIABLE}=<commit> in the environment, where there is no git",
        )


def record_case(case: Case, subject: Subject, device: Device, provenance: Provenance) -> tuple[Entry, dict]:
    """The entry of one case and its golden tensors, measured now.

    Raises:
        InputError: what the device computes is not finite, or is too far from golden to be noise.
    """
    inputs = case.inputs()
    golden = case.golden_observations(inputs)
    noise = measure_noise(case, subject, device)
    refuse_lost_digits(case, noise)
    runs, measured = packed(budgets(case, noise, golden))
    tensors = golden_tensors(case.id, golden)
    quantities = {
        name: {
            "shape": list(golden[name].shape),
            "rms": root_mean_square(golden[name]),
            **measured.get(name, {"runs": [], "budgets": {}}),
        }
        for name in case.quantity_names
    }
    entry = Entry(
        case_id=case.id,
        subject=subject.name,
        case=case.identity(),
        inputs=inputs_hash(inputs),
        hashes=entry_hashes(case.identity(), inputs),
        golden=tensors_hash(tensors),
        runs=runs,
        quantities=quantities,
        provenance=provenance,
    )
    return entry, tensors


def record(
    cases: Iterable[Case],
    device: Device,
    store: BaselineStore,
    *,
    subjects: Iterable[str] = ("torch",),
    progress: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Records ``cases`` by ``subjects`` on ``device`` into ``store`` and says what changed.

    A subject that does not compute a case, or is not made for the device, has no baseline of it.

    Raises:
        InputError: an emulated device, a dirty tree, or values that are no noise. Nothing is written then.
        UnavailableError: a subject that cannot run here.
    """
    refuse_unfit(device)
    cases, subjects = tuple(cases), tuple(subjects)
    provenance = provenance_of(device)
    entries, tensors, changed = [], {}, []
    for case in cases:
        for name in subjects:
            subject = get_subject(name, case.layer)
            if device.kind not in subject.kinds or not subject.supports(case):
                continue
            available = subject.available(device)
            if not available.available:
                raise UnavailableError(available.reason, where=f"subject {name}")
            entry, golden = record_case(case, subject, device, provenance)
            before = stored_entry(store, entry)
            entries.append(entry)
            tensors.update(golden)
            changed += changes(before, entry)
            progress(f"{entry.key}: measured on {device.label}")
    return Recording(entries=tuple(entries), files=tuple(store.put(entries, tensors)), changes=tuple(changed))


def stored_entry(store: BaselineStore, entry: Entry) -> Entry | None:
    """The entry that ``entry`` will replace."""
    fingerprint = entry.provenance.fingerprint
    path = store.path(
        kind=fingerprint["kind"], chip=fingerprint["chip"], layer=entry.case["layer"], operator=entry.case["operator"]
    )
    return load(path).entries.get(entry.key) if path.exists() else None


def complete(store: BaselineStore, case: Case, subject: str, device: Device) -> bool:
    """Whether ``store`` already holds this case as these sources record it on this chip, so that recording can resume."""
    path = store.path(kind=device.kind, chip=device.fingerprint().chip, layer=case.layer, operator=case.operator)
    entry = load(path).entries.get(f"{case.id}/{subject}") if path.exists() else None
    return (
        entry is not None
        and entry.provenance.commit == source_commit()
        and entry.case == case.identity()
        and entry.inputs == inputs_hash(case.inputs())
    )
