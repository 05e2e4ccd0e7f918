"""A stack: every component pinned to a release, a revision or a fact, with the image and the date it belongs to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from alignment.bisect.components import Component, define_components, find_component, rank
from alignment.bisect.keys import only_known
from alignment.errors import InputError
from alignment.files import parse_yaml, read_text, write_atomically

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parent / "data" / "stacks"
_KEYS = ("schema", "name", "date", "image", "notes", "define", "components", "places")
_PIN_KEYS = ("release", "git", "revision", "version", "fact", "date")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """What one component is pinned to.

    ``release``: ``version`` is installed from a package index. ``git``: ``revision`` of ``repository`` (the component's
    own where empty); ``version`` then is what that revision calls itself, where known. ``fact``: ``version`` of
    something that is there and that nobody here installs. ``date`` orders changes in time (ISO, may be empty).
    """

    kind: Literal["release", "git", "fact"]
    version: str = ""
    revision: str = ""
    repository: str = ""
    date: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        """What makes two pins the same."""
        return (self.kind, self.revision if self.kind == "git" else self.version)

    def __str__(self) -> str:
        if self.kind != "git":
            return self.version
        return f"{self.version}@{self.revision[:12]}" if self.version else self.revision[:12]

    def to_data(self) -> Any:
        """The shortest form a stack file may hold."""
        if self.kind == "git":
            data = {
                "git": self.repository or None,
                "revision": self.revision,
                "version": self.version,
                "date": self.date,
            }
            return {k: v for k, v in data.items() if v or k == "git"}
        return {self.kind: self.version, "date": self.date} if self.date else self.version


@dataclass(frozen=True)
class Stack:
    """One whole stack. Two stacks are the same when their pins and their image are.

    ``places`` says where packages were imported from when the stack was frozen; it is for people.
    """

    pins: Mapping[str, Pin]
    name: str = ""
    date: str = ""
    image: str = ""
    notes: str = ""
    defined: Mapping[str, Component] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the pins and the image; names, dates and notes do not count."""
        pins = {name: list(pin.identity) for name, pin in self.pins.items()}
        return hashlib.sha256(json.dumps([pins, self.image], sort_keys=True).encode()).hexdigest()

    def component(self, name: str) -> Component:
        """What is known of one of its components."""
        return find_component(name, self.defined, where=self.name)

    def changed(self, other: Stack) -> list[str]:
        """Components that ``other`` pins otherwise (or only one of the two has), from the ground up."""
        names = {*self.pins, *other.pins}
        return sorted((n for n in names if _identity(self, n) != _identity(other, n)), key=rank)

    def with_pins(self, pins: Mapping[str, Pin | None], *, name: str = "") -> Stack:
        """This stack with some pins exchanged (None takes a component away). It has no image of its own."""
        merged = {**self.pins, **pins}
        return Stack(pins={n: p for n, p in merged.items() if p is not None}, name=name, defined=self.defined)

    def to_data(self) -> dict[str, Any]:
        """The form of a stack file."""
        data: dict[str, Any] = {"schema": SCHEMA}
        data |= {
            k: v
            for k, v in (("name", self.name), ("date", self.date), ("image", self.image), ("notes", self.notes))
            if v
        }
        if self.defined:
            data["define"] = {
                c.name: {
                    f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name != "name" and getattr(c, f.name)
                }
                for c in self.defined.values()
            }
        data["components"] = {name: self.pins[name].to_data() for name in sorted(self.pins, key=rank)}
        if self.places:
            data["places"] = dict(self.places)
        return data

    def __str__(self) -> str:
        return self.name or ", ".join(f"{name} {self.pins[name]}" for name in sorted(self.pins, key=rank))


def _identity(stack: Stack, name: str) -> tuple[str, str] | None:
    pin = stack.pins.get(name)
    return pin.identity if pin else None


def stack_from_data(data: Any, *, where: object = "stack") -> Stack:
    """A checked stack out of the contents of a stack file.

    Raises:
        InputError: the schema does not hold; unknown keys are named with the nearest known one.
        BisectError: a component nobody knows.
    """
    only_known(data, _KEYS, where=where, what="stack file")
    if data.get("schema") != SCHEMA:
        raise InputError(
            "a stack file of another schema", where=where, expected=f"schema: {SCHEMA}", found=data.get("schema")
        )
    components = data.get("components")
    if not isinstance(components, Mapping) or not components:
        raise InputError(
            "a stack without components", where=where, expected="components: {torch: 2.7.1, …}", found=components
        )
    defined = define_components(data.get("define"), where=where)
    pins: dict[str, Pin] = {}
    for name, value in components.items():
        component = find_component(str(name), defined, where=where)
        if component.name in pins:
            raise InputError("a component is pinned twice", where=where, found=f"{component.name} and {name}")
        pins[component.name] = _pin(component, value, where=f"{where}: {name}")
    places = data.get("places") or {}
    if not isinstance(places, Mapping):
        raise InputError("`places` is not a mapping", where=where, expected="component: folder", found=places)
    day = data.get("date") or ""
    return Stack(
        pins=pins,
        name=str(data.get("name") or ""),
        date=_day(day, where),
        image=str(data.get("image") or ""),
        notes=str(data.get("notes") or ""),
        defined=defined,
        places={str(n): str(p) for n, p in places.items()},
    )


def _day(value: Any, where: object) -> str:
    if value in ("", None):
        return ""
    text = value.isoformat() if isinstance(value, date) else str(value)
    try:
        date.fromisoformat(text[:10])
    except ValueError:
        raise InputError("not a date", where=where, expected="2025-08-07", found=value) from None
    return text[:10]


def _pin(component: Component, value: Any, *, where: str) -> Pin:
    if isinstance(value, (float, int)) and not isinstance(value, bool):
        raise InputError(
            "a version has to be quoted, or 3.10 becomes 3.1",
            where=where,
            expected=f'"{value}"',
            found=f"the number {value}",
        )
    kind: Literal["release", "fact"] = "fact" if component.external else "release"
    if isinstance(value, str) and value.strip():
        return Pin(kind=kind, version=value.strip())
    if not isinstance(value, Mapping):
        raise InputError(
            "not a pin", where=where, expected="a version, {git: …, revision: …} or {fact: …}", found=value
        )
    only_known(value, _PIN_KEYS, where=where, what="pin")
    chosen = [k for k in ("release", "git", "fact") if k in value]
    if len(chosen) != 1:
        raise InputError(
            "a pin is exactly one of release, git and fact", where=where, found=", ".join(chosen) or "none of them"
        )
    day = _day(value.get("date"), where)
    if chosen[0] == "git":
        if component.external:
            raise InputError(
                "the component is an external fact and has no commits", where=where, expected="a version", found=value
            )
        if not isinstance(value.get("revision"), str) or not value["revision"].strip():
            raise InputError(
                "a git pin needs its revision, quoted",
                where=where,
                expected='revision: "a25e413e"',
                found=value.get("revision"),
            )
        repository = value["git"] or component.repository
        if not repository:
            raise InputError(
                "no repository is known for this component", where=where, expected="git: <address or path>"
            )
        return Pin(
            kind="git",
            version=str(value.get("version") or ""),
            revision=value["revision"].strip(),
            repository=str(repository),
            date=day,
        )
    if "revision" in value or "version" in value:
        raise InputError("`revision` and `version` belong to git pins", where=where, found=value)
    version = value[chosen[0]]
    if not isinstance(version, str) or not version.strip():
        raise InputError("a version has to be a quoted text", where=where, found=version)
    if component.external and chosen[0] == "release":
        raise InputError(
            "the component is an external fact and cannot be installed", where=where, expected="fact: …", found=value
        )
    return Pin(kind=chosen[0], version=version.strip(), date=day)  # type: ignore[arg-type]


def load_stack(path: Path | str) -> Stack:
    """The stack of a YAML or TOML file, or of a shipped one by its name (``shipped:deepseek-v3-671b-dapo-a2``)."""
    text = str(path)
    if text.startswith("shipped:"):
        path = SHIPPED / f"{text.removeprefix('shipped:')}.yaml"
        if not path.is_file():
            names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.yaml")))
            raise InputError("there is no such shipped stack", where=text, expected=names)
    path = Path(path)
    stack = stack_from_data(read_mapping(path), where=path)
    return stack if stack.name else dataclasses.replace(stack, name=path.stem)


def read_mapping(path: Path) -> Any:
    """The contents of a YAML or TOML file; InputError when it is missing or malformed."""
    text = read_text(path)
    if path.suffix == ".toml":
        try:
            import tomllib
        except ModuleNotFoundError:  # Python 3.10
            try:
                import tomli as tomllib
            except ModuleNotFoundError:
                raise InputError(
                    "TOML needs Python 3.11 or the package tomli", where=path, next_step="write it as YAML"
                ) from None
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"not TOML ({error})", where=path) from None
    import yaml

    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of a date, of the nesting
        raise InputError(f"not YAML ({' '.join(str(error).split())})", where=path) from None


def save_stack(stack: Stack, path: Path) -> None:
    """Writes a stack file (YAML), whole or not at all."""
    write_atomically(path, lambda beside: beside.write_text(stack_text(stack), encoding="utf-8"))


def stack_text(stack: Stack) -> str:
    """The YAML of a stack file."""
    import yaml

    return yaml.safe_dump(stack.to_data(), sort_keys=False, allow_unicode=True, width=120)


def load_stacks(directory: Path) -> list[Stack]:
    """Every stack file of a folder in the order of their dates, without repetitions.

    Raises:
        InputError: there is none, or one has no date.
    """
    if not directory.is_dir():
        raise InputError("there is no such folder of stack files", where=directory)
    stacks = [load_stack(p) for p in sorted(directory.iterdir()) if p.suffix in (".yaml", ".yml", ".toml")]
    if not stacks:
        raise InputError("the folder holds no stack file", where=directory, expected="*.yaml, *.yml or *.toml")
    for stack in stacks:
        if not stack.date:
            raise InputError(
                "a dated stack has no date", where=f"{directory}: {stack.name}", expected="date: 2025-08-07"
            )
    return in_time(stacks)


def in_time(stacks: list[Stack]) -> list[Stack]:
    """Stacks by date, each distinct one once (the earliest)."""
    kept: dict[str, Stack] = {}
    for stack in sorted(stacks, key=lambda s: (s.date, s.name)):
        kept.setdefault(stack.digest, stack)
    return list(kept.values())
