"""From a mapping of settings to the provider they mean."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.bisect.keys import nearest
from alignment.bisect.providers.base import Provider
from alignment.bisect.providers.command import CommandProvider
from alignment.bisect.providers.container import ContainerProvider
from alignment.bisect.providers.git import GitProvider
from alignment.bisect.providers.venv import VenvProvider
from alignment.bisect.stack import Stack
from alignment.errors import InputError

KINDS = ("venv", "git", "container", "command")


def kind_for(stacks: Sequence[Stack]) -> str:
    """The provider that fits where none is named: git for stacks with revisions, else virtual environments."""
    return "git" if any(p.kind == "git" for s in stacks for p in s.pins.values()) else "venv"


def make_provider(
    settings: Mapping[str, Any],
    *,
    cache: Path,
    repositories: Mapping[str, str],
    slots: int,
    stacks: Sequence[Stack] = (),
    mounts: Sequence[Path] = (),
) -> Provider:
    """The provider of ``settings["kind"]``.

    Raises:
        InputError: no such kind, or a setting is missing.
    """
    kind = settings.get("kind", "venv")
    if kind not in KINDS:
        raise InputError(
            "there is no such provider",
            where="--provider",
            expected=nearest(str(kind), KINDS),
            found=kind,
        )
    if kind == "command":
        if not settings.get("activation"):
            raise InputError(
                "the command provider needs its script", where="--activate", expected="source /path/to/set_env.sh"
            )
        return CommandProvider(activation=settings["activation"], python=settings.get("python") or "python3")
    if kind == "container":
        return ContainerProvider(
            engine=settings.get("engine") or "docker",
            npus=tuple(settings.get("npus", ())),
            slots=slots,
            python=settings.get("python") or "python3",
            mounts=tuple(mounts),
            images=tuple(s for s in stacks if s.image),
            namespace=settings.get("namespace") or "default",
        )
    venv = VenvProvider(
        directory=cache,
        base=settings.get("base") or sys.executable,
        extra=tuple(settings.get("extra", ())),
        offline=bool(settings.get("offline")),
        dependencies=bool(settings.get("dependencies")),
    )
    return (
        venv if kind == "venv" else GitProvider(venv=venv, repositories={n: Path(p) for n, p in repositories.items()})
    )
