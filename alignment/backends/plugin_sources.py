"""Where the source of an Ascend plugin is, and which version and commit of it: a tree, a revision, a wheel, an install.

The suite drives the plugins' own files. It carries none of them: it is told where they are, or finds them installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from alignment.errors import InputError, UnavailableError

__all__ = ["MINDSPEED", "VLLM_ASCEND", "Plugin", "PluginSource", "asked_sources", "opened"]

INDEX = "index:"
_DOWNLOAD_SECONDS = 300
_GIT_SECONDS = 120
_SHOWN = 12  # digits of a commit or digest


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One plugin and the file of it that is driven.

    Attributes:
        name: as its project writes it.
        package: what is imported, and the folder of the tree that holds it.
        distribution: its name in a package index.
        option, variable: the pytest option and the environment variable that name a source.
        driven: the file that is driven, relative to the tree.
    """

    name: str
    package: str
    distribution: str
    option: str
    variable: str
    driven: str


MINDSPEED = Plugin(
    name="MindSpeed",
    package="mindspeed",
    distribution="mindspeed",
    option="--mindspeed-src",
    variable="ALIGNMENT_MINDSPEED_SRC",
    driven="mindspeed/core/transformer/flash_attention/flash_attention/adaptor.py",
)
VLLM_ASCEND = Plugin(
    name="vLLM-Ascend",
    package="vllm_ascend",
    distribution="vllm-ascend",
    option="--vllm-ascend-src",
    variable="ALIGNMENT_VLLM_ASCEND_SRC",
    driven="vllm_ascend/attention/mla_v1.py",
)


@dataclass(frozen=True, kw_only=True)
class PluginSource:
    """A tree with the plugin's package in it, ready for ``sys.path``, and what is known of where it comes from.

    Attributes:
        root: the folder that holds the package.
        version: as the source states it, or None.
        commit: the full commit id, or None where there is no git history.
        modified: whether the tree differs from ``commit``.
        digest: SHA-256 of the driven file, which identifies it where nothing else does.
        origin: where it was found, without a path of this machine.
    """

    plugin: Plugin
    root: Path
    version: str | None
    commit: str | None
    modified: bool
    digest: str
    origin: str

    @property
    def subject(self) -> str:
        """``vLLM-Ascend 0.9.1 (commit 0740d10211fc, tag v0.9.1)``: the name verdicts carry."""
        known = [f"commit {self.commit[:_SHOWN]}{' and changes' if self.modified else ''}"] if self.commit else []
        known += [self.origin] if self.origin else []
        if not self.commit:
            known.append(f"sha256 of {Path(self.plugin.driven).name} {self.digest[:_SHOWN]}")
        return f"{self.plugin.name} {self.version or 'of unknown version'} ({', '.join(known)})"


def asked_sources(plugin: Plugin, given: list[str] | None = None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The sources named on the command line (repeated or comma separated), else in the variable; may be empty."""
    values = given or ([environ[plugin.variable]] if environ.get(plugin.variable) else [])
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


@contextlib.contextmanager
def opened(plugin: Plugin, text: str | None = None) -> Iterator[PluginSource]:
    """The source that ``text`` names, unpacked where it must be and taken away afterwards.

    ``text`` is a source tree; ``REPOSITORY@REVISION`` of a git repository, bare or not, read with ``git archive``; a
    wheel; ``index:VERSION`` for a wheel of the package index; or None for what is installed.

    Raises:
        UnavailableError: nothing is named and nothing is installed, or the index is out of reach or lacks the version.
        InputError: what is named is not the plugin's source.
    """
    with tempfile.TemporaryDirectory(prefix="alignment-plugin-") as folder:
        source = _located(plugin, text, Path(folder))
        if not (source.root / plugin.driven).is_file():
            raise InputError(
                f"not a source of {plugin.name}",
                where=text or source.origin,
                expected=plugin.driven,
                found=_listing(source.root),
                next_step=f"pass the folder that holds {plugin.package}/ with {plugin.option}",
            )
        yield replace(source, digest=hashlib.sha256((source.root / plugin.driven).read_bytes()).hexdigest())


def _located(plugin: Plugin, text: str | None, folder: Path) -> PluginSource:
    if not text:
        return _installed(plugin)
    if text.startswith(INDEX):
        wheel = _downloaded(plugin, text[len(INDEX) :], folder)
        return _wheel(plugin, wheel, folder, origin="wheel of the package index")
    path = Path(text).expanduser()
    if path.is_dir():
        return _tree(plugin, path)
    if path.suffix == ".whl" and path.is_file():
        return _wheel(plugin, path, folder, origin="wheel")
    repository, _, revision = text.rpartition("@")
    if repository and revision and Path(repository).expanduser().is_dir():
        return _revision(plugin, Path(repository).expanduser(), revision, folder)
    raise InputError(
        "there is no such source",
        where=f"{plugin.option} {text}",
        expected="a folder, REPOSITORY@REVISION, a wheel, or index:VERSION",
        found="nothing at that path",
    )


def _source(plugin: Plugin, root: Path, **known) -> PluginSource:
    return PluginSource(**{"plugin": plugin, "root": root, "commit": None, "modified": False, "digest": "", **known})


def _installed(plugin: Plugin) -> PluginSource:
    spec = importlib.util.find_spec(plugin.package)
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(
            f"no source of {plugin.name} was given and {plugin.distribution} is not installed",
            where=plugin.name,
            next_step=f"pass {plugin.option} PATH (or set {plugin.variable})",
        )
    version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(plugin.distribution)
    root = Path(next(iter(spec.submodule_search_locations))).parent
    return _source(plugin, root, version=version, origin="installed")


def _tree(plugin: Plugin, root: Path) -> PluginSource:
    commit = _git(root, "rev-parse", "HEAD") if _git(root, "rev-parse", "--show-cdup") == "" else None
    changed = commit is not None and _git(root, "status", "--porcelain", "--", plugin.package) != ""
    tag = _tag(root, commit) if commit else None
    return _source(
        plugin,
        root.resolve(),
        version=_stated_version(plugin, lambda name: _text(root / name)) or (tag or "").removeprefix("v") or None,
        commit=commit,
        modified=changed,
        origin=f"tag {tag}" if tag else "" if commit else "source tree",
    )


def _revision(plugin: Plugin, repository: Path, revision: str, folder: Path) -> PluginSource:
    commit = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if commit is None:
        raise InputError(
            "the repository does not have that revision (or is no git repository)",
            where=f"{plugin.option} {repository}@{revision}",
            expected="a commit, tag or branch of it",
            found=revision,
        )
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", commit, "--", plugin.package],
        capture_output=True,
        timeout=_GIT_SECONDS,
    )
    if archive.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
    tag = _tag(repository, commit)
    stated = _stated_version(plugin, lambda name: _git(repository, "show", f"{commit}:{name}") or "")
    return _source(
        plugin,
        folder,
        version=stated or (tag or "").removeprefix("v") or None,
        commit=commit,
        origin=f"tag {tag}" if tag else "" if commit.startswith(revision) else revision,
    )


def _wheel(plugin: Plugin, wheel: Path, folder: Path, *, origin: str) -> PluginSource:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except zipfile.BadZipFile as error:
        raise InputError(f"not a wheel ({error})", where=wheel) from None
    # {distribution}-{version}-{tags}.whl, the file name convention of the binary distribution format
    return _source(plugin, folder, version=wheel.name.split("-")[1], origin=origin)


def _downloaded(plugin: Plugin, version: str, folder: Path) -> Path:
    """A wheel for the plugin's own platform: a source distribution would run its build here, and torch_npu's pins."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_24_x86_64"]
    command += ["--dest", str(folder), f"{plugin.distribution}=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise _not_in_index(plugin, version, f"no answer in {_DOWNLOAD_SECONDS} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = ["pip found no wheel", *filter(None, done.stderr.splitlines())]
        raise _not_in_index(plugin, version, lines[-1].removeprefix("ERROR: "))
    return wheels[0]


def _not_in_index(plugin: Plugin, version: str, reason: str) -> UnavailableError:
    return UnavailableError(
        f"{plugin.distribution} {version} cannot be had from the package index: {reason}",
        where=plugin.name,
        next_step=f"pass a source tree with {plugin.option}",
    )


def _stated_version(plugin: Plugin, text_of) -> str | None:
    """The version written in the source itself; None where it is computed at build time."""
    for name, pattern in (
        ("PKG-INFO", r"^Version:\s*(\S+)"),
        (f"{plugin.package}/_version.py", r"^(?:__version__ = )?version = ['\"]([^'\"]+)"),
        ("setup.py", r"^__version__ = ['\"]([^'\"]+)"),
    ):
        found = re.search(pattern, text_of(name), re.MULTILINE)
        if found:
            return found.group(1)
    return None


def _tag(repository: Path, commit: str) -> str | None:
    return _git(repository, "describe", "--tags", "--exact-match", commit)


def _git(repository: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _listing(root: Path, shown: int = 5) -> str:
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    return ", ".join(names[:shown]) + (" …" if len(names) > shown else "") if names else "an empty folder"
