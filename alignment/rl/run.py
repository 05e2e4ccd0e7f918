"""A whole training run, from a configuration to a directory of series and checkpoints; and its replay."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import alignment
from alignment.errors import InputError, UnavailableError
from alignment.files import read_json, write_json
from alignment.numerics.curve_run import CURVE_SCHEMA, CurveRun
from alignment.numerics.random import portable_integers
from alignment.rl import checkpoint
from alignment.rl.batch_record import BatchRecorder
from alignment.rl.config import COLLECTOR_KEY, DEVICE_ONLY_FIELDS, RunConfig, SkipConfig, TrainConfig
from alignment.rl.data import PromptSet, from_parquet
from alignment.rl.driver import Driver
from alignment.rl.executor import ROLES, Executor, InProcessExecutor, Placement
from alignment.rl.mock_rollout import RecordedRollouts, hash_checkpoint
from alignment.rl.observers import ObserverSpec, driver_observers, named_object
from alignment.rl.tokenizer import Tokenizer
from alignment.rl.tracking import GROUPS, METRICS, RUN, Tracker, read_series
from alignment.rl.trainer import DapoTrainer, Progress, resume_fingerprint, total_steps
from alignment.rl.worker import DTYPES, WorkerSetting

SOURCE_ROOT = Path(alignment.__file__).resolve().parent.parent
CONFIG = "config.json"
# Two runs are comparable when they compute the same thing; seed and layout are what comparisons vary.
FREE_IN_COMPARISON = DEVICE_ONLY_FIELDS | {
    "trainer.seed", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.colocate", "trainer.deterministic",
    "trainer.curve_gate", "engine.train", "engine.rollout", "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.load_format", "actor_rollout_ref.rollout.skip.enable",
    "actor_rollout_ref.rollout.free_cache_engine", "actor_rollout_ref.model.use_fused_kernels",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run: its directory and what it wrote, one entry per step."""

    directory: Path
    metrics: list[dict[str, float]]
    curve: CurveRun


def comparison_fingerprint(config: TrainConfig, *, model: str, data: str) -> str:
    """SHA-256 over everything that has to be equal for two runs' curves to be comparable, weights and data included."""
    fields = {
        k: v
        for k, v in config.deciding_fields().items()
        if k not in FREE_IN_COMPARISON
        and not k.startswith(("actor_rollout_ref.actor.megatron.", "actor_rollout_ref.actor.fsdp_config."))
    }
    text = json.dumps({"config": fields, "model": model, "data": data}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def run_dapo(
    config: TrainConfig,
    *,
    run_dir: Path,
    executor: str | Executor = "inprocess",
    device: str | None = None,
    progress: Progress | None = None,
    worker_setup: str | None = None,
    weights: str | None = None,
    observers: Sequence[ObserverSpec] = (),
) -> RunResult:
    """A whole training run in ``run_dir``.

    Writes ``config.json``, ``run.json``, ``metrics.jsonl``, ``groups.jsonl``, ``timings.jsonl``, ``ranks.jsonl``
    and, where asked, ``tensorboard/``; checkpoints go to ``trainer.default_local_dir`` (below ``run_dir`` unless
    absolute).

    Args:
        config: the configuration.
        run_dir: directory of the run; resumed from where ``trainer.resume_mode`` says so.
        executor: ``ray``, ``inprocess``, or an executor.
        device: overrides ``trainer.device``.
        progress: told about stages and steps.
        worker_setup: ``module:function`` that every worker process calls first.
        weights: first weights from another checkpoint than ``model.path``.
        observers: who watches the stages inside the workers, beside the precision collector that
            ``ascend_precision_collector`` asks for.

    Raises:
        InputError: anything that cannot work, before a step is taken where it can be known.
    """
    run_dir = Path(run_dir)
    config = located(config)
    device = device or config.trainer.device
    tokenizer = Tokenizer(Path(config.actor_rollout_ref.model.path))
    prompts = load_prompts(config, tokenizer)
    model_hash = hash_checkpoint(Path(config.actor_rollout_ref.model.path))
    checkpoints = run_dir / config.trainer.default_local_dir
    found = checkpoint.find(
        checkpoints, resume_mode=config.trainer.resume_mode, resume_from_path=config.trainer.resume_from_path
    )
    fingerprint = {
        **resume_fingerprint(config),
        "model": model_hash,
        "weights": weights and hash_checkpoint(Path(weights)),
    }
    state = checkpoint.read_state(found, config=fingerprint) if found else None
    steps = total_steps(config, prompts)
    recorded = open_record(config, run_dir, model=model_hash, data=prompts.content_hash)
    collector = open_collector(config, prompts)
    if collector is not None:
        observers = (*observers, *collector.observers)
        recorded = collector.mock_rollouts or recorded
    generates = recorded is None or recorded.steps() < steps
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
        if config.trainer.record_batches:
            watchers.append(BatchRecorder(run_dir, resume_step=state["step"] if state else 0))
        groups = executor.start(setting, placement(config))
        about = groups["actor"].call("describe")
        trainer = DapoTrainer(
            config,
            groups=groups,
            prompts=prompts,
            tokenizer=tokenizer,
            checkpoints=checkpoints,
            recorded=recorded,
            generates=generates,
            fingerprint=fingerprint,
            progress=progress,
            observers=watchers,
        )
        if state:
            trainer.resume(found, state)
        identity = {
            "seed": config.trainer.seed,
            "device": about[0]["device"],
            "total_steps": steps,
            "filtered": config.algorithm.filter_groups.enable,
            "config": comparison_fingerprint(config, model=model_hash, data=prompts.content_hash),
            "provenance": {
                "model_hash": model_hash,
                "data_hash": prompts.content_hash,
                "config_hash": config.config_hash(),
            },
        }
        fit_recorded(trainer, config, run_dir, {**identity, "workers": about}, collector)
    finally:
        watching.close()
        if collector is not None:
            collector.end()
    return read_run(run_dir)


def fit_recorded(
    trainer: Driver, config: RunConfig, run_dir: Path, about: Mapping[str, Any], collector: Any | None
) -> None:
    """Writes what the run is (``config.json``, ``run.json``) and trains to the end under a tracker.

    From here on the directory belongs to this run; whatever could be refused has been.
    """
    write_json(run_dir / CONFIG, config.to_dict())
    write_json(run_dir / RUN, about)
    if collector is not None:
        collector.begin()
    board, before = "tensorboard" in config.trainer.logger, trainer.step
    with contextlib.closing(Tracker(run_dir, resume_step=trainer.step, tensorboard=board)) as tracker:
        trainer.fit(tracker)
    if collector is not None:
        collector.ran(range(before, trainer.step))


def replay_steps(
    config: TrainConfig,
    *,
    record: Path,
    run_dir: Path,
    device: str | None = None,
    steps: int | None = None,
    perturbation: int | None = None,
    executor: str | Executor = "inprocess",
) -> RunResult:
    """Trains on recorded rollouts: every number of the training stages, on tokens that are the same for everyone.

    Args:
        config: of the run that was recorded; rollouts are loaded whatever ``rollout.skip`` says.
        record: directory of the recorded rollouts.
        run_dir: directory of the replay.
        device: overrides ``trainer.device``.
        steps: how many of the recorded steps; all by default.
        perturbation: moves every first weight by up to one unit in the last place, drawn from this seed. The spread of
            such replays is the noise that a replay on another device is judged by.
        executor: as in :func:`run_dapo`.

    Returns:
        The run; ``actor/loss``, ``actor/grad_norm``, ``actor/entropy``, ``actor/ppo_kl`` and ``actor/pg_scale`` (the
        scale of differences of the loss) are among its metrics.

    Raises:
        InputError: no rollouts are recorded there, or fewer than ``steps``, or they are stale.
    """
    record, run_dir = Path(record), Path(run_dir)
    rollout = dataclasses.replace(
        config.actor_rollout_ref.rollout, skip=SkipConfig(enable=True, dump_dir=str(record.resolve()))
    )
    config = located(
        dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(config.actor_rollout_ref, rollout=rollout))
    )
    there = RecordedRollouts.count(record)
    wanted = steps or there
    if not 0 < wanted <= there:
        raise InputError(
            "not enough rollouts are recorded", where=record, expected=f"{max(1, wanted)} steps", found=f"{there} steps"
        )
    trainer = dataclasses.replace(config.trainer, total_training_steps=wanted, resume_mode="disable", save_freq=0)
    config = dataclasses.replace(config, trainer=trainer)
    weights = None
    if perturbation is not None:
        model = config.actor_rollout_ref.model
        weights = perturbed_checkpoint(
            Path(model.path), run_dir / "weights", seed=perturbation, dtype=DTYPES[model.dtype]
        )
    return run_dapo(config, run_dir=run_dir, executor=executor, device=device, weights=weights)


def perturbed_checkpoint(source: Path, target: Path, *, seed: int, dtype: torch.dtype) -> str:
    """A copy of a checkpoint in which every weight moved by −1, 0 or 1 unit in the last place of ``dtype``.

    Returns:
        The path of the copy.
    """
    from alignment.weights.checkpoint import iter_tensors, load_config, save_checkpoint

    moved = {}
    for name, tensor in iter_tensors(source):
        direction = portable_integers(-1, 2, tensor.shape, seed=seed, stream=f"perturbation/{name}")
        there = tensor.to(dtype)
        towards = torch.where(direction > 0, torch.inf, -torch.inf).to(dtype)
        moved[name] = torch.where(direction == 0, there, torch.nextafter(there, towards)).to(tensor.dtype)
    save_checkpoint(target, load_config(source), moved, overwrite=True)
    return str(target)


def read_run(run_dir: Path) -> RunResult:
    """What a run wrote.

    Raises:
        InputError: a file is missing or damaged.
    """
    run = read_json(run_dir / RUN)
    names = ("seed", "device", "config", "total_steps", "filtered", "provenance")
    if not isinstance(run, dict) or not run.keys() >= set(names):
        raise InputError(
            "this is not the record of a run", where=run_dir / RUN, expected=", ".join(names),
            found=", ".join(map(str, run)) if isinstance(run, dict) else type(run).__name__,
        )  # fmt: skip
    curve = {name: run[name] for name in names}
    text = json.dumps({"schema": CURVE_SCHEMA, **curve, "steps": read_series(run_dir / GROUPS)})
    try:
        told = CurveRun.from_json(text)
    except InputError as error:
        raise InputError(
            error.problem, where=f"{run_dir}, {RUN} and {GROUPS}: {error.where}", expected=error.expected,
            found=error.found, next_step=error.next_step,
        ) from None  # fmt: skip
    return RunResult(directory=run_dir, metrics=read_series(run_dir / METRICS), curve=told)


def placement(config: TrainConfig) -> Placement:
    """Which roles the configuration needs and where they go."""
    needed = {"reference": config.use_reference, "critic": config.use_critic}
    roles = tuple(role for role in ROLES if needed.get(role, True))
    return Placement(
        roles=roles, world_size=config.dp_size, colocated=config.trainer.colocate, balance=config.trainer.balance_batch
    )


def make_executor(name: str, *, worker_setup: str | None = None) -> Executor:
    """The executor called ``ray`` or ``inprocess``."""
    if name == "inprocess":
        return InProcessExecutor(worker_setup=worker_setup)
    if name == "ray":
        from alignment.rl.ray_executor import RayExecutor

        return RayExecutor(worker_setup=worker_setup)
    raise InputError("unknown executor", where="executor", expected="ray | inprocess", found=name)


def load_prompts(config: TrainConfig, tokenizer: Tokenizer) -> PromptSet:
    """The prompts of ``data.train_files``: parquet in verl's format, or materialised ones.

    Where parquet cannot be read for want of a package, the materialised file of the same name takes its place.
    """
    data = config.data
    if not data.train_files:
        raise InputError(
            "there is nothing to train on", where="data.train_files", expected="at least one file", found="none"
        )
    sets = []
    for name in data.train_files:
        path = Path(name)
        try:
            parts = (
                from_parquet(path, tokenizer, max_prompt_length=data.max_prompt_length, prompt_key=data.prompt_key)
                if path.suffix == ".parquet"
                else None
            )
        except UnavailableError:
            if not path.with_suffix(".safetensors").is_file():
                raise
            parts = None
        sets.append(parts or PromptSet.load(path, tokenizer=tokenizer))
    if len(sets) == 1:
        return sets[0]
    return PromptSet(
        [p for part in sets for p in part], tokenizer_hash=tokenizer.content_hash, where="data.train_files"
    )


def located(config: TrainConfig) -> TrainConfig:
    """The configuration with its model and data found: as named, else below the directory that holds this package."""

    def find(name: str) -> str:
        below = SOURCE_ROOT / name
        return str(below) if not Path(name).exists() and below.exists() else name

    policy = config.actor_rollout_ref
    model = dataclasses.replace(policy.model, path=find(policy.model.path))
    data = dataclasses.replace(config.data, train_files=tuple(find(name) for name in config.data.train_files))
    return dataclasses.replace(config, data=data, actor_rollout_ref=dataclasses.replace(policy, model=model))


def open_collector(config: RunConfig, prompts: PromptSet | None) -> Any | None:
    """The precision collector that ``ascend_precision_collector`` asks for, or None: then nothing of it is loaded.

    Raises:
        InputError: its file is missing, or its settings are unknown or contradict each other.
    """
    if config.ascend_precision_collector is None:
        return None
    return named_object("alignment.capture.collector:open_collector", where=COLLECTOR_KEY)(config, prompts)


def open_record(config: TrainConfig, run_dir: Path, *, model: str, data: str) -> RecordedRollouts | None:
    """The recorded rollouts the configuration asks for, or None.

    Raises:
        InputError: they were recorded with another model, other data or other sampling parameters.
    """
    rollout = config.actor_rollout_ref.rollout
    if not rollout.skip.enable:
        return None
    key = {
        "model": model,
        "data": data,
        "data_seed": config.data.seed,
        "shuffle": config.data.shuffle,
        "seed": config.trainer.seed,
        "n": rollout.n,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.data.max_response_length,
        "train_batch_size": config.data.train_batch_size,
        "gen_batch_size": config.data.gen_batch_size,
        "calculate_log_probs": rollout.calculate_log_probs,
    }
    return RecordedRollouts(run_dir / rollout.skip.dump_dir, key=key)
