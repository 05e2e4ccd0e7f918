"""Versions known to compute wrongly, each with the sign it shows, the repair and the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from alignment.bisect.components import find_component
from alignment.bisect.keys import only_known
from alignment.bisect.stack import Pin, Stack, read_mapping
from alignment.bisect.versions import check_requirement, satisfies
from alignment.errors import InputError

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parent / "data" / "known_bad.yaml"
_KEYS = ("id", "affects", "title", "symptom", "repair", "source", "checks", "fault", "repaired_by", "broken_by")


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """One defect of published versions.

    ``affects`` maps components to the versions that have it (all have to match). ``checks`` are the checks of this
    suite that show it, ``fault`` its name in the catalogue of defects, ``repaired_by`` and ``broken_by`` commits by
    component.
    """

    id: str
    affects: Mapping[str, str]
    title: str
    symptom: str
    repair: str
    source: str
    checks: tuple[str, ...] = ()
    fault: str = ""
    repaired_by: Mapping[str, str] = ()  # type: ignore[assignment]
    broken_by: Mapping[str, str] = ()  # type: ignore[assignment]

    def matches(self, stack: Stack) -> bool:
        """True when the stack names every component of ``affects`` in an affected version.

        A git pin is judged by the version it states; one that states none is not known to be bad.
        """
        return all(_affected(stack.pins.get(name), requirement) for name, requirement in self.affects.items())


def _affected(pin: Pin | None, requirement: str) -> bool:
    return pin is not None and bool(pin.version) and satisfies(pin.version, requirement)


def load_known_bad(path: Path = SHIPPED) -> list[KnownBad]:
    """Every entry of a file of known-bad versions.

    Raises:
        InputError: the schema does not hold, an entry has no source, or a component nobody knows.
    """
    data = read_mapping(path)
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else data
        raise InputError("known-bad versions of another schema", where=path, expected=f"schema: {SCHEMA}", found=found)
    entries, seen = [], set()
    for index, row in enumerate(data.get("entries") or ()):
        where = f"{path}: entry {index + 1}"
        only_known(row, _KEYS, where=where)
        missing = [f.name for f in fields(KnownBad) if f.name in _KEYS[:6] and not row.get(f.name)]
        if missing:
            raise InputError(
                "an entry is incomplete", where=where, expected=", ".join(_KEYS[:6]), found=f"no {', '.join(missing)}"
            )
        if row["id"] in seen:
            raise InputError("an id is used twice", where=where, found=row["id"])
        seen.add(row["id"])
        affects = {
            find_component(str(n), where=where).name: check_requirement(str(r), f"{where}: {n}")
            for n, r in row["affects"].items()
        }
        entries.append(
            KnownBad(
                **{**row, "affects": affects, "checks": tuple(row.get("checks") or ())},
            )
        )
    return entries


def known_bad_of(stack: Stack, entries: list[KnownBad] | None = None) -> list[KnownBad]:
    """The known defects that a stack has by its versions."""
    return [entry for entry in (load_known_bad() if entries is None else entries) if entry.matches(stack)]
