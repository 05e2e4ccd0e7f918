"""What this machine is and has, asked in a process of its own: looking at a device may hang or end whoever looks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from alignment.errors import InputError
from alignment.files import write_json
from alignment.report.run_directory import PROVENANCE, write_stack


def write_provenance(folder: Path, stack: Path | None) -> None:
    """Writes ``provenance.json`` and ``stack.yaml`` of what is installed here.

    Raises:
        InputError: ``stack`` pins what is not installed here, or in another version.
    """
    from alignment.baseline.provenance import provenance_of
    from alignment.devices.base import get_device

    write_json(folder / PROVENANCE, provenance_of(get_device("auto")).to_dict())
    write_stack(folder)
    if stack is not None:
        _hold_to(stack)


def _hold_to(wanted: Path) -> None:
    from alignment.bisect.freeze import differences_here
    from alignment.bisect.stack import load_stack

    other = differences_here(load_stack(wanted))
    if other:
        raise InputError("the stack here is not the one of the row", where=wanted, found="; ".join(other))


def missing_devices(kinds: Sequence[str]) -> dict[str, str]:
    """Those of ``kinds`` that are not here, with the reason."""
    from alignment.devices.base import availability
    from alignment.devices.emulated_npu import install_if_requested

    install_if_requested()
    return {kind: found.reason for kind in kinds if not (found := availability(kind)).available}


def main(arguments: Sequence[str]) -> int:
    """``provenance FOLDER [STACK]`` or ``devices KIND…`` (prints what is missing as JSON)."""
    what, *rest = arguments
    try:
        if what == "provenance":
            write_provenance(Path(rest[0]), Path(rest[1]) if len(rest) > 1 else None)
        else:
            print(json.dumps(missing_devices(rest)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
