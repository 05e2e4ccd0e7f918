"""One command of a night: its own folder and log, a time limit, and nothing of it left when it ends.

A phase starts other processes: pytest its workers, Ray a cluster of its own in other sessions. Ending the first of them
leaves the others behind, holding cards and memory of the next phase. So the whole tree below a command is ended with
it; on Linux what a dead child left behind is adopted (``PR_SET_CHILD_SUBREAPER``) and ended too, and a command dies
with whoever started it (``PR_SET_PDEATHSIG``). What such a command had started itself does not die with it: it carries
a mark of the command in its environment, by which :func:`clear_up` finds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
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

MARK = "ALIGNMENT_COMMANDS"
"""Environment variable of all that a command starts: the mark of the command, after those of commands it is part of."""

GRACE_SECONDS = 5.0
_ROUNDS = 3
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
    mark = secrets.token_hex(8)
    env = {**env, MARK: os.pathsep.join(filter(None, (env.get(MARK), mark)))}
    # Before the command is there: who kills the driver at any moment leaves a trace of what it was about to start.
    write_json(folder / RUNNING, {"mark": mark, "pid": None, "started": None, "machine": _machine()})
    with open(folder / STDOUT, "wb") as out, open(folder / STDERR, "wb") as err:
        try:
            process = subprocess.Popen(
                program(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=env,
                start_new_session=True, preexec_fn=_die_with_parent(os.getpid()),
            )  # fmt: skip
        except OSError as error:
            (folder / RUNNING).unlink(missing_ok=True)
            return Ended(code=None, seconds=0.0, cut=f"cannot be started: {error.strerror or error}: {argv[0]}")
    try:
        about = {"mark": mark, "pid": process.pid, "started": _started(process.pid), "machine": _machine()}
        write_json(folder / RUNNING, about)
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
    """Ends what a killed driver left running of the command in ``folder``; whether there was anything.

    That is the command, whatever bears its mark and whatever is in its session: a process may have overwritten its
    environment with a title, or have left the session, and the command itself is most often dead by now.
    """
    try:
        about = read_json(folder / RUNNING)
        mark, pid, started = about.get("mark"), about["pid"], about["started"]
    except (InputError, OSError, KeyError, TypeError, AttributeError):
        return False
    here = about.get("machine") == _machine()
    found = False
    for _ in range(_ROUNDS):  # what is ended may have started something while it was looked for
        left = _left_of(mark, pid if here else None, started)
        if not left:
            break
        found = True
        _end(left)
    (folder / RUNNING).unlink(missing_ok=True)
    return found


def _left_of(mark: object, session: int | None, started: int | None) -> list[int]:
    """What runs of a command that bore ``mark`` and led ``session``, which began at ``started``."""
    own = {os.getpid(), *_ancestors(os.getpid())}
    leader = None if session is None else _started(session)
    if started is None or leader not in (None, started):
        session = None  # a process of the same number that began at another time is somebody else's
    found = []
    for pid in _parents():
        stat = _stat(pid)
        if pid in own or stat is None or stat[0] in "ZX":
            continue
        in_session = session is not None and int(stat[3]) == session and int(stat[19]) >= started
        if in_session or mark in _marks(pid):
            found.append(pid)
    return found


def _marks(pid: int) -> list[str]:
    """The commands that a process is part of, as far as its environment may be read."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = os.fsdecode(entry).partition("=")
            if name == MARK:
                return value.split(os.pathsep)
    return []


def _machine() -> str:
    """Where and since when a process number means something: this boot of this machine, this container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


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
    _end([pid], group=pid)


def _end(pids: Sequence[int], *, group: int | None = None) -> None:
    # Listed first: once a parent is dead its children are no longer below it.
    tree = _trees(pids)
    _signal(group, tree, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(map(_runs, tree)) and time.monotonic() < deadline:
        time.sleep(0.02)
    # Whoever got the number of one that is gone is somebody else.
    tree = {**_trees([pid for pid in pids if _started(pid) == tree[pid]]), **tree}
    _signal(group, tree, signal.SIGKILL)


def _trees(pids: Sequence[int]) -> dict[int, int | None]:
    return {p: _started(p) for pid in pids for p in (pid, *_descendants(pid))}


def _signal(group: int | None, tree: Mapping[int, int | None], number: signal.Signals) -> None:
    if group is not None:
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


def _ancestors(pid: int) -> list[int]:
    parents, found = _parents(), []
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.append(pid)
    return found


def _children(pid: int) -> set[int]:
    return {child for child, parent in _parents().items() if parent == pid}


def _descendants(pid: int) -> list[int]:
    parents, found = _parents(), [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]
