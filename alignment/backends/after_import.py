"""Changes to a third-party module at the moment it has been imported, whoever imports it first.

A plugin that is loaded early cannot import the modules it changes: they are heavy, and some processes never need them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

Change = Callable[[ModuleType], None]


def after_import(name: str, change: Change) -> None:
    """Calls ``change(module)`` once the module called ``name`` has been executed: now if it has been, else then.

    Several changes to one module are made in the order they were asked for. An exception in ``change`` is one of the
    import.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        change(module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.changes.setdefault(name, []).append(change)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as everyone else does, and wraps the loader of those that are to be changed."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {}

    def find_spec(self, fullname, path, target=None) -> importlib.machinery.ModuleSpec | None:
        changes = self.changes.pop(fullname, None)
        if changes is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.changes[fullname] = changes
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = exec_module
        return spec
