"""The verdict per module and the first introduced divergence, forward and backward, from a walk over the edges."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignment.diagnose.difference import RESOLUTION, Difference, rounding
from alignment.diagnose.module_graph import Edge, ModuleGraph, Pair
from alignment.diagnose.noise import NoiseModel, scale_of

STATISTICS_RESOLUTION = 2.0**-20
"""What float32 sums over many elements, in another order on the other side, leave of the statistics of equal tensors."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result that is farther from golden than its sources explain.

    Attributes:
        module: whose code or parameters introduced it.
        direction: ``forward`` or ``backward``.
        status: ``introduced`` or ``inherited``.
        reason: which quantity, how large, against which limit.
        excess: size over limit of the measure that exceeded most.
    """

    module: str
    direction: str
    status: str
    quantity: str
    at: str
    position: int
    relative: float
    sources: float
    value: float
    limit: float
    excess: float
    reason: str
    origin: str


@dataclass
class Localisation:
    """What a walk found, in the order things were computed."""

    findings: list[Finding] = field(default_factory=list)
    edges: int = 0
    compared: int = 0

    @property
    def introduced(self) -> list[Finding]:
        """Divergences whose sources agree."""
        return [f for f in self.findings if f.status == "introduced"]

    def first(self, direction: str) -> Finding | None:
        """The first introduced divergence of one direction."""
        return next((f for f in self.introduced if f.direction == direction), None)


def localise(graph: ModuleGraph, noise: NoiseModel) -> Localisation:
    """Walk twice: the first time to collect the evidence of all layers, the second to judge with it."""
    evidence = _Evidence(noise)
    graph.walk(evidence.take)
    found = Localisation()
    judge = _Judge(noise, evidence.consistent(), found)
    graph.walk(judge.take)
    return found


def learn(graph: ModuleGraph, noise: NoiseModel) -> None:
    """Take a benign pair into the noise model."""

    def take(edge: Edge) -> bool:
        _settle(edge)
        noise.learn(edge)
        return False

    graph.walk(take)


def _settle(edge: Edge) -> Difference:
    """The difference of the result, by what can be compared: rows in an unknown order only by statistics.

    Such a result carries the error of its sources on, since how many of its rows are others is not known.
    """
    pair = edge.result
    if edge.unordered and not pair.unordered and pair.by_statistics is not None:
        seen = pair.by_statistics
        pair.unordered = True
        if not pair.difference.problem or "shape" in pair.difference.problem:
            pair.difference = Difference(max(seen.relative, min(edge.error, 1.0)), detail="statistics")
    return pair.difference


class _Evidence:
    """Signed differences that agree over layers and calls add up; noise of the same size does not."""

    def __init__(self, noise: NoiseModel) -> None:
        self.noise = noise
        self.signed: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)

    def take(self, edge: Edge) -> bool:
        return False

    def consistent(self) -> set[tuple[str, ...]]:
        return set()


class _Judge:
    def __init__(self, noise: NoiseModel, consistent: set[tuple[str, ...]], found: Localisation) -> None:
        self.noise, self.consistent, self.found = noise, consistent, found

    def take(self, edge: Edge) -> bool:
        found = self.found
        found.edges += 1
        difference = _settle(edge)
        if difference.problem or not math.isfinite(difference.relative):
            return self._problem(edge, difference)
        found.compared += 1
        if edge.kind in ("parameter", "attribute", "input"):
            return self._copied(edge, difference)
        if edge.result.discrete:
            return self._discrete(edge, difference)
        limits = self.noise.limits(edge)
        twin = edge.twin.difference if edge.twin is not None else None
        base = twin if twin is not None and not edge.unordered else Difference(0.0)
        measures = (
            ("relative difference", difference.relative - base.relative, limits.relative),
            ("gain", abs(difference.gain - base.gain), limits.gain),
            ("bias", abs(difference.bias - base.bias), limits.bias),
        )
        name, value, limit = max(measures, key=lambda m: _ratio(m[1], m[2]))
        excess = _ratio(value, limit)
        if excess <= 1.0:
            # within its limit, and still not better than what it was computed from
            return edge.tainted and difference.relative > rounding(edge.result.dtype)
        if edge.tainted:
            self._add(edge, difference, "inherited", name, value, limit, limits.origin)
            return True
        self._add(edge, difference, "introduced", name, value, limit, limits.origin)
        return True

    def _problem(self, edge: Edge, difference: Difference) -> bool:
        status = "inherited" if edge.tainted or edge.unusable else "introduced"
        self._add(edge, difference, status, difference.problem, difference.relative, 0.0, "same values and shapes")
        return True

    def _copied(self, edge: Edge, difference: Difference) -> bool:
        """Parameters, attributes and inputs are copied, not computed: storage rounding is all that may differ."""
        pair = edge.result
        limit = _copy_limit(pair)
        if difference.relative <= limit:
            return False
        self._add(edge, difference, "introduced", "relative difference", difference.relative, limit, "copied, not computed")
        return True

    def _discrete(self, edge: Edge, difference: Difference) -> bool:
        """Indices: equal sources choose alike; else choices move where their margin is below the sources' error."""
        if difference.relative == 0.0:
            return False
        limit = self.noise.choices(edge)
        if difference.relative <= limit:
            return edge.tainted
        status = "inherited" if edge.tainted else "introduced"
        self._add(edge, difference, status, "choices", difference.relative, limit, "near ties within the sources' error")
        return True

    def _add(self, edge: Edge, difference: Difference, status: str, name: str, value: float, limit: float, origin: str):
        pair = edge.result
        backward = edge.kind in ("loss", "gradient own", "gradient glue", "parameter gradient") or (
            edge.kind == "copy" and pair.direction == "backward"
        )
        self.found.findings.append(
            Finding(
                module=edge.culprit, direction="backward" if backward else "forward", status=status,
                quantity=pair.quantity, at=pair.owner, position=edge.position, relative=difference.relative,
                sources=edge.error, value=value, limit=limit, excess=_ratio(value, limit), reason=name, origin=origin,
            )
        )  # fmt: skip


def _ratio(value: float, limit: float) -> float:
    if limit == 0.0:
        return 0.0 if value == 0.0 else math.inf
    return abs(value) / limit


def _copy_limit(pair: Pair) -> float:
    """Rounding to the coarser storage if the two differ in dtype; else what float32 sums of a sketch lose."""
    if not pair.same_dtype:
        return 2.0 * rounding(pair.dtype)
    if pair.difference.detail == "tensor":
        return 0.0
    return {"tensor": 0.0, "sketch": RESOLUTION}.get(pair.difference.detail, STATISTICS_RESOLUTION)
