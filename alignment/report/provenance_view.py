"""Both sides of a comparison: what made the run, and what made the stored baselines its verdicts name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json
from alignment.numerics.verdict import Verdict

FACTS = ("label", "chip", "driver", "runtime")
STACK_PACKAGES = (
    "npu-alignment", "torch", "torch-npu", "transformers", "vllm", "vllm-ascend", "megatron-core", "mindspeed", "verl",
    "ray",
)  # fmt: skip
"""Always shown where one side has them; another package is shown where the sides differ in it."""

NOT_STORED = "not stored"
_TITLE = re.compile(r"(?P<name>.+?), recorded (?P<day>\S+) at (?P<commit>\S+) with ")


def both_sides(verdicts: Iterable[Verdict], run: Mapping[str, Any] | None, root: Path | None) -> dict[str, Any] | None:
    """The run beside the baselines that ``verdicts`` name, as rows of text; None where there is neither.

    Baselines of one origin (all but the date and what was hashed) are one column, those of most checks first.

    Args:
        verdicts: of the run.
        run: its provenance, None where it has none.
        root: folder of the stored baselines, None where there is none.
    """
    named = Counter(v.baseline for v in verdicts if v.baseline)
    if not named and run is None:
        return None
    read: dict[Path, Any] = {}
    origins: dict[str, list[tuple[Mapping[str, Any], int]]] = {}
    missing: list[tuple[str, str]] = []
    for title, checks in sorted(named.items()):
        try:
            found = _stored(title, root, read)
        except (InputError, KeyError, TypeError, AttributeError, OSError) as error:
            missing.append((title, str(error) if isinstance(error, InputError) else "not a baseline of this schema"))
            continue
        same = {key: value for key, value in found.items() if key not in ("date", "hashes")}
        origin = json.dumps(same, sort_keys=True)
        origins.setdefault(origin, []).append((found, checks))
    columns = sorted(origins.values(), key=lambda group: -sum(checks for _, checks in group))
    sides = [_facts([run] if run is not None else [])] + [_facts([found for found, _ in group]) for group in columns]
    counts = [sum(checks for _, checks in group) for group in columns]
    headings = ["this run", *(f"baselines of {n} check{'s' if n > 1 else ''}" for n in counts)]
    shown, more, same = _rows(sides)
    return {"columns": headings, "rows": shown, "more": more, "same": same, "missing": missing}


def _stored(title: str, root: Path | None, read: dict[Path, Any]) -> Mapping[str, Any]:
    """The provenance of the baseline that a verdict calls ``title``."""
    told = _TITLE.match(title)
    if told is None:
        raise InputError("not the name of a stored baseline")
    if root is None or not root.is_dir():
        raise InputError("the folder of the stored baselines is not here")
    parts = told["name"].split("/")
    if len(parts) < 4 or {"", ".", ".."} & set(parts):
        raise InputError("not the name of a stored baseline")
    kind, chip, layer, *rest = parts
    found = None
    if layer == "e2e":
        path = root / told["name"]
        found = _read(path / "replay.json" if path.is_dir() else path, read)["provenance"]
    else:
        for path in sorted((root / kind / chip / layer).glob("*.json")):
            data = _read(path, read)
            if "/".join(rest) in data["entries"]:
                found = data["provenance"][data["entries"]["/".join(rest)]["provenance"]]
    if found is None:
        raise InputError("it is not among the stored baselines")
    if (found["date"][:10], found["commit"][:12]) != (told["day"], told["commit"]):
        raise InputError(f"it was recorded again since, {found['date'][:10]} at {found['commit'][:12]}")
    return found


def _read(path: Path, read: dict[Path, Any]) -> Any:
    if path not in read:
        read[path] = read_json(path)
    return read[path]


def _facts(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """One side by section: facts, switches, packages; empty where nothing is stored."""
    if not found:
        return {}
    first = found[0]
    days = sorted(str(provenance["date"])[:10] for provenance in found if "date" in provenance)
    fingerprint, switches, packages = (
        {str(key): str(value) for key, value in part.items()} if isinstance(part, Mapping) else {}
        for part in (first.get("fingerprint"), first.get("determinism"), first.get("packages"))
    )
    facts = {name: fingerprint[name] for name in FACTS if name in fingerprint}
    facts |= {name: str(first[name]) for name in ("python", "platform") if name in first}
    if "commit" in first:
        commit, dirty, _ = str(first["commit"]).partition("-dirty")
        facts["commit"] = commit[:12] + dirty
    if days:
        facts["date"] = days[0] if days[0] == days[-1] else f"{days[0]} … {days[-1]}"
    return {"facts": facts, "switches": switches, "packages": packages}


def _rows(sides: Sequence[Mapping[str, Mapping[str, str]]]) -> tuple[list[dict], list[dict], int]:
    """The rows that are always shown, those where the sides differ, and how many packages and switches are the same."""

    def row(section: str, name: str) -> dict[str, Any]:
        stored = [side.get(section) or {} for side in sides]
        # Who stores its packages or switches has none of another; a fact that is absent is not known.
        values = [part.get(name, "none" if part and section != "facts" else NOT_STORED) for part in stored]
        known = set(values) - {NOT_STORED}
        return {"name": name, "values": values, "differs": name != "date" and len(known) > 1}

    sections = ("switches", "packages")
    names = {section: sorted({n for side in sides for n in side.get(section, ())}) for section in sections}
    shown = [row("facts", name) for name in (*FACTS, "python", "platform", "date", "commit")]
    shown += [row("packages", name) for name in STACK_PACKAGES if name in names["packages"]]
    others = [row("switches", name) for name in names["switches"]]
    others += [row("packages", name) for name in names["packages"] if name not in STACK_PACKAGES]
    more = [each for each in others if each["differs"]]
    return shown, more, len(others) - len(more)
