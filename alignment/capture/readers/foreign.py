"""Files of unknown origin: nothing outside their folder is opened, nothing in them runs, damage is one clear error."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from alignment.errors import InputError

DEEPEST, MOST_FILES = 8, 1_000_000


@contextlib.contextmanager
def reading(where: object, what: str) -> Iterator[None]:
    """Turns whatever a damaged file makes a parser raise into one error that names ``where``.

    Parsers of foreign formats raise a dozen kinds of exceptions on damaged input (``struct.error``, ``OverflowError``,
    ``RecursionError`` …); none of them is of use to whoever reads the message.

    Raises:
        InputError: in place of any exception but interrupts.
    """
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"the {what} does not exist", where=where) from None
    except MemoryError:
        raise InputError(f"the {what} claims more memory than there is", where=where) from None
    except RecursionError:
        raise InputError(f"the {what} is nested too deeply", where=where) from None
    except Exception as error:
        text = str(error).splitlines()[0][:200] if str(error) else ""
        raise InputError(
            f"the {what} is damaged or of another format ({type(error).__name__}{': ' if text else ''}{text})",
            where=where,
        ) from None


def require_regular(path: Path, what: str) -> int:
    """Size of the regular file at ``path`` in bytes; a pipe or a device could be read forever.

    Raises:
        InputError: it is missing or not a regular file.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error})"
        raise InputError(f"the {what} {reason}", where=path) from None
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"the {what} is not a regular file", where=path)
    return found.st_size


def inside(root: Path, name: object, *, where: object) -> Path:
    """The file that a dump calls ``name`` below its own folder ``root``.

    Raises:
        InputError: the name is none, or leads outside the folder, by ``..``, as an absolute path or over a link.
    """
    path = named_inside(root, name, where=where)
    try:
        outside = not path.resolve().is_relative_to(Path(root).resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"the file name cannot be resolved ({error})", where=where, found=str(name)[:80]) from None
    if outside:
        raise _outside(root, name, where)
    return path


def named_inside(root: Path, name: object, *, where: object) -> Path:
    """:func:`inside` by the name alone, without a look at the disk, where links would show."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError("a file name is expected", where=where, found=repr(name)[:80])
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        raise _outside(root, name, where)
    return Path(root) / name


def _outside(root: Path, name: object, where: object) -> InputError:
    return InputError(
        "a file name leads outside the folder of the capture",
        where=where,
        expected=f"below {root}",
        found=str(name)[:200],
    )


def numbered(root: Path, prefix: str) -> dict[int, Path]:
    """Folders ``<prefix><number>`` in ``root`` by their number, in order; links are not followed out of it."""
    found: dict[int, Path] = {}
    for entry in _entries(root):
        number = entry.name[len(prefix) :]
        if entry.name.startswith(prefix) and number.isascii() and number.isdigit() and len(number) < 10:
            if entry.is_dir() and entry.resolve().is_relative_to(root.resolve()):
                found[int(number)] = entry
    return dict(sorted(found.items()))


def files_below(root: Path, *, deepest: int = DEEPEST) -> Iterator[Path]:
    """Regular files in ``root`` and its folders, ``deepest`` levels down, in order; links are not followed.

    Raises:
        InputError: more than any capture has.
    """
    root, found = Path(root), 0
    for folder, below, names in os.walk(root):
        below.sort()
        if len(Path(folder).relative_to(root).parts) >= deepest:
            below.clear()
        for name in sorted(names):
            path = Path(folder, name)
            if not path.is_symlink() and path.is_file():
                found += 1
                if found > MOST_FILES:
                    raise InputError("more files than are read", where=root, expected=f"at most {MOST_FILES}")
                yield path


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except OSError as error:
        raise InputError(f"the folder cannot be listed ({error.strerror})", where=root) from None
