"""Runs as one page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import BASELINES, BaselineOption, JsonOption
from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, shown beside each other.")],
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="The page; report.html in the first run by default.")
    ] = None,
    baseline: BaselineOption = BASELINES,
    as_json: JsonOption = False,
) -> None:
    """One self-contained HTML page of one or several runs: verdicts, findings, curves, stack. Opens offline."""
    from alignment.report.page import PAGE, write_page

    page = write_page(runs, output or runs[0] / PAGE, baselines=baseline if baseline.is_dir() else None)
    print(json.dumps({"page": str(page), "bytes": page.stat().st_size}) if as_json else f"{page}")
    raise typer.Exit(ALIGNED)


def leave_page(run: Path, *, baselines: Path = BASELINES) -> Path | None:
    """Writes the page of a training that has ended; None where it cannot be, which standard error tells: the training
    stands."""
    from alignment.report.page import PAGE, write_page

    try:
        return write_page([run], run / PAGE, baselines=baselines if baselines.is_dir() else None)
    except (InputError, OSError) as error:
        print(f"the page was not written: {error}", file=sys.stderr)
        return None
