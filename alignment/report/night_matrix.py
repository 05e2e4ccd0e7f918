"""The matrix of the nightly: one data file that says which machines run which phases, when, and what a failure means.

::

    version: 1
    rows:
      - {name: atlas-a2, chip: A2, stack: ci/stacks/a2.yaml, nodes: 4, schedule: "0 18 * * *", phases: [doctor, dapo]}
    phases:
      doctor: {command: [alignment, doctor, --json], where: every-node, timeout_minutes: 5}
      dapo:
        command: [alignment, dapo, --run-dir, "{out}/run", trainer.total_training_steps=4]
        timeout_minutes: 60
        where: cluster
        needs: [npu]
        leaves: {training: [run], capture: [run/capture]}
    exit_codes: {0: ignore, 1: page, 2: warn, 3: page, 4: warn}
    known_failures: ci/known_failures.yaml

**Rows.** ``chip`` is the name people give it, ``device`` what PyTorch calls it (npu, cuda or cpu; npu by default).
``nodes`` is how many nodes the Ray cluster has to have, ``cards`` how many devices each. ``stack`` and
``known_failures`` are files, looked for from the folder of the matrix upwards. ``require`` (true by default) makes what
is skipped failed. ``layers`` and ``subjects`` fill ``{layers}`` (joined by " or ", for ``-m``) and ``{subjects}``
(joined by commas), ``env`` goes to every phase.

**Phases.** ``where`` is ``head`` (here), ``every-node`` (the command runs on each node of the Ray cluster) or
``cluster`` (here, with the address of the cluster in ``RAY_ADDRESS``). Commands may hold ``{out}`` (the phase's own
folder), ``{night}``, ``{row}``, ``{chip}``, ``{device}``, ``{stack}``, ``{ray}``, ``{nodes}``, ``{cards}``,
``{layers}`` and ``{subjects}``; ``alignment``, ``pytest`` and ``python`` as first word are those of the interpreter
that drives the night. Every phase leaves something by which it is judged:

=============  =====================================================================================================
``junit``      a JUnit file: more than no test, and none skipped where the row requires
``run``        a folder of ``alignment run``: verdicts and provenance
``training``   a folder of ``alignment dapo`` or ``gkd``: finite metrics of every step it was to take (or ``steps``)
``capture``    a folder with a capture: readable and complete
``document``   JSON that a command printed with ``--json`` (``stdout.txt`` holds what a phase printed)
=============  =====================================================================================================

Paths are relative to the phase's folder. Where ``leaves`` is not given, ``--junitxml``, ``--run-dir`` and ``--json``
of the command say it; a phase of which nothing is known is refused, since one that did nothing would look the same.

**Exit codes** are those of ``alignment nightly run`` (see :mod:`alignment.report.night`), each mapped to ``page``,
``warn`` or ``ignore``. Where one is not named, 0 is ``ignore``, 4 (nothing new) ``warn`` and every other ``page``.

**Known failures** are a file ``{version: 1, entries: [{match, owner, reason, expires}]}``: ``match`` is a shell pattern
on the line ``<phase>/<check>: <reason>``, ``expires`` a day at most 92 days away. They take a finding out of the pager
and never make a night green.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from alignment.bisect.keys import nearest, only_known
from alignment.errors import InputError
from alignment.files import read_text

VERSION = 1
WHERE = ("head", "every-node", "cluster")
ACTIONS = ("ignore", "warn", "page")
"""What a night asks of people, mildest first."""

DEVICES = ("npu", "cuda", "cpu")
LEAVES = ("junit", "run", "training", "capture", "document")
PLACEHOLDERS = ("out", "night", "row", "chip", "device", "stack", "ray", "nodes", "cards", "layers", "subjects")
DEFAULT_CODES = {0: "ignore", 1: "page", 2: "page", 3: "page", 4: "warn"}
"""Whom the exit codes call where the matrix does not say it."""

LONGEST_KNOWN = 92
"""Days a known failure may be known for: a quarter."""

STDOUT, STDERR = "stdout.txt", "stderr.txt"
_TOP = ("version", "rows", "phases", "exit_codes", "known_failures")
_ROW = (
    "name", "chip", "device", "stack", "image", "nodes", "cards", "schedule", "require", "phases", "layers", "subjects",
    "env",
)  # fmt: skip
_PHASE = ("command", "timeout_minutes", "where", "needs", "leaves", "steps")
_KNOWN = ("match", "owner", "reason", "expires")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,60}")
_FIELDS = re.compile(r"\{([a-z_]*)\}")
_CRON = re.compile(r"[0-9*/,-]+( [0-9*/,-]+){4}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of machine of the nightly: a Ray cluster of ``nodes`` nodes with ``cards`` devices each, one stack."""

    name: str
    chip: str
    phases: tuple[str, ...]
    device: str = "npu"
    stack: Path | None = None
    image: str = ""
    nodes: int = 1
    cards: int | None = None
    schedule: str = ""
    require: bool = True
    layers: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One step of a night: a command, where it runs, how long it may, and what it must leave in its folder.

    ``leaves`` are (kind, path in the folder) as described above; ``steps`` is how many steps a training has, None for
    as many as it says itself.
    """

    name: str
    command: tuple[str, ...]
    timeout_minutes: float
    leaves: tuple[tuple[str, str], ...]
    where: str = "head"
    needs: tuple[str, ...] = ()
    steps: int | None = None

    def argv(self, **values: object) -> list[str]:
        """The command with its placeholders filled.

        Raises:
            InputError: a placeholder has no value in this row.
        """

        def fill(match: re.Match) -> str:
            value = values.get(match[1])
            if value is None or value == "":
                raise InputError(
                    "a placeholder without a value", where=f"phases.{self.name}.command", found=match[0],
                    next_step=f"set {match[1]} in the row, or leave {match[0]} out",
                )  # fmt: skip
            return str(value)

        return [_FIELDS.sub(fill, word) for word in self.command]


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """A failure somebody already works on, until a day."""

    match: str
    owner: str
    reason: str
    expires: date

    def holds(self, line: str, *, today: date) -> bool:
        """Whether it stands for the finding that ``line`` (``<phase>/<check>: <reason>``) tells."""
        return today <= self.expires and fnmatch.fnmatchcase(line, self.match)

    def to_dict(self) -> dict[str, str]:
        return {**asdict(self), "expires": str(self.expires)}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The whole file, as :func:`read_matrix` returns it."""

    path: Path
    rows: tuple[Row, ...]
    phases: Mapping[str, Phase]
    exit_codes: Mapping[int, str]
    known_failures: tuple[KnownFailure, ...] = ()

    def row(self, name: str) -> Row:
        """The row of that name.

        Raises:
            InputError: there is none; the nearest name is told.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise InputError(
            "there is no such row", where=self.path, expected=nearest(name, [r.name for r in self.rows]), found=name
        )

    def phases_of(self, row: Row) -> tuple[Phase, ...]:
        """The phases of a row, in order."""
        return tuple(self.phases[name] for name in row.phases)

    def action(self, exit_code: int) -> str:
        """``page``, ``warn`` or ``ignore``; what nobody thought of pages."""
        return self.exit_codes.get(exit_code, "page")

    def digest(self, row: Row) -> str:
        """What two nights of one row have to share to be parts of one night."""
        data = {"row": asdict(row), "phases": [asdict(phase) for phase in self.phases_of(row)]}
        return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_matrix(path: Path, *, today: date | None = None) -> Matrix:
    """The matrix at ``path``, with the file of known failures it names.

    Raises:
        InputError: a file is missing or not YAML; a key is unknown (the nearest one is named), missing or of another
            type; a name is used twice or never defined.
    """
    path = Path(path)
    data = _mapping(_load(path), _TOP, path)
    if data.get("version") != VERSION:
        raise InputError("a matrix of another version", where=path, expected=VERSION, found=data.get("version"))
    listed = _mapping(_needed(data, "phases", path), None, f"{path}: phases")
    phases = {str(name): _phase(str(name), entry, f"{path}: phases.{name}") for name, entry in listed.items()}
    rows = tuple(
        _row(entry, phases, path, f"{path}: rows[{i}]")
        for i, entry in enumerate(_list(_needed(data, "rows", path), f"{path}: rows"))
    )
    if not rows:
        raise InputError("the matrix has no row", where=path, expected="rows: [{name, chip, phases, …}]")
    _unique([row.name for row in rows], f"{path}: rows")
    known = data.get("known_failures")
    known_path = None if known is None else _file(known, path, f"{path}: known_failures")
    return Matrix(
        path=path,
        rows=rows,
        phases=phases,
        exit_codes=_exit_codes(data.get("exit_codes"), f"{path}: exit_codes"),
        known_failures=() if known_path is None else read_known_failures(known_path, today=today),
    )


def read_known_failures(path: Path, *, today: date | None = None) -> tuple[KnownFailure, ...]:
    """The known failures of a file, those that have expired included.

    Raises:
        InputError: a field is missing or empty, a pattern that matches everything, a day that is none or too far away.
    """
    data = _mapping(_load(Path(path)), ("version", "entries"), path)
    if data.get("version") != VERSION:
        raise InputError("known failures of another version", where=path, expected=VERSION, found=data.get("version"))
    found = []
    for i, entry in enumerate(_list(data.get("entries") or [], f"{path}: entries")):
        where = f"{path}: entries[{i}]"
        entry = _mapping(entry, _KNOWN, where)
        match, owner, reason = (_text(_needed(entry, key, where), f"{where}.{key}") for key in _KNOWN[:3])
        if not re.sub(r"[*?/\s]", "", match):
            raise InputError(
                "the pattern matches everything", where=f"{where}.match", expected="<phase>/<check>…", found=match
            )
        expires = _day(_needed(entry, "expires", where), f"{where}.expires")
        latest = (today or date.today()) + timedelta(days=LONGEST_KNOWN)
        if expires > latest:
            raise InputError(
                "a known failure ends", where=f"{where}.expires", expected=f"at most {LONGEST_KNOWN} days from now, "
                f"{latest}", found=expires,
            )  # fmt: skip
        found.append(KnownFailure(match=match, owner=owner, reason=reason, expires=expires))
    return tuple(found)


def _row(entry: object, phases: Mapping[str, Phase], path: Path, where: str) -> Row:
    entry = _mapping(entry, _ROW, where)
    name = _name(_needed(entry, "name", where), f"{where}.name")
    where = f"{where} ({name})"
    listed = _texts(_needed(entry, "phases", where), f"{where}.phases")
    if not listed:
        raise InputError("a night without a phase says nothing", where=f"{where}.phases", expected="at least one")
    for phase in listed:
        if phase not in phases:
            raise InputError(
                "there is no such phase", where=f"{where}.phases", expected=nearest(phase, phases), found=phase
            )
    _unique(listed, f"{where}.phases")
    stack = entry.get("stack")
    schedule = _text(entry.get("schedule", ""), f"{where}.schedule", empty=True)
    if schedule and not _CRON.fullmatch(schedule):
        expected = 'five fields: "0 18 * * *"'
        raise InputError("not a schedule", where=f"{where}.schedule", expected=expected, found=schedule)
    cards = entry.get("cards")
    env = _mapping(entry.get("env", {}), None, f"{where}.env")
    return Row(
        name=name,
        chip=_text(_needed(entry, "chip", where), f"{where}.chip"),
        device=_one_of(entry.get("device", "npu"), DEVICES, f"{where}.device"),
        stack=None if stack is None else _file(stack, path, f"{where}.stack"),
        image=_text(entry.get("image", ""), f"{where}.image", empty=True),
        nodes=_natural(entry.get("nodes", 1), f"{where}.nodes"),
        cards=None if cards is None else _natural(cards, f"{where}.cards"),
        schedule=schedule,
        require=_flag(entry.get("require", True), f"{where}.require"),
        phases=tuple(listed),
        layers=tuple(_texts(entry.get("layers", []), f"{where}.layers")),
        subjects=tuple(_texts(entry.get("subjects", []), f"{where}.subjects")),
        env={str(key): _scalar(value, f"{where}.env.{key}") for key, value in env.items()},
    )


def _phase(name: str, entry: object, where: str) -> Phase:
    _name(name, where)
    entry = _mapping(entry, _PHASE, where)
    words = _list(_needed(entry, "command", where), f"{where}.command")
    command = [_scalar(word, f"{where}.command") for word in words]
    if not command:
        raise InputError("an empty command", where=f"{where}.command", expected="[alignment, doctor, --json]")
    for word in command:
        for placeholder in _FIELDS.findall(word):
            if placeholder not in PLACEHOLDERS:
                raise InputError(
                    "an unknown placeholder", where=f"{where}.command", expected=nearest(placeholder, PLACEHOLDERS),
                    found=f"{{{placeholder}}}",
                )  # fmt: skip
    minutes = _needed(entry, "timeout_minutes", where)
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not 0 < minutes < 1e6:
        raise InputError("not a time", where=f"{where}.timeout_minutes", expected="minutes, more than 0", found=minutes)
    steps = entry.get("steps")
    return Phase(
        name=name,
        command=tuple(command),
        timeout_minutes=float(minutes),
        where=_one_of(entry.get("where", "head"), WHERE, f"{where}.where"),
        needs=tuple(_one_of(n, DEVICES, f"{where}.needs") for n in _list(entry.get("needs", []), f"{where}.needs")),
        leaves=_leaves(entry.get("leaves"), command, where),
        steps=None if steps is None else _natural(steps, f"{where}.steps"),
    )


def _leaves(entry: object, command: Sequence[str], where: str) -> tuple[tuple[str, str], ...]:
    if entry is None:
        found = _leaves_of(command)
        if not found:
            raise InputError(
                "nothing tells what the phase did", where=f"{where}.leaves",
                expected=f"a mapping with {', '.join(LEAVES)}, or --junitxml, --run-dir or --json in the command",
            )  # fmt: skip
        return found
    entry = _mapping(entry, LEAVES, f"{where}.leaves")
    found = []
    for kind, paths in entry.items():
        for path in _texts([paths] if isinstance(paths, str) else paths, f"{where}.leaves.{kind}"):
            inside = PurePosixPath(path.removeprefix("{out}/"))
            if inside.is_absolute() or ".." in inside.parts or "{" in path.removeprefix("{out}/"):
                raise InputError(
                    "a path outside the folder of the phase", where=f"{where}.leaves.{kind}",
                    expected="a path relative to {out}", found=path,
                )  # fmt: skip
            found.append((str(kind), str(inside)))
    if not found:
        raise InputError("nothing tells what the phase did", where=f"{where}.leaves", expected=", ".join(LEAVES))
    return tuple(found)


def _leaves_of(command: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """What the options of a command say that it writes."""
    found = []
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in zip(words, [*words[1:], ""]):
        inside = value.removeprefix("{out}/") if value.startswith("{out}") else None
        if option == "--json":
            found.append(("document", STDOUT))
        elif inside is not None and option in ("--junitxml", "--junit-xml"):
            found.append(("junit", inside))
        elif inside is not None and option == "--run-dir":
            kind = "training" if {"dapo", "gkd"} & set(command[:2]) else "run"
            found.append((kind, "." if inside == "{out}" else inside))
    return tuple(found)


def _exit_codes(entry: object, where: str) -> dict[int, str]:
    codes = dict(DEFAULT_CODES)
    for code, action in _mapping({} if entry is None else entry, None, where).items():
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < 256:
            raise InputError("not an exit code", where=where, expected="0 … 255", found=code)
        codes[code] = _one_of(action, ACTIONS, f"{where}.{code}")
    for code in (1, 3):
        if codes.get(code) == "ignore":
            problem = "a night that failed cannot be ignored"
            raise InputError(problem, where=f"{where}.{code}", expected="page or warn", found="ignore")
    return codes


def _load(path: Path) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A key that is given twice is an error, not the last one."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            line = node.start_mark.line + 1
            raise InputError("a key is given twice", where=f"{path}: line {line}", expected="once", found=twice)
        return {key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value)}

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    text = read_text(path)
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"not YAML ({' '.join(str(error).split())})", where=path) from None


def _file(value: object, matrix: Path, where: str) -> Path:
    """A file that the matrix names: beside it, or from a folder above it (the root of the repository)."""
    name = _text(value, where)
    folders = matrix.resolve().parents
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        raise InputError("there is no such file", where=where, expected=f"a file in {folders[0]} or above", found=name)
    return found


def _mapping(data: object, keys: Sequence[str] | None, where: object) -> Mapping:
    if keys is not None:
        return only_known(data, keys, where=where, what="mapping")
    if not isinstance(data, Mapping):
        raise InputError("not a mapping", where=where, expected="a mapping", found=type(data).__name__)
    return data


def _needed(data: Mapping, key: str, where: object) -> Any:
    if data.get(key) is None:
        raise InputError("a key is missing", where=where, expected=key, found=", ".join(map(str, data)) or "nothing")
    return data[key]


def _list(value: object, where: str) -> list:
    if not isinstance(value, list):
        raise InputError("not a list", where=where, expected="[…]", found=value)
    return value


def _text(value: object, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (empty or value.strip()):
        raise InputError("not a text", where=where, expected="a text in quotes", found=value)
    return value


def _texts(value: object, where: str) -> list[str]:
    return [_text(item, where) for item in _list(value, where)]


def _scalar(value: object, where: str) -> str:
    """A word of a command or the value of a variable: numbers may come without quotes."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError("not a word", where=where, expected="a text or a number", found=value)
    return str(value)


def _name(value: object, where: str) -> str:
    if not _NAME.fullmatch(_text(value, where)):
        raise InputError("not a name", where=where, expected="small letters, digits, . _ -", found=value)
    return str(value)


def _natural(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError("not a number of things", where=where, expected="1, 2, …", found=value)
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InputError("neither true nor false", where=where, expected="true or false", found=value)
    return value


def _day(value: object, where: str) -> date:
    try:
        return value if type(value) is date else date.fromisoformat(str(value))
    except ValueError:
        raise InputError("not a day", where=where, expected="YYYY-MM-DD", found=value) from None


def _one_of(value: object, known: Sequence[str], where: str) -> str:
    if value not in known:
        raise InputError("not one of those known", where=where, expected=nearest(str(value), known), found=value)
    return str(value)


def _unique(names: Sequence[str], where: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError("a name is used twice", where=where, expected="once", found=twice)
