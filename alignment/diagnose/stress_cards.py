"""Runs the stress job on every card: processes of this machine, or every node of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial

from alignment.diagnose.stress import Card, Record, run_job
from alignment.errors import InputError, UnavailableError
from alignment.rl.executor import run_setup

Answers = tuple[list[Record], Mapping[Card, str]]
"""The records of the cards that answered, and why the others did not."""


def on_this_machine(
    kind: str,
    *,
    workers: int,
    rounds: int,
    minutes: float,
    worker_setup: str | None = None,
    progress: Callable[[Card], None] = lambda card: None,
) -> Answers:
    """One process per card, all at the same time; on a CPU every process stands for a card.

    Raises:
        InputError: less than one worker.
    """  # fmt: skip
    if workers < 1:
        raise InputError("there has to be a card", where="workers", expected=">= 1", found=workers)
    node = platform.node()
    cards = [Card(node=node, device=kind if kind == "cpu" else f"{kind}:{r}", rank=r) for r in range(workers)]
    records, lost = [], {}
    context = multiprocessing.get_context("spawn")
    # One pool per card: a process that dies breaks its pool, and only its own card is lost.
    pools = [ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(worker_setup,)) for _ in cards]
    try:
        started: list[tuple[Card, Future]] = [
            (card, pool.submit(run_job, card, rounds=rounds, minutes=minutes)) for card, pool in zip(cards, pools)
        ]
        for card, future in started:
            try:
                records.append(future.result())
                progress(card)
            except Exception as error:  # whatever happens in a worker belongs to its card
                lost[card] = _one_line(error)
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
    return records, lost


def on_a_cluster(
    kind: str,
    *,
    address: str | None,
    per_node: int | None,
    rounds: int,
    minutes: float,
    worker_setup: str | None = None,
) -> Answers:
    """Every card of every node of a Ray cluster.

    Raises:
        UnavailableError: Ray is not installed, or no node has such a card.
    """
    from alignment.rl.ray_executor import call_on_every_card

    answers = call_on_every_card(
        partial(_job, rounds=rounds, minutes=minutes),
        kind=kind,
        per_node=per_node,
        address=address,
        worker_setup=worker_setup,
    )
    records, lost = [], {}
    for node, device, rank, answer in answers:
        if isinstance(answer, Record):
            records.append(answer)
        else:
            lost[Card(node=node, device=device, rank=rank)] = _one_line(answer)
    return records, lost


def cards_here(kind: str, workers: int | None) -> int:
    """How many cards of ``kind`` this machine has; a CPU has as many as are asked for, two by default.

    Raises:
        UnavailableError: it has none, or fewer than asked for.
    """
    from alignment.devices.base import availability

    if kind == "cpu":
        return workers or 2
    there = availability(kind)
    if not there.available:
        raise UnavailableError(there.reason, where=f"stress on {kind}")
    if workers and workers > there.count:
        raise UnavailableError(
            "there are fewer cards", where="workers", expected=f"at most {there.count}", found=workers
        )
    return workers or there.count


def _begin(worker_setup: str | None) -> None:
    import torch

    # One thread: the order of a CPU's sums is then the same in every process.
    torch.set_num_threads(1)
    if os.environ.get("ALIGNMENT_EMULATE_NPU"):
        from alignment.devices import emulated_npu

        emulated_npu.install()
    run_setup(worker_setup)


def _job(node: str, device: str, rank: int, *, rounds: int, minutes: float) -> Record:
    _begin(None)
    return run_job(Card(node=node, device=device, rank=rank), rounds=rounds, minutes=minutes)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
