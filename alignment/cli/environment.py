"""What is here, and what it costs."""

from __future__ import annotations

import json
from typing import Annotated, Optional

import typer

from alignment.cli.options import (
    BASELINES,
    BaselineOption,
    DeviceOption,
    EmulateOption,
    JsonOption,
    console_on,
    install_emulated_npu,
)


def doctor(
    as_json: JsonOption = False, emulate_npu: EmulateOption = False, baseline: BaselineOption = BASELINES
) -> None:
    """Devices, implementations, engines, stack, switches and matching baselines; and why what is missing is missing."""
    from alignment.report.doctor import examine, print_examination
    from alignment.report.progress import waiting

    if emulate_npu:
        install_emulated_npu()
    with waiting(console_on(True), "looking at devices, engines and baselines", quiet=as_json):
        found = examine(baseline)
    if as_json:
        print(json.dumps(found, indent=1, default=str))
    else:
        print_examination(console_on(False), found)


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
    from alignment.report.progress import waiting

    chosen = tuple(engine or ENGINES)
    with waiting(console_on(True), f"a step of {', '.join(chosen)}", quiet=as_json):
        rows = compare_engines(chosen, model=model, ranks=ranks, device=device)
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], indent=1))
        return
    columns = (
        "engine",
        "held MB",
        "peak MB",
        "collectives",
        "sent MB",
        "start s",
        "step s",
        "lines to kernel",
        "why not",
    )
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        numbers = (
            f"{row.held_bytes / 1e6:.1f}", f"{row.peak_bytes / 1e6:.1f}", str(sum(n for n, _ in row.collectives.values())),
            f"{row.sent_bytes / 1e6:.1f}", f"{row.start_seconds:.1f}", f"{row.step_seconds:.2f}", str(row.lines_to_kernel),
        )  # fmt: skip
        table.add_row(row.engine, *(("",) * len(numbers) if row.unavailable else numbers), row.unavailable)
    console_on(False).print(table)
