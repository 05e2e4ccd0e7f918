"""Chains of feasible stacks between two stacks: the line a search walks on, even where pins move in groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from alignment.bisect.components import rank
from alignment.bisect.stack import Pin, Stack

Feasible = Callable[[Stack], bool]
# Steps that move several components at once are looked for up to this many combinations; beyond, the step takes all
# that is left, which is always feasible. Far above what ten packages with grouped pins need.
COMBINATIONS = 4096


def chain_between(
    low: Stack,
    high: Stack,
    paths: Mapping[str, Sequence[Pin | None]],
    feasible: Feasible,
    *,
    without: Collection[str] = (),
) -> list[Stack]:
    """Stacks from ``low`` to ``high``, each a smallest feasible step from the one before.

    ``paths`` gives for every component that changes its pins after that of ``low``, ending with that of ``high``. A
    step advances one component by one pin where that is feasible, else the smallest set of components and distances
    that is. Older changes go first (by the dates of pins where both have one), then what lies lower in the stack.
    ``without`` are digests of stacks that may not be used. The ends are taken as feasible, so the chain always
    exists, in the worst case as ``[low, high]``.
    """
    names = sorted(paths, key=lambda n: (_first_date(paths[n]), rank(n)))
    position = dict.fromkeys(names, 0)
    chain, current = [low], low
    while any(position[n] < len(paths[n]) for n in names):
        move = _smallest_move(current, names, paths, position, feasible, without)
        if move is None:
            return [*chain, high]
        for name, distance in move.items():
            position[name] += distance
        if all(position[n] == len(paths[n]) for n in names):
            return [*chain, high]
        current = current.with_pins({name: paths[name][position[name] - 1] for name in move})
        chain.append(current)
    return [*chain, high] if chain[-1] is not high else chain


def _first_date(path: Sequence[Pin | None]) -> str:
    # Without a date a change sorts after the dated ones; the order then is that of the stack.
    return (path[0].date if path and path[0] is not None else "") or "9999"


def _smallest_move(current, names, paths, position, feasible, without) -> dict[str, int] | None:
    left = [n for n in names if position[n] < len(paths[n])]
    tried = 0
    for count in range(1, len(left) + 1):
        for group in itertools.combinations(left, count):
            for distances in _distances([len(paths[n]) - position[n] for n in group]):
                tried += 1
                if tried > COMBINATIONS:
                    return None
                move = dict(zip(group, distances))
                candidate = current.with_pins({n: paths[n][position[n] + d - 1] for n, d in move.items()})
                if all(position[n] + move.get(n, 0) == len(paths[n]) for n in names):
                    return move
                if candidate.digest not in without and feasible(candidate):
                    return move
    return None


def _distances(limits: list[int]):
    """Distances of a joint move, short ones first."""
    if len(limits) == 1:
        yield from ((d,) for d in range(1, limits[0] + 1))
        return
    yield from sorted(itertools.product(*(range(1, min(limit, 16) + 1) for limit in limits)), key=sum)
