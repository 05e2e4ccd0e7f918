"""The faults that come with the suite, one file per category, and those that other packages add.

A package adds faults under the entry-point group ``alignment.faults``: each entry point is a
:class:`~alignment.faults.fault.Fault` or an iterable of them.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec

from alignment.errors import InputError
from alignment.faults.fault import Fault

GROUP = "alignment.faults"
CATEGORIES = (
    "attention",
    "moe",
    "dtype",
    "weight_sync",
    "sampler",
    "loss",
    "parallel",
    "checkpoint",
    "data",
    "distill",
    "benign",
)


@cache
def all_faults() -> tuple[Fault, ...]:
    """Every fault, benign differences last.

    Raises:
        InputError: two faults have one id, or an entry point is no fault.
    """
    found: dict[str, Fault] = {}
    for fault in (*_own(), *_from_entry_points()):
        if fault.id in found:
            raise InputError("two faults have one id", where=fault.id)
        found[fault.id] = fault
    return tuple(sorted(found.values(), key=lambda fault: fault.benign))


def find_faults(ids: Iterable[str]) -> tuple[Fault, ...]:
    """The faults of these ids, in their order.

    Raises:
        InputError: an unknown id; the nearest known one is named.
    """
    known = {fault.id: fault for fault in all_faults()}
    chosen = []
    for one in ids:
        if one not in known:
            near = difflib.get_close_matches(one, known, n=1)
            raise InputError(
                "there is no such fault",
                where="--fault",
                expected="an id of the catalogue (alignment audit --list), or path.py:object",
                found=one,
                next_step=f"did you mean {near[0]}?" if near else None,
            )
        chosen.append(known[one])
    return tuple(chosen)


def _own() -> Iterable[Fault]:
    for category in CATEGORIES:
        name = f"{__name__}.{category}"
        if find_spec(name):
            yield from importlib.import_module(name).FAULTS


def _from_entry_points() -> Iterable[Fault]:
    for point in entry_points(group=GROUP):
        loaded = point.load()
        for fault in [loaded] if isinstance(loaded, Fault) else list(loaded):
            if not isinstance(fault, Fault):
                raise InputError(
                    "an entry point is no fault", where=f"{GROUP}: {point.name}", found=type(fault).__name__
                )
            yield fault
