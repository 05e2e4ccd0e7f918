"""The fast path of reductions on a CPU: one pass in C++, built on first use where there is a compiler.

Without one, with ``ALIGNMENT_CAPTURE_KERNEL=off``, or for other dtypes, torch's own operations do the same in several
passes. Nothing but the time depends on it: both follow :mod:`alignment.numerics.sketch`, up to the rounding of sums.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment.devices.emulated_npu.build import cache_directory, compiler
from alignment.numerics.sketch import FOLD, LARGEST, SketchTables

SOURCE = Path(__file__).with_name("reduction.cpp")
SWITCH = "ALIGNMENT_CAPTURE_KERNEL"
# Sums may be taken in any order of their 16 lanes; elements that are not finite are found by their bits.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
_SECONDS = 120
_KEPT = 4096
"""Turns and plans that are kept for tensors of other lengths."""
_LISTS = 256
"""Lists of runs whose plans are kept: every micro batch has a few."""
_LINE = 16
"""Numbers of float32 in a line of the cache."""
_PIECE = 1 << 14
"""Elements of a sum that are made at once where there is no sketch: a core's own cache holds them."""
SUMMANDS = 4
"""Most tensors that are added up while they are reduced."""

Run = tuple[int, int, int, int]
"""First element, number of elements, and the group and slot of the sketch at which they begin."""
_Found = tuple[float, float, float, float]
"""Maximum, minimum, sum and sum of squares."""


class _Plan:
    """Runs as the library reads them.

    Attributes:
        address, count: of the runs.
        reach: how many buckets they may touch, from the first one on.
    """

    def __init__(self, runs: Sequence[Run], turns: Sequence[np.ndarray] = (), reach: int = 0) -> None:
        addresses = [t.ctypes.data for t in turns] or [0] * len(runs)
        self._rows = np.array([(*run, at) for run, at in zip(runs, addresses)], np.int64).reshape(-1, 5)
        self._turns = turns
        self.address, self.count, self.reach = self._rows.ctypes.data, len(runs), reach


class _Plans:
    """Plans of lists of runs that stay as they are, each made once."""

    def __init__(self, make: Callable[[Sequence[Run]], list[_Plan]]) -> None:
        self._make = make
        self._made: dict[int, tuple[Sequence[Run], list[_Plan]]] = {}

    def of(self, runs: Sequence[Run]) -> list[_Plan]:
        # The list is held, so nothing else can have its number.
        held = self._made.get(id(runs))
        if held is None:
            if len(self._made) >= _LISTS:
                self._made.clear()
            held = self._made[id(runs)] = runs, self._make(runs)
        return held[1]


class Kernel:
    """The built library."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.functions = {}
        for dtype in (torch.float32, torch.bfloat16):
            function = getattr(loaded, f"alignment_reduce_{str(dtype).removeprefix('torch.')}")
            function.argtypes = [
                pointer, pointer, integer, pointer, pointer, integer, pointer, *[integer] * 3, pointer, pointer,
            ]  # fmt: skip
            function.restype = ctypes.c_int
            self.functions[dtype] = function
        self.mix = loaded.alignment_mix
        self.mix.argtypes, self.mix.restype = [pointer, integer, integer, integer, *[pointer] * 3], None
        # An address costs a microsecond each time it is asked for.
        self.out = np.empty(4)
        self.out_at = self.out.ctypes.data
        self._others = np.empty(SUMMANDS - 1, np.int64)
        self._others_at = self._others.ctypes.data
        self._room = np.empty(0, np.float32)
        self.make_room(_PIECE)
        self._one = np.zeros((1, 5), np.int64)
        self._one_at = self._one.ctypes.data
        self._plans = _Plans(lambda runs: [_Plan(runs)])

    def make_room(self, count: int) -> None:
        """For the sum of so many elements. It only grows: those who needed more go on."""
        if count > len(self._room):
            self._room = np.empty(count, np.float32)
            self._room_at = self._room.ctypes.data

    def takes(self, flat: Tensor) -> bool:
        """Whether it reduces such a tensor."""
        return flat.dtype in self.functions

    def statistics(self, *summands: Tensor) -> _Found | None:
        """Maximum, minimum, sum and sum of squares of contiguous tensors of one shape, added up in their own dtype.

        None where a number is not finite.
        """
        self._one[0, 1] = summands[0].numel()
        return self._statistics(summands, self._one_at, 1)

    def statistics_of_spans(self, spans: Sequence[Run], *summands: Tensor) -> _Found | None:
        """:meth:`statistics` of pieces of contiguous tensors together."""
        [plan] = self._plans.of(spans)
        return self._statistics(summands, plan.address, plan.count)

    def _statistics(self, summands: Sequence[Tensor], runs: int, count: int) -> _Found | None:
        function, source = self.functions[summands[0].dtype], self.source(summands)
        broken = function(*source, runs, count, None, _PIECE, 0, 0, None, self.out_at)
        return None if broken else tuple(self.out.tolist())

    def source(self, summands: Sequence[Tensor]) -> tuple[int, int | None, int, int | None]:
        """The first arguments of a reduction."""
        first = summands[0].data_ptr()
        if len(summands) == 1:
            return first, None, 0, None
        item = summands[0].element_size()
        for i, t in enumerate(summands[1:]):
            self._others[i] = (t.data_ptr() - first) // item
        return first, self._others_at, len(summands) - 1, self._room_at

    def sketcher(self, tables: SketchTables) -> Sketcher:
        """What reduces and sketches with these tables."""
        return Sketcher(self, tables)


class Sketcher:
    """Reduces and sketches in one pass, in room of its own."""

    def __init__(self, kernel: Kernel, tables: SketchTables) -> None:
        self._kernel, self._tables = kernel, tables
        self._signs = tables.signs.astype(np.int8)
        self._before = tables.before.astype(np.int8)
        self._shape = len(tables.left), len(tables.right)
        self._after = np.ascontiguousarray(tables.after, np.float32)
        self._sums = _on_a_line(tables.before.size)
        self._flips: dict[int, np.ndarray] = {}
        self._fixed = tables.prime, tables.rows, tables.step
        self._plans = _Plans(self._planned)
        self._whole: dict[int, list[_Plan]] = {}
        arrays = self._signs, self._sums, self._before, self._after
        self._at = tuple(array.ctypes.data for array in arrays)
        kernel.make_room(tables.prime)

    def reduce(self, *summands: Tensor) -> tuple[_Found, np.ndarray] | None:
        """(statistics, sketch) of contiguous tensors of one shape, added up in their own dtype.

        None where a number is not finite or larger than a sketch takes.
        """
        n = summands[0].numel()
        plans = self._whole.get(n)
        if plans is None:
            if len(self._whole) >= _KEPT:
                self._whole.clear()
            plans = self._whole[n] = self._planned([(0, n, 0, 0)])
        return self._reduce(summands[0].dtype, self._kernel.source(summands), plans)

    def reduce_spans(self, spans: Sequence[Run], *summands: Tensor) -> tuple[_Found, np.ndarray] | None:
        """As :meth:`reduce`, of pieces of contiguous tensors; groups are multiples of
        :data:`~alignment.numerics.sketch.FOLD`."""
        return self._reduce(summands[0].dtype, self._kernel.source(summands), self._plans.of(spans))

    def reduce_parts(self, parts: Sequence[tuple[Tensor, int, int]]) -> tuple[_Found, np.ndarray] | None:
        """As :meth:`reduce_spans`, of flat contiguous tensors of one dtype, each with its group and slot."""
        first, item = parts[0][0], parts[0][0].element_size()
        base = first.data_ptr()
        runs = [((flat.data_ptr() - base) // item, flat.numel(), *where) for flat, *where in parts]
        return self._reduce(first.dtype, (base, None, 0, None), self._planned(runs))

    def _reduce(self, dtype: torch.dtype, source: tuple, plans: Sequence[_Plan]) -> tuple[_Found, np.ndarray] | None:
        tables, kernel, sums = self._tables, self._kernel, self._sums
        signs_at, sums_at, before_at, after_at = self._at
        blocks = -(-max(plan.reach for plan in plans) // tables.size)
        sums[: blocks * tables.size] = 0
        precise, found, function = None, (-math.inf, math.inf, 0.0, 0.0), kernel.functions[dtype]
        for number, plan in enumerate(plans):
            if number:
                precise = sums.astype(np.float64) if precise is None else precise + sums
                sums[:] = 0
            broken = function(*source, plan.address, plan.count, signs_at, *self._fixed, sums_at, kernel.out_at)
            a, b, s, q = kernel.out.tolist()
            if broken or a > LARGEST or b < -LARGEST:
                return None
            high, low, total, square = found
            found = max(high, a), min(low, b), total + s, square + q
        if precise is not None:
            sums[:] = precise + sums
        sketch = np.empty(tables.size, np.float32)
        kernel.mix(sums_at, *self._shape, blocks, before_at, after_at, sketch.ctypes.data)
        return found, sketch

    def _planned(self, runs: Sequence[Run]) -> list[_Plan]:
        """Runs of no more groups together than are added in float32."""
        tables, plans = self._tables, []
        group, prime = tables.group, tables.prime
        pieces: list[Run] = []
        turns: list[np.ndarray] = []
        room, reach = FOLD, 0
        for begin, n, first, slot in runs:
            shift = tables.shift(slot)
            for at in range(0, n, FOLD * group):
                length = min(n - at, FOLD * group)
                if -(-length // group) > room:
                    plans.append(_Plan(pieces, turns, reach))
                    pieces, turns, room, reach = [], [], FOLD, 0
                room -= -(-length // group)
                reach = max(reach, min(shift + length, prime))
                pieces.append((begin + at, length, first + at // group, shift))
                turns.append(self._turns(first + at // group))
        return [*plans, _Plan(pieces, turns, reach)]

    def _turns(self, first: int) -> np.ndarray:
        """The turns of the groups from ``first`` on."""
        found = self._flips.get(first)
        if found is None:
            if len(self._flips) >= _KEPT:
                self._flips.clear()
            found = self._flips[first] = np.array([self._tables.flips(first + i) for i in range(FOLD)], np.uint8)
        return found


def _on_a_line(count: int) -> np.ndarray:
    """Zeros of float32 that begin where a line of the cache does: numbers across two lines take twice as long."""
    room = np.zeros(count + _LINE, np.float32)
    skipped = -room.ctypes.data % (4 * _LINE) // 4
    return room[skipped : skipped + count]


@functools.cache
def kernel() -> Kernel | None:
    """The fast path, or None where it is switched off or cannot be built, which is said once."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        return None
    try:
        return Kernel(_built())
    except (OSError, subprocess.SubprocessError, AttributeError, ValueError) as error:
        text = error.stderr.decode(errors="replace").strip() if getattr(error, "stderr", None) else str(error)
        reason = text.splitlines()[0] if text else type(error).__name__
        print(
            "capture: the C++ function that reduces tensors on a CPU in one pass cannot be built, so torch does it in"
            f" several and a capture costs about twice as much ({reason}); install g++ or name a C++17 compiler in CXX,"
            f" or set {SWITCH}=off to do without",
            file=sys.stderr,
            flush=True,
        )
        return None


def _built() -> Path:
    command = [*compiler(), *_FLAGS, *filter(None, [_NATIVE.get(platform.machine())])]
    digest = hashlib.sha256()
    for part in (SOURCE.read_bytes(), " ".join(command).encode(), _processor()):
        digest.update(len(part).to_bytes(8, "little") + part)
    library = cache_directory() / "capture" / f"libreduction-{digest.hexdigest()[:16]}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run([*command, "-o", str(made), str(SOURCE)], check=True, capture_output=True, timeout=_SECONDS)
            # Two processes that build at once put the same library in the same place.
            os.replace(made, library)
    return library


def _processor() -> bytes:
    """What the compiler's ``native`` depends on: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor().encode()
    kinds = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})).encode()
