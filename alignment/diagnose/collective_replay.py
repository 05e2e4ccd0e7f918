"""Replays recorded collectives in one process and names the first that gave something else than it should have.

What only moves has to arrive bit for bit. A sum of n summands in floating point may be off by what adding in another
order can make of it, |error| ≤ (n − 1)·u / (1 − (n − 1)·u) · Σ|x| for unit roundoff u (Higham, *Accuracy and Stability
of Numerical Algorithms*, section 4.2); two summands have one order only, so their sum is the rounded one. A mean takes
two roundings more, which below the normal numbers lose half of the smallest subnormal each; sums are exact there.
Subnormal results may be flushed to 0. Copies of one sum on several ranks have to be equal.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from alignment.diagnose.collective_record import Call, RankRecord
from alignment.numerics.budget import unit_roundoff

LOWER = (torch.bfloat16, torch.float16)
"""What a reduction may have been carried out in, where its tensors are wider."""
_EXACT = ("MIN", "MAX", "BAND", "BOR", "BXOR")


@dataclass(frozen=True, kw_only=True)
class WrongCollective:
    """A collective that did not give what its inputs say.

    Attributes:
        op, group, ranks: which, of which group.
        index: number of the call in its group, from 0.
        rank: the first rank that got something wrong.
        part: which part of a gather, None for what has one output.
        element: index of the first wrong element.
        expected, found: there.
        error, bound: of that element; 0 for what only moves.
        cause: what explains it, "" where nothing does.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    index: int
    rank: int
    part: int | None = None
    element: tuple[int, ...] = ()
    expected: float | None = None
    found: float | None = None
    error: float | None = None
    bound: float | None = None
    cause: str = ""

    @property
    def place(self) -> str:
        """Operation, group, call, rank and element, for people."""
        who = f"{self.group or 'group'} of ranks {', '.join(map(str, self.ranks))}"
        text = f"{self.op} of the {who}, call {self.index}, on rank {self.rank}"
        if self.part is not None:
            text += f", part {self.part}"
        return f"{text}, element {list(self.element)}" if self.element else text

    def __str__(self) -> str:
        text = self.place
        if self.found is not None:
            text += f": {self.found!r}, not {self.expected!r}"
        return f"{text}: {self.cause}" if self.cause else text

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "place": self.place}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the replay of all collectives says.

    Attributes:
        wrong: those that are wrong, in the order in which they happened; the first one is the cause.
        judged: how many collectives of each operation.
        elements: of output that were compared.
        used: largest share of the bound of a sum that its error took.
        unjudged: why some were not, with how many.
    """

    wrong: tuple[WrongCollective, ...]
    judged: Mapping[str, int]
    elements: int
    used: float
    unjudged: Mapping[str, int] = field(default_factory=dict)

    @property
    def first(self) -> WrongCollective | None:
        return self.wrong[0] if self.wrong else None

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("judged", "elements", "used", "unjudged")}
        return {**plain, "wrong": [one.to_dict() for one in self.wrong]}


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """One collective: the calls of its ranks that belong together, and when it happened."""

    ranks: tuple[int, ...]
    index: int
    when: int
    calls: Mapping[int, Call]

    def wrong(self, rank: int, **more: Any) -> WrongCollective:
        call = next(iter(self.calls.values()))
        return WrongCollective(op=_pair_name(call.op), group=call.group, ranks=self.ranks, index=self.index, rank=rank, **more)


def replay(records: Sequence[RankRecord]) -> Replay:
    """Every collective of all ranks, again, in float64."""
    wrong: list[WrongCollective] = []
    judged: Counter[str] = Counter()
    unjudged: Counter[str] = Counter()
    for record in records:
        for op, count in record.unseen.items():
            unjudged[f"{op}: called past torch.distributed's functions"] += count
    nobody = [call for record in records for call in record.calls if call.op == "recv" and call.root is None]
    unknown = {(call.ranks, call.group, call.rank, call.tag) for call in nobody}
    if nobody:
        unjudged["recv from any rank: who sent was never told"] += len(nobody)
    meetings = sorted(_meetings(records), key=lambda meeting: meeting.when)
    everything = _inputs_of_all(meetings)
    groups = list(dict.fromkeys(tuple(sorted(call.ranks)) for record in records for call in record.calls))
    elements, used = 0, 0.0
    for meeting in meetings:
        call = next(iter(meeting.calls.values()))
        if call.op in ("send", "recv") and (call.ranks, call.group, meeting.ranks[1], call.tag) in unknown:
            # Any of these may be what a recv of no known source got, and each later one is then another's.
            unjudged["send and recv: to a rank that received from one that is not known"] += 1
            continue
        bad = _attendance(meeting)
        if bad is None:
            expected = _expected(meeting)
            if expected is None:
                unjudged[f"{call.op} with {call.reduce}"] += 1
                continue
            if not all(meeting.calls[rank].finished for rank in expected):
                unjudged[f"{call.op}: nobody waited for it"] += 1
                continue
            judged[_pair_name(call.op)] += 1
            for rank, parts in expected.items():
                elements += sum(part.value.numel() for part in parts)
            bad, share = _compare(meeting, expected)
            used = max(used, share)
        if bad is not None:
            # What follows the first wrong one may be wrong for it; only that is explained.
            cause = bad.cause or ("" if wrong else _explain(meeting, bad, everything, groups))
            wrong.append(WrongCollective(**{**asdict(bad), "cause": cause}))
    return Replay(wrong=tuple(wrong), judged=dict(judged), elements=elements, used=used, unjudged=dict(unjudged))


# --- which calls belong together -------------------------------------------------------------------------------------


def _pair_name(op: str) -> str:
    return "send and recv" if op in ("send", "recv") else op


def _meetings(records: Sequence[RankRecord]) -> Iterator[_Meeting]:
    """The k-th call of a group on one rank meets the k-th of the others; the k-th send of a pair meets its recv.

    A recv whose source is not known meets nobody.
    """
    groups: dict[tuple, dict[int, list[tuple[int, Call]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for when, call in enumerate(record.calls):
            if call.op == "recv" and call.root is None:
                continue
            if call.op in ("send", "recv"):
                pair = (call.rank, call.root) if call.op == "send" else (call.root, call.rank)
                groups["pair", call.ranks, call.group, pair, call.tag][record.rank].append((when, call))
            else:
                groups["group", call.ranks, call.group][record.rank].append((when, call))
    for key, by_rank in groups.items():
        members = key[3] if key[0] == "pair" else key[1]
        for index in range(max(len(calls) for calls in by_rank.values())):
            there = {r: by_rank[r][index] for r in members if index < len(by_rank.get(r, ()))}
            yield _Meeting(
                ranks=tuple(members),
                index=index,
                when=min(when for when, _ in there.values()),
                calls={rank: call for rank, (_, call) in there.items()},
            )


def _attendance(meeting: _Meeting) -> WrongCollective | None:
    """Whether all ranks came, and to the same collective."""
    absent = [rank for rank in meeting.ranks if rank not in meeting.calls]
    if absent:
        return meeting.wrong(absent[0], cause="the rank did not take part")
    calls = meeting.calls
    kinds = {rank: (_pair_name(c.op), c.reduce, c.root if len(calls) > 2 else None) for rank, c in calls.items()}
    usual, _ = Counter(kinds.values()).most_common(1)[0]
    odd = [rank for rank in meeting.ranks if kinds[rank] != usual]
    if odd:
        told = " ".join(str(word) for word in kinds[odd[0]] if word not in (None, ""))
        return meeting.wrong(
            odd[0], cause=f"the rank called {told} where the others called {usual[0]} {usual[1]}".strip()
        )
    return None


# --- what should have come out ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One expected output: its values (float64 for sums), and by how much each element may be off; None: not at all.

    ``reach`` is Σ|summand|: the largest that a sum may become on its way.
    """

    value: Tensor
    bound: Tensor | None = None
    reach: Tensor | None = None


def _expected(meeting: _Meeting) -> dict[int, list[_Part]] | None:
    """The outputs of every rank; None for a reduction that is not known."""
    calls, ranks = meeting.calls, meeting.ranks
    first = calls[ranks[0]]
    op, root = first.op, first.root
    if op in ("send", "recv"):
        source, target = ranks
        return {target: [_Part(value=part) for part in calls[source].inputs]}
    if op == "broadcast":
        return {rank: [_Part(value=part) for part in calls[root].inputs] for rank in ranks}
    if op in ("all_gather", "gather"):
        parts = [_Part(value=calls[rank].inputs[0]) for rank in ranks]
        return {rank: parts for rank in (ranks if op == "all_gather" else [root])}
    if op == "scatter":
        return {rank: [_Part(value=calls[root].inputs[place])] for place, rank in enumerate(ranks)}
    if op == "all_to_all":
        return {
            rank: [_Part(value=calls[source].inputs[place]) for source in ranks] for place, rank in enumerate(ranks)
        }
    if op == "reduce_scatter":
        found = {rank: _reduced([calls[r].inputs[p] for r in ranks], first.reduce) for p, rank in enumerate(ranks)}
    else:
        whole = _reduced([calls[rank].inputs[0] for rank in ranks], first.reduce)
        found = {rank: whole for rank in (ranks if op == "all_reduce" else [root])}
    return None if None in found.values() else {rank: [part] for rank, part in found.items()}


def _reduced(parts: Sequence[Tensor], reduce: str) -> _Part | None:
    count, dtype = len(parts), parts[0].dtype
    floating = dtype.is_floating_point
    if reduce in _EXACT or not floating:
        tables = {
            "SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
            "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
        }  # fmt: skip
        if reduce not in tables:
            return None
        value = parts[0]
        for part in parts[1:]:
            value = tables[reduce](value, part)
        return _Part(value=value.to(dtype))
    if reduce not in ("SUM", "AVG"):
        return None
    if count == 1:
        return _Part(value=parts[0])
    total = _exact_sum(parts)
    u = unit_roundoff(dtype)
    reach = torch.stack([part.double().abs() for part in parts]).sum(0)
    # A mean multiplies before or after it adds: 1/n and the product are rounded once each.
    roundings = count - 1 + (2 if reduce == "AVG" else 0)
    size = total.abs() if roundings == 1 else reach
    bound = roundings * u / (1.0 - roundings * u) * size
    scale = count if reduce == "AVG" else 1
    # Of a mean every summand may have been rounded to a subnormal number.
    return _Part(value=total / scale, bound=bound / scale + scale * _half_subnormal(dtype), reach=reach)


def _half_subnormal(dtype: torch.dtype) -> float:
    """Half the spacing of subnormal numbers, or of float64, which has no half of it, the spacing."""
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps
    return smallest / 2 or smallest


def _exact_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in float64 with the error of every addition carried along (Neumaier)."""
    total = parts[0].double()
    rest = torch.zeros_like(total)
    for part in parts[1:]:
        x = part.double()
        new = total + x
        lost = torch.where(total.abs() >= x.abs(), (total - new) + x, (x - new) + total)
        rest, total = rest + lost, new
    # Infinities have no rest.
    return torch.where(torch.isfinite(total), total + rest, total)


# --- comparing -------------------------------------------------------------------------------------------------------


def _compare(meeting: _Meeting, expected: Mapping[int, Sequence[_Part]]) -> tuple[WrongCollective | None, float]:
    """The first rank, part and element that are wrong, and the largest share of a bound that was used."""
    used = 0.0
    for rank in meeting.ranks:
        if rank not in expected:
            continue
        outputs = meeting.calls[rank].outputs
        for place, (part, output) in enumerate(itertools.zip_longest(expected[rank], outputs)):
            number = place if len(expected[rank]) > 1 else None
            if part is None or output is None or output.numel() != part.value.numel():
                sizes = [0 if t is None else t.numel() for t in (output, part and part.value)]
                cause = f"{sizes[0]} elements came out where {sizes[1]} went in"
                return meeting.wrong(rank, part=number, cause=cause), used
            bad, share = _off(part, output)
            used = max(used, share)
            if bad.any():
                at = int(bad.reshape(-1).nonzero()[0])
                return _named(meeting, rank, number, at, part, output), used
    calls = [meeting.calls[rank] for rank in meeting.ranks]
    if calls[0].op == "all_reduce":
        for call in calls[1:]:
            differs = _bits(call.outputs[0]) != _bits(calls[0].outputs[0])
            if differs.any():
                at = int(differs.nonzero()[0]) // call.outputs[0].element_size()
                cause = f"rank {calls[0].rank} and this one hold different sums"
                wrong = _named(meeting, call.rank, None, at, _Part(value=calls[0].outputs[0]), call.outputs[0])
                return WrongCollective(**{**asdict(wrong), "cause": cause}), used
    return None, used


def _off(part: _Part, found: Tensor) -> tuple[Tensor, float]:
    """Which elements are wrong, and the largest share of a bound that the others used."""
    value = part.value.reshape(found.shape)
    if part.bound is None:
        if value.dtype != found.dtype:
            return value.double() != found.double(), 0.0
        different = (_bits(value) != _bits(found)).reshape(found.numel(), -1).any(-1)
        return different.reshape(found.shape), 0.0
    bound, reach = part.bound.reshape(found.shape), part.reach.reshape(found.shape)
    wide = found.double()
    error = (wide - value).abs()
    regular = torch.isfinite(value) & (reach <= torch.finfo(found.dtype).max)
    # NaN and infinities have to come through; what may overflow on its way may arrive as anything that is not finite.
    overflowed = torch.isfinite(value) & ~torch.isfinite(wide)
    through = torch.where(torch.isnan(value), torch.isnan(wide), (wide == value) | overflowed | (error <= bound))
    through &= torch.isfinite(value) | ~torch.isfinite(wide)
    flushed = (wide == 0) & (value.abs() < torch.finfo(found.dtype).tiny)
    good = torch.where(regular, (error <= bound) | flushed, through)
    judged = regular & (error <= bound)
    share = float((error[judged] / bound[judged]).max()) if judged.any() else 0.0
    return ~good, share


def _named(meeting: _Meeting, rank: int, number: int | None, at: int, part: _Part, found: Tensor) -> WrongCollective:
    expected, got = part.value.reshape(-1)[at].item(), found.reshape(-1)[at].item()
    allowed = float(part.bound.reshape(-1)[at]) if part.bound is not None else 0.0
    element = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), found.shape)) if found.ndim else (0,)
    return meeting.wrong(
        rank,
        part=number,
        element=element,
        expected=expected,
        found=got,
        error=abs(float(got) - float(expected)),
        bound=allowed,
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# --- what explains it ------------------------------------------------------------------------------------------------


def _inputs_of_all(meetings: Sequence[_Meeting]) -> Mapping[tuple[str, int], Mapping[int, Call]]:
    """All calls of one operation and index, of whatever group: where a collective of a wrong group finds its parts."""
    found: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    for meeting in meetings:
        for rank, call in meeting.calls.items():
            found[call.op, meeting.index].setdefault(rank, call)
    return found


def _explain(meeting: _Meeting, bad: WrongCollective, everything: Mapping, groups: Sequence[tuple[int, ...]]) -> str:
    """The cause that accounts for every element of the wrong output, the likeliest first."""
    call = meeting.calls[bad.rank]
    output = call.outputs[bad.part or 0]
    if call.reduce and output.dtype.is_floating_point:
        return _explain_sum(meeting, bad, everything, groups)
    return _explain_move(meeting, bad, everything)


def _explain_sum(
    meeting: _Meeting, bad: WrongCollective, everything: Mapping, groups: Sequence[tuple[int, ...]]
) -> str:
    calls, ranks, call = meeting.calls, meeting.ranks, meeting.calls[bad.rank]
    place = ranks.index(bad.rank) if call.op == "reduce_scatter" else 0
    output = call.outputs[0].reshape(-1)

    expected = _reduced([calls[rank].inputs[place].reshape(-1) for rank in ranks], call.reduce)
    wrong = _off(expected, output)[0]
    few = wrong.nonzero().reshape(-1)[:_LOOKED_AT]

    def fits(who: Sequence[int], source: Mapping[int, Call], reduce: str) -> bool:
        parts = [source[rank].inputs[place].reshape(-1) for rank in who]
        if any(part.shape != output.shape for part in parts):
            return False
        if bool(_off(_reduced([part[few] for part in parts], reduce), output[few])[0].any()):
            return False
        return not bool(_off(_reduced(parts, reduce), output)[0].any())

    other = {"SUM": "AVG", "AVG": "SUM"}.get(call.reduce)
    words = {"AVG": "a mean in place of a sum", "SUM": "a sum in place of a mean"}
    if other and fits(ranks, calls, other):
        return words[other]
    flipped = _one_flipped(wrong, expected.value, output)
    if flipped:
        return flipped
    for lower in LOWER:
        if unit_roundoff(lower) > unit_roundoff(output.dtype) and _carried_out_in(
            lower, expected, output, calls, place
        ):
            return f"reduced in {str(lower).removeprefix('torch.')}"
    for who in _subsets(ranks, [g for g in groups if set(g) < set(ranks)], [len(ranks) - 1, 1]):
        if fits(who, calls, call.reduce):
            lost = [rank for rank in ranks if rank not in who]
            if len(who) == 1 and call.op == "all_reduce" and _unreduced(calls):
                return "its own input: nothing was reduced"
            return f"the contribution of rank {', '.join(map(str, lost))} is lost"
    world = {rank: one for rank, one in everything[call.op, meeting.index].items() if len(one.inputs) > place}
    for who in _subsets(sorted(world), [g for g in groups if set(g) <= world.keys()], []):
        if len(who) > 1 and set(who) != set(ranks) and fits(who, world, call.reduce):
            return f"the ranks {', '.join(map(str, who))} were reduced: another group"
    return ""


_LOOKED_AT = 1024
"""Wrong elements on which a cause is tried before all of them are."""
_TRIED = 512
"""Subsets of ranks that are tried besides the likely ones: all of those of 9 ranks, of which there are 2⁹."""


def _subsets(
    ranks: Sequence[int], groups: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Those of the given sizes, the groups that were recorded, and the first of all others, large before small."""
    for size in dict.fromkeys(size for size in sizes if size > 0):
        yield from itertools.combinations(ranks, size)
    yield from groups
    others = (size for size in range(len(ranks) - 1, 0, -1) if size not in sizes)
    yield from itertools.islice(
        itertools.chain.from_iterable(itertools.combinations(ranks, size) for size in others), _TRIED
    )


def _unreduced(calls: Mapping[int, Call]) -> bool:
    """Whether every rank got back what it gave, and gave something else than the others."""
    kept = all(torch.equal(_bits(call.inputs[0]), _bits(call.outputs[0])) for call in calls.values())
    first, *others = [_bits(call.inputs[0]) for call in calls.values()]
    return kept and any(not torch.equal(first, other) for other in others)


def _carried_out_in(lower: torch.dtype, expected: _Part, output: Tensor, calls: Mapping[int, Call], place: int) -> bool:
    """Whether the output holds nothing that ``lower`` cannot, within what ``lower`` loses."""
    if not torch.equal(output.to(lower).to(output.dtype), output):
        return False
    parts = [call.inputs[place].reshape(-1).to(lower) for call in calls.values()]
    size = torch.stack([part.double().abs() for part in parts]).sum(0)
    # One rounding on the way in, one for every addition, one for a mean.
    bound = (len(parts) + 2) * (unit_roundoff(lower) * size + _half_subnormal(lower))
    return bool(((output.double() - expected.value).abs() <= bound).all())


def _explain_move(meeting: _Meeting, bad: WrongCollective, everything: Mapping) -> str:
    call = meeting.calls[bad.rank]
    output = call.outputs[bad.part or 0]
    parts = _expected(meeting)[bad.rank]
    expected = parts[bad.part or 0].value
    if expected.dtype == output.dtype:
        flipped = _one_flipped(_off(_Part(value=expected), output)[0], expected, output)
        if flipped:
            return flipped
    if len(call.outputs) > 1 and bad.part is not None:
        names = [_source(part, call.outputs) for part in (p.value for p in parts)]
        if None not in names and sorted(names) == list(range(len(names))):
            moved = [str(meeting.ranks[i]) for i, name in enumerate(names) if name != i]
            return f"the parts of ranks {', '.join(moved)} are in another order"
    here = _givers(meeting.calls, output)
    if here:
        return f"it holds what rank {here[0]} gave"
    if call.op == "recv":
        there = _givers(everything["send", meeting.index], output)
        return f"it holds what rank {there[0]} sent" if there else ""
    there = _givers(everything[call.op, meeting.index], output)
    return f"it holds what rank {there[0]} gave: another group" if there else ""


def _givers(calls: Mapping[int, Call], output: Tensor) -> list[int]:
    """The ranks that gave exactly this."""
    return [
        rank
        for rank, call in sorted(calls.items())
        for part in call.inputs
        if part.numel() == output.numel() and part.dtype == output.dtype and torch.equal(_bits(part), _bits(output))
    ]


def _source(part: Tensor, outputs: Sequence[Tensor]) -> int | None:
    """Where among ``outputs`` the bits of ``part`` went."""
    for place, output in enumerate(outputs):
        if output.numel() == part.numel() and output.dtype == part.dtype and torch.equal(_bits(output), _bits(part)):
            return place
    return None


def _one_flipped(wrong: Tensor, expected: Tensor, found: Tensor) -> str:
    """Which bit of the only wrong element is flipped, in words; empty where that does not explain it."""
    places = wrong.reshape(-1).nonzero()
    if len(places) != 1:
        return ""
    at = int(places[0])
    bit = _flipped_bit(expected.reshape(-1)[at].to(found.dtype), found.reshape(-1)[at])
    return "" if bit is None else f"bit {bit} of one element is flipped"


def _flipped_bit(expected: Tensor, found: Tensor) -> int | None:
    """The one bit by which two numbers differ; None where it is more than one."""
    if expected.dtype != found.dtype:
        return None
    width = 8 * found.element_size()
    kind = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    a, b = (int(x.reshape(1).view(kind)[0]) & ((1 << width) - 1) for x in (expected, found))
    different = a ^ b
    return int(math.log2(different)) if different and different & (different - 1) == 0 else None
