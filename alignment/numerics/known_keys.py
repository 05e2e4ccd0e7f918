"""Dataclasses out of JSON, held to the fields they have. Imports no torch, so that records can be read without it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields

from alignment.errors import InputError


def known_keys(cls: type, data: Mapping) -> dict:
    """``data`` as keyword arguments of a dataclass.

    Raises:
        InputError: it is no mapping, or has a key the class does not know (the nearest known one is named).
    """
    if not isinstance(data, Mapping):
        raise InputError("not an object", where=cls.__name__, expected="a mapping of fields", found=type(data).__name__)
    names = [field.name for field in fields(cls)]
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            raise InputError(
                "unknown key",
                where=cls.__name__,
                expected=f"one of {', '.join(names)}",
                found=key,
                next_step=f"did you mean {near[0]}?" if near else None,
            )
    return dict(data)
