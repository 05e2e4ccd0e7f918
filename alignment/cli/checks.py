"""The layered checks, with a full run of the pipeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import (
    BASELINES,
    RUNS,
    BaselineOption,
    ConfigOption,
    DeviceOption,
    EmulateOption,
    FaultOption,
    JsonOption,
    Overrides,
    RequireOption,
    RunDirOption,
    SubjectOption,
    console_on,
    find_device,
    one_thread,
    say,
)
from alignment.errors import InputError
from alignment.numerics.verdict import USAGE, Outcome, exit_code


def run(
    overrides: Overrides = None,
    config: ConfigOption = "dapo-tiny",
    device: DeviceOption = "auto",
    only: Annotated[
        Optional[str], typer.Option(help="Comma-separated parts: unit, layer, weight_sync, replay, curve.")
    ] = None,
    subject: SubjectOption = None,
    baseline: BaselineOption = BASELINES,
    run_dir: RunDirOption = None,
    executor: Annotated[str, typer.Option(help="ray, or inprocess for one process without Ray.")] = "ray",
    emulate_npu: EmulateOption = False,
    fault: FaultOption = None,
    require: RequireOption = False,
    as_json: JsonOption = False,
) -> None:
    """Layered checks and a full DAPO run on the best device present, against the best matching baseline."""
    from alignment.baseline.suite import PARTS, SuiteSetting, run_suite
    from alignment.faults.injection import WORKER_SETUP, active, faults_and_overrides
    from alignment.report.page import PAGE, write_page
    from alignment.report.progress import suite_progress
    from alignment.report.run_directory import PROVENANCE, STACK, finite, new_run_directory, write_stack, write_verdicts
    from alignment.report.terminal import print_verdicts

    parts = _parts(only, PARTS)
    chosen = find_device(device, emulate_npu)
    faults, changes = faults_and_overrides(overrides, fault)
    with active(faults), one_thread():
        setting = SuiteSetting(
            device=chosen,
            baselines=baseline,
            run_dir=run_dir or RUNS,
            config=config,
            overrides=tuple(changes),
            parts=parts,
            subjects=tuple(subject or ()),
            executor=executor,
            worker_setup=WORKER_SETUP,
        ).checked()
        setting = setting.in_directory(new_run_directory(RUNS, requested=run_dir))
        console = console_on(as_json)
        with suite_progress(console_on(True), quiet=as_json) as progress:
            verdicts = run_suite(setting, progress)
    code = exit_code(verdicts, require=require)
    if not as_json:
        # What was found is on the screen whatever becomes of the files.
        print_verdicts(console, verdicts)
    directory, remarks = setting.run_dir, []

    def written(what: str, write: Callable[[], Path]) -> Path | None:
        try:
            return write()
        except (InputError, OSError) as error:
            remarks.append(f"{what} was not written: {error}")
            return None

    if written("verdicts.json", lambda: write_verdicts(directory, verdicts)) is None:
        code = code or USAGE  # nobody can come back to a run that is not there
    stack = written(STACK, lambda: write_stack(directory))
    page = written("the page", lambda: write_page([directory], directory / PAGE, baselines=baseline))
    if as_json:
        document = {
            "exit_code": code,
            "run": str(directory),
            "page": None if page is None else str(page),
            "verdicts": [finite(v.to_dict()) for v in verdicts],
        }
        print(json.dumps(document, indent=1))
    else:
        frozen = f"stack in {STACK}, " if stack else ""
        say(console, f"everything of this run: {directory} ({frozen}machine and packages in {PROVENANCE})")
        if page is not None:
            say(console, f"as a page: {page}")
        if require and any(v.outcome is Outcome.UNAVAILABLE for v in verdicts):
            say(console, "--require: what is unavailable counts as an error")
    for remark in remarks:
        print(remark, file=sys.stderr)
    raise typer.Exit(code)


def _parts(only: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if only is None:
        return known
    chosen = tuple(part.strip() for part in only.split(",") if part.strip())
    for part in chosen:
        if part not in known:
            raise InputError("there is no such part", where="--only", expected=", ".join(known), found=part)
    if not chosen:
        raise InputError("no part is named", where="--only", expected=", ".join(known))
    return tuple(part for part in known if part in chosen)
