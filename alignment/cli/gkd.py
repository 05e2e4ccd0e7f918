"""The distillation pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import (
    RUNS,
    ConfigOption,
    DeviceOption,
    EmulateOption,
    FaultOption,
    JsonOption,
    Overrides,
    RequireOption,
    RunDirOption,
    console_on,
    find_device,
    one_thread,
    say,
)
from alignment.cli.report import leave_page
from alignment.numerics.verdict import ALIGNED, exit_code


def gkd(
    overrides: Overrides = None,
    config: ConfigOption = "gkd-tiny",
    device: DeviceOption = "auto",
    run_dir: RunDirOption = None,
    executor: Annotated[str, typer.Option(help="ray, or inprocess for one process without Ray.")] = "ray",
    baseline: Annotated[
        Optional[Path], typer.Option("--baseline", help="Also judge the curves by the stored ones in this folder.")
    ] = None,
    emulate_npu: EmulateOption = False,
    fault: FaultOption = None,
    require: RequireOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generalised knowledge distillation: a student learns from a teacher, on its own answers and on the data set's.

    capture.detail=sketch (or any other capture.* key) writes what the stages compute to the run's capture/ folder, for
    ``alignment compare``.
    """
    from alignment.baseline.gkd_curves import judge_gkd
    from alignment.baseline.runs import torch_name
    from alignment.capture.config import split_overrides
    from alignment.capture.pipeline import capture_observer
    from alignment.errors import InputError
    from alignment.faults.injection import WORKER_SETUP, active, faults_and_overrides
    from alignment.report.progress import training_progress
    from alignment.report.run_directory import (
        finite,
        new_run_directory,
        write_stack,
        write_training_provenance,
        write_verdicts,
    )
    from alignment.report.terminal import print_verdicts
    from alignment.rl.config import load_config
    from alignment.rl.gkd_config import GkdConfig
    from alignment.rl.gkd_run import run_gkd
    from alignment.rl.run import RunResult

    faults, changes = faults_and_overrides(overrides, fault)
    captures, changes = split_overrides(changes)
    fixed = () if baseline is None else ("trainer.resume_mode=disable", "trainer.save_freq=0", "trainer.seed=7")
    settings = load_config(config, [*fixed, *changes], kind=GkdConfig)
    if baseline is not None and not baseline.is_dir():
        raise InputError("the folder of the baselines does not exist", where="--baseline", found=baseline)
    chosen = find_device(settings.trainer.device if device == "auto" else device, emulate_npu)
    directory = run_dir or new_run_directory(RUNS)
    console = console_on(as_json)

    def run(settings: GkdConfig, before: int) -> RunResult:
        where = directory / f"gkd-{before + 1}" if before else directory
        return run_gkd(
            settings,
            run_dir=where,
            executor=executor,
            device=torch_name(chosen),
            progress=progress,
            worker_setup=WORKER_SETUP if executor == "ray" else None,
            observers=[capture_observer(captures, where)] if captures is not None else [],
        )

    verdicts = []
    with active(faults), one_thread(), training_progress(console_on(True), quiet=as_json) as progress:
        if baseline is None:
            results = [run(settings, 0)]
        else:
            results, verdicts = judge_gkd(settings, Path(config).stem, baselines=baseline, device=chosen, run=run)
            write_verdicts(directory, verdicts)
    for result in results:
        write_stack(result.directory)
    write_training_provenance(result.directory, chosen)
    page = leave_page(directory) if baseline is None else leave_page(directory, baselines=baseline)
    code = ALIGNED if baseline is None else exit_code(verdicts, require=require)
    if as_json:
        document = {"run": str(directory), "page": page and str(page), "metrics": results[0].metrics}
        if verdicts:
            document |= {"exit_code": code, "verdicts": [finite(v.to_dict()) for v in verdicts]}
        print(json.dumps(document, indent=1))
    else:
        if verdicts:
            print_verdicts(console, verdicts)
        console.print(f"{len(results[0].metrics)} steps; everything of this run: {directory}", markup=False)
        if page is not None:
            say(console, f"as a page: {page}")
    raise typer.Exit(code)
