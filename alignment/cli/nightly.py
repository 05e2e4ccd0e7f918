"""``alignment nightly``: drive a night, and read one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import BASELINES, HISTORY, BaselineOption, JsonOption, console_on

nightly_app = typer.Typer(no_args_is_help=True, help="Drive a night of a matrix, and read what one says.")


@nightly_app.command("run")
def run(
    matrix: Annotated[Path, typer.Argument(metavar="MATRIX", help="The data file of the nightly: ci/nightly.yaml.")],
    row: Annotated[str, typer.Option(help="The row to run.")],
    out: Annotated[Path, typer.Option(help="The folder of this night, on a store that all nodes share.")],
    ray_address: Annotated[
        Optional[str],
        typer.Option(help="The Ray cluster of the row: HOST:PORT, or auto for the one of this machine."),
    ] = None,
    history: Annotated[Optional[Path], typer.Option("--history", help="The SQLite file of the nights.")] = HISTORY,
    no_history: Annotated[bool, typer.Option("--no-history", help="Take this night into no history.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a night: finished phases are kept.")] = False,
    baseline: BaselineOption = BASELINES,
    as_json: JsonOption = False,
) -> None:
    """Run the phases of a row, judge what they left, and end with a verdict whatever happens.

    Exit code 0: aligned; 1: misaligned, or not shown to be aligned; 2: wrong call, nothing was run; 3: a phase was not
    carried out; 4: nothing new, but known failures or flaky checks.
    """
    from alignment.report.night import told
    from alignment.report.night_driver import NightSetting, run_night
    from alignment.report.night_matrix import read_matrix
    from alignment.report.progress import night_progress

    read = read_matrix(matrix)
    setting = NightSetting(
        matrix=read,
        row=read.row(row),
        out=out,
        ray=ray_address,
        history=None if no_history else history,
        baselines=baseline if baseline.is_dir() else None,
        resume=resume,
    )
    with night_progress(console_on(True), len(setting.row.phases), quiet=as_json) as progress:
        night = run_night(setting, begin=progress.begin, tell=progress.tell)
    _tell(json.dumps(night.to_dict(), indent=1) if as_json else "\n".join(told(night)))
    raise typer.Exit(night.exit_code)


@nightly_app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a night.")], as_json: JsonOption = False
) -> None:
    """What a night says: its line, its phases, what is not green. Exits as the night did.

    A night whose driver was killed before its verdict is an error (3), with the phases that were finished.
    """
    from alignment.report.night import read_night, told

    night = read_night(folder)
    _tell(json.dumps(night.to_dict(), indent=1) if as_json else "\n".join(told(night)))
    raise typer.Exit(night.exit_code)


def _tell(text: str) -> None:
    """Prints the verdict; where nobody reads standard output any more, on standard error."""
    try:
        print(text, flush=True)
    except OSError:
        print(text, file=sys.stderr, flush=True)
