"""What a phase left in its folder without meaning to: its last words, and a disk that is full."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PROBE_BYTES = 1 << 16


def no_room(folder: Path) -> list[str]:
    """Why nothing can be written into ``folder`` any more."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x" * _PROBE_BYTES)
            probe.flush()
    except OSError as error:
        return [f"{folder}: {os.strerror(error.errno or 0)}"]
    return []


def last_line(path: Path) -> str:
    """The last words of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4096))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    # The last bracket of a document says nothing.
    return next((line.strip()[:300] for line in reversed(lines) if any(map(str.isalpha, line))), "")
