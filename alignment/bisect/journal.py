"""Everything a bisection measured, in an append-only file that survives being killed at any moment."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alignment.bisect.observation import Observation, Result
from alignment.errors import InputError

SCHEMA = 1
FILE = "journal.jsonl"
# Only what was measured, or will never be measurable, is kept as an answer; the rest may pass another time.
CACHED = (Result.GOOD, Result.BAD, Result.MEASURED, Result.SKIP)


def probe_key(*, stack: str, suite: str, check: str, hardware: str, environment: str, data: str, repeat: int) -> str:
    """What makes two probes the same: the stack, the suite's commit, the check, hardware, environment, data,
    repetition.
    """
    return hashlib.sha256(json.dumps([stack, suite, check, hardware, environment, data, repeat]).encode()).hexdigest()


class Journal:
    """The state of one bisection: a line per event, flushed to the disk before anything rests on it.

    A last line that was cut by a kill is dropped when the file is opened again. One process at a time holds it.
    """

    def __init__(self, directory: Path, *, write: bool = True) -> None:
        self.directory, self.path = Path(directory), Path(directory) / FILE
        self._lock = threading.Lock()
        self._file = None
        self.events: list[dict[str, Any]] = []
        if write:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._held = open(self.directory / "lock", "w")
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError("another process is at work on this bisection", where=self.directory) from None
        elif not self.path.is_file():
            raise InputError(
                "there is no bisection in this folder", where=self.directory, next_step="alignment bisect run …"
            )
        self._read(repair=write)
        if write:
            self._file = open(self.path, "ab", buffering=0)

    def _read(self, *, repair: bool) -> None:
        if not self.path.is_file():
            return
        raw, good = self.path.read_bytes(), 0
        for number, line in enumerate(raw.splitlines(keepends=True), start=1):
            whole = line.endswith(b"\n")
            try:
                event = json.loads(line)
            except ValueError:
                if good + len(line) < len(raw):
                    raise InputError(
                        "the journal is damaged in the middle", where=f"{self.path}: line {number}"
                    ) from None
                break
            if not whole:
                break
            good += len(line)
            self.events.append(event)
        if repair and good < len(raw):
            with open(self.path, "r+b") as file:
                file.truncate(good)
                os.fsync(file.fileno())
        if self.events and self.events[0].get("schema") != SCHEMA:
            raise InputError(
                "a journal of another schema", where=self.path, expected=SCHEMA, found=self.events[0].get("schema")
            )

    def append(self, kind: str, **data: Any) -> dict[str, Any]:
        """Adds an event and returns when it is on the disk."""
        if self._file is None:
            raise InputError("the journal is open for reading only", where=self.path)
        event = {"event": kind, "at": datetime.now(timezone.utc).isoformat(timespec="seconds"), **data}
        line = json.dumps(event, sort_keys=True, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._file.write(line)
            os.fsync(self._file.fileno())
            self.events.append(event)
        return event

    def of(self, kind: str) -> Iterator[dict[str, Any]]:
        """Events of one kind, in order."""
        return (e for e in list(self.events) if e["event"] == kind)

    def last(self, kind: str) -> dict[str, Any] | None:
        """The latest event of one kind."""
        return next((e for e in reversed(self.events) if e["event"] == kind), None)

    def observations(self) -> dict[str, Observation]:
        """Finished probes by their key; infrastructure failures are not among them."""
        found = {}
        for event in self.of("probe"):
            seen = Observation.from_data(event["observation"])
            if seen.result in CACHED and seen.reason != "infrastructure":
                found[event["key"]] = seen
        return found

    def recall(self, question: str) -> Any | None:
        """An answer noted by :meth:`remember`, or None."""
        return next((e["answer"] for e in self.of("answer") if e["question"] == question), None)

    def remember(self, question: str, answer: Any) -> None:
        """Notes what something outside said (releases of an index, commits of a repository), so that a resumed run
        sees the same.
        """
        self.append("answer", question=question, answer=answer)

    def settings(self) -> Mapping[str, Any] | None:
        """What the bisection was begun with."""
        begun = next(self.of("begin"), None)
        return begun["settings"] if begun else None

    def close(self) -> None:
        """Lets another process have it."""
        if self._file is not None:
            self._file.close()
            self._held.close()
            self._file = None
