"""The stack of the running environment: pip's metadata, the state of editable installs, CANN and driver by their own
files.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from urllib.parse import unquote, urlparse

from alignment.bisect.components import COMPONENTS, Component
from alignment.bisect.providers.base import machine_facts
from alignment.bisect.stack import Pin, Stack
from alignment.devices.fingerprint import UNKNOWN


@dataclass(frozen=True)
class Frozen:
    """The stack that is running, with the place each package is imported from, and what a stack file cannot say."""

    stack: Stack
    warnings: tuple[str, ...] = ()


def freeze_stack(*, name: str = "", image: str = "", also: Sequence[str] = ()) -> Frozen:
    """Pins everything that this product knows and that is installed here. ``also`` names further distributions.

    An editable install in a git work tree becomes a git pin of its revision; changes that are not committed are a
    warning.
    """
    pins: dict[str, Pin] = {"python": Pin(kind="release", version=platform.python_version())}
    places, warnings = {}, []
    for fact, version in machine_facts([c.name for c in COMPONENTS.values() if c.external]).items():
        if version != UNKNOWN:
            pins[fact] = Pin(kind="fact", version=version)
    defined = {n: Component(name=n, distribution=n, module=n.replace("-", "_")) for n in also}
    for component in (*COMPONENTS.values(), *defined.values()):
        if component.external or component.name == "python":
            continue
        try:
            distribution = importlib.metadata.distribution(component.distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        pin, warning = _pin_of(component, distribution)
        pins[component.name] = pin
        if warning:
            warnings.append(warning)
        place = _place(component.module)
        if place:
            places[component.name] = place
    stack = Stack(
        pins=pins,
        name=name or f"frozen-{date.today().isoformat()}",
        date=date.today().isoformat(),
        image=image,
        defined=defined,
        places=places,
    )
    return Frozen(stack, tuple(warnings))


def _pin_of(component: Component, distribution: importlib.metadata.Distribution) -> tuple[Pin, str]:
    version = distribution.version
    try:
        told = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        told = {}
    vcs = told.get("vcs_info") or {}
    if vcs.get("commit_id"):
        return Pin(kind="git", version=version, revision=vcs["commit_id"], repository=told.get("url", "")), ""
    if (told.get("dir_info") or {}).get("editable"):
        tree = Path(unquote(urlparse(told.get("url", "")).path))
        head = _git(tree, "rev-parse", "HEAD")
        if head is None:
            return Pin(
                kind="release", version=version
            ), f"{component.name}: installed editable from a folder without git; its version is all that is known"
        changed = _git(tree, "status", "--porcelain", "--untracked-files=no")
        warning = (
            f"{component.name}: its work tree has changes that are not committed, which no stack file can name"
            if changed
            else ""
        )
        return Pin(kind="git", version=version, revision=head, repository=str(tree)), warning
    return Pin(kind="release", version=version), ""


def _place(module: str) -> str | None:
    """Where a top-level module would be imported from, without importing it."""
    spec = None
    try:
        import importlib.util

        spec = importlib.util.find_spec(module.split(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _git(tree: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
