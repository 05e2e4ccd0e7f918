"""The same deterministic job on every card, compared in its bits: which card computes differently, in which operation.

Cards of one kind that run one binary on equal inputs have to give equal bits, once the kernels that add in the order in
which blocks finish (split-k, atomics) are switched off, which every card does and verifies. So nothing is compared with
a tolerance or a reference: the digests of a card are compared with those of the other cards (between cards) and with its
own earlier ones (over time). The card in the minority is the odd one; the first operation whose digest differs is named.

A fault that flips a bit of an output element with probability p is missed by a run of N elements with probability
(1 − p)^N: the default run makes about 50 million elements on every card, so at p = 10⁻⁶ that is e⁻⁵⁰.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alignment.devices.base import Device, get_device
from alignment.devices.determinism import deterministic
from alignment.errors import InputError
from alignment.numerics.random import portable_uniform
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

SEED = 20_240_601
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PATTERNS = (0x00000000, 0x55555555, -0x55555556, -1)
"""Words written and read back: zeros, alternating bits, their complement, ones."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing a card computes. ``shapes`` are of its inputs, uniform on [−½, ½) and equal on every card."""

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    compute: Callable[..., Tensor]

    @property
    def title(self) -> str:
        sizes = ", ".join("×".join(map(str, shape)) for shape in self.shapes)
        return f"{self.name} {self.dtype} [{sizes}]"


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return torch.softmax(scores.float(), dim=-1).to(value.dtype) @ value


def _rms_norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _pattern(word: int) -> Callable[[Tensor], Tensor]:
    def write_and_read(memory: Tensor) -> Tensor:
        return torch.full_like(memory, word, dtype=torch.int32).clone()

    return write_and_read


def _gemm(dtype: str, m: int, n: int, k: int) -> Operation:
    return Operation(name="matmul", dtype=dtype, shapes=((m, k), (k, n)), compute=torch.matmul)


OPERATIONS: tuple[Operation, ...] = (
    *(_gemm(dtype, *sizes) for dtype in _FLOATS for sizes in ((512, 512, 512), (2048, 256, 64))),
    Operation(name="batched matmul", dtype="float32", shapes=((16, 128, 64), (16, 64, 128)), compute=torch.matmul),
    *(
        Operation(name="attention", dtype=dtype, shapes=((8, 256, 64),) * 3, compute=_attention)
        for dtype in ("float32", "bfloat16")
    ),
    Operation(name="softmax", dtype="float32", shapes=((1024, 4096),), compute=lambda x: torch.softmax(x, dim=-1)),
    Operation(name="sum of rows", dtype="float32", shapes=((4096, 1024),), compute=lambda x: x.sum(-1)),
    Operation(name="sum of columns", dtype="bfloat16", shapes=((4096, 1024),), compute=lambda x: x.sum(0)),
    Operation(name="RMS norm", dtype="bfloat16", shapes=((4096, 1024),), compute=_rms_norm),
    Operation(name="exponential", dtype="float32", shapes=((4_194_304,),), compute=torch.exp),
    Operation(name="add", dtype="bfloat16", shapes=((2048, 1024),) * 2, compute=torch.add),
    *(
        Operation(
            name=f"memory {word & 0xFFFFFFFF:08x}", dtype="float32", shapes=((2048, 1024),), compute=_pattern(word)
        )
        for word in _PATTERNS
    ),
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card of one node; on a CPU, one process."""

    node: str
    device: str
    rank: int

    def __str__(self) -> str:
        return f"{self.node} {self.device} (worker {self.rank})"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one card computed: ``digests`` by round and operation, in the order of ``OPERATIONS``; ``chip`` as it
    names itself; ``elements`` of output in all; ``switches`` of determinism that count on it, as they were verified."""

    card: Card
    chip: str
    digests: tuple[tuple[str, ...], ...]
    elements: int
    seconds: float
    switches: tuple[tuple[str, str], ...] = ()


def observe(card: Card, operation: Operation, inputs: Sequence[Tensor]) -> Tensor:
    """The output of ``operation`` on ``card``, where it was computed. The seam a fault of a card wraps."""
    return operation.compute(*inputs)


def run_job(
    card: Card, *, rounds: int = 2, minutes: float = 0.0, operations: Sequence[Operation] = OPERATIONS, seed: int = SEED
) -> Record:
    """The whole job on one card, ``rounds`` times, or as often as ``minutes`` allow if that is more.

    Rounds are counted the same way on every card only where ``minutes`` is 0; comparison takes the rounds all have.

    Raises:
        InputError: no rounds, a device that is not there, or a switch of determinism that cannot be set any more.
    """
    if rounds < 1:
        raise InputError("the job has to run at least once", where="rounds", expected=">= 1", found=rounds)
    device = get_device(card.device)
    started, digests, elements = time.monotonic(), [], 0
    # A card computes alone, whatever job its node belongs to.
    with deterministic(seed, device, world_size=1) as report:
        while len(digests) < rounds or time.monotonic() - started < 60 * minutes:
            of_round = []
            for operation in operations:
                output = observe(card, operation, _inputs(operation, device, seed))
                device.synchronize()
                of_round.append(digest(output))
                elements += output.numel()
            digests.append(tuple(of_round))
    return Record(
        card=card,
        chip=str(device.fingerprint().chip),
        digests=tuple(digests),
        elements=elements,
        seconds=time.monotonic() - started,
        switches=tuple((s.switch.name, str(s.verified)) for s in report.states if s.switch.applies),
    )


def digest(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes, shape and dtype: equal where every bit is, NaN payloads included."""
    host = tensor.detach().cpu().contiguous()
    head = f"{host.dtype} {tuple(host.shape)} ".encode()
    return hashlib.sha256(head + memoryview(host.view(torch.uint8).numpy()).tobytes()).hexdigest()


def _inputs(operation: Operation, device: Device, seed: int) -> list[Tensor]:
    made = []
    for index, shape in enumerate(operation.shapes):
        # A block drawn once and repeated: drawing is slower than everything that is tested.
        block = portable_uniform(min(math.prod(shape), 65_536), seed=seed, stream=f"stress/{operation.name}/{index}")
        whole = (block - 0.5).repeat(math.ceil(math.prod(shape) / len(block)))[: math.prod(shape)]
        made.append(whole.reshape(shape).to(_FLOATS[operation.dtype]).to(device.torch_device))
    return made


def judge(
    records: Sequence[Record],
    *,
    lost: Mapping[Card, str] | None = None,
    operations: Sequence[Operation] = OPERATIONS,
) -> list[Verdict]:
    """One verdict per card, the odd ones first.

    A card fails where it differs from its own first round, or from the majority of the cards of its chip in the first
    operation that any two of them see differently. Where no majority exists (two cards that disagree, each with itself
    consistent), both are inconclusive. A lone card is compared over time only, and the reason says so. A card of
    ``lost`` gave no answer, which is an error.

    Raises:
        InputError: there is no record, or two are of different jobs.
    """
    if not records and not lost:
        raise InputError("no card answered", where="stress", expected="at least one record")
    if len({len(r) for record in records for r in record.digests} | {len(operations)}) > 1:
        raise InputError(
            "the cards did not run the same job", where="stress", next_step="run one version of alignment everywhere"
        )
    verdicts = [
        _verdict(card, Outcome.ERROR, reason, next_command="look at the log of its node")
        for card, reason in (lost or {}).items()
    ]
    for record in records:
        peers = [other for other in records if other.chip == record.chip]
        verdicts.append(_judge_one(record, peers, operations))
    order = {Outcome.FAIL: 0, Outcome.ERROR: 1, Outcome.INCONCLUSIVE: 2, Outcome.PASS: 3}
    return sorted(verdicts, key=lambda verdict: order[verdict.outcome])


def _judge_one(record: Record, peers: Sequence[Record], operations: Sequence[Operation]) -> Verdict:
    over_time = [
        (number, place)
        for number, digests in enumerate(record.digests)
        for place, found in enumerate(digests)
        if found != record.digests[0][place]
    ]
    between: list[tuple[int, int]] = []
    undecided: list[tuple[int, int]] = []
    for number in range(min(len(peer.digests) for peer in peers)):
        for place in range(len(operations)):
            votes = Counter(peer.digests[number][place] for peer in peers)
            (most, count), *rest = votes.most_common()
            if not rest:
                continue
            if count * 2 > len(peers):
                if record.digests[number][place] != most:
                    between.append((number, place))
            else:
                undecided.append((number, place))
    wrong = sorted(set(over_time + between))
    measures = (
        Measure(name="operations that differ over time", value=float(len(over_time)), bound=0.0, origin="exactness"),
        Measure(
            name="operations that differ from the majority", value=float(len(between)), bound=0.0, origin="exactness"
        ),
        Measure(name="output elements", value=float(record.elements)),
    )
    where = None
    if wrong:
        number, place = wrong[0]
        outcome = Outcome.FAIL
        how = " and ".join(
            text
            for text, found in (("from its own first round", over_time), ("from the other cards", between))
            if found
        )
        reason = f"{len(wrong)} results differ {how}; first in round {number + 1}: {operations[place].title}"
        where = Divergence(
            stage="stress", module=str(record.card), quantity=operations[place].title, detail=f"round {number + 1}"
        )
    elif undecided and not _explained(peers, undecided, record):
        number, place = undecided[0]
        outcome = Outcome.INCONCLUSIVE
        reason = f"the cards disagree without a majority, first in round {number + 1}: {operations[place].title}"
    else:
        outcome = Outcome.PASS
        alone = len(peers) == 1
        reason = (
            "equal over time; no other card of its chip to compare with"
            if alone
            else f"equal to {len(peers) - 1} others"
        )
    return _verdict(
        record.card,
        outcome,
        reason,
        measures=measures,
        where=where,
        next_command="take the card out, and run alignment stress --minutes 30 on its node" if wrong else None,
    )


def _verdict(card: Card, outcome: Outcome, reason: str, **more: Any) -> Verdict:
    return Verdict(
        check=f"stress/{card.node}/{card.device}/{card.rank}",
        layer="unit",
        stage="stress",
        subject="torch",
        device=card.device.partition(":")[0],
        outcome=outcome,
        reason=reason,
        **more,
    )


def _explained(peers: Sequence[Record], undecided: Sequence[tuple[int, int]], record: Record) -> bool:
    """Whether the cards that disagree with ``record`` disagree with themselves, which says whose fault it is."""

    def steady(other: Record, place: int) -> bool:
        return all(digests[place] == other.digests[0][place] for digests in other.digests)

    return all(
        steady(record, place)
        and not any(
            steady(other, place) and other.digests[number][place] != record.digests[number][place] for other in peers
        )
        for number, place in undecided
    )


def summary(records: Sequence[Record]) -> Mapping[str, float]:
    """Cards, rounds that all have, elements per card at least, and the slowest card's seconds."""
    return {
        "cards": len(records),
        "rounds": min(len(record.digests) for record in records),
        "elements": min(record.elements for record in records),
        "seconds": max(record.seconds for record in records),
    }
