"""What every environment provider gives: a stack made runnable, and proof that it is that stack."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from alignment.bisect.process import Finished, run_process
from alignment.bisect.stack import Stack
from alignment.bisect.versions import same

VERIFY_SECONDS = 300.0


class NotBuilt(Exception):
    """An environment that cannot be had. ``transient`` where another try may succeed (network, registry)."""

    def __init__(self, reason: str, detail: str, *, transient: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.transient = reason, detail, transient


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A stack that can be run.

    ``python`` is its interpreter. ``variables`` are set for everything run in it. ``places`` are the folders each
    component may be imported from. Subclasses wrap commands (a container, an activation script).
    """

    stack: Stack
    python: str
    variables: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    seconds: float = 0.0

    def command(self, argv: Sequence[str], *, cwd: Path | None, variables: Mapping[str, str]) -> list[str]:
        """The command line that runs ``argv`` inside."""
        return list(argv)

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Finished:
        """Runs ``argv`` inside and waits for it."""
        given = {**self.variables, **(variables or {})}
        return run_process(self.command(argv, cwd=cwd, variables=given), cwd=cwd, variables=given, timeout=timeout)


class Provider(Protocol):
    """Makes environments. ``name`` and ``identity`` go into the key of every probe."""

    name: str

    @property
    def identity(self) -> str: ...

    def prepare(self, stack: Stack, *, slot: int = 0) -> Environment:
        """The environment of a stack; ``slot`` tells simultaneous probes apart.

        Raises:
            NotBuilt: it cannot be had.
        """
        ...


# Runs inside the environment, so it may use nothing but the standard library. It looks modules up without importing
# them.
_LOOK = r"""
import importlib.machinery, importlib.metadata, importlib.util, json, platform, sys
def version_of(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
def place_of(module):
    path, found = None, None
    for part in module.split("."):
        found = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            try:
                found = find(part if path is None else full, path) if path is None else find(full + "." + part, path)
            except Exception:
                found = None
            if found is not None:
                break
        if found is None:
            return None
        full = part if path is None else full + "." + part
        path = list(found.submodule_search_locations) if found.submodule_search_locations else []
    if found.origin not in (None, "namespace", "built-in", "frozen"):
        return found.origin
    return path[0] if path else found.origin
asked = json.loads(sys.argv[1])
seen = {}
for name, (d, m) in asked.items():
    own = name == "python"
    version, place = (platform.python_version(), sys.executable) if own else (version_of(d), place_of(m))
    seen[name] = {"version": version, "place": place}
print("\n" + json.dumps(seen))
"""


def look(environment: Environment, stack: Stack) -> dict[str, dict[str, str | None]]:
    """Version and import path of every package of ``stack`` as the environment has them.

    Raises:
        NotBuilt: its interpreter cannot be run.
    """
    asked = {}
    for name in stack.pins:
        component = stack.component(name)
        if not component.external:
            asked[name] = [component.distribution, component.module]
    if not asked:
        return {}
    try:
        done = environment.run([environment.python, "-c", _LOOK, json.dumps(asked)], timeout=VERIFY_SECONDS)
    except OSError as error:
        raise NotBuilt("environment", f"its interpreter cannot be run ({error})") from None
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise NotBuilt("environment", f"its interpreter gave no answer: {done.tail}") from None


def verify(environment: Environment, stack: Stack, facts: Mapping[str, str]) -> list[str]:
    """Differences between what was asked for and what is there, one sentence each; empty when it is that stack.

    Packages are compared by version (a git pin only where it states one) and by the folder they are imported from.
    External facts are compared with ``facts`` (what this machine says of itself) where it says anything.
    """
    wrong = []
    for name, seen in look(environment, stack).items():
        pin, version, place = stack.pins[name], seen["version"], seen["place"]
        if version is None and name != "python":
            wrong.append(f"{name}: {pin} was asked for, and it is not installed")
            continue
        if pin.version and not _is(version or "", pin.version, exact=name != "python"):
            wrong.append(f"{name}: version {version} is there, {pin.version} was asked for")
        allowed = environment.places.get(name)
        if allowed and place is None:
            wrong.append(f"{name}: it is installed and cannot be imported")
        elif allowed and not any(_inside(place, folder) for folder in allowed):
            wrong.append(f"{name}: it would be imported from {place}, not from {allowed[0]}")
    for name, pin in stack.pins.items():
        there = facts.get(name)
        if stack.component(name).external and there and there != "unknown" and not same(there, pin.version):
            wrong.append(f"{name}: this machine has {there}, {pin.version} was asked for")
    return wrong


def _is(found: str, wanted: str, *, exact: bool) -> bool:
    # A stack may ask for Python 3.10 and mean any 3.10.
    return same(found, wanted) or (not exact and found.startswith(wanted + "."))


def _inside(place: str | None, folder: Path) -> bool:
    if place is None:
        return False
    path, root = Path(place), Path(folder)
    return root in path.parents or root.resolve() in path.resolve().parents


def facts_inside(environment: Environment, names: Sequence[str], suite: Path) -> dict[str, str]:
    """External facts as seen from inside an environment: an image or an activation script brings its own CANN."""
    if not names:
        return {}
    code = (
        "import json, sys; from alignment.bisect.providers.base import machine_facts; "
        "print('\\n' + json.dumps(machine_facts(sys.argv[1:])))"
    )
    done = environment.run(
        [environment.python, "-c", code, *names], variables={"PYTHONPATH": str(suite)}, timeout=VERIFY_SECONDS
    )
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {}


def machine_facts(names: Sequence[str]) -> dict[str, str]:
    """What this machine says of the external facts asked for: driver, firmware, CANN. ``unknown`` where it says
    nothing.
    """
    from alignment.devices.fingerprint import ascend_driver_version, ascend_firmware_version, cann_version

    readers = {"driver": ascend_driver_version, "firmware": ascend_firmware_version, "CANN": cann_version}
    return {name: readers[name]() for name in names if name in readers}
