"""The general checks, one file per topic, and the order they run in."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from alignment.errors import InputError
from alignment.faults.check import LAYERS, Check


@cache
def all_checks() -> tuple[Check, ...]:
    """Every check, the cheapest layer first and in it the cheapest check first.

    Raises:
        InputError: two checks have one name.
    """
    found: dict[str, Check] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        for check in importlib.import_module(f"{__name__}.{module}").CHECKS:
            if check.name in found:
                raise InputError("two checks have one name", where=check.name)
            found[check.name] = check
    return tuple(sorted(found.values(), key=lambda check: (LAYERS.index(check.layer), check.cost, check.name)))
