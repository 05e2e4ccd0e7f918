"""The rows of a capture: one tensor that went into a module or came out of it, with what was recorded of it.

Readers of every format answer with these rows, so that comparison knows one shape of evidence. Importing this file
costs NumPy and nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Kind = Literal["module", "operator", "parameter", "parameter_gradient", "value", "setting"]
Direction = Literal["forward", "backward"]
Role = Literal["input", "output"]

KINDS: tuple[str, ...] = ("module", "operator", "parameter", "parameter_gradient", "value")
"""Of tensors; a ``setting`` is no tensor."""
DIRECTIONS: tuple[str, ...] = ("forward", "backward")
ROLES: tuple[str, ...] = ("input", "output")


OF_THE_MACHINE = "of the machine"
"""Class of values that tell how the machine did (time, memory, throughput) and not what was computed."""

CHAIN = 64
"""Additions in float32 that follow one another in a capture's own sums (``reduction.cpp``: 1024 elements in 16 lanes); the
rest is float64, or chains so short that they add nothing to speak of."""


@dataclass(kw_only=True, slots=True)
class Statistics:
    """What two passes over a tensor tell.

    Attributes:
        max, min, mean, l2: over the finite elements, as float64; 0.0 where there are none.
        nan_count, inf_count: elements that are not finite.
        count: all elements.
    """

    max: float
    min: float
    mean: float
    l2: float
    nan_count: int
    inf_count: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The place of a tensor in the whole one: elements start … start + length − 1 of ``whole`` along ``dim``.

    Attributes:
        dim: the dimension that is cut, ≥ 0.
        start, length, whole: in elements along ``dim``.
        runs: (start, length) of every piece, in the order the tensor holds them, where these are several: a part of the
            gate beside one of the up projection, or two chunks of a sequence. ``start`` is the first one's and
            ``length`` that of all of them then.
    """

    dim: int
    start: int
    length: int
    whole: int
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, dim: int, whole: int, runs: tuple[tuple[int, int], ...]) -> Shard:
        """The shard that holds these pieces one after the other; those that follow on are one."""
        joined: list[tuple[int, int]] = []
        for start, length in runs:
            if joined and sum(joined[-1]) == start:
                start, length = joined[-1][0], joined.pop()[1] + length
            joined.append((start, length))
        total = sum(length for _, length in joined)
        several = tuple(joined) if len(joined) > 1 else ()
        return cls(dim=dim, start=joined[0][0], length=total, whole=whole, runs=several)

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(start, length) of what it holds, in its own order."""
        return self.runs or ((self.start, self.length),)

    def cuts(self) -> list[tuple[int, int, int]]:
        """(start in the tensor, start in the whole, length) of every piece."""
        at, out = 0, []
        for start, length in self.pieces:
            out.append((at, start, length))
            at += length
        return out


# Not frozen: freezing costs a fifth of reading a dump of many rows. Nobody changes a row all the same.
@dataclass(kw_only=True, slots=True)
class TensorRow:
    """One tensor of a step, stage and rank.

    Attributes:
        module: dotted path, "" for the root; at ``kind == "operator"`` the operator's name, with its module as parent;
            at ``kind == "value"`` the field's name; of a parameter, its dotted name.
        class_name: of the module; "" for parameters and values, but :data:`OF_THE_MACHINE` for those that measure it.
        kind: what the tensor is; a ``value`` is a named field of the pipeline. A ``setting`` is no tensor but a plain
            ``value`` that ``module`` computes with, under the name ``path``.
        direction: ``backward`` rows hold gradients: of a module's outputs (role ``input``: they flow in) and of its
            inputs (role ``output``).
        call: n-th call of this module in this step and stage, from 0.
        role: whether the tensor flowed in or out.
        path: where among the arguments or results: ``args.0``, ``kwargs.attention_mask``, ``output``, ``output.0``,
            ``output.logits``. A gradient has the path of the tensor it is the gradient of.
        order: completion order in this step, stage and rank: children before parents.
        parent: dotted path of the enclosing module, "" at the root and for those directly below it.
        dtype: ``float32``, ``bfloat16``, … as torch names it.
        shape: of the tensor on this rank.
        shard: its place in the whole tensor, or None where it is whole.
        statistics: None where only the tensor was kept, or where there are no numbers.
        by_key: the statistics and the sketch are of the real tokens of the samples ``keys`` alone, whose elements begin
            at places of the sketch that the keys name: the same in every order and padding, and additive over micro
            batches.
        bounds: first and last + 1 real token of every sample, or None; ``tokens`` is their number with padding.
        keys: content hashes of the samples, or None. They lie along the leading dimension, or along the second one
            where that alone has as many elements (megatron-core puts tokens first). Two captures that held the same
            samples in another order, or in other micro batches, are paired by them.
    """

    module: str
    class_name: str
    kind: Kind
    direction: Direction
    call: int
    role: Role
    path: str
    order: int
    parent: str
    dtype: str
    shape: tuple[int, ...]
    shard: Shard | None = None
    statistics: Statistics | None = None
    keys: tuple[str, ...] | None = None
    by_key: bool = False
    bounds: tuple[tuple[int, int], ...] | None = None
    tokens: int = 0
    value: bool | int | float | str | None = None
    load_sketch: Callable[[], np.ndarray] | None = field(default=None, repr=False, compare=False)
    load_tensor: Callable[[], np.ndarray] | None = field(default=None, repr=False, compare=False)

    def sketch(self) -> np.ndarray | None:
        """float32 [size], or [samples, size] in the order of ``keys`` where every sample has its own; None if absent.

        A sample's own sketch is that of its real tokens alone (padding left out), so it is the same in every batch.
        The sketch of a shard is taken at its place in the whole, so the sketches of all shards add up to the whole's.

        Raises:
            InputError: the file is missing or damaged.
        """
        return None if self.load_sketch is None else self.load_sketch()

    def tensor(self) -> np.ndarray | None:
        """The tensor itself, bfloat16 and the 8-bit floats as float32; None if it was not kept.

        Raises:
            InputError: the file is missing or damaged.
        """
        return None if self.load_tensor is None else self.load_tensor()

    @property
    def has_sketch(self) -> bool:
        """Whether :meth:`sketch` has something to answer, without reading it."""
        return self.load_sketch is not None

    @property
    def has_tensor(self) -> bool:
        """Whether :meth:`tensor` has something to answer, without reading it."""
        return self.load_tensor is not None


class CaptureReader(Protocol):
    """Reads a capture, whoever wrote it. Rows are made one at a time; data is read when a row is asked for it."""

    root: Path

    def steps(self) -> list[int]:
        """The finished steps, in order."""
        ...

    def stages(self, step: int) -> list[str]:
        """The stages of a step, in the order they ran where that is known."""
        ...

    def ranks(self, step: int, stage: str) -> list[int]:
        """The ranks that wrote this stage."""
        ...

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        """The rows in completion order.

        Raises:
            InputError: the file is missing, truncated or not of this format; the message names file and field.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """What is known about the capture as a whole: format, detail, provenance."""
        ...


_PICKED = re.compile(r"(^|\.)(local_)?experts\.\d+(\.|$)")


def holds_samples(module: str) -> bool:
    """Whether a module of this name may hold samples and tokens: a single expert holds the rows that chose it, which
    are as many now and then."""
    return not _PICKED.search(module)
