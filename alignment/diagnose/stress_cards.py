"""Runs the stress job on every card: processes of this machine, or every node of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait

from alignment.diagnose.stress import Card, Record, run_job
from alignment.errors import InputError, UnavailableError
from alignment.rl.executor import run_setup

Answers = tuple[list[Record], Mapping[Card, str]]
"""The records of the cards that answered, and why the others did not."""


_GRACE_SECONDS = 5.0


def patience(minutes: float) -> float:
    """Seconds after which a card counts as hung: ten minutes to start and finish a round, beside what was asked for."""
    return 600.0 + 60.0 * minutes


def on_this_machine(
    kind: str,
    *,
    workers: int,
    rounds: int,
    minutes: float,
    only: int | None = None,
    timeout: float | None = None,
    worker_setup: str | None = None,
    progress: Callable[[Card], None] = lambda card: None,
) -> Answers:
    """One process per card, all at the same time; on a CPU every process stands for a card.

    Args:
        only: the index of the one card to run on, instead of the first ``workers``.
        timeout: seconds after which a card that has not answered is lost and its process killed; :func:`patience` by
            default.

    Raises:
        InputError: less than one worker, or no time to answer in.
    """
    if workers < 1:
        raise InputError("there has to be a card", where="workers", expected=">= 1", found=workers)
    timeout = _checked(timeout, minutes)
    node = platform.node()
    indices = range(workers) if only is None else (only,)
    cards = [
        Card(node=node, device=kind if kind == "cpu" else f"{kind}:{index}", rank=rank)
        for rank, index in enumerate(indices)
    ]
    records, lost = {}, {}
    context = multiprocessing.get_context("spawn")
    waiting: dict[Connection, Card] = {}
    processes = {}
    try:
        for card in cards:
            receiver, sender = context.Pipe(duplex=False)
            processes[card] = context.Process(
                target=_answer, args=(sender, card, rounds, minutes, worker_setup), daemon=True
            )
            processes[card].start()
            sender.close()
            waiting[receiver] = card
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for receiver in ready:
                card = waiting.pop(receiver)
                try:
                    answer = receiver.recv()
                except EOFError:
                    processes[card].join(_GRACE_SECONDS)
                    answer = f"its process died (exit code {processes[card].exitcode})"
                if isinstance(answer, Record):
                    records[card] = answer
                    progress(card)
                else:
                    lost[card] = f"no answer: {answer}"
        for card in waiting.values():
            lost[card] = f"no answer within {timeout:g} s"
    finally:
        for process in processes.values():
            _end(process)
    return [records[card] for card in cards if card in records], lost


def on_a_cluster(
    kind: str,
    *,
    address: str | None,
    per_node: int | None,
    rounds: int,
    minutes: float,
    timeout: float | None = None,
    worker_setup: str | None = None,
) -> Answers:
    """Every card of every node of a Ray cluster; ``timeout`` as in :func:`on_this_machine`.

    Raises:
        InputError: no time to answer in.
        UnavailableError: Ray is not installed, or no node has such a card.
    """
    from alignment.rl.ray_executor import call_on_every_card

    timeout = _checked(timeout, minutes)
    answers = call_on_every_card(
        partial(_job, rounds=rounds, minutes=minutes),
        kind=kind,
        per_node=per_node,
        address=address,
        worker_setup=worker_setup,
        timeout=timeout,
    )
    records, lost = [], {}
    for node, device, rank, answer in answers:
        if isinstance(answer, Record):
            records.append(answer)
        else:
            late = isinstance(answer, TimeoutError)
            why = f"no answer within {timeout:g} s" if late else f"no answer: {_one_line(answer)}"
            lost[Card(node=node, device=device, rank=rank)] = why
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


def _checked(timeout: float | None, minutes: float) -> float:
    if timeout is None:
        return patience(minutes)
    if not timeout > 60 * minutes:
        raise InputError(
            "a card needs longer than that",
            where="timeout",
            expected=f"more than the {60 * minutes:g} s it keeps repeating the job",
            found=f"{timeout:g} s",
        )
    return timeout


def _answer(sender: Connection, card: Card, rounds: int, minutes: float, worker_setup: str | None) -> None:
    """The process of one card: a record, or one line on why there is none."""
    try:
        _begin(worker_setup)
        answer: Record | str = run_job(card, rounds=rounds, minutes=minutes)
    except Exception as error:  # whatever happens in a worker belongs to its card
        answer = _one_line(error)
    sender.send(answer)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Kills a process that is still there; one that even then does not end is stuck in its driver and left to it."""
    if process.is_alive():
        process.kill()
    process.join(_GRACE_SECONDS)


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
