"""Mappings out of people's files, held to the keys they may have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from alignment.errors import InputError


def only_known(data: object, keys: Iterable[str], *, where: object, what: str = "entry") -> Mapping:
    """``data``, if it is a mapping with known keys.

    Raises:
        InputError: it is none, or has another key; the nearest known one is named.
    """
    keys = list(keys)
    if not isinstance(data, Mapping):
        raise InputError(
            f"not a {what}", where=where, expected=f"a mapping with {', '.join(keys)}", found=type(data).__name__
        )
    for key in data:
        if key not in keys:
            raise InputError("unknown key", where=where, expected=nearest(str(key), keys), found=key)
    return data


def nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant, as a question; all that is known where nothing is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"{near[0]}?" if near else ", ".join(known)
