"""A training run as it lies on the disk: one of this project, or a folder that verl wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json
from alignment.rl.batch_record import BatchRecord, batch_path, read_batch, recorded_steps
from alignment.rl.config import flatten
from alignment.rl.tracking import METRICS, RANKS, RUN, read_series

PLACES = ("trainer.", "data.train_files", "data.val_files", "ray_kwargs.", "hydra.", "model.path")

_WORKLOAD = {"tokens": 0, "micro_batches": 0, "pipeline_stages": 1, "pipeline_chunks": 1}
"""Counts that a rank tells of an update, and the least each can be."""
_MOST = 2**53
"""Counts below it are whole in float64, too."""


@dataclass(frozen=True)
class RunData:
    """A run as it lies on the disk. ``metrics`` step → name → value; ``config`` flat; ``not_finite`` (step, metric)."""

    directory: Path
    engine: str
    device: str
    metrics: Mapping[int, Mapping[str, float]]
    config: Mapping[str, Any] = field(default_factory=dict)
    not_finite: frozenset[tuple[int, str]] = frozenset()
    texts: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def span(self) -> str:
        """Its first and last step."""
        return f"{min(self.metrics)} … {max(self.metrics)}" if self.metrics else "none"

    @cached_property
    def recorded(self) -> tuple[int, ...]:
        """Steps whose batches are there."""
        return tuple(recorded_steps(self.directory))

    @cached_property
    def workloads(self) -> Mapping[int, Mapping[str, Sequence[Sequence[Mapping[str, int]]]]]:
        """What each rank had to compute (:class:`alignment.backends.training.Workload`): step → stage → update → rank.

        Empty where a run did not record it, as verl's do not.

        Raises:
            InputError: what is recorded is not that.
        """
        path = self.directory / RANKS
        lines = read_series(path) if path.is_file() else []
        found = {line["step"]: {stage: told for stage, told in line.items() if stage != "step"} for line in lines}
        for step, stages in found.items():
            for stage, updates in stages.items():
                _require_workloads(updates, f"{path}, step {step}: {stage}")
        return found

    @property
    def world_size(self) -> int:
        """Ranks of the run, by its configuration."""
        return world_size(self.config)

    def provenance_hash(self, name: str) -> str | None:
        """``model_hash`` or ``data_hash`` of the run's own record; None where it has none."""
        try:
            return read_json(self.directory / RUN)["provenance"][name]
        except (InputError, KeyError, TypeError):
            return None

    def batch(self, step: int) -> BatchRecord | None:
        """The batch of a step, where it was recorded."""
        if step not in self.recorded:
            return None
        path = batch_path(self.directory, step)
        batch = read_batch(path)
        for pair in ({"responses", "response_mask"}, {"prompts", "prompt_mask"}):
            lacking = pair - batch.tensors.keys()
            if len(lacking) == 1:
                raise InputError("tokens and their mask belong together", where=path, expected=lacking.pop())
        return batch


def world_size(config: Mapping[str, Any]) -> int:
    """``n_gpus_per_node · nnodes`` of a flat configuration; 1 where it does not say."""
    return int(config.get("trainer.n_gpus_per_node") or 1) * int(config.get("trainer.nnodes") or 1)


def open_run(directory: Path) -> RunData:
    """A run of ours, or a folder verl wrote.

    Raises:
        InputError: neither.
    """
    directory = Path(directory)
    if (directory / RUN).is_file() and (directory / METRICS).is_file():
        about = _mapping(directory / RUN)
        config = _mapping(directory / "config.json") if (directory / "config.json").is_file() else {}
        _require_usable(flatten(config), directory / "config.json")
        verl = about.get("verl") or {}
        series = {
            line["step"]: {k: v for k, v in line.items() if k != "step"} for line in read_series(directory / METRICS)
        }
        for step, values in series.items():
            odd = next((k for k, v in values.items() if isinstance(v, bool) or not isinstance(v, (int, float))), None)
            if odd is not None:
                raise InputError(
                    "a metric is no number", where=f"{directory / METRICS}, step {step}: {odd}",
                    found=repr(values[odd])[:80],
                )  # fmt: skip
        return RunData(
            directory,
            "verl" if verl else "alignment",
            str(about.get("device", "unknown")),
            series,
            flatten(config),
            frozenset((step, name) for step, name in verl.get("not_finite", [])),
        )
    from alignment.rl.verl_record import our_names, read_verl_output

    output = read_verl_output(directory)
    named = {step: our_names(data) for step, data in output.metrics.items() if step > 0}
    return RunData(
        directory,
        "verl",
        str(flatten(output.config).get("trainer.device", "unknown")),
        {step: metrics for step, (metrics, _, _) in named.items()},
        flatten(output.config),
        frozenset((step, name) for step, (_, _, odd) in named.items() for name in odd),
        output.rollouts,
    )


def _require_usable(config: Mapping[str, Any], where: Path) -> None:
    """Refuses counts that are none and a checkpoint that no file can have the name of."""
    for name in ("trainer.n_gpus_per_node", "trainer.nnodes"):
        count = config.get(name)
        if count is not None and (type(count) is not int or count < 1):
            raise InputError("a count is expected", where=f"{where}: {name}", found=repr(count)[:80])
    name = "actor_rollout_ref.model.path"
    try:
        Path(str(config.get(name) or "")).is_dir()
    except (OSError, ValueError) as error:
        raise InputError(f"no folder has this name ({error.__class__.__name__})", where=f"{where}: {name}") from None


def _require_workloads(updates: Any, where: str) -> None:
    """Refuses what are not updates, each with what every rank had to compute."""
    if not isinstance(updates, list):
        raise InputError("updates are a list", where=where, found=repr(updates)[:80])
    for number, by_rank in enumerate(updates, 1):
        if not isinstance(by_rank, list) or not by_rank:
            raise InputError("an update has ranks", where=f"{where}, update {number}", found=repr(by_rank)[:80])
        for rank, told in enumerate(by_rank):
            for name, least in _WORKLOAD.items():
                count = told.get(name) if isinstance(told, dict) else None
                if type(count) is not int or not least <= count < _MOST:
                    raise InputError(
                        "a rank does not say what it had to compute", where=f"{where}, update {number}, rank {rank}",
                        expected=f"{name}: a whole number, {least} or more", found=repr(told)[:80],
                    )  # fmt: skip


def _mapping(path: Path) -> Mapping[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise InputError("the file does not hold a JSON object", where=path, found=type(found).__name__)
    return found


def is_run(directory: Path) -> bool:
    """Whether :func:`open_run` can read ``directory``; a folder that says it is a capture is none."""
    if (directory / RUN).is_file():
        return True
    if not directory.is_dir() or (directory / "capture.json").exists():
        return False
    try:
        open_run(directory)
    except InputError:
        return False
    return True


def config_differences(a: RunData, b: RunData) -> dict[str, tuple[Any, Any]]:
    """Keys with other values in the two configurations: (of a, of b). Places, names and devices are left out."""
    keys = sorted(set(a.config) | set(b.config))
    return {
        key: (a.config.get(key), b.config.get(key))
        for key in keys
        if a.config.get(key) != b.config.get(key)
        and not key.startswith(PLACES)
        and not all(str(run.config.get(key)).startswith("/") for run in (a, b))
    }
