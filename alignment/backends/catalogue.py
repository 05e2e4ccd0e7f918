"""Every case there is, by test layer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from alignment.backends.case import Case
from alignment.errors import InputError


def cases(layer: str | None = None) -> tuple[Case, ...]:
    """The cases of a test layer (``unit``, ``layer``), or all of them."""
    from alignment.backends.layers import layer_cases
    from alignment.backends.operators import operator_cases

    by_layer = {"unit": operator_cases, "layer": layer_cases}
    return tuple(case for name, make in by_layer.items() if layer in (None, name) for case in make())


def find_cases(patterns: Iterable[str], layer: str | None = None) -> tuple[Case, ...]:
    """The cases whose id is, or begins with, one of ``patterns``; all of them without any.

    Raises:
        InputError: a pattern that fits no case; the nearest id is named.
    """
    known, patterns = cases(layer), tuple(patterns)
    for pattern in patterns:
        if not any(case.id.startswith(pattern) for case in known):
            near = difflib.get_close_matches(pattern, [case.id for case in known], n=1, cutoff=0.3)
            raise InputError(
                f"no case is called {pattern!r}",
                where="--case",
                expected="the beginning of a case id",
                next_step=f"did you mean {near[0]!r}?" if near else "alignment baseline list",
            )
    return tuple(case for case in known if not patterns or any(case.id.startswith(p) for p in patterns))
