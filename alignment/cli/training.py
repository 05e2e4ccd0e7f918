"""The training pipeline, and its rollout stage alone."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from alignment.cli import verl
from alignment.cli.options import (
    RUNS,
    ConfigOption,
    DeviceOption,
    EmulateOption,
    FaultOption,
    JsonOption,
    Overrides,
    RunDirOption,
    console_on,
    find_device,
    one_thread,
    say,
)
from alignment.cli.report import leave_page
from alignment.numerics.verdict import ALIGNED, exit_code


def dapo(
    overrides: Overrides = None,
    config: ConfigOption = "dapo-tiny",
    device: DeviceOption = "auto",
    run_dir: RunDirOption = None,
    executor: Annotated[str, typer.Option(help="ray, or inprocess for one process without Ray.")] = "ray",
    emulate_npu: EmulateOption = False,
    fault: FaultOption = None,
    as_json: JsonOption = False,
) -> None:
    """The training pipeline alone: DAPO, GRPO or PPO, as the configuration says; engine=verl runs the verl trainer.

    capture.detail=sketch (or any other capture.* key) writes what the stages compute to the run's capture/ folder, for
    ``alignment compare``.
    """
    if verl.ENGINE in (overrides or ()):
        verl.dapo_with_verl(
            overrides,
            config=config,
            device=device,
            run_dir=run_dir,
            executor=executor,
            emulate_npu=emulate_npu,
            fault=fault or (),
            as_json=as_json,
        )
    from alignment.baseline.runs import torch_name
    from alignment.capture.config import split_overrides
    from alignment.capture.pipeline import capture_observer
    from alignment.faults.injection import WORKER_SETUP, active, faults_and_overrides
    from alignment.report.progress import training_progress
    from alignment.report.run_directory import new_run_directory, write_stack, write_training_provenance
    from alignment.rl.config import load_config
    from alignment.rl.run import run_dapo

    faults, changes = faults_and_overrides(overrides, fault)
    captures, changes = split_overrides(changes)
    settings = load_config(config, changes)
    chosen = find_device(settings.trainer.device if device == "auto" else device, emulate_npu)
    # A directory that is named may hold an earlier part of the same run: trainer.resume_mode decides what happens.
    directory = run_dir or new_run_directory(RUNS)
    observers = [capture_observer(captures, directory)] if captures is not None else []
    console = console_on(as_json)
    with active(faults), one_thread(), training_progress(console_on(True), quiet=as_json) as progress:
        result = run_dapo(
            settings,
            run_dir=directory,
            executor=executor,
            device=torch_name(chosen),
            progress=progress,
            worker_setup=WORKER_SETUP if executor == "ray" else None,
            observers=observers,
        )
    write_stack(result.directory)
    write_training_provenance(result.directory, chosen)
    page = leave_page(result.directory)
    if as_json:
        document = {"run": str(result.directory), "page": page and str(page), "metrics": result.metrics}
        print(json.dumps(document, indent=1))
    else:
        console.print(f"{len(result.metrics)} steps; everything of this run: {result.directory}", markup=False)
        if page is not None:
            say(console, f"as a page: {page}")
    raise typer.Exit(ALIGNED)


def rollout(
    overrides: Overrides = None,
    config: ConfigOption = "dapo-tiny",
    device: DeviceOption = "auto",
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to answer.")] = 4,
    emulate_npu: EmulateOption = False,
    fault: FaultOption = None,
    as_json: JsonOption = False,
) -> None:
    """The rollout stage alone: bring up the engine, show what it generates, say whether the text is garbled."""
    from alignment.baseline.runs import torch_name
    from alignment.faults.injection import active, faults_and_overrides
    from alignment.report.progress import waiting
    from alignment.report.rollout_view import rollout_command
    from alignment.report.run_directory import finite
    from alignment.rl.config import load_config

    faults, changes = faults_and_overrides(overrides, fault)
    settings = load_config(config, changes)
    chosen = find_device(settings.trainer.device if device == "auto" else device, emulate_npu)
    shown: list[str] = []
    with active(faults), one_thread(), waiting(console_on(True), f"answering {prompts} prompts", quiet=as_json):
        result = rollout_command(settings, prompts=prompts, device=torch_name(chosen), emit=shown.append)
    if not as_json:
        print("\n".join(shown))
    else:
        print(json.dumps({"verdicts": [finite(v.to_dict()) for v in result.verdicts]}, indent=1))
    raise typer.Exit(exit_code(result.verdicts))
