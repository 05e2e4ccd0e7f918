"""Runs as one page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

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


def leave_page(run: Path, *, baselines: Path = BASELINES, answers: Mapping[str, Any] | None = None) -> Path | None:
    """Writes the page of a run that has ended, and first the ``answers`` it shows, by the names of their files; None
    where it cannot be, which standard error tells: the run stands."""
    from alignment.files import write_json
    from alignment.report.page import PAGE, write_page

    def write() -> Path:
        for file, answer in (answers or {}).items():
            write_json(run / file, answer)
        return write_page([run], run / PAGE, baselines=baselines if baselines.is_dir() else None)

    return _left(write)


def leave_answer(target: Path | None, name: str, **shown: Any) -> Path | None:
    """Writes the page of an answer where one is asked for (``--html``); None where it cannot be, which standard error
    tells: the answer stands. ``shown`` as for :func:`alignment.report.page.write_answer`."""
    if target is None:
        return None
    from alignment.report.page import write_answer

    return _left(lambda: write_answer(name, target, **shown))


def _left(write: Callable[[], Path]) -> Path | None:
    try:
        return write()
    except (InputError, OSError) as error:
        print(f"the page was not written: {error}", file=sys.stderr)
        return None
