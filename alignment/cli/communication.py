"""One process against many."""

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
    RunDirOption,
    console_on,
    find_device,
    one_thread,
    say,
)
from alignment.numerics.verdict import exit_code


def communication(
    overrides: Overrides = None,
    config: ConfigOption = "dapo-tiny",
    run: Annotated[
        Optional[Path], typer.Option(help="Take the configuration of this run of ours instead of --config.")
    ] = None,
    ranks: Annotated[
        Optional[int], typer.Option(min=2, help="Processes of this machine; as the configuration says, or 2.")
    ] = None,
    rows: Annotated[
        Optional[int], typer.Option(min=2, help="Rows of the batch; two micro batches for every rank by default.")
    ] = None,
    ray: Annotated[
        Optional[str],
        typer.Option(help="Ranks on the Ray cluster at this address (auto: the running one), with one file system."),
    ] = None,
    device: DeviceOption = "auto",
    run_dir: RunDirOption = None,
    emulate_npu: EmulateOption = False,
    fault: FaultOption = None,
    as_json: JsonOption = False,
) -> None:
    """One optimizer step by one process with gradient accumulation and by many, on one batch; over 1 % in loss or
    gradient norm convicts communication, and the first collective that is wrong is named.

    Exit code 0: aligned; 1: communication is convicted, or not everything was judged; 2: it could not be carried out.
    """
    from alignment.baseline.runs import torch_name
    from alignment.diagnose.communication import one_against_many
    from alignment.faults.injection import WORKER_SETUP, active
    from alignment.report.run_directory import finite, new_run_directory
    from alignment.report.terminal import print_verdicts
    from alignment.rl.config import load_config
    from alignment.rl.ray_executor import RayExecutor
    from alignment.rl.run import located

    source = None if run else config
    changes = [*(_fields(run) if run else ()), *(overrides or ())]
    settings = load_config(source, changes)
    if ranks or settings.dp_size < 2:
        settings = load_config(source, [*changes, f"trainer.n_gpus_per_node={ranks or 2}", "trainer.nnodes=1"])
    chosen = find_device(device, emulate_npu)
    directory, console = run_dir or new_run_directory(RUNS), console_on(as_json)
    with one_thread(), active(fault or []), console.status("starting") as status:
        found = one_against_many(
            located(settings),
            executor=RayExecutor(worker_setup=WORKER_SETUP, address=ray),
            directory=directory,
            device=torch_name(chosen),
            rows=rows,
            progress=status.update,
        )
    verdicts = found.verdicts()
    if as_json:
        told = {"verdicts": [v.to_dict() for v in verdicts], **found.to_dict(), "run": str(directory)}
        print(json.dumps(finite(told), indent=1))
    else:
        print_verdicts(console, verdicts)
        for verdict in verdicts:
            say(console, f"{verdict.check}: {verdict.reason}")
        say(console, f"everything of this: {directory}")
    raise typer.Exit(exit_code(verdicts))


def _fields(run: Path) -> list[str]:
    """The configuration of a run, as overrides."""
    from alignment.files import read_json
    from alignment.rl.config import flatten
    from alignment.rl.run import CONFIG

    return [f"{key}={json.dumps(value)}" for key, value in flatten(read_json(run / CONFIG)).items()]
