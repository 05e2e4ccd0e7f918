"""Executes the install steps of a container recipe where there is no container engine::

    python ci/containers/try_recipe.py cpu --into DIR [--system]
    python ci/containers/try_recipe.py cuda --into DIR --resolve

A fresh virtual environment stands for the base image and ``DIR/opt`` for ``/opt``; the files git knows are the build
context. Steps that install packages of the system run with ``--system`` only (as root, on Debian). It says of every
step whether it was executed, and stops at the first that fails. It shows that the steps work, not that the base image
does.

With ``--resolve`` pip looks every pin up in its index, for this machine and this Python, and installs none
(``pip install --dry-run``): a release that is gone or has no file for them fails the step. Nothing is built from source
that has a wheel, nothing taken from a repository, and nothing executed that needs the installed packages.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a recipe, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) if " " in line else (line, "") for line in joined.splitlines() if line.strip()]


def build_arguments(recipe: str) -> dict[str, str]:
    """What the rendered build script of a recipe's first row gives it."""
    for script in sorted((ROOT / "ci" / "rendered").glob("*/build.sh")):
        text = script.read_text(encoding="utf-8")
        if f"ci/containers/{recipe}.Containerfile" in text:
            return dict(re.findall(r"--build-arg (\w+)=([^\s\"$]+)", text))
    raise SystemExit(f"no row is built by the recipe {recipe}")


def resolving(command: str) -> str:
    """What of a RUN an index can answer: its installations of pins, without installing, and of wheels alone."""
    parts = [part.strip() for part in command.split("&&")]
    asked = [part for part in parts if "pip install" in part and "-e" not in part.split()]
    dry = " && ".join(asked).replace("pip install", "pip install --quiet --dry-run")
    return re.sub(r" --no-binary \S+", "", dry)


class Sandbox:
    """Where the steps are executed: environment, working directory, and what ``/opt`` is here."""

    def __init__(self, folder: Path, arguments: dict[str, str]) -> None:
        self.folder = folder
        self.given = arguments
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        names = ("HOME", "LANG", "PIP_INDEX_URL", "PIP_CONFIG_FILE")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        self.environ = {**kept, "PATH": f"{folder / 'venv' / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin"}
        self.arguments: dict[str, str] = {}
        self.directory = folder

    def here(self, text: str) -> str:
        return text.replace("/opt/", f"{self.folder}/opt/")

    def filled(self, text: str) -> str:
        values = {**self.environ, **self.arguments}
        return self.here(re.sub(r"\$\{(\w+)\}", lambda match: values.get(match[1], ""), text))

    def copy(self, source: str, target: str) -> None:
        """From the files git knows."""
        known = subprocess.run(["git", "ls-files", "-z", source], cwd=ROOT, capture_output=True, text=True, check=True)
        names = [name for name in known.stdout.split("\0") if name]
        if not names:
            raise SystemExit(f"COPY {source}: git knows no such file")
        for name in names:
            to = Path(target) if names == [source] else self.directory / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to)

    def step(self, instruction: str, rest: str, *, system: bool, resolve: bool = False) -> str:
        """Carries out one instruction; says what was done with it."""
        if instruction == "ARG":
            name, _, default = rest.partition("=")
            self.arguments[name] = self.given.get(name, default)
            return f"given {self.arguments[name]!r}"
        if instruction == "ENV":
            for name, value in re.findall(r"(\w+)=(\S+)", rest):
                self.environ[name] = self.filled(value)
            return "set"
        if instruction == "WORKDIR":
            self.directory = Path(self.here(rest.strip() + "/"))
            self.directory.mkdir(parents=True, exist_ok=True)
            return "made"
        if instruction == "COPY":
            source, target = self.filled(rest).split()
            self.copy(source, target)
            return "copied"
        if instruction != "RUN":
            return "not executed: nothing to install"
        if "apt-get" in rest and not system:
            return "not executed: packages of the system, which --system installs"
        if resolve:
            rest = resolving(rest)
            if not rest:
                return "not executed: it takes more than an index"
        command = self.here(rest)
        environ = {**self.environ, **self.arguments}
        if subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=self.directory, env=environ).returncode:
            raise SystemExit(f"failed: RUN {rest}")
        return "resolved, not installed" if resolve else "executed"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("::")[0])
    parser.add_argument("recipe", help="name of a Containerfile")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    parser.add_argument("--system", action="store_true", help="install packages of the system too")
    parser.add_argument("--resolve", action="store_true", help="look the pins up in the package index, install none")
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True)
    text = (ROOT / "ci" / "containers" / f"{options.recipe}.Containerfile").read_text(encoding="utf-8")
    sandbox = Sandbox(options.into.resolve(), build_arguments(options.recipe))
    for instruction, rest in instructions(text):
        began = time.monotonic()
        done = sandbox.step(instruction, rest, system=options.system, resolve=options.resolve)
        print(f"{instruction} {' '.join(rest.split())[:100]}: {done} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
