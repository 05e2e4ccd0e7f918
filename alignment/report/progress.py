"""Progress of long work: a live bar on a terminal, a few plain lines elsewhere, nothing where it must be quiet."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

# Without a terminal a line appears at most this often: often enough to show life, rarely enough for a log.
QUIET_SECONDS = 20.0


class SuiteProgress:
    """Told about the parts of ``alignment run`` and about the steps of the training runs inside them."""

    def __init__(self, console: Console | None, bars: Progress | None) -> None:
        self._console, self._bars = console, bars
        self._task: TaskID | None = None
        self._part, self._last_line = "", 0.0

    def begin(self, part: str, total: int) -> None:
        """A part of ``total`` checks or steps begins."""
        self._finish()
        self._part, self._last_line = part, time.monotonic()
        if self._bars is not None:
            self._task = self._bars.add_task(part, total=total, note="")
        elif self._console is not None:
            self._line(f"{part}: {total} to do")

    def advance(self, note: str = "") -> None:
        """One of them is done."""
        if self._bars is not None:
            self._bars.update(self._task, advance=1, note=note)
        elif self._console is not None and time.monotonic() - self._last_line > QUIET_SECONDS:
            self._line(f"{self._part}: {note}")

    def note(self, text: str) -> None:
        """What of the part is in work."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, note=text)

    def on_stage(self, step: int, total_steps: int, stage: str) -> None:
        """A stage of a training step begins."""
        self.note(stage)

    def on_step(self, step: int, total_steps: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """A training step has ended."""
        name = "reward/before_filter" if "reward/before_filter" in metrics else "student/loss"
        shown = f"{name.partition('/')[0 if name.startswith('reward') else 2]} {metrics[name]:+.3f}"
        self.advance(f"step {step} of {total_steps}, {shown}, {timings['step']:.2f} s a step")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(text, markup=False, highlight=False)

    def _finish(self) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, note="done")


class TrainingProgress(SuiteProgress):
    """Progress of one training run, whose length is known at its first stage."""

    def on_stage(self, step: int, total_steps: int, stage: str) -> None:
        """A stage begins; the first one starts the bar."""
        if not self._part:
            self.begin("training", total_steps)
        super().on_stage(step, total_steps, stage)


@contextlib.contextmanager
def suite_progress(console: Console, *, quiet: bool) -> Iterator[SuiteProgress]:
    """Progress of ``alignment run``."""
    with _bars(console, quiet) as (shown, bars):
        yield SuiteProgress(shown, bars)


@contextlib.contextmanager
def training_progress(console: Console, *, quiet: bool) -> Iterator[TrainingProgress]:
    """Progress of ``alignment dapo``."""
    with _bars(console, quiet) as (shown, bars):
        yield TrainingProgress(shown, bars)


@contextlib.contextmanager
def byte_progress(console: Console, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A function to be called with what is in work, the bytes that are done and the bytes in all."""
    with _bars(console, quiet) as (shown, bars):
        task = bars.add_task("bytes", total=None, note="") if bars is not None else None
        last = [time.monotonic()]

        def report(name: str, done: int, total: int) -> None:
            if bars is not None:
                bars.update(task, completed=done, total=total, note=name)
            elif shown is not None and time.monotonic() - last[0] > QUIET_SECONDS:
                last[0] = time.monotonic()
                shown.print(f"{name}: {done / max(total, 1):.0%}", markup=False, highlight=False)

        yield report


@contextlib.contextmanager
def tasks(console: Console, text: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner, the time that has passed and what is in work, which is told to the function that is given; gone when
    it is done. Without a terminal nothing is shown.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if quiet or not console.is_terminal:
        yield lambda what: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # What is printed meanwhile goes above the spinner, but not away from a file that standard output is.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bars:
        task = bars.add_task(text, total=None)
        yield lambda what: bars.update(task, description=f"{text}: {what}")


class NightProgress:
    """Told which phase of a night begins and how those before it ended."""

    def __init__(self, console: Console | None, bars: Progress | None, task: TaskID | None) -> None:
        self._console, self._bars, self._task = console, bars, task
        self._ended = -1

    def begin(self, phase: str, minutes: float) -> None:
        """A phase that has ``minutes`` begins."""
        self._ended += 1
        if self._bars is not None:
            note = f"{phase}, at most {minutes:g} min"
            self._bars.reset(self._task, completed=self._ended, note=note)
        elif self._console is not None:
            self.tell(f"{phase} …")

    def tell(self, line: str) -> None:
        """A line that stays: how a phase ended."""
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def night_progress(console: Console, phases: int, *, quiet: bool) -> Iterator[NightProgress]:
    """Progress of ``alignment nightly run`` through so many phases: the phase and its time on a terminal, gone when the
    night is over, a line when one begins and when it ends. A terminal that goes away takes nothing else along.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if quiet or not console.is_terminal:
        yield NightProgress(None if quiet else console, None, None)
        return
    columns = (
        SpinnerColumn(), TextColumn("night"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )  # fmt: skip
    bars = Progress(*columns, console=console, transient=True)
    task = bars.add_task("night", total=phases, note="provenance")
    bars.start()
    try:
        yield NightProgress(console, bars, task)
    finally:
        with contextlib.suppress(OSError, ValueError):
            bars.stop()


@contextlib.contextmanager
def waiting(console: Console, text: str, *, quiet: bool) -> Iterator[None]:
    """A spinner and the time that has passed, for work whose length is not known; gone when it is done.

    Without a terminal nothing is shown: there is nothing to tell before the result.
    """
    with tasks(console, text, quiet=quiet):
        yield


@contextlib.contextmanager
def _bars(console: Console, quiet: bool) -> Iterator[tuple[Console | None, Progress | None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if quiet:
        yield None, None
        return
    if not console.is_terminal:
        yield console, None
        return
    columns = (
        TextColumn("{task.description:<12}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        yield console, bars
