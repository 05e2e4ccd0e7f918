"""Plain settings that take part in a module's forward pass: an ε, a scale, a k, the name of an activation.

Statistics see a wrong ε as noise; the number itself is either equal or not. Which attributes take part is read from the
code of ``forward`` and of what it calls in its class and package, once per class (per module where code was put onto
a single one), without running any of it.
"""

from __future__ import annotations

import enum
import functools
import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

Setting = bool | int | float | str | None

_NEUTRAL = re.compile(
    r"training|inplace|idx|layer_number|implementation|fused|fusion|parallel|partition|world_size|(^|_)(tp|pp|ep|cp|dp)_"
    r"|rank$|recompute|checkpoint|offload|overlap|async|dtype|device|determin|debug|profil|chunk|cache|prefix|backend"
    r"|^(layer_|module_|param_)?name|_path$|output_(attentions|hidden)|return_|compile|max_.*(len|position|token)"
)
"""Where a module runs, how it is cut and what it keeps: none of it changes what is computed but for rounding."""
_ROTARY = re.compile(r"^rope_|rotary_factor$")
_DROPOUT = re.compile(r"dropout")
_LONGEST, _TEXT, _MOST_CODE = 8, 200, 200


class SettingsReader:
    """Reads the settings of many modules; what it knows of a class's code it keeps."""

    def __init__(self) -> None:
        self._names: dict[tuple, tuple[frozenset[str], frozenset[str]]] = {}

    def of(self, module: nn.Module) -> dict[str, Setting]:
        """Name to value: of attributes as they are called, of the module's configuration after ``config.``.

        Functions count by their name, ``silu()``; sequences of plain values as their text. Left out are values that
        only say where and how a module runs, and dropout where the module is not training.
        """
        forward = getattr(module.forward, "__func__", module.forward)
        bound = _bound(module)
        key = (type(module), forward, *bound)
        if key not in self._names:
            self._names[key] = _mentioned(type(module), (forward, *bound))
        used, read = self._names[key]
        held = {**_constants(type(module), used), **vars(module)}
        found = dict(_plain({name: held[name] for name in sorted(used & held.keys())}))
        config = held.get("config")
        if config is not None and not isinstance(config, nn.Module):
            fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
            rotary = "inv_freq" in module._buffers or "rotary" in type(module).__name__.lower()
            wanted = {n: v for n, v in fields.items() if n in used or rotary and _ROTARY.search(str(n))}
            # What the constructor read went into attributes and shapes, but for the names of what it chose.
            wanted |= {n: v for n, v in fields.items() if n in read and isinstance(v, (str, bool))}
            found |= _plain(wanted, "config.")
        if not module.training:
            stochastic = isinstance(module, nn.modules.dropout._DropoutNd)
            found = {n: v for n, v in found.items() if not _DROPOUT.search(n) and not (stochastic and n == "p")}
        return found


def _plain(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Setting]]:
    for name, value in values.items():
        if not isinstance(name, str) or _NEUTRAL.search(name):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            yield prefix + name, str(value)  # JSON has no infinity
        elif value is None or isinstance(value, (bool, int, float)) or isinstance(value, str) and len(value) <= _TEXT:
            yield prefix + name, value
        elif isinstance(value, enum.Enum):
            yield prefix + name, value.name
        elif isinstance(value, (tuple, list)) and len(value) <= _LONGEST:
            if all(v is None or isinstance(v, (bool, int, float, str)) for v in value):
                yield prefix + name, str(list(value))
        elif isinstance(value, Mapping) and prefix and len(value) <= 4 * _LONGEST:  # rope_scaling, rope_parameters
            yield from _plain(value, f"{prefix}{name}.")
        elif isinstance(value, functools.partial) and hasattr(value.func, "__name__"):
            given = ", ".join(f"{k}={v}" for k, v in sorted(value.keywords.items()))
            yield prefix + name, f"{value.func.__name__}({given})"
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            yield prefix + name, f"{value.__name__}()"


def _constants(kind: type, used: frozenset[str]) -> dict[str, Any]:
    """Plain attributes of the class itself, those of ``nn.Module`` left out."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base is not object and base is not nn.Module:
            found |= {n: v for n, v in vars(base).items() if n in used and isinstance(v, (bool, int, float, str))}
    return found


def _bound(module: nn.Module) -> tuple[Any, ...]:
    """Functions that were bound to this one module and take part in its forward pass."""
    held = vars(module).values()
    return tuple(v.__func__ for v in held if isinstance(v, types.MethodType) and v.__self__ is module)


def _mentioned(kind: type, functions: tuple[Any, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Names in the code of the forward pass, and in that of the forward pass or the constructor."""
    used = _names_in(list(functions), kind)
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    built = _names_in([f for f in constructors if f is not nn.Module.__init__], kind, follow=False)
    return used, used | built


def _names_in(functions: list[Any], kind: type, *, follow: bool = True) -> frozenset[str]:
    package = kind.__module__.partition(".")[0]
    names: set[str] = set()
    todo, met = list(functions), set()
    while todo and len(met) < _MOST_CODE:
        function = todo.pop()
        function = getattr(function, "__func__", getattr(function, "fget", function))
        code = getattr(function, "__code__", None)
        if code is None or id(function) in met:
            continue
        met.add(id(function))
        todo.append(getattr(function, "__wrapped__", None))
        for cell in function.__closure__ or ():  # what a decorator wraps
            try:
                todo.append(cell.cell_contents)
            except ValueError:
                continue
        here = _names_of_code(code)
        names |= here
        if not follow:
            continue
        for name in here:
            method = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
            if method is not None and not hasattr(nn.Module, name):
                todo.append(method)
            called = function.__globals__.get(name)
            if isinstance(called, types.FunctionType) and called.__module__.partition(".")[0] == package:
                todo.append(called)
    return frozenset(names)


def _names_of_code(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of_code(constant)
    return names
