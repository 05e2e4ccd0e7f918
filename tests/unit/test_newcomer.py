"""The newcomer's path: its steps are the documentation's own blocks, and what is not as the pages say fails it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from alignment.numerics.verdict import Outcome
from alignment.report.night_evidence import gather_evidence
from alignment.report.night_matrix import read_matrix

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "newcomer.sh"
README = """# A
```bash
true && alignment run
```

```text
ALIGNED: 70 pass
```
"""
TUTORIAL = """# T
## 1. Train
<!-- needs long: installs -->

```bash
export TOLD=yes
```

<!-- needs npu: a node -->

```bash
alignment never
```

## 2. See the red
<!-- exits 1: the fault has to be found -->

```bash
alignment run --fault mine.py:mine
```

```text
what is printed
MISALIGNED: 12 fail, 48 pass
```

## 3. Compare
<!-- exits 1: they diverge -->

```bash
alignment compare a b
```

```text
first misaligned: step 1 rollout: first introduced divergence: model.layers.0.mlp (seen at x), in args.0: gain
```

## 4. Audit
```bash
test "$TOLD" = yes && alignment audit
```

```text
1 of 1 defects caught, 1 placed right, 1 by the cheapest layer; 0.3 s
```
"""
ALIGNMENT = """#!/bin/sh
case "$*" in
  run) echo "ALIGNED: 69 pass" ;;
  "run --fault mine.py:mine") echo "MISALIGNED: 11 fail"; exit 1 ;;
  "compare a b")
    echo "first misaligned: step 1 rollout: first introduced divergence: model.layers.0.mlp (seen)"
    exit 1 ;;
  audit) echo "1 of 1 defects caught, 1 placed right, and so on" ;;
  *) echo "no such command: $*" >&2; exit 2 ;;
esac
"""


def cases(path):
    """(name without its number, what failed or nothing) of the cases of a JUnit file."""
    found = ElementTree.parse(path).getroot().findall("testsuite/testcase")
    names = [case.get("name") for case in found]
    assert [name.partition(" ")[0] for name in names] == [f"{n:02d}" for n in range(len(names))]
    failures = [case.find("failure") for case in found]
    return [(name.partition(" ")[2], "" if f is None else f.get("message")) for name, f in zip(names, failures)]


def newcomer(*arguments, **environment):
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.fixture
def walk(tmp_path):
    """Walks the path of a small repository with a stand-in for the suite, either of them changed."""

    def go(*options, readme=README, tutorial=TUTORIAL, alignment=ALIGNMENT, history=True, **environment):
        repository, tools = tmp_path / "repository", tmp_path / "bin"
        (repository / "docs").mkdir(parents=True)
        tools.mkdir()
        (repository / "README.md").write_text(readme)
        (repository / "docs" / "tutorial.md").write_text(tutorial)
        (tools / "alignment").write_text(alignment)
        (tools / "alignment").chmod(0o755)
        commit = "git init -q && git add -A && git -c user.name=n -c user.email=n@example.org commit -q -m pages"
        if history:
            subprocess.run(["bash", "-euc", commit], cwd=repository, check=True)
        return newcomer(*options, repository, tmp_path / "new", PATH=f"{tools}:{os.environ['PATH']}", **environment)

    return go


def test_the_steps_are_the_pages_own_blocks():
    listed = newcomer("--list", ROOT)
    assert listed.returncode == 0, listed.stderr
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/tutorial.md")}
    commands = re.findall(r"^    (.*)$", listed.stdout, flags=re.M)
    assert commands[0] == re.findall(r"^```bash\n(.*?)^```", pages["README.md"], flags=re.S | re.M)[0].strip()
    tutorial = "".join(re.findall(r"^```bash\n(.*?)^```", pages["docs/tutorial.md"], flags=re.S | re.M))
    assert commands[1:] == tutorial.splitlines()
    titles = re.findall(r"^docs/tutorial.md: (.+)$", listed.stdout, flags=re.M)
    assert titles and all(f"## {title}\n" in pages["docs/tutorial.md"] for title in titles)


def test_the_tutorial_promises_a_red_run_the_module_and_a_caught_fault():
    listed = newcomer("--list", ROOT).stdout
    red = re.search(r"--fault (\w+\.py:\w+) --run-dir \S+\n  exit code 1; says: MISALIGNED:", listed)
    assert red and f"alignment audit --faults {red[1]}\n  exit code 0; says: 1 of 1 defects caught" in listed
    assert re.search(r"first introduced divergence: model\.layers\.0\.mlp; says", listed)


def test_a_path_that_is_as_the_pages_say_ends_with_its_times(walk):
    done = walk()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"clone to verdict: \d+ s of 600 s", done.stdout)
    assert re.search(r"clone to the module of the own fault: \d+ s of 3600 s", done.stdout)
    assert re.search(r"^as the pages say, in \d+ s", done.stdout, flags=re.M)
    assert "never" not in done.stdout  # what needs a device is not the newcomer's


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("ALIGNED: 69 pass", "MISALIGNED: 1 fail", "the page says 'ALIGNED:'"),
        ('echo "ALIGNED: 69 pass"', "exit 2", "the page says exit code 0"),
        ("11 fail\"; exit 1", "11 fail\"; exit 0", "the page says exit code 1"),
        ("divergence: model.layers.0.mlp", "divergence: model.layers.0.self_attn", "divergence: model.layers.0.mlp'"),
        ("caught, 1 placed", "caught, 0 placed", "the page says '1 of 1 defects caught, 1 placed right'"),
    ],
)  # fmt: skip
def test_a_step_that_does_something_else_fails_the_path(walk, right, wrong, said):
    assert right in ALIGNMENT
    done = walk(alignment=ALIGNMENT.replace(right, wrong))
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr
    assert "as the pages say, in" not in done.stdout


def test_its_steps_are_a_junit_file_that_the_night_believes(walk, tmp_path):
    done = walk("--junitxml", tmp_path / "junit.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    walked = ["README.md: A", *(f"docs/tutorial.md: {n}" for n in ("2. See the red", "3. Compare", "4. Audit"))]
    assert cases(tmp_path / "junit.xml") == [
        ("README.md: A", ""), ("docs/tutorial.md: 1. Train", ""), *((name, "") for name in walked[1:]),
    ]  # fmt: skip
    phase = read_matrix(ROOT / "ci" / "nightly.yaml").phases["newcomer"]
    evidence = gather_evidence(phase, tmp_path, device="cpu", require=True)
    assert evidence.problems == [] and {v.outcome for v in evidence.verdicts} == {Outcome.PASS}


def test_a_step_that_does_something_else_is_a_failed_case_with_what_the_page_says(walk, tmp_path):
    wrong = ALIGNMENT.replace("caught, 1 placed", "caught, 0 placed").replace("and so on", '<&\\"\033[1m')
    assert walk("--junitxml", tmp_path / "junit.xml", alignment=wrong).returncode == 1
    assert cases(tmp_path / "junit.xml")[-1] == (
        "docs/tutorial.md: 4. Audit", "the page says '1 of 1 defects caught, 1 placed right'",
    )  # fmt: skip
    phase = read_matrix(ROOT / "ci" / "nightly.yaml").phases["newcomer"]
    evidence = gather_evidence(phase, tmp_path, device="cpu", require=True)
    (red,) = [v for v in evidence.verdicts if v.outcome is not Outcome.PASS]
    assert red.outcome is Outcome.FAIL and "the page says '1 of 1 defects caught" in red.reason


def test_a_folder_without_history_is_cloned_as_one_commit(walk, tmp_path):
    done = walk(history=False)
    assert done.returncode == 0, done.stdout + done.stderr
    log = ["git", "-C", str(tmp_path / "new" / "alignment"), "log", "--oneline"]
    assert len(subprocess.run(log, capture_output=True, text=True, check=True).stdout.splitlines()) == 1
    assert not (tmp_path / "repository" / ".git").exists()


def test_a_path_over_its_bar_fails(walk):
    slow = walk(alignment=ALIGNMENT.replace("  run)", "  run) sleep 2;"), NEWCOMER_VERDICT="1")
    assert slow.returncode == 1
    assert re.search(r"clone to verdict: \d+ s of 1 s\n  FAIL: over the bar: clone to verdict", slow.stdout)


@pytest.mark.parametrize(
    ("page", "right", "wrong", "said"),
    [
        ("readme", "alignment run", "alignment dapo", "README.md: the first bash block does not end in"),
        ("readme", "ALIGNED: 70", "70", "README.md: no output ends in a line 'ALIGNED: …'"),
        ("tutorial", "first misaligned", "somewhere", "docs/tutorial.md: no step promises 'first misaligned: '"),
        ("tutorial", "exits 1: the fault", "the fault", "docs/tutorial.md: no step with --fault is declared to exit 1"),
    ],
)
def test_a_page_that_lacks_what_the_path_needs_is_named(walk, page, right, wrong, said):
    texts = {"readme": README, "tutorial": TUTORIAL}
    assert right in texts[page]
    done = walk(**{page: texts[page].replace(right, wrong)})
    assert done.returncode == 2 and said in done.stderr, done.stdout + done.stderr


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "file").touch()
    done = newcomer(ROOT, tmp_path)
    assert done.returncode == 2 and "is not empty" in done.stderr
