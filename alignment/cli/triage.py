"""Why a run does not equal its baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import HtmlOption, JsonOption, console_on, say
from alignment.cli.report import leave_answer


def triage(
    dut: Annotated[Path, typer.Argument(metavar="RUN", help="The run under test: ours, or verl's output folder.")],
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="The run it should equal.")],
    repeat: Annotated[
        Optional[list[Path]], typer.Option(help="A further run of the baseline's configuration (repeatable).")
    ] = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """The six axes: hyper-parameters, data, hardware, software stack, model and weights, scoring; the cause first.

    Exit code 0: no axis finds anything; 1: a cause is named; 2: the runs cannot be read.
    """
    from rich.markup import escape
    from rich.table import Table

    from alignment.diagnose.triage import triage as examine
    from alignment.report.progress import waiting

    # On stderr, so that the result can be piped while somebody watches.
    with waiting(console_on(True), f"comparing {dut} with {baseline}", quiet=as_json):
        found = examine(dut, baseline, repeats=tuple(repeat or ()))
    document = json.loads(json.dumps(found.to_dict(), default=str))
    page = leave_answer(html, f"{dut} against {baseline}", triage=document)
    if as_json:
        print(json.dumps(document, indent=1))
        raise typer.Exit(found.exit_code)
    console = console_on(False)
    table = Table("axis", "verdict", "what", box=None, pad_edge=False, header_style="bold")
    for axis in found.axes:
        table.add_row(axis.axis, axis.outcome.value, escape(axis.reason))
    console.print(table)
    for number, cause in enumerate(found.causes, 1):
        console.print(f"{number}. {cause.axis}: {cause.cause}: {cause.evidence}", markup=False, highlight=False)
    for axis in found.axes:
        for remark in axis.remarks if axis.findings else ():
            console.print(f"   {axis.axis}: {remark}", markup=False, highlight=False)
    for mode in found.modes:
        console.print(f"failure mode: {mode.name} at step {mode.step}: {mode.evidence}", markup=False, highlight=False)
    if found.first is not None:
        console.print(f"first divergence: {found.first}", markup=False, highlight=False)
    for label, commands in (("next", found.next_commands), ("still to run", found.open_commands)):
        for command in commands:
            console.print(f"{label}: {command}", markup=False, highlight=False)
    if page is not None:
        say(console, f"as a page: {page}")
    raise typer.Exit(found.exit_code)
