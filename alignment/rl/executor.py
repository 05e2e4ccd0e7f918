"""Executors: where the workers live. The trainer sees groups that answer ``call(stage, batch)`` and nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.batching import Partition, rank_shares, token_counts
from alignment.rl.observers import observed
from alignment.rl.worker import Dispatch, Worker, WorkerSetting, dispatch_of

ROLES = ("actor", "rollout", "reference", "reward", "critic")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which roles share a process, and how many data parallel ranks each such group has.

    ``colocated`` puts every role into one group, whose ranks time-slice the device between training and rollout;
    otherwise each role is a group of its own. ``balance`` shares rows out by length (``trainer.balance_batch``).
    """

    roles: tuple[str, ...]
    world_size: int = 1
    colocated: bool = True
    balance: bool = False

    def groups(self) -> list[tuple[str, ...]]:
        """The roles of each group, in the order of the pipeline."""
        return [self.roles] if self.colocated else [(role,) for role in self.roles]


class WorkerGroup(Protocol):
    """The data parallel ranks of one or more roles."""

    roles: tuple[str, ...]
    world_size: int

    def call(self, stage: str, batch: Batch | None = None, **arguments: Any) -> Any:
        """Runs method ``stage`` of the workers.

        A stage that splits gets equal consecutive parts of ``batch`` by rank and answers with one batch in the same
        order; any other is run by every rank, and the answers come as a list by rank.
        """
        ...

    def stream(self, produce: str, to: WorkerGroup, consume: str) -> None:
        """Streams the tensors that ``produce`` yields here into ``consume`` of every rank of ``to``."""
        ...


class Executor(Protocol):
    """Starts workers and ends them."""

    def start(self, setting: WorkerSetting, placement: Placement) -> Mapping[str, WorkerGroup]:
        """The group of every role; roles that share processes share the group object."""
        ...

    def shutdown(self) -> None:
        """Ends every worker this executor started."""
        ...


@dataclass
class LocalGroup:
    """One worker in this process."""

    worker: Worker
    roles: tuple[str, ...]
    world_size: int = field(default=1, init=False)

    def call(self, stage: str, batch: Batch | None = None, **arguments: Any) -> Any:
        """Runs the stage here. See :class:`WorkerGroup`."""
        method = getattr(self.worker, stage)
        run = partial(method, **arguments) if batch is None else partial(method, batch, **arguments)
        answer = observed(self.worker, stage, batch, run)
        return answer if dispatch_of(stage) is Dispatch.SPLIT else [answer]

    def stream(self, produce: str, to: WorkerGroup, consume: str) -> None:
        """From worker to worker, one tensor at a time. See :class:`WorkerGroup`."""
        stream = observed(self.worker, produce, None, getattr(self.worker, produce))
        observed(to.worker, consume, None, partial(getattr(to.worker, consume), stream))


class InProcessExecutor:
    """All roles in this process, one rank: what a machine without Ray runs, and the plain loop others are measured by.

    Args:
        worker_setup: ``module:function`` that is called once before the first worker is built; None for nothing.
    """

    def __init__(self, *, worker_setup: str | None = None) -> None:
        self._worker_setup = worker_setup
        self._workers: list[Worker] = []

    def start(self, setting: WorkerSetting, placement: Placement) -> Mapping[str, WorkerGroup]:
        """See :class:`Executor`.

        Raises:
            InputError: more than one rank.
        """
        if placement.world_size != 1:
            raise InputError(
                "this executor has one rank",
                where="executor inprocess",
                expected=1,
                found=placement.world_size,
                next_step="use executor=ray for data parallel runs",
            )
        run_setup(self._worker_setup)
        groups: dict[str, WorkerGroup] = {}
        for roles in placement.groups():
            worker = Worker(setting, roles=roles, rank=0, world_size=1, rendezvous=None)
            self._workers.append(worker)
            group = LocalGroup(worker, roles)
            groups.update(dict.fromkeys(roles, group))
        return groups

    def shutdown(self) -> None:
        """Closes the workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()


def shares(stage: str, batch: Batch, world_size: int, *, mini_batches: int = 1, balance: bool = False) -> Partition:
    """The rows of every rank: each mini batch (equal consecutive pieces) is shared out on its own.

    A rank holds its share of mini batch 0, then of mini batch 1, …, so an optimizer step sees the same samples for
    every number of ranks.

    Raises:
        InputError: the batch does not divide by the number of mini batches, or a mini batch by the number of ranks.
    """
    if len(batch) % (world_size * mini_batches):
        raise InputError(
            "the batch does not divide between the data parallel ranks",
            where=stage,
            expected=f"a multiple of {world_size} ranks × {mini_batches} mini batches",
            found=f"{len(batch)} samples",
        )
    lengths = token_counts(batch) if "attention_mask" in batch else [1] * len(batch)
    size = len(batch) // mini_batches
    rows: list[list[int]] = [[] for _ in range(world_size)]
    for start in range(0, len(batch), size):
        for rank, part in enumerate(rank_shares(lengths[start : start + size], world_size, balance=balance).parts):
            rows[rank] += [start + i for i in part]
    return Partition(parts=tuple(map(tuple, rows)))


def join(partition: Partition, answers: Sequence[Batch]) -> Batch:
    """The ranks' answers as one batch, in the order the rows had before they were shared out."""
    order = [row for part in partition.parts for row in part]
    return Batch.concat(list(answers))[sorted(range(len(order)), key=order.__getitem__)]


def run_setup(spec: str | None) -> None:
    """Calls the function that ``module:function`` names; None is nothing to do.

    Raises:
        InputError: the module or the function does not exist.
    """
    if spec is None:
        return
    module_name, _, name = spec.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"the worker setup cannot be loaded ({error})", where="worker_setup", expected="module:function", found=spec
        ) from None
    function()
