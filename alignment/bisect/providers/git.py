"""Worktrees: repositories at a revision, installed editable over releases, rebuilt when their native files changed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from alignment.bisect.history import resolve
from alignment.bisect.process import Finished, run_process, without_addresses
from alignment.bisect.providers.base import Environment, NotBuilt
from alignment.bisect.providers.venv import BUILD_SECONDS, VenvProvider, locked, site_packages
from alignment.bisect.stack import Pin, Stack
from alignment.errors import InputError
from alignment.files import read_json, write_json

# A change in one of these makes an installed worktree stale; a change in Python files does not.
NATIVE = re.compile(
    r"\.(c|cc|cpp|cxx|cu|cuh|h|hpp|pyx|pxd|rs|proto|cmake|asm|s)$|(^|/)(CMakeLists\.txt|setup\.py|setup\.cfg|pyproject\.toml|Cargo\.(toml|lock)|Makefile)$",
    re.IGNORECASE,
)
COMPILED = re.compile(r"\.(c|cc|cpp|cxx|cu|pyx|rs)$", re.IGNORECASE)


@dataclass
class GitProvider:
    """Releases by ``venv``; every git pin as a worktree inside the environment.

    A worktree stays where it is and changes its revision, so a probe costs a checkout. It is installed once, and again
    when a native file or its metadata changed. ``repositories`` are local clones by component; the pin's own
    repository is used where it is a local folder. ``slot`` keeps simultaneous probes in environments of their own.
    """

    venv: VenvProvider
    repositories: dict[str, Path] = field(default_factory=dict)
    name: str = "git"

    @property
    def identity(self) -> str:
        return json.dumps([self.name, self.venv.identity])

    def prepare(self, stack: Stack, *, slot: int = 0) -> Environment:
        began = time.monotonic()
        pins = {n: p for n, p in stack.pins.items() if p.kind == "git"}
        releases = stack.with_pins({n: None for n in pins})
        root = self.venv.build(releases, suffix=f"-slot{slot}" if pins else "")
        environment = self.venv.environment(releases, root, seconds=0.0)
        places = dict(environment.places)
        with locked(root.with_suffix(".checkout")):
            for name, pin in sorted(pins.items()):
                tree = root / "src" / name
                self._check_out(name, pin, tree)
                project = tree / stack.component(name).subdirectory
                self._install(name, project, root)
                places[name] = (project,)
        return Environment(
            stack=stack,
            python=environment.python,
            variables=environment.variables,
            places=places,
            seconds=time.monotonic() - began,
        )

    def _check_out(self, name: str, pin: Pin, tree: Path) -> None:
        repository = Path(self.repositories.get(name) or pin.repository)
        if not repository.is_dir():
            raise NotBuilt(
                "pins", f"{name}: there is no local clone of its repository; name one with --repository {name}=PATH"
            )
        try:
            revision = resolve(repository, pin.revision)
        except InputError as error:
            raise NotBuilt("pins", str(error)) from None
        if not (tree / ".git").exists():
            shutil.rmtree(tree, ignore_errors=True)
            tree.parent.mkdir(parents=True, exist_ok=True)
            told = hashlib.sha256(str(repository.resolve()).encode()).hexdigest()[:16]
            with locked(self.venv.directory / f"{told}.worktrees"):
                _git(repository, "worktree", "prune")
                _git(repository, "worktree", "add", "--force", "--detach", str(tree), revision)
        # A checkout that was killed half way is repaired by doing it again, by force.
        (_git_dir(tree) / "index.lock").unlink(missing_ok=True)
        _git(tree, "checkout", "--quiet", "--force", "--detach", revision)
        _git(tree, "clean", "--quiet", "-d", "--force")
        if _git(tree, "rev-parse", "HEAD").stdout.strip() != revision:
            raise NotBuilt("environment", f"{name}: the worktree is not at {revision}")

    def _install(self, name: str, tree: Path, root: Path) -> None:
        if not tree.is_dir():
            raise NotBuilt("build", f"{name}: the revision has no folder {tree.name}")
        files = _git(tree, "ls-tree", "-r", "HEAD").stdout.splitlines()  # from this folder downwards
        native = [line for line in files if NATIVE.search(line.split("\t", 1)[1])]
        digest = hashlib.sha256("\n".join(native).encode()).hexdigest()
        marker = root / "src" / f"{name}.installed.json"
        if marker.is_file() and read_json(marker).get("native") == digest:
            return
        marker.unlink(missing_ok=True)
        compiled = any(COMPILED.search(line) for line in native)
        metadata = None if compiled else plain_metadata(tree)
        if metadata is not None:
            link_package(tree, metadata, site_packages(root))
        else:
            self.venv.install(root, ["-e", str(tree)], options=("--no-build-isolation",))
        write_json(marker, {"native": digest, "compiled": compiled})


def _git(where: Path, *arguments: str) -> Finished:
    done = run_process(["git", "-C", str(where), *arguments], timeout=BUILD_SECONDS)
    if done.code != 0:
        raise NotBuilt("build", f"git {arguments[0]} failed: {without_addresses(done.stderr.strip()[-300:])}")
    return done


def _git_dir(tree: Path) -> Path:
    link = tree / ".git"
    if link.is_file():
        return Path(link.read_text().removeprefix("gitdir:").strip())
    return link


def plain_metadata(tree: Path) -> dict[str, str] | None:
    """Name, version and source folder of a pure-Python project with static metadata; None where a build has to tell."""
    file = tree / "pyproject.toml"
    if not file.is_file() or (tree / "setup.py").exists():
        return None
    from alignment.bisect.stack import read_mapping

    try:
        data = read_mapping(file)
    except InputError:
        return None
    project = data.get("project") or {}
    backend = (data.get("build-system") or {}).get("build-backend", "setuptools.build_meta")
    if not project.get("name") or not project.get("version") or not backend.startswith("setuptools"):
        return None
    source = tree / "src" if (tree / "src").is_dir() else tree
    return {"name": str(project["name"]), "version": str(project["version"]), "source": str(source)}


def link_package(tree: Path, metadata: dict[str, str], site: Path) -> None:
    """What an editable install of a pure-Python project comes to: its folder on the path, its name and version."""
    plain = re.sub(r"[-_.]+", "_", metadata["name"]).lower()
    for old in site.glob(f"{plain}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{plain}-{metadata['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n")
    (info / "direct_url.json").write_text(json.dumps({"url": tree.as_uri(), "dir_info": {"editable": True}}))
    (info / "INSTALLER").write_text("alignment\n")
    (site / f"a_{plain}.pth").write_text(metadata["source"] + "\n")
