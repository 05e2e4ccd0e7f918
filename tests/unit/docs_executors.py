"""Where a command that is not executed with its page is executed: tests, scripts, other pages, phases of the nightly.

A page may say "TEST executes it". Here that is held to the test, script, page or phase it names: the command's own
words, its subcommands, options and keys, have to stand there in one command. Values may be others.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import yaml
from docs_pages import ROOT, Command, blocks, commands, simple_commands, statements

_NAMED = re.compile(r"(?<![\w/])((?:\.ci|[\w-]+(?=/))/[\w./-]*\w)(?:::(\w+))?")
MATRIX = "ci/nightly.yaml"


def named(why: str) -> list[tuple[str, str]]:
    """The files that a reason names, each with the test in it, or with an empty text."""
    return [(found[1], found[2] or "") for found in _NAMED.finditer(why)]


def essential(words: list[str]) -> tuple[list[str], list[str]]:
    """Program and subcommands of a simple command, and its options and keys; without values, which may be others."""
    subcommands = []
    for word in words:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", word):
            break
        subcommands.append(word)
    rest = words[len(subcommands) :]
    options = [word.partition("=")[0] for word in rest if re.match(r"-|\+?[a-z][\w.]*=", word)]
    return subcommands, options


def in_order(wanted: list[str], words: list[str]) -> bool:
    """Whether the wanted words stand among the words, in their order."""
    rest = iter(words)
    return all(word in rest for word in wanted)


def executes(wanted: list[str], words: list[str]) -> bool:
    """Whether one simple command is the other with more said, or with other values."""
    subcommands, options = essential(wanted)
    bare = [word if word.startswith("--") and "=" not in word else word.partition("=")[0] for word in words]
    return in_order(subcommands, bare) and set(options) <= set(bare)


def fault_of_claim(command: Command) -> str | None:
    """What is wrong with the claim that something else executes a command, or None."""
    places = named(command.why)
    if not places:
        return "which test executes it?"
    for path, test in places:
        fault = fault_of_place(command.text.strip(), path, test)
        if fault:
            return f"{path}: {fault}"
    return None


def fault_of_place(text: str, path: str, test: str) -> str | None:
    """Why a file, or a test in it, does not execute a statement; None where it does."""
    if not (ROOT / path).is_file():
        return "there is no such file"
    if path.startswith("tests/"):
        module = _definitions(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if not test:
            return "which test of it? Write FILE::TEST"
        if test not in module:
            return f"there is no {test}"
        if not test.startswith("test_"):
            return f"{test} is no test"
        what, there = f"no call or list that {test} uses", functools.partial(executed_by_test, test, module)
    elif path.endswith(".md"):
        lines = [c.text for c in commands(Path(path)) if c.executed in ("plainly", "engine")]
        what, there = "no command that it executes", functools.partial(executed_by_lines, lines)
    elif path == MATRIX:
        what, there = "no phase of a row on the CPU", executed_by_nightly
    else:
        script = (ROOT / path).read_text(encoding="utf-8")
        taken = blocks_taken_by(path, script)
        if any(text in block for block in taken):
            return None
        lines = [line for one in (script, *taken) for _, line in statements(one)]
        what, there = "no command of it", functools.partial(executed_by_lines, lines)
    missing = [words for words in simple_commands(text) if words[0] != "true" and not there(words)]
    return f"{what} has the words of {' '.join(missing[0])!r}" if missing else None


def executed_by_lines(lines: list[str], words: list[str]) -> bool:
    """Whether one of the lines of shell is the command, with more said or with other values."""
    return any(executes(words, other) for line in lines for other in _readable(line))


def _readable(text: str) -> list[list[str]]:
    try:
        return simple_commands(text)
    except ValueError:  # a here-document in another language
        return []


def blocks_taken_by(path: str, text: str) -> list[str]:
    """The blocks that a script executes as they stand on the pages."""
    if path == ".ci/run":
        taken = [int(number) for number in re.findall(r'^bash .*\$\(block (\d+)\)"$', text, flags=re.M)]
        bash = [b.text for b in blocks((ROOT / "README.md").read_text(encoding="utf-8")) if b.language == "bash"]
        return [bash[number - 1] for number in taken]
    if path == "scripts/newcomer.sh":
        listed = subprocess.run([ROOT / path, "--list", ROOT], capture_output=True, text=True, check=True).stdout
        return [re.sub(r"^    ", "", step, flags=re.M) for step in re.findall(r"(?:^    .*\n)+", listed, flags=re.M)]
    return []


def executed_by_nightly(words: list[str]) -> bool:
    """Whether a phase of a row that any machine can run is the command."""
    matrix = yaml.safe_load((ROOT / MATRIX).read_text(encoding="utf-8"))
    here = {phase for row in matrix["rows"] if row["device"] == "cpu" for phase in row["phases"]}
    return any(executes(words, list(map(str, matrix["phases"][phase]["command"]))) for phase in here)


def executed_by_test(test: str, module: dict[str, ast.AST], words: list[str]) -> bool:
    """Whether one call or list in a test, or in what it uses of its file, has the words of the command.

    How the program is started may stand apart from them, in a function of the file.
    """
    nodes = _used_by(test, module)
    inner = [n for one in nodes for n in ast.walk(one) if isinstance(n, (ast.Call, ast.List, ast.Tuple))]
    subcommands, options = essential(words[1:] if words[0] == "alignment" else words)
    if "/" in words[0]:  # a script of the repository, which the test may name from a folder on
        inner = [n for n in inner if any("/" in text and f"/{words[0]}".endswith(f"/{text}") for text in _texts(n))]
    one = any({*subcommands[-1:], *options} <= set(_texts(node)) for node in inner)
    return one and set(subcommands) <= {word for node in nodes for word in _texts(node)}


def _definitions(module: ast.Module) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def _used_by(name: str, defined: dict[str, ast.AST]) -> list[ast.AST]:
    """A test and what it uses of its file, fixtures too, and what these use."""
    names = [name]
    for one in names:
        for node in ast.walk(defined[one]):
            used = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else None
            if used in defined and used not in names:
                names.append(used)
    return [defined[one] for one in names]


def _texts(node: ast.AST) -> list[str]:
    """The words of the texts in an expression, keys without their values."""
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    words = [word for text in texts for word in text.split()]
    return words + [word.partition("=")[0] for word in words if "=" in word]
