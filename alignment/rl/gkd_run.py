"""A whole distillation run, from a configuration to a directory of series and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from alignment.errors import InputError
from alignment.rl import checkpoint
from alignment.rl.driver import Progress
from alignment.rl.executor import Executor, Placement, WorkerGroup
from alignment.rl.gkd_config import GkdConfig, TeacherKind
from alignment.rl.gkd_data import load_samples
from alignment.rl.gkd_record import GkdBatchRecorder
from alignment.rl.gkd_trainer import COMPLETIONS, GkdTrainer, resume_fingerprint, total_steps
from alignment.rl.mock_rollout import hash_checkpoint
from alignment.rl.observers import ObserverSpec, driver_observers
from alignment.rl.run import (
    SOURCE_ROOT,
    RunResult,
    comparison_fingerprint,
    fit_recorded,
    located,
    make_executor,
    open_collector,
    open_record,
    read_run,
)
from alignment.rl.teacher_replicas import TeacherReplicas
from alignment.rl.tokenizer import Tokenizer
from alignment.rl.tracking import keep_steps
from alignment.rl.worker import WorkerSetting
from alignment.weights.checkpoint import load_config as load_model_config


def run_gkd(
    config: GkdConfig,
    *,
    run_dir: Path,
    executor: str | Executor = "inprocess",
    device: str | None = None,
    progress: Progress | None = None,
    worker_setup: str | None = None,
    weights: str | None = None,
    observers: Sequence[ObserverSpec] = (),
) -> RunResult:
    """A whole distillation run in ``run_dir``; files and arguments are those of :func:`alignment.rl.run.run_dapo`.

    With ``gkd.log_completions`` also ``completions.jsonl``: what the student said in on-policy generations.

    Raises:
        InputError: anything that cannot work, before a step is taken where it can be known.
    """
    run_dir = Path(run_dir)
    config = teacher_located(located(config))
    device = device or config.trainer.device
    tokenizer = Tokenizer(Path(config.actor_rollout_ref.model.path))
    require_one_tokenizer(config, tokenizer)
    samples = load_samples(config, tokenizer)
    hashes = {"student": hash_checkpoint(Path(config.actor_rollout_ref.model.path)), "teacher": teacher_hash(config)}
    model = "+".join(hashes.values())
    checkpoints = run_dir / config.trainer.default_local_dir
    found = checkpoint.find(
        checkpoints, resume_mode=config.trainer.resume_mode, resume_from_path=config.trainer.resume_from_path
    )
    fingerprint = {
        **resume_fingerprint(config),
        **hashes,
        "weights": weights and hash_checkpoint(Path(weights)),
        "teacher_kind": config.teacher_kind.value,
    }
    state = checkpoint.read_state(found, config=fingerprint) if found else None
    steps = total_steps(config, samples)
    recorded = open_record(config, run_dir, model=model, data=samples.content_hash)
    collector = open_collector(config, None)
    if collector is not None:
        observers = (*observers, *collector.observers)
        recorded = collector.mock_rollouts or recorded
    generates = config.gkd.lmbda > 0
    setting = WorkerSetting(
        config=config,
        device=device,
        total_steps=steps,
        generates=generates,
        weights=weights,
        observers=tuple(observers),
    )
    if isinstance(executor, str):
        executor = make_executor(executor, worker_setup=worker_setup)
    watching = contextlib.ExitStack()
    try:
        watchers = [watching.enter_context(contextlib.closing(w)) for w in driver_observers(setting.observers)]
        watching.callback(executor.shutdown)  # before the watchers of the driver close
        groups = executor.start(setting, placement(config))
        replicas = start_replicas(config, executor, setting)
        about = groups["actor"].call("describe")
        completions = run_dir / COMPLETIONS if config.gkd.log_completions else None
        batches = None
        if config.trainer.record_batches:
            batches = GkdBatchRecorder(run_dir, resume_step=state["step"] if state else 0)
        trainer = GkdTrainer(
            config,
            groups=groups,
            samples=samples,
            tokenizer=tokenizer,
            checkpoints=checkpoints,
            replicas=replicas,
            recorded=recorded,
            completions=completions,
            generates=generates,
            fingerprint=fingerprint,
            progress=progress,
            observers=watchers,
            batches=batches,
        )
        if state:
            trainer.resume(found, state)
        identity = {
            "seed": config.trainer.seed,
            "device": about[0]["device"],
            "total_steps": steps,
            "filtered": False,
            "config": comparison_fingerprint(config, model=model, data=samples.content_hash),
            "provenance": {
                "model_hash": hashes["student"],
                "teacher_hash": hashes["teacher"],
                "data_hash": samples.content_hash,
                "config_hash": config.config_hash(),
            },
        }
        if completions is not None:
            keep_steps(completions, trainer.step)
        about_run = {**identity, "workers": about, "teacher": config.teacher_kind.value}
        fit_recorded(trainer, config, run_dir, about_run, collector)
    finally:
        watching.close()
        if collector is not None:
            collector.end()
    return read_run(run_dir)


def placement(config: GkdConfig) -> Placement:
    """Student and inference engine; a teacher on the workers lives with the student."""
    roles = ("actor", "rollout") if config.gkd.lmbda > 0 else ("actor",)
    return Placement(
        roles=roles, world_size=config.dp_size, colocated=config.trainer.colocate, balance=config.trainer.balance_batch
    )


def start_replicas(config: GkdConfig, executor: Executor, setting: WorkerSetting) -> TeacherReplicas | None:
    """The teacher replicas as worker groups of one rank each, or None where the teacher is on the workers."""
    if config.teacher_kind is not TeacherKind.REPLICAS:
        return None
    alone = Placement(roles=("teacher",), world_size=1)
    groups = [executor.start(setting, alone)["teacher"] for _ in range(config.gkd.teacher_replicas)]
    return TeacherReplicas([_asker(group) for group in groups], k=config.gkd.gkd_logits_topk)


def _asker(group: WorkerGroup):
    def ask(sequences: list[list[int]], k: int) -> list:
        [answers] = group.call("prompt_log_probs", sequences=sequences, k=k)
        return answers

    return ask


def teacher_located(config: GkdConfig) -> GkdConfig:
    """The configuration with its teacher found: as named, else below the directory that holds this package."""
    name = config.gkd.teacher_model
    if name is None or Path(name).exists() or not (SOURCE_ROOT / name).exists():
        return config
    return dataclasses.replace(config, gkd=dataclasses.replace(config.gkd, teacher_model=str(SOURCE_ROOT / name)))


def teacher_hash(config: GkdConfig) -> str:
    """What stands for the teacher in fingerprints: the hash of its checkpoint, or that it is the student's own base."""
    if config.teacher_kind is TeacherKind.ADAPTER_DISABLED:
        return "adapter disabled"
    return hash_checkpoint(Path(config.gkd.teacher_model))


def require_one_tokenizer(config: GkdConfig, tokenizer: Tokenizer) -> None:
    """Refuse a teacher whose token ids mean something else.

    A teacher without ``tokenizer.json`` is taken at its word. Vocabularies may differ in *size* (padding of the
    embedding), not in what an id stands for.

    Raises:
        InputError: another tokenizer, or a vocabulary that does not hold the student's tokens.
    """
    if config.teacher_kind is TeacherKind.ADAPTER_DISABLED:
        return
    folder = Path(config.gkd.teacher_model)
    if not folder.is_dir():
        raise InputError("the teacher's checkpoint does not exist", where="gkd.teacher_model", found=folder)
    if (folder / "tokenizer.json").is_file():
        theirs = Tokenizer(folder)
        if theirs.content_hash != tokenizer.content_hash:
            raise InputError(
                "teacher and student have different tokenizers",
                where="gkd.teacher_model",
                expected=f"the tokenizer of {tokenizer.folder}",
                found=folder / "tokenizer.json",
            )
    size = load_model_config(folder).vocab_size
    if size < tokenizer.vocab_size:
        raise InputError(
            "the teacher's vocabulary lacks tokens of the student's",
            where="gkd.teacher_model · vocab_size",
            expected=f"at least {tokenizer.vocab_size}",
            found=size,
        )
