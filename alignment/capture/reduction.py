"""Every tensor read once: statistics and sketch on the device it lies on, shared by all the rows that name it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from alignment.capture.kernel import SUMMANDS, Kernel, Sketcher, kernel
from alignment.capture.record import CHAIN, Shard
from alignment.capture.samples import Part, Samples
from alignment.numerics.sketch import LARGEST, Buckets, Filling, Place, bounded, sketch_tables

_MIXED_AT_ONCE = 32
_ABSENT = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_Sums = tuple[float, float, float, float, int, int, int]
"""Maximum, minimum, sum and sum of squares of the finite elements; NaN, infinite and all elements."""
_NOTHING: _Sums = (-math.inf, math.inf, 0.0, 0.0, 0, 0, 0)
OF_SAMPLES = -1
"""In place of a number of sketches: one of the real tokens of all samples, each at the place that its key names."""


class Reduced(NamedTuple):
    """Where the results of one tensor are: indices, −1 for none. ``sketches`` is 0 for one sketch of the whole,
    :data:`OF_SAMPLES`, or the number of samples that have one each."""

    statistics: int
    sketch: int
    sketches: int
    tensor: str | None = None


class Reducer:
    """Reduces the tensors of one stage.

    Results wait on their device and are fetched by :meth:`results`. On a CPU they are computed piece by piece while
    the piece is in the cache; elsewhere as a few whole-tensor operations, without waiting for the device.

    Args:
        sketch_size: 0 for statistics alone.
        deduplicate: answer with the earlier result for a tensor that still lives at the same version.

    Attributes:
        samples: of the micro batch that is running. Tensors that are made of samples and tokens are reduced by their
            real tokens alone then.
        each_sample: whether every sample has a sketch of its own.
    """

    def __init__(self, *, sketch_size: int, sketch_seed: int = 0, deduplicate: bool = True) -> None:
        self.sketch_size, self.sketch_seed, self.deduplicate = sketch_size, sketch_seed, deduplicate
        self._keep: Callable[[Tensor], str | None] | None = None
        self.samples: Samples | None = None
        self.each_sample = False
        self._buckets: dict[str, Buckets] = {}
        self._pending: dict[str, tuple[Tensor, list[int]]] = {}
        self._pieces: dict[str, Tensor] = {}
        self._sketcher: Sketcher | None = None
        self.begin()

    def begin(self) -> None:
        """Forgets everything: another stage begins."""
        self._seen: dict[tuple, tuple[StorageWeakRef, Reduced]] = {}
        self._held: dict[int, Samples | None] = {}
        self._statistics: list[tuple[float, ...] | None] = []
        self._on_device: dict[str, list[tuple[int, int, Tensor, Tensor]]] = {}
        self._sketches: list[Tensor] = []
        self._ready: list[tuple[int, np.ndarray]] = []
        self._sketch_rows: list[list[int]] = []
        self._sketch_count = 0
        for _, indices in self._pending.values():
            indices.clear()

    def keep_with(self, keep: Callable[[Tensor], str | None] | None) -> None:
        """From here on calls ``keep`` for every tensor that is reduced; it answers with the name it is stored by."""
        self._keep = keep

    def add(
        self, t: Tensor, *, place: Place | None = None, by_sample: bool = True, shard: Shard | None = None
    ) -> Reduced:
        """Reduces ``t`` unless it is already done.

        Args:
            place: of a shard in the whole; its sketch is taken there.
            by_sample: whether its leading dimensions may be samples and tokens.
            shard: what ``place`` says, by dimension; of several runs, instead of it.
        """
        samples = self.samples if by_sample else None
        key = None
        if self.deduplicate and not t.is_inference():
            at = shard if shard is not None and shard.runs else place
            key = (t.data_ptr(), t._version, t.dtype, t.shape, t.stride(), at, id(samples))
            storage, seen = t.untyped_storage(), self._seen.get(key)
            # A storage that lives may have given its memory to another one: FSDP2 resizes to nothing what it gathered.
            # While there is a reference to a storage, no other one has its number.
            if seen is not None and seen[0].cdata == storage._cdata:
                return seen[1]
            self._held[id(samples)] = samples
        reduced = self._at_once(t, samples=samples) if shard is None and place is None else None
        if reduced is None:
            reduced = self._reduce(t.detach(), place, samples, shard)
        if key is not None:
            self._seen[key] = (StorageWeakRef(storage), reduced)
        return reduced

    def add_sum(self, summands: Sequence[Tensor], *, by_sample: bool = True) -> Reduced:
        """Reduces the sum of tensors of one shape and dtype, added up in their order in that dtype: on a CPU without
        making it where that can be done."""
        reduced = None
        if len(summands) <= SUMMANDS:
            reduced = self._at_once(*summands, samples=self.samples if by_sample else None)
        if reduced is None:
            reduced = self.add(added_up(summands), by_sample=by_sample)
        return reduced

    def reads_summands(self, summands: Sequence[Tensor]) -> bool:
        """Whether :meth:`add_sum` may do without making the sum; if not, nothing is gained by holding the summands."""
        fast = kernel()
        by_sample = self.each_sample and self.sketch_size
        return fast is not None and self._keep is None and not by_sample and _plain(fast, summands)

    @property
    def sketches(self) -> int:
        """How many sketches there are."""
        return self._sketch_count

    def add_number(self, value: float) -> Reduced:
        """Statistics of a Python number."""
        value = float(value)
        finite = math.isfinite(value)
        v = value if finite else 0.0
        self._statistics.append((v, v, v, abs(v), float(math.isnan(value)), float(math.isinf(value)), 1.0))
        return Reduced(len(self._statistics) - 1, -1, 0)

    def results(self) -> tuple[np.ndarray, Callable[[], np.ndarray], Callable[[], np.ndarray]]:
        """(statistics placeholder size, then two functions that wait for the device): see the session."""
        for device in self._pending:
            self._mix(device)
        statistics = list(self._statistics)
        fetched = []
        for device, rows in self._on_device.items():
            places = [(i, count, partial.shape[1]) for i, count, _, partial in rows]
            stacked, partials = torch.stack([row for _, _, row, _ in rows]), torch.cat([p for *_, p in rows], 1)
            fetched.append((places, _to_host(stacked), _to_host(partials)))
        sketches = [(rows, *_to_host(mixed)) for rows, mixed in zip(self._sketch_rows, self._sketches)]
        total, size, ready = self._sketch_count, self.sketch_size, self._ready

        def all_statistics() -> np.ndarray:
            out = np.array([row or _ABSENT for row in statistics], np.float64).reshape(-1, 7)
            for places, *both in fetched:
                for _, wait in both:
                    wait()
                rows, partials = (host.double().numpy() for host, _ in both)
                at = 0
                for (index, count, length), row in zip(places, rows):
                    total, square = partials[:, at : at + length].sum(1)
                    out[index] = _host_statistics(row, total, square, count)
                    at += length
            return out

        def all_sketches() -> np.ndarray:
            out = np.zeros((total, size), np.float32)
            for index, sketch in ready:
                out[index] = sketch
            for rows, host, wait in sketches:
                wait()
                out[rows] = host.numpy()
            return out

        return len(statistics), all_statistics, all_sketches

    # --- one tensor --------------------------------------------------------------------------------------------------

    def _reduce(self, t: Tensor, place: Place | None, samples: Samples | None, shard: Shard | None) -> Reduced:
        if t.is_sparse or t.is_quantized or t.device.type == "meta":
            return Reduced(-1, -1, 0)
        if t.is_complex():
            t = torch.view_as_real(t)
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        stored = self._keep(t) if self._keep is not None else None
        index = len(self._statistics)
        self._statistics.append(None)
        on_cpu = t.device.type == "cpu"
        first = self._sketch_count if self.sketch_size else -1
        several = shard is not None and len(shard.runs) > 0
        parts = samples.parts(t, shard) if samples is not None and not (several and self.each_sample) else None
        if parts is not None:
            reduce = self._parts_on_cpu if on_cpu else self._parts_on_accelerator
            reduce(index, parts)
            return Reduced(index, first, len(parts) if self.each_sample and self.sketch_size else OF_SAMPLES, stored)
        if several:
            self._in_runs(index, t, shard, on_cpu)
            return Reduced(index, first, 0, stored)
        if not self.sketch_size:
            if not (on_cpu and self._flat_at_once(index, t, sketch=False)):
                self._whole(index, t, None, None, on_cpu)
        elif place is not None or not (on_cpu and self._flat_at_once(index, t, sketch=True)):
            self._whole(index, t, place, self._fill(t), on_cpu)
        return Reduced(index, first, 0, stored)

    def _at_once(self, *summands: Tensor, samples: Samples | None) -> Reduced | None:
        """The most frequent layouts in one pass in C++ and without a view per sample; None where it is another one, or
        needs more care."""
        fast, t = kernel(), summands[0]
        if fast is None or self._keep is not None or not _plain(fast, summands):
            return None
        spans = None
        if samples is not None:
            if self.each_sample and self.sketch_size:
                return None
            spans = samples.spans(t)
            if not spans or not any(n for _, n, *_ in spans):
                return None
        sketch = None
        if not self.sketch_size:
            whole = spans is None or samples.full
            found = fast.statistics(*summands) if whole else fast.statistics_of_spans(spans, *summands)
        else:
            sketcher = self._fast()
            both = sketcher.reduce(*summands) if spans is None else sketcher.reduce_spans(spans, *summands)
            found, sketch = both if both is not None else (None, None)
        if found is None or not _sure(found):
            return None
        count = t.numel() if spans is None else sum(n for _, n, *_ in spans)
        index, first = len(self._statistics), self._sketch_count if self.sketch_size else -1
        self._statistics.append(None)
        self._keep_found(index, found, count, sketch)
        return Reduced(index, first, 0 if spans is None else OF_SAMPLES)

    def _keep_found(self, index: int, found: tuple[float, ...], count: int, sketch: np.ndarray | None) -> None:
        """What one pass found of finite elements: their statistics, and the next sketch where one was made."""
        high, low, total, square = found
        self._statistics[index] = (high, low, total / count, math.sqrt(square), 0.0, 0.0, float(count))
        if sketch is not None:
            self._ready.append((self._sketch_count, sketch))
            self._sketch_count += 1

    def _parts_on_cpu(self, index: int, parts: Sequence[Part]) -> None:
        """Statistics of all parts together; one sketch of all, or one of each."""
        sums: list[_Sums] = []
        if not self.sketch_size:
            sums = [self._sums(part.t) for part in parts]
        elif self.each_sample:
            for part in parts:
                sums += self._sketched([part])
        else:
            sums = self._sketched(parts)
        self._statistics[index] = _finished(sums)

    def _sketched(self, parts: Sequence[Part]) -> list[_Sums]:
        """Fills the next sketch."""
        fast = kernel()
        flat = [_flat(part.t, ordered=True) for part in parts]
        if fast is not None and all(part.place is None and fast.takes(part.t) for part in parts):
            both = self._fast().reduce_parts([(f, part.group, part.slot) for f, part in zip(flat, parts)])
            if both is not None and _sure(both[0]):
                self._ready.append((self._sketch_count, both[1]))
                self._sketch_count += 1
                return [(*both[0], 0, 0, sum(map(len, flat)))]
        fill = self._fill(parts[0].t)
        sums = []
        for f, part in zip(flat, parts):
            fill.shift = fill.buckets.tables.shift(part.slot)
            if part.place is None:
                sums.append(self._in_pieces(f, fill, part.group))
                continue
            sums.append(self._in_pieces(f, None))
            for group, piece in fill.buckets.pieces(f, part.place):
                fill.add(part.group + group, bounded(piece.float()))
        fill.finish()
        return sums

    def _sums(self, t: Tensor) -> _Sums:
        fast = kernel()
        if fast is not None and t.numel() and fast.takes(t):
            found = fast.statistics(_flat(t, ordered=False))
            if found is not None and _sure(found):
                return (*found, 0, 0, t.numel())
        return self._in_pieces(_flat(t, ordered=False), None)

    def _in_runs(self, index: int, t: Tensor, shard: Shard, on_cpu: bool) -> None:
        """One sketch of all pieces, each at its place in the whole."""
        parts = []
        for at, start, length in shard.cuts():
            piece = t.narrow(shard.dim, at, length)
            place = Place.of(tuple(piece.shape), dim=shard.dim, start=start, whole=shard.whole)
            parts.append(Part(t=piece, group=0, place=place))
        each, self.each_sample = self.each_sample, False
        try:
            (self._parts_on_cpu if on_cpu else self._parts_on_accelerator)(index, parts)
        finally:
            self.each_sample = each

    def _parts_on_accelerator(self, index: int, parts: Sequence[Part]) -> None:
        flat = [part.t.reshape(-1) for part in parts]
        clean = self._on_device_statistics(index, torch.cat(flat))
        if not self.sketch_size:
            return
        fill = None
        for piece, part in zip(flat if clean is None else clean.split([len(f) for f in flat]), parts):
            if fill is None or self.each_sample:
                fill = self._fill(part.t)
            fill.shift = fill.buckets.tables.shift(part.slot)
            for group, elements in fill.buckets.pieces(piece, part.place):
                fill.add(part.group + group, elements)
            if self.each_sample:
                fill.finish()
        fill.finish()

    def _fast(self) -> Sketcher:
        if self._sketcher is None:
            self._sketcher = kernel().sketcher(sketch_tables(self.sketch_size, self.sketch_seed))
        return self._sketcher

    def _flat_at_once(self, index: int, t: Tensor, *, sketch: bool) -> bool:
        """One pass in C++; False where there is no fast path, or the numbers need the careful one."""
        fast = kernel()
        count = t.numel()
        if fast is None or not count or not fast.takes(t):
            return False
        flat = _flat(t, ordered=sketch)
        made = None
        if not sketch:
            found = fast.statistics(flat)
        else:
            both = self._fast().reduce(flat)
            found, made = both if both is not None else (None, None)
        if found is None or not _sure(found):
            return False
        self._keep_found(index, found, count, made)
        return True

    def _whole(self, index: int, t: Tensor, place: Place | None, fill: Filling | None, on_cpu: bool) -> None:
        if not on_cpu:
            self._on_accelerator(index, t, place, fill)
            return
        flat = _flat(t, ordered=fill is not None)
        if place is None:
            self._statistics[index] = _finished([self._in_pieces(flat, fill)])
        else:
            self._statistics[index] = _finished([self._in_pieces(flat, None)])
            for group, piece in fill.buckets.pieces(flat, place):
                fill.add(group, bounded(piece.float()))
        if fill is not None:
            fill.finish()

    def _in_pieces(self, flat: Tensor, fill: Filling | None, first: int = 0) -> _Sums:
        count = len(flat)
        if count == 0:
            return _NOTHING
        length = fill.buckets.group if fill is not None else _PIECE
        high, low, total, square, nan_count, inf_count = -math.inf, math.inf, 0.0, 0.0, 0, 0
        dtype = flat.dtype
        wide = not dtype.is_floating_point or dtype == torch.float64
        for group, start in enumerate(range(0, count, length)):
            piece = flat[start : start + length] if count > length else flat
            if wide:
                piece = piece.double()
            elif dtype != torch.float32:
                piece = self._scratch(length)[: len(piece)].copy_(piece)
            # NumPy's extremes and dot product take half the time of torch's, its sum three times as long.
            values = piece.numpy()
            a, b = float(values.min()), float(values.max())
            if not (math.isfinite(a) and math.isfinite(b)):
                finite = piece.isfinite()
                nans = int(piece.isnan().sum())
                nan_count += nans
                inf_count += len(piece) - int(finite.sum()) - nans
                kept = piece[finite]
                piece = torch.where(finite, piece, 0.0)
                values = piece.numpy()
                a, b = (v.item() for v in torch.aminmax(kept)) if len(kept) else (math.inf, -math.inf)
            with np.errstate(over="ignore", invalid="ignore"):
                s, q = piece.sum().item(), _squares(values)
            if not (math.isfinite(s) and math.isfinite(q)) or 0.0 < max(abs(a), abs(b)) < _SMALL:
                # Squares leave the range of float32 before the numbers do.
                precise = piece.double()
                s, q = precise.sum().item(), torch.dot(precise, precise).item()
            low, high, total, square = min(low, a), max(high, b), total + s, square + q
            if fill is not None:
                if wide:
                    piece = piece.float()
                if a < -LARGEST or b > LARGEST:
                    piece = piece.clamp(-LARGEST, LARGEST)
                fill.add(first + group, piece)
        return high, low, total, square, nan_count, inf_count, count

    def _on_accelerator(self, index: int, t: Tensor, place: Place | None, fill: Filling | None) -> None:
        clean = self._on_device_statistics(index, t.reshape(-1))
        if clean is not None and fill is not None:
            for group, piece in fill.buckets.pieces(clean, place):
                fill.add(group, piece)
            fill.finish()

    def _on_device_statistics(self, index: int, flat: Tensor) -> Tensor | None:
        """Answers with the elements as a sketch takes them, None where there are none."""
        count = len(flat)
        if count == 0:
            self._statistics[index] = _ABSENT
            return None
        x = flat.float()
        finite = x.isfinite()
        clean = torch.where(finite, x, 0.0)
        row = torch.stack(
            [
                torch.where(finite, x, -math.inf).amax(),
                torch.where(finite, x, math.inf).amin(),
                x.isnan().sum().float(),
                x.isinf().sum().float(),
            ]
        )
        partial = torch.stack([_partial(clean), _partial(clean * clean)])
        self._on_device.setdefault(str(flat.device), []).append((index, count, row, partial))
        return clean.clamp(-LARGEST, LARGEST) if self.sketch_size else clean

    # --- sketches ----------------------------------------------------------------------------------------------------

    def _fill(self, t: Tensor) -> Filling:
        """The next sketch of a tensor on this device."""
        device = str(t.device)
        if device not in self._buckets:
            # Room that is made inside inference mode could not be written outside.
            with torch.inference_mode(False):
                buckets = Buckets(size=self.sketch_size, seed=self.sketch_seed, device=device)
                self._buckets[device], self._pending[device] = buckets, (buckets.zeros(_MIXED_AT_ONCE), [])
        sums, indices = self._pending[device]
        if len(indices) == _MIXED_AT_ONCE:
            self._mix(device)
            sums, indices = self._pending[device]
        indices.append(self._sketch_count)
        self._sketch_count += 1
        sums[len(indices) - 1].zero_()
        return self._buckets[device].filling(sums[len(indices) - 1])

    def _mix(self, device: str) -> None:
        sums, indices = self._pending[device]
        if indices:
            self._sketches.append(self._buckets[device].mix(sums[: len(indices)]))
            self._sketch_rows.append(list(indices))
            indices.clear()

    def _scratch(self, length: int) -> Tensor:
        """Float32 room for a piece of a narrower dtype, in the cache."""
        if "cpu" not in self._pieces or len(self._pieces["cpu"]) < length:
            with torch.inference_mode(False):
                self._pieces["cpu"] = torch.empty(length, dtype=torch.float32)
        return self._pieces["cpu"]


_PIECE = 1 << 17
"""Elements that are reduced in one go: half a megabyte of float32, which a core's own cache holds."""
_LATER = 8
"""Additions of sums that follow one another: a chain loses the more the fewer it adds up, 8 of 4096 a tenth of what 64 of 4096 do."""
_DOT = 2048
"""Elements of a dot product in float32: a chain of 64 in the 32 lanes that its libraries use on today's processors."""
_PARTIALS = 512
"""Sums that leave a device for every tensor, two kilobytes: half of what a sketch takes."""
_SMALL = 1e-16
"""Below it squares approach float32's smallest normal number, 1.2e-38, and lose digits."""


def _sure(found: tuple[float, float, float, float]) -> bool:
    """Whether sums of float32 hold: squares leave its range before the numbers do."""
    high, low, _, square = found
    return math.isfinite(square) and not 0.0 < max(abs(high), abs(low)) < _SMALL


def _finished(parts: Sequence[_Sums]) -> tuple[float, ...]:
    """Statistics of the parts together."""
    high, low = max(part[0] for part in parts), min(part[1] for part in parts)
    total, square = math.fsum(part[2] for part in parts), math.fsum(part[3] for part in parts)
    nan_count, inf_count, count = (sum(part[i] for part in parts) for i in (4, 5, 6))
    finite = count - nan_count - inf_count
    if not finite:
        return (0.0, 0.0, 0.0, 0.0, float(nan_count), float(inf_count), float(count))
    return (high, low, total / finite, math.sqrt(square), float(nan_count), float(inf_count), float(count))


def added_up(summands: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, in their order."""
    with torch.no_grad():
        total = summands[0]
        for t in summands[1:]:
            total = total + t
    return total


def _plain(fast: Kernel, summands: Sequence[Tensor]) -> bool:
    """Whether the fast path can read the elements where they are."""
    first = summands[0]
    shape, dtype = first.shape, first.dtype
    if first.device.type != "cpu" or dtype not in fast.functions or not first.numel():
        return False
    for t in summands:
        if t.dtype != dtype or t.shape != shape or t.layout != torch.strided or t.is_neg() or not t.is_contiguous():
            return False
    return len(summands) == 1 or not any(t.data_ptr() % t.element_size() for t in summands)


def _flat(t: Tensor, *, ordered: bool) -> Tensor:
    """All elements in row-major order, or, where the order does not matter, as they lie in memory."""
    if t.is_contiguous():
        return t.view(-1)
    if not ordered and t.numel():
        order = sorted(range(t.dim()), key=lambda d: (-t.stride(d), -t.shape[d]))
        permuted = t.permute(order)
        if permuted.is_contiguous():
            return permuted.view(-1)
    # an expanded scalar (the gradient of a sum) stays a view of one element here, which a kernel would read beyond
    return t.reshape(-1).contiguous()


def _to_host(t: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """A copy on the host that is complete once the function has been called."""
    if t.device.type == "cpu":
        return t, lambda: None
    module = getattr(torch, t.device.type, None)
    try:
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        host.copy_(t, non_blocking=True)
        event = module.Event()
        event.record()
    except (RuntimeError, AttributeError):
        return t.cpu(), lambda: None
    # The device tensor lives as long as the function that waits for its copy.
    return host, lambda keep=t: event.synchronize()


def _squares(values: np.ndarray) -> float:
    """Sum of the squares of a flat float32 array."""
    total = 0.0
    for at in range(0, len(values), _DOT):
        part = values[at : at + _DOT]
        total += float(np.dot(part, part))
    return total


def _partial(x: Tensor) -> Tensor:
    """Sums of float32 of a flat tensor, few enough for the host to add in float64.

    Which order a device adds in is its own affair (one after the other on some), so it is given chains of
    :data:`CHAIN`, then of :data:`_LATER` numbers, which no order makes longer.
    """
    length = CHAIN
    while len(x) > _PARTIALS:
        x = torch.nn.functional.pad(x, (0, -len(x) % length)).view(-1, length).sum(1)
        length = _LATER
    return x


def _host_statistics(row: Sequence[float], total: float, square: float, count: int) -> tuple[float, ...]:
    high, low, nan_count, inf_count = map(float, row)
    finite = count - nan_count - inf_count
    if finite <= 0:
        return (0.0, 0.0, 0.0, 0.0, nan_count, inf_count, float(count))
    return (high, low, total / finite, math.sqrt(square), nan_count, inf_count, float(count))
