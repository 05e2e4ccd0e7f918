"""What is said where a capture holds nothing, or no module: which of its settings left everything out."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from alignment.capture.config import PREFIX, CaptureConfig
from alignment.capture.own_format import OwnCapture, is_capture
from alignment.errors import InputError

_OF_MODULES = ("module", "operator", "parameter")


def excluded_everything(config: CaptureConfig, *, steps: Collection[int] = (), rank: int = 0) -> str | None:
    """Why there is no capture at all, or None where no setting leaves something out.

    Args:
        steps: those that the run went through, as far as they are known.
        rank: one that took part.
    """
    bounds = [name for name in ("step_start", "step_end") if getattr(config, name) is not None]
    if steps and not any(map(config.takes_step, steps)):
        return f"{_said(config, bounds)}: the run went through steps {min(steps)} … {max(steps)}"
    named = [] if steps else bounds
    named += ["ranks"] if not config.takes_rank(rank) else []
    named += ["stages"] if config.stages is not None else []
    return _said(config, named) if named else None


def say_what_is_missing(
    config: CaptureConfig, directory: Path, *, steps: Collection[int] = (), stages: Collection[str]
) -> None:
    """Tells on stderr that a finished run has no capture, or one without a module.

    Args:
        steps: see :func:`excluded_everything`.
        stages: those that run modules.
    """
    if not is_capture(directory):
        say_nothing_was_captured(excluded_everything(config, steps=steps))
    elif config.modules is not None and _without_modules(directory, stages):
        say_no_module_was_captured(config)


def say_nothing_was_captured(because: str | None) -> None:
    """One line on stderr; none where there is no reason."""
    if because is not None:
        print(f"capture: nothing was captured: nothing in this run fits {because}", file=sys.stderr, flush=True)


def say_no_module_was_captured(config: CaptureConfig) -> None:
    """One line on stderr."""
    text = f"capture: no module was captured: none has a name that fits {_said(config, ['modules'])}"
    print(text, file=sys.stderr, flush=True)


def _said(config: CaptureConfig, names: list[str]) -> str:
    fields = config.to_dict()
    shown = {n: f"[{','.join(map(str, v))}]" if isinstance(v := fields[n], list) else str(v) for n in names}
    return ", ".join(f"{PREFIX}{name}={text}" for name, text in shown.items())


def _without_modules(directory: Path, stages: Collection[str]) -> bool:
    """Whether stages that run modules were captured, and none of their modules was."""
    try:
        reader = OwnCapture(directory)
        places = [(step, stage) for step in reader.steps() for stage in reader.stages(step) if stage in stages]
        pieces = [(*place, rank) for place in places for rank in reader.ranks(*place)]
        return bool(pieces) and not any(row.kind in _OF_MODULES for piece in pieces for row in reader.rows(*piece))
    except (InputError, OSError):
        return False
