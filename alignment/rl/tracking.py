"""What a run writes while it trains: one JSON line per step, each kind of line in its own file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import write_atomically

METRICS, GROUPS, TIMINGS, RANKS = "metrics.jsonl", "groups.jsonl", "timings.jsonl", "ranks.jsonl"
RUN = "run.json"
"""What a run is: seed, device, layout, what made it."""

SERIES = (METRICS, GROUPS, TIMINGS, RANKS)


class Tracker:
    """Appends to the :data:`SERIES` of a run, and to TensorBoard where asked.

    Floats keep full precision and keys are sorted, so two equal runs write equal bytes. Timings differ between equal
    runs, and what each rank had to compute between equal runs on other numbers of ranks, and therefore have files of
    their own. Every line is flushed when its step ends.

    Args:
        directory: the directory of the run.
        resume_step: the last step that counts. Later lines (of a run that was killed) are cut off, as is a torn last
            line; 0 starts the files anew.
        tensorboard: also write event files below ``directory/tensorboard`` (needs the ``tensorboard`` package).
    """

    def __init__(self, directory: Path, *, resume_step: int = 0, tensorboard: bool = False) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in SERIES:
            keep_steps(self.directory / name, resume_step)
        self._files = {name: open(self.directory / name, "a", encoding="utf-8") for name in SERIES}
        self._board = _tensorboard_writer(self.directory / "tensorboard", resume_step) if tensorboard else None

    def log(
        self,
        step: int,
        *,
        metrics: Mapping[str, float],
        groups: Mapping[str, Any],
        timings: Mapping[str, float],
        workloads: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the lines of one finished step; ``workloads`` stage → update → rank, JSON-ready, where they are known.

        Raises:
            InputError: a metric is not finite; nothing of the step is written.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise InputError(
                    "a metric is not finite", where=f"step {step} · {name}", expected="a finite number", found=value
                )
        lines = {METRICS: metrics, GROUPS: groups, TIMINGS: {"seconds": timings}}
        for name, line in (lines | {RANKS: workloads} if workloads else lines).items():
            text = json.dumps({"step": step, **line}, sort_keys=True, allow_nan=False)
            self._files[name].write(text + "\n")
            self._files[name].flush()
        if self._board is not None:
            for name, value in {**metrics, **{f"timing/{k}": v for k, v in timings.items()}}.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()


def read_series(path: Path) -> list[dict[str, Any]]:
    """The lines of a finished series, in order.

    Raises:
        InputError: the file is missing, or a line is torn or not JSON.
    """
    lines, torn = _lines(path)
    if torn is not None:
        raise InputError(
            "the series ends in a torn line",
            where=path,
            found=torn[:80],
            next_step="resume the run, or cut the line off",
        )
    return lines


def keep_steps(path: Path, last: int) -> None:
    """Cuts the series at ``path`` after step ``last``, whole or not at all; a missing file is an empty series."""
    if not path.exists():
        return
    if last == 0:
        write_atomically(path, lambda beside: beside.write_text(""))
        return
    kept = [line for line in _lines(path)[0] if line["step"] <= last]
    text = "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in kept)
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def _lines(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The whole lines of a series and its torn last line, if it has one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("the run has no such series", where=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the series cannot be read ({error})", where=path) from None
    *whole, rest = text.split("\n")
    lines = []
    for number, line in enumerate(whole, start=1):
        try:
            told = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"a line is not JSON ({error})", where=f"{path}, line {number}") from None
        if not isinstance(told, dict) or type(told.get("step")) is not int:
            raise InputError("a line of a series is about a step", where=f"{path}, line {number}", found=line[:80])
        lines.append(told)
    return lines, rest or None


def _tensorboard_writer(directory: Path, resume_step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            f"TensorBoard cannot be loaded ({error})", where="trainer.logger", next_step="pip install tensorboard"
        ) from None
    return SummaryWriter(str(directory), purge_step=resume_step + 1)
