"""A plugin is driven in a process of its own: it patches, stubs and installs things no other test should meet."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from alignment.backends.plugin_sources import PluginSource
from alignment.errors import InputError, UnavailableError
from alignment.files import read_json, write_json
from alignment.numerics.verdict import Outcome, Verdict

LABEL = "npu (emulated)"
LIMIT_SECONDS = 600
_TAIL = 6  # lines of a failed process that are shown


def drive_in_process(module: str, source: PluginSource, *, limit_seconds: float = LIMIT_SECONDS) -> list[Verdict]:
    """Run ``python -m module`` on a source and return its verdicts.

    A source that cannot be driven (it does not import, or it raises) gives one verdict ERROR with the reason.

    Raises:
        UnavailableError: something the run needs is not on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="alignment-drive-") as folder:
        result = Path(folder) / "verdicts.json"
        command = [sys.executable, "-m", module, str(source.root), source.subject, str(result)]
        # No bytecode: a source tree is not this project's to write to.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            return [_error(_check(module), source.subject, f"no verdict after {limit_seconds:g} s")]
        if not result.is_file():
            tail = " | ".join(done.stderr.strip().splitlines()[-_TAIL:])
            return [_error(_check(module), source.subject, f"the process ended with status {done.returncode}: {tail}")]
        answer = read_json(result)
    if "unavailable" in answer:
        raise UnavailableError(answer["unavailable"], where=source.plugin.name)
    return [Verdict.from_dict(verdict) for verdict in answer["verdicts"]]


def main(module: str, drive: Callable[[Path, str], list[Verdict]]) -> None:
    """The process's side: drive the source named on the command line and write what came of it."""
    root, subject, result = sys.argv[1:]
    sys.path.insert(0, root)
    try:
        answer = {"verdicts": [verdict.to_dict() for verdict in drive(Path(root), subject)]}
    except UnavailableError as error:
        answer = {"unavailable": error.problem}
    except InputError as error:
        answer = {"verdicts": [_error(_check(module), subject, str(error)).to_dict()]}
    except Exception as error:  # whatever a plugin raises is the finding
        answer = {"verdicts": [failed_to_run(_check(module), subject, error).to_dict()]}
    write_json(Path(result), answer)


def install_emulated_npu() -> None:
    """Install the emulated NPU in the driven process.

    Raises:
        UnavailableError: it cannot be had: no compiler, or a real torch_npu is installed.
    """
    from alignment.devices import emulated_npu

    try:
        emulated_npu.install()
    except InputError as error:
        raise UnavailableError(error.problem, where=LABEL) from error


def installed_from(root: Path, module) -> None:
    """Refuse a module that was not imported from ``root``: another copy would be judged under this one's name.

    Raises:
        InputError: naming both places.
    """
    file = Path(module.__file__).resolve()
    if not file.is_relative_to(root.resolve()):
        raise InputError("another copy was imported", where=module.__name__, expected=f"a file in {root}", found=file)


def failed_to_run(check: str, subject: str, error: Exception) -> Verdict:
    """The verdict ERROR for what a plugin raised, with its place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return _error(check, subject, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def _check(module: str) -> str:
    return f"{module.rpartition('.')[2]}.drive"


def _error(check: str, subject: str, reason: str) -> Verdict:
    return Verdict(
        check=check,
        layer="layer",
        stage="operator",
        subject=subject,
        device=LABEL,
        outcome=Outcome.ERROR,
        reason=f"could not be driven: {reason}",
    )
