"""What this machine can judge: devices and implementations, each with the reason where it is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def examine() -> dict:
    """Devices with their fingerprints and, per device, the subjects of each test layer; JSON-ready."""
    from alignment.backends.subject import SUBJECTS
    from alignment.devices.base import discover, get_device

    devices, subjects = [], []
    for found in discover():
        row = {"kind": found.kind, "available": found.available, "reason": found.reason, "count": found.count}
        if found.available:
            device = get_device(found.kind)
            row |= {"label": device.label, "fingerprint": device.fingerprint().to_dict()}
            for entry in SUBJECTS:
                if device.kind in entry.kinds:
                    answer = entry.load().available(device)
                    subjects.append(
                        {"device": device.label, "layer": entry.layer, "subject": entry.name,
                         "available": answer.available, "reason": answer.reason}
                    )  # fmt: skip
        devices.append(row)
    return {"devices": devices, "subjects": subjects}


def print_examination(console: Console, found: dict) -> None:
    """Two short tables."""
    from rich.markup import escape
    from rich.table import Table

    devices = Table("device", "here", "chip", "why", box=None, pad_edge=False, header_style="bold")
    for row in found["devices"]:
        chip = row.get("fingerprint", {}).get("chip", "")
        devices.add_row(row.get("label", row["kind"]), _yes(row["available"]), escape(str(chip)), escape(row["reason"]))
    subjects = Table("device", "layer", "subject", "here", "why", box=None, pad_edge=False, header_style="bold")
    for row in found["subjects"]:
        subjects.add_row(row["device"], row["layer"], row["subject"], _yes(row["available"]), escape(row["reason"]))
    console.print(devices)
    console.print()
    console.print(subjects)


def _yes(available: bool) -> str:
    return "[green]yes[/]" if available else "[yellow]no[/]"
