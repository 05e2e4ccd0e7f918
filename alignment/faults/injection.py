"""Finds a fault by its id or as ``path.py:object`` and keeps it active, here and in every worker process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from alignment.errors import InputError

ENVIRONMENT = "ALIGNMENT_FAULTS"
WORKER_SETUP = "alignment.faults.injection:activate_from_environment"
OVERRIDE = "faults"
_SEPARATOR = "\n"
_for_the_life_of_the_worker = contextlib.ExitStack()


def load_fault(spec: str) -> Callable[[], AbstractContextManager]:
    """The fault that ``spec`` names: a callable of no arguments that returns a context manager.

    ``spec`` is the id of a fault of the catalogue, or ``path.py:object``: a Python file and a name in it, a
    :class:`~alignment.faults.fault.Fault` or a function under ``contextlib.contextmanager``.

    Raises:
        InputError: an unknown id (the nearest one is named), the file or the name is missing, or the object cannot be
            called.
    """
    path_text, separator, name = spec.rpartition(":")
    if not separator:
        from alignment.faults.catalogue import find_faults

        return find_faults([spec])[0]
    if not name.isidentifier():
        raise InputError("a fault is named path.py:object", where="--fault", expected="path.py:object", found=spec)
    path = Path(path_text).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise InputError(
            "the file of the fault does not exist", where="--fault", expected="a .py file", found=path_text
        )
    module_name = f"alignment_fault_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses look their module up by name while their class is made.
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"the file of the fault cannot be loaded ({type(error).__name__}: {error})", where=path_text
        ) from error
    fault = getattr(module, name, None)
    if not callable(fault):
        known = sorted(k for k, v in vars(module).items() if callable(v) and not k.startswith("_"))
        raise InputError("the file has no such fault", where=path_text, expected=f"one of {known}", found=name)
    return fault


def faults_and_overrides(overrides: Sequence[str] | None, fault: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The faults that ``--fault`` and ``faults=[id,…]`` name, and the overrides that are left."""
    named, rest = list(fault or ()), []
    for override in overrides or ():
        key, separator, value = override.partition("=")
        if separator and key.strip() == OVERRIDE:
            named += [one.strip().strip("\"'") for one in value.strip().strip("[]").split(",") if one.strip()]
        else:
            rest.append(override)
    return named, rest


@contextlib.contextmanager
def active(specs: Sequence[str]) -> Iterator[None]:
    """Runs the block with every fault of ``specs`` switched on, in this process and in the workers it starts.

    Raises:
        InputError: a fault cannot be loaded (nothing is switched on then).
    """
    faults = [load_fault(spec) for spec in specs]
    before = os.environ.get(ENVIRONMENT)
    if specs:
        os.environ[ENVIRONMENT] = _SEPARATOR.join(_anywhere(spec) for spec in specs)
    try:
        with contextlib.ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault())
            yield
    finally:
        if before is None:
            os.environ.pop(ENVIRONMENT, None)
        else:
            os.environ[ENVIRONMENT] = before


def activate_from_environment() -> None:
    """Switches on the faults of the parent process for the life of this worker process."""
    for spec in filter(None, os.environ.get(ENVIRONMENT, "").split(_SEPARATOR)):
        _for_the_life_of_the_worker.enter_context(load_fault(spec)())


def _anywhere(spec: str) -> str:
    """``spec`` as a process with another working directory finds it."""
    path, separator, name = spec.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if separator else spec
