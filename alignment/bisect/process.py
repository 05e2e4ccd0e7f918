"""Running something in a group of its own, with a time limit that takes everything it started down with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What is kept of the output of a probe: its end.
KEPT = 4000


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that has ended. ``code`` is negative where a signal ended it, None where its time was up."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def tail(self) -> str:
        """The end of what it said, without addresses."""
        return without_addresses((self.stdout[-KEPT // 2 :] + self.stderr[-KEPT // 2 :]).strip())


def run_process(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
    stdin: str | None = None,
) -> Finished:
    """Runs ``command`` to its end or to the end of its time.

    Raises:
        OSError: the program does not exist or may not be run.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code: int | None
        try:
            process.communicate(stdin.encode() if stdin is not None else None, timeout=timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        out.seek(0)
        err.seek(0)
        texts = [stream.read().decode(errors="replace") for stream in (out, err)]
    return Finished(code=code, stdout=texts[0], stderr=texts[1], seconds=time.monotonic() - began)


def _end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def without_addresses(text: str) -> str:
    """``text`` with the hosts of web addresses left out: tools quote package indices, which are nobody's business
    here.
    """
    return re.sub(r"\b(https?|git|ssh)://[^/\s\"'<>)]+", r"\1://…", text)
