"""Does an RL training stack compute on this device what it computes elsewhere? 0 aligned, 1 misaligned, 2 usage."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED, USAGE, Outcome, exit_code

BASELINES = Path(__file__).resolve().parent.parent / "baselines"
RUNS = Path("runs")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
baseline_app = typer.Typer(no_args_is_help=True, help="Record, list, show, compare and verify stored baselines.")
app.add_typer(baseline_app, name="baseline")
checkpoint_app = typer.Typer(no_args_is_help=True, help="Make a checkpoint that fits one machine or one dtype.")
app.add_typer(checkpoint_app, name="checkpoint")

Overrides = Annotated[
    Optional[list[str]],
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the training configuration, in verl's vocabulary."),
]
ConfigOption = Annotated[str, typer.Option("--config", help="Name of a preset, or a YAML file.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto (npu, else cuda, else cpu), cpu, cuda[:n] or npu[:n].")]
EmulateOption = Annotated[bool, typer.Option("--emulate-npu", help="Install the emulated NPU; its results say so.")]
FaultOption = Annotated[
    Optional[list[str]],
    typer.Option("--fault", metavar="PATH.PY:OBJECT", help="Switch on a deliberate fault (may be given several times)."),
]
BaselineOption = Annotated[Path, typer.Option("--baseline", help="Folder of the stored baselines.")]
RunDirOption = Annotated[Optional[Path], typer.Option("--run-dir", help="Where this run goes; runs/<id>/ by default.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
RequireOption = Annotated[bool, typer.Option("--require", help="What is unavailable is an error, not a remark.")]
CaseOption = Annotated[Optional[list[str]], typer.Option("--case", help="Case id or its beginning (repeatable).")]
SubjectOption = Annotated[Optional[list[str]], typer.Option("--subject", help="Implementation to judge (repeatable).")]
LayerOption = Annotated[Optional[str], typer.Option("--layer", help="unit, layer or e2e.")]


def main() -> None:
    """Entry point: every expected error becomes one message and exit code 2."""
    try:
        app()
    except InputError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE)
    except Exception:
        # Python's own exit code for this is 1, which here means misaligned.
        traceback.print_exc()
        sys.exit(USAGE)


@app.command()
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
    from alignment.faults.injection import WORKER_SETUP, active
    from alignment.report.progress import suite_progress
    from alignment.report.run_directory import PROVENANCE, finite, new_run_directory, write_verdicts
    from alignment.report.terminal import print_verdicts

    parts = _parts(only, PARTS)
    chosen = _device(device, emulate_npu)
    with active(fault or []), _one_thread():
        setting = SuiteSetting(
            device=chosen,
            baselines=baseline,
            run_dir=run_dir or RUNS,
            config=config,
            overrides=tuple(overrides or ()),
            parts=parts,
            subjects=tuple(subject or ()),
            executor=executor,
            worker_setup=WORKER_SETUP,
        ).checked()
        setting = setting.in_directory(new_run_directory(RUNS, requested=run_dir))
        console = _console(as_json)
        with suite_progress(console, quiet=as_json) as progress:
            verdicts = run_suite(setting, progress)
    path = write_verdicts(setting.run_dir, verdicts)
    code = exit_code(verdicts, require=require)
    if as_json:
        document = {"exit_code": code, "run": str(setting.run_dir), "verdicts": [finite(v.to_dict()) for v in verdicts]}
        print(json.dumps(document, indent=1))
    else:
        print_verdicts(console, verdicts)
        console.print(f"everything of this run: {path.parent} (stack in {PROVENANCE})", markup=False, highlight=False)
        if require and any(v.outcome is Outcome.UNAVAILABLE for v in verdicts):
            console.print("--require: what is unavailable counts as an error", markup=False, highlight=False)
    raise typer.Exit(code)


@app.command()
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
    """The training pipeline alone: DAPO, GRPO or PPO, as the configuration says."""
    from alignment.baseline.runs import torch_name
    from alignment.faults.injection import WORKER_SETUP, active
    from alignment.report.progress import training_progress
    from alignment.report.run_directory import new_run_directory
    from alignment.rl.config import load_config
    from alignment.rl.run import run_dapo

    settings = load_config(config, list(overrides or ()))
    chosen = _device(settings.trainer.device if device == "auto" else device, emulate_npu)
    # A directory that is named may hold an earlier part of the same run: trainer.resume_mode decides what happens.
    directory = run_dir or new_run_directory(RUNS)
    console = _console(as_json)
    with active(fault or []), _one_thread(), training_progress(console, quiet=as_json) as progress:
        result = run_dapo(
            settings,
            run_dir=directory,
            executor=executor,
            device=torch_name(chosen),
            progress=progress,
            worker_setup=WORKER_SETUP if executor == "ray" else None,
        )
    if as_json:
        print(json.dumps({"run": str(result.directory), "metrics": result.metrics}, indent=1))
    else:
        console.print(f"{len(result.metrics)} steps; everything of this run: {result.directory}", markup=False)
    raise typer.Exit(ALIGNED)


@app.command()
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
    from alignment.faults.injection import active
    from alignment.report.rollout_view import rollout_command
    from alignment.report.run_directory import finite
    from alignment.rl.config import load_config

    settings = load_config(config, list(overrides or ()))
    chosen = _device(settings.trainer.device if device == "auto" else device, emulate_npu)
    emit = (lambda line: None) if as_json else print
    with active(fault or []), _one_thread():
        result = rollout_command(settings, prompts=prompts, device=torch_name(chosen), emit=emit)
    if as_json:
        print(json.dumps({"verdicts": [finite(v.to_dict()) for v in result.verdicts]}, indent=1))
    raise typer.Exit(exit_code(result.verdicts))


@app.command("compare-engines")
def compare_engines_command(
    engine: Annotated[Optional[list[str]], typer.Option(help="Only this engine (repeatable).")] = None,
    model: Annotated[str, typer.Option(help="A preset of the golden model.")] = "tiny-moonlight",
    ranks: Annotated[int, typer.Option(min=1, help="Processes per engine.")] = 2,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Memory, communication, start-up time and lines to debug of each training engine, on a tiny model."""
    from rich.table import Table

    from alignment.backends.engine_comparison import ENGINES, compare_engines

    rows = compare_engines(tuple(engine or ENGINES), model=model, ranks=ranks, device=device)
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], indent=1))
        return
    columns = ("engine", "held MB", "peak MB", "collectives", "sent MB", "start s", "step s", "lines to kernel", "why not")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        numbers = (
            f"{row.held_bytes / 1e6:.1f}", f"{row.peak_bytes / 1e6:.1f}", str(sum(n for n, _ in row.collectives.values())),
            f"{row.sent_bytes / 1e6:.1f}", f"{row.start_seconds:.1f}", f"{row.step_seconds:.2f}", str(row.lines_to_kernel),
        )  # fmt: skip
        table.add_row(row.engine, *(("",) * len(numbers) if row.unavailable else numbers), row.unavailable)
    _console(False).print(table)


@app.command()
def doctor(as_json: JsonOption = False, emulate_npu: EmulateOption = False) -> None:
    """Which devices and implementations are here, and why the others are not."""
    from alignment.report.doctor import examine, print_examination

    if emulate_npu:
        _install_emulated_npu()
    found = examine()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print_examination(_console(False), found)


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


def _device(name: str, emulate: bool):
    from alignment.devices.base import get_device

    if emulate:
        _install_emulated_npu()
    return get_device(name)


def _install_emulated_npu() -> None:
    from alignment.devices import emulated_npu

    # Workers are other processes: they install it when they see the variable.
    os.environ["ALIGNMENT_EMULATE_NPU"] = "1"
    emulated_npu.install()
    print(emulated_npu.banner(), file=sys.stderr)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One thread on the CPU: the golden model is small, and the order of its sums is then the same on every machine."""
    import torch

    before = torch.get_num_threads()
    # Whoever sets another number gets it; worker processes inherit the variable.
    given = os.environ.setdefault("OMP_NUM_THREADS", "1").split(",")[0]
    torch.set_num_threads(int(given) if given.isdigit() and int(given) else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _console(to_stderr: bool):
    from rich.console import Console

    console = Console(stderr=to_stderr)
    # A log has no width of its own; 80 columns would cut the names of the checks.
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(stderr=to_stderr, width=120)


# Checkpoints.


@checkpoint_app.command("fp8-to-bf16")
def convert_fp8(source: Path, target: Path, as_json: JsonOption = False) -> None:
    """Block-scaled FP8 weights as BF16, file by file; a killed conversion continues when it is called again."""
    from dataclasses import asdict

    from alignment.report.progress import byte_progress
    from alignment.weights.fp8 import convert_fp8_checkpoint

    with byte_progress(_console(as_json), quiet=as_json) as progress:
        done = convert_fp8_checkpoint(source, target, progress=progress)
    print(json.dumps(asdict(done)) if as_json else f"{target}: {done.dequantized} tensors converted, {done.copied} copied")


@checkpoint_app.command("cut")
def cut(
    source: Path,
    target: Path,
    layers: Annotated[str, typer.Option(help="Layers to keep, in order: 0,3,60")],
    keep_mtp: Annotated[bool, typer.Option(help="Keep the multi-token-prediction layers.")] = False,
) -> None:
    """A small real checkpoint from a large one: the field's way from 671B to one machine."""
    from alignment.weights.cut import cut_checkpoint

    try:
        kept = [int(part) for part in layers.split(",")]
    except ValueError:
        raise InputError("layers are numbers", where="--layers", expected="0,3,60", found=layers) from None
    cut_checkpoint(source, target, layers=kept, keep_mtp=keep_mtp)
    print(f"{target}: {len(kept)} layers of {source}")


# Baselines.


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

    known = sorted({entry.name for entry in SUBJECTS})
    for name in subject or ():
        if name not in known:
            raise InputError("there is no such subject", where="--subject", expected=", ".join(known), found=name)
    chosen, console = _device(device, emulate=False), _console(as_json)
    files, changed = [], []
    # End-to-end runs have no subject to choose: they are the golden engines'.
    wanted = PRESETS if _layer(layer) in (None, "e2e") and not subject else ()
    presets = [name for name in wanted if not case or name in case]
    patterns = [name for name in case or () if name not in PRESETS]
    with _one_thread():
        cases = [] if layer == "e2e" or (case and not patterns) else find_cases(patterns, layer)
        if not cases and not presets:
            raise InputError("nothing is selected", where="baseline record", found=f"--case {case} --layer {layer}")
        for name in ("unit", "layer"):
            of_layer = [c for c in cases if c.layer == name]
            made = [e for e in subject_entries(name) if chosen.kind in e.kinds]
            # One that is named and absent is an error; the others are recorded where they are there.
            names = [
                e.name for e in made if (e.name in subject if subject else e.load().available(chosen).available)
            ]
            if of_layer and names:
                done = record(
                    of_layer, chosen, BaselineStore(baseline), subjects=names, progress=lambda line: _say(console, line)
                )
                files += map(str, done.files)
                changed += map(str, done.changes)
        if presets:
            files += map(str, _record_runs(presets, chosen, baseline, lambda line: _say(console, line)))
    if as_json:
        print(json.dumps({"files": files, "changes": changed}, indent=1))
        return
    for line in [*changed, f"{len(changed)} values changed in {len(files)} files; review them, then commit"]:
        _say(console, line)


def _record_runs(presets, device, root: Path, report) -> Iterator[Path]:
    import tempfile

    from alignment.baseline import runs

    with tempfile.TemporaryDirectory() as work:
        for preset in presets:
            if preset in runs.REPLAY_PRESETS:
                yield runs.record_replay(root, preset, device, work=Path(work), report=report)
            yield runs.record_curves(root, preset, device, work=Path(work), report=report)


@baseline_app.command("list")
def list_baselines(layer: LayerOption = None, baseline: BaselineOption = BASELINES, as_json: JsonOption = False) -> None:
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
    _console(False).print(table)


@baseline_app.command("show")
def show_baseline(
    name: Annotated[str, typer.Argument(metavar="CASE", help="Case id, or preset of a training run.")],
    baseline: BaselineOption = BASELINES,
) -> None:
    """One stored baseline in full, as JSON: bounds, noise, provenance."""
    from alignment.baseline.listing import details

    print(json.dumps(details(baseline, name), indent=1))


@baseline_app.command("diff")
def diff_baselines(before: Path, after: Path, as_json: JsonOption = False) -> None:
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

    if not baseline.is_dir():
        raise InputError("there is no such folder", where=baseline)
    with _one_thread():
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


def _say(console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
