"""Workers as Ray actors. The only file that imports ray."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from alignment.errors import InputError, UnavailableError
from alignment.rl.batch import Batch
from alignment.rl.executor import Placement, WorkerGroup, join, run_setup, shares
from alignment.rl.forwarded import EVERY_CARD, forwarded, without_secrets
from alignment.rl.observers import observed
from alignment.rl.worker import Dispatch, Worker, WorkerSetting, dispatch_of

BUCKET_BYTES = 64 << 20
OBJECT_STORE_BYTES = 256 << 20
_GRACE_SECONDS = 5.0
_CLOSING_SECONDS = 60.0


class Rank:
    """One actor process: builds its worker and runs what the group asks for."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def rendezvous(self) -> str:
        """An address on this node where rank 0 can listen."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def build(
        self,
        setting: WorkerSetting,
        roles: tuple[str, ...],
        rank: int,
        world_size: int,
        rendezvous: str | None,
        worker_setup: str | None,
        withheld: Mapping[str, str],
    ) -> None:
        """Brings up the worker of this process; ``withheld`` is what Ray was not told of its environment."""
        os.environ.update(withheld)
        if os.environ.get("ALIGNMENT_EMULATE_NPU"):
            from alignment.devices.emulated_npu import install_if_requested

            install_if_requested()
        run_setup(worker_setup)
        self._worker = Worker(setting, roles=roles, rank=rank, world_size=world_size, rendezvous=rendezvous)

    def run(self, stage: str, batch: Batch | None, arguments: Mapping[str, Any]) -> Any:
        """Runs one stage."""
        method = getattr(self._worker, stage)
        run = partial(method, **arguments) if batch is None else partial(method, batch, **arguments)
        return observed(self._worker, stage, batch, run)

    def pipe(self, produce: str, consume: str) -> None:
        """Streams from one stage of this worker into another, without a copy."""
        stream = observed(self._worker, produce, None, getattr(self._worker, produce))
        observed(self._worker, consume, None, partial(getattr(self._worker, consume), stream))

    def produce(self, stage: str, keep: bool) -> list:
        """Puts the tensors that ``stage`` yields into the object store, in buckets, and answers with references.

        Without ``keep`` the stream is only run through: where several ranks hold one model, all of them take part in
        gathering it, and one of them passes it on.
        """
        import ray

        references, bucket, size = [], [], 0
        for name, tensor in getattr(self._worker, stage)():
            if not keep:
                continue
            bucket.append((name, tensor.detach().cpu()))
            size += tensor.numel() * tensor.element_size()
            if size >= BUCKET_BYTES:
                references.append(ray.put(bucket))
                bucket, size = [], 0
        if bucket:
            references.append(ray.put(bucket))
        return references

    def consume(self, stage: str, references: Sequence[Any]) -> None:
        """Feeds ``stage`` from the buckets, one at a time."""
        import ray

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for reference in references:
                yield from ray.get(reference)

        getattr(self._worker, stage)(stream())

    def close(self) -> None:
        """Closes the worker."""
        if self._worker is not None:
            self._worker.close()


class RayGroup:
    """The actors of one placement group of roles, by rank. See :class:`~alignment.rl.executor.WorkerGroup`."""

    def __init__(self, actors: Sequence[Any], roles: tuple[str, ...], *, balance: bool = False) -> None:
        self.actors, self.roles, self.world_size, self.balance = list(actors), roles, len(actors), balance

    def call(self, stage: str, batch: Batch | None = None, **arguments: Any) -> Any:
        """Runs the stage on every rank; see :class:`~alignment.rl.executor.WorkerGroup`."""
        dispatch = dispatch_of(stage)
        if batch is None or dispatch is Dispatch.EVERY:
            return self.gather(stage, [a.run.remote(stage, batch, arguments) for a in self.actors])
        mini_batches = arguments.get("mini_batches", 1)
        partition = shares(stage, batch, self.world_size, mini_batches=mini_batches, balance=self.balance)
        answers = self.gather(
            stage, [a.run.remote(stage, batch[list(rows)], arguments) for a, rows in zip(self.actors, partition.parts)]
        )
        return join(partition, answers) if dispatch is Dispatch.SPLIT else answers

    def stream(self, produce: str, to: WorkerGroup, consume: str) -> None:
        """Streams tensors from ``produce`` here into ``consume`` of every rank of ``to``."""
        if to is self:
            self.gather(produce, [a.pipe.remote(produce, consume) for a in self.actors])
            return
        references, *_ = self.gather(
            produce, [a.produce.remote(produce, rank == 0) for rank, a in enumerate(self.actors)]
        )
        to.gather(consume, [a.consume.remote(consume, references) for a in to.actors])

    def gather(self, stage: str, references: Sequence[Any]) -> list[Any]:
        """The answers by rank; the first failure ends the wait, so that no rank is waited for that can never answer."""
        import ray

        pending, results = {ref: rank for rank, ref in enumerate(references)}, [None] * len(references)
        while pending:
            [ready], _ = ray.wait(list(pending), num_returns=1)
            rank = pending.pop(ready)
            try:
                results[rank] = ray.get(ready)
            except ray.exceptions.RayError as error:
                self._raise(stage, {rank: error, **self._other_failures(pending)})
        return results

    def _other_failures(self, pending: Mapping[Any, int]) -> dict[int, Exception]:
        """Failures of the other ranks within a grace period: who lost its peer often reports before the dead one."""
        import ray

        failures = {}
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_GRACE_SECONDS) if pending else ([], [])
        for reference in ready:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                failures[pending[reference]] = error
        return failures

    def _raise(self, stage: str, failures: Mapping[int, Exception]) -> None:
        import ray

        for rank, error in failures.items():
            if isinstance(error, ray.exceptions.RayActorError):
                raise InputError(
                    "a worker process died",
                    where=f"{stage} · {', '.join(self.roles)} · rank {rank}",
                    expected="an answer",
                    found=str(error).strip().splitlines()[0],
                    next_step="continue from the last checkpoint with trainer.resume_mode=auto",
                ) from None
        causes = [getattr(error, "cause", None) or error for error in failures.values()]
        # A clear refusal on one rank outweighs the broken connection it leaves on the others.
        cause = next((c for c in causes if isinstance(c, InputError)), causes[0])
        raise cause from (None if isinstance(cause, InputError) else next(iter(failures.values())))


class RayExecutor:
    """Starts every rank as a Ray actor, on a local cluster of its own unless one is already connected.

    Args:
        worker_setup: ``module:function`` that every worker process calls before anything else; None for nothing.
        address: of a running cluster; None starts a local one (or uses the one this process is connected to).
        debug: show the output of the workers.
    """

    def __init__(self, *, worker_setup: str | None = None, address: str | None = None, debug: bool = False) -> None:
        self._worker_setup, self._address, self._debug = worker_setup, address, debug
        self._actors: list[Any] = []
        self._connected = self._watched = False
        self._withheld: Mapping[str, str] = {}

    def start(self, setting: WorkerSetting, placement: Placement) -> Mapping[str, WorkerGroup]:
        """See :class:`~alignment.rl.executor.Executor`. Workers of all groups are brought up at the same time.

        Raises:
            UnavailableError: Ray is not installed.
            InputError: a worker cannot be brought up.
        """
        self._connected = connect(address=self._address, debug=self._debug) or self._connected
        import ray

        self._watched = bool(setting.observers)
        environment, self._withheld = without_secrets(worker_environment(placement))
        remote = ray.remote(Rank).options(
            num_cpus=0,
            max_restarts=0,
            # Ranks of a cluster of several nodes belong on all of them: they reserve nothing that would part them.
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        )
        building = [self._begin(remote, roles, setting, placement) for roles in placement.groups()]
        for group, references in building:
            group.gather("start", references)
        return {role: group for group, _ in building for role in group.roles}

    def _begin(
        self, remote, roles: tuple[str, ...], setting: WorkerSetting, placement: Placement
    ) -> tuple[RayGroup, list]:
        """Starts the processes of one group; the references tell when they are up."""
        size = placement.world_size
        group = RayGroup([remote.remote() for _ in range(size)], roles, balance=placement.balance)
        self._actors += group.actors
        rendezvous = None
        if size > 1:
            [rendezvous] = group.gather("start", [group.actors[0].rendezvous.remote()])
        return group, [
            actor.build.remote(setting, roles, rank, size, rendezvous, self._worker_setup, self._withheld)
            for rank, actor in enumerate(group.actors)
        ]

    def pids(self) -> list[int]:
        """Process ids of the workers, in the order they were started."""
        import ray

        return ray.get([actor.pid.remote() for actor in self._actors])

    def shutdown(self) -> None:
        """Ends the workers, and the cluster where this executor started it."""
        if not self._actors and not self._connected:
            return
        import ray

        if self._watched and self._actors:
            # Observers may still be writing; a rank that can no longer answer holds nobody up for long.
            ray.wait([a.close.remote() for a in self._actors], num_returns=len(self._actors), timeout=_CLOSING_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        if self._connected:
            ray.shutdown()
            self._connected = False


def connect(*, address: str | None = None, debug: bool = False) -> bool:
    """Joins the cluster at ``address`` or ``RAY_ADDRESS``, or starts a quiet local one; does nothing where this process
    is connected.

    Returns:
        Whether this call connected, so that the caller is the one to disconnect.

    Raises:
        UnavailableError: Ray is not installed, or no cluster answers at the address.
        InputError: the cluster asks for a token that it was not shown.
    """
    # Both are read when ray is imported or started: no call home, and actors that reserve no device still see them all.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UnavailableError(
            f"Ray cannot be loaded ({error})",
            where="executor ray",
            next_step="pip install ray, or use executor=inprocess",
        ) from None
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or None
    try:
        ray.init(
            # Without "local" Ray would join whatever cluster was started last here, somebody else's included.
            address=address or "local",
            include_dashboard=False,
            log_to_driver=debug,
            logging_level=logging.INFO if debug else logging.ERROR,
            # Ray starts an idle process per core it counts, and the workers here reserve none.
            **({} if address else {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}),
        )
    except (ConnectionError, getattr(ray.exceptions, "AuthenticationError", ConnectionError)) as error:
        if not address:
            raise
        raise _refused(address, error) from None
    return True


def _refused(address: str, error: BaseException) -> InputError | UnavailableError:
    """What it means that a cluster could not be joined."""
    said = f"{type(error).__name__}: {error} {error.__cause__ or error.__context__ or ''}"
    where = f"Ray cluster {address}"
    if "AuthenticationError" not in said:
        return UnavailableError(
            f"it does not answer ({error})", where=where, next_step="start it, or name another in RAY_ADDRESS"
        )
    mode = os.environ.get("RAY_AUTH_MODE", "")
    token = mode.lower() == "token"
    return InputError(
        "the cluster asks for a token",
        where=where,
        expected="its token" if token else "RAY_AUTH_MODE=token",
        found="another one, or none" if token else mode or "RAY_AUTH_MODE is not set",
        next_step="set RAY_AUTH_MODE=token; the token is read from RAY_AUTH_TOKEN, from the file RAY_AUTH_TOKEN_PATH "
        "or from ~/.ray/auth_token",
    )


def worker_environment(placement: Placement) -> dict[str, str]:
    """The variables every worker gets: what decides how it computes, and its share of the cores.

    Ranks of one group work at the same time, groups one after the other; so colocated and separate workers get alike.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // placement.world_size)),
        **EVERY_CARD,
        **forwarded(),
    }


def call_on_every_card(
    function: Callable[[str, str, int], Any],
    *,
    kind: str,
    per_node: int | None = None,
    address: str | None = None,
    worker_setup: str | None = None,
    timeout: float | None = None,
) -> list[tuple[str, str, int, Any]]:
    """``function(node, device, rank)`` once per card of every node of the cluster, all at the same time.

    Args:
        kind: of device. The cards of a node are those Ray counts there (its ``GPU`` or ``NPU`` resource).
        per_node: cards of a node instead; a CPU has to be given a number.
        address: of the cluster; a local one is started otherwise.
        worker_setup: ``module:function`` called in every worker first.
        timeout: seconds for all of them; who has not answered by then is killed. None waits for ever.

    Returns:
        Node, device, rank over the whole cluster, and what the call returned or the exception that it raised (a lost
        node included; ``TimeoutError`` where there was no answer in time).

    Raises:
        UnavailableError: Ray is not installed, or the cluster has no such card.
    """
    connected = connect(address=address)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        cards = []
        for node in sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeID"]):
            here = per_node or int(node["Resources"].get({"cuda": "GPU", "npu": "NPU"}.get(kind, ""), 0))
            name = f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
            cards += [(node["NodeID"], name, kind if kind == "cpu" else f"{kind}:{index}") for index in range(here)]
        if not cards:
            raise UnavailableError(
                f"no node of the cluster has a {kind}", where="Ray", next_step="start Ray with its cards as resources"
            )

        def call(node: str, device: str, rank: int, withheld: Mapping[str, str]) -> Any:
            os.environ.update(withheld)
            run_setup(worker_setup)
            return function(node, device, rank)

        environment, withheld = without_secrets(worker_environment(Placement(roles=(), world_size=len(cards))))
        references = []
        for rank, (node_id, name, device) in enumerate(cards):
            task = ray.remote(call).options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": environment},
                # A card that dies is an answer; running its job elsewhere would hide it.
                max_retries=0,
            )
            references.append((name, device, rank, task.remote(name, device, rank, withheld)))
        deadline = None if timeout is None else time.monotonic() + timeout
        return [(name, device, rank, _answer(reference, deadline)) for name, device, rank, reference in references]
    finally:
        if connected:
            ray.shutdown()


def _answer(reference: Any, deadline: float | None) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reference, force=True)
        return TimeoutError("no answer in time")
    except Exception as error:  # whatever a worker raises belongs to its card
        return error
