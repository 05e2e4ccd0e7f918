"""Phases on the nodes of a Ray cluster. The only file of this room that imports ray.

Whoever is connected to a cluster dies with it, so the driver of a night never is: it starts this module as a process of
its own, reads what that wrote, and asks the nodes themselves, by their ports, whether they are still there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.report.night_process import Ended, adopting, clear_up, run_command

TOKEN = ".store"
"""Written into the night by the head and read by every node: a node that reads another folder has no shared store."""

LOST = "the node was lost"
_CONNECT_SECONDS = 1.0
_MISSES = 3


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster: ``name`` for people and for the next night, ``identity`` what Ray calls it today."""

    name: str
    identity: str
    host: str
    port: int
    resources: Mapping[str, float]

    def cards(self, device: str) -> int | None:
        """How many devices Ray counts there; None for CPUs, of which every node has some."""
        return None if device == "cpu" else int(self.resources.get({"cuda": "GPU", "npu": "NPU"}[device], 0))


class Watch:
    """Which of ``nodes`` are gone, found out by connecting to their raylets."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self._misses: Counter[str] = Counter()
        self._lost: dict[str, Node] = {}

    def lost(self) -> list[Node]:
        """Those that are gone by now, in the order in which that was noticed.

        A refused connection is a node whose raylet ended; no answer at all has to happen three times in a row.
        """
        for node in self.nodes:
            if node.identity in self._lost:
                continue
            answer = _answers(node)
            if answer is True:
                self._misses[node.identity] = 0
                continue
            self._misses[node.identity] += 1
            if answer is False or self._misses[node.identity] >= _MISSES:
                self._lost[node.identity] = node
        return list(self._lost.values())


def _answers(node: Node) -> bool | None:
    """True, False (refused) or None (no answer in time)."""
    try:
        with socket.create_connection((node.host, node.port), timeout=_CONNECT_SECONDS):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


def read_nodes(path: Path) -> list[Node]:
    """What :func:`census` wrote.

    Raises:
        InputError: it did not.
    """
    return [Node(**entry) for entry in read_json(path)]


def begin_store(night: Path) -> str:
    """Writes what the nodes have to find in the shared store."""
    token = secrets.token_hex(8)
    write_json(night / TOKEN, token)
    return token


def census(address: str, target: Path) -> None:
    """Writes the living nodes of the cluster."""
    with _connected(address) as ray:
        alive = sorted(
            (n for n in ray.nodes() if n["Alive"]),
            key=lambda n: (n["NodeManagerHostname"], n["NodeManagerAddress"], n["NodeManagerPort"]),
        )
    several = Counter(n["NodeManagerHostname"] for n in alive)
    count: Counter[str] = Counter()
    nodes = []
    for node in alive:
        host = node["NodeManagerHostname"]
        count[host] += 1
        # Names have to be those of the next night, so Ray's own identifiers are no part of them.
        name = host if several[host] == 1 else f"{host}.{count[host]}"
        nodes.append(
            Node(
                name=name, identity=node["NodeID"], host=node["NodeManagerAddress"], port=node["NodeManagerPort"],
                resources={k: float(v) for k, v in node["Resources"].items()},
            )
        )  # fmt: skip
    write_json(target, [asdict(node) for node in nodes])


def run_on_nodes(plan: Mapping[str, Any], target: Path) -> None:
    """Runs the command of ``plan`` on each of its nodes at the same time.

    Writes ``{node: {code, seconds, cut}}`` after every answer; who is missing in it was not heard of.
    """
    nodes = [Node(**entry) for entry in plan["nodes"]]
    given = with_withheld(plan)
    answers: dict[str, dict] = {}
    with _connected(plan["address"]) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pending = {}
        for node in nodes:
            task = ray.remote(_on_node).options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.identity, soft=False),
                runtime_env={"env_vars": dict(plan["env"])},
                # A node that dies is an answer; running its command elsewhere would hide it.
                max_retries=0,
            )
            pending[task.remote(given, node.name)] = node
        watch = Watch(nodes)
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=0.5)
            for reference in ready:
                answers[pending.pop(reference).name] = _answer(ray, reference)
            gone = {node.identity for node in watch.lost()}
            for reference, node in list(pending.items()):
                # Ray takes its time to notice; a raylet that refuses connections will never answer.
                if node.identity in gone:
                    del pending[reference]
                    answers[node.name] = asdict(Ended(code=None, seconds=0.0, cut=LOST))
            write_json(target, answers)
    write_json(target, answers)


def with_withheld(plan: Mapping[str, Any]) -> dict[str, Any]:
    """``plan`` with the variables of the environment that were not written into it."""
    withheld = {name: os.environ[name] for name in plan["withheld"] if name in os.environ}
    return {**plan, "env": {**plan["env"], **withheld}}


def _answer(ray, reference) -> dict:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        dead = (ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError, ray.exceptions.RaySystemError)
        why = f"{LOST} ({type(error).__name__})" if isinstance(error, dead) else " ".join(str(error).split())[-300:]
        return asdict(Ended(code=None, seconds=0.0, cut=why))


def _on_node(plan: Mapping[str, Any], name: str) -> dict:
    """One node: the command in the node's folder of the phase, which lies in the store that all share."""
    folder = Path(plan["folder"])
    try:
        seen = read_json(Path(plan["store"]))
    except (InputError, OSError):
        seen = None
    if seen != plan["token"]:
        cut = f"the node does not see the shared store: {folder} is another folder there"
        return asdict(Ended(code=None, seconds=0.0, cut=cut))
    cwd = Path(plan["cwd"])
    out = folder / name
    # What an attempt before left running here; only this node can see it.
    for earlier in folder.parent.glob(f"{folder.name}.attempt-*/{name}"):
        clear_up(earlier)
    try:
        with adopting():
            ended = run_command(
                [word.replace(plan["marker"], str(out)) for word in plan["argv"]], folder=out,
                cwd=cwd if cwd.is_dir() else folder, env={**os.environ, **plan["env"]}, timeout=plan["timeout"],
            )  # fmt: skip
    except (OSError, InputError) as error:
        ended = Ended(code=None, seconds=0.0, cut=f"the node cannot write: {error}")
    return asdict(ended)


@contextlib.contextmanager
def _connected(address: str):
    # Read when ray is imported: no call home, and tasks that reserve no device still see them all.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import logging

    try:
        import ray
    except ImportError as error:
        raise InputError(f"Ray cannot be loaded ({error})", where=address, next_step="pip install ray") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise InputError("the Ray cluster does not answer", where=address, found=why) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def main(arguments: Sequence[str]) -> int:
    """``census ADDRESS TARGET`` or ``run PLAN TARGET``."""
    what, given, target = arguments
    try:
        if what == "census":
            census(given, Path(target))
        else:
            run_on_nodes(read_json(Path(given)), Path(target))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # By its name, so that what travels to the nodes is found there.
    from alignment.report import night_nodes

    sys.exit(night_nodes.main(sys.argv[1:]))
