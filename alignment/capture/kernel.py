"""The fast path of reductions on a CPU: one pass in C++, built on first use where there is a compiler.

Without one, with ``ALIGNMENT_CAPTURE_KERNEL=off``, or for other dtypes, torch's own operations do the same in several
passes. Nothing but the time depends on it: both follow :mod:`alignment.numerics.sketch`, up to the rounding of sums.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
_TURNS = 4096
_LINE = 16
"""Numbers of float32 in a line of the cache."""


class Kernel:
    """The built library."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._functions = {}
        for dtype in (torch.float32, torch.bfloat16):
            function = getattr(loaded, f"alignment_reduce_{str(dtype).removeprefix('torch.')}")
            pointer, integer = ctypes.c_void_p, ctypes.c_int64
            function.argtypes = [
                pointer,
                integer,
                pointer,
                pointer,
                integer,
                integer,
                integer,
                integer,
                pointer,
                pointer,
            ]
            function.restype = ctypes.c_int
            self._functions[dtype] = function
        self._mix = loaded.alignment_mix
        self._mix.argtypes, self._mix.restype = [pointer, integer, integer, integer, *[pointer] * 3], None
        self._out = np.empty(4)
        self._out_at = self._out.ctypes.data

    def takes(self, flat: Tensor) -> bool:
        """Whether it reduces such a tensor."""
        return flat.dtype in self._functions

    def statistics(self, flat: Tensor) -> tuple[float, float, float, float] | None:
        """Maximum, minimum, sum and sum of squares of a flat contiguous tensor; None where one is not finite."""
        broken = self._functions[flat.dtype](flat.data_ptr(), flat.numel(), None, None, 0, 0, 0, 0, None, self._out_at)
        return None if broken else tuple(self._out.tolist())

    def statistics_of_spans(
        self, flat: Tensor, spans: Sequence[tuple[int, int, int]]
    ) -> tuple[float, float, float, float] | None:
        """:meth:`statistics` of pieces of a contiguous tensor together: first element, number of elements."""
        at, item, function, out = flat.data_ptr(), flat.element_size(), self._functions[flat.dtype], self._out
        high, low, total, square = -np.inf, np.inf, 0.0, 0.0
        for begin, n, _ in spans:
            if function(at + begin * item, n, None, None, 0, 0, 0, 0, None, self._out_at):
                return None
            a, b, s, q = out.tolist()
            high, low, total, square = max(high, a), min(low, b), total + s, square + q
        return high, low, total, square

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
        self._flips: dict[int, tuple[int, np.ndarray]] = {}
        self._fixed = tables.prime, tables.rows, tables.step
        # An address costs a microsecond each time it is asked for.
        arrays = self._signs, self._sums, self._before, self._after
        self._at = tuple(array.ctypes.data for array in arrays)

    def reduce(self, flat: Tensor) -> tuple[tuple[float, float, float, float], np.ndarray] | None:
        """(statistics, sketch) of a flat contiguous tensor.

        None where an element is not finite or larger than a sketch takes.
        """
        return self.reduce_parts([(flat, 0)])

    def reduce_parts(
        self, parts: Sequence[tuple[Tensor, int]]
    ) -> tuple[tuple[float, float, float, float], np.ndarray] | None:
        """As :meth:`reduce` of flat contiguous tensors together, each with the group of the sketch at which it begins
        (a multiple of :data:`~alignment.numerics.sketch.FOLD`)."""
        runs = [(flat.data_ptr(), flat.numel(), group) for flat, group in parts]
        return self._reduce(parts[0][0].dtype, parts[0][0].element_size(), runs)

    def reduce_spans(
        self, flat: Tensor, spans: Sequence[tuple[int, int, int]]
    ) -> tuple[tuple[float, float, float, float], np.ndarray] | None:
        """As :meth:`reduce_parts` of pieces of one contiguous tensor: first element, number of elements, group."""
        at, item = flat.data_ptr(), flat.element_size()
        return self._reduce(flat.dtype, item, [(at + begin * item, n, group) for begin, n, group in spans])

    def _reduce(
        self, dtype: torch.dtype, item: int, runs: Sequence[tuple[int, int, int]]
    ) -> tuple[tuple[float, float, float, float], np.ndarray] | None:
        """Runs are an address, a number of elements and a group."""
        tables, kernel, sums = self._tables, self._kernel, self._sums
        signs_at, sums_at, before_at, after_at = self._at
        used = min(max(n for _, n, _ in runs), tables.prime)
        blocks = -(-used // tables.size)
        sums[: blocks * tables.size] = 0
        high, low, total, square = -np.inf, np.inf, 0.0, 0.0
        precise, added, function = None, 0, kernel._functions[dtype]
        for at, n, group in runs:
            for begin in range(0, n, FOLD * tables.group):
                first = group + begin // tables.group
                length = min(n - begin, FOLD * tables.group)
                groups = -(-length // tables.group)
                if added + groups > FOLD:
                    precise = sums.astype(np.float64) if precise is None else precise + sums
                    sums[:] = 0
                    added = 0
                added += groups
                broken = function(
                    at + begin * item, length, signs_at, self._turns(first), *self._fixed, first, sums_at,
                    kernel._out_at,
                )  # fmt: skip
                a, b, s, q = kernel._out.tolist()
                if broken or a > LARGEST or b < -LARGEST:
                    return None
                high, low, total, square = max(high, a), min(low, b), total + s, square + q
        if precise is not None:
            sums[:] = precise + sums
        sketch = np.empty(tables.size, np.float32)
        kernel._mix(sums_at, *self._shape, blocks, before_at, after_at, sketch.ctypes.data)
        return (high, low, total, square), sketch

    def _turns(self, first: int) -> int:
        """Where the turns of the groups from ``first`` on are."""
        found = self._flips.get(first)
        if found is None:
            if len(self._flips) >= _TURNS:
                self._flips.clear()
            turns = np.array([self._tables.flips(first + i) for i in range(FOLD)], np.uint8)
            found = self._flips[first] = (turns.ctypes.data, turns)
        return found[0]


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
