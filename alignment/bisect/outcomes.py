"""How a bisection can end, with the exit code of each ending: 0, 1 and 2 mean what they mean everywhere, these are 10
and up.
"""

from __future__ import annotations

from enum import IntEnum

from alignment.errors import InputError


class Ending(IntEnum):
    """Exit codes of ``alignment bisect run``. ``docs/bisect.md`` has the table of every command's codes."""

    CULPRIT = 0
    RANGE = 10
    NOT_SEPARABLE = 11
    ABORTED = 12
    ENDS_EQUAL = 13
    END_INFEASIBLE = 14
    UNKNOWN_COMPONENT = 15
    NOTHING_COLLECTED = 16
    GOOD_END_IS_BAD = 17
    BAD_END_IS_GOOD = 18
    END_NOT_MEASURED = 19


class BisectError(InputError):
    """A bisection that cannot begin or go on, with the exit code that says why."""

    def __init__(self, problem: str, *, ending: Ending, **rest) -> None:
        super().__init__(problem, **rest)
        self.ending = ending

    def __reduce__(self):
        return _rebuild, (self.problem, self.ending, self.where, self.expected, self.found, self.next_step)


def _rebuild(problem, ending, where, expected, found, next_step):
    return BisectError(problem, ending=ending, where=where, expected=expected, found=found, next_step=next_step)
