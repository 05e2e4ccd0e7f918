"""Experiments on runs: what a change does to the curve, and how far a replay drifts."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from alignment.numerics.verdict import ALIGNED, Outcome


def ablate(
    factor: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:KEY=VALUE,...|NAME",
            help="A change to judge (repeatable), or one known by name: mbridge, dist_ckpt, cp, deterministic, "
            "nondeterministic.",
        ),
    ],
    overrides: Overrides = None,
    config: ConfigOption = "dapo-tiny",
    full: Annotated[bool, typer.Option(help="Every combination of the factors, with interactions.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; each is used for every setting.")] = 3,
    metric: Annotated[str, typer.Option(help="The curve whose level is compared.")] = "reward/before_filter",
    device: DeviceOption = "auto",
    run_dir: RunDirOption = None,
    emulate_npu: EmulateOption = False,
    as_json: JsonOption = False,
) -> None:
    """The effect of each change on the curve with an interval, one at a time or every combination, on shared prompts.

    A change is anything that a configuration says, and faults=[ID] switches a fault of the catalogue on: what a fix is
    worth is the effect of what it mends. dist_ckpt writes the distributed checkpoint that it loads, if none is named.
    Several ranks run on Ray.
    """
    from rich.markup import escape
    from rich.table import Table

    from alignment.baseline.runs import torch_name
    from alignment.diagnose.ablation import (
        check_settings,
        curve_level,
        designs,
        effects,
        first_other_prompts,
        parse_factor,
        run_designs,
    )
    from alignment.faults.injection import active, faults_and_overrides
    from alignment.report.ablation_page import ABLATION
    from alignment.report.progress import training_progress
    from alignment.report.run_directory import finite, new_run_directory, write_training_provenance
    from alignment.rl.config import load_config
    from alignment.rl.run import located, run_dapo

    factors = [parse_factor(text) for text in factor]
    common = [*(overrides or ()), "trainer.save_freq=0", "trainer.resume_mode=disable"]
    by_name = {one.name: one for one in factors}
    asked = designs(factors, full=full)
    # What cannot work is refused before the first run.
    planned = {}
    for setting in asked:
        changes = [o for name in sorted(setting) for o in by_name[name].overrides]
        faults, left = faults_and_overrides([*common, *changes], None)
        planned[setting] = faults, located(load_config(config, left))
        with active(faults):
            pass
    check_settings(planned)
    chosen = find_device(device, emulate_npu)
    directory, console = run_dir or new_run_directory(RUNS), console_on(as_json)
    # Libraries of a device read some switches once: settings with and without determinism take processes of their own.
    apart = chosen.kind != "cpu" and len({settings.trainer.deterministic for _, settings in planned.values()}) > 1

    def folder(setting: frozenset[str], seed: int) -> Path:
        return directory / ("+".join(sorted(setting)) or "base") / f"seed-{seed}"

    def level(setting: frozenset[str], changes: tuple[str, ...], seed: int) -> float:
        faults, left = faults_and_overrides([*common, *changes, f"trainer.seed={seed}"], None)
        settings = load_config(config, [*left, *_with_dist_checkpoint(planned[setting][1], directory, chosen)])
        name = f"{'+'.join(sorted(setting)) or 'base'}, seed {seed}"
        with active(faults):
            run = run_dapo(
                settings,
                run_dir=folder(setting, seed),
                device=torch_name(chosen),
                progress=_Told(progress.note, name),
                executor=_executor(settings, apart=apart),
            )
        progress.advance(f"{name}: done")
        if any(metric not in row for row in run.metrics):
            raise InputError("the run has no such metric", where="--metric", found=metric)
        values = [row[metric] for row in run.metrics]
        steps = [int(row["step"]) for row in run.metrics]
        curves.append({"factors": sorted(setting), "seed": seed, "steps": steps, "values": values})
        return curve_level(values)

    curves: list[dict] = []
    numbers = list(range(1, seeds + 1))
    with one_thread(), training_progress(console_on(True), quiet=as_json) as progress:
        progress.begin("runs", len(asked) * len(numbers))
        levels = run_designs(factors, numbers, full=full, level=level)
    found = effects(factors, numbers, levels, full=full)
    others = {
        name: step
        for name in by_name
        for step in [first_other_prompts(folder(frozenset(), numbers[0]), folder(frozenset({name}), numbers[0]))]
        if step is not None
    }
    document = finite(
        {
            "run": str(directory),
            "metric": metric,
            "factors": {one.name: one.overrides for one in factors},
            "effects": [effect.to_dict() for effect in found],
            "levels": [{"factors": sorted(s), "seed": seed, "level": value} for (s, seed), value in levels.items()],
            "other_prompts": others,
        }
    )
    # What the arms change against the base is told beside their effects.
    write_training_provenance(directory, chosen, of=folder(frozenset(), numbers[0]))
    page = leave_page(directory, answers={ABLATION: {**document, "curves": finite(curves)}})
    if as_json:
        print(json.dumps({**document, "page": page and str(page)}))
        raise typer.Exit(ALIGNED)
    table = Table(
        "factor", f"effect on {metric}", "95 % interval", "decided", box=None, pad_edge=False, header_style="bold"
    )
    for effect in found:
        # Significant digits: what another order of sums makes is an effect too, and none of it survives four decimals.
        interval = f"{effect.low:+.4g} … {effect.high:+.4g}" if effect.seeds > 1 else "one seed"
        table.add_row(escape(effect.name), f"{effect.value:+.4g}", interval, "yes" if effect.decided else "no")
    console.print(table)
    for name, step in others.items():
        say(console, f"{name}: other prompts than the base from step {step} on; what they do is in its effect")
    console.print(f"{len(levels)} runs; everything of them: {directory}", markup=False, highlight=False)
    if page is not None:
        say(console, f"as a page: {page}")
    raise typer.Exit(ALIGNED)


def replay(
    overrides: Overrides = None,
    config: ConfigOption = "dapo-tiny",
    steps: Annotated[int, typer.Option(min=1, help="Replayed steps.")] = 20,
    record: Annotated[
        Optional[Path],
        typer.Option(
            help="A run with rollout.skip.enable=true on the trusted device; one is made on the CPU otherwise."
        ),
    ] = None,
    perturbations: Annotated[int, typer.Option(min=0, help="Replays from weights moved by one ulp: the noise.")] = 3,
    device: DeviceOption = "auto",
    run_dir: RunDirOption = None,
    emulate_npu: EmulateOption = False,
    fault: FaultOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mean relative loss error over replayed steps, beside the field's 1 % and the measured envelope; exit 1 outside,
    or where nothing was measured to judge by."""
    from alignment.baseline.runs import torch_name
    from alignment.diagnose.long_replay import BAR, long_replay
    from alignment.faults.injection import active
    from alignment.report.progress import tasks
    from alignment.report.replay_page import REPLAY
    from alignment.report.run_directory import finite, new_run_directory, write_training_provenance
    from alignment.rl.config import load_config
    from alignment.rl.run import read_run, run_dapo

    common = [
        *(overrides or ()),
        "trainer.save_freq=0",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={steps}",
    ]
    settings = load_config(config, common)
    chosen = find_device(device, emulate_npu)
    directory = run_dir or new_run_directory(RUNS)
    with one_thread(), tasks(console_on(True), "replay", quiet=as_json) as progress:
        if record is None:
            record = directory / "record"
            recording = load_config(config, [*common, "actor_rollout_ref.rollout.skip.enable=true"])
            told = _Told(progress, "recording")
            run_dapo(recording, run_dir=record, device="cpu", executor=_executor(recording), progress=told)
        reference = read_run(record).metrics
        with active(fault or []):
            found = long_replay(
                settings,
                record=_recorded(record),
                reference=reference,
                run_dir=directory,
                steps=steps,
                device=torch_name(chosen),
                perturbations=range(1, perturbations + 1),
                executor=_executor(settings),
                progress=progress,
            )
    document = finite({"device": chosen.label, **found.to_dict()})
    drawn = finite([vars(curve) for curve in found.curves])
    write_training_provenance(directory, chosen, of=directory / "replay")
    page = leave_page(directory, answers={REPLAY: {**document, "curves": drawn}})
    if as_json:
        print(json.dumps({**document, "page": page and str(page)}, indent=1))
    else:
        print(
            f"mean relative error over {found.steps} replayed steps on {chosen.label} "
            f"(bar of the field for the loss: {BAR:.0%})"
        )
        for drift in found.drifts:
            noise = f"envelope {drift.envelope:.2e}" if drift.envelope is not None else "noise not measured"
            where = f"largest in step {drift.worst_step}: {drift.worst_error:.2e}"
            print(f"  {drift.metric}: {drift.error:.2e}, {noise}, {drift.judgement}; {where}")
            if drift.drowned:
                print(
                    f"  one unit in the last place alone makes {max(drift.noise):.2e} of the loss: nothing can be held "
                    "to the bar over so many steps, and the envelope decides"
                )
        if found.outcome is Outcome.INCONCLUSIVE:
            print("INCONCLUSIVE: without --perturbations there is no envelope to judge by")
        print(f"everything of this: {directory}")
        if page is not None:
            print(f"as a page: {page}")
    raise typer.Exit(found.exit_code)


class _Told:
    """Progress of one run as lines."""

    def __init__(self, tell: Callable[[str], None], name: str) -> None:
        self._tell, self._name = tell, name

    def on_stage(self, step: int, total_steps: int, stage: str) -> None:
        self._tell(f"{self._name}: step {step} of {total_steps}, {stage}")

    def on_step(self, step: int, total_steps: int, metrics, timings) -> None:
        """The stages have said it."""


def _with_dist_checkpoint(settings, directory: Path, device) -> list[str]:
    """The override that names a distributed checkpoint where a setting loads one and names none; written once."""
    megatron = settings.actor_rollout_ref.actor.megatron
    if not megatron.use_dist_checkpointing or megatron.dist_checkpointing_path:
        return []
    from alignment.diagnose.ablation import MEGATRON
    from alignment.rl.megatron_policy import write_dist_checkpoint
    from alignment.rl.worker import DTYPES

    model = settings.actor_rollout_ref.model
    folder = directory / f"dist_checkpoint-{model.dtype}"
    if not folder.is_dir():
        write_dist_checkpoint(Path(model.path), folder, dtype=DTYPES[model.dtype], device=device)
    return [f"{MEGATRON}dist_checkpointing_path={folder.resolve()}"]


def _executor(settings, *, apart: bool = False):
    """Several ranks, or runs ``apart`` from each other, need Ray, and the faults of this process in every worker."""
    if settings.dp_size == 1 and not apart:
        return "inprocess"
    from alignment.faults.injection import WORKER_SETUP
    from alignment.rl.ray_executor import RayExecutor

    return RayExecutor(worker_setup=WORKER_SETUP)


def _recorded(run: Path) -> Path:
    """Where the rollouts of a run are, by its own configuration."""
    from alignment.files import read_json
    from alignment.rl.config import flatten
    from alignment.rl.run import CONFIG

    return run / flatten(read_json(run / CONFIG))["actor_rollout_ref.rollout.skip.dump_dir"]
