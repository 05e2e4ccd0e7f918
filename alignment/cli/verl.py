"""The real verl trainer: ``alignment dapo engine=verl`` and what existing runs of it left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from alignment.cli.options import RUNS, JsonOption, RunDirOption, console_on, find_device, say
from alignment.cli.report import leave_page
from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED

# What engine=verl looks like among the overrides; alignment.rl.verl_run, which knows it too, imports torch.
ENGINE = "engine=verl"


def dapo_with_verl(
    overrides: Sequence[str],
    *,
    config: str,
    device: str,
    run_dir: Path | None,
    executor: str,
    emulate_npu: bool,
    fault: Sequence[str],
    as_json: bool,
) -> None:
    """A run of the verl trainer, followed to its end and read into a run directory."""
    from alignment.report.progress import training_progress
    from alignment.report.run_directory import new_run_directory
    from alignment.rl.verl_run import run_verl

    options = ((emulate_npu, "--emulate-npu"), (bool(fault), "--fault"), (executor != "ray", f"--executor {executor}"))
    for given, option in options:
        if given:
            raise InputError(
                "verl trains in processes of its own, which this option does not reach",
                where=option,
                next_step="leave it out, or run without engine=verl",
            )
    chosen = find_device(device, emulate=False)
    directory = run_dir or new_run_directory(RUNS)
    if (directory / "run.json").exists():
        raise InputError("the directory already holds a run", where=directory, next_step="name another --run-dir")
    console = console_on(as_json)
    with training_progress(console_on(True), quiet=as_json) as progress:
        result = run_verl(config, overrides, run_dir=directory, device=chosen.kind, progress=progress)
    page = leave_page(result.directory)
    if as_json:
        document = {"run": str(result.directory), "page": page and str(page), "metrics": result.metrics}
        print(json.dumps(document, indent=1))
    else:
        console.print(f"{len(result.metrics)} steps of verl; everything of this run: {result.directory}", markup=False)
        if page is not None:
            say(console, f"as a page: {page}")
    raise typer.Exit(ALIGNED)


def read_verl(
    folder: Annotated[Path, typer.Argument(help="What a verl run wrote: metrics, rollouts, .hydra, checkpoints.")],
    run_dir: RunDirOption = None,
    device: Annotated[str, typer.Option("--device", help="Label of the device it ran on.")] = "unknown",
    as_json: JsonOption = False,
) -> None:
    """Read the output folder of a verl run into a run directory of this project's form."""
    from alignment.report.progress import waiting
    from alignment.report.run_directory import new_run_directory
    from alignment.rl.verl_record import record_verl_run

    directory = run_dir or new_run_directory(RUNS)
    if (directory / "run.json").exists():
        raise InputError("the directory already holds a run", where=directory, next_step="name another --run-dir")
    with waiting(console_on(True), f"reading {folder}", quiet=as_json):
        output = record_verl_run(folder, directory, device=device)
    found = {
        "run": str(directory),
        "metrics_from": output.origin,
        "steps": len(output.metrics),
        "rollouts": len(output.rollouts),
        "checkpoints": len(output.checkpoints),
        "configuration": bool(output.config),
    }
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(
            f"{directory}: {found['steps']} steps ({output.origin}), rollouts of {found['rollouts']}, "
            f"{found['checkpoints']} checkpoints" + ("" if output.config else ", no configuration found")
        )
