"""The code of a night: one commit and one set of packages, however often it is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json
from alignment.report.night import TOLD


class OtherCode(InputError):
    """A night is of one commit and of one set of packages: what is resumed with another is left as it is."""


def digest(packages: object) -> str:
    """What tells one set of packages from another."""
    return hashlib.sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest()[:16]


def changed(before: Path, now: Mapping[str, Any]) -> str:
    """Which packages are others than in an earlier provenance, as far as that can be read."""
    with contextlib.suppress(InputError, OSError, KeyError, TypeError, AttributeError):
        old, new = read_json(before)["packages"], now["packages"]
        other = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        more = f" and {len(other) - TOLD} more" if len(other) > TOLD else ""
        told = ", ".join(f"{name} {old.get(name, '(none)')} → {new.get(name, '(none)')}" for name in other[:TOLD])
        return f" ({told}{more})" if other else ""
    return ""
