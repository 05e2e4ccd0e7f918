"""Which versions go together: the ecosystem's public matrices as data with sources, extendable by the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.bisect.components import Component, find_component
from alignment.bisect.keys import only_known
from alignment.bisect.outcomes import BisectError, Ending
from alignment.bisect.stack import Stack, read_mapping
from alignment.bisect.versions import check_requirement, satisfies
from alignment.errors import InputError

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parent / "data" / "constraints"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Where a stack meets all of ``when``, it has to meet all of ``require``; both map components to requirements.

    A ``strict`` rule broken by an end of the range makes that end infeasible. Another is a recommendation: an end that
    breaks it is taken as proof that the recommendation does not bind here. Components that a stack does not name, and
    git revisions whose version is not stated, are not judged.
    """

    id: str
    when: Mapping[str, str]
    require: Mapping[str, str]
    source: str
    strict: bool = True

    def broken_by(self, stack: Stack) -> tuple[str, str] | None:
        """The component that breaks the rule and what was required of it, or None."""
        for name, requirement in self.when.items():
            version = _version(stack, name)
            if version is None or not satisfies(version, requirement):
                return None
        for name, requirement in self.require.items():
            version = _version(stack, name)
            if version is not None and not satisfies(version, requirement):
                return name, requirement
        return None


def _version(stack: Stack, name: str) -> str | None:
    pin = stack.pins.get(name)
    return pin.version or None if pin else None


@dataclass(frozen=True)
class Constraints:
    """All rules that bind a search."""

    rules: tuple[Rule, ...] = ()

    def violation(self, stack: Stack) -> str | None:
        """Why a stack is infeasible, in one sentence; None when it is feasible."""
        for rule in self.rules:
            broken = rule.broken_by(stack)
            if broken:
                name, requirement = broken
                condition = ", ".join(f"{n} {stack.pins[n].version}" for n in rule.when)
                found = f"{name} {stack.pins[name].version}"
                return f"{condition} goes with {name} {requirement}, not with {found} ({rule.id}, {rule.source})"
        return None

    def for_ends(self, ends: Iterable[Stack]) -> tuple[Constraints, list[str]]:
        """The rules that bind between these ends, and a note for each recommendation that an end does without.

        Raises:
            BisectError: an end breaks a strict rule.
        """
        ends = list(ends)
        strict = Constraints(tuple(r for r in self.rules if r.strict))
        for end in ends:
            reason = strict.violation(end)
            if reason:
                raise BisectError(
                    "an end of the range cannot exist: its versions do not go together",
                    ending=Ending.END_INFEASIBLE,
                    where=str(end),
                    found=reason,
                    next_step="correct the stack file, or take the rule out with --constraints none",
                )
        kept, notes = [], []
        for rule in self.rules:
            breaker = next((end for end in ends if rule.broken_by(end)), None)
            if breaker is None:
                kept.append(rule)
            else:
                notes.append(f"{breaker} does without the recommendation {rule.id}, which therefore does not bind here")
        return Constraints(tuple(kept)), notes


def load_constraints(sources: Sequence[str] = ("shipped",), *, defined: Mapping[str, Component] = {}) -> Constraints:
    """Rules from the named files in turn: ``shipped`` is all of the product's own, ``none`` drops what came before."""
    rules: list[Rule] = []
    for source in sources:
        if source == "none":
            rules = []
        elif source == "shipped":
            for path in sorted(SHIPPED.glob("*.yaml")):
                rules += read_rules(path)
        else:
            rules += read_rules(Path(source), defined=defined)
    return Constraints(tuple(rules))


def read_rules(path: Path, *, defined: Mapping[str, Component] = {}) -> list[Rule]:
    """The rules of one file.

    ``rules`` are written out; ``matrix`` is a table: the first column is the condition (that version exactly), each
    other column a requirement.

    Raises:
        InputError: the schema does not hold or a rule has no source.
        BisectError: a component nobody knows.
    """
    data = read_mapping(path)
    only_known(data, ("schema", "name", "source", "notes", "rules", "matrix"), where=path, what="file of constraints")
    if data.get("schema") != SCHEMA:
        raise InputError(
            "constraints of another schema", where=path, expected=f"schema: {SCHEMA}", found=data.get("schema")
        )
    shared = str(data.get("source") or "")
    name = str(data.get("name") or path.stem)
    rules = []
    for index, entry in enumerate(data.get("rules") or ()):
        where = f"{path}: rule {index + 1}"
        only_known(entry, ("id", "when", "require", "source", "strict"), where=where, what="rule")
        rules.append(
            _rule(
                entry,
                id=str(entry.get("id") or f"{name}-{index + 1}"),
                source=str(entry.get("source") or shared),
                where=where,
                defined=defined,
            )
        )
    for table in data.get("matrix") or ():
        rules += _table(table, name, shared, path, defined)
    return rules


def _table(table: Any, name: str, shared: str, path: Path, defined: Mapping[str, Component]) -> list[Rule]:
    only_known(table, ("columns", "rows", "strict", "source"), where=path, what="matrix")
    columns = table.get("columns") or ()
    if len(columns) < 2:
        raise InputError("a matrix has a condition and at least one requirement", where=path, found=columns)
    rules = []
    for row in table.get("rows") or ():
        where = f"{path}: {row}"
        if not isinstance(row, list) or len(row) != len(columns) or not all(isinstance(v, str) for v in row):
            raise InputError(
                "a row has another length than its columns, or an unquoted number", where=where, expected=columns
            )
        require = {column: value for column, value in zip(columns[1:], row[1:]) if value}
        entry = {"when": {columns[0]: row[0] if row[0][0] in "=<>!~*" else f"=={row[0]}"}, "require": require}
        entry["strict"] = table.get("strict", True)
        source = str(table.get("source") or shared)
        rules.append(_rule(entry, id=f"{name}: {columns[0]} {row[0]}", source=source, where=where, defined=defined))
    return rules


def _rule(entry: Mapping, *, id: str, source: str, where: object, defined: Mapping[str, Component]) -> Rule:
    sides = {}
    for side in ("when", "require"):
        part = entry.get(side)
        if not isinstance(part, Mapping) or not part:
            raise InputError(f"a rule without `{side}`", where=where, expected="component: requirement", found=part)
        sides[side] = {
            find_component(str(n), defined, where=where).name: check_requirement(str(r), f"{where}: {n}")
            for n, r in part.items()
        }
    if not source:
        raise InputError("a rule without a source", where=where, expected="source: where this is said")
    return Rule(id=id, source=source, strict=bool(entry.get("strict", True)), **sides)
