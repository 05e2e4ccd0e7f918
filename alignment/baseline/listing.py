"""What is stored, for people and machines: one row per baseline, and one baseline in full."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from alignment.baseline.provenance import Provenance
from alignment.baseline.store import BaselineFile, BaselineStore, chip_slug
from alignment.errors import InputError
from alignment.files import read_json


def rows(root: Path, *, layer: str | None = None) -> list[dict[str, str]]:
    """One row per case and subject, and per preset of the end-to-end baselines.

    Raises:
        InputError: no such folder, or a damaged file.
    """
    if not root.is_dir():
        raise InputError("there is no such folder", where=root)
    found = []
    for file in BaselineStore(root).files():
        if layer in (None, file.layer):
            found += [_row(file, key) for key in file.entries]
    if layer in (None, "e2e"):
        found += [row for row, _ in _runs(root)]
    return found


def details(root: Path, name: str) -> list[dict]:
    """Everything stored under a case id (all subjects and chips) or a preset, without the tensors.

    Raises:
        InputError: nothing is stored under that name; the nearest one is named.
    """
    found: list[dict] = []
    names: set[str] = set()
    for file in BaselineStore(root).files():
        for entry in file.entries.values():
            names.add(entry.case_id)
            if entry.case_id == name:
                data = {"subject": entry.subject, "case": dict(entry.case), "quantities": dict(entry.quantities)}
                found.append({**data, "file": str(file.path), "provenance": entry.provenance.to_dict()})
    for row, path in _runs(root):
        names.add(row["name"])
        if row["name"] == name or row["name"].rpartition(".")[0] == name:
            data = read_json(path)
            kept = {key: data[key] for key in ("preset", "steps", "envelopes", "provenance") if key in data}
            if "runs" in data:
                kept["runs"] = [{k: run[k] for k in ("seed", "device", "total_steps", "filtered")} for run in data["runs"]]
            found.append({"file": str(path), **kept})
    if not found:
        near = difflib.get_close_matches(name, names, n=1)
        raise InputError(
            "nothing is stored under this name",
            where=root,
            found=name,
            next_step=f"did you mean {near[0]!r}?" if near else "alignment baseline list",
        )
    return found


def _row(file: BaselineFile, key: str) -> dict[str, str]:
    entry = file.entries[key]
    return {
        "kind": file.kind, "chip": chip_slug(file.chip), "layer": file.layer, "name": entry.case_id,
        "subject": entry.subject, **_origin(entry.provenance),
    }  # fmt: skip


def _runs(root: Path) -> Iterator[tuple[dict[str, str], Path]]:
    paths = [*root.glob("*/*/e2e/*.curves.json"), *root.glob("*/*/e2e/*.replay/replay.json")]
    for path in sorted(paths):
        data = read_json(path)
        folder = path.parents[1] if path.name == "replay.json" else path.parent
        row = {
            "kind": folder.parts[-3], "chip": folder.parts[-2], "layer": "e2e",
            "name": f"{data['preset']}.{data['what']}", "subject": "golden",
            **_origin(Provenance.from_dict(data["provenance"])),
        }  # fmt: skip
        yield row, path


def _origin(provenance: Provenance) -> dict[str, str]:
    return {"recorded": provenance.date[:10], "commit": provenance.commit[:12], "stack": provenance.stack}
