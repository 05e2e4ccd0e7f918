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

from alignment.bisect.components import COMPONENTS, Component, rank
from alignment.bisect.providers.base import machine_facts
from alignment.bisect.stack import Pin, Stack
from alignment.bisect.versions import same
from alignment.devices.fingerprint import UNKNOWN

_OF_THE_NODE = ("driver", "firmware")


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


def differences_here(wanted: Stack) -> list[str]:
    """What of a stack is missing here or of another version, one line each, from the ground up; empty when it is that
    stack. Driver and firmware belong to the node and are left out.
    """
    own = [component.distribution for component in wanted.defined.values() if not component.external]
    return differences(wanted, freeze_stack(name="here", also=own).stack)


def differences(wanted: Stack, found: Stack) -> list[str]:
    """The same for two stacks. Of Python the line is enough (3.11 is what images are tagged with), of a git pin the
    revision counts, or the version where an installation does not know its revision.
    """
    lines = []
    for name in sorted(wanted.pins, key=rank):
        pin, here = wanted.pins[name], found.pins.get(name)
        if name in _OF_THE_NODE:
            continue
        if here is None:
            lines.append(f"{name}: {pin} is not installed")
        elif pin.kind == here.kind == "git":
            if not here.revision.startswith(pin.revision):
                lines.append(f"{name}: expected {pin.revision}, found {here.revision}")
        elif pin.version and not (
            same(here.version, pin.version) or (name == "python" and here.version.startswith(f"{pin.version}."))
        ):
            lines.append(f"{name}: expected {pin.version}, found {here.version}")
    return lines


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
