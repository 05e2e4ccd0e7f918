"""The same job on every card."""

from __future__ import annotations

import json
from typing import Annotated, Optional

import typer

from alignment.cli.options import (
    DeviceOption,
    EmulateOption,
    FaultOption,
    HtmlOption,
    JsonOption,
    RequireOption,
    console_on,
    find_device,
    say,
)
from alignment.cli.report import leave_answer
from alignment.errors import InputError
from alignment.numerics.verdict import exit_code


def stress(
    device: DeviceOption = "auto",
    workers: Annotated[
        Optional[int], typer.Option(min=1, help="Cards of this machine (of each node with --ray); on a CPU, processes.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each card repeats the job.")] = 2,
    minutes: Annotated[float, typer.Option(min=0, help="Keep repeating it at least this long.")] = 0.0,
    timeout: Annotated[
        Optional[float],
        typer.Option(help="Seconds after which a card counts as hung: 600 and 60 per minute of --minutes by default."),
    ] = None,
    ray: Annotated[
        Optional[str],
        typer.Option(help="Run on every node of the Ray cluster at this address (auto: the running one)."),
    ] = None,
    emulate_npu: EmulateOption = False,
    fault: FaultOption = None,
    require: RequireOption = False,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """One deterministic job on every card, compared bit by bit between cards and over time; names the odd card."""
    from alignment.diagnose import stress_cards
    from alignment.diagnose.stress import judge, summary
    from alignment.faults.injection import WORKER_SETUP, active
    from alignment.report.progress import waiting
    from alignment.report.run_directory import finite
    from alignment.report.terminal import print_verdicts

    chosen = find_device(device, emulate_npu)
    kind = chosen.kind
    # npu:3 is that card alone; npu is all of them.
    only = chosen.index if ":" in device else None
    if only is not None and (ray is not None or workers not in (None, 1)):
        raise InputError(
            "one card is named, and several are asked for",
            where="--device",
            expected=f"{kind} with --workers or --ray, or {device} without",
            found=f"{device} with {'--ray' if ray is not None else f'--workers {workers}'}",
        )
    console = console_on(as_json)
    with active(fault or []), waiting(console_on(True), "the same job on every card", quiet=as_json):
        if ray is not None:
            records, lost = stress_cards.on_a_cluster(
                kind,
                address=ray,
                per_node=workers or (2 if kind == "cpu" else None),
                rounds=rounds,
                minutes=minutes,
                timeout=timeout,
                worker_setup=WORKER_SETUP,
            )
        else:
            records, lost = stress_cards.on_this_machine(
                kind,
                workers=stress_cards.cards_here(kind, workers) if only is None else 1,
                rounds=rounds,
                minutes=minutes,
                only=only,
                timeout=timeout,
                worker_setup=WORKER_SETUP,
            )
    verdicts = judge(records, lost=lost)
    page = leave_answer(html, "the same job on every card", verdicts=verdicts)
    if as_json:
        document = {
            "summary": summary(records) if records else {},
            "verdicts": [finite(v.to_dict()) for v in verdicts],
            "determinism": {str(record.card): dict(record.switches) for record in records},
        }
        print(json.dumps(document, indent=1))
    else:
        print_verdicts(console, verdicts)
        if records:
            told = summary(records)
            console.print(
                f"{told['cards']:.0f} cards, {told['rounds']:.0f} rounds, {told['elements'] / 1e6:.0f} million output "
                f"elements each, {told['seconds']:.1f} s",
                markup=False,
            )
        if page is not None:
            say(console, f"as a page: {page}")
    raise typer.Exit(exit_code(verdicts, require=require))
