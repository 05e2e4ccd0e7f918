"""The precision collector: dumps what the stages of a training run compute, and replays recorded inference.

:func:`open_collector` is the driver's side, :func:`worker_collector` what each worker gets. The settings are in
:mod:`alignment.capture.collector_config`; what lies on disk afterwards::

    <dump_path>/<stage>/step<S>/rank<N>/{construct.json, dump.json, stack.json}    and dump_tensor_data with task tensor
    <dump_path>/<stage>/rank<N>                a link to the first collected step's
    <dump_path>/memory_snapshot/<stage>/step<S>/rank<N>.json    and .pickle on an accelerator
    <dump_path>/data/<key>/step<S>/rank<R>/micro_step<M>/<name><i>.npy and .json
    <dump_path>/configurations.json

Steps are counted from 0: step 0 is the first training step, whether or not the run was resumed. ``micro_step`` counts
generation rounds of a step. What a step computes is the same to the last bit with and without a collector.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alignment.capture.collector_config import KEY, CollectorConfig, load_collector_config
from alignment.capture.collector_data import KEYS, write_key_data
from alignment.capture.collector_steps import collected_steps
from alignment.capture.config import CaptureConfig
from alignment.capture.mock_replay import MockRollouts
from alignment.capture.msprobe_writer import write_msprobe
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import Capture
from alignment.capture.stage_models import stage_models
from alignment.errors import InputError
from alignment.files import write_json
from alignment.rl.batch import Batch
from alignment.rl.config import RunConfig
from alignment.rl.data import PromptSet
from alignment.rl.observers import ObserverSpec

STAGES: Mapping[str, str] = {
    "rollout": "actor_generate_sequences",
    "old_log_prob": "actor_compute_log_prob",
    "ref_log_prob": "reference_compute_log_prob",
    "values": "critic_compute_values",
    "update_critic": "critic_update",
    "update_actor": "actor_update",
    "teacher_log_prob": "reference_compute_log_prob",
    "update_student": "actor_update",
}
"""The collector's name of each stage. In distillation the teacher takes the place of the reference."""

_OPTIONAL_STAGES = (("critic_train_dump", "use_critic", "critic"), ("reference_dump", "use_reference", "reference"))
"""Switches of stages that a run may lack, and the property of a configuration that says so."""
WORKER_FACTORY = "alignment.capture.collector:worker_collector"
SCRATCH = ".collecting"


class _Disk:
    """Writes until the disk refuses: then it says so once, and the run goes on without its collector."""

    def __init__(self) -> None:
        self.failure: str | None = None

    def write(self, job: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            job()
        except OSError as error:
            self.failure = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
            print(f"precision collector stopped, the run goes on: {self.failure}", file=sys.stderr, flush=True)


class Collector:
    """The driver's side.

    Attributes:
        observers: what the workers get.
        mock_rollouts: what replaces generation, or None.
    """

    def __init__(self, settings: CollectorConfig, config: RunConfig, prompts: PromptSet | None) -> None:
        self.settings, self._config, self._disk = settings, config, _Disk()
        self.steps = collected_steps(settings, twice=runs_log_prob_twice(config))
        self.observers: tuple[ObserverSpec, ...] = ()
        if settings.key_data_dump and settings.msprobe or settings.layer_stages:
            self.observers = (ObserverSpec(factory=WORKER_FACTORY, argument=settings.to_json()),)
        self.mock_rollouts = self._mock(prompts) if settings.mocks else None

    def begin(self) -> None:
        """Writes the training configuration, where asked, and says how steps are counted where that is not plain."""
        settings = self.settings
        notes = [self.steps.describe()] if settings.dumps and self.steps.twice else []
        if settings.dumps and Path(settings.dump_path).is_dir() and any(Path(settings.dump_path).iterdir()):
            notes.append(f"{settings.dump_path} holds dumps already: steps of this run replace theirs, others stay")
        if settings.msprobe and settings.configurations_dump:
            path = Path(settings.dump_path) / "configurations.json"
            self._disk.write(lambda: write_json(path, self._config.to_dict()))
        for switch, needs, what in _OPTIONAL_STAGES:
            if settings.msprobe and getattr(settings, switch) and not getattr(self._config, needs, True):
                notes.append(f"{switch}: this run has no {what}, so there is nothing to dump")
        for note in notes:
            print(f"precision collector: {note}", file=sys.stderr, flush=True)

    def ran(self, steps: range) -> None:
        """Says where training through ``steps``, from 0, left nothing to collect."""
        settings = self.settings
        watched = [*settings.layer_stages, *(["data"] if settings.key_data_dump and settings.msprobe else [])]
        if steps and watched and not any(self.steps.takes(stage, step) for stage in watched for step in steps):
            asked = f"{KEY}.step_start={settings.step_start}, {KEY}.step_end={settings.step_end}"
            through = f"the run went through steps {steps[0]} … {steps[-1]}, counted from 0"
            print(
                f"precision collector: nothing was collected: no step fits {asked}: {through}",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        """Removes what workers that were ended without a word left between capture and dump."""
        shutil.rmtree(Path(self.settings.dump_path) / SCRATCH, ignore_errors=True)

    def _mock(self, prompts: PromptSet | None) -> MockRollouts:
        from alignment.rl.tokenizer import Tokenizer
        from alignment.weights.checkpoint import load_config

        path = Path(self._config.actor_rollout_ref.model.path)
        tokenizer = Tokenizer(path)
        data = self._config.data
        return MockRollouts(
            self.settings,
            prompts=prompts,
            prompt_length=data.max_prompt_length,
            response_length=data.max_response_length,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            vocab_size=load_config(path).vocab_size,
            on_replay=self._dump_replayed if self.settings.key_data_dump else None,
        )

    def _dump_replayed(self, step: int, attempt: int, by_rank: Mapping[int, Batch]) -> None:
        """Dumps what the training stages are given as the rollout stage would, by the rank that recorded it."""
        if self.steps.takes("data", step):
            for rank, rows in by_rank.items():
                values = {key: rows[key] for key in KEYS if key in rows.tensors}
                place = {"step": step, "rank": rank, "micro_step": attempt}
                self._disk.write(partial(write_key_data, Path(self.settings.dump_path), values, **place))


class WorkerCollector:
    """Watches the stages of one worker. See :class:`alignment.rl.observers.StageObserver`.

    Raises:
        InputError: a stage is to be dumped whose model cannot be watched.
    """

    def __init__(self, worker: Any, settings: CollectorConfig) -> None:
        self._settings, self._rank = settings, worker.rank
        self._dump_path = Path(settings.dump_path)
        self._steps = collected_steps(settings, twice=runs_log_prob_twice(worker.config))
        self._scratch = self._dump_path / SCRATCH / f"{'-'.join(worker.roles)}-{worker.rank}"
        self._capture: Capture | None = None
        self._disk = _Disk()
        self._step = -1
        self._rounds = 0
        for stage, name in STAGES.items():  # a stage that cannot be dumped is refused now, not after hours
            if name in settings.layer_stages:
                stage_models(worker, stage)

    def observe(self, worker: Any, stage: str, batch: Batch | None, proceed: Callable[[], Any]) -> Any:
        """See :class:`alignment.rl.observers.StageObserver`."""
        name = STAGES.get(stage)
        step = batch.info.get("step", 0) - 1 if batch is not None else -1
        if name is None or step < 0 or self._disk.failure is not None:
            return proceed()
        if step != self._step:
            self._step, self._rounds = step, 0
            self._forget()
        with self._layers(worker, stage, name, step):
            answer = proceed()
        self._dump_data(stage, step, answer)
        return answer

    def close(self) -> None:
        """See :class:`alignment.rl.observers.StageObserver`."""
        if self._capture is not None:
            self._capture.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # --- key data ----------------------------------------------------------------------------------------------------

    def _dump_data(self, stage: str, step: int, answer: Any) -> None:
        settings = self._settings
        if not settings.key_data_dump or not self._steps.takes("data", step) or not isinstance(answer, Batch):
            return
        fields = {
            "rollout": ("responses", "input_ids", "attention_mask", "prompts", "position_ids"),
            "old_log_prob": ("old_log_probs", "entropys"),
        }.get(stage, ())
        values = {key: answer[key] for key in fields if key in answer.tensors}
        if values:
            round_ = self._rounds if stage == "rollout" else 0
            place = {"step": step, "rank": self._rank, "micro_step": round_}
            self._disk.write(partial(write_key_data, self._dump_path, values, **place))
        if stage == "rollout":
            self._rounds += 1

    # --- layers ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _layers(self, worker: Any, stage: str, name: str, step: int) -> Iterator[None]:
        settings = self._settings
        models = {}
        if name in settings.layer_stages and self._steps.takes(name, step):
            models = stage_models(worker, stage)
        if not models:
            yield
            return
        memory = _MemoryDump(worker.device, self._dump_path, self._disk) if settings.memory_dump else None
        with memory.recorded(name, step, self._rank) if memory else contextlib.nullcontext():
            with self._session().stage(step, stage, models):
                yield
        self._disk.write(partial(self._write_layers, stage, name, step))

    def _session(self) -> Capture:
        if self._capture is None:
            settings = self._settings
            shutil.rmtree(self._scratch, ignore_errors=True)
            config = CaptureConfig(
                level=settings.level,
                detail="tensor" if settings.task == "tensor" else "statistics",
                token_start=settings.token_range_start,
                token_end=settings.token_range_end,
                values=False,
                settings=False,
                real_tokens=False,  # msprobe counts padding
            )
            self._capture = Capture(config, directory=self._scratch)
        return self._capture

    def _write_layers(self, stage: str, name: str, step: int) -> None:
        """Writes everything the stage has computed in this step so far: it may run several times."""
        capture, settings = self._capture, self._settings
        capture.flush()
        if capture.failure is not None:
            return  # the session has said so, and the run goes on
        folder = self._dump_path / name / f"step{step}" / f"rank{self._rank}"
        if stage not in OwnCapture(self._scratch).stages(step):
            return  # nothing was computed here
        rows = OwnCapture(self._scratch).rows(step, stage, 0)
        write_msprobe(folder, rows, level=settings.level, task=settings.task)
        link = self._dump_path / name / f"rank{self._rank}"
        if not link.is_symlink() and not link.exists():
            with contextlib.suppress(OSError):  # a file system without links
                link.symlink_to(Path(f"step{step}") / f"rank{self._rank}", target_is_directory=True)

    def _forget(self) -> None:
        """Removes what the steps before this one left behind for conversion."""
        if self._capture is not None:
            self._capture.flush()
            for folder in self._scratch.glob("step*"):
                shutil.rmtree(folder, ignore_errors=True)


class _MemoryDump:
    """Memory of a stage: the device's counters, and on an accelerator the allocator's own snapshot."""

    def __init__(self, device: Any, dump_path: Path, disk: _Disk) -> None:
        self._device, self._root, self._disk = device, dump_path / "memory_snapshot", disk
        module = getattr(torch, device.kind, None) if device.kind != "cpu" else None
        self._allocator = getattr(module, "memory", None)

    @contextlib.contextmanager
    def recorded(self, name: str, step: int, rank: int) -> Iterator[None]:
        device, path = self._device, self._root / name / f"step{step}" / f"rank{rank}.json"
        device.reset_peak_memory()
        before = device.memory_allocated()
        snapshots = all(hasattr(self._allocator, f) for f in ("_record_memory_history", "_dump_snapshot"))
        if snapshots:
            self._allocator._record_memory_history(max_entries=100_000)
        try:
            yield
            found = {
                "device": device.label, "before": before, "after": device.memory_allocated(),
                "peak": device.max_memory_allocated(),
            }  # fmt: skip
            self._disk.write(lambda: write_json(path, found))
            if snapshots:
                self._disk.write(lambda: self._allocator._dump_snapshot(str(path.with_suffix(".pickle"))))
        finally:
            if snapshots:
                self._allocator._record_memory_history(enabled=None)


def open_collector(config: RunConfig, prompts: PromptSet | None) -> Collector | None:
    """The collector that the configuration asks for; ``prompts`` are the training data where it is a set of prompts.

    Raises:
        InputError: its file is missing, or its settings are unknown or contradict each other or the run.
    """
    path = Path(config.ascend_precision_collector)
    settings = load_collector_config(path).located(Path.cwd())
    if not settings.msprobe:
        return None
    if settings.mocks and config.actor_rollout_ref.rollout.skip.enable:
        raise InputError(
            "two recordings stand in for the same generation", where="actor_rollout_ref.rollout.skip.enable",
            expected="False with enable_mock_inference", found=True,
        )  # fmt: skip
    return Collector(settings, config, prompts)


def worker_collector(worker: Any, argument: str) -> WorkerCollector:
    """The observer of a worker; ``argument`` is :meth:`CollectorConfig.to_json`."""
    return WorkerCollector(worker, CollectorConfig.from_json(argument))


def runs_log_prob_twice(config: RunConfig) -> bool:
    """Whether ``actor_compute_log_prob`` runs twice in a step: an adapter on the FSDP back end, whose reference is the
    actor without it.
    """
    if config.engine.train != "fsdp":
        return False
    lora = getattr(getattr(config, "gkd", None), "lora", None)
    return bool(config.actor_rollout_ref.model.lora_rank or getattr(lora, "rank", 0))
