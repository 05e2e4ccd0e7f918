"""What every trainer does on the driver: steps, stages behind their contracts, weight syncs and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from alignment.backends.training import UpdateReport
from alignment.rl import checkpoint
from alignment.rl.batch import Batch
from alignment.rl.config import RunConfig
from alignment.rl.contracts import CONTRACTS, check, check_untouched
from alignment.rl.executor import WorkerGroup
from alignment.rl.tracking import Tracker


class Progress(Protocol):
    """What a command line needs to draw a running bar."""

    def on_stage(self, step: int, total_steps: int, stage: str) -> None:
        """A stage begins."""

    def on_step(self, step: int, total_steps: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """A step has ended and its metrics are on disk."""


class Silence:
    """No progress."""

    def on_stage(self, step: int, total_steps: int, stage: str) -> None:
        """Nothing."""

    def on_step(self, step: int, total_steps: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Nothing."""


class Driver:
    """The loop around :meth:`_train_step`, which a pipeline defines.

    Args:
        config: the configuration.
        groups: worker group of each role.
        total_steps: training steps of the whole run.
        checkpoints: directory of checkpoints.
        generates: whether the workers have an inference engine.
        fingerprint: what a checkpoint has to agree with when it is resumed, flat.
        progress: told about stages and steps.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        groups: Mapping[str, WorkerGroup],
        total_steps: int,
        checkpoints: Path,
        fingerprint: Mapping[str, Any],
        generates: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.groups, self.total_steps = config, groups, total_steps
        self.checkpoints, self.generates, self.fingerprint = checkpoints, generates, fingerprint
        self.progress = progress or Silence()
        self.step = 0
        self.timings: dict[str, float] = {}
        self.workloads: dict[str, list[list[dict[str, int]]]] = {}

    def fit(self, tracker: Tracker) -> None:
        """Trains from the present step to the last one; every finished step goes to ``tracker``."""
        if self.step < self.total_steps:
            self._before_first_step()
        while self.step < self.total_steps:
            self.step += 1
            self.timings, self.workloads = {}, {}
            with self._timed("step"):
                metrics, groups = self._train_step()
            tracker.log(
                self.step, metrics=metrics, groups=groups, timings=self.timings, workloads=self.workloads
            )
            self._save_if_due()
            self.progress.on_step(self.step, self.total_steps, metrics, self.timings)

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Continues from the checkpoint at ``path``, whose trainer state is ``state``."""
        self.step = state["step"]
        self._load_state(state)
        for group in self._distinct_groups():
            group.call("load", directory=str(path.resolve()))

    # --- what a pipeline defines -------------------------------------------------------------------------------------

    def _before_first_step(self) -> None:
        """What happens before the first step of this process."""

    def _train_step(self) -> tuple[dict[str, float], dict[str, Any]]:
        """One training step: its metrics and its line for the curves."""
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the driver, JSON-ready."""
        raise NotImplementedError

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`_state`."""
        raise NotImplementedError

    # --- stages ------------------------------------------------------------------------------------------------------

    def _stage(self, role: str, stage: str, batch: Batch, *, require: Sequence[str] = ()) -> Batch:
        """Sends what the stage reads to its workers, checks the contract on both ends and takes over what it added."""
        contract = CONTRACTS[stage]
        meta = tuple(dict.fromkeys((*contract.meta_reads, *batch.meta)))
        also = (f for f in (*contract.optional, *meta) if f in batch)
        sent = batch.select([*contract.reads, *also])
        check(stage, sent, moment="before")
        with self._timed(stage):
            answer = self.groups[role].call(stage, sent)
        check_untouched(stage, sent, answer)
        batch = batch.add(
            {k: v for k, v in answer.tensors.items() if k not in sent},
            {k: v for k, v in answer.meta.items() if k not in sent},
        )
        check(stage, batch, require=require)
        return batch

    def _sync_weights(self) -> None:
        if self.generates:
            with self._timed("weight_sync"):
                self.groups["actor"].stream("export_weights", self.groups["rollout"], "load_weights")

    # --- around the steps --------------------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        frequency, last = self.config.trainer.save_freq, self.step == self.total_steps
        if not (frequency and last) and not (frequency > 0 and self.step % frequency == 0):
            return
        state = {"config": dict(self.fingerprint), **self._state()}

        def write(directory: Path) -> None:
            for group in self._distinct_groups():
                group.call("save", directory=str(directory.resolve()))

        with self._timed("save"):
            checkpoint.save(self.checkpoints, self.step, state=state, write=write)

    def _note_workloads(self, stage: str, reports: Sequence[UpdateReport]) -> None:
        """Keeps what one update gave each rank to compute, where the engine says so."""
        if all(report.workload is not None for report in reports):
            by_rank = [dataclasses.asdict(report.workload) for report in reports]
            self.workloads.setdefault(stage, []).append(by_rank)

    def _distinct_groups(self) -> list[WorkerGroup]:
        return list({id(g): g for g in self.groups.values()}.values())

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        self.progress.on_stage(self.step, self.total_steps, stage)
        start = time.perf_counter()
        yield
        self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - start
