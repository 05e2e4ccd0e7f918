"""The suite of a bisection, copied out of the way: whatever the search checks out, the question stays the same."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import alignment
from alignment.errors import InputError
from alignment.files import read_json, write_json

ROOT = Path(alignment.__file__).resolve().parent.parent
MARKER = "frozen.json"
_WITHOUT = {".git", "__pycache__", "runs", ".venv", "node_modules"}


@dataclass(frozen=True, kw_only=True)
class FrozenSuite:
    """``folder`` holds the copy; ``commit`` names where it is from (``-dirty`` where it differed); ``digest`` is its
    contents'.
    """

    folder: Path
    commit: str
    digest: str


def freeze_suite(target: Path, *, source: Path = ROOT) -> FrozenSuite:
    """Copies the suite (tracked and new files, not what git ignores) to ``target``, or finds it there from before.

    Raises:
        InputError: ``target`` holds another suite than its own record says.
    """
    marker = target.parent / f"{target.name}.{MARKER}"
    if marker.is_file():
        record = read_json(marker)
        if not target.is_dir() or _digest(target, record["files"]) != record["digest"]:
            raise InputError(
                "the frozen suite was changed since the bisection began", where=target, next_step="begin a new one"
            )
        return FrozenSuite(folder=target, commit=record["commit"], digest=record["digest"])
    shutil.rmtree(target, ignore_errors=True)
    files = list(_files_of(source))
    if not files:
        raise InputError("the suite holds no file", where=source)
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name)
    names = sorted(str(name) for name in files)
    frozen = FrozenSuite(folder=target, commit=_commit(source), digest=_digest(target, names))
    write_json(marker, {"commit": frozen.commit, "digest": frozen.digest, "files": names})
    return frozen


def _files_of(source: Path) -> Iterable[Path]:
    done = subprocess.run(
        ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if done.returncode == 0 and done.stdout:
        names = (Path(n) for n in done.stdout.decode().split("\0") if n)
        return [n for n in names if (source / n).is_file() and not _WITHOUT & set(n.parts)]
    if source == ROOT and not (source / "tests").is_dir():
        # An installed package lies among others: only itself is the suite.
        return [
            p.relative_to(source)
            for p in (source / "alignment").rglob("*")
            if p.is_file() and not _WITHOUT & set(p.parts)
        ]
    return [
        p.relative_to(source)
        for p in source.rglob("*")
        if p.is_file() and not _WITHOUT & set(p.relative_to(source).parts)
    ]


def _digest(folder: Path, names: list[str]) -> str:
    """Over the files that were frozen; what probes leave beside them does not count."""
    told = hashlib.sha256()
    for name in names:
        path = folder / name
        data = path.read_bytes() if path.is_file() else b"missing"
        told.update(f"{name}\0{len(data)}\0".encode())
        told.update(data)
    return told.hexdigest()


def _commit(source: Path) -> str:
    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head if git("status", "--porcelain") == "" else f"{head}-dirty"


def files_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files and folders; empty for none.

    Raises:
        InputError: one is not there.
    """
    told, any_path = hashlib.sha256(), False
    for path in paths:
        any_path = True
        if not path.exists():
            raise InputError("the data of the probe is not there", where="--data", found=path)
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            told.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            told.update(file.read_bytes())
    return told.hexdigest() if any_path else ""
