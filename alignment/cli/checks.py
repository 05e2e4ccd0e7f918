"""The layered checks, with a full run of the pipeline."""

from __future__ import annotations

import json
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
)
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome, exit_code


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
    from alignment.report.run_directory import PROVENANCE, finite, new_run_directory, write_stack, write_verdicts
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
        with suite_progress(console, quiet=as_json) as progress:
            verdicts = run_suite(setting, progress)
    path = write_verdicts(setting.run_dir, verdicts)
    write_stack(setting.run_dir)
    page = write_page([setting.run_dir], setting.run_dir / PAGE, baselines=baseline)
    code = exit_code(verdicts, require=require)
    if as_json:
        document = {
            "exit_code": code,
            "run": str(setting.run_dir),
            "page": str(page),
            "verdicts": [finite(v.to_dict()) for v in verdicts],
        }
        print(json.dumps(document, indent=1))
    else:
        print_verdicts(console, verdicts)
        console.print(f"everything of this run: {path.parent} (stack in {PROVENANCE})", markup=False, highlight=False)
        console.print(f"as a page: {page}", markup=False, highlight=False)
        if require and any(v.outcome is Outcome.UNAVAILABLE for v in verdicts):
            console.print("--require: what is unavailable counts as an error", markup=False, highlight=False)
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
