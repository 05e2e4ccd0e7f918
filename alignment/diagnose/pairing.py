"""Which row of golden belongs to which row of the target, and how far apart the two are.

Modules are paired by canonical name (the class is ignored), their calls by position within module and stage, their
tensors by path. What does not fit in place is aligned: samples by content hash, micro batches by joining them, shards
by summing their sketches, an extra call by what went into it. What has no partner is named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alignment.capture.record import OF_THE_MACHINE, Statistics, TensorRow, holds_samples
from alignment.diagnose.difference import (
    RESOLUTION,
    Difference,
    coarser,
    from_sketches,
    from_statistics,
    from_tensors,
    rounding,
)
from alignment.diagnose.module_graph import Pair
from alignment.diagnose.names import ABSORBED, FUSED, STACKED, NameMap, canonical

DISCRETE = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "uint32", "uint64"})


BOTH = "both"

OPTIONAL_FIELDS = {
    "rollout_log_probs": "an engine that samples need not say how probable its tokens were to it",
    "entropys": "fused kernels give log-probabilities without the entropy of their distribution",
}
"""Fields of the pipeline that only some engines can give (``may_add`` of :mod:`alignment.rl.contracts`), and why."""

_MEASURES_THE_MACHINE = "time, memory and throughput are of the machine, not of what it computes"


@dataclass(frozen=True, kw_only=True)
class Unpaired:
    """What one side has and the other has not.

    Attributes:
        what: ``module``, ``call``, ``parameter``, ``value`` (a field of the pipeline, a tensor of a folder, a curve) or
            ``tensor``; a tensor beside paired ones of its call is a remark, the rest a failure.
        side: the side that has it, or :data:`BOTH` where neither is compared.
        skipped: both sides have it, and padding among it keeps it from being compared.
        disagrees: it was skipped, though the two are of one shape and their statistics disagree: it may be padding, or
            a fault. False for the rows of a single expert, whose results are compared where they leave the experts.
        declared: why it need not be there; "" where nothing is known that excuses it.
    """

    what: str
    side: str
    name: str
    detail: str = ""
    skipped: bool = False
    disagrees: bool = False
    declared: str = ""

    @property
    def fails(self) -> bool:
        """Whether the comparison fails because of it."""
        return self.what != "tensor" and not self.declared

    def __str__(self) -> str:
        if self.skipped or self.side == BOTH:
            return f"{self.what} {self.name} not compared ({self.detail})"
        other = "target" if self.side == "golden" else "golden"
        return f"{self.what} {self.name} only in {self.side}, missing in {other}" + (
            f" ({self.detail})" if self.detail else ""
        )


def declared_remarks(unpaired: Iterable[Unpaired]) -> str:
    """What is left out for a known reason, the reason with it, in words; empty where nothing is."""
    reasons: dict[tuple[str, str], list[Unpaired]] = {}
    for gap in unpaired:
        if gap.declared:
            # the reason for a module names its own parent, and is the same one in every layer
            reasons.setdefault((gap.side, "" if gap.what == "module" else gap.declared), []).append(gap)
    out = []
    for (side, _), gaps in reasons.items():
        names = list(dict.fromkeys(gap.name for gap in gaps))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        out.append(f"{names[0]}{more} {'not compared' if side == BOTH else f'only in {side}'}: {gaps[0].declared}")
    return "; ".join(out)


@dataclass
class Pairing:
    """The pairs of one step, stage and rank, and what has no partner."""

    pairs: list[Pair]
    unpaired: list[Unpaired]
    golden_rows: int = 0
    target_rows: int = 0
    classes: int = 0
    other_classes: int = 0
    moved: str = ""
    """``order`` where the samples of both sides stand otherwise, ``padding`` where padding does: what tensors hold that
    name no samples."""
    padded: bool = False
    """Whether there is padding on either side."""
    reordered: bool = False
    """Whether samples stand in other micro batches or in another order, whatever the padding."""
    real_tokens: frozenset[int] = frozenset()
    """How many real tokens a micro batch may have, on both sides, and all of them together."""
    rebatched: bool = False
    """Whether calls had to be joined, because the micro batches hold other samples."""


_Group = dict[int, list[TensorRow]]
"""call → rows, of one module, kind and direction"""


def pair_rows(golden: Iterable[TensorRow], target: Iterable[TensorRow], names: NameMap) -> Pairing:
    """Pair the rows of one step, stage and rank.

    Differences are taken here, one pair of tensors in memory at a time. Rows are let go as they are paired; lists that
    have names in common are emptied, so that nobody holds what is paired.
    """
    out = Pairing([], [])
    settings: tuple[dict, dict] = {}, {}
    of_machine: dict[str, None] = {}
    first = _grouped(golden, names.golden, settings[0], of_machine)
    second = _grouped(target, names.target, settings[1], of_machine)
    for name in of_machine:
        out.unpaired.append(Unpaired(what="value", side=BOTH, name=_shown(name), declared=_MEASURES_THE_MACHINE))
    fields = _has_fields(first), _has_fields(second)
    layouts = _layout(first), _layout(second)
    out.moved, out.reordered = _moved(*layouts), layouts[0][0] != layouts[1][0]
    out.padded = any(b != (0, n) for _, bounds in layouts for b, n in bounds.values())
    out.real_tokens = _counts(layouts[0]) & _counts(layouts[1])
    _unfuse(first, second)
    _stack_experts(first, second)
    for key, row in settings[0].items():
        if key in settings[1]:
            _pair_settings(key, row, settings[1][key], out)
    if not first.keys().isdisjoint(second):
        for rows in (golden, target):
            if isinstance(rows, list):
                rows.clear()
    shared: dict[tuple, tuple] = {}
    weights = _absorbed_weights(first), _absorbed_weights(second)
    for key in list(first):
        calls = first.pop(key)
        others = second.pop(key, None)
        rows = sum(map(len, calls.values()))
        out.golden_rows += rows
        if others is None:
            out.unpaired.append(_missing(key, calls, "golden", _declared(key, weights[1]), fields[1]))
            continue
        out.target_rows += sum(map(len, others.values()))
        made = len(out.pairs)
        _pair_calls(key, calls, others, out)
        for pair in out.pairs[made:]:
            pair.shape = shared.setdefault(pair.shape, pair.shape)
    for key, calls in second.items():
        out.target_rows += sum(map(len, calls.values()))
        out.unpaired.append(_missing(key, calls, "target", _declared(key, weights[0]), fields[0]))
    return out


_Layout = tuple[set[tuple[str, ...]], dict[str, tuple[tuple[int, int], int]]]
"""The micro batches as the keys of their samples; of every sample its real tokens, and how many with padding."""


def _layout(groups: dict[tuple[str, str, str], _Group]) -> _Layout:
    batches: set[tuple[str, ...]] = set()
    bounds: dict[str, tuple[tuple[int, int], int]] = {}
    met: set[int] = set()
    for calls in groups.values():
        for rows in calls.values():
            for row in rows:
                # the rows of a micro batch share one list of samples
                if row.by_key and id(row.keys) not in met:
                    met.add(id(row.keys))
                    batches.add(_present(row))
                    bounds |= {key: (b, row.tokens) for key, b in zip(row.keys, row.bounds) if b[1] > b[0]}
    return batches, bounds


def _moved(golden: _Layout, target: _Layout) -> str:
    if golden[1] != target[1] and any(b != (0, n) for side in (golden[1], target[1]) for b, n in side.values()):
        return "padding"
    return "" if golden[0] == target[0] else "order"


def _counts(layout: _Layout) -> frozenset[int]:
    batches, bounds = layout
    lengths = {key: high - low for key, ((low, high), _) in bounds.items()}
    every = {sum(lengths[key] for key in keys) for keys in batches}
    return frozenset(every | {sum(lengths.values())}) - {0}


def _grouped(
    rows: Iterable[TensorRow], name_of, settings: dict, of_machine: dict[str, None]
) -> dict[tuple[str, str, str], _Group]:
    groups: dict[tuple[str, str, str], _Group] = {}
    last, name = None, ""
    for row in rows:
        kind = row.kind
        if kind == "module":
            if row.module is not last:
                last = row.module
                name = name_of(last)
        elif kind == "operator":
            # one node of the graph, below the module that calls it
            name = f"{name_of(row.parent)}.{row.module.replace('.', ':')}".lstrip(".")
        elif kind == "value":
            name = f"{name_of(row.parent)}/{_field_name(row.module, name_of)}"
            if row.class_name == OF_THE_MACHINE:
                of_machine[name] = None
                continue
        elif kind == "setting":
            settings[name_of(row.module), row.path] = row
            continue
        else:
            name = name_of(row.module)
        if kind != "module":
            last = None
        key = (name, kind, row.direction)
        group = groups.get(key)
        if group is None:
            group = groups[key] = {}
        call = group.get(row.call)
        if call is None:
            group[row.call] = [row]
        else:
            call.append(row)
    return groups


def _field_name(name: str, name_of: Callable[[str], str]) -> str:
    """The common name of a tensor of a folder; a column or a curve keeps its own, whatever modules are called, unless
    the user pairs it."""
    found = name_of(name)
    return found if found and ("." in name or found != canonical(name)) else name


def _pair_settings(key: tuple[str, str], golden: TensorRow, target: TensorRow, out: Pairing) -> None:
    """A pair where the two differ; equal settings are no evidence, and one that only one side has is none either."""
    difference = setting_difference(golden, target)
    if difference is not None:
        module, name = key
        out.pairs.append(
            Pair(
                module, golden.class_name, "setting", "forward", 0, "input", name, golden.order, golden.dtype, (),
                difference, name=name,
            )
        )  # fmt: skip


SETTING_ROUNDING = 2.0**-24
"""Settings that agree to the unit roundoff of float32 are one: 192 ** -0.5, 1 / sqrt(192), and either in float32."""


def setting_difference(golden: TensorRow, target: TensorRow) -> Difference | None:
    """How two settings of one name differ; None where they are equal, or mean different things in two classes."""
    a, b = golden.value, target.value
    if golden.class_name.removeprefix("FSDP") != target.class_name.removeprefix("FSDP"):
        if golden.path.startswith("config.") or any(v is None or str(v).endswith(")") for v in (a, b)):
            return None
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b))
    if a == b or numbers and float in (type(a), type(b)) and math.isclose(a, b, rel_tol=SETTING_ROUNDING):
        return None
    relative = abs(b - a) / abs(a) if numbers and a else math.inf
    return Difference(relative, problem=f"{b}, golden has {a}")


def _absorbed_weights(groups: dict[tuple[str, str, str], _Group]) -> set[str]:
    """Layers that one side holds the weight of, and computed with, and did not call."""
    out = set()
    for name, kind, _ in groups:
        layer, _, leaf = name.rpartition(".")
        if kind == "parameter" and leaf == "weight" and layer.rpartition(".")[2] in ABSORBED:
            if (layer, "module", "forward") not in groups and (layer.rpartition(".")[0], "module", "forward") in groups:
                out.add(layer)
    return out


def _declared(key: tuple[str, str, str], absorbed: set[str]) -> str:
    """Why the other side need not have it: calls of a layer that it has absorbed, or a field of some engines only."""
    name, kind, _ = key
    parent, _, last = name.rpartition(".")
    if kind == "value":
        return OPTIONAL_FIELDS.get(_shown(name), "")
    return ABSORBED[last].format(parent=parent) if kind == "module" and name in absorbed else ""


def _has_fields(groups: dict[tuple[str, str, str], _Group]) -> bool:
    return any(kind == "value" for _, kind, _ in groups)


def _shown(name: str) -> str:
    """The name as it is written: a value of no module has nothing before its slash."""
    return name.removeprefix("/") or "(root)"


def _missing(key: tuple[str, str, str], calls: _Group, side: str, declared: str, fields: bool) -> Unpaired:
    """A field is missed where the other side recorded ``fields`` at all."""
    name, kind, direction = key
    row = next(iter(calls.values()))[0]
    what = "parameter" if kind.startswith("parameter") else "module"
    if kind == "value":
        what = "value" if fields else "tensor"
    detail = f"{row.class_name}, {len(calls)} calls" if row.class_name else kind
    return Unpaired(
        what=what, side=side, name=_shown(name), detail=f"{detail}, {direction}", declared=declared
    )  # fmt: skip


def _pair_calls(key: tuple[str, str, str], golden: _Group, target: _Group, out: Pairing) -> None:
    if len(golden) == 1 == len(target):
        ((call, rows),), (others,) = golden.items(), target.values()
        _pair_tensors(key, call, rows, others, out)
        return
    first, second = sorted(golden.items()), sorted(target.items())
    if key[1] == "parameter_gradient" and out.rebatched:
        # a backward pass adds to the gradient of the one before, so the last one is that of all micro batches
        _pair_tensors(key, 0, first[-1][1], second[-1][1], out)
        return
    in_place = len(first) == len(second)
    if not in_place or any(_other_samples(a, b) for (_, a), (_, b) in zip(first, second)):
        joined = _joined(golden), _joined(target)
        if joined[0] is not None and joined[1] is not None and _same_samples(*joined):
            out.rebatched = True
            _pair_tensors(key, 0, joined[0], joined[1], out)
            return
    if in_place:
        for (call, rows), (_, others) in zip(first, second):
            _pair_tensors(key, call, rows, others, out)
        return
    matched = _align([rows for _, rows in first], [rows for _, rows in second])
    for i, j in matched:
        _pair_tensors(key, first[i][0], first[i][1], second[j][1], out)
    for side, calls, used in (("golden", first, {i for i, _ in matched}), ("target", second, {j for _, j in matched})):
        for place, (call, _) in enumerate(calls):
            if place not in used:
                detail = f"{key[2]}, called {len(golden)} times in golden, {len(target)} in the target"
                # with other micro batches, a module whose tensors name no samples is called otherwise, too
                what = "tensor" if out.rebatched else "call"
                out.unpaired.append(Unpaired(what=what, side=side, name=f"{key[0] or '(root)'} #{call}", detail=detail))


def _pair_tensors(key, call: int, golden: Sequence[TensorRow], target: Sequence[TensorRow], out: Pairing) -> None:
    if key[1] == "module" and golden[0].class_name:
        out.classes += 1
        out.other_classes += golden[0].class_name != target[0].class_name
    others = {(row.role, row.path): row for row in target}
    strangers = _other_results(key, golden, others)
    named = key[1] == "value"  # which has no path but its name, that was paired
    in_place = len(golden) == len(target) and all(
        a.role == b.role and (named or a.path == b.path) for a, b in zip(golden, target)
    )
    if in_place and not strangers:
        for a, b in zip(golden, target):
            _pair(key[0], call, a, b, out)
        return
    left: list[TensorRow] = []
    for row in golden:
        place = row.role, row.path
        partner = None if place in strangers else others.pop(place, None)
        if partner is None:
            left.append(row)
        else:
            _pair(key[0], call, row, partner, out)
    spare = list(others.values())
    # another signature: the same tensor under another name, and those first that hold the same numbers
    partners = dict(_by_contents(left, spare))
    spare = [row for row in spare if not any(row is partner for partner in partners.values())]
    for i, row in enumerate(left):
        if i in partners:
            _pair(key[0], call, row, partners[i], out)
            continue
        partner = next((o for o in spare if o.role == row.role and o.shape == row.shape and _alike(o, row)), None)
        if partner is None:
            large = (o for o in spare if o.role == row.role and _as_large(o, row) and _alike(o, row))
            partner = next(large, None)
        if partner is None:
            out.unpaired.append(Unpaired(what="tensor", side="golden", name=f"{key[0]} {row.role} {row.path}"))
        else:
            spare.remove(partner)
            _pair(key[0], call, row, partner, out)
    for row in spare:
        out.unpaired.append(Unpaired(what="tensor", side="target", name=f"{key[0]} {row.role} {row.path}"))


def _as_large(first: TensorRow, second: TensorRow) -> bool:
    """As many elements, or as many of real tokens where both know which these are."""
    if math.prod(first.shape) == math.prod(second.shape):
        return True
    known = first.by_key and second.by_key and None not in (first.statistics, second.statistics)
    return known and first.statistics.count == second.statistics.count


def _by_contents(left: Sequence[TensorRow], spare: Sequence[TensorRow]) -> Iterator[tuple[int, TensorRow]]:
    """Rows of golden and of the target with equal statistics, one to one."""
    free = list(spare)
    for i, row in enumerate(left):
        same = (o for o in free if o.role == row.role and _alike(o, row) and _same_values(row.statistics, o.statistics))
        partner = next(same, None)
        if partner is not None:
            free = [o for o in free if o is not partner]
            yield i, partner


ROUTERS = ("gate", "router")
"""Names of the modules that choose experts, after translation."""


def _present(row: TensorRow) -> tuple[str, ...]:
    """The samples of a row that have real tokens: engines fill a micro batch up with rows that have none."""
    if row.bounds is None:
        return row.keys
    return tuple(key for key, (low, high) in zip(row.keys, row.bounds) if high > low)


def _other_results(key, golden: Sequence[TensorRow], others: dict[tuple[str, str], TensorRow]) -> set[tuple[str, str]]:
    """Places of outputs at which two classes hand out something else for the same tokens, as routers do: the choice, or
    the logits before it, or a number for every expert. None where nothing else of the call's outputs can be compared,
    but for routers, whose choice shows in what the layer around them gives out."""
    if key[1] != "module" or key[2] != "forward" or golden[0].class_name == next(iter(others.values())).class_name:
        return set()
    results = {(row.role, row.path): row for row in golden if row.role == "output"}
    common = results.keys() & others.keys()
    strange = {place for place in common if _another_width(results[place], others[place])}
    return strange if len(strange) < len(common) or key[0].rpartition(".")[2] in ROUTERS else set()


def _another_width(golden: TensorRow, target: TensorRow) -> bool:
    if not golden.shape or not target.shape or golden.shape[-1] == target.shape[-1]:
        return False
    if golden.by_key and target.by_key and None not in (golden.statistics, target.statistics):
        tokens = [row.statistics.count / max(1, row.shape[-1]) for row in (golden, target)]
        return tokens[0] == tokens[1] and Counter(_present(golden)) == Counter(_present(target))
    return golden.shape[:-1] == target.shape[:-1]


def _pair(module: str, call: int, golden: TensorRow, target: TensorRow, out: Pairing) -> None:
    """Adds the pair. Where samples stand otherwise in the two, tensors that do not name theirs (rows that were picked
    from all tokens, positions that all share) are compared by statistics, or not at all where padding is among them."""
    pair = pair_of(module, call, golden, target)
    moved = out.moved
    if out.padded and golden.class_name != target.class_name and not holds_samples(module):
        # Implementations fill up with other tokens, which go to other experts.
        moved = "padding"
    if moved == "padding" and _all_real(module, golden, target, out.real_tokens):
        moved = "order" if out.reordered else ""
    if moved and not (golden.by_key and target.by_key) and golden.kind in ("module", "operator"):
        if len(golden.shape) > 1 or golden.shape != target.shape:
            alike = golden.shape == target.shape and None not in (golden.statistics, target.statistics)
            found = from_statistics(golden.statistics, target.statistics) if alike else None
            if moved == "padding" and (found is None or found.relative > rounding(pair.dtype)):
                name = f"{module or '(root)'} {golden.role} {golden.path}"
                detail = f"padding among its {list(golden.shape)} and {list(target.shape)}"
                disagrees = golden.shape == target.shape and holds_samples(module)
                out.unpaired.append(
                    Unpaired(
                        what="tensor", side="golden", name=name, detail=detail, skipped=True, disagrees=disagrees
                    )
                )  # fmt: skip
                pair.difference, pair.identity, pair.by_statistics = Difference(0.0), None, None
                pair.skipped, pair.bound = True, None if pair.discrete else 0.0
                pair.unordered = not holds_samples(module)
                out.pairs.append(pair)
                return
            if found is not None and not pair.difference.problem:
                if pair.difference.detail != "statistics":
                    # a lower bound among exact numbers: as a source it must not claim more than a sketch could
                    found.relative, found.detail = max(found.relative, RESOLUTION), "sketch"
                    pair.bound = None if pair.discrete else found.relative
                pair.difference, pair.identity = found, None
    out.pairs.append(pair)


def _all_real(module: str, golden: TensorRow, target: TensorRow, real_tokens: frozenset[int]) -> bool:
    """Whether both hold one row for every real token and none for padding, as engines do that remove it: [tokens, …] or
    [1, tokens, …]. The rows of a single expert are as many by chance only."""
    shape = golden.shape
    if len(shape) < 2 or shape != target.shape or not holds_samples(module):
        return False
    return shape[0] in real_tokens or len(shape) > 2 and shape[0] == 1 and shape[1] in real_tokens


def _alike(first: TensorRow, second: TensorRow) -> bool:
    return (first.dtype in DISCRETE) == (second.dtype in DISCRETE)


def pair_of(module: str, call: int, golden: TensorRow, target: TensorRow) -> Pair:
    """The pair of two rows with their difference."""
    kind = golden.kind
    owner, name = module, ""
    if kind == "parameter" or kind == "parameter_gradient":
        owner, _, name = module.rpartition(".")
    elif kind == "value":
        owner, _, name = module.partition("/")
    a, b, dtype = golden.statistics, target.statistics, golden.dtype
    discrete = dtype in DISCRETE
    same = dtype == target.dtype
    difference = difference_of(golden, target, discrete)
    reordered = discrete and not difference.problem and difference.relative > 0.0 and _same_values(a, b)
    exchanged = difference.relative if reordered else 0.0
    if reordered:
        difference.relative = 0.0
    by_statistics = identity = None
    if a is not None and b is not None:
        if difference.detail != "statistics":
            by_statistics = _scaled(a, b)
        if a.l2 > 0.0 and a.count > 1:
            identity = (a.l2, a.mean, a.max, a.min, a.count)
    shape = _real_shape(golden)
    return Pair(
        owner, golden.class_name, kind, golden.direction, call, golden.role, golden.path, golden.order,
        dtype if same else coarser(dtype, target.dtype), shape, difference, discrete, name, identity, False,
        by_statistics, same,
        reordered, exchanged=exchanged, rows=(golden, target) if kind == "parameter" else None,
    )  # fmt: skip


def _real_shape(row: TensorRow) -> tuple[int, ...]:
    """The shape, of its real tokens alone where only those were looked at."""
    if not row.by_key or row.statistics is None or not row.shape:
        return row.shape
    last = max(1, row.shape[-1])
    return row.statistics.count // last, last


def _scaled(golden: Statistics, target: Statistics) -> Difference:
    """A comparison per element for tensors of unequal row counts: root mean square and mean, and the missing rows."""
    if golden.count == target.count:
        return from_statistics(golden, target)
    if not golden.count or not target.count or golden.l2 == 0.0:
        return Difference(1.0, detail="statistics")
    size = golden.l2 / math.sqrt(golden.count)
    gain = target.l2 / math.sqrt(target.count) / size - 1.0
    share = abs(golden.count - target.count) / max(golden.count, target.count)
    return Difference(max(abs(gain), math.sqrt(share)), gain, (target.mean - golden.mean) / size, detail="statistics")


def difference_of(golden: TensorRow, target: TensorRow, discrete: bool = False) -> Difference:
    """The difference of two rows by the finest detail both hold."""
    a, b = golden.statistics, target.statistics
    if a is not None and b is not None:
        if a.nan_count != b.nan_count or a.inf_count != b.inf_count:
            found = f"{b.nan_count} NaN and {b.inf_count} infinite elements, golden has {a.nan_count} and {a.inf_count}"
            return Difference(math.inf, problem=found)
        if a.nan_count == a.count and a.count:
            return Difference(math.inf, problem="golden holds nothing but NaN")
    if golden.by_key and target.by_key:
        return _of_samples(golden, target, discrete)
    if golden.keys is not None and target.keys is not None and golden.keys != target.keys:
        return _by_keys(golden, target)
    if golden.shape != target.shape and math.prod(golden.shape) != math.prod(target.shape):
        return Difference(math.inf, problem=_other_shape(golden, target))
    if golden.load_tensor is not None and target.load_tensor is not None:
        return _from_tensors(golden, target)
    return _by_summary(golden, target, discrete, TensorRow.sketch if golden.by_key == target.by_key else None)


def _by_summary(
    golden: TensorRow, target: TensorRow, discrete: bool, sketch_of: Callable[[TensorRow], np.ndarray] | None
) -> Difference:
    """The difference by sketches where both have them and ``sketch_of`` may read them, else by statistics."""
    a, b = golden.statistics, target.statistics
    sketches = ()
    if sketch_of is not None and golden.load_sketch is not None and target.load_sketch is not None:
        sketches = sketch_of(golden), sketch_of(target)
    if sketches and sketches[0].shape == sketches[1].shape:
        found = from_sketches(*sketches, a, b)
    elif a is not None and b is not None:
        found = from_statistics(a, b)
    else:
        return Difference(math.inf, problem="the two captures share no detail: statistics, sketch or tensor")
    return _of_choices(found) if discrete else found


def _other_shape(golden: TensorRow, target: TensorRow) -> str:
    found = f"shape {list(target.shape)}, golden has {list(golden.shape)}"
    if len(golden.shape) == len(target.shape) >= 2 and golden.shape[2:] == target.shape[2:]:
        lacking = [side for side, row in (("golden", golden), ("the target", target)) if not row.by_key]
        if lacking and golden.kind in ("module", "operator"):
            found += (
                f"; if that is padding or another micro batch, capture {' and '.join(lacking)} with its tokens known:"
                " call the model with input_ids and attention_mask, or give session.step the attention_mask"
            )
    return found


def _of_samples(golden: TensorRow, target: TensorRow, discrete: bool) -> Difference:
    """Rows of the real tokens of known samples: in any order, padding and micro batches."""
    first, second = Counter(_present(golden)), Counter(_present(target))
    lost, spare = first - second, second - first
    if lost or spare:
        found = f"{lost.total()} of {first.total()} samples missing, {spare.total()} others instead"
        return Difference(math.inf, problem=found)
    a, b = golden.statistics, target.statistics
    if a is not None and b is not None and a.count != b.count:
        shown = [f"{row.statistics.count} elements in {list(row.shape)}" for row in (target, golden)]
        return Difference(math.inf, problem=f"shape: {shown[0]} are of real tokens, golden has {shown[1]}")
    if golden.load_tensor is not None and target.load_tensor is not None:
        first, second = _real_tokens(golden), _real_tokens(target)
        if first is not None and second is not None and first.shape == second.shape:
            return from_tensors(first, second)
    return _by_summary(golden, target, discrete, _sketch_of_all)


def _sketch_of_all(row: TensorRow) -> np.ndarray:
    """One sketch of all samples; those of single samples add up to it."""
    sketch = row.sketch()
    return sketch.sum(0) if sketch.ndim == 2 else sketch


def _real_tokens(row: TensorRow) -> np.ndarray | None:
    """The real tokens of every sample, flat, samples in the order of their keys; None for a layout without them."""
    tensor, samples, tokens = row.tensor(), len(row.keys), row.tokens
    order = sorted(range(samples), key=lambda i: row.keys[i])
    if tensor.ndim < 2 or row.bounds is None:
        return None
    if tensor.shape[:2] == (samples, tokens):
        parts = [tensor[i, slice(*row.bounds[i])] for i in order]
    elif tensor.shape[:2] == (tokens, samples):
        parts = [tensor[slice(*row.bounds[i]), i] for i in order]
    elif tensor.ndim == 4 and tensor.shape[0] == samples and tokens in tensor.shape[2:]:
        parts = []
        for i in order:
            part = tensor[i][:, slice(*row.bounds[i])] if tensor.shape[2] == tokens else tensor[i]
            parts.append(part[..., slice(*row.bounds[i])] if tensor.shape[3] == tokens else part)
    else:
        return None
    return np.concatenate([part.reshape(-1) for part in parts])


_SUMS_OF_INTEGERS = 2.0**-40
"""What float64 sums of 2²⁰ integers lose at most where they are merged in another order, with room for the root."""


def _of_choices(found: Difference) -> Difference:
    """Indices count by how many moved.

    A moved index is off by √2 standard deviations of a uniform choice, so ‖t − g‖²/‖g‖² is half of twice the share of
    moved ones for indices from 0: (n/6) / (n/3) per element.
    """
    if found.detail == "statistics" and found.relative <= _SUMS_OF_INTEGERS:
        found.relative = 0.0
    found.relative *= 2.0
    found.gain = found.bias = 0.0
    return found


def _same_values(a: Statistics | None, b: Statistics | None) -> bool:
    """Equal statistics: the same values in another order, unless chance made two sums and two extremes agree."""
    if a is None or b is None:
        return False
    return (a.max, a.min, a.count, a.mean, a.l2) == (b.max, b.min, b.count, b.mean, b.l2) and a.count > 1


def _from_tensors(golden: TensorRow, target: TensorRow) -> Difference:
    first, second = golden.tensor(), target.tensor()
    if first.size != second.size:
        return Difference(
            math.inf, detail="tensor", problem=f"shape {list(second.shape)}, golden has {list(first.shape)}"
        )
    if first.shape != golden.shape and first.size != math.prod(golden.shape):
        return Difference(
            math.inf, detail="tensor", problem=f"golden's file holds {list(first.shape)} for {list(golden.shape)}"
        )
    return from_tensors(first.reshape(-1), second.reshape(-1))


def _by_keys(golden: TensorRow, target: TensorRow) -> Difference:
    """Samples in another order, or some of them missing: by content hash."""
    places = {key: i for i, key in enumerate(target.keys)}
    common = [(i, places[key]) for i, key in enumerate(golden.keys) if key in places]
    lost = len(golden.keys) - len(common)
    if lost or len(golden.keys) != len(target.keys):
        found = f"{lost} of {len(golden.keys)} samples missing, {len(target.keys) - len(common)} others instead"
        return Difference(math.inf, problem=found)
    mine, theirs = [i for i, _ in common], [j for _, j in common]
    if golden.load_tensor is not None and target.load_tensor is not None:
        first, second = golden.tensor(), target.tensor()
        n = len(golden.keys)
        if n and first.shape[0] == n == second.shape[0]:
            return from_tensors(first[mine], second[theirs])
    if golden.load_sketch is not None and target.load_sketch is not None:
        first, second = golden.sketch(), target.sketch()
        if first.ndim == second.ndim == 2 and first.shape[1] == second.shape[1]:
            return from_sketches(first[mine], second[theirs], golden.statistics, target.statistics)
    if golden.statistics is not None and target.statistics is not None:
        return from_statistics(golden.statistics, target.statistics)
    return Difference(math.inf, problem="samples are in another order, and nothing per sample was recorded")


# --- calls --------------------------------------------------------------------------------------------------------


def _keys(rows: Sequence[TensorRow]) -> Counter[str] | None:
    """The samples of a call, where its tensors say which ones they are."""
    return next((Counter(_present(row)) for row in rows if row.by_key), None)


def _other_samples(golden: Sequence[TensorRow], target: Sequence[TensorRow]) -> bool:
    mine, theirs = _keys(golden), _keys(target)
    return mine is not None and theirs is not None and mine != theirs


def _same_samples(golden: Sequence[TensorRow], target: Sequence[TensorRow]) -> bool:
    mine, theirs = _keys(golden), _keys(target)
    if mine is not None and theirs is not None:
        return mine == theirs
    return sum(row.shape[0] for row in golden if row.shape) == sum(row.shape[0] for row in target if row.shape)


def _joined(calls: _Group) -> list[TensorRow] | None:
    """The calls of one module as one, joined along their leading dimension; None where they do not fit."""
    groups: dict[tuple[str, str], list[TensorRow]] = {}
    for _, rows in sorted(calls.items()):
        for row in rows:
            groups.setdefault((row.role, row.path), []).append(row)
    out = []
    known = any(row.by_key for rows in groups.values() for row in rows)
    for rows in groups.values():
        if known and not all(row.by_key for row in rows):
            continue  # beside tensors of known samples: a mask or positions that all samples of a micro batch share
        if len(rows) != len(calls) or any(
            not row.shape or not known and row.shape[1:] != rows[0].shape[1:] for row in rows
        ):
            return None
        out.append(rows[0] if len(rows) == 1 else join(rows))
    return out


def join(rows: Sequence[TensorRow]) -> TensorRow:
    """One row for rows that follow one another along the leading dimension, or that hold samples of their own."""
    if all(row.by_key for row in rows):
        return _joined_samples(rows)
    keys = [key for row in rows for key in row.keys] if all(row.keys is not None for row in rows) else None
    per_sample = keys is not None and all(row.load_sketch is not None for row in rows)

    def sketch() -> np.ndarray:
        return np.concatenate([np.atleast_2d(row.sketch()) for row in rows])

    def tensor() -> np.ndarray:
        return np.concatenate([row.tensor() for row in rows])

    return replace(
        rows[0],
        shape=(sum(row.shape[0] for row in rows), *rows[0].shape[1:]),
        statistics=merged(rows),
        keys=tuple(keys) if keys is not None else None,
        load_sketch=sketch if per_sample else None,
        load_tensor=tensor if all(row.load_tensor is not None for row in rows) else None,
    )


def _joined_samples(rows: Sequence[TensorRow]) -> TensorRow:
    """Sketches at the places of their samples add up, whatever the padding of each micro batch."""

    def sketch() -> np.ndarray:
        return np.sum([_sketch_of_all(row) for row in rows], axis=0, dtype=np.float32)

    def tensor() -> np.ndarray:
        return np.concatenate([row.tensor() for row in rows])

    first, samples = rows[0], sum(len(row.keys) for row in rows)
    one_padding = all(row.shape[1:] == first.shape[1:] and row.shape[0] == len(row.keys) for row in rows)
    return replace(
        first,
        shape=(samples, *first.shape[1:]),
        statistics=merged(rows),
        keys=tuple(key for row in rows for key in row.keys),
        bounds=tuple(b for row in rows for b in row.bounds),
        load_sketch=sketch if all(row.load_sketch is not None for row in rows) else None,
        load_tensor=tensor if one_padding and all(row.load_tensor is not None for row in rows) else None,
    )


def merged(rows: Sequence[TensorRow]) -> Statistics | None:
    """Statistics of the rows together."""
    parts = [row.statistics for row in rows]
    if any(part is None for part in parts):
        return None
    finite = [part.count - part.nan_count - part.inf_count for part in parts]
    total = sum(finite)
    return Statistics(
        max=max(part.max for part in parts),
        min=min(part.min for part in parts),
        mean=math.fsum(part.mean * n for part, n in zip(parts, finite)) / total if total else 0.0,
        l2=math.hypot(*(part.l2 for part in parts)),
        nan_count=sum(part.nan_count for part in parts),
        inf_count=sum(part.inf_count for part in parts),
        count=sum(part.count for part in parts),
    )


def _align(golden: Sequence[list[TensorRow]], target: Sequence[list[TensorRow]]) -> list[tuple[int, int]]:
    """Calls in order with the least total difference of what went in; the longer side leaves some out.

    Needleman and Wunsch 1970, with a free gap on the longer side only.
    """
    if len(golden) > len(target):
        return [(i, j) for j, i in _align(target, golden)]
    n, m = len(golden), len(target)
    if not n:
        return []
    best = np.full((n + 1, m + 1), np.inf)
    best[0, :] = 0.0
    for i in range(1, n + 1):
        for j in range(i, m - n + i + 1):
            best[i, j] = min(best[i, j - 1], best[i - 1, j - 1] + _distance(golden[i - 1], target[j - 1]))
    out, i, j = [], n, m
    while i:
        if best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            out.append((i - 1, j - 1))
            i, j = i - 1, j - 1
    return out[::-1]


def _distance(golden: Sequence[TensorRow], target: Sequence[TensorRow]) -> float:
    others = {(row.role, row.path): row for row in target}
    total = 0.0
    for row in golden:
        partner = others.get((row.role, row.path))
        if partner is None or partner.shape != row.shape:
            total += 2.0
        elif row.statistics is not None and partner.statistics is not None:
            total += min(2.0, from_statistics(row.statistics, partner.statistics).relative)
    return total


# --- fused layers -------------------------------------------------------------------------------------------------


def _unfuse(first: dict, second: dict) -> None:
    """Give the side that names the parts of a fused layer a joined row, so that both have the fused one."""
    for fused, parts in FUSED.items():
        for whole, apart in ((first, second), (second, first)):
            for key in [key for key in whole if _last_module(key).endswith(fused) and key not in apart]:
                name, kind, direction = key
                head, leaf = (name.rsplit(".", 1)) if kind.startswith("parameter") else (name, "")
                prefix = head[: -len(fused)]
                keys = [(prefix + part + ("." + leaf if leaf else ""), kind, direction) for part in parts]
                if all(k in apart for k in keys):
                    groups = [apart.pop(k) for k in keys]
                    apart[key] = _joined_parts(groups, kind)


def _stack_experts(first: dict, second: dict) -> None:
    """Give the side that names every expert's weights a row of all of them, where the other side has only that."""
    for whole, apart in ((first, second), (second, first)):
        for key in [key for key in whole if key[1].startswith("parameter") and key not in apart]:
            name, kind, direction = key
            experts, _, last = name.rpartition(".")
            if experts.rpartition(".")[2] != "experts" or last not in STACKED:
                continue
            model = next(iter(whole[key].values()))[0]
            for parts in STACKED[last]:
                numbers = range(model.shape[0] if model.shape else 0)
                keys = [(f"{experts}.{n}.{part}.weight", kind, direction) for n in numbers for part in parts]
                if keys and all(k in apart for k in keys):
                    stacked = _stacked([apart[k] for k in keys], model)
                    if stacked:
                        apart[key] = stacked
                        for k in keys:
                            del apart[k]
                    break


def _stacked(groups: Sequence[_Group], model: TensorRow) -> _Group:
    """Per call and state: the weights one after the other, in the shape of ``model``; empty where they do not have
    that."""
    out: _Group = {}
    for call, states in groups[0].items():
        parts = [group.get(call, ()) for group in groups]
        if any(len(part) != len(states) for part in parts):
            return {}
        out[call] = []
        for rows in zip(*parts):
            out_features = sum(row.shape[0] for row in rows if row.shape)
            if {row.shape[1:] for row in rows} != {model.shape[2:]} or out_features != math.prod(model.shape[:2]):
                return {}
            joined = _side_by_side(rows, axis=0)
            load = joined.load_tensor
            tensor = None if load is None else lambda load=load: load().reshape(model.shape)
            out[call].append(
                replace(joined, module=model.module, path=model.path, shape=model.shape, load_tensor=tensor)
            )
    return out


def _last_module(key: tuple[str, str, str]) -> str:
    return key[0].rpartition(".")[0] if key[1].startswith("parameter") else key[0]


def _joined_parts(groups: Sequence[_Group], kind: str) -> _Group:
    """Per call: the inputs of the first part, and the outputs (or rows of the weight) of all parts in turn."""
    out: _Group = {}
    for call, rows in groups[0].items():
        parts = [group.get(call, []) for group in groups]
        forward = rows[0].direction == "forward"
        shared = "input" if forward else "output"
        kept = [] if kind.startswith("parameter") else [row for row in rows if row.role == shared]
        if not forward and kept:
            # the gradient of the common input is the sum over the parts, which only the fused side has
            kept = []
        fan = [[row for row in part if kind.startswith("parameter") or row.role != shared] for part in parts]
        for together in zip(*fan):
            kept.append(_side_by_side(together, axis=0 if kind.startswith("parameter") else -1))
        out[call] = kept
    return out


def _side_by_side(rows: Sequence[TensorRow], axis: int) -> TensorRow:
    shape = list(rows[0].shape)
    shape[axis] = sum(row.shape[axis] for row in rows)

    def tensor() -> np.ndarray:
        return np.concatenate([row.tensor() for row in rows], axis=axis)

    # The parts are of the same tokens of the same samples, so the keys of the first are those of the whole.
    return replace(
        rows[0],
        shape=tuple(shape),
        statistics=merged(rows),
        load_sketch=None,
        load_tensor=tensor if all(row.load_tensor is not None for row in rows) else None,
    )
