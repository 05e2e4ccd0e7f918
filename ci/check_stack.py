"""Fails when what is installed here is not what a stack file says: ``python ci/check_stack.py STACK``.

The last step of every container recipe, so that no image is made whose versions are others than those of its name.
Facts of the machine that runs the image later (driver, firmware) are left out; of CANN, what its information file says
counts.
"""

from __future__ import annotations

import sys

from alignment.bisect.freeze import freeze_stack
from alignment.bisect.stack import Stack, load_stack
from alignment.bisect.versions import same

OF_THE_NODE = ("driver", "firmware")


def differences(wanted: Stack, found: Stack) -> list[str]:
    """One line per component that is missing or of another version, from the ground up.

    Of Python the line is enough (3.11 is what images are tagged with); of a git pin the revision counts, or the version
    where the installation does not know its revision.
    """
    lines = []
    for name, pin in wanted.pins.items():
        if name in OF_THE_NODE:
            continue
        here = found.pins.get(name)
        if here is None:
            lines.append(f"{name}: {pin} is not installed")
        elif pin.kind == "git" and here.kind == "git":
            if not here.revision.startswith(pin.revision):
                lines.append(f"{name}: expected {pin.revision}, found {here.revision}")
        elif pin.version and not _same(name, here.version, pin.version):
            lines.append(f"{name}: expected {pin.version}, found {here.version}")
    return lines


def _same(name: str, found: str, wanted: str) -> bool:
    return same(found, wanted) or (name == "python" and found.startswith(f"{wanted}."))


def main(arguments: list[str]) -> int:
    wanted = load_stack(arguments[0])
    wrong = differences(wanted, freeze_stack(name="here").stack)
    for line in wrong:
        print(f"{arguments[0]}: {line}", file=sys.stderr)
    if not wrong:
        print(f"{len(wanted.pins)} components are what {arguments[0]} says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
