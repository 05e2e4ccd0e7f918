"""Loads a fault named ``path.py:object`` and keeps it active, here and in every worker process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from alignment.errors import InputError

ENVIRONMENT = "ALIGNMENT_FAULTS"
WORKER_SETUP = "alignment.faults.injection:activate_from_environment"
_SEPARATOR = "\n"
_for_the_life_of_the_worker = contextlib.ExitStack()


def load_fault(spec: str) -> Callable[[], AbstractContextManager]:
    """The fault that ``spec`` names: a callable of no arguments that returns a context manager.

    ``spec`` is ``path.py:object``: a Python file and a name in it, usually a function under ``contextlib.contextmanager``.

    Raises:
        InputError: the file or the name is missing, or the object cannot be called.
    """
    path_text, separator, name = spec.rpartition(":")
    if not separator or not name.isidentifier():
        raise InputError("a fault is named path.py:object", where="--fault", expected="path.py:object", found=spec)
    path = Path(path_text).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise InputError("the file of the fault does not exist", where="--fault", expected="a .py file", found=path_text)
    module_spec = importlib.util.spec_from_file_location(f"alignment_fault_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
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


@contextlib.contextmanager
def active(specs: list[str]) -> Iterator[None]:
    """Runs the block with every fault of ``specs`` switched on, in this process and in the workers it starts.

    Raises:
        InputError: a fault cannot be loaded (nothing is switched on then).
    """
    faults = [load_fault(spec) for spec in specs]
    absolute = [f"{Path(p).resolve()}:{name}" for p, _, name in (spec.rpartition(":") for spec in specs)]
    before = os.environ.get(ENVIRONMENT)
    if absolute:
        os.environ[ENVIRONMENT] = _SEPARATOR.join(absolute)
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
