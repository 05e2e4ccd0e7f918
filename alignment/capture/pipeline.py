"""Capture inside the training pipeline: every worker writes the stages it runs, the driver what it computes itself.

``alignment dapo capture.detail=sketch capture.stages=[old_log_prob,update_actor]`` becomes an observer by
:func:`capture_observer`; the pipeline calls it by its name and knows nothing else of it.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from alignment.capture.config import STAGE_ORDER, CaptureConfig
from alignment.capture.own_format import is_capture
from alignment.capture.selection import say_what_is_missing
from alignment.capture.session import Capture, record_values
from alignment.capture.stage import StageRecord
from alignment.capture.stage_models import HOLDERS, stage_models
from alignment.errors import InputError, UnavailableError
from alignment.rl.batch import Batch
from alignment.rl.observers import ObserverSpec

FOLDER = "capture"
_UPDATES = ("update_actor", "update_critic", "update_student")


def capture_observer(
    config: CaptureConfig, run_dir: Path, *, provenance: Mapping[str, Any] | None = None
) -> ObserverSpec:
    """What makes a run capture itself into ``<run_dir>/capture``.

    Raises:
        InputError: the run has a capture already, or a stage that no pipeline has was asked for.
    """
    known = list(dict.fromkeys((*STAGE_ORDER, *HOLDERS)))
    for stage in config.stages or ():
        if stage not in known:
            near = difflib.get_close_matches(stage, known, n=1)
            raise InputError(
                "the pipeline has no such stage", where="capture.stages", expected=", ".join(known), found=stage,
                next_step=f"did you mean {near[0]}?" if near else None,
            )  # fmt: skip
    directory = Path(run_dir).resolve() / FOLDER
    if is_capture(directory):
        raise InputError(
            "this run has a capture already", where=directory, next_step="name another --run-dir, or remove the folder"
        )
    argument = {"config": config.to_dict(), "directory": str(directory), "provenance": dict(provenance or {})}
    return ObserverSpec(
        factory="alignment.capture.pipeline:worker_capture",
        driver="alignment.capture.pipeline:driver_capture",
        argument=json.dumps(argument),
    )


def worker_capture(worker: Any, argument: str) -> WorkerCapture:
    """The observer of one worker."""
    return WorkerCapture(worker, *_session(argument, rank=worker.rank))


def driver_capture(argument: str) -> DriverCapture:
    """The observer of the driver."""
    return DriverCapture(*_session(argument, rank=0))


class WorkerCapture:
    """Captures the stages of one worker. See :class:`alignment.rl.observers.StageObserver`.

    Raises:
        UnavailableError: a stage was asked for by name whose model cannot be watched.
    """

    def __init__(self, worker: Any, config: CaptureConfig, session: Capture) -> None:
        self._config, self._session = config, session
        self._unwatched: set[str] = set()
        for stage in HOLDERS:
            if getattr(worker, HOLDERS[stage], None) is None:
                continue
            try:
                stage_models(worker, stage)
            except UnavailableError as error:
                if config.stages is not None and stage in config.stages:
                    raise
                self._unwatched.add(stage)
                if config.takes_stage(stage):
                    print(f"capture: {stage} without its modules: {error}", file=sys.stderr, flush=True)

    def observe(self, worker: Any, stage: str, batch: Batch | None, proceed: Callable[[], Any]) -> Any:
        """See :class:`alignment.rl.observers.StageObserver`."""
        step = batch.info.get("step") if batch is not None else None
        if step is None:
            return proceed()
        models = {} if stage in self._unwatched else stage_models(worker, stage)
        summed = stage in _UPDATES and self._config.parameter_gradients
        with self._session.stage(step, stage, models, modules=bool(models), summed_gradients=summed) as record:
            if record is None:
                return proceed()
            if summed:
                with _gradients(getattr(worker, HOLDERS[stage]), record, writes=worker.rank == 0):
                    answer = proceed()
            else:
                answer = proceed()
            if self._config.values:
                _record_batch(record, batch, answer)
            return answer

    def close(self) -> None:
        """See :class:`alignment.rl.observers.StageObserver`."""
        self._session.close()


class DriverCapture:
    """Captures the fields of the stages that no worker runs."""

    def __init__(self, config: CaptureConfig, session: Capture) -> None:
        self._config, self._session = config, session
        self._steps: set[int] = set()

    def fields(self, step: int, stage: str, before: Batch | None, after: Batch) -> None:
        """Records what the driver's stage read and added."""
        self._steps.add(step)
        if not self._config.values:
            return
        with self._session.stage(step, stage, {}, piece="driver", modules=False) as record:
            if record is not None:
                _record_batch(record, before, after)

    def close(self) -> None:
        """Writes what is left, and says where a run that ended well left nothing to write. The workers have ended."""
        self._session.close()
        if sys.exc_info()[0] is None and self._session.failure is None:
            say_what_is_missing(self._config, self._session.directory, steps=self._steps, stages=HOLDERS)


def _session(argument: str, *, rank: int) -> tuple[CaptureConfig, Capture]:
    given = json.loads(argument)
    config = CaptureConfig.from_dict(given["config"])
    return config, Capture(config, directory=given["directory"], rank=rank, provenance=given["provenance"])


def _record_batch(record: StageRecord, before: Batch | None, answer: Any) -> None:
    had = before.tensors if before is not None else {}
    record_values(record, had, role="input")
    if isinstance(answer, Batch):
        added = {name: t for name, t in answer.tensors.items() if name not in had}
        record_values(record, added, role="output", beside=answer.tensors)


class _gradients:
    """While it is entered, an engine shows the summed gradients of each of its updates, by checkpoint name.

    They are the same for every number of micro batches and ranks, so engines and layouts can be compared by them.
    """

    def __init__(self, engine: Any, record: StageRecord, *, writes: bool) -> None:
        self._engine, self._record, self._writes = engine, record, writes
        self._update = engine.update

    def __enter__(self) -> None:
        def update(*arguments: Any, **named: Any) -> Any:
            return self._update(*arguments, observe_gradients=self._observe, **named)

        self._engine.update = update

    def __exit__(self, *_: object) -> None:
        # The attribute of the instance hid the method of the class.
        del self._engine.update

    def _observe(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        record = self._record
        for name, gradient in gradients:
            if self._writes and record.active:
                record.parameter_gradient(name, gradient)
