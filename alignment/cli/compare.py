"""``alignment compare``: two captures of any readable format, or two whole runs."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import HtmlOption, JsonOption, console_on
from alignment.cli.report import leave_answer
from alignment.numerics.verdict import exit_code


def compare(
    golden: Annotated[Path, typer.Argument(metavar="GOLDEN", help="A capture or a run that is trusted.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The one that is judged.")],
    name_map: Annotated[
        Optional[list[str]],
        typer.Option("--map", metavar="GOLDEN=TARGET", help="Pair these modules (* matches), or a file of such lines."),
    ] = None,
    noise: Annotated[
        Optional[list[Path]], typer.Option("--noise", help="A calibration that --save-noise wrote (repeatable).")
    ] = None,
    save_noise: Annotated[
        Optional[Path],
        typer.Option("--save-noise", help="Take the two as equal and write what their difference teaches about noise."),
    ] = None,
    stage: Annotated[Optional[list[str]], typer.Option("--stage", help="Only this stage (repeatable).")] = None,
    step: Annotated[Optional[list[int]], typer.Option("--step", help="Only this step (repeatable).")] = None,
    allow_missing: Annotated[
        Optional[list[str]],
        typer.Option("--allow-missing", metavar="PATTERN", help="Modules, parameters and fields one side may lack."),
    ] = None,
    golden_format: Annotated[Optional[str], typer.Option(help="Format of GOLDEN, where it is not found out.")] = None,
    target_format: Annotated[Optional[str], typer.Option(help="Format of TARGET, where it is not found out.")] = None,
    repeat: Annotated[
        Optional[list[Path]],
        typer.Option(
            "--repeat", help="Runs: a further run of GOLDEN's configuration, whose spread is noise (repeatable)."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Label of the device the target ran on.")] = "unknown",
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where two computations part: the first module whose inputs agree and whose outputs do not.

    Exit code 0: aligned; 1: they diverge, a module, call or parameter is missing, or it is inconclusive, because what
    could not be compared disagrees or the noise is not known; 2: they cannot be compared.

    Two runs are compared stage by stage up to the first that diverges, and their captures there; --stage and --step
    choose in captures only.
    """
    runs = save_noise is None and _is_run(golden) and _is_run(target)
    given = {
        "--stage": stage, "--step": step, "--allow-missing": allow_missing, "--golden-format": golden_format,
        "--target-format": target_format, "--repeat": repeat, "--html": html,
    }  # fmt: skip
    _refuse_unread({name for name, value in given.items() if value}, golden, target, runs, save_noise is not None)
    if save_noise is not None:
        # What differs between modules teaches noise, also where whole runs are given.
        golden, target = _capture_of(golden), _capture_of(target)
    elif runs:
        raise typer.Exit(_compare_runs(golden, target, name_map, noise, repeat, allow_missing, device, html, as_json))
    from alignment.capture.readers import open_capture
    from alignment.diagnose.capture_comparison import compare_captures, learn_noise, load_noise
    from alignment.diagnose.capture_comparison import save_noise as write_noise
    from alignment.diagnose.names import NameMap
    from alignment.report.comparison_view import comparison_lines

    # rows by the ten thousand and no cycles among them: collecting finds nothing and takes a third of the time
    gc.disable()
    names = NameMap.parse(name_map or ())
    first, second = open_capture(golden, format=golden_format), open_capture(target, format=target_format)
    if save_noise is not None:
        with _shown("learning noise", as_json):
            learned = learn_noise(first, second, names=names, into=load_noise(noise) if noise else None)
        write_noise(learned, save_noise)
        print(json.dumps({"noise": str(save_noise)}) if as_json else f"{save_noise}: noise of {golden} and {target}")
        raise typer.Exit(0)
    with _shown("comparing", as_json) as progress:
        comparison = compare_captures(
            first,
            second,
            names=names,
            noise=load_noise(noise) if noise else None,
            stages=stage or (),
            steps=step or (),
            allow_missing=allow_missing or (),
            progress=progress,
        )
    document = comparison.to_dict()
    page = leave_answer(html, f"{target} against {golden}", comparison=document)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        for line in (*comparison_lines(comparison), *([f"as a page: {page}"] if page else [])):
            print(line)
    raise typer.Exit(exit_code(comparison.verdicts(device)))


@contextlib.contextmanager
def _shown(text: str, as_json: bool) -> Iterator[Callable[[str], None]]:
    """Progress on a terminal, or what rich is told to take for one. Elsewhere it costs nothing, not even its import."""
    forced = any(os.environ.get(name) for name in ("FORCE_COLOR", "TTY_COMPATIBLE"))
    if as_json or not (forced or sys.stderr.isatty()):
        yield lambda what: None
        return
    from alignment.report.progress import tasks

    with tasks(console_on(True), text, quiet=False) as progress:
        yield progress


def _is_run(path: Path) -> bool:
    if (path / "run.json").is_file():
        return True
    if not path.is_dir() or any(next(path.glob(sign), None) is not None for sign in CAPTURE_SIGNS):
        return False
    from alignment.diagnose.run_data import is_run

    return is_run(path)


def _capture_of(path: Path) -> Path:
    return path / CAPTURE if (path / CAPTURE).is_dir() else path


def _refuse_unread(given: set[str], golden: Path, target: Path, runs: bool, learning: bool) -> None:
    """An option that says nothing about what is compared is refused: its reader would take it for done."""
    from alignment.errors import InputError

    if learning:
        unread, compared = given & {"--stage", "--step", "--allow-missing", "--repeat", "--html"}, "with --save-noise"
        advice = "noise is learned from all that both captures have: leave the option out"
    elif runs:
        unread, compared = given & {"--stage", "--step", "--golden-format", "--target-format"}, "for two runs"
        advice = f"name their captures: alignment compare {golden / CAPTURE} {target / CAPTURE}"
    else:
        unread, compared = given & {"--repeat"}, "for captures"
        advice = "name two runs, or teach noise with --save-noise and read it with --noise"
    if unread:
        raise InputError(f"{', '.join(sorted(unread))} is not read {compared}", where="compare", next_step=advice)


def _compare_runs(
    golden: Path, target: Path, name_map, noise, repeats, allow_missing, device: str, html: Path | None, as_json: bool
) -> int:
    """Stages by what was logged, and what the captures of both say of them."""
    from alignment.diagnose.capture_comparison import load_noise
    from alignment.diagnose.names import NameMap
    from alignment.diagnose.whole_runs import compare_whole_runs
    from alignment.report.comparison_view import comparison_lines

    with _shown("comparing", as_json) as progress:
        found = compare_whole_runs(
            golden,
            target,
            repeats=repeats or (),
            names=NameMap.parse(name_map or ()),
            noise=load_noise(noise) if noise else None,
            allow_missing=allow_missing or (),
            progress=progress,
        )
    stages, first, comparison = found.stages, found.first, found.capture
    verdicts = found.verdicts(subject=str(target), device=device, baseline=str(golden))
    data = _finite(
        {
            "stages": [verdict.to_dict() for verdict in verdicts[: len(stages)]],
            "first": None if first is None else {"step": first.step, "stage": first.stage, "reason": first.reason},
            "parted": found.parted,
            "capture": None if comparison is None else comparison.to_dict(),
        }
    )
    page = leave_answer(html, f"{target} against {golden}", comparison=data)
    if as_json:
        print(json.dumps(data, indent=1))
        return exit_code(verdicts)
    for stage in stages:
        print(stage)
    if comparison is None:
        print("no captures of both runs to look into: record them with 'alignment dapo capture.detail=sketch'")
    else:
        print()
        for line in comparison_lines(comparison):
            print(line)
        if found.parted is not None:
            print(f"compared up to step {found.parted - 1}: then the runs sampled other tokens, as chance has it")
    if first is not None:
        print(f"first divergence: step {first.step}, {first.stage}")
    if page is not None:
        print(f"as a page: {page}")
    return exit_code(verdicts)


CAPTURE = "capture"
"""Folder of a run that holds its capture."""

CAPTURE_SIGNS = ("capture.json", "dump.json", "*/dump.json", "*/*/dump.json", "*.safetensors", "*.npy", "*.pt")
"""What only captures hold at the top: looking for it costs less than the import of torch."""


def _finite(value):
    from alignment.report.run_directory import finite

    return finite(value)
