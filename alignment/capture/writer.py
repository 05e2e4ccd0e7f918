"""The background writer: a bounded queue in front of the disk, and a run that goes on when the disk is full."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

from alignment.errors import InputError


class BackgroundWriter:
    """Runs jobs that write, in order, on one thread.

    A job that fails with an ``OSError`` (a full disk, a folder that vanished) ends the writing for good: what was
    queued is dropped, the reason is said once on stderr and kept in :attr:`failure`, and later jobs are dropped in
    silence. Whoever submits never gets an exception for it: the training is worth more than its capture.

    Args:
        queue_bytes: how much may wait; :meth:`submit` blocks while more does.
    """

    def __init__(self, *, queue_bytes: int) -> None:
        self.failure: str | None = None
        self._limit, self._waiting = queue_bytes, 0
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._state = threading.Condition()
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None], nbytes: int) -> None:
        """Queues ``job``, which holds ``nbytes`` of memory until it has run."""
        with self._state:
            if self._closed:
                raise RuntimeError("the writer is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="capture-writer", daemon=True)
                self._thread.start()
            while self._waiting and self._waiting + nbytes > self._limit and self.failure is None:
                self._state.wait()
            if self.failure is None:
                self._jobs.append((job, nbytes))
                self._waiting += nbytes
                self._state.notify_all()

    def flush(self) -> None:
        """Waits until everything that was submitted is written, or has failed."""
        with self._state:
            while (self._jobs or self._busy) and self.failure is None:
                self._state.wait()

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        self.flush()
        with self._state:
            self._closed = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._jobs and not self._closed:
                    self._state.wait()
                if not self._jobs:
                    return
                job, nbytes = self._jobs.popleft()
                self._busy = True
            problem = None
            try:
                job()
            except OSError as error:
                problem = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
            except InputError as error:
                problem = str(error)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            del job
            # Before anyone who waits is told that the job is over.
            if problem is not None:
                self.fail(problem)
            with self._state:
                self._busy = False
                self._waiting = max(0, self._waiting - nbytes)
                self._state.notify_all()
            if problem is not None:
                return

    def fail(self, problem: str) -> None:
        """Ends the writing for good: what is queued is dropped, and ``problem`` is said once."""
        with self._state:
            if self.failure is not None:
                return
            self.failure = problem
            self._jobs.clear()
            self._waiting = 0
            self._state.notify_all()
        print(f"capture stopped, the run goes on: {problem}", file=sys.stderr, flush=True)
