"""One stage of one step while it runs: the rows so far, what was reduced, and the tensors on their way to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignment.capture.own_format import PART_BYTES, RowColumns, write_part, write_rows
from alignment.capture.record import Shard, holds_samples
from alignment.capture.reduction import Reduced, Reducer, _to_host
from alignment.capture.samples import Samples
from alignment.capture.writer import BackgroundWriter
from alignment.numerics.sketch import Place

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class StageRecord:
    """Takes rows from hooks and hands them to the writer when the stage ends.

    Args:
        reducer: reduces the tensors.
        writer: writes the files.
        root, step, stage, rank, piece: where; a stage that runs again in a step writes another piece.
        real_tokens: whether padding is left out where the samples of a tensor are known.
        by_sample: one sketch per sample where it can be.
        calls: number of calls so far in this step and stage, by module; goes on where a stage runs again.
        parameters: versions of the parameters that are recorded in this step and stage.
        met: how often each sample went through the model in this step and stage.
    """

    def __init__(
        self,
        *,
        reducer: Reducer,
        writer: BackgroundWriter,
        root: Path,
        step: int,
        stage: str,
        rank: int,
        piece: str = "",
        real_tokens: bool = True,
        by_sample: bool = False,
        calls: dict[str, int] | None = None,
        parameters: dict[str, tuple] | None = None,
        met: dict[str, int] | None = None,
    ) -> None:
        self.reducer, self._writer = reducer, writer
        self._place = (root, step, stage, rank)
        self._piece, self._real_tokens = piece, real_tokens or by_sample
        reducer.each_sample = by_sample
        self._calls = {} if calls is None else calls
        self._parameters = {} if parameters is None else parameters
        self._met = {} if met is None else met
        self._rows: list[tuple] = []
        self._groups: list[Samples] = []
        self._group_of: dict[tuple, int] = {}
        self._group = -1
        self.samples: Samples | None = None
        self.keeps = False
        self._busy = _OwnWork(writer)
        self._kept: dict[str, tuple[str, tuple[int, ...], Tensor, Callable[[], None]]] = {}
        self._kept_bytes = self._kept_count = 0
        self._parts: list[str] = []
        self._settings: dict[str, tuple[str, Mapping[str, Any]]] = {}
        reducer.begin()

    # --- while it runs -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether rows are taken: the disk has not failed, and the capture is not looking at itself."""
        return not self._busy.depth and self._writer.failure is None

    def own_work(self) -> _OwnWork:
        """What is computed inside belongs to the capture, not to the model; what fails inside ends the capture only."""
        return self._busy

    def set_samples(self, samples: Samples | None) -> Samples | None:
        """The samples of the micro batch that runs from here on; answers with the earlier ones."""
        before, self.samples = self.samples, samples
        self.reducer.samples = samples if self._real_tokens else None
        if samples is None:
            self._group = -1
        else:
            key = samples.keys, samples.bounds, samples.shape
            self._group = self._group_of.setdefault(key, len(self._groups))
            if self._group == len(self._groups):
                self._groups.append(samples)
        return before

    @property
    def met(self) -> dict[str, int]:
        """How often each sample went through the model in this step and stage, see
        :meth:`~alignment.capture.samples.Samples.counted`."""
        return self._met

    def next_call(self, name: str) -> int:
        """Counts a call of ``name`` and answers with its number, from 0."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return call

    def calls_of(self, name: str) -> int:
        """How often ``name`` was called so far."""
        return self._calls.get(name, 0)

    def first_time(self, name: str, *parts: Tensor, exchanged: bool = False) -> bool:
        """Whether a parameter, or what it is made up of, is not recorded yet as it is now.

        Args:
            name: the parameter's.
            parts: its tensors. Those that inference mode made count no versions.
            exchanged: whether another tensor in a part's place is another state, too.
        """
        state = tuple((id(t) if exchanged else 0, 0 if t.is_inference() else t._version) for t in parts)
        if self._parameters.get(name) == state:
            return False
        self._parameters[name] = state
        return True

    def reduce(self, t: Tensor, *, shard: Shard | None = None, by_sample: bool = True) -> Reduced:
        """Statistics, sketch and copy of a tensor, as far as they are asked for."""
        place = None
        if shard is not None and not shard.runs and self.reducer.sketch_size and t.dim():
            place = Place.of(tuple(t.shape), dim=shard.dim, start=shard.start, whole=shard.whole)
        return self.reducer.add(t, place=place, by_sample=by_sample, shard=shard)

    def reduce_sum(self, summands: Sequence[Tensor], *, by_sample: bool = True) -> Reduced:
        """:meth:`reduce` of the sum of tensors of one shape and dtype."""
        return self.reducer.add_sum(summands, by_sample=by_sample)

    def row(
        self,
        module: str,
        class_name: str,
        kind: str,
        direction: str,
        call: int,
        role: str,
        path: str,
        parent: str,
        t: Tensor,
        reduced: Reduced,
        shard: Shard | None = None,
    ) -> None:
        """Adds a row in completion order."""
        group = self._group
        if reduced.sketches:
            pass
        elif group >= 0 and kind in ("module", "operator", "value"):
            b, s = self.samples.shape
            leading = t.shape[:2]
            fits = len(leading) and (leading[0] == b or tuple(leading) == (s, b))
            if not fits or not holds_samples(parent if kind == "operator" else module):
                group = -1
        elif kind != "value":
            group = -1
        self._rows.append(
            (
                module,
                class_name,
                kind,
                direction,
                call,
                role,
                path,
                parent,
                t.dtype,
                tuple(t.shape),
                shard,
                group,
                reduced,
            )
        )

    def number(self, module: str, kind: str, direction: str, call: int, path: str, parent: str, value: float) -> None:
        """Adds a row for a Python number among an operator's arguments."""
        reduced = self.reducer.add_number(value)
        self._rows.append(
            (module, "", kind, direction, call, "input", path, parent, type(value).__name__, (), None, -1, reduced)
        )

    def settings(self, module: str, class_name: str, found: Mapping[str, Any]) -> None:
        """Adds the plain settings of a module."""
        if found:
            self._settings[module] = class_name, found

    def parameter_gradient(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of a whole parameter, summed over micro batches and ranks; a call is an update."""
        with self._busy:
            parent, _, local = name.rpartition(".")
            call = self.next_call(f"{name}\0gradient")
            self.row(
                name, "", "parameter_gradient", "backward", call, "output", local, parent, gradient,
                self.reduce(gradient, by_sample=False),
            )  # fmt: skip

    def keep(self, t: Tensor) -> str | None:
        """Copies a tensor to the host for the disk; answers with the name it will be found by."""
        dtype = str(t.dtype).removeprefix("torch.")
        if t.device.type == "cpu":
            # A copy even where it is contiguous: the run goes on and may write into it.
            host, wait = t.detach().clone(memory_format=torch.contiguous_format), _nothing
        else:
            host, wait = _to_host(t.detach().contiguous())
        name = f"t{self._kept_count}"
        self._kept_count += 1
        self._kept[name] = (dtype, tuple(t.shape), host, wait)
        self._kept_bytes += host.numel() * host.element_size()
        spec = f"{len(self._parts)}/{name}"
        if self._kept_bytes >= PART_BYTES:
            self._send_part()
        return spec

    # --- when it has ended -------------------------------------------------------------------------------------------

    def finish(self, about: dict[str, Any] | None = None) -> None:
        """Hands everything to the writer."""
        if self._writer.failure is not None or not self._rows:
            return
        self._send_part()
        count, statistics, sketches = self.reducer.results()
        rows, groups, parts, place, piece = self._rows, list(self._groups), list(self._parts), self._place, self._piece
        size, settings = self.reducer.sketch_size, self._settings

        def write() -> None:
            write_rows(
                *place, _columns(rows), piece=piece, statistics=statistics(),
                sketches=sketches() if size else _NO_SKETCHES,
                key_groups=[group.keys for group in groups],
                key_bounds=[(group.shape, group.bounds) for group in groups],
                parts=parts, settings=settings, about=about,
            )  # fmt: skip

        self._writer.submit(write, 200 * len(rows) + 4 * size * self.reducer.sketches + 56 * count)

    def _send_part(self) -> None:
        if not self._kept:
            return
        tensors, nbytes, index = self._kept, self._kept_bytes, len(self._parts)
        self._kept, self._kept_bytes = {}, 0
        root, step, stage, rank = self._place
        self._parts.append(f"rank{rank}{'.' + self._piece if self._piece else ''}-{index:05d}.safetensors")
        piece = self._piece

        def write() -> None:
            buffers = {}
            for name, (dtype, shape, host, wait) in tensors.items():
                wait()
                buffers[name] = (dtype, shape, _bits(host))
            write_part(root, step, stage, rank, index, buffers, piece=piece)

        self._writer.submit(write, nbytes)


class _OwnWork:
    """A block that counts how deep it is entered, and lets no failure out into the run."""

    __slots__ = ("depth", "_writer")

    def __init__(self, writer: BackgroundWriter) -> None:
        self.depth, self._writer = 0, writer

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self.depth -= 1
        if not isinstance(error, Exception):
            return False
        self._writer.fail(f"{kind.__name__}: {error}")
        return True


_NO_SKETCHES = np.empty((0, 1), np.float32)


def _nothing() -> None:
    return None


def _bits(host: Tensor) -> np.ndarray:
    """The bytes of a contiguous host tensor of any dtype."""
    return host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)


def _numbers(shard: Shard) -> tuple[int, ...]:
    return (shard.dim, shard.start, shard.length, shard.whole, *(n for run in shard.runs for n in run))


def _columns(rows: Sequence[tuple]) -> RowColumns:
    columns = RowColumns()
    names = ("module", "class_name", "kind", "direction", "call", "role", "path", "parent")
    if rows:
        for name, values in zip(names, zip(*(row[:8] for row in rows))):
            getattr(columns, name).extend(values)
    columns.order.extend(range(len(rows)))
    for *_, dtype, shape, shard, group, reduced in rows:
        columns.dtype.append(str(dtype).removeprefix("torch."))
        columns.shape.append(shape)
        columns.shard.append(None if shard is None else _numbers(shard))
        columns.keys.append(group)
        columns.statistics.append(reduced.statistics)
        columns.sketch.append(reduced.sketch)
        columns.sketch_count.append(reduced.sketches)
        columns.tensor.append(reduced.tensor)
    return columns
