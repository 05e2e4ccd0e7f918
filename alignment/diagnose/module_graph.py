"""What was computed from what: the captured modules of one pass as edges from sources to a result.

A capture says which tensors went into a module and came out of it, and in which order modules finished. That is enough
to know, for every tensor, what it was computed from at most:

* the outputs of a module without captured children come from its inputs and parameters (kind ``own``);
* the inputs of a child come from the inputs of its parent and the outputs of the children that finished before it, by
  code of the *parent* (kind ``glue``): rotation, softmax, residual sums and whatever else is no module of its own;
* so do the outputs of a parent, from its inputs and all its children;
* gradients run the same way backwards, and depend on what the forward pass saved as well;
* a gradient that comes from nowhere in the capture comes from the loss (kind ``loss``).

A tensor that is bit for bit a source of it on the golden side (a pass-through, a view) is kind ``copy``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alignment.diagnose.difference import Difference, rounding

if TYPE_CHECKING:
    from alignment.capture.record import TensorRow
    from alignment.diagnose.carried import Update

LOSS = "loss"
"""The name of what is between the outputs of the model and the first gradient."""


@dataclass(slots=True)
class Pair:
    """One tensor on both sides. ``given`` is filled by the walk, the rest by pairing.

    Attributes:
        owner: dotted path of the module it belongs to; of a parameter or an attribute, the module that holds it.
        name: last part of a parameter's or attribute's name, else "".
        dtype: the coarser of the two.
        same_dtype: whether both sides stored it alike.
        discrete: integers or booleans: indices, ids, masks.
        reordered: an index whose values are the same in another order.
        exchanged: how far off such an index is if its values had moved instead.
        identity: what tells whether two rows of golden hold the same values, or None.
        bound: how far off the two are at least, of rows in an unknown order, where others are exact; else None. As a
            source such a pair is no nearer than what it was computed from, which the walk fills in.
        skipped: the two cannot be compared at all, which is a bound of 0 that nobody judges.
        given: it went into the run, or is a copy of what did: no module chose it.
        healed: it differs, and a module that was given it computes the same; as a source it is as good as equal.
        rows: of a parameter, the two rows, for as long as their data is needed.
        update: of a parameter that was compared before, what happened to it since.
        elsewhere: of a parameter that is another one than in a stage of the same step where golden has the same: that
            stage, how far off, and the limit of that.
        earlier: of a field of the pipeline, the same one in an earlier stage of the step, and whether it diverges.
    """

    owner: str
    class_name: str
    kind: str
    direction: str
    call: int
    role: str
    path: str
    order: int
    dtype: str
    shape: tuple[int, ...]
    difference: Difference
    discrete: bool = False
    name: str = ""
    identity: tuple | None = None
    unordered: bool = False
    by_statistics: Difference | None = None
    same_dtype: bool = True
    reordered: bool = False
    bound: float | None = None
    skipped: bool = False
    healed: bool = False
    given: bool = False
    exchanged: float = 0.0
    rows: tuple[TensorRow, TensorRow] | None = None
    update: Update | None = None
    elsewhere: tuple[str, float, float] | None = None
    earlier: tuple[Pair, bool] | None = None

    @property
    def quantity(self) -> str:
        """What the tensor is, for people."""
        if self.kind == "parameter":
            return f"parameter {self.name}"
        if self.kind == "parameter_gradient":
            return f"gradient of {self.name}"
        if self.kind in ("value", "setting"):
            return f"{self.kind} {self.name}"
        flow = {"input": "in", "output": "out"}[self.role]
        return f"{'gradient ' if self.direction == 'backward' else ''}{flow} {self.path}"


FIELDS = {
    "token_level_rewards": ("token_level_scores", "old_log_probs", "ref_log_prob"),
    "advantages": ("token_level_rewards", "values"),
    "returns": ("token_level_rewards", "values"),
}
"""What the driver computes fields of a batch from, as verl names them. Where it hands one on (rewards without a penalty
are the scores), that one is the source."""


class Scope:
    """What a result may have been computed from, summed up as it grows.

    Attributes:
        error: largest relative difference of a source.
        tainted: whether a source was already found to diverge.
        unusable: a source holds NaN, or could not be compared.
        moved: a source is an index that changed, so rows of what follows may be other rows.
    """

    __slots__ = ("copies", "empty", "error", "last", "moved", "tainted", "unusable")

    def __init__(self) -> None:
        self.error = 0.0
        self.tainted = self.unusable = self.moved = False
        self.empty = True
        self.last: Difference | None = None
        self.copies: dict[tuple, Pair] = {}

    def add(self, pair: Pair, tainted: bool) -> None:
        """Let what comes after depend on ``pair``."""
        self.empty = False
        error = rounding(pair.dtype) if pair.healed else pair.difference.relative
        if error > self.error:
            self.error = error if math.isfinite(error) else max(self.error, 1.0)
        self.tainted |= tainted
        self.unusable |= not math.isfinite(error)
        as_usual = not pair.skipped and not pair.healed
        self.moved |= pair.discrete and error > 0.0 and as_usual and not pair.given
        if not pair.discrete and math.isfinite(error) and pair.kind == "module" and as_usual:
            self.last = pair.difference
        if pair.identity is not None:
            self.copies.setdefault(pair.identity, pair)

    def join(self, other: Scope) -> None:
        """Let what comes after depend on all that ``other`` holds, copies excepted."""
        self.error = max(self.error, other.error)
        self.tainted |= other.tainted
        self.unusable |= other.unusable
        self.moved |= other.moved
        self.empty &= other.empty


@dataclass(slots=True)
class Edge:
    """One result, what it was computed from, and whose code computed it.

    Attributes:
        culprit: the module whose code is between sources and result, or :data:`LOSS`.
        key: edges of one key compute the same kind of thing, in other layers or calls.
        error: largest relative difference among the sources.
        moved: an index among the sources changed, here or before: what differs is then a few rows and no noise.
        unordered: the result's rows were picked by an index that changed, so they may be in another order.
        source: the one whose sign carries over: of a module's own results the input that differs most, else what was
            computed last.
        twin: the source that the result is a copy of, on the golden side.
        tokens: rows whose errors are independent of one another: those of the result, or of what a gradient of a
            parameter is the sum over.
        index: of the outputs of a module, the edge of an index that one of its children computed. Rows of the result
            are others where the index moved.
    """

    kind: str
    culprit: str
    key: tuple[str, ...]
    result: Pair
    error: float
    tainted: bool
    unusable: bool
    moved: bool
    unordered: bool
    position: int
    twin: Pair | None = None
    source: Difference | None = None
    tokens: int = 1
    index: Edge | None = None


@dataclass(slots=True)
class Node:
    """One call of one module in one direction."""

    module: str
    class_name: str
    call: int
    first: int
    last: int
    inputs: list[Pair] = field(default_factory=list)
    outputs: list[Pair] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    parent: Node | None = None


Judge = Callable[[Edge], bool]
"""Takes an edge, answers whether its result diverges."""


class ModuleGraph:
    """The modules of one pass: nodes of both directions, parameters, attributes, values of the pipeline.

    ``uncalled`` are the holders of parameters that never ran, by the module around them, which computes with them.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self.parameters: dict[str, list[Pair]] = {}
        self.attributes: dict[str, list[Pair]] = {}
        self.parameter_gradients: dict[str, list[Pair]] = {}
        self.values: list[Pair] = []
        nodes: dict[tuple[str, int, str], Node] = {}
        for pair in pairs:
            if pair.kind == "parameter":
                self.parameters.setdefault(pair.owner, []).append(pair)
            elif pair.kind == "setting":
                self.attributes.setdefault(pair.owner, []).append(pair)
            elif pair.kind == "parameter_gradient":
                self.parameter_gradients.setdefault(pair.owner, []).append(pair)
            elif pair.kind == "value":
                if pair.owner:
                    self.attributes.setdefault(pair.owner, []).append(pair)
                else:
                    self.values.append(pair)
            else:
                key = (pair.owner, pair.call, pair.direction)
                node = nodes.get(key)
                if node is None:
                    node = nodes[key] = Node(pair.owner, pair.class_name, pair.call, pair.order, pair.order)
                elif pair.order > node.last:
                    node.last = pair.order
                elif pair.order < node.first:
                    node.first = pair.order
                (node.inputs if pair.role == "input" else node.outputs).append(pair)
        forward = {key[:2]: node for key, node in nodes.items() if key[2] == "forward"}
        backward = {key[:2]: node for key, node in nodes.items() if key[2] == "backward"}
        self.nodes = forward
        self.uncalled: dict[str, list[str]] = {}
        called = {node.module for node in nodes.values()}
        for owner in self.parameters:
            if owner not in called:
                self.uncalled.setdefault(owner.rpartition(".")[0], []).append(owner)
        self.forward = _forward_tree(list(forward.values()))
        self.backward = _backward_tree(backward, forward)

    def walk(self, judge: Judge) -> None:
        """Visit every edge in the order things were computed: forward, then backward, then gradients of parameters."""
        _Walk(self, judge).run()

    def walk_call(self, node: Node, judge: Judge) -> None:
        """Visit the edges of one call of the forward pass alone: what it is given, its children, what it gives out."""
        above = node.parent
        _Walk(self, judge).call(node, above.module if above else "", above.class_name if above else "")


def _forward_tree(nodes: list[Node]) -> list[Node]:
    """Give every node its parent: the nearest captured ancestor by name that finished after it first."""
    nodes.sort(key=lambda node: node.last)
    by_module: dict[str, tuple[list[int], list[Node]]] = {}
    for node in nodes:
        orders, same = by_module.setdefault(node.module, ([], []))
        orders.append(node.last)
        same.append(node)
    return _attach(nodes, lambda node: _enclosing(node, by_module))


def _backward_tree(nodes: dict[tuple[str, int], Node], forward: dict[tuple[str, int], Node]) -> list[Node]:
    """The tree of the forward pass, in the order in which gradients arrived; nodes without a forward one by name."""

    def parent(node: Node) -> Node | None:
        ran = forward.get((node.module, node.call))
        if ran is not None:
            above = ran.parent
            while above is not None:
                held = nodes.get((above.module, above.call))
                if held is not None:
                    return held
                above = above.parent
            return None
        path = node.module
        while path:
            path = path.rpartition(".")[0]
            held = nodes.get((path, node.call))
            if held is not None:
                return held
        return None

    return _attach(sorted(nodes.values(), key=lambda node: node.first), parent)


def _attach(nodes: list[Node], parent_of: Callable[[Node], Node | None]) -> list[Node]:
    top = []
    for node in nodes:
        node.parent = parent_of(node)
        (top if node.parent is None else node.parent.children).append(node)
    return top


def _enclosing(node: Node, by_module: dict[str, tuple[list[int], list[Node]]]) -> Node | None:
    path = node.module
    while path:
        path = path.rpartition(".")[0]
        held = by_module.get(path)
        if held is not None:
            # a parent finishes in the step after its last child; one that never does was not running
            at = bisect.bisect_right(held[0], node.last)
            if at < len(held[0]):
                return held[1][at]
    return None


class _Walk:
    def __init__(self, graph: ModuleGraph, judge: Judge) -> None:
        self.graph, self.judge = graph, judge
        self.position = 0
        self.seen_owners: set[str] = set()
        self.forward_scopes: dict[str, Scope] = {}
        self.last_forward = Scope()
        self.flag: dict[int, bool] = {}
        self.unordered: set[str] = set()
        self.listed: set[tuple[str, str]] = set()
        self.flipped = False
        self.indices: dict[int, Edge] = {}
        self.outputs: list[Pair] = []
        self.done: set[int] = set()
        self.backward_calls: dict[str, list[int]] = {}

    def run(self) -> None:
        graph = self.graph
        run_scope = Scope()
        for node in graph.forward:
            self._forward(node, run_scope, "", "")
            for pair in node.outputs:
                run_scope.add(pair, self.flag[id(pair)])
                self.last_forward.add(pair, self.flag[id(pair)])
                self.outputs.append(pair)
        for owner in [*graph.parameters, *graph.attributes]:
            self._held(owner, Scope())
        self._values()
        start = Scope()
        for node in _every(graph.backward):
            self.backward_calls.setdefault(node.module, []).append(node.call)
        for node in graph.backward:
            self._backward(node, start, "", "")
            for pair in node.outputs:
                start.add(pair, self.flag[id(pair)])
        for owner in graph.parameter_gradients:
            self._parameter_gradients(owner, self.forward_scopes.get(owner, self.last_forward))

    def call(self, node: Node, culprit: str, parent_class: str) -> None:
        """As :meth:`run`, of one node of the forward pass."""
        self._forward(node, Scope(), culprit, parent_class)

    def _visit(
        self, kind: str, culprit: str, key: tuple[str, ...], pair: Pair, scope: Scope, unordered: bool = False,
        source: Difference | None = None, tokens: int | None = None, index: Edge | None = None,
    ) -> None:  # fmt: skip
        self.position += 1
        twin = scope.copies.get(pair.identity) if pair.identity is not None else None
        error, tainted = scope.error, scope.tainted
        pair.given = kind == "input" or twin is not None and twin.given
        if twin is not None:
            kind, error, tainted = "copy", twin.difference.relative, self.flag.get(id(twin), False)
            unordered = twin.unordered
        # noise measured in one dtype says nothing about another
        key = (kind, *key, pair.dtype if pair.same_dtype else f"to {pair.dtype}")
        source = source if source is not None else scope.last
        moved = scope.moved or self.flipped
        tokens = max(1, _rows(pair) if tokens is None else tokens)
        edge = Edge(
            kind, culprit, key, pair, error, tainted, scope.unusable, moved, unordered, self.position, twin, source,
            tokens, index,
        )  # fmt: skip
        if kind == "own" and pair.discrete and not pair.skipped:
            self.indices[id(pair)] = edge
        self.flag[id(pair)] = self.judge(edge)
        moves = pair.discrete and pair.kind == "module" and not (pair.skipped or pair.healed or pair.given)
        self.flipped |= moves and pair.difference.relative > 0.0

    def _values(self) -> None:
        """Fields of the pipeline: as exact as the model's dtype and its outputs allow, and sources of the loss."""
        scope = Scope()
        scope.join(self.last_forward)
        scope.error = max([scope.error, *(rounding(pair.dtype) for pair in self.outputs)])
        fields: dict[str, Pair] = {}
        for pair in self.graph.values:
            sources = [fields[name] for name in FIELDS.get(pair.name, ()) if name in fields]
            if pair.earlier is not None:
                earlier, self.flag[id(earlier)] = pair.earlier
                sources = [earlier]
            around = Scope()
            around.join(scope)
            for source in sources:
                around.add(source, self.flag[id(source)])
            self._visit("value", pair.name, (pair.name,), pair, around)
            self.last_forward.add(pair, self.flag[id(pair)])
            fields.setdefault(pair.name, pair)

    def _held(self, owner: str, scope: Scope) -> None:
        """Parameters and attributes of a module, once, before its first call."""
        if owner not in self.graph.parameters and owner not in self.graph.attributes:
            return
        if owner not in self.seen_owners:
            self.seen_owners.add(owner)
            for pair in self.graph.attributes.get(owner, ()):
                self._visit("attribute", owner, (pair.name,), pair, _NOTHING)
            for pair in self.graph.parameters.get(owner, ()):
                self._visit("parameter", owner, (pair.name,), pair, _NOTHING)
        for held in (self.graph.attributes, self.graph.parameters):
            for pair in held.get(owner, ()):
                scope.add(pair, self.flag[id(pair)])

    def _forward(self, node: Node, outer: Scope, culprit: str, parent_class: str) -> None:
        relative = _relative(node.module, culprit)
        kind = "input" if outer.empty and node.parent is None else "glue"
        picked = outer.moved or culprit in self.unordered
        for pair in node.inputs:
            self._visit(kind, culprit, (parent_class, relative, node.class_name, pair.path), pair, outer, picked)
        scope = Scope()
        for owner in (node.module, *self.graph.uncalled.get(node.module, ())):
            self._held(owner, scope)
        for pair in node.inputs:
            scope.add(pair, self.flag[id(pair)])
        unordered = any(pair.unordered for pair in node.inputs)
        if unordered:
            self.unordered.add(node.module)
        last = _relative(node.module, "").rpartition(".")[2]
        if node.children:
            for child in node.children:
                self._forward(child, scope, node.module, node.class_name)
                for pair in child.outputs:
                    scope.add(pair, self.flag[id(pair)])
            key = (node.class_name, last, node.children[-1].class_name)
            chosen = [self.indices[id(p)] for child in node.children for p in child.outputs if id(p) in self.indices]
            index = max(chosen, key=lambda edge: edge.error, default=None)
            for pair in node.outputs:
                self._visit("glue", node.module, (*key, pair.path), pair, scope, unordered, index=index)
        else:
            # indices first: what they pick goes into the other outputs
            source = _largest(node.inputs)
            for pair in sorted(node.outputs, key=lambda pair: not pair.discrete):
                self._visit("own", node.module, (node.class_name, last, pair.path), pair, scope, unordered, source)
                if pair.unordered:
                    self.listed.add((node.module, pair.path))
                if pair.discrete:
                    scope.add(pair, self.flag[id(pair)])
                    # what was listed in another order belongs to other places of the same list
                    unordered |= pair.reordered and pair.difference.relative == 0.0
        saved = self.forward_scopes.setdefault(node.module, Scope())
        saved.join(scope)
        for pair in node.outputs:
            saved.add(pair, self.flag[id(pair)])
        saved.copies = {}

    def _backward(self, node: Node, outer: Scope, culprit: str, parent_class: str) -> None:
        relative = _relative(node.module, culprit)
        unordered = node.module in self.unordered
        around = Scope()
        around.join(outer)
        around.copies, around.last = outer.copies, outer.last
        if outer.empty:
            around.last = self.last_forward.last
        around.join(self.last_forward if outer.empty else self.forward_scopes.get(culprit, _NOTHING))
        for pair in node.inputs:
            if outer.empty:
                self._visit("loss", LOSS, (), pair, around)
            else:
                key = (parent_class, relative, node.class_name, pair.path)
                listed = unordered or (node.module, pair.path) in self.listed
                self._visit("gradient glue", culprit, key, pair, around, listed)
        scope = Scope()
        for pair in node.inputs:
            scope.add(pair, self.flag[id(pair)])
        if not node.inputs:
            # of what flowed in nothing could be paired (routers hand out other things), so it is what flowed around it
            scope.join(outer)
        scope.join(self.forward_scopes.get(node.module, self.last_forward))
        for child in node.children:
            self._backward(child, scope, node.module, node.class_name)
            for pair in child.outputs:
                scope.add(pair, self.flag[id(pair)])
        last = _relative(node.module, "").rpartition(".")[2]
        kind, source = ("gradient glue", None) if node.children else ("gradient own", _largest(node.inputs))
        key = (node.class_name, last, node.children[-1].class_name if node.children else "")
        for pair in node.outputs:
            self._visit(kind, node.module, (*key, pair.path), pair, scope, unordered, source)
        for pair in self._complete_with(node):
            if id(pair) not in self.done:
                self.done.add(id(pair))
                self._visit(
                    "parameter gradient",
                    node.module,
                    (node.class_name, last, pair.name),
                    pair,
                    scope,
                    source=_largest(node.inputs),
                    tokens=max((_rows(pair) for pair in node.inputs if not pair.skipped), default=1),
                )
        outer.empty = False
        if not node.outputs:
            outer.join(scope)

    def _complete_with(self, node: Node) -> list[Pair]:
        """Gradients of parameters that are complete when this call has run backward: where an update follows on several
        calls, the last of these."""
        pairs = self.graph.parameter_gradients.get(node.module, [])
        if not pairs:
            return []
        updates, calls = sorted({pair.call for pair in pairs}), sorted(self.backward_calls[node.module])
        at, count = calls.index(node.call), len(calls)
        if at == count - 1:
            return pairs
        ended = updates[: (at + 1) * len(updates) // count]
        return [pair for pair in pairs if pair.call in ended]

    def _parameter_gradients(self, owner: str, scope: Scope) -> None:
        for pair in self.graph.parameter_gradients[owner]:
            if id(pair) not in self.done:
                self._visit("parameter gradient", owner, ("", owner.rpartition(".")[2], pair.name), pair, scope)


_NOTHING = Scope()


def _every(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _every(node.children)


def _rows(pair: Pair) -> int:
    return math.prod(pair.shape[:-1])


def _largest(pairs: list[Pair]) -> Difference | None:
    floats = [
        pair.difference
        for pair in pairs
        if not pair.discrete and not pair.skipped and not pair.healed and math.isfinite(pair.difference.relative)
    ]
    return max(floats, key=lambda difference: difference.relative, default=None)


def _relative(module: str, parent: str) -> str:
    """The child's name in its parent, layer and expert numbers left out, so that layers share a key."""
    inside = module[len(parent) + 1 :] if parent and module.startswith(parent + ".") else module
    return ".".join("*" if part.isdigit() else part for part in inside.split("."))
