"""Fails when what is installed here is not what a stack file says: ``python ci/check_stack.py STACK``.

The last step of every container recipe, so that no image is made whose versions are others than those of its name.
"""

from __future__ import annotations

import sys

from alignment.bisect.freeze import differences_here
from alignment.bisect.stack import load_stack


def main(arguments: list[str]) -> int:
    wanted = load_stack(arguments[0])
    wrong = differences_here(wanted)
    for line in wrong:
        print(f"{arguments[0]}: {line}", file=sys.stderr)
    if not wrong:
        print(f"{len(wanted.pins)} components are what {arguments[0]} says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
