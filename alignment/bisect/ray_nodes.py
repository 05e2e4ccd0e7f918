"""Probes on the nodes of a Ray cluster. The only file of this room that imports ray."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from alignment.bisect.frozen_suite import FrozenSuite
from alignment.bisect.observation import Observation, Result
from alignment.bisect.probe import Probe
from alignment.bisect.providers.base import Provider
from alignment.bisect.stack import Stack
from alignment.errors import InputError, UnavailableError

NODE_FOLDER = Path("/tmp/alignment-bisect")


class RayMeasure:
    """Stands in for :func:`alignment.bisect.runner.measure_once`: the same, on whichever node is free.

    The frozen suite travels once to each node. A node that is lost is an infrastructure failure, so the probe is
    tried again elsewhere. Environments are built on the nodes, in the provider's folder there.
    """

    def __init__(self, suite: FrozenSuite, *, address: str | None = None, cpus: float = 1.0) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UnavailableError("ray is not installed", where="--ray", next_step="pip install ray") from None
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except ConnectionError as error:
                raise InputError(f"there is no Ray cluster ({error})", where="--ray", found=address) from None
        self._ray, self._suite = ray, suite
        self._packed = ray.put(_pack(suite.folder))
        self._remote = ray.remote(num_cpus=cpus, max_retries=0, scheduling_strategy="SPREAD")(_measure_on_node)

    @property
    def nodes(self) -> int:
        """How many nodes are alive."""
        return sum(bool(n["Alive"]) for n in self._ray.nodes())

    def __call__(
        self, provider: Provider, probe: Probe, stack: Stack, slot: int, suite: Path, scratch: Path
    ) -> Observation:
        try:
            return self._ray.get(self._remote.remote(provider, probe, stack, slot, self._packed, self._suite.digest))
        except self._ray.exceptions.RayError as error:
            return Observation(
                result=Result.INFRASTRUCTURE,
                reason="infrastructure",
                detail=f"the node was lost ({type(error).__name__})",
            )


def _pack(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def _measure_on_node(provider, probe, stack, slot, packed, digest) -> Observation:
    from alignment.bisect.providers.venv import locked
    from alignment.bisect.runner import measure_once

    suite = NODE_FOLDER / digest[:16]
    with locked(NODE_FOLDER / f"{digest[:16]}.lock"):
        if not (suite / ".whole").exists():
            suite.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(suite, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(
                    suite
                )
            (suite / ".whole").touch()
    return measure_once(provider, probe, stack, slot, suite, NODE_FOLDER / "scratch")
