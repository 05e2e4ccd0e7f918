"""What ends a night before its time: a signal that came, a node that was lost."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence

from alignment.report.night_nodes import LOST, Watch

NODE_GRACE_SECONDS = 60.0
"""How long a phase may go on after a node was lost: long enough to say itself what it lost."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """The signals that came, in place of being ended by them."""
    came: list[str] = []
    # Who is told to ignore a signal (nohup) goes on doing so.
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {s: signal.signal(s, lambda number, _: came.append(signal.Signals(number).name)) for s in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Patience:
    """Why the command that runs has to end now: a signal came, or a node was lost a while ago."""

    def __init__(self, watch: Watch | None, interrupted: Sequence[str]) -> None:
        self._watch, self._interrupted = watch, interrupted
        self._since: float | None = None
        self._next = 0.0

    def __call__(self) -> str:
        if self._interrupted:
            return f"interrupted by {self._interrupted[0]}"
        now = time.monotonic()
        if self._watch is None or now < self._next:
            return ""
        lost = self._watch.lost()
        self._next = time.monotonic() + 1.0
        if not lost:
            return ""
        self._since = now if self._since is None else self._since
        if now - self._since < NODE_GRACE_SECONDS:
            return ""
        return f"{LOST}: {', '.join(node.name for node in lost)}; ended {NODE_GRACE_SECONDS:g} s later"
