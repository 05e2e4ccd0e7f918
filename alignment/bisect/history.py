"""What lies between two pins of one component: its releases, or its commits."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from alignment.bisect.components import Component
from alignment.bisect.stack import Pin
from alignment.bisect.versions import is_prerelease, order
from alignment.errors import InputError


class History(Protocol):
    """Gives the way from one pin to another: every step after ``old``, up to and with ``new``, in order.

    The answer is ``[new]`` where nothing in between is known, as for drivers and CANN. ``inside`` gives the commits
    between two neighbouring releases, from the tag of the one to the tag of the other and with ``new`` at the end;
    ``[new]`` where no repository tells.
    """

    def between(self, component: Component, old: Pin, new: Pin) -> list[Pin]: ...
    def inside(self, component: Component, old: Pin, new: Pin) -> list[Pin]: ...


@dataclass
class KnownHistory:
    """Releases from a package index (or named by the user), commits from local repositories.

    ``releases`` names the releases of a component outright; ``repositories`` says where its clone is. ``index`` lists
    the releases of a distribution and is asked once per distribution; ``remember`` keeps an answer (a journal, so
    that a resumed search sees the same candidates and asks nobody).
    """

    releases: Mapping[str, list[str]] = field(default_factory=dict)
    repositories: Mapping[str, Path] = field(default_factory=dict)
    index: Callable[[str], list[str]] | None = None
    prereleases: bool = False
    recall: Callable[[str], list | None] = lambda question: None
    remember: Callable[[str, list], None] = lambda question, answer: None

    def between(self, component: Component, old: Pin, new: Pin) -> list[Pin]:
        if old.kind == new.kind == "git":
            return self._commits(component, old, new)
        if old.kind == new.kind == "release" and component.distribution:
            return self._releases(component, old, new)
        return [new]

    def inside(self, component: Component, old: Pin, new: Pin) -> list[Pin]:
        path = self.repositories.get(component.name)
        if path is None or not path.is_dir() or not old.kind == new.kind == "release":
            return [new]
        question = f"commits of {component.name} inside {old.version} to {new.version}"
        revisions = self._asked(question, lambda: _between_tags(path, old.version, new.version, component.subdirectory))
        return [*(Pin(kind="git", revision=r, repository=str(path)) for r in revisions), new]

    def _releases(self, component: Component, old: Pin, new: Pin) -> list[Pin]:
        known = self.releases.get(component.name)
        if known is None:
            known = self._asked(
                f"releases of {component.distribution}", lambda: self._list_releases(component.distribution)
            )
        low, high = sorted((order(old.version), order(new.version)))
        pre = self.prereleases or is_prerelease(old.version) or is_prerelease(new.version)
        chosen = [
            v
            for v in known
            if low < order(v) < high and (pre or not is_prerelease(v) or component.name in self.releases)
        ]
        chosen.sort(key=order, reverse=order(new.version) < order(old.version))
        return [*(Pin(kind="release", version=v) for v in dict.fromkeys(chosen)), new]

    def _list_releases(self, distribution: str) -> list[str]:
        return self.index(distribution) if self.index else []

    def _commits(self, component: Component, old: Pin, new: Pin) -> list[Pin]:
        path = self.repositories.get(component.name) or Path(new.repository)
        if not path.is_dir():
            return [new]
        question = f"commits of {component.name} from {old.revision} to {new.revision}"
        revisions = self._asked(
            question, lambda: commits_between(path, old.revision, new.revision, below=component.subdirectory)
        )
        return [*(Pin(kind="git", revision=r, repository=new.repository) for r in revisions[:-1]), new]

    def _asked(self, question: str, ask: Callable[[], list[str]]) -> list[str]:
        answer = self.recall(question)
        if answer is None:
            answer = ask()
            self.remember(question, answer)
        return answer


def commits_between(repository: Path, old: str, new: str, *, below: str = "") -> list[str]:
    """The first-parent way from one revision to another, without the former; the last one stands for the latter.

    With ``below``, only commits that change something in that folder.

    Where the former is no ancestor of the latter, the way leads back to their common ancestor and forward from there:
    what only the former has may be what is missing in the latter.

    Raises:
        InputError: a revision is not there, or the two have nothing in common.
    """
    start, end = (resolve(repository, r) for r in (old, new))
    base = _git(repository, "merge-base", start, end)
    if base is None:
        raise InputError("the two revisions have no common ancestor", where=repository, found=f"{old}, {new}")
    back: list[str] = []
    if base != start:
        # Newest first: the way back begins below `start` and ends at the common ancestor.
        back = [*_listed(repository, f"{base}..{start}", below)[0 if below else 1 :], base]
    forward = _listed(repository, f"{base}..{end}", below)[::-1]
    return back + forward or [end]


def _between_tags(repository: Path, old: str, new: str, below: str) -> list[str]:
    """The commits from the tag of one release to that of another, both with them; none where a tag is missing."""
    tags = [tag_of(repository, version) for version in (old, new)]
    if None in tags:
        return []
    return [tags[0], *commits_between(repository, tags[0], tags[1], below=below)]


def tag_of(repository: Path, version: str) -> str | None:
    """The commit of a release, by the spellings of tags that are in use: v1.2, 1.2, core_v1.2, core_r1.2."""
    for tag in (f"v{version}", version, f"core_v{version}", f"core_r{version}"):
        found = _git(repository, "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
        if found is not None:
            return found
    return None


def resolve(repository: Path, revision: str) -> str:
    """The full name of a commit; InputError when the repository does not have it."""
    found = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found is None:
        raise InputError("there is no such revision", where=repository, found=revision, next_step="git fetch there")
    return found


def describe_commit(repository: Path, revision: str) -> str:
    """Subject line, author date and, for a merge, how many commits it brought."""
    text = _git(repository, "show", "-s", "--format=%h %ad %s", "--date=short", revision)
    if text is None:
        return revision
    parents = (_git(repository, "show", "-s", "--format=%P", revision) or "").split()
    if len(parents) > 1:
        count = _git(repository, "rev-list", "--count", f"{parents[0]}..{revision}")
        text += f" (a merge of {int(count or 1) - 1} commits)"
    return text


def _listed(repository: Path, span: str, below: str = "") -> list[str]:
    return (_git(repository, "rev-list", "--first-parent", span, *(["--", below] if below else [])) or "").split()


def _git(repository: Path, *arguments: str) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def index_releases(distribution: str, *, python: str = sys.executable) -> list[str]:
    """Releases of a distribution on the package index that pip is configured for, oldest first; empty when
    unreachable.
    """
    command = [python, "-m", "pip", "index", "versions", "--pre", distribution]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return []
    match = re.search(r"^Available versions:\s*(.+)$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or match is None:
        return []
    return sorted((v.strip() for v in match.group(1).split(",") if v.strip()), key=order)
