"""The options several commands share, and what every command does with them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Optional

import typer

BASELINES = Path(__file__).resolve().parents[2] / "baselines"
RUNS = Path("runs")
HISTORY = RUNS / "history.sqlite"


Overrides = Annotated[
    Optional[list[str]],
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the training configuration, in verl's vocabulary."),
]
ConfigOption = Annotated[str, typer.Option("--config", help="Name of a preset, or a YAML file.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="auto (npu, else cuda, else cpu), cpu, cuda[:n] or npu[:n].")
]
EmulateOption = Annotated[bool, typer.Option("--emulate-npu", help="Install the emulated NPU; its results say so.")]
FaultOption = Annotated[
    Optional[list[str]],
    typer.Option(
        "--fault", metavar="ID|PATH.PY:OBJECT", help="Switch on a deliberate fault (may be given several times)."
    ),
]
BaselineOption = Annotated[Path, typer.Option("--baseline", help="Folder of the stored baselines.")]
RunDirOption = Annotated[Optional[Path], typer.Option("--run-dir", help="Where this run goes; runs/<id>/ by default.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
HtmlOption = Annotated[
    Optional[Path], typer.Option("--html", metavar="FILE", help="Write the answer as one page too; it opens offline.")
]
RequireOption = Annotated[bool, typer.Option("--require", help="What is unavailable is an error, not a remark.")]
CaseOption = Annotated[Optional[list[str]], typer.Option("--case", help="Case id or its beginning (repeatable).")]
SubjectOption = Annotated[Optional[list[str]], typer.Option("--subject", help="Implementation to judge (repeatable).")]
LayerOption = Annotated[Optional[str], typer.Option("--layer", help="unit, layer or e2e.")]


def find_device(name: str, emulate: bool):
    from alignment.devices.base import get_device

    if emulate:
        install_emulated_npu()
    return get_device(name)


def install_emulated_npu() -> None:
    from alignment.devices import emulated_npu

    # Workers are other processes: they install it when they see the variable.
    os.environ["ALIGNMENT_EMULATE_NPU"] = "1"
    emulated_npu.install()
    print(emulated_npu.banner(), file=sys.stderr)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
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


def console_on(to_stderr: bool):
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """Whoever reads (``| head``) has seen enough: that ends the output, not the run and what it writes."""
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    console = Terminal(stderr=to_stderr)
    # A log has no width of its own; 80 columns would cut the names of the checks.
    return console if console.is_terminal or "COLUMNS" in os.environ else Terminal(stderr=to_stderr, width=120)


def say(console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
