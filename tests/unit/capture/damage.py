"""Files damaged at random, and the question whether a reader survives them: by hand of seeds, so any case repeats."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from alignment.errors import InputError

CASES = int(os.environ.get("ALIGNMENT_FUZZ_CASES", "20000"))
"""Mutated files of every reader: what it has to survive before a release."""
UNIT_CASES = range(0, 20_000, 320)
"""Those of them that the unit run takes."""
SECONDS = 20
"""Files of a few kilobytes that take longer are a hang."""

_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_HOSTILE = (
    b"-1", b"0", b"1e400", b"NaN", b"99999999999999999999999", b"null", b"true", b'"x"', b"[]", b"{}", b"1.5", b"[1,2]",
    b'"../../etc/passwd"', b'"/etc/passwd"', b"9007199254740993", b"[" * 3000, b"2147483648", b'"\\ud800"',
)  # fmt: skip


class Hang(BaseException):
    """The reader took too long; no ``except Exception`` of a reader swallows it."""


def survived(
    name: str, clean: Path, read: Callable[[Path], object], cases: Iterable[int], *, fields: bool = False
) -> tuple[int, int]:
    """Damages one file of a copy of ``clean`` after the other and reads the folder: how often it was read and refused.

    Raises:
        AssertionError: a case raised anything but an :class:`InputError` that names a file of the folder (a field is
            enough with ``fields``), or hung.
    """
    work = clean.with_name(clean.name + "-damaged")
    shutil.copytree(clean, work)
    read(work)
    files = sorted(p for p in work.rglob("*") if p.is_file())
    counts = {True: 0, False: 0}

    def too_long(*_):
        raise Hang(f"{SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for case in cases:
            random = np.random.Generator(np.random.Philox(key=case))
            path = files[int(random.integers(0, len(files)))]
            data = path.read_bytes()
            damaged = data
            for _ in range(int(random.integers(1, 4))):
                damaged = mutated(damaged, random)
            path.write_bytes(damaged)
            signal.alarm(SECONDS)
            try:
                read(work)
                counts[True] += 1
            except InputError as error:
                counts[False] += 1
                place = str(error.where)
                named = str(work) in place or (fields and error.where is not None)
                assert named, f"{name}, case {case}: the error names no file: {error}"
            except (Exception, Hang) as error:
                raise AssertionError(f"{name}, case {case}, {path.relative_to(work)}: {error!r}") from error
            finally:
                signal.alarm(0)
                path.write_bytes(data)
        read(work)
    finally:
        signal.signal(signal.SIGALRM, before)
    return counts[True], counts[False]


def mutated(data: bytes, random: np.random.Generator) -> bytes:
    """One damaged version of ``data``."""
    kind = int(random.integers(0, 9))
    size = max(1, len(data))
    at, to = sorted(int(n) for n in random.integers(0, size + 1, 2))
    if kind == 0:  # one bit
        out = bytearray(data or b"\0")
        out[at % len(out)] ^= 1 << int(random.integers(0, 8))
        return bytes(out)
    if kind == 1:  # one byte
        out = bytearray(data or b"\0")
        out[at % len(out)] = int(random.choice([0, 1, 0x7F, 0x80, 0xFF, int(random.integers(0, 256))]))
        return bytes(out)
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + data[to:]
    if kind == 4:
        return data[:at] + random.bytes(int(random.integers(1, 16))) + data[at:]
    if kind == 5:
        return data[:to] + data[at : at + 64] + data[to:]
    if kind == 6:  # a word of eight bytes: a length, an offset, a count
        value = int(random.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63])).to_bytes(8, "little")
        return data[:at] + value + data[at + 8 :]
    numbers = list(_NUMBER.finditer(data))
    if not numbers:
        return data + random.bytes(1)
    if kind == 7:  # a number becomes something else
        match = numbers[int(random.integers(0, len(numbers)))]
        return data[: match.start()] + _HOSTILE[int(random.integers(0, len(_HOSTILE)))] + data[match.end() :]
    words = list(re.finditer(rb'"[^"\n]{1,60}"', data))  # a text becomes something else
    if not words:
        return data[at:]
    match = words[int(random.integers(0, len(words)))]
    return data[: match.start()] + _HOSTILE[int(random.integers(0, len(_HOSTILE)))] + data[match.end() :]
