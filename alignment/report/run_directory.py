"""``runs/<id>/``: everything one run of the suite leaves behind."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.numerics.verdict import Verdict
from alignment.rl.tracking import RUN

if TYPE_CHECKING:
    from alignment.devices.base import Device

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


def write_training_provenance(directory: Path, device: Device, *, of: Path | None = None) -> Path:
    """Writes ``provenance.json`` of a training run that has ended, with the machine its workers found and the switches
    they hold to; of the rest, what holds for this process.

    Args:
        directory: where it is written.
        device: the device that the run was asked to use.
        of: folder of the run, with its ``config.json`` and ``run.json``; ``directory`` by default.

    Raises:
        InputError: the run does not say what it was.
    """
    from alignment.baseline.provenance import provenance_of
    from alignment.devices.determinism import ENVIRONMENT, switches
    from alignment.rl.config import flatten
    from alignment.rl.run import CONFIG

    folder = of or directory
    about, config = read_json(folder / RUN), flatten(read_json(folder / CONFIG))
    hashes = {name.removesuffix("_hash"): value for name, value in about["provenance"].items()}
    made = provenance_of(device, hashes=hashes).to_dict() | {"fingerprint": stored_fingerprint(about)}
    if config["trainer.deterministic"]:
        # A worker refuses to start where one of them does not hold; here, outside it, they are not set.
        held = switches(device.kind, len(about["workers"]), os.environ)
        held = {s.name: s.wanted for s in held if s.where == ENVIRONMENT and s.applies}
        made["determinism"] = {**held, **made["determinism"], "deterministic_algorithms": True}
    write_json(directory / PROVENANCE, made)
    return directory / PROVENANCE


def stored_fingerprint(about: Mapping[str, Any]) -> dict[str, Any]:
    """The machine that ``run.json`` of a training run tells of: that of its first worker, else the label alone."""
    workers = about.get("workers")
    first = workers[0] if isinstance(workers, list) and workers else None
    found = first.get("fingerprint") if isinstance(first, Mapping) else None
    if isinstance(found, Mapping):
        return dict(found)
    return {"label": about["device"]} if about.get("device") else {}


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
