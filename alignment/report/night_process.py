"""One command of a night: its own folder and log, a time limit, and nothing of it left when it ends.

A phase starts other processes: pytest its workers, Ray a cluster of its own in other sessions. Ending the first of them
leaves the others behind, holding cards and memory of the next phase. So the whole tree below a command is ended with
it; on Linux what a dead child left behind is adopted (``PR_SET_CHILD_SUBREAPER``) and ended too, and a command dies
with whoever started it (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.report.night_matrix import STDERR, STDOUT

RUNNING = "running.json"
"""In the folder of a phase while its command runs: who it is, for whoever has to clear up after a killed driver."""

GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_SUBREAPER, _DEATH_SIGNAL = 36, 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
_PROGRAMS = {"alignment": ("-m", "alignment"), "pytest": ("-m", "pytest"), "python": ()}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended: ``code`` as the shell would say it (None: it was never started), ``cut`` why it was ended
    from outside ("" where it ended by itself)."""

    code: int | None
    seconds: float
    cut: str = ""

    @property
    def text(self) -> str:
        """In words."""
        if self.cut:
            return self.cut
        if self.code is None:
            return "not started"
        if self.code > 128 and self.code - 128 in {s.value for s in signal.Signals}:
            name = signal.Signals(self.code - 128).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"killed by {name}{hint}"
        return f"exit code {self.code}"


def program(argv: Sequence[str]) -> list[str]:
    """``argv`` with alignment, pytest and python run by this interpreter."""
    first, *rest = argv
    return [sys.executable, *_PROGRAMS[first], *rest] if first in _PROGRAMS else list(argv)


def run_command(
    argv: Sequence[str],
    *,
    folder: Path,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    stop: Callable[[], str] = lambda: "",
) -> Ended:
    """Runs a command to its end, to its time limit or until ``stop`` gives a reason; see :func:`program`.

    What it prints goes to ``stdout.txt`` and ``stderr.txt`` of ``folder``, which is made.

    Raises:
        OSError: the folder or the files cannot be made (a full disk).
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    before = _children(os.getpid())
    with open(folder / STDOUT, "wb") as out, open(folder / STDERR, "wb") as err:
        try:
            process = subprocess.Popen(
                program(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=dict(env),
                start_new_session=True, preexec_fn=_die_with_parent(os.getpid()),
            )  # fmt: skip
        except OSError as error:
            return Ended(code=None, seconds=0.0, cut=f"cannot be started: {error.strerror or error}: {argv[0]}")
    try:
        write_json(folder / RUNNING, {"pid": process.pid, "started": _started(process.pid)})
        cut = _wait(process, deadline=began + timeout, timeout=timeout, stop=stop)
    finally:
        end_tree(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        for orphan in _children(os.getpid()) - before - {process.pid}:
            end_tree(orphan)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, os.WNOHANG)
        with contextlib.suppress(OSError):
            (folder / RUNNING).unlink(missing_ok=True)
    seconds = time.monotonic() - began
    if process.returncode is None:
        return Ended(code=None, seconds=seconds, cut=f"{cut}; it cannot be killed (stuck in a driver?)")
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Ended(code=code, seconds=seconds, cut=cut)


def clear_up(folder: Path) -> bool:
    """Ends the command that a killed driver left running in ``folder``; whether there was one."""
    try:
        about = read_json(folder / RUNNING)
        pid, started = int(about["pid"]), about["started"]
    except (InputError, OSError, KeyError, TypeError, ValueError):
        return False
    # A process of the same number that began at another time is somebody else's.
    alive = started is not None and _started(pid) == started
    if alive:
        end_tree(pid)
    (folder / RUNNING).unlink(missing_ok=True)
    return alive


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """This process adopts what its dead children leave behind, so that :func:`run_command` can end it."""
    if _LIBC is not None:
        _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        if _LIBC is not None:
            _LIBC.prctl(_SUBREAPER, 0, 0, 0, 0)


def end_tree(pid: int) -> None:
    """Asks a process, all below it and its group to end, and kills after :data:`GRACE_SECONDS` what is still there."""
    # Listed first: once a parent is dead its children are no longer below it.
    tree = {p: _started(p) for p in (pid, *_descendants(pid))}
    _signal(pid, tree, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(map(_runs, tree)) and time.monotonic() < deadline:
        time.sleep(0.02)
    tree |= {p: _started(p) for p in _descendants(pid)}
    _signal(pid, tree, signal.SIGKILL)


def _signal(group: int, tree: Mapping[int, int | None], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for pid, started in tree.items():
        if started is not None and _started(pid) == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _wait(process: subprocess.Popen, *, deadline: float, timeout: float, stop: Callable[[], str]) -> str:
    while True:
        if _over(process):
            return ""
        time.sleep(_POLL_SECONDS)
        reason = stop()
        if reason:
            return reason
        if time.monotonic() >= deadline:
            return f"no end within {timeout / 60:g} minutes"


def _over(process: subprocess.Popen) -> bool:
    """Whether it ended. It is left as a zombie: until its tree is ended nobody else may get its number."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    if _LIBC is None:
        return None

    def die_with_parent() -> None:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(128 + signal.SIGKILL)

    return die_with_parent


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` from the state on; None where there is no such process (or no /proc)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the machine did: together with its number, who it is."""
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def _runs(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def _parents() -> dict[int, int]:
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (stat := _stat(int(name))) is not None:
                found[int(name)] = int(stat[1])
    return found


def _children(pid: int) -> set[int]:
    return {child for child, parent in _parents().items() if parent == pid}


def _descendants(pid: int) -> list[int]:
    parents, found = _parents(), [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]
