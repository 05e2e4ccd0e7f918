"""Writes docs/reference/ from the program itself: commands, configuration, exit codes, and the tables of file formats.

    python scripts/generate_reference.py            # writes what has changed
    python scripts/generate_reference.py --check    # exit 1 where a page is not what would be written

``cli``, ``configuration`` and ``exit-codes`` are generated whole, in English and Chinese (headings and column names are
translated, descriptions are the program's own). ``file-formats`` is prose with tables between the comments
``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
TWIN = ".zh-CN"
LANGUAGES = ("", TWIN)
"""What a language adds to the name of a page."""

TEXTS = yaml.safe_load((ROOT / "scripts" / "reference_texts.yaml").read_text(encoding="utf-8"))


def says(section: str, language: str) -> dict[str, str]:
    """The texts of a section in one language."""
    return {key: text["zh" if language else "en"] for key, text in TEXTS[section].items()}


def generated(language: str) -> str:
    """What stands below the title of every page that is generated whole."""
    return TEXTS["generated"]["zh" if language else "en"]


def word(text: str, language: str) -> str:
    return TEXTS["words"][text] if language and not text.startswith("`") else text


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], language: str = "") -> str:
    """A Markdown table; cells are Markdown, with what would break a row escaped."""
    lines = ["| " + " | ".join(word(c, language) for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(c) for c in row) + " |" for row in rows]
    return "\n".join(lines)


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip()).replace("|", "\\|")


def code(value: Any) -> str:
    return f"`{value}`" if str(value) else ""


def prose(text: str | None) -> str:
    """A docstring as Markdown: roles and double backticks become code, what looks like HTML is none."""
    text = inspect.cleandoc(text or "")
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;") for p in parts)


# Commands.


def cli_page(language: str) -> str:
    """Every command, argument and option, from the click objects that parse them."""
    import typer

    from alignment.cli import app

    root = typer.main.get_command(app)
    lines = [f"# {word('Commands', language)}", "", generated(language), "", prose(root.help), ""]
    for command, names in _commands(root, ["alignment"]):
        lines += [f"{'#' * len(names)} {' '.join(names)}", "", *_command(command, names, language)]
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: Any, names: list[str]) -> Iterable[tuple[Any, list[str]]]:
    for name in sorted(group.commands):
        command = group.commands[name]
        yield command, [*names, name]
        if getattr(command, "commands", None):
            yield from _commands(command, [*names, name])


def _command(command: Any, names: list[str], language: str) -> list[str]:
    lines = [prose(command.help), ""]
    if getattr(command, "commands", None):
        return lines
    hints, computed = typing.get_type_hints(command.callback), computed_defaults(command.callback)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join([*names, *(_argument(p, hints) for p in arguments), *(["[OPTIONS]"] if options else [])])
    lines += ["```text", usage, "```", ""]
    rows = [
        (code(_argument(p, hints)), _type(hints[p.name]), _default(p, computed, language), prose(p.help))
        for p in arguments
    ]
    for p in options:
        spelled = " / ".join(code(o) for o in [*p.opts, *p.secondary_opts])
        kind = hints[p.name]
        shown = code(p.metavar) if p.metavar else _type(kind)
        rows.append((spelled, "" if kind is bool else shown, _default(p, computed, language), prose(p.help)))
    if rows:
        lines += [table(("argument or option", "type", "default", "meaning"), rows, language), ""]
    return lines


def _argument(parameter: Any, hints: dict[str, Any]) -> str:
    name = parameter.metavar or parameter.name.upper()
    if parameter.metavar is None and _is_list(hints.get(parameter.name)):
        name += "..."
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _is_list(kind: Any) -> bool:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_is_list(a) for a in typing.get_args(kind))
    return typing.get_origin(kind) in (list, tuple)


def computed_defaults(function: Callable) -> dict[str, str]:
    """The source of defaults that are calls, whose value is another one on another machine."""
    arguments = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].args
    named = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    return {a.arg: ast.unparse(d) for a, d in zip(named, arguments.defaults) if isinstance(d, ast.Call)}


def _default(parameter: Any, computed: dict[str, str], language: str) -> str:
    if parameter.required:
        return word("required", language)
    if parameter.name in computed:
        return code(computed[parameter.name])
    value = parameter.default
    if isinstance(value, Path) and value.is_absolute():
        value = value.relative_to(ROOT)
    return "" if value in (None, False, (), [], "") else code(value)


def _type(kind: Any) -> str:
    """A type as a reader of a table knows it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        named = [_type(a) for a in arguments if a is not type(None)]
        return " | ".join(named)
    if origin is Literal:
        return " | ".join(code(a) for a in arguments)
    if origin in (list, tuple):
        inner = [a for a in arguments if a is not Ellipsis]
        return f"{_type(inner[0])} …" if len(inner) == 1 or arguments[-1] is Ellipsis else ", ".join(map(_type, inner))
    if isinstance(kind, type) and issubclass(kind, Path):
        return "path"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(kind) or getattr(
        kind, "__name__", str(kind)
    )


# Configuration.


@functools.cache
def described(cls: type) -> dict[str, str]:
    """The meaning of each field that has one: the ``Attributes:`` of the docstring, or the text below the field."""
    found: dict[str, str] = {}
    for owner in (c for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c)):
        text = inspect.cleandoc(owner.__doc__ or "")
        section = re.search(r"^Attributes:\n((?:[ \t]+.*\n?|\n)+)", text, flags=re.M)
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(section[1]).strip()) if section else ():
            names, _, meaning = entry.partition(":")
            found |= {name.strip(): meaning for name in names.split(",")}
        found |= below_the_fields(owner)
    return found


def below_the_fields(cls: type) -> dict[str, str]:
    """The first paragraph of the text that stands below a field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        before.target.id: inspect.cleandoc(str(after.value.value)).split("\n\n")[0]
        for before, after in zip(body, body[1:])
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def _section(cls: type, name: str) -> type | None:
    hint = typing.get_type_hints(cls)[name]
    return hint if dataclasses.is_dataclass(hint) else None


def configuration_page(language: str) -> str:
    """Every field of the two pipelines, of a capture and of the precision collector's file."""
    from alignment.capture.collector_config import KEY, CollectorConfig
    from alignment.capture.config import PREFIX, CaptureConfig
    from alignment.rl.config import TrainConfig
    from alignment.rl.gkd_config import GkdConfig

    say = says("configuration", language)
    lines = [f"# {word('Configuration', language)}", "", generated(language), "", say["how"], ""]
    lines += [f"## {word('Presets', language)}", "", say["presets"], "", _presets(TrainConfig, GkdConfig, language), ""]
    lines += [f"## {say['run']}", "", say["run text"], ""]
    lines += _sections(TrainConfig, "", language)
    ours = {f.name for f in dataclasses.fields(TrainConfig)}
    lines += [f"## {say['gkd']}", "", say["gkd text"], ""]
    lines += _sections(GkdConfig, "", language, leave_out=ours)
    lines += [f"## {say['capture']}", "", say["capture text"], "", _fields(CaptureConfig, PREFIX, language), ""]
    lines += [
        f"## {say['collector']}",
        "",
        say["collector text"].format(key=KEY),
        "",
        _fields(CollectorConfig, "", language),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _presets(dapo: type, gkd: type, language: str) -> str:
    """One column per preset, one row per key that one of them sets."""
    from alignment.rl.config import flatten

    paths = [path for kind in (dapo, gkd) for path in sorted(kind.presets.glob("*.yaml"), key=lambda p: p.stem)]
    trees = {path.stem: flatten(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in paths}
    keys = sorted(set().union(*trees.values()))
    rows = [(code(key), *(_value(tree[key]) if key in tree else "" for tree in trees.values())) for key in keys]
    return table(("key", *map(code, trees)), rows, language)


def _value(value: Any) -> str:
    return code(_yaml(tuple(value) if isinstance(value, list) else value))


def _sections(cls: type, prefix: str, language: str, leave_out: Iterable[str] = ()) -> list[str]:
    """A heading and a table for a dataclass and each one below it."""
    fields = [f for f in dataclasses.fields(cls) if f.name not in leave_out]
    lines = []
    if any(not _section(cls, f.name) for f in fields):
        title = code(prefix.rstrip(".")) if prefix else code("ascend_precision_collector")
        lines += [f"### {title}", "", prose((cls.__doc__ or "").split("\n\n")[0]) if prefix else "", ""]
        lines += [_fields(cls, prefix, language, leave_out), ""]
        lines = [line for i, line in enumerate(lines) if line or not i or lines[i - 1]]
    for f in fields:
        if below := _section(cls, f.name):
            lines += _sections(below, f"{prefix}{f.name}.", language)
    return lines


def _fields(cls: type, prefix: str, language: str, leave_out: Iterable[str] = ()) -> str:
    meanings, hints = described(cls), typing.get_type_hints(cls)
    rows = []
    for f in dataclasses.fields(cls):
        if f.name in leave_out or _section(cls, f.name):
            continue
        if f.name not in meanings:
            sys.exit(
                f"{cls.__module__}.{cls.__name__}.{f.name}: nothing says what this field means; "
                "add it to the Attributes of the docstring"
            )
        rows.append((code(prefix + f.name), _type(hints[f.name]), code(_yaml(f.default)), prose(meanings[f.name])))
    return table(("key", "type", "default", "meaning"), rows, language)


def _yaml(value: Any) -> str:
    """A default as one would write it into a YAML file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml(v) for v in value) + "]"
    return '""' if value == "" else str(value)


# Exit codes.


def exit_codes_page(language: str) -> str:
    """What each outcome makes of an exit code, computed, and the one table of codes, which stands with bisection."""
    from alignment.numerics.verdict import Outcome, Verdict, exit_code

    say = says("exit codes", language)

    def code_of(outcomes: Sequence[Outcome], *, require: bool) -> str:
        verdicts = [
            Verdict(check="c", layer="unit", stage="operator", subject="s", device="cpu", outcome=o, reason="")
            for o in outcomes
        ]
        return code(exit_code(verdicts, require=require))

    rows = [(code(o.value), code_of([o], require=False), code_of([o], require=True), say[o.value]) for o in Outcome]
    rows.append((say["none"], code_of([], require=False), code_of([], require=True), say["none text"]))
    lines = [f"# {word('Exit codes', language)}", "", generated(language), "", say["how"], ""]
    lines += [f"## {word('Verdicts', language)}", "", say["verdicts"], ""]
    lines += [table(("outcome", "exit code", "with --require", "meaning"), rows, language), ""]
    lines += [f"## {say['nights']}", "", say["nights text"], "", _nights(language), ""]
    lines += [f"## {say['all']}", "", say["all text"], "", *_tables_of_bisect(language)]
    return "\n".join(lines).rstrip() + "\n"


def _nights(language: str) -> str:
    """What a night's outcome makes of its exit code, and what the shipped matrix does with that."""
    from alignment.report.night import EXIT_CODES, HEADLINES

    actions = yaml.safe_load((ROOT / "ci" / "nightly.yaml").read_text(encoding="utf-8"))["exit_codes"]
    rows = [(code(o), code(c), code(actions[c]), code(HEADLINES[o])) for o, c in EXIT_CODES.items()]
    return table(("outcome", "exit code", "action", "first word"), rows, language)


def _tables_of_bisect(language: str) -> list[str]:
    """The tables of the section on exit codes, which ``tests/unit/bisect`` holds against the code."""
    page = ROOT / "docs" / f"bisect{language}.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    sections = re.split(r"^## ", text, flags=re.M)
    for section in sections:
        if "| 19 |" in section:
            kept = [
                part for part in re.split(r"\n\n", section.strip()) if part.startswith("|") or part.startswith("**")
            ]
            return "\n\n".join(kept).split("\n")
    return _tables_of_bisect("") if language else sys.exit(f"{page}: no table of exit codes")


# Tables of file formats.


def statistics_table(language: str) -> str:
    from alignment.capture.own_format import STATISTIC_COLUMNS
    from alignment.capture.record import Statistics

    meanings = described(Statistics)
    return table(("column", "meaning"), [(code(c), prose(meanings[c])) for c in STATISTIC_COLUMNS], language)


def row_columns_table(language: str) -> str:
    from alignment.capture.own_format import RowColumns
    from alignment.capture.record import TensorRow

    rows, own = described(TensorRow), below_the_fields(RowColumns)
    return table(
        ("column", "meaning"),
        [(code(f.name), prose(own.get(f.name) or rows[f.name])) for f in dataclasses.fields(RowColumns)],
        language,
    )


def batch_fields_table(language: str) -> str:
    from alignment.rl.batch_record import FIELDS
    from alignment.rl.contracts import FIELDS as CONTRACT

    def dtypes(name: str) -> str:
        return " | ".join(code(str(d).removeprefix("torch.")) for d in CONTRACT[name].dtypes)

    rows = [(code(n), code("[" + ", ".join(CONTRACT[n].axes) + "]"), dtypes(n)) for n in FIELDS]
    return table(("field", "shape", "type"), rows, language)


def run_files_table(language: str) -> str:
    from alignment.report import run_directory
    from alignment.report.ablation_page import ABLATION
    from alignment.report.page import PAGE
    from alignment.report.replay_page import REPLAY
    from alignment.rl import run, tracking
    from alignment.rl.batch_record import BATCHES

    say = says("run files", language)
    rows = [
        (run_directory.VERDICTS, "verdicts"), (run_directory.PROVENANCE, "provenance"), (run_directory.STACK, "stack"),
        (PAGE, "page"), (REPLAY, "replay"), (ABLATION, "ablation"),
        (run.CONFIG, "config"), (run.RUN, "run"), (tracking.METRICS, "metrics"),
        (tracking.GROUPS, "groups"), (tracking.TIMINGS, "timings"), (tracking.RANKS, "ranks"), (f"{BATCHES}/", "batches"),
        ("capture/", "capture"), ("checkpoints/", "checkpoints"), ("rollout_dump/", "rollouts"), ("tensorboard/", "tensorboard"),
    ]  # fmt: skip
    return table(("file", "meaning"), [(code(name), say[key]) for name, key in rows], language)


def baseline_entry_table(language: str) -> str:
    from alignment.baseline.store import Entry

    meanings = described(Entry)
    return table(
        ("field", "meaning"), [(code(f.name), prose(meanings[f.name])) for f in dataclasses.fields(Entry)], language
    )


def history_tables(language: str) -> str:
    """The tables of the history, as SQLite itself describes them after making them."""
    import sqlite3

    from alignment.report import history

    connection = sqlite3.connect(":memory:")
    connection.executescript(next(v for k, v in vars(history).items() if isinstance(v, str) and "CREATE TABLE" in v))
    names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    rows = [
        (code(name), ", ".join(code(column[1]) for column in connection.execute(f'PRAGMA table_info("{name}")')))
        for name in names
    ]
    return table(("table", "columns"), rows, language)


def verdict_table(language: str) -> str:
    from alignment.numerics.verdict import Divergence, Measure, Verdict

    rows = [
        (code(kind.__name__), ", ".join(code(f.name) for f in dataclasses.fields(kind)))
        for kind in (Verdict, Measure, Divergence)
    ]
    return table(("type", "field"), rows, language)


def night_table(language: str) -> str:
    from alignment.report.night import Finding, NightRecord, PhaseRecord

    rows = [
        (code(kind.__name__), ", ".join(code(f.name) for f in dataclasses.fields(kind)))
        for kind in (NightRecord, PhaseRecord, Finding)
    ]
    return table(("type", "field"), rows, language)


def stack_keys_table(language: str) -> str:
    from alignment.bisect import stack

    rows = [("stack", ", ".join(map(code, stack._KEYS))), ("component", ", ".join(map(code, stack._PIN_KEYS)))]
    return table(("table", "key"), rows, language)


def component_names(language: str) -> str:
    from alignment.bisect.components import COMPONENTS

    return ", ".join(code(name) for name in COMPONENTS)


def journal_events(language: str) -> str:
    """Every kind of event that the source appends to a journal."""
    kinds = set()
    for path in (ROOT / "alignment" / "bisect").glob("*.py"):
        kinds |= set(re.findall(r'(?:journal|self)\.append\(\s*"([a-z_]+)"', path.read_text(encoding="utf-8")))
    return ", ".join(map(code, sorted(kinds)))


def memory_columns(language: str) -> str:
    from alignment.diagnose import memory_profile

    return ", ".join(map(code, memory_profile._COLUMNS))


TABLES: dict[str, Callable[[str], str]] = {
    "run files": run_files_table,
    "verdict": verdict_table,
    "batch fields": batch_fields_table,
    "statistics": statistics_table,
    "row columns": row_columns_table,
    "baseline entry": baseline_entry_table,
    "history": history_tables,
    "night": night_table,
    "stack keys": stack_keys_table,
    "components": component_names,
    "journal events": journal_events,
    "memory columns": memory_columns,
}
PAGES: dict[str, Callable[[str], str]] = {
    "cli": cli_page,
    "configuration": configuration_page,
    "exit-codes": exit_codes_page,
}
WITH_TABLES = ("file-formats",)


def filled(text: str, language: str) -> str:
    """A page with every generated table as it would be now."""

    def put(match: re.Match) -> str:
        return f"<!-- generated: {match[1]} -->\n\n{TABLES[match[1]](language)}\n\n<!-- end of {match[1]} -->"

    return re.sub(r"<!-- generated: ([\w ]+) -->\n.*?<!-- end of \1 -->", put, text, flags=re.S)


def pages() -> dict[Path, str]:
    """Every page as it should be."""
    found = {}
    for language in LANGUAGES:
        for name, make in PAGES.items():
            found[REFERENCE / f"{name}{language}.md"] = make(language)
        for name in WITH_TABLES:
            path = REFERENCE / f"{name}{language}.md"
            found[path] = filled(path.read_text(encoding="utf-8"), language)
    return found


def stale() -> dict[Path, str]:
    """The pages that are not what they should be, with what they should be."""
    return {p: text for p, text in pages().items() if not p.is_file() or p.read_text(encoding="utf-8") != text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is stale")
    check = parser.parse_args().check
    found = stale()
    for path, text in found.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(REFERENCE)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if check and found:
        sys.exit("python scripts/generate_reference.py")


if __name__ == "__main__":
    main()
