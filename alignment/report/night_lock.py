"""One driver per night: the file that whoever is at work on one holds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from alignment.errors import InputError
from alignment.report.night import LOCK


@contextlib.contextmanager
def lock(out: Path) -> Iterator[None]:
    """Holds the night in ``out``.

    Raises:
        InputError: another driver is at work on it.
    """
    handle = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        # A full disk is no reason to be silent: the night goes on, and says so.
        print(f"{out}: cannot be locked: {error.strerror}", file=sys.stderr)
    try:
        if handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError("another driver is at work on this night", where=out) from None
            except OSError as error:  # a store without locks
                print(f"{out}: cannot be locked: {error.strerror}", file=sys.stderr)
        yield
    finally:
        if handle is not None:
            os.close(handle)
