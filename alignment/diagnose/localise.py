"""The verdict per module and the first introduced divergence, forward and backward, from a walk over the edges."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from alignment.diagnose.carried import Update
from alignment.diagnose.difference import RESOLUTION, Difference, rounding
from alignment.diagnose.module_graph import Edge, ModuleGraph, Node, Pair
from alignment.diagnose.noise import COPIED, SUMS, Limits, NoiseModel

SCALARS = frozenset({"int", "float"})
"""Python numbers among the arguments of an operator (a scale, an ε, a k): configuration, so they are equal or wrong."""

CONFIGURED = "a number of the configuration"
HANDED_ON = "copied, not computed"

SIGNED = ("gain", "bias")
"""Reasons that rounding does not have, however large the result may be."""

UPDATE, UPDATE_SIZE, ALONE = "difference of the updates", "size of the update", "update of one side alone"
"""Reasons that name an optimizer, and not how a weight was loaded or sent."""

SHARED = math.sqrt(0.5)
"""Of two updates that differ by more, less than half of what they do is the same: however noisy the gradients are, that
is no evidence of one update."""

HELD = ("parameter", "attribute")
"""Kinds of edges whose results a module has, and is not given."""


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
    healed: list[Finding] = field(default_factory=list)
    """What differed at the entrance of a module and made no difference behind it."""
    unknown: list[Finding] = field(default_factory=list)
    """Weights that updates set apart by nobody knows how much: no gradients were captured, or no sketches."""
    diverging: set[int] = field(default_factory=set)
    """Ids of the pairs that diverge or are behind a divergence."""

    @property
    def flagged(self) -> set[tuple[str, str]]:
        """Where findings were seen: module and quantity."""
        return {(finding.at, finding.quantity) for finding in self.findings}

    @property
    def introduced(self) -> list[Finding]:
        """Divergences whose sources agree."""
        return [f for f in self.findings if f.status == "introduced"]

    def first(self, direction: str) -> Finding | None:
        """The first introduced divergence of one direction."""
        return next((f for f in self.introduced if f.direction == direction), None)


def localise(graph: ModuleGraph, noise: NoiseModel) -> Localisation:
    """Walk twice: the first time to collect the evidence of all layers, the second to judge with it.

    Where a module is given something else and computes the same, both are done again as if that had agreed: what comes
    behind is then held to what its own sources explain.
    """
    found = _judged(graph, noise)
    healed = _without_effect(graph, noise, found)
    if healed:
        found = _judged_without(healed, graph, noise, found)
        # what the run was given and acts through these tensors alone; if it acts otherwise, that is found at its place
        given = {(f.at, f.quantity) for f in found.introduced if _is_given(f) and f.origin == HANDED_ON}
        if given:
            odd = [p for node in graph.nodes.values() for p in node.inputs if (p.owner, p.quantity) in given]
            found = _judged_without(_harmless(graph, found, set(map(_values, odd))), graph, noise, found)
        _accuse_again(graph, found)
    found = _beside_a_shift(graph, noise, found)
    later = _healed_later(graph, noise, found)
    found.healed += later
    if later:
        found.findings = [finding for finding in found.findings if finding not in later]
    return found


def _accuse_again(graph: ModuleGraph, found: Localisation) -> None:
    """Names what was excused beside a module that is given it and computes something else from what agrees: one of the
    two is wrong, and which one cannot be told, where others may not have looked at what they were given."""
    odd = {f.at for f in found.introduced if not f.quantity.startswith("in ")}
    values = {_values(p) for node in graph.nodes.values() if node.module in odd for p in node.inputs if p.healed}
    places = {(p.owner, p.quantity) for node in graph.nodes.values() for p in node.inputs if _values(p) in values}
    again = [f for f in found.healed if f.status == "introduced" and (f.at, f.quantity) in places]
    found.findings += again
    found.healed = [f for f in found.healed if f not in again]


def _beside_a_shift(graph: ModuleGraph, noise: NoiseModel, found: Localisation) -> Localisation:
    """What else is wrong where the run was given indices that are a constant apart and no module shows to be harmless.

    A fault in every attention leaves none that agrees, and would be inherited from the shift of positions. So all is
    judged again as if the indices agreed, and with them what was computed from them for several modules of a kind
    (cosines and sines). What is wrong then is named behind these, for which of them is at fault cannot be told.
    """
    given = [f for f in found.introduced if _is_given(f) and f.origin == HANDED_ON]
    pairs = [pair for node in graph.nodes.values() for pair in (*node.inputs, *node.outputs)] if given else []
    shifted = {(pair.owner, pair.quantity) for pair in pairs if _is_shift(pair)}
    given = [f for f in given if (f.at, f.quantity) in shifted]
    if not given:
        return found
    held: dict[tuple[str, str], set[tuple]] = defaultdict(set)
    for pair in pairs:
        held[pair.owner, pair.quantity].add(_values(pair))

    def values_at(findings: Sequence[Finding]) -> set[tuple]:
        return {value for finding in findings for value in held[finding.at, finding.quantity]}

    before = {id(pair) for pair in pairs if pair.healed}
    tried = _judged_without(_harmless(graph, found, values_at(given)), graph, noise, found)
    receivers = {(_values(pair), node.class_name, node.module) for node in graph.nodes.values() for pair in node.inputs}
    several = {value for (value, _), count in Counter(r[:2] for r in receivers).items() if count > 1}
    known = {(f.at, f.quantity) for f in found.introduced}
    tables = [f for f in tried.introduced if (f.at, f.quantity) not in known and several & values_at([f])]
    values = values_at(given + tables)
    tried = _judged_without([pair for pair in pairs if _values(pair) in values], graph, noise, found)
    known |= {(f.at, f.quantity) for f in tables}
    if tables and any((f.at, f.quantity) not in known for f in tried.introduced):
        tried.healed = found.healed
        tried.findings = given + tables + tried.findings
        return tried
    for pair in pairs:
        pair.healed = id(pair) in before
    return found


def _is_shift(pair: Pair) -> bool:
    """Whether an index is a constant apart from golden's: then its size says no more than golden's and the constant."""
    by = pair.by_statistics or pair.difference
    if not pair.discrete or pair.identity is None or by.detail != "statistics" or by.bias == 0.0:
        return False
    size, mean, _, _, count = pair.identity
    # ‖g + c‖² = ‖g‖² + 2 c Σg + n c², in units of ‖g‖²
    grown = (1.0 + by.gain) ** 2
    return abs(grown - 1.0 - 2.0 * by.bias * mean * math.sqrt(count) / size - by.bias**2) <= SUMS * grown


def _judged_without(
    healed: Sequence[Pair], graph: ModuleGraph, noise: NoiseModel, before: Localisation
) -> Localisation:
    """As if these pairs agreed; what was found of them ``before`` becomes a remark."""
    for pair in healed:
        pair.healed = True
    places = {(pair.owner, pair.quantity) for pair in healed}
    found = _judged(graph, noise)
    found.healed = before.healed + [f for f in before.findings if (f.at, f.quantity) in places]
    return found


def _is_given(finding: Finding) -> bool:
    """Whether it is of a tensor that went into a module."""
    if finding.direction != "forward" or finding.origin == CONFIGURED or not finding.quantity.startswith("in "):
        return False
    return math.isfinite(finding.relative)


def _judged(graph: ModuleGraph, noise: NoiseModel) -> Localisation:
    consistent = {}
    if noise.samples:
        noise.expect_edges(_families(graph))
        evidence = _Evidence(noise)
        graph.walk(evidence.take)
        consistent = evidence.consistent()
    found = Localisation()
    judge = _Judge(noise, found, consistent)

    def take(edge: Edge) -> bool:
        diverges = judge.take(edge)
        if diverges:
            found.diverging.add(id(edge.result))
        return diverges

    graph.walk(take)
    return found


def _families(graph: ModuleGraph) -> dict[str, Counter]:
    """How many edges of each key are held against noise."""
    families: dict[str, Counter] = defaultdict(Counter)

    def count(edge: Edge) -> bool:
        if edge.kind not in COPIED and not edge.result.skipped:
            family = "choices" if edge.result.discrete else "loss" if edge.kind == "loss" else "sizes"
            families[family][edge.key] += 1
        return False

    graph.walk(count)
    return families


def _without_effect(graph: ModuleGraph, noise: NoiseModel, found: Localisation) -> list[Pair]:
    """Inputs that diverge, of modules that compute from them what they would have computed if these had agreed.

    A constant shift of all positions changes the rotation of queries and keys and no product of the two. Another input
    that differs less has to be there, to measure by; and a tensor that does no harm in one module is no fault of itself
    in the next one, so all that hold the same values are meant: see :func:`_harmless` for the exceptions.
    """
    behind = _behind({(f.at, f.quantity) for f in found.introduced if _is_given(f)}, graph)
    equal: set[tuple] = set()
    # children before what they are in: the smaller the call, the less else may be wrong in it
    for node in sorted(graph.nodes.values(), key=lambda node: node.last) if behind else ():
        inputs = [p for p in node.inputs if not p.skipped and math.isfinite(p.difference.relative)]
        odd = [p for p in inputs if id(p) in behind and id(p) in found.diverging and p.dtype not in SCALARS]
        rest = [p.difference.relative for p in inputs if p not in odd]
        if odd and rest and max(rest) < min(p.difference.relative for p in odd):
            if not equal.issuperset(map(_values, odd)) and _agrees(node, odd, found, graph, noise):
                equal.update(_values(pair) for pair in odd)
    return _harmless(graph, found, equal)


def _behind(places: set[tuple[str, str]], graph: ModuleGraph) -> set[int]:
    """Ids of the pairs at these places and of all that was computed from them."""
    out: set[int] = set()

    def take(edge: Edge) -> bool:
        reached = edge.tainted or (edge.result.owner, edge.result.quantity) in places
        if reached:
            out.add(id(edge.result))
        return reached

    if places:
        graph.walk(take)
    return out


def _harmless(graph: ModuleGraph, found: Localisation, values: set[tuple]) -> list[Pair]:
    """All pairs that hold these values, but for what a module computed wrongly, and what leaves the run.

    A module that agrees may not have looked at the tensor: that excuses nobody who computed it, and says nothing of
    what is done with it outside.
    """
    wrong = {(f.at, f.quantity) for f in found.introduced if not f.quantity.startswith("in ")}
    for node in graph.nodes.values():
        kept = [p for p in node.outputs if node.parent is None or (p.owner, p.quantity) in wrong]
        values = values.difference(map(_values, kept))
    every = (pair for node in graph.nodes.values() for pair in (*node.inputs, *node.outputs))
    return [pair for pair in every if _values(pair) in values]


def _values(pair: Pair) -> tuple:
    """What two pairs have in common that hold the same values on both sides."""
    return (pair.identity or id(pair), pair.difference.relative, pair.difference.gain, pair.difference.bias)


def _healed_later(graph: ModuleGraph, noise: NoiseModel, found: Localisation) -> list[Finding]:
    """What is left of what differs at the entrance of modules and makes no difference behind any call of them."""
    calls, flagged = defaultdict(list), found.flagged
    for node in graph.nodes.values():
        calls[node.module].append(node)
    agrees: dict[str, bool] = {}
    for module in dict.fromkeys(finding.at for finding in found.findings if _is_given(finding)):
        odd = [
            [pair for pair in node.inputs if not pair.skipped and (module, pair.quantity) in flagged]
            for node in calls[module]
        ]
        nodes = zip(calls[module], odd, strict=True)
        agrees[module] = bool(odd) and all(_agrees(node, pairs, found, graph, noise) for node, pairs in nodes)
    return [finding for finding in found.findings if _is_given(finding) and agrees[finding.at]]


def _agrees(node: Node, odd: Sequence[Pair], found: Localisation, graph: ModuleGraph, noise: NoiseModel) -> bool:
    """Whether a call computes what it would have computed if ``odd`` had agreed.

    It is judged alone: noise of its other inputs, near ties inside that this noise moved, and rounding are all that may
    show in what it computes. Where another input diverges, if only by a sign that rounding does not have, what follows
    it has that sign as well, and is held to its size.
    """
    values = set(map(_values, odd))
    outputs = [pair for pair in node.outputs if not pair.skipped]
    if all(pair.discrete for pair in outputs) or any(_values(pair) in values for pair in outputs):
        return False
    taken = [pair for pair in _inside(node) if not pair.healed and _values(pair) in values]
    for pair in taken:
        pair.healed = True
    given = {id(pair): id(pair) in found.diverging and not pair.healed for pair in node.inputs}
    inner = Localisation()
    judge = _Judge(noise, inner, {})

    def take(edge: Edge) -> bool:
        if edge.kind in HELD:
            return False
        known = given.get(id(edge.result))
        return judge.take(edge) if known is None else known

    graph.walk_call(node, take)
    for pair in taken:
        pair.healed = False
    return all(finding.status == "inherited" and finding.reason in SIGNED for finding in inner.findings)


def _inside(node: Node) -> Iterator[Pair]:
    """What a call and its children were given and gave out."""
    yield from node.inputs
    yield from node.outputs
    for child in node.children:
        yield from _inside(child)


def learn(graph: ModuleGraph, noise: NoiseModel) -> None:
    """Take a benign pair into the noise model."""

    noise.begin_pair()

    def take(edge: Edge) -> bool:
        _settle(edge)
        if not edge.result.skipped:
            noise.learn(edge)
            if edge.result.update is not None:
                noise.learn_update(edge.result.update)
        return False

    graph.walk(take)


def _settle(edge: Edge) -> Difference:
    """The difference of the result, by what can be compared: rows in an unknown order only by statistics.

    Such a result carries the error of its sources on, since how many of its rows are others is not known.
    """
    pair = edge.result
    if edge.unordered and not pair.unordered and pair.by_statistics is not None:
        pair.unordered = True
        if not pair.difference.problem or "shape" in pair.difference.problem:
            pair.bound = pair.by_statistics.relative
            pair.difference = Difference(pair.bound, detail="statistics")
    if pair.bound is not None:
        pair.difference.relative = max(pair.bound, min(edge.error, 1.0))
    return pair.difference


class _Evidence:
    """Signed differences that agree over layers and calls add up; noise of the same size does not.

    Only edges whose sources do not diverge count: what follows a fault is as signed as the fault.
    """

    def __init__(self, noise: NoiseModel) -> None:
        self.noise = noise
        self.signed: dict[tuple[tuple[str, ...], str], list[tuple[int, float, float]]] = defaultdict(list)
        self.moved: dict[int, tuple[str, float, float, str]] = {}
        self.judge = _Judge(noise, Localisation(), {})

    def take(self, edge: Edge) -> bool:
        diverges = self.judge.take(edge)
        if edge.index is not None and not (diverges or edge.tainted or edge.unusable):
            found = self.noise.rows_moved(edge)
            if found is not None:
                self.moved[edge.index.position] = ("choices", *found, f"rows of {edge.culprit} that are others")
        limits = self.judge.limits
        if limits is not None and limits.gain_deviation is not None and not (diverges or edge.tainted or edge.unusable):
            if edge.result.difference.relative > RESOLUTION and edge.twin is None:
                place = edge.position
                self.signed[edge.key, "gain"].append((place, limits.gain_left, limits.gain_deviation))
                self.signed[edge.key, "bias"].append((place, limits.bias_left, limits.bias_deviation))
        return diverges

    def consistent(self) -> dict[int, tuple[str, float, float, str]]:
        """position → (measure, combined z, its limit, origin), at the first edge of every key that adds up.

        The same fault has about the same size everywhere, so the mean weighted by 1/variance says most.
        """
        out = dict(self.moved)
        several = {key: values for key, values in self.signed.items() if len(values) > 1}
        for (key, name), values in several.items():
            weights = [1 / deviation**2 for _, _, deviation in values]
            total = math.fsum(w * left for w, (_, left, _) in zip(weights, values)) / math.sqrt(math.fsum(weights))
            limit = self.noise.together(key, name, weights, len(several))
            if abs(total) > limit:
                # where it begins: the first edge that has at least half of its share in the sum
                share = abs(total) / math.sqrt(len(values)) / 2
                first = next(p for p, left, deviation in values if math.copysign(1, total) * left / deviation >= share)
                if first not in out or abs(total) / limit > abs(out[first][1]) / out[first][2]:
                    out[first] = (name, total, limit, f"{len(values)} calls together, in standard deviations")
        return out


class _Judge:
    def __init__(
        self, noise: NoiseModel, found: Localisation, consistent: dict[int, tuple[str, float, float, str]]
    ) -> None:
        self.noise, self.found, self.consistent = noise, found, consistent
        self.limits: Limits | None = None

    def take(self, edge: Edge) -> bool:
        self.limits = None
        found = self.found
        found.edges += 1
        difference = _settle(edge)
        if edge.result.skipped or edge.result.healed:
            return edge.tainted and not edge.result.healed
        if difference.problem or not math.isfinite(difference.relative):
            return self._problem(edge, difference)
        found.compared += 1
        if edge.result.reordered and edge.kind not in COPIED:
            # so few that near ties moved may as well have moved to and fro, which leaves as many of each
            exchanged = edge.result.exchanged
            difference.relative = exchanged if exchanged <= self._most_choices(edge) else 0.0
        if difference.detail == "sketch" and difference.relative <= RESOLUTION:
            return False
        if edge.kind in ("parameter", "attribute", "input") or edge.result.dtype in SCALARS:
            return self._copied(edge, difference)
        if edge.result.discrete:
            return self._discrete(edge, difference)
        limits = self.limits = self.noise.limits(edge)
        measures = (
            ("relative difference", difference.relative, limits.relative),
            (SIGNED[0], abs(limits.gain_left), limits.gain),
            (SIGNED[1], abs(limits.bias_left), limits.bias),
        )
        name, value, limit = max(measures, key=lambda m: _ratio(m[1], m[2]))
        origin = limits.origin
        if _ratio(value, limit) <= 1.0 and edge.position in self.consistent and not edge.tainted:
            name, value, limit, origin = self.consistent[edge.position]
        if _ratio(value, limit) <= 1.0:
            # within its limit, and still not better than what it was computed from
            return edge.tainted and difference.relative > rounding(edge.result.dtype)
        self._add(edge, difference, "inherited" if edge.tainted else "introduced", name, value, limit, origin)
        return True

    def _problem(self, edge: Edge, difference: Difference) -> bool:
        status = "inherited" if edge.tainted or edge.unusable else "introduced"
        self._add(edge, difference, status, difference.problem, difference.relative, 0.0, "same values and shapes")
        return True

    def _copied(self, edge: Edge, difference: Difference) -> bool:
        """Parameters, attributes and inputs are copied, not computed: storage rounding is all that may differ."""
        pair = edge.result
        if pair.elsewhere is not None:
            stage, value, limit = pair.elsewhere
            origin = f"golden has the weight of {stage} here"
            self._add(edge, difference, "introduced", f"difference from {stage}", value, limit, origin)
            return True
        limit = _copy_limit(pair)
        if difference.relative <= limit:
            return False
        if pair.update is not None:
            return self._moved(edge, difference, limit, pair.update)
        origin = CONFIGURED if pair.dtype in SCALARS else HANDED_ON
        self._add(edge, difference, "introduced", "relative difference", difference.relative, limit, origin)
        return True

    def _moved(self, edge: Edge, difference: Difference, limit: float, update: Update) -> bool:
        """Weights that were equal, or apart by what is explained, before an update: judged is what it added."""
        inherited = update.inherited or id(update.before) in self.found.diverging
        status = "inherited" if inherited else "introduced"
        known = True
        for one in filter(None, (update, update.total)):
            name, value, most, origin = self._worst(one)
            if _ratio(value, most) > 1.0:
                self._add(edge, difference, status, name, value, most, f"{origin}, since step {one.since}")
                return True
            # weights that have arrived go to and fro: only a single update has to be the same in the main
            unlike = one is update and one.relative > SHARED and not self.noise.few_roundings(one)
            known &= not (math.isnan(one.relative) or one.gradients is None or unlike)
        if inherited:
            self._add(edge, difference, status, "relative difference", difference.relative, limit, HANDED_ON)
            return True
        if not known:
            self._add(edge, difference, "unknown", "relative difference", difference.relative, limit, origin)
            self.found.unknown.append(self.found.findings.pop())
        return False

    def _worst(self, update: Update) -> tuple[str, float, float, str]:
        """What of an update is nearest to its limit or beyond it: reason, value, limit, origin of the limit."""
        if update.alone and not self.noise.few_roundings(update):
            return ALONE, update.relative, 0.0, f"{update.alone} moves the weight, the other one leaves it as it was"
        limits = self.noise.update(update)
        compared = 0.0 if math.isnan(update.relative) else update.relative
        measures = ((UPDATE, compared, limits.relative), (UPDATE_SIZE, update.size, limits.size))
        return *max(measures, key=lambda m: _ratio(m[1], m[2])), limits.origin

    def _discrete(self, edge: Edge, difference: Difference) -> bool:
        """Indices: equal sources choose alike; else choices move where their margin is below the sources' error."""
        if difference.relative == 0.0:
            return False
        limit = self._most_choices(edge)
        found = ("choices", difference.relative, limit, "near ties within the sources' error")
        if difference.relative <= limit:
            if edge.tainted or edge.position not in self.consistent:
                return edge.tainted
            found = self.consistent[edge.position]
        self._add(edge, difference, "inherited" if edge.tainted else "introduced", *found)
        return True

    def _most_choices(self, edge: Edge) -> float:
        """Token ids and masks of the pipeline are handed on, not chosen by a margin."""
        return 0.0 if edge.kind == "value" else self.noise.choices(edge)

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
    if pair.dtype in SCALARS:
        return 0.0
    if not pair.same_dtype:
        return 2.0 * rounding(pair.dtype)
    if pair.difference.detail == "tensor":
        return 0.0
    return {"tensor": 0.0, "sketch": RESOLUTION}.get(pair.difference.detail, SUMS)
