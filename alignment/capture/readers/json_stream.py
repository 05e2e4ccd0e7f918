"""JSON documents larger than memory: one member of an object after the other, with the place where it breaks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from alignment.capture.readers.foreign import require_regular
from alignment.errors import InputError

CHUNK = 1 << 20
LARGEST_MEMBER = 1 << 26
"""Characters of one member. A call of a module with ten thousand tensors takes a hundredth of that."""

_SPACE = re.compile(r"[ \t\r\n]*")


def members(path: Path, *, descend: str | None = None, what: str = "file") -> Iterator[tuple[str | None, str, Any]]:
    """(None, name, value) of every member of the object in the file at ``path``; the member ``descend`` is an object
    that is not loaded as a whole: its members come as (``descend``, name, value).

    Only the member at hand is in memory.

    Raises:
        InputError: the file is missing, truncated or not such JSON, naming the character where it breaks.
    """
    require_regular(path, what)
    try:
        with open(path, encoding="utf-8") as file:
            yield from _Document(path, file, what).members(descend)
    except UnicodeDecodeError as error:
        raise InputError(f"the {what} is not UTF-8 text ({error.reason})", where=path) from None
    except OSError as error:
        raise InputError(f"the {what} cannot be read ({error.strerror})", where=path) from None


def load(path: Path, *, what: str = "file", largest: int = LARGEST_MEMBER) -> Any:
    """The value of a JSON file of at most ``largest`` bytes.

    Raises:
        InputError: as :func:`members`.
    """
    if require_regular(path, what) > largest:
        raise InputError(f"the {what} is too large", where=path, expected=f"at most {largest} bytes")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"the {what} is truncated or not JSON ({error})", where=path) from None
    except UnicodeDecodeError as error:
        raise InputError(f"the {what} is not UTF-8 text ({error.reason})", where=path) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"the {what} cannot be read ({type(error).__name__})", where=path) from None
    except OSError as error:
        raise InputError(f"the {what} cannot be read ({error.strerror})", where=path) from None


class _Document:
    """The text that is still to be parsed, refilled as needed; ``_gone`` characters of it have been dropped."""

    def __init__(self, path: Path, file: TextIO, what: str) -> None:
        self._path, self._file, self._what = path, file, what
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._gone, self._ended = "", 0, 0, False

    def members(self, descend: str | None) -> Iterator[tuple[str | None, str, Any]]:
        self._expect("{")
        if not self._object_ended(first=True):
            while True:
                name = self._name()
                if name == descend and descend is not None:
                    self._expect("{")
                    if not self._object_ended(first=True):
                        while True:
                            inner = self._name()
                            yield descend, inner, self._value()
                            if self._object_ended():
                                break
                else:
                    yield None, name, self._value()
                if self._object_ended():
                    break
        if self._peek():
            raise self._broken("the end of the file")

    def _object_ended(self, *, first: bool = False) -> bool:
        found = self._peek()
        if found == "}":
            self._at += 1
            return True
        if first:
            return False
        if found != ",":
            raise self._broken("',' or '}'")
        self._at += 1
        return False

    def _name(self) -> str:
        if self._peek() != '"':
            raise self._broken("a name")
        name = self._value()
        self._expect(":")
        return name

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # A number that reaches the end of the buffer may go on behind it.
                if end < len(self._text) or self._ended:
                    self._at = end
                    self._drop()
                    return value
            except (ValueError, RecursionError) as error:
                if self._ended or isinstance(error, RecursionError) or len(self._text) - self._at > LARGEST_MEMBER:
                    position = getattr(error, "pos", self._at)
                    reason = getattr(error, "msg", type(error).__name__)
                    raise self._broken("valid JSON", at=position, reason=reason) from None
            self._fill()

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise self._broken(repr(sign))
        self._at += 1

    def _peek(self) -> str:
        """The next character that is no space, without taking it; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def _fill(self) -> None:
        # Doubling what is pending keeps the repeated attempts at one long member linear.
        more = self._file.read(max(CHUNK, len(self._text) - self._at))
        self._ended = not more
        self._text, self._gone, self._at = self._text[self._at :] + more, self._gone + self._at, 0

    def _drop(self) -> None:
        if self._at > CHUNK:
            self._text, self._gone, self._at = self._text[self._at :], self._gone + self._at, 0

    def _broken(self, expected: str, *, at: int | None = None, reason: str = "") -> InputError:
        at = self._at if at is None else at
        found = self._text[at : at + 20]
        return InputError(
            f"the {self._what} is truncated or not the JSON it should be" + (f" ({reason})" if reason else ""),
            where=f"{self._path}, character {self._gone + at}",
            expected=expected,
            found=repr(found) if found else "the end of the file",
        )
