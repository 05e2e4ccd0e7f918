"""Capturing: one context around a model or a stage, and everything it computes is on disk when the step has ended.

::

    with capture(model, CaptureConfig(), directory="runs/a/capture") as session:
        for step, batch in enumerate(batches):
            with session.step(step):
                loss(model(batch)).backward()

What is computed is not touched: losses and gradients are the same to the last bit with and without.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.capture.config import STAGE_ORDER, CaptureConfig
from alignment.capture.hooks import ModuleHooks
from alignment.capture.operators import OperatorRecorder
from alignment.capture.own_format import write_about
from alignment.capture.reduction import Reducer
from alignment.capture.samples import Samples, real_bounds, sample_keys
from alignment.capture.selection import (
    excluded_everything,
    say_no_module_was_captured,
    say_nothing_was_captured,
)
from alignment.capture.settings import SettingsReader
from alignment.capture.shards import has_parallel_state
from alignment.capture.stage import StageRecord
from alignment.capture.writer import BackgroundWriter
from alignment.errors import InputError

_LARGEST_VALUE = 64 << 20
"""Fields of the pipeline up to this size are kept as they are, whatever the detail."""


class Capture:
    """One rank's capture of a run.

    Args:
        config: what to capture.
        directory: where; the same for every rank.
        rank: of this process.
        provenance: anything JSON that says what was captured.

    Attributes:
        failure: why writing stopped, or None. A failed capture takes nothing more and never raises into the run.
    """

    def __init__(
        self,
        config: CaptureConfig,
        *,
        directory: str | Path,
        rank: int = 0,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.directory, self.rank = config, Path(directory), rank
        self._writer = BackgroundWriter(queue_bytes=config.queue_bytes)
        self._provenance = dict(provenance or {})
        self._reducer: Reducer | None = None
        self._step: int | None = None
        self._pieces: dict[str, int] = {}
        self._calls: dict[str, dict[str, int]] = {}
        self._parameters: dict[str, dict[str, tuple]] = {}
        self._met: dict[str, dict[str, int]] = {}
        # What the code of a class reads is looked up once for all stages. Not for all sessions: code that was put onto
        # a module holds the module.
        self._settings = SettingsReader()
        self._started = False
        self._inside = False
        self._steps: set[int] = set()
        self._ran = self._found = False

    @property
    def failure(self) -> str | None:
        """Why writing stopped, or None."""
        return self._writer.failure

    @contextlib.contextmanager
    def stage(
        self,
        step: int,
        stage: str,
        models: nn.Module | Mapping[str, nn.Module],
        *,
        piece: str = "",
        modules: bool = True,
        summed_gradients: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Iterator[StageRecord | None]:
        """Captures what the models compute inside, if step, stage and rank were asked for.

        Args:
            step, stage: names of the folder.
            models: a model, or several by the prefix of their modules' names.
            piece: a name where two processes of one rank write one stage; counted by default.
            modules: False to take only what is handed to :func:`record_values`.
            summed_gradients: whether someone else hands in the gradients of parameters, so that each backward pass's
                share is left out.
            attention_mask: [samples, tokens], 0 at padding, of a model that is called with token ids of this shape and
                without a mask.

        Yields:
            The record, or None where nothing is captured.
        """
        config = self.config
        self._steps.add(step)
        wanted = config.takes_step(step) and config.takes_stage(stage) and config.takes_rank(self.rank)
        if not wanted or self.failure is not None or self._inside:
            yield None
            return
        if not self._start():
            yield None
            return
        if step != self._step:
            self._step, self._pieces, self._calls, self._parameters, self._met = step, {}, {}, {}, {}
        again = self._pieces.get(stage, 0)
        self._pieces[stage] = again + 1
        record = StageRecord(
            reducer=self._reducer_of_stage(),
            writer=self._writer,
            root=self.directory,
            step=step,
            stage=stage,
            rank=self.rank,
            piece=(f"{piece}{again or ''}" if piece else str(again) if again else ""),
            real_tokens=config.real_tokens,
            by_sample=config.samples,
            calls=self._calls.setdefault(stage, {}),
            met=self._met.setdefault(stage, {}),
            parameters=self._parameters.setdefault(stage, {}),
        )
        record.keeps = config.detail == "tensor"
        if record.keeps:
            record.reducer.keep_with(record.keep)
        generation = (config.token_start, config.token_end) if stage == "rollout" else None
        models = {"": models} if isinstance(models, nn.Module) else models
        hooks = [
            ModuleHooks(
                model,
                record=record,
                prefix=prefix,
                backward=config.backward,
                parameters=config.parameters,
                # The pipeline's engines show the sums over micro batches and ranks; see the pipeline's observer.
                parameter_gradients=config.parameter_gradients and not summed_gradients,
                takes=config.takes_module,
                tokens=generation,
                modules=config.level != "L1",
                settings=self._settings if config.settings else None,
                mask=attention_mask,
                owners=config.level != "L0",
            )
            for prefix, model in (models.items() if modules else ())
        ]
        self._inside = True
        try:
            with contextlib.ExitStack() as stack:
                for hooked in hooks:
                    hooked.attach()
                    stack.callback(hooked.detach)
                    self._ran, self._found = True, self._found or hooked.found
                if config.level != "L0" and modules:
                    stack.enter_context(OperatorRecorder(record, hooks=hooks, takes=config.takes_module))
                yield record
            record.finish()
        finally:
            self._inside = False

    def step(
        self, step: int, stage: str = "train", *, attention_mask: Tensor | None = None
    ) -> contextlib.AbstractContextManager[StageRecord | None]:
        """:meth:`stage` on the model that :func:`capture` was given."""
        return self.stage(step, stage, self._model, attention_mask=attention_mask)

    def flush(self) -> None:
        """Waits until everything so far is on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def say_what_is_missing(self) -> None:
        """Tells on stderr where steps ran and nothing of them, or no module, was captured here."""
        if not self._steps or self.failure is not None:
            return
        if not self._started and not (_communicates() and not self.config.takes_rank(self.rank)):
            say_nothing_was_captured(excluded_everything(self.config, steps=self._steps, rank=self.rank))
        elif self._ran and not self._found and self.config.modules is not None:
            say_no_module_was_captured(self.config)

    _model: nn.Module | Mapping[str, nn.Module]

    def _start(self) -> bool:
        """Writes ``capture.json`` before the first stage; a disk that refuses it ends the capture."""
        if self._started:
            return True
        self._started = True
        about = {
            **self.config.to_dict(),
            "stage_order": list(STAGE_ORDER),
            "provenance": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                **self._provenance,
            },
        }
        directory = self.directory

        def write() -> None:
            write_about(directory, about)

        try:
            if self.rank == min(self.config.ranks or (0,)) or not (directory / "capture.json").exists():
                write()
        except OSError as error:
            self._writer.fail(f"{error.strerror or error} ({error.filename or directory})")
            return False
        return True

    def _reducer_of_stage(self) -> Reducer:
        config = self.config
        if self._reducer is None:
            self._reducer = Reducer(
                sketch_size=0 if config.detail == "statistics" else config.sketch_size, sketch_seed=config.sketch_seed
            )
        self._reducer.deduplicate = config.deduplicate == "always" or (
            config.deduplicate == "auto" and not _memory_may_change()
        )
        self._reducer.keep_with(None)
        return self._reducer


@contextlib.contextmanager
def capture(
    model: nn.Module | Mapping[str, nn.Module],
    config: CaptureConfig | None = None,
    *,
    directory: str | Path,
    rank: int = 0,
    provenance: Mapping[str, Any] | None = None,
) -> Iterator[Capture]:
    """Captures a model's steps; see the head of this file.

    Args:
        model: a module, or several by the prefix of their modules' names.
        config: what to capture; modules with sketches by default.
        directory: of the capture; one for all ranks.
        rank: of this process.
        provenance: kept in ``capture.json``.

    Raises:
        InputError: the folder holds another capture already.
    """
    if (Path(directory) / "capture.json").exists() and rank == 0:
        raise InputError(
            "the folder holds a capture already", where=directory, expected="a new folder", found="capture.json",
            next_step="name another folder or remove this one",
        )  # fmt: skip
    session = Capture(config or CaptureConfig(), directory=directory, rank=rank, provenance=provenance)
    session._model = model
    try:
        yield session
    finally:
        session.close()
    session.say_what_is_missing()


def record_values(
    record: StageRecord,
    values: Mapping[str, Tensor],
    *,
    role: str = "output",
    beside: Mapping[str, Tensor] | None = None,
) -> None:
    """Adds named fields of the pipeline as rows of kind ``value``, with their tensors and the keys of their samples.

    Args:
        values: the fields.
        role: whether the stage read them or added them.
        beside: where ``input_ids`` and ``attention_mask`` are, by which samples are known; ``values`` by default.
    """
    ids = (beside or values).get("input_ids")
    samples = None
    if ids is not None and ids.dim() == 2:
        mask = (beside or values).get("attention_mask")
        mask = mask if mask is not None and mask.shape == ids.shape else None
        shape = ids.shape[0], ids.shape[1]
        samples = Samples(keys=sample_keys(ids, mask), bounds=real_bounds(mask, shape), shape=shape)
    with record.own_work():
        before = record.set_samples(samples)
        record.reducer.samples = None
        for name, t in values.items():
            record.reducer.keep_with(record.keep if t.numel() * t.element_size() <= _LARGEST_VALUE else None)
            call = record.next_call(f"{role}\0{name}")
            record.row(name, "", "value", "forward", call, role, name, "", t, record.reduce(t, by_sample=False))
        record.reducer.keep_with(record.keep if record.keeps else None)
        record.set_samples(before)


def _memory_may_change() -> bool:
    """Whether memory may change behind the version counter's back: a collective writes into it, and megatron-core gives
    one tensor the memory of another (``make_viewless_tensor``), which then has two counters.
    """
    return _communicates() or has_parallel_state()


def _communicates() -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1
