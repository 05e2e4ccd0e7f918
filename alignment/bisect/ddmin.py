"""The smallest set of changes that is bad together (Zeller and Hildebrandt, 2002: delta debugging)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def ddmin(changes: Sequence[T], test: Callable[[tuple[T, ...]], bool | None]) -> tuple[T, ...]:
    """A subset of ``changes`` of which no single one can be left out.

    ``test`` says whether a subset is bad (None where it cannot be told, which counts as not bad). The whole of
    ``changes`` is taken as bad and the empty set as good. Answers are asked for once each.
    """
    known: dict[frozenset[int], bool] = {}

    def bad(indices: list[int]) -> bool:
        key = frozenset(indices)
        if key not in known:
            known[key] = test(tuple(changes[i] for i in sorted(indices))) is True
        return known[key]

    left, parts = list(range(len(changes))), 2
    while len(left) >= 2:
        size = -(-len(left) // parts)
        chunks = [left[i : i + size] for i in range(0, len(left), size)]
        smaller = next((c for c in chunks if bad(c)), None)
        if smaller is not None:
            left, parts = smaller, 2
            continue
        without = (
            next((rest for c in chunks if (rest := [i for i in left if i not in c]) and bad(rest)), None)
            if len(chunks) > 2
            else None
        )
        if without is not None:
            left, parts = without, max(parts - 1, 2)
            continue
        if parts >= len(left):
            break
        parts = min(len(left), parts * 2)
    return tuple(changes[i] for i in sorted(left))
