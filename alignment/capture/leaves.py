"""The tensors inside whatever a module takes or gives, and the paths they are reached by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_DEEPEST = 6


def call_leaves(args: tuple, kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Tensors among positional (``args.0``) and named (``kwargs.attention_mask``) arguments."""
    found: list[tuple[str, Tensor]] = []
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            found.append((f"args.{i}", value))
        elif value is not None and not isinstance(value, (int, float, str)):
            found.extend(leaves(value, f"args.{i}"))
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            found.append((f"kwargs.{name}", value))
        elif value is not None and not isinstance(value, (int, float, str)):
            found.extend(leaves(value, f"kwargs.{name}"))
    return found


def output_leaves(output: Any) -> list[tuple[str, Tensor]]:
    """Tensors among results: ``output``, ``output.0``, ``output.logits``."""
    if isinstance(output, Tensor):
        return [("output", output)]
    return list(leaves(output, "output"))


def leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Tensors in sequences, mappings and dataclasses. Other objects (a cache, say) are not opened."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth >= _DEEPEST or isinstance(value, (str, bytes)):
        return
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from leaves(entry, f"{path}.{name}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            yield from leaves(entry, f"{path}.{i}", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None), f"{path}.{field.name}", depth + 1)
