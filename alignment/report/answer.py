"""What a command answered, as JSON that a page is made of: beside a run, or by itself.

Another tool may have written the file, or another release of this one: every field a page shows is looked at first, and
a file of another shape is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.errors import InputError

NUMBER = (int, float)


def mapping(found: Any, source: Path | str, fields: Mapping[str, Any], command: str) -> dict[str, Any]:
    """``found`` as a mapping that has ``fields``, each of its kind; one that may be None may be missing.

    Raises:
        InputError: it is none, or a field is missing or of another kind.
    """
    if not isinstance(found, Mapping):
        raise other_shape(source, f"a mapping with {', '.join(fields)}", command)
    wrong = [name for name, kind in fields.items() if not isinstance(found.get(name), kind)]
    if wrong:
        raise other_shape(source, ", ".join(wrong), command)
    return {**dict.fromkeys(fields), **found}


def rows(found: Any, source: Path | str, fields: Mapping[str, Any], command: str) -> list[dict[str, Any]]:
    """``found`` as a list of mappings that have ``fields``.

    Raises:
        InputError: it is none, or a field of a row is missing or of another kind.
    """
    if not isinstance(found, list):
        raise other_shape(source, f"a list of rows with {', '.join(fields)}", command)
    for row in found:
        wrong = [
            name for name, kind in fields.items() if not isinstance(row, Mapping) or not isinstance(row.get(name), kind)
        ]
        if wrong:
            raise other_shape(source, f"{', '.join(wrong)} in every row", command)
    return [{**dict.fromkeys(fields), **row} for row in found]


def named(found: Any, *names: str) -> bool:
    """Whether ``found`` is a mapping with a text under each of these names."""
    return isinstance(found, Mapping) and all(isinstance(found.get(name), str) for name in names)


def number(found: Any) -> float | None:
    """A finite number, or None: JSON has no other, and ``finite`` of the run directory spells those as text."""
    known = isinstance(found, NUMBER) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if known else None


def listed(found: Any, source: Path | str, kind: Any, what: str, command: str) -> list[Any]:
    """``found`` as a list of ``kind``.

    Raises:
        InputError: it is none, or an item is of another kind; ``what`` was expected.
    """
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        raise other_shape(source, what, command)
    return found


def shown(found: Any, digits: str = ".4g") -> str:
    """A number for people; what is none is said as it was spelled."""
    if found is None:
        return "not measured"
    value = number(found)
    return str(found) if value is None else f"{value:{digits}}"


def trail(stage: str, module: str, quantity: str) -> list[str]:
    """Stage, every step of the module's path, and the quantity unless it is the module's own output, named after it."""
    own = not quantity or f".{module}".endswith(f".{quantity}")
    return [stage, *filter(None, module.split(".")), *([] if own else [quantity])]


def other_shape(source: Path | str, expected: str, command: str) -> InputError:
    """A file that ``alignment command`` did not write, or not this release's."""
    return InputError(
        f"not what alignment {command} writes",
        where=source,
        expected=expected,
        next_step="write it again, or move it out of the directory of the run",
    )
