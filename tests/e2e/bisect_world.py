"""A git repository with three packages, made in an instant: a planted fault, a stretch that does not build, a flaky
commit.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("alpha", "beta", "gamma")
COMMITS = 200
GOOD_VALUE, BAD_VALUE = 0.072169, 0.088388  # 1/√192 and 1/√128: MLA's softmax scale and the wrong one
PROBE_FILE = "probe.py"
PROBE = f'"$ALIGNMENT_BISECT_PYTHON" {PROBE_FILE}'
_PROBE = f"""
import json, sys
import alpha, beta, gamma
value = beta.softmax_scale() + alpha.offset() + gamma.offset()
print(json.dumps({{"metric": value, "check": "softmax_scale", "where": "attention"}}))
sys.exit(0 if abs(value - {GOOD_VALUE}) < abs(value - {BAD_VALUE}) else 1)
"""


@dataclass(frozen=True)
class Planted:
    """Where things are, by the number of the commit (0 is the first). ``broken`` is a range of commits."""

    fault: int
    broken: range = range(0)
    flaky: int = -1


def make_repository(folder: Path, planted: Planted) -> list[str]:
    """Writes the history with ``git fast-import``; commit ``i`` changes package ``i % 3``. Returns the revisions in
    order.
    """
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    state = {}
    stream = []
    for number in range(COMMITS):
        files = {}
        names = PACKAGES if number == 0 else (PACKAGES[number % 3],)
        for name in names:
            if number == 0:
                files[f"{name}/pyproject.toml"] = f'[project]\nname = "{name}"\nversion = "1.0"\n'
            files[f"{name}/{name}/__init__.py"] = _source(name, number, planted, folder)
        state |= files
        message = f"Change {names[0]} ({number})"
        stream.append(f"commit refs/heads/main\nmark :{number + 1}\n")
        stream.append(f"committer A Person <a@example.org> {1_700_000_000 + 3600 * number} +0000\n")
        stream.append(f"data {len(message)}\n{message}\n")
        if number:
            stream.append(f"from :{number}\n")
        for path, text in files.items():
            stream.append(f"M 100644 inline {path}\ndata {len(text.encode())}\n{text}\n")
    subprocess.run(["git", "-C", str(folder), "fast-import", "--quiet"], input="".join(stream).encode(), check=True)
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-list", "--reverse", "main"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def _source(name: str, number: int, planted: Planted, folder: Path) -> str:
    if number in planted.broken and name == PACKAGES[planted.fault % 3]:
        return f"# {number}\nraise ImportError('half of a change')\n"
    if name != "beta":
        return f"# {number}\ndef offset():\n    return 0.0\n"
    value = BAD_VALUE if number >= planted.fault else GOOD_VALUE
    if number == planted.flaky:
        # The other result on every first of two calls, by a file beside the repository.
        return (
            f"# {number}\nfrom pathlib import Path\n\n\ndef softmax_scale():\n"
            f"    told = Path({str(folder) + '.calls'!r})\n"
            f"    calls = len(told.read_text()) if told.exists() else 0\n    told.write_text('.' * (calls + 1))\n"
            f"    return {BAD_VALUE} if calls % 2 == 0 else {GOOD_VALUE}\n"
        )
    return f"# {number}\ndef softmax_scale():\n    return {value}\n"


def write_suite(folder: Path) -> Path:
    """A suite of one shell probe."""
    folder.mkdir(parents=True)
    (folder / PROBE_FILE).write_text(_PROBE)
    return folder


def write_stack(path: Path, repository: Path, revision: str | dict[str, str], *, date: str = "") -> Path:
    """A stack file with the three packages at one revision, or at one each."""
    lines = ["schema: 1", f"name: {path.stem}", *([f"date: {date}"] if date else []), "define:"]
    lines += [f"  {name}: {{subdirectory: {name}}}" for name in PACKAGES]
    lines.append("components:")
    for name in PACKAGES:
        at = revision if isinstance(revision, str) else revision[name]
        lines.append(f"  {name}: {{git: {repository}, revision: '{at}'}}")
    path.write_text("\n".join(lines) + "\n")
    return path
