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
from alignment.cli.report import leave_page
from alignment.errors import InputError
from alignment.numerics.verdict import exit_code


def communication(
    overrides: Overrides = None,
    config: ConfigOption = "dapo-tiny",
    run: Annotated[
        Optional[Path],
        typer.Option(help="Take the configuration of this run (GRPO, DAPO, PPO or distillation) instead of --config."),
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

    The policy makes the step, in a PPO run the critic too, in a distillation the student. Exit code 0: aligned; 1:
    communication is convicted, or not everything was judged; 2: it could not be carried out.
    """
    from alignment.baseline.runs import torch_name
    from alignment.diagnose.communication import one_against_many
    from alignment.diagnose.trained_role import roles_of
    from alignment.faults.injection import WORKER_SETUP, active
    from alignment.report.progress import tasks
    from alignment.report.run_directory import finite, new_run_directory, write_verdicts
    from alignment.report.terminal import print_verdicts
    from alignment.rl.config import load_config
    from alignment.rl.ray_executor import RayExecutor

    source = None if run else config
    fields = _fields(run) if run else []
    kind = _kind(fields)
    changes = [*fields, *(overrides or ())]
    settings = load_config(source, changes, kind=kind)
    if ranks or settings.dp_size < 2:
        changes += [f"trainer.n_gpus_per_node={ranks or 2}", "trainer.nnodes=1"]
        settings = load_config(source, changes, kind=kind)
    settings = _located(settings)
    roles = roles_of(settings)
    chosen = find_device(device, emulate_npu)
    directory, console = new_run_directory(RUNS, requested=run_dir), console_on(as_json)
    found = []
    with one_thread(), active(fault or []), tasks(console_on(True), "communication", quiet=as_json) as progress:
        for role in roles:
            told = f"{role.name}: " if role.name else ""
            found.append(
                one_against_many(
                    settings,
                    executor=RayExecutor(worker_setup=WORKER_SETUP, address=ray),
                    directory=directory / role.name,
                    device=torch_name(chosen),
                    role=role,
                    rows=rows,
                    progress=lambda line, told=told: progress(f"{told}{line}"),
                )
            )
    verdicts = [verdict for one in found for verdict in one.verdicts()]
    write_verdicts(directory, verdicts)
    page = leave_page(directory)
    if as_json:
        document = {"verdicts": [v.to_dict() for v in verdicts], **found[0].to_dict(), "run": str(directory)}
        document["page"] = page and str(page)
        document |= {one.role: one.to_dict() for one in found[1:]}
        print(json.dumps(finite(document), indent=1))
    else:
        print_verdicts(console, verdicts)
        for verdict in verdicts:
            say(console, f"{verdict.check}: {verdict.reason}")
        say(console, f"everything of this: {directory}")
        if page is not None:
            say(console, f"as a page: {page}")
    raise typer.Exit(exit_code(verdicts))


def _kind(fields: list[str]):
    """The configuration that the fields are of."""
    from alignment.rl.config import TrainConfig
    from alignment.rl.gkd_config import GkdConfig

    return GkdConfig if any(field.startswith("gkd.") for field in fields) else TrainConfig


def _located(settings):
    """The configuration with its models found, or a refusal that names the one that is gone."""
    from alignment.rl.gkd_config import GkdConfig, TeacherKind
    from alignment.rl.gkd_run import teacher_located
    from alignment.rl.run import located

    settings = located(settings)
    models = {"actor_rollout_ref.model.path": settings.actor_rollout_ref.model.path}
    if isinstance(settings, GkdConfig):
        settings = teacher_located(settings)
        if settings.teacher_kind is TeacherKind.COLOCATED:
            models["gkd.teacher_model"] = settings.gkd.teacher_model
    for field, path in models.items():
        if not (Path(path) / "config.json").is_file():
            raise InputError(
                "the model of the run is not there",
                where=field,
                expected="a Hugging Face checkpoint",
                found=path,
                next_step=f"say where it is now: {field}=CHECKPOINT",
            )
    return settings


def _fields(run: Path) -> list[str]:
    """The configuration of a run, as overrides.

    Raises:
        InputError: the run has none of ours: another tool's has engines that are not started here.
    """
    from alignment.files import read_json
    from alignment.rl.config import flatten
    from alignment.rl.run import CONFIG

    if not (run / CONFIG).is_file():
        there = run.is_dir()
        raise InputError(
            "the run has no configuration of ours, from which the step is made" if there else "there is no such run",
            where="--run",
            expected=run / CONFIG,
            found="another tool's run, or none" if there else "nothing",
            next_step=_instead(run) if there else None,
        )
    return [f"{key}={json.dumps(value)}" for key, value in flatten(read_json(run / CONFIG)).items()]


def _instead(run: Path) -> str | None:
    """The test with an engine and the sizes of another tool's run, where it can be read."""
    from alignment.diagnose.axes.software import communication_command
    from alignment.diagnose.run_data import open_run

    try:
        return communication_command(open_run(run))
    except InputError:
        return None
