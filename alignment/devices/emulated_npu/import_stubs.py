"""Imports answered with empty classes, so that a plugin's file can be imported without the packages it plugs into.

An Ascend plugin imports dozens of names of vLLM at the top of a file of which one method only touches tensors. Inside
:func:`auto_stubs` every import under the given names succeeds and every name looked up there is an empty class. What is
answered is recorded. Anything that *calls* into the stubbed package gets a stub's answer, so assert on tensors, never
on what a stub returned, and use it in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from alignment.errors import InputError

__all__ = ["Stubs", "auto_stubs"]

VERSION = "0+stub"  # a version that packaging can parse and that no release carries


@dataclass(kw_only=True)
class Stubs:
    """What was made up.

    Attributes:
        roots: dotted names under which every import is a stub, installed or not.
        missing: dotted names that are stubs only where the import would fail.
        values: what names in stub modules stand for, by dotted name, where an empty class will not do.
        modules: the stub modules that were imported.
        names: the names looked up in them, dotted.
    """

    roots: tuple[str, ...]
    missing: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{len(self.modules)} stub modules, {len(self.names)} stub names"


class _StubType(ABCMeta):
    """Attributes of a stub class are stub classes (``AttentionType.DECODER``), and it may be used as a decorator."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stub_class(name, cls.__module__)
        setattr(cls, name, made)
        return made

    def __getitem__(cls, item: object) -> type:
        return cls

    def register(cls, *args: object, **kwargs: object) -> object:
        """A registry's, not ABCMeta's: ``@Registry.register("name")``, ``@Registry.register``."""
        return _Stub()(*args, **kwargs)

    def __call__(cls, *args: object, **kwargs: object) -> object:
        if vars(cls).get("_made_up") and _decorates(args, kwargs):
            return args[0]
        return super().__call__(*args, **kwargs)


class _Stub(metaclass=_StubType):
    def __init__(self, *args: object, **kwargs: object) -> None:
        with contextlib.suppress(TypeError):
            super().__init__()  # a plugin class may inherit from a stub and from a real class

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if _decorates(args, kwargs) else _Stub()

    def __getattr__(self, name: str) -> object:
        # A class of the plugin that inherits from a stub must miss the attributes it does not have.
        if name.startswith("__") or not (type(self) is _Stub or vars(type(self)).get("_made_up")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _Stub()


def _decorates(args: tuple, kwargs: Mapping) -> bool:
    return len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType))


def _stub_class(name: str, module: str) -> type:
    return _StubType(name, (_Stub,), {"__module__": module, "_made_up": True})


class _StubModule(types.ModuleType):
    def __init__(self, name: str, stubs: Stubs) -> None:
        super().__init__(name, f"made up by {__name__}")
        self.__version__ = VERSION
        self._stubs = stubs
        prefix = f"{name}."
        for dotted, value in stubs.values.items():
            if dotted.startswith(prefix) and "." not in dotted[len(prefix) :]:
                setattr(self, dotted[len(prefix) :], value)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):  # the import system and inspect probe these
            raise AttributeError(name)
        self._stubs.names.add(f"{self.__name__}.{name}")
        made = _stub_class(name, self.__name__)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, stubs: Stubs, roots: tuple[str, ...]) -> None:
        self._stubs, self._roots = stubs, roots

    def find_spec(self, fullname, path=None, target=None):
        parent = sys.modules.get(fullname.rpartition(".")[0])
        # Below a real package nothing is made up: packages probe for submodules they may not have.
        if fullname not in self._roots and not isinstance(parent, _StubModule):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        self._stubs.modules.add(spec.name)
        return _StubModule(spec.name, self._stubs)

    def exec_module(self, module) -> None: ...


@contextlib.contextmanager
def auto_stubs(
    roots: Iterable[str], *, missing: Iterable[str] = (), values: Mapping[str, object] | None = None
) -> Iterator[Stubs]:
    """Answer imports under ``roots`` (always) and ``missing`` (where they would fail) with empty classes.

    Afterwards the stub modules are gone from ``sys.modules``; what was imported meanwhile keeps the stubs it holds.

    Args:
        roots: dotted names, for example ``("vllm", "torchair")``; everything below them is stubbed too.
        missing: dotted names of optional packages and generated or compiled parts.
        values: what dotted names in stub modules stand for, where an empty class will not do.

    Yields:
        The record of what was made up.

    Raises:
        InputError: a real module under ``roots`` is loaded already; two copies of one package would mix.
    """
    stubs = Stubs(roots=tuple(roots), missing=tuple(missing), values=dict(values or {}))
    for root in stubs.roots:
        if root in sys.modules:
            raise InputError(
                "cannot be stubbed because it is imported already",
                where=root,
                next_step="stub it in a process of its own, before anything imports it",
            )
    first, last = _Finder(stubs, stubs.roots), _Finder(stubs, stubs.missing)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        yield stubs
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not first and finder is not last]
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StubModule)]:
            del sys.modules[name]
