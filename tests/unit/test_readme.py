"""The README and its Chinese twin say the same, their first two blocks are the two commands, and their commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def bash_blocks(text):
    return re.findall(r"^```bash\n(.*?)^```", text, flags=re.S | re.M)


def commands(text):
    """The lines of all bash blocks without their comments, which are in the language of the file."""
    return [line.split("#")[0].strip() for block in bash_blocks(text) for line in block.splitlines()]


def outline(text):
    """Levels of the headings, rows of the tables, names in code style: what does not depend on the language."""
    prose = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.S | re.M)
    return (
        [len(h) for h in re.findall(r"^(#+) ", prose, flags=re.M)],
        sum(line.startswith("|") for line in prose.splitlines()),
        set(re.findall(r"`([^`\n]+)`", prose)),
    )


def test_the_first_two_blocks_are_the_two_commands():
    run, test = bash_blocks(ENGLISH)[:2]
    for block in (run, test):
        assert block.startswith("python3 -m venv .venv && . .venv/bin/activate && ")
    assert run.rstrip().endswith("&& alignment run")
    assert test.rstrip().endswith("&& pytest")


def test_the_twin_has_the_same_commands_headings_tables_and_names():
    assert commands(CHINESE) == commands(ENGLISH)
    assert outline(CHINESE) == outline(ENGLISH)


@pytest.mark.parametrize("line", sorted({line for line in commands(ENGLISH) if line.startswith("alignment ")}))
def test_every_command_of_the_readme_parses(line):
    import typer

    from alignment.cli import app

    command = typer.main.get_command(app)
    arguments = shlex.split(line)[1:]
    while isinstance(command, type(typer.main.get_command(app))) and arguments and arguments[0] in command.commands:
        command, *arguments = command.commands[arguments[0]], *arguments[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    assert not getattr(command, "commands", None), f"{line!r} names no command"
    assert [a for a in arguments if a.startswith("--") and a not in known] == []
    takes = {option for parameter in command.params if not getattr(parameter, "is_flag", False) for option in parameter.opts}
    free = [a for before, a in zip(["", *arguments], arguments) if before not in takes]
    overrides = [a for a in free if "=" in a and a != "engine=verl"]
    if overrides:
        from alignment.capture.config import split_overrides
        from alignment.rl.config import load_config

        preset = arguments[arguments.index("--config") + 1] if "--config" in arguments else "dapo-tiny"
        _, changes = split_overrides(overrides)
        load_config(preset, changes)


def test_links_lead_somewhere():
    for text in (ENGLISH, CHINESE):
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / target).is_file(), target
