"""A long-running command followed to its end: its log, its progress, its death, and everything it started.

A distributed trainer whose worker dies may hang for ever without a word. :func:`follow` notices the last words of a
worker in the log, silence, and running out of time; it then kills every process of the run and raises with the end of
the log.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignment.errors import InputError

MARK = "ALIGNMENT_RUN_MARK"
"""Environment variable that every process of one run inherits: how its stragglers are found."""

# What Ray and vLLM write when a worker is gone; verl's driver may wait for it for ever.
DEATH = re.compile(
    r"ActorDiedError|RayActorError|ActorUnavailableError|WorkerCrashedError|The actor died|EngineDeadError"
    r"|RayTaskError|A worker died or was killed|Engine core initialization failed|EngineCore encountered a fatal error"
    r"|WorkerProc initialization failed|OutOfMemoryError"
)
LAST_LINES = 25
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a run may take, in seconds.

    ``silence``: without a new byte in the log; ``total``: in all (None: no limit); ``grace``: between a worker's last
    words, or a request to stop, and the end.
    """

    silence: float = 900.0
    total: float | None = None
    grace: float = 60.0


def follow(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    directory: Path,
    limits: Limits | None = None,
    watch: Callable[[str], None] | None = None,
    pulse: Callable[[], object] | None = None,
    poll: float = 0.5,
) -> None:
    """Runs ``command`` in a process group of its own, its output going to ``log``, until it has ended well.

    Args:
        command: program and arguments.
        log: file for standard output and error; written anew.
        environment: the whole environment of the process.
        directory: where it runs.
        limits: when it is given up.
        watch: called with what the log gained, in pieces of whole lines, about twice a second.
        pulse: something that changes whenever the run has made progress: then it has survived the death of a worker.
        poll: seconds between two looks.

    Raises:
        InputError: it ended with another exit code than 0, one of its workers died, it said nothing for too long, or
            took too long. The message carries the last lines of the log. No process of the run is left.
    """
    limits, mark = limits or Limits(), secrets.token_hex(8)
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=directory,
            env={**environment, MARK: mark},
            start_new_session=True,
        )
    try:
        with open(log, "rb") as written:
            problem = _until_the_end(process, written, limits, watch, pulse or (lambda: None), start, poll)
    finally:
        kill_marked(process, mark, grace=min(limits.grace, 10.0))
    if problem:
        raise InputError(
            problem,
            where=log,
            expected="a run that ends with exit code 0",
            found=f"the log ends with\n{last_lines(log)}\n",
            next_step="read the log from its first error on",
        )


def _until_the_end(process, written, limits: Limits, watch, pulse, start: float, poll: float) -> str | None:
    """What went wrong, or None."""
    heard, dying, torn = time.monotonic(), None, b""
    while True:
        code = process.poll()
        gained = written.read()
        now = time.monotonic()
        if gained:
            heard = now
            *lines, torn = (torn + gained).split(b"\n")
            text = "\n".join(line.decode("utf-8", "replace") for line in lines)
            if watch is not None and text:
                watch(text)
            if dying is None and (found := DEATH.search(text)):
                dying = now, found[0], pulse()
        if code is not None:
            return None if code == 0 else f"the run ended with exit code {code}"
        if dying is not None and now - dying[0] > limits.grace:
            if pulse() == dying[2]:
                return f"a worker died ({dying[1]}) and the run did not end by itself within {limits.grace:g} s"
            dying = None
        if now - heard > limits.silence:
            return f"the run said nothing for {limits.silence:g} s"
        if limits.total is not None and now - start > limits.total:
            return f"the run took longer than {limits.total:g} s"
        time.sleep(poll)


def kill_marked(process: subprocess.Popen, mark: str, *, grace: float) -> None:
    """Ends the process group of ``process`` and all that inherited ``mark``: they are asked first, then killed."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        alive = marked_processes(mark)
        if process.poll() is not None and not alive:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        end = time.monotonic() + patience
        while time.monotonic() < end and (process.poll() is None or marked_processes(mark)):
            time.sleep(0.1)


def marked_processes(mark: str) -> list[int]:
    """Processes whose environment carries ``mark``; those that are gone but not yet waited for do not count."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """The last lines of a log, without colours."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 64 * 1024))
        text = file.read().decode("utf-8", "replace")
    return "\n".join(_COLOUR.sub("", line) for line in text.splitlines()[-count:])
