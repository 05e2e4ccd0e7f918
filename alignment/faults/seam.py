"""How a fault reaches the product: it replaces one function or method of it, wherever the product has bound it.

Only modules of the product are touched. The checks and their references bind nothing of the product by name, so what a
fault replaces is what is judged, and never what judges.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from alignment.errors import InputError

PRODUCT = ("alignment.models", "alignment.weights", "alignment.backends", "alignment.rl")

replaced: list[str] = []
"""Targets that are replaced at this moment."""


@contextmanager
def wrapped(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces ``module:function`` or ``module:Class.method`` by ``make(original)`` while the block runs.

    A function that other modules of the product imported by name is replaced there, too. Static and class methods and
    properties are handed to ``make`` as they are written down (the descriptor's function), and come back as their kind.

    Raises:
        InputError: the target is not in the product.
    """
    module_name, _, path = target.partition(":")
    if not module_name.startswith(PRODUCT) or not path:
        raise InputError(
            "a fault replaces a seam of the product", where=target, expected=f"module:name in {', '.join(PRODUCT)}"
        )
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    inherited = isinstance(owner, type) and name not in vars(owner) and hasattr(owner, name)
    if name not in vars(owner) and not inherited:
        raise InputError("there is no such seam", where=target, expected=f"an attribute of {module_name}", found=path)
    # A method that a class of the product inherits from elsewhere is replaced in that class alone.
    original = getattr(owner, name) if inherited else vars(owner)[name]
    replacement = _made(original, make)
    replaced.append(target)
    try:
        _rebind(owner, name, original, replacement)
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            _rebind(owner, name, replacement, original)
        replaced.remove(target)


def all_of(*contexts: Callable[[], Any]) -> Callable[[], Any]:
    """Several replacements as one."""

    @contextmanager
    def together() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return together


def seam(target: str) -> Callable[[Callable[[Any], Any]], Callable[[], Any]]:
    """Decorator: a function ``make(original) -> replacement`` becomes the ``apply`` of a fault on ``target``."""

    def decorate(make: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: wrapped(target, make)

    return decorate


def _made(original: Any, make: Callable[[Any], Any]) -> Any:
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(make(original.__func__))
    if isinstance(original, property):
        return property(make(original.fget))
    return make(original)


def _rebind(owner: Any, name: str, old: Any, new: Any) -> None:
    setattr(owner, name, new)
    if isinstance(owner, type):
        return
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith(PRODUCT):
            continue
        for key, value in list(vars(module).items()):
            if value is old:
                setattr(module, key, new)
