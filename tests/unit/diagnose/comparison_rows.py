"""Captures in memory: a chain of layers computed in NumPy, recorded as rows with whatever detail a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from alignment.capture.record import Statistics, TensorRow
from alignment.numerics.sketch import sketch_array

LAYERS, TOKENS, WIDTH = 4, 48, 32


def statistics_of(x: np.ndarray) -> Statistics:
    """Statistics as a capture takes them."""
    x = np.asarray(x, dtype=np.float64)
    finite = x[np.isfinite(x)]
    some = finite.size > 0
    return Statistics(
        max=float(finite.max()) if some else 0.0,
        min=float(finite.min()) if some else 0.0,
        mean=float(finite.mean()) if some else 0.0,
        l2=float(np.sqrt((finite**2).sum())),
        nan_count=int(np.isnan(x).sum()),
        inf_count=int(np.isinf(x).sum()),
        count=x.size,
    )


def row(
    module: str,
    x: np.ndarray,
    *,
    role: str = "output",
    path: str = "output",
    kind: str = "module",
    direction: str = "forward",
    order: int = 0,
    call: int = 0,
    detail: str = "sketch",
    class_name: str = "Layer",
    dtype: str = "float32",
    parent: str | None = None,
    **more,
) -> TensorRow:
    """One row of ``x`` with ``statistics``, ``sketch`` or ``tensor`` as its finest detail."""
    x = np.asarray(x)
    sketch = sketch_array(np.nan_to_num(x)) if detail != "statistics" else None
    kept = x.copy() if detail == "tensor" else None
    return TensorRow(
        module=module,
        class_name="" if kind.startswith("parameter") else class_name,
        kind=kind,
        direction=direction,
        call=call,
        role=role,
        path=path,
        order=order,
        parent=module.rpartition(".")[0] if parent is None else parent,
        dtype=dtype,
        shape=x.shape,
        statistics=statistics_of(x),
        load_sketch=(lambda: sketch) if sketch is not None else None,
        load_tensor=(lambda: kept) if kept is not None else None,
        **more,
    )


class Recorder:
    """Takes rows in completion order."""

    def __init__(self, detail: str = "sketch") -> None:
        self.detail, self.rows, self.order = detail, [], 0

    def call(
        self, module: str, inputs: np.ndarray, output: np.ndarray, *, call: int = 0, class_name: str = "Layer"
    ) -> None:
        """A call of ``module`` that has ended."""
        self.order += 1
        common = {"order": self.order, "call": call, "detail": self.detail, "class_name": class_name}
        self.rows.append(row(module, inputs, role="input", path="args.0", **common))
        self.rows.append(row(module, output, **common))

    def parameter(self, name: str, value: np.ndarray) -> None:
        self.rows.append(row(name, value, role="input", path="weight", kind="parameter", detail=self.detail))


def weights(seed: int = 0) -> list[np.ndarray]:
    """One matrix per layer that keeps the size of what it is given."""
    generator = np.random.Generator(np.random.Philox(seed))
    return [generator.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH) for _ in range(LAYERS)]


def chain(
    *,
    seed: int = 0,
    noise: float = 0.0,
    detail: str = "sketch",
    matrices: list[np.ndarray] | None = None,
    fault: Callable[[int, np.ndarray], np.ndarray] = lambda layer, y: y,
    x: np.ndarray | None = None,
    calls: int = 1,
    name: str = "model.layers.{}.linear",
    noise_seed: int = 1,
) -> list[TensorRow]:
    """``LAYERS`` times y = tanh(W x), rounding of size ``noise`` added, in ``calls`` equal parts of the tokens."""
    generator = np.random.Generator(np.random.Philox(noise_seed))
    matrices = weights(seed) if matrices is None else matrices
    if x is None:
        x = np.random.Generator(np.random.Philox(seed + 1000)).standard_normal((TOKENS, WIDTH))
    recorder = Recorder(detail)
    for layer, matrix in enumerate(matrices):
        recorder.parameter(name.format(layer) + ".weight", matrix)
    for call, part in enumerate(np.split(x, calls)):
        for layer, matrix in enumerate(matrices):
            out = fault(layer, np.tanh(part @ matrix.T))
            out = out * (1 + noise * generator.standard_normal(out.shape))
            recorder.call(name.format(layer), part, out, call=call)
            part = out
    return recorder.rows


class MemoryCapture:
    """A reader of rows in memory: step → stage → rank → rows."""

    def __init__(self, rows, *, root: str = "memory") -> None:
        self.root = Path(root)
        self._rows = rows if isinstance(rows, dict) else {0: {"train": {0: list(rows)}}}

    def steps(self) -> list[int]:
        return sorted(self._rows)

    def stages(self, step: int) -> list[str]:
        return list(self._rows[step])

    def ranks(self, step: int, stage: str) -> list[int]:
        return sorted(self._rows[step][stage])

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        return iter(self._rows[step][stage][rank])

    def describe(self) -> dict:
        return {}


def renamed(rows: list[TensorRow], name_of: Callable[[str], str]) -> list[TensorRow]:
    """The rows under other module names."""
    return [replace(r, module=name_of(r.module), parent=name_of(r.parent)) for r in rows]
