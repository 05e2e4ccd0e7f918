"""Every command of the documentation is one that exists: programs, subcommands, options, keys, markers and paths."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from docs_executors import fault_of_claim, named
from docs_pages import (
    NEEDS,
    PROVES,
    ROOT,
    Command,
    blocks,
    commands,
    english_pages,
    main,
    promised,
    replacements,
    saved_blocks,
    simple_commands,
    statements,
    twin_of,
)

from alignment.errors import InputError
from alignment.pytest_plugin import MARKERS

FOREIGN = {
    ".", "[", "bash", "cat", "cd", "cp", "curl", "date", "docker", "echo", "export", "git", "grep", "head", "kubectl",
    "ls", "mkdir", "mv", "pip", "python", "python3", "rm", "scp", "sed", "set", "source", "tail", "tar", "test", "true",
    "uv", "wc",
}  # fmt: skip
"""Programs of others that a page may call; everything else has to be ours."""


def programs(command: Command) -> list[list[str]]:
    """The simple commands of a statement, and those inside the probes that are given to a bisection."""
    found = simple_commands(command.text)
    for words in list(found):
        found += [
            shlex.split(value)
            for before, value in zip(words, words[1:])
            if before == "--probe" and value.startswith("alignment ")
        ]
    return found


def fault_of(words: list[str], pytestconfig, made: set[str] = frozenset()) -> str | None:
    """What is wrong with a simple command, or None; ``made`` are files of the page. Nothing of it is executed."""
    program, arguments = words[0], words[1:]
    if program == "alignment":
        return fault_of_alignment(arguments)
    if program == "pytest" or (program in ("python", "python3") and arguments[:2] == ["-m", "pytest"]):
        return fault_of_pytest(arguments if program == "pytest" else arguments[2:], pytestconfig)
    if program in ("python", "python3") and arguments:
        if arguments[0] == "-m":
            # Modules of engines are known by name; ours have to exist.
            root = arguments[1].split(".")[0]
            known = root in ("verl", "venv", "mkdocs", "http", "pip") or importlib.util.find_spec(arguments[1])
            return None if known else f"no module {arguments[1]}"
        return missing_file(arguments[0], made) if arguments[0].endswith(".py") else None
    if "/" in program:
        return missing_file(program)
    return None if program in FOREIGN else f"no program {program}"


def missing_file(name: str, made: set[str] = frozenset()) -> str | None:
    return None if name in made or (ROOT / name).is_file() else f"no file {name}"


def files_of(page: Path) -> set[str]:
    """What the page itself writes, by a redirection or as a block that is saved."""
    written = (re.findall(r"(?<![0-9&])>\s*([\w./-]+)", command.text) for command in commands(page))
    return set(saved_blocks(page)).union(*written)


def fault_of_alignment(arguments: list[str]) -> str | None:
    import typer

    command = typer.main.get_command(__import__("alignment.cli", fromlist=["app"]).app)
    names = ["alignment"]
    while getattr(command, "commands", None):
        name = arguments[0] if arguments else ""
        if name not in command.commands:
            return f"{' '.join(names)} has no command {name!r}"
        command, arguments = command.commands[name], arguments[1:]
        names.append(name)
    if "--help" in arguments:
        return None
    try:
        with command.make_context(" ".join(names), list(arguments)) as context:
            parameters = dict(context.params)
    except Exception as error:  # click's own errors, whichever click typer carries
        if not hasattr(error, "format_message"):
            raise
        return error.format_message()
    return fault_of_keys(names[1], parameters)


def fault_of_keys(name: str, parameters: dict) -> str | None:
    """Overrides of the training configuration have to name keys it has."""
    overrides = list(parameters.get("overrides") or ())
    for factor in parameters.get("factor") or ():
        overrides += [part for part in factor.partition(":")[2].split(",") if "=" in part]
    if "engine=verl" in overrides or not overrides:
        return None
    from alignment.capture.config import split_overrides
    from alignment.faults.injection import faults_and_overrides
    from alignment.rl.config import load_config
    from alignment.rl.gkd_config import GkdConfig

    default = "gkd-tiny" if name == "gkd" else "dapo-tiny"
    config = str(parameters.get("config") or default)
    try:
        _, changes = split_overrides(faults_and_overrides(overrides, ())[1])
        # A file that the reader writes is not here; its keys are the default's.
        load_config(
            default if config.endswith((".yaml", ".yml")) else config,
            changes,
            kind=GkdConfig if name == "gkd" else None,
        )
    except InputError as error:
        return str(error)
    return None


def fault_of_pytest(arguments: list[str], pytestconfig) -> str | None:
    parser = pytestconfig._parser
    known, unknown = parser.parse_known_and_unknown_args(list(arguments))
    options = [a for a in unknown if a.startswith("-")]
    if options:
        return f"pytest has no option {options[0]}"
    marks = set(re.findall(r"\w+", known.markexpr or "")) - {"and", "or", "not"}
    if marks - set(MARKERS):
        return f"no marker {', '.join(sorted(marks - set(MARKERS)))}"
    for target in known.file_or_dir:
        path, _, name = target.partition("::")
        if not (ROOT / path).exists():
            return f"no test file {path}"
        if name and not re.search(
            rf"\b(def|class) {re.escape(name.split('::')[0].split('[')[0])}\b", (ROOT / path).read_text()
        ):
            return f"{path} has no test {name}"
    return None


@pytest.mark.parametrize("page", english_pages(), ids=str)
def test_every_command_of_the_page_parses(page, pytestconfig):
    made = files_of(page)
    wrong = [
        f"{command.place}: {' '.join(words)}: {fault}"
        for command in commands(page)
        for words in programs(command)
        if (fault := fault_of(words, pytestconfig, made))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("alignment rnu", "alignment has no command 'rnu'"),
        ("alignment baseline", "alignment baseline has no command ''"),
        ("alignment run --onyl unit", "No such option: --onyl"),
        ("alignment compare A", "Missing argument 'TARGET'"),
        ("alignment stress --minutes many", "Invalid value for '--minutes'"),
        ("alignment dapo trainer.total_steps=3", "there is no such key"),
        ("alignment gkd gkd.lambda=1", "the nearest known key is gkd.lmbda"),
        ("alignment dapo capture.detial=sketch", "there is no such key"),
        ("alignment ablate --factor a:actor_rollout_ref.model.fused=true", "there is no such key"),
        ("pytest --emulate", "pytest has no option --emulate"),
        ("pytest -m npus", "no marker npus"),
        ("pytest tests/unit/nowhere.py", "no test file tests/unit/nowhere.py"),
        ("pytest tests/unit/test_readme.py::test_nothing", "has no test test_nothing"),
        ("python scripts/nothing.py", "no file scripts/nothing.py"),
        ("python -m alignment.nothing", "no module alignment.nothing"),
        ("scripts/nothing.sh VENV", "no file scripts/nothing.sh"),
        ("aligment run", "no program aligment"),
        ("true && FOO=1 alignment rnu | cat", "no command 'rnu'"),
        ("echo $(alignment rnu)", "no command 'rnu'"),
        ("alignment bisect run --bad B.yaml --probe 'alignment rnu'", "no command 'rnu'"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line, said, pytestconfig):
    command = Command(page=Path("page.md"), line=1, text=line)
    faults = [fault for words in programs(command) if (fault := fault_of(words, pytestconfig))]
    assert len(faults) == 1 and said in faults[0]


@pytest.mark.parametrize("page", english_pages(), ids=str)
def test_commands_stand_in_bash_blocks_that_bash_can_read(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in blocks(text):
        where = f"{page}:{block.line}"
        assert block.language not in ("console", "sh", "shell", "shell-session"), f"{where}: commands go into ```bash"
        if block.language == "":
            begins = re.match(r"(\$ )?(alignment|pytest|pip|python3?|git|export) ", block.text)
            assert not begins, f"{where}: a block that begins like a command is ```bash, output is ```text"
        if block.language == "bash":
            assert not re.search(r"^\$ ", block.text, flags=re.M), f"{where}: no prompts before commands"
            read = subprocess.run([shutil.which("bash"), "-n"], input=block.text, capture_output=True, text=True)
            assert read.returncode == 0, f"{where}: {read.stderr}"


@pytest.mark.parametrize("page", english_pages(), ids=str)
def test_what_is_not_executed_says_why(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    used = {beginning for command in commands(page) for beginning in command.used}
    for block in blocks(text):
        for declared in block.declarations:
            where = f"{page}:{block.line}"
            if declared["kind"]:
                assert declared["kind"] in NEEDS, f"{where}: needs {declared['kind']}; known are {', '.join(NEEDS)}"
            for beginning in re.findall(r"`([^`]+)`", declared["only"] or ""):
                assert beginning in used, f"{where}: no command of the block begins with {beginning!r}"
            for old, _ in replacements(declared):
                assert old in used, f"{where}: no command of the block that the stand-in is for has {old!r}"
            if declared["put"]:
                assert re.search(f"{PROVES}$", declared["why"]), f"{where}: a stand-in has to end in: {PROVES}"
    for command in commands(page):
        gone = [name for name, _ in named(command.why) if not (ROOT / name).exists()]
        assert gone == [], f"{command.place}: {command.why}"
        assert not command.stand_in or command.needs, f"{command.place}: a stand-in, and nothing that it stands for"
    declarations = sum(len(block.declarations) for block in blocks(text))
    # One that the pattern does not read would silently declare nothing.
    assert declarations == len(re.findall(r"^ *<!--\s*(?:needs|exits|stand-in)\b", text, flags=re.M)), (
        f"{page}: a declaration that stands before no block"
    )


@pytest.mark.parametrize("page", english_pages(), ids=str)
def test_the_command_with_its_stand_in_parses_too(page, pytestconfig):
    made = files_of(page)
    wrong = [
        f"{command.place}: {' '.join(words)}: {fault}"
        for command in commands(page)
        if command.stand_in
        for words in programs(dataclasses.replace(command, text=command.with_stand_in))
        if (fault := fault_of(words, pytestconfig, made))
    ]
    assert wrong == []


@pytest.mark.parametrize("page", english_pages(), ids=str)
def test_what_is_said_to_be_executed_elsewhere_is(page):
    claimed = [command for command in commands(page) if command.needs == "elsewhere"]
    assert [f"{c.place}: {fault}" for c in claimed if (fault := fault_of_claim(c))] == []


JUDGES = "test_the_command_judges_by_stored_curves"
GKD = f"tests/e2e/test_gkd.py::{JUDGES} executes it"
CONTAINERS, BUILD = (
    "tests/unit/ci/test_containers.py",
    "test_build_gives_the_arguments_of_the_stack_and_pushes_when_told",
)
OF_GKD = f"tests/e2e/test_gkd.py: no call or list that {JUDGES} uses has the words of"


@pytest.mark.parametrize(
    ("text", "why", "fault"),
    [
        ("alignment gkd --baseline baselines", GKD, None),
        ("alignment gkd --config x", GKD, OF_GKD),
        ("alignment gdk --baseline x", GKD, OF_GKD),
        ("ci/rendered/atlas-a2/build.sh --push", f"{CONTAINERS}::{BUILD}", None),
        (
            "ci/rendered/cpu/build.sh --push",
            f"{CONTAINERS}::{BUILD}",
            f"{CONTAINERS}: no call or list that {BUILD} uses has the words of",
        ),
        ("alignment gkd", "tests/e2e/test_gkd.py", "tests/e2e/test_gkd.py: which test of it? Write FILE::TEST"),
        ("alignment gkd", "tests/e2e/test_gkd.py::test_it", "tests/e2e/test_gkd.py: there is no test_it"),
        ("alignment gkd", "tests/e2e/test_gkd.py::alignment", "tests/e2e/test_gkd.py: alignment is no test"),
        ("alignment gkd", "tests/e2e/test_gdk.py::test_it", "tests/e2e/test_gdk.py: there is no such file"),
        ("alignment gkd", "minutes", "which test executes it?"),
        ("alignment stress", "docs/diagnose.md", None),
        ("alignment run --seeds 3", "docs/bisect.md", "docs/bisect.md: no command that it executes has the words of"),
        ("alignment gkd --baseline b", "ci/nightly.yaml", None),
        ("alignment stress", "ci/nightly.yaml", "ci/nightly.yaml: no phase of a row on the CPU has the words of"),
        ("pytest -m npu --emulate-npu", ".ci/run", None),
        ("pytest -m npu --junitxml x", ".ci/run", ".ci/run: no command of it has the words of"),
        ("alignment run", ".ci/run", None),
        ("alignment audit", ".ci/run", ".ci/run: no command of it has the words of"),
        ("alignment run --run-dir runs/first", "scripts/newcomer.sh", None),
        ("alignment stress", "scripts/newcomer.sh", "scripts/newcomer.sh: no command of it has the words of"),
        ("true && alignment stress", "scripts/newcomer.sh", "scripts/newcomer.sh: no command of it has the words of"),
    ],
)  # fmt: skip
def test_a_claim_is_held_to_what_it_names(text, why, fault):
    found = fault_of_claim(Command(page=Path("page.md"), line=1, text=text, needs="elsewhere", why=why))
    missing = text.replace("true && ", "")
    assert found == (f"{fault} {missing!r}" if fault and fault.endswith("the words of") else fault)


def test_a_stand_in_is_read():
    text = "<!-- needs npu: a node -->\n"
    text += "<!-- stand-in `--device npu` as `--device cpu`, `/data` as `d` for `alignment run`: {} -->\n"
    proves = "the CPU; it proves the command line and the flow, nothing of the device"
    block = "```bash\nalignment run --device npu --run-dir /data/x\nalignment stress --device npu\n```\n"
    (found,) = blocks(text.format(proves) + block)
    assert replacements(found.declarations[1]) == (("--device npu", "--device cpu"), ("/data", "d"))
    assert re.search(f"{PROVES}$", found.declarations[1]["why"])
    command = Command(page=Path("page.md"), line=1, text="a b", stand_in=(("a", "b"), ("b b", "c")), needs="npu")
    assert (command.with_stand_in, command.executed) == ("c", "stand-in")
    assert Command(page=Path("page.md"), line=1, text="a b", needs="npu").executed == "only parsed"
    there = Command(page=Path("page.md"), line=1, text="a b", needs="elsewhere", why=f"a test; {proves}")
    assert (there.executed, dataclasses.replace(there, why="a test").executed) == ("stand-in", "elsewhere")


def test_a_command_that_is_executed_shortened_is_counted_apart(capsys):
    def shortened(text, **declared):
        return Command(page=Path("page.md"), line=1, text=text, **declared).shortened_by

    assert shortened("alignment dapo --config x.yaml") == "--executor inprocess trainer.total_training_steps=2"
    assert shortened("alignment dapo --executor inprocess trainer.total_training_steps=2") == ""
    assert shortened("alignment stress --minutes 30") == "--minutes=0.05"
    assert shortened("alignment rollout") == shortened("alignment audit --list") == ""
    assert shortened("alignment audit", needs="elsewhere", why="a test") == ""
    assert shortened("alignment audit --device npu", needs="npu", stand_in=(("npu", "cpu"),)) == "--seeds 1"
    main()
    *lines, last = capsys.readouterr().out.splitlines()
    named = [line for line in lines if ": shortened by " in line]
    counts = re.search(r"\((\d+) of them shortened\).*\((\d+) shortened\).*\((\d+) shortened\)", last).groups()
    assert len(named) == sum(map(int, counts)) > 0


def test_verdicts_are_read_from_the_output_that_stands_below_a_block():
    caught = "3 of 3 defects caught, 3 placed right"
    output = f"ALIGNED: 73 of 73 checks in 29 s\nfirst divergence: step 1, rollout 0.5\n{caught}, 0 false alarms"
    assert promised(output) == ("ALIGNED:", "first divergence: step 1, rollout", caught)
    assert promised("unit: 36 to do\n  ALIGNED: no\nNOT SHOWN TO BE ALIGNED: 1") == ()
    compared = [c for c in commands(Path("docs/tutorial.md")) if c.text.startswith("alignment compare runs/good")]
    assert [c.promises[:2] for c in compared] == [
        ("first misaligned: step 1 rollout: first introduced divergence: model.layers.0.mlp", "MISALIGNED:")
    ]


def test_statements_are_complete():
    text = "a \\\n  --b  # c\n# only a comment\ncat > f <<END\nx: 'y\nEND\necho 'two\nlines' && b\n"
    text += "for i in 1 2; do\n  c $i\ndone\n"
    assert [line for line, _ in statements(text)] == [0, 3, 6, 8]
    assert simple_commands("A=1 a --x 'y z' > out 2>&1 && b | c; ! d") == [["a", "--x", "y z"], ["b"], ["c"], ["d"]]
    assert simple_commands("for i in 1 2; do\n  c $i\ndone") == [["c", "$i"]]
    assert simple_commands("python -c 'a\nb' # c\nd") == [["python", "-c", "a\nb"], ["d"]]
    assert simple_commands("cat > f <<END\nalignment rnu\nEND") == [["cat"]]


def test_twins_are_found():
    assert twin_of(Path("docs/a.md")) == Path("docs/a.zh-CN.md")
