"""Virtual environments: releases from a package index by uv (or pip), laid over a base environment that is shared."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from alignment.bisect.process import Finished, run_process, without_addresses
from alignment.bisect.providers.base import Environment, NotBuilt
from alignment.bisect.stack import Stack
from alignment.bisect.versions import same
from alignment.files import write_json

DONE = "environment.json"
BUILD_SECONDS = 3600.0
# What an installer says when it was the network that failed, and not the package.
_NETWORK = re.compile(
    r"timed? ?out|connection (error|refused|reset)|temporary failure|name resolution|network is unreachable|dns error|"
    r"failed to fetch|error sending request|50[234] (bad gateway|service|gateway)",
    re.IGNORECASE,
)


@dataclass
class VenvProvider:
    """One environment per set of releases, kept under ``directory`` and used again.

    ``base`` is the interpreter of an environment whose packages are seen through the new one (torch and everything
    else the stack does not pin, or pins as the base has it): environments stay small. Packages are installed without
    their dependencies, exactly as pinned, unless ``dependencies`` asks for those. ``extra`` are further requirements
    for every environment. The installer is first asked to do without the network, so that after the first time none
    is needed.
    """

    directory: Path
    base: str = sys.executable
    extra: tuple[str, ...] = ()
    offline: bool = False
    dependencies: bool = False
    uv: str | None = field(default_factory=lambda: find_uv())
    name: str = "venv"

    @property
    def identity(self) -> str:
        """The base and the extras; what is installed follows from the stack."""
        return json.dumps([self.name, self.base, list(self.extra), self.dependencies])

    def prepare(self, stack: Stack, *, slot: int = 0) -> Environment:
        began = time.monotonic()
        unfit = [n for n, p in stack.pins.items() if p.kind == "git"]
        if unfit:
            raise NotBuilt("pins", f"{', '.join(unfit)}: revisions need the git provider")
        root = self.build(stack)
        return self.environment(stack, root, seconds=time.monotonic() - began)

    def environment(self, stack: Stack, root: Path, *, seconds: float) -> Environment:
        """A built folder as an environment, with the places its packages may come from."""
        own = site_packages(root)
        record = json.loads((root / DONE).read_text())
        places = {}
        for name in stack.pins:
            if not stack.component(name).external and name != "python":
                places[name] = tuple(Path(p) for p in record["base"]) if name in record["shared"] else (own,)
        return Environment(
            stack=stack,
            python=str(root / "bin" / "python"),
            places=places,
            seconds=seconds,
            variables={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "VIRTUAL_ENV": str(root)},
        )

    def build(self, stack: Stack, *, suffix: str = "") -> Path:
        """The folder of the environment with the releases of ``stack``, made if it is not there whole."""
        releases = {n: p.version for n, p in sorted(stack.pins.items()) if p.kind == "release"}
        wanted = json.dumps([releases, self.base, list(self.extra), self.dependencies], sort_keys=True)
        root = self.directory / (hashlib.sha256(wanted.encode()).hexdigest()[:16] + suffix)
        with locked(self.directory / f"{root.name}.lock"):
            if not (root / DONE).is_file():
                shutil.rmtree(root, ignore_errors=True)
                try:
                    self._make(root, stack, releases)
                except BaseException:
                    shutil.rmtree(root, ignore_errors=True)
                    raise
        return root

    def _make(self, root: Path, stack: Stack, releases: Mapping[str, str]) -> None:
        base = self._ask_base(stack)
        python = releases.get("python")
        if python and not (same(base["python"], python) or base["python"].startswith(python + ".")):
            interpreter, paths, there = python, [], {}
        else:
            interpreter, paths, there = self.base, base["paths"], base["versions"]
        shared = [n for n, v in releases.items() if n != "python" and there.get(n) and same(there[n], v)]
        install = [
            f"{stack.component(n).distribution}=={v}" for n, v in releases.items() if n != "python" and n not in shared
        ]
        if self.uv:
            self._checked(
                [self.uv, "venv", "--quiet", "--python", interpreter, str(root)], "the environment could not be made"
            )
        elif interpreter == self.base:
            self._checked([self.base, "-m", "venv", "--without-pip", str(root)], "the environment could not be made")
        else:
            raise NotBuilt("build", f"Python {python} is not this one, and uv, which could fetch it, is not installed")
        if paths:
            # After the environment's own folder on the path: what is installed here wins. `addsitedir` reads the base's
            # own .pth files too (editable installs).
            lines = [f"import site; site.addsitedir({p!r})" for p in paths]
            (site_packages(root) / "zz_base.pth").write_text("\n".join(lines) + "\n")
        if install or self.extra:
            self.install(root, [*install, *self.extra], dependencies=self.dependencies)
        write_json(root / DONE, {"releases": dict(releases), "shared": shared, "base": paths})

    def _ask_base(self, stack: Stack) -> dict:
        """Python version, site folders and the versions of the stack's packages in the base environment."""
        code = (
            "import json,platform,site,sys,sysconfig,importlib.metadata as m\n"
            "def v(d):\n"
            "    try: return m.version(d)\n"
            "    except m.PackageNotFoundError: return None\n"
            "p=sysconfig.get_paths()\n"
            "print('\\n'+json.dumps({'python':platform.python_version(),'paths':list(dict.fromkeys([p['purelib'],p['platlib']])),"
            "'versions':{n:v(d) for n,d in json.loads(sys.argv[1]).items()}}))"
        )
        asked = {n: stack.component(n).distribution for n in stack.pins if stack.component(n).distribution}
        done = self._checked([self.base, "-c", code, json.dumps(asked)], "the base environment gives no answer")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def install(
        self, root: Path, what: list[str], *, options: tuple[str, ...] = (), dependencies: bool = False
    ) -> None:
        """Installs requirements, with or without their dependencies; without the network where the cache has them."""
        options = options if dependencies else ("--no-deps", *options)
        python = str(root / "bin" / "python")
        if self.uv:
            command = [self.uv, "pip", "install", "--quiet", "--python", python, *options]
            if self._run([*command, "--offline", *what]).code == 0:
                return
            if self.offline:
                raise NotBuilt("build", f"not in the cache, and the network is not to be used: {', '.join(what)}")
            done = self._run([*command, *what])
        else:
            command = [self.base, "-m", "pip", "--python", python, "install", "--quiet", *options]
            done = self._run([*command, *what])
        if done.code != 0:
            raise NotBuilt(
                "build",
                f"{', '.join(what)} cannot be installed: {_brief(done)}",
                transient=bool(_NETWORK.search(done.stderr)),
            )

    def _checked(self, command: list[str], problem: str) -> Finished:
        done = self._run(command)
        if done.code != 0:
            raise NotBuilt("build", f"{problem}: {_brief(done)}", transient=bool(_NETWORK.search(done.stderr)))
        return done

    def _run(self, command: list[str]) -> Finished:
        try:
            return run_process(
                command,
                timeout=BUILD_SECONDS,
                variables={"UV_NO_PROGRESS": "1", "UV_LINK_MODE": os.environ.get("UV_LINK_MODE", "copy")},
            )
        except OSError as error:
            raise NotBuilt("build", f"{command[0]} cannot be run ({error})") from None


def _brief(done: Finished) -> str:
    if done.code is None:
        return "its time was up"
    return without_addresses(" ".join(done.stderr.split())[-600:])


def find_uv() -> str | None:
    """The uv program on the path or of the Python package uv; None where there is none."""
    found = shutil.which("uv")
    if found:
        return found
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        return None


def site_packages(root: Path) -> Path:
    """Where a virtual environment keeps its packages."""
    return next(iter(sorted((root / "lib").glob("python*/site-packages"))))


@contextmanager
def locked(path: Path):
    """Holds a file lock: one process or thread at a time builds a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
