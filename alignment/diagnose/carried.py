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
from dataclasses import dataclass

import numpy as np

from alignment.capture.record import TensorRow
from alignment.diagnose.difference import RESOLUTION
from alignment.diagnose.module_graph import Pair
from alignment.numerics.sketch import sketch_array

_CRITIC = ("values", "update_critic")
_COARSE = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Formats in which most updates round to nothing or to a whole spacing."""


@dataclass(slots=True, kw_only=True)
class Update:
    """What happened to a weight since it was last compared in the same stage.

    Attributes:
        since: the step it was last compared in.
        relative: e, NaN where the captures hold neither sketches nor tensors.
        size: s.
        floor: what sums of float32 leave of e: the rounding of two sketches, in units of ‖U‖.
        gradients: largest relative difference of the weight's gradients so far; None if no capture has any.
        elements: of the weight.
        numbers: of a sketch.
        coarse: whether the weight is stored in a format that most updates are lost in.
        inherited: whether the weight or the gradients were found to diverge before.
        before: the state before it, where that is of the same stage and step.
    """

    since: int
    relative: float
    size: float = 0.0
    floor: float = 0.0
    gradients: float | None = None
    elements: int = 1
    numbers: int = 1
    coarse: bool = False
    inherited: bool = False
    before: Pair | None = None


@dataclass(slots=True)
class _State:
    step: int
    golden: np.ndarray | None
    difference: np.ndarray | None
    wrong: bool


class Carried:
    """Follows two captures in the order in which things happened.

    :meth:`before` a stage is judged tells its pairs what is known of them from earlier ones, :meth:`after` remembers.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._fields: dict[tuple[str, tuple], tuple[Pair, bool]] = {}
        self._weights: dict[tuple[str, int | None, str, str], _State] = {}
        self._gradients: dict[bool, dict[tuple[str, str], float]] = {False: {}, True: {}}
        self._now: dict[tuple[str, str], float] = {}
        self._wrong: set[bool] = set()
        self._new: list[tuple[_State, Pair]] = []
        self._latest: dict[tuple, Pair] = {}

    def before(self, step: int, stage: str, rank: int | None, pairs: Sequence[Pair]) -> None:
        """Fills :attr:`Pair.update` of weights and :attr:`Pair.earlier` of fields."""
        if step != self._step:
            self._step, self._fields = step, {}
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
        golden, target = (_sketch(row) for row in pair.rows)
        known = golden is not None and target is not None and golden.shape == target.shape
        difference = target - golden if known else None
        earlier = self._weights.get(key)
        state = self._weights[key] = _State(step, golden if known else None, difference, False)
        same_stage = self._latest.get(key)
        self._latest[key] = pair
        self._new.append((state, pair))
        if earlier is None:
            return
        critic = stage in _CRITIC
        update = pair.update = Update(
            since=earlier.step, relative=math.nan, gradients=self._explained_by(critic, pair, same_stage is not None),
            inherited=earlier.wrong or critic in self._wrong, before=same_stage, coarse=pair.dtype in _COARSE,
        )  # fmt: skip
        if not known or earlier.golden is None or earlier.golden.shape != golden.shape:
            return
        moved, apart = golden - earlier.golden, difference - earlier.difference
        # float32 sums of the whole weight are taken twice on either side
        least = RESOLUTION * float(np.linalg.norm(golden))
        length = max(float(np.linalg.norm(moved)), least)
        update.numbers, update.elements = golden.size, max(1, math.prod(pair.shape))
        if length == 0.0:
            update.relative = 0.0 if not apart.any() else math.inf
            return
        update.relative, update.floor = float(np.linalg.norm(apart)) / length, 2.0 * least / length
        if length > least:
            update.size = (float(apart @ moved) + float(apart @ apart) / 2) / length**2

    def _explained_by(self, critic: bool, pair: Pair, now: bool) -> float | None:
        """The difference of its gradients so far, with those of the present stage if it was updated there."""
        name, found = (pair.owner, pair.name), []
        for held in (self._gradients[critic], self._now if now else {}):
            if held:
                # of tied weights only one name has a gradient
                found.append(held.get(name, max(held.values())))
        return max(found, default=None)


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
