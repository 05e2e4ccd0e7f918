"""``runs/<id>/``: everything one run of the suite leaves behind."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.numerics.verdict import Verdict

VERDICTS = "verdicts.json"
PROVENANCE, STACK = "provenance.json", "stack.yaml"
SCHEMA = 1


def new_run_directory(root: Path, *, requested: Path | None = None) -> Path:
    """The name of a fresh directory for one run: ``root/<UTC time>-<4 hex digits>``, or ``requested`` if one was asked for.

    It is made by what is first written into it: a run that is refused leaves nothing behind.

    Raises:
        InputError: ``requested`` already holds a run.
    """
    if requested is not None:
        if (requested / VERDICTS).exists():
            raise InputError("the directory already holds a finished run", where=requested, next_step="name another --run-dir")
        return requested
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return root / f"{stamp}-{secrets.token_hex(2)}"


def write_verdicts(directory: Path, verdicts: Iterable[Verdict]) -> Path:
    """Writes ``verdicts.json`` whole or not at all."""
    path = directory / VERDICTS
    write_json(path, {"schema": SCHEMA, "verdicts": [finite(v.to_dict()) for v in verdicts]})
    return path


def write_stack(directory: Path) -> Path:
    """Freezes the running software stack into the directory of a run: what triage compares and bisect starts from."""
    from alignment.bisect.freeze import freeze_stack
    from alignment.bisect.stack import save_stack

    directory.mkdir(parents=True, exist_ok=True)
    save_stack(freeze_stack(name=directory.name).stack, directory / STACK)
    return directory / STACK


def read_verdicts(directory: Path) -> list[Verdict]:
    """The verdicts of a finished run.

    Raises:
        InputError: there is no finished run in ``directory``, or its file is of another schema.
    """
    path = directory / VERDICTS
    data = read_json(path)
    found = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if not isinstance(data, dict) or found != SCHEMA:
        raise InputError("verdicts of another schema", where=path, expected=f"schema {SCHEMA}", found=found)
    try:
        return [_stored(v) for v in data["verdicts"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"not the verdicts of a run ({type(error).__name__}: {error})", where=path) from None


def _stored(verdict: dict) -> Verdict:
    for measure in verdict["measures"]:
        if not {"value", "bound"} <= measure.keys():
            raise KeyError("value and bound of a measure")
    return Verdict.from_dict(verdict)


def finite(value):
    """``value`` with NaN and the infinities spelled as strings, since JSON has none."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
