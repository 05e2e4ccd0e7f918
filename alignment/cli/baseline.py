"""Stored baselines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from alignment.cli.options import (
    BASELINES,
    BaselineOption,
    CaseOption,
    DeviceOption,
    JsonOption,
    LayerOption,
    SubjectOption,
    console_on,
    find_device,
    one_thread,
    say,
)
from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED, USAGE

baseline_app = typer.Typer(no_args_is_help=True, help="Record, list, show, compare and verify stored baselines.")


@baseline_app.command("record")
def record_baselines(
    case: CaseOption = None,
    subject: SubjectOption = None,
    layer: LayerOption = None,
    device: DeviceOption = "auto",
    baseline: BaselineOption = BASELINES,
    as_json: JsonOption = False,
) -> None:
    """Measure noise and golden values on a device and store them; shows every value before and after."""
    from alignment.backends.catalogue import find_cases
    from alignment.backends.subject import SUBJECTS, subject_entries
    from alignment.baseline.record import record
    from alignment.baseline.runs import PRESETS
    from alignment.baseline.store import BaselineStore
    from alignment.report.progress import tasks

    known = sorted({entry.name for entry in SUBJECTS})
    for name in subject or ():
        if name not in known:
            raise InputError("there is no such subject", where="--subject", expected=", ".join(known), found=name)
    chosen, console = find_device(device, emulate=False), console_on(as_json)
    files, changed = [], []
    # End-to-end runs have no subject to choose: they are the golden engines'.
    wanted = PRESETS if _layer(layer) in (None, "e2e") and not subject else ()
    presets = [name for name in wanted if not case or name in case]
    patterns = [name for name in case or () if name not in PRESETS]
    with one_thread(), tasks(console_on(True), "recording", quiet=as_json) as working:

        def told(line: str) -> None:
            working(line)
            say(console, line)

        cases = [] if layer == "e2e" or (case and not patterns) else find_cases(patterns, layer)
        if not cases and not presets:
            raise InputError("nothing is selected", where="baseline record", found=f"--case {case} --layer {layer}")
        for name in ("unit", "layer"):
            of_layer = [c for c in cases if c.layer == name]
            made = [e for e in subject_entries(name) if chosen.kind in e.kinds]
            # One that is named and absent is an error; the others are recorded where they are there.
            names = [e.name for e in made if (e.name in subject if subject else e.load().available(chosen).available)]
            if of_layer and names:
                working(f"{len(of_layer)} cases of layer {name}")
                done = record(of_layer, chosen, BaselineStore(baseline), subjects=names, progress=told)
                files += map(str, done.files)
                changed += map(str, done.changes)
        if presets:
            files += map(str, _record_runs(presets, chosen, baseline, told))
    if as_json:
        print(json.dumps({"files": files, "changes": changed}, indent=1))
        return
    for line in [*changed, f"{len(changed)} values changed in {len(files)} files; review them, then commit"]:
        say(console, line)


def _record_runs(presets, device, root: Path, report) -> Iterator[Path]:
    import tempfile

    from alignment.baseline import runs

    with tempfile.TemporaryDirectory() as work:
        for preset in presets:
            if preset in runs.REPLAY_PRESETS:
                yield runs.record_replay(root, preset, device, work=Path(work), report=report)
            yield runs.record_curves(root, preset, device, work=Path(work), report=report)


@baseline_app.command("list")
def list_baselines(
    layer: LayerOption = None, baseline: BaselineOption = BASELINES, as_json: JsonOption = False
) -> None:
    """What is stored: one row per case and implementation."""
    from rich.markup import escape
    from rich.table import Table

    from alignment.baseline.listing import rows

    found = rows(baseline, layer=_layer(layer))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    columns = ("kind", "chip", "layer", "name", "subject", "recorded", "commit", "stack")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in found:
        table.add_row(*(escape(row[column]) for column in columns))
    console_on(False).print(table)


@baseline_app.command("show")
def show_baseline(
    name: Annotated[str, typer.Argument(metavar="CASE", help="Case id, or preset of a training run.")],
    baseline: BaselineOption = BASELINES,
    as_json: Annotated[bool, typer.Option("--json", help="Changes nothing: the output is always JSON.")] = False,
) -> None:
    """One stored baseline in full, as JSON: bounds, noise, provenance."""
    from alignment.baseline.listing import details

    print(json.dumps(details(baseline, name), indent=1))


@baseline_app.command("diff")
def diff_baselines(
    before: Annotated[Path, typer.Argument(help="A folder of baselines.")],
    after: Annotated[Path, typer.Argument(help="The folder that is compared with it.")],
    as_json: JsonOption = False,
) -> None:
    """Every value that differs between two folders of baselines."""
    from alignment.baseline.diff import diff
    from alignment.baseline.store import BaselineStore

    for folder in (before, after):
        if not folder.is_dir():
            raise InputError("there is no such folder", where=folder)
    found = [str(change) for change in diff(BaselineStore(before), BaselineStore(after))]
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for line in [*found, f"{len(found)} values differ"]:
            print(line)


@baseline_app.command("verify")
def verify_baselines(baseline: BaselineOption = BASELINES, as_json: JsonOption = False) -> None:
    """Are the stored files whole, do they belong to today's cases, do they still hold what the golden model computes?"""
    from alignment.baseline.store import BaselineStore
    from alignment.baseline.verify import verify
    from alignment.report.progress import waiting

    if not baseline.is_dir():
        raise InputError("there is no such folder", where=baseline)
    with one_thread(), waiting(console_on(True), f"verifying {baseline}", quiet=as_json):
        found = verify(BaselineStore(baseline))
    errors = [f for f in found if f.severity == "error"]
    if as_json:
        print(json.dumps([{"severity": f.severity, "where": f.where, "problem": f.problem} for f in found], indent=1))
    else:
        for line in [*map(str, found), f"{len(errors)} errors, {len(found) - len(errors)} notes"]:
            print(line)
    raise typer.Exit(USAGE if errors else ALIGNED)


def _layer(name: str | None) -> str | None:
    if name not in (None, "unit", "layer", "e2e"):
        raise InputError("there is no such layer", where="--layer", expected="unit, layer or e2e", found=name)
    return name
