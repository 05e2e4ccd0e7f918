"""What a run carries from stage to stage and from step to step: fields of the batch, and weights that updates move.

Weights of two runs on two devices differ from the first update on, because their gradients do. Compared is therefore
what an update adds: sketches are linear, so that of an update is the difference of those of two states. With w the
weights before and after it, g and t the two runs::

    update        U = w_g(k) − w_g(k−1)
    difference    E = (w_t(k) − w_t(k−1)) − U,   e = ‖E‖ / ‖U‖
    size          s = (‖U_t‖² − ‖U‖²) / (2 ‖U‖²)

How much of e the gradients explain is :meth:`~alignment.diagnose.noise.NoiseModel.update`; see ``docs/compare.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alignment.capture.record import TensorRow
from alignment.diagnose.difference import RESOLUTION, roundoff
from alignment.diagnose.module_graph import Pair
from alignment.numerics.sketch import sketch_array

_CRITIC = ("values", "update_critic")
_COARSE = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Formats in which most updates round to nothing or to a whole spacing."""


@dataclass(slots=True, kw_only=True)
class Update:
    """What happened to a weight between two states of it.

    Attributes:
        since: the step of the earlier state.
        relative: ‖E‖ / max(‖U‖, ‖U_t‖), NaN where the captures hold neither sketches nor tensors.
        size: s.
        floor: what sums of float32 leave of ``relative``: the rounding of two sketches.
        alone: which side moved the weight where the other one left it as it was; "" where both did or neither.
        gradients: largest relative difference of the weight's gradients so far; None if no capture has any.
        elements: of the weight.
        numbers: of a sketch.
        mixed: whether the two sides store the weight in different formats.
        roundings: of a weight in a format in which most updates round to nothing, how many spacings of its largest
            element the update is made of, in squares; infinite for other formats.
        roundings_met: the same, of all updates on the way, where that is more.
        owed: the same of the difference before, which later roundings may make up for.
        inherited: whether the weight or the gradients were found to diverge before.
        before: the state before it, where that is of the same stage and step.
        total: of a weight with roundings, all updates since the first state.
    """

    since: int
    relative: float = math.nan
    size: float = 0.0
    floor: float = 0.0
    alone: str = ""
    gradients: float | None = None
    elements: int = 1
    numbers: int = 1
    mixed: bool = False
    roundings: float = math.inf
    roundings_met: float = 0.0
    owed: float = 0.0
    inherited: bool = False
    before: Pair | None = None
    total: Update | None = None


@dataclass(slots=True)
class _State:
    step: int
    golden: np.ndarray | None
    difference: np.ndarray | None
    wrong: bool
    travelled: float = 0.0

    def comparable(self, other: _State) -> bool:
        return self.golden is not None and other.golden is not None and self.golden.shape == other.golden.shape


class Carried:
    """Follows two captures in the order in which things happened.

    :meth:`before` a stage is judged tells its pairs what is known of them from earlier ones, :meth:`after` remembers.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._fields: dict[tuple[str, tuple], tuple[Pair, bool]] = {}
        self._weights: dict[tuple, _State] = {}
        self._first: dict[tuple, _State] = {}
        self._elsewhere: dict[tuple, tuple[str, _State]] = {}
        self._gradients: dict[bool, dict[tuple[str, str], float]] = {False: {}, True: {}}
        self._now: dict[tuple[str, str], float] = {}
        self._wrong: set[bool] = set()
        self._new: list[tuple[_State, Pair]] = []
        self._latest: dict[tuple, Pair] = {}

    def before(self, step: int, stage: str, rank: int | None, pairs: Sequence[Pair]) -> None:
        """Fills :attr:`Pair.update` and :attr:`Pair.elsewhere` of weights, and :attr:`Pair.earlier` of fields."""
        if step != self._step:
            self._step, self._fields, self._elsewhere = step, {}, {}
        self._new, self._latest, self._now = [], {}, _gradients(pairs)
        for pair in pairs:
            if pair.kind == "value" and pair.identity is not None:
                pair.earlier = self._fields.get((pair.name, pair.identity))
            elif pair.kind == "parameter" and pair.rows is not None:
                self._follow(step, stage, rank, pair)

    def after(self, stage: str, pairs: Sequence[Pair], diverging: set[int]) -> None:
        """Takes note of what was found: ``diverging`` are ids of pairs."""
        critic = stage in _CRITIC
        gradients = self._gradients[critic]
        for pair in pairs:
            if pair.kind == "value" and pair.identity is not None:
                self._fields.setdefault((pair.name, pair.identity), (pair, id(pair) in diverging))
            elif pair.kind == "parameter_gradient" and id(pair) in diverging:
                self._wrong.add(critic)
        for name, relative in self._now.items():
            gradients[name] = max(gradients.get(name, 0.0), relative)
        for state, pair in self._new:
            state.wrong = id(pair) in diverging
            pair.rows = None
        self._new, self._latest = [], {}

    def _follow(self, step: int, stage: str, rank: int | None, pair: Pair) -> None:
        key = stage, rank, pair.owner, pair.name
        golden = target = None
        if pair.rows[0].load_sketch or pair.rows[0].load_tensor:
            golden, target = (_sketch(row) for row in pair.rows)
        known = golden is not None and target is not None and golden.shape == target.shape
        state = _State(step, golden if known else None, target - golden if known else None, False)
        earlier, self._weights[key] = self._weights.get(key), state
        first = self._first.setdefault(key, state)
        same_stage, self._latest[key] = self._latest.get(key), pair
        self._new.append((state, pair))
        critic = stage in _CRITIC
        if same_stage is None:
            self._compare_stages(critic, rank, stage, pair, state)
        if earlier is None:
            return
        update = pair.update = Update(
            since=earlier.step, gradients=self._explained_by(critic, pair, same_stage is not None),
            inherited=earlier.wrong or critic in self._wrong, before=same_stage, mixed=not pair.same_dtype,
        )  # fmt: skip
        if not state.comparable(earlier):
            return
        spacing = _spacing(pair)
        _measure(update, pair, earlier, state, spacing)
        if spacing and first is not earlier and state.comparable(first):
            update.total = replace(update, since=first.step)
            _measure(update.total, pair, first, state, spacing)
        if spacing:
            update.owed = float(earlier.difference @ earlier.difference) / spacing**2
            state.travelled = earlier.travelled + update.roundings
            if update.total is not None:
                # weights that go to and fro gather differences all the way
                update.total.roundings_met = state.travelled

    def _compare_stages(self, critic: bool, rank: int | None, stage: str, pair: Pair, state: _State) -> None:
        """What golden has in two stages of a step alike, the target has to have alike: no noise comes between."""
        # Stages that store it in other formats, on one side alone perhaps, hold other numbers.
        key = critic, rank, pair.owner, pair.name, pair.dtype, pair.same_dtype
        where, other = self._elsewhere.setdefault(key, (stage, state))
        if other is state or not state.comparable(other):
            return
        size = float(np.linalg.norm(state.golden))
        apart = float(np.linalg.norm(state.difference - other.difference))
        same = float(np.linalg.norm(state.golden - other.golden)) <= 2.0 * RESOLUTION * size
        if same and apart > 4.0 * RESOLUTION * size:
            pair.elsewhere = where, apart / size, 4.0 * RESOLUTION

    def _explained_by(self, critic: bool, pair: Pair, now: bool) -> float | None:
        """The difference of its gradients so far, with those of the present stage if it was updated there."""
        name, found = (pair.owner, pair.name), []
        for held in (self._gradients[critic], self._now if now else {}):
            if held:
                # of tied weights only one name has a gradient
                found.append(held.get(name, max(held.values())))
        return max(found, default=None)


def _measure(update: Update, pair: Pair, earlier: _State, state: _State, spacing: float) -> None:
    moved, apart = state.golden - earlier.golden, state.difference - earlier.difference
    # float32 sums of the whole weight are taken twice on either side
    least = 2.0 * RESOLUTION * float(np.linalg.norm(state.golden))
    lengths = float(np.linalg.norm(moved)), float(np.linalg.norm(moved + apart))
    length = max(*lengths, least)
    update.numbers, update.elements = state.golden.size, max(1, math.prod(pair.shape))
    if length == 0.0:
        update.relative = 0.0
        return
    update.relative, update.floor = float(np.linalg.norm(apart)) / length, least / length
    if spacing:
        update.roundings = (length / spacing) ** 2
    if lengths[0] > least:
        update.size = (float(apart @ moved) + float(apart @ apart) / 2) / lengths[0] ** 2
    if min(lengths) <= least < max(lengths) / 4:
        update.alone = "golden" if lengths[0] > lengths[1] else "the target"


def _spacing(pair: Pair) -> float:
    """Between the largest element of a weight and the next number of its format; 0 for those that hold most updates."""
    known = [row.statistics for row in pair.rows or () if row.statistics is not None]
    if pair.dtype not in _COARSE or not known:
        return 0.0
    return 2.0 * roundoff(pair.dtype) * max(max(abs(s.max), abs(s.min)) for s in known)


def _gradients(pairs: Sequence[Pair]) -> dict[tuple[str, str], float]:
    """Largest relative difference of the gradients of every parameter."""
    out: dict[tuple[str, str], float] = {}
    for pair in pairs:
        if pair.kind == "parameter_gradient" and math.isfinite(pair.difference.relative):
            name = pair.owner, pair.name
            out[name] = max(out.get(name, 0.0), pair.difference.relative)
    return out


def _sketch(row: TensorRow) -> np.ndarray | None:
    """In float64: differences of states are smaller than these by orders of magnitude."""
    if row.has_sketch:
        found = row.sketch()
        return found.astype(np.float64) if found is not None and found.ndim == 1 else None
    held = row.tensor() if row.has_tensor else None
    return None if held is None else sketch_array(held).astype(np.float64)
