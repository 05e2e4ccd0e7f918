"""What a verl run left behind, read into the form of our own runs: from our launch, or from any verl output folder.

verl writes metrics by its loggers (``file``: JSON lines; ``tensorboard``: event files; ``console``: the log), decoded
rollouts below ``trainer.rollout_data_dir``, its configuration below Hydra's ``.hydra``, and checkpoints as
``global_step_N``. :func:`read_verl_output` takes what is there; :func:`record_verl_run` writes ``config.json``,
``run.json``, ``metrics.jsonl``, ``groups.jsonl`` and ``timings.jsonl`` from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import parse_yaml, write_atomically, write_json
from alignment.numerics.curve_run import CurveStep
from alignment.rl.batch_record import BATCHES, batch_path, read_batch
from alignment.rl.config import TrainConfig, flatten
from alignment.rl.tracking import GROUPS, METRICS, RUN, TIMINGS

STAGES = {
    "gen": "rollout", "reward": "reward", "old_log_prob": "old_log_prob", "ref": "ref_log_prob", "values": "values",
    "adv": "advantage", "update_actor": "update_actor", "update_critic": "update_critic",
    "update_weights": "weight_sync", "save_checkpoint": "save", "step": "step",
}  # fmt: skip
"""verl's names of timed stages and ours."""

# Where a run happens, what it is called and how much it says do not decide what it computes.
FREE_KEYS = re.compile(
    r"trainer\.(project_name|experiment_name|logger|default_local_dir|default_hdfs_dir|rollout_data_dir"
    r"|validation_data_dir|save_freq|resume_.*|device|n_gpus_per_node|nnodes|v1\..*|esi_.*|max_.*_to_keep)"
    r"|ray_kwargs\..*|global_profiler\..*|.*\.profiler\..*|actor_rollout_ref\.model\.path|.*_files|.*\.agent\..*"
    r"|.*\.seed|.*data_loader_seed|.*custom_reward_function\.path|transfer_queue\..*"
)
_STEP = re.compile(r"(?<![\w/])step:(\d+) - (.+)$")
_NUMBER = re.compile(r"(?:np\.float64\()?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))\)?$")
GAP = "training/rollout_log_probs_abs_diff_mean"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class VerlOutput:
    """A verl output folder.

    ``metrics`` step → verl's metrics by verl's names, ``origin`` which logger they come from; ``rollouts`` step → rows
    of the dump (``input``, ``output``, ``score``, …); ``config`` its resolved configuration (empty where there is
    none); ``checkpoints`` step → directory.
    """

    directory: Path
    metrics: Mapping[int, Mapping[str, float]]
    origin: str
    rollouts: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Mapping[int, Path] = field(default_factory=dict)

    def weights(self, step: int) -> Path:
        """The policy after ``step`` as a Hugging Face checkpoint.

        Raises:
            InputError: no checkpoint of that step, or one without such weights.
        """
        if step not in self.checkpoints:
            saved = ", ".join(map(str, sorted(self.checkpoints))) or "none"
            raise InputError(
                f"no checkpoint of step {step}", where=self.directory, expected=f"one of {saved}", found=step
            )
        folder = self.checkpoints[step] / "actor" / "huggingface"
        if not any(folder.glob("*.safetensors")):
            raise InputError(
                "the checkpoint holds verl's shards only",
                where=self.checkpoints[step],
                expected="weights in actor/huggingface",
                next_step="python -m verl.model_merger merge, or save with actor.checkpoint.save_contents=[…,hf_model]",
            )
        return folder


def read_verl_output(directory: Path) -> VerlOutput:
    """Reads what a verl run wrote below ``directory``.

    Metrics come from the file logger, else from TensorBoard's event files, else from console logs (``*.log``,
    ``*.txt``, ``*.out``).

    Raises:
        InputError: there are no metrics of a verl run, or those of several.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError("there is no such folder", where=directory)
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    metrics, origin = _metrics(directory, files)
    found = ((p.name.removeprefix("global_step_"), p) for p in directory.rglob("global_step_*") if p.is_dir())
    return VerlOutput(
        directory=directory,
        metrics=metrics,
        origin=origin,
        rollouts=_rollouts(files),
        config=_config(files),
        checkpoints={int(step): path for step, path in found if step.isdecimal()},
    )


def our_names(data: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """verl's metrics of one step as ours: (metrics, seconds by stage, names of metrics that are not finite).

    Most names are the same. Timings go apart; ``reward/before_filter`` (and ``after_filter``) is the mean score of the
    samples, which verl's trainer does not filter.
    """
    metrics, seconds, not_finite = {}, {}, []
    for name, value in data.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if name.startswith("timing_s/"):
            stage = name.removeprefix("timing_s/")
            if stage in STAGES and not math.isfinite(value):
                not_finite.append(name)
            elif stage in STAGES:
                seconds[STAGES[stage]] = float(value)
        elif name.startswith(("timing_per_token_ms/", "perf/", "actor/perf/")):
            continue
        elif not math.isfinite(value):
            not_finite.append(name)
        else:
            metrics[name] = float(value)
    if "critic/score/mean" in metrics:
        score = metrics["critic/score/mean"]
        metrics.setdefault("reward/before_filter", score)
        metrics.setdefault("reward/after_filter", score)
    return metrics, {"step": 0.0, **seconds}, not_finite


def record_verl_run(
    source: Path,
    run_dir: Path,
    *,
    device: str,
    versions: Mapping[str, str] | None = None,
    translated: TrainConfig | None = None,
) -> VerlOutput:
    """Writes what verl left in ``source`` into ``run_dir``, in the form of our own runs.

    Args:
        source: a verl output folder; batches that were recorded in it are copied.
        run_dir: directory of the run; batches that were recorded are read for what verl's dump leaves out.
        device: label of the device it ran on.
        versions: package → version of the engine; what is not known is not claimed.
        translated: our configuration it was started from, if it was.

    Raises:
        InputError: nothing to read, or output that contradicts itself.
    """
    output = read_verl_output(source)
    if (source / BATCHES).is_dir() and not (run_dir / BATCHES).exists():
        shutil.copytree(source / BATCHES, run_dir / BATCHES)
    lines, scores, timings, not_finite = [], [], [], []
    for step, data in sorted(output.metrics.items()):
        if step < 1:
            continue
        metrics, seconds, odd = our_names(data)
        not_finite += [[step, name] for name in odd]
        derived, group = _from_samples(output, run_dir, step, n=_samples(output.config))
        lines.append({"step": step, **metrics, **derived})
        timings.append({"step": step, "seconds": seconds})
        if group is not None:
            scores.append(dataclasses.asdict(group))
    write_json(run_dir / "config.json", output.config or (translated.to_dict() if translated else {}))
    flat = flatten(output.config)
    identity = {
        "seed": _seed(flat),
        "device": device,
        "total_steps": len(lines),
        "filtered": bool(flat.get("algorithm.filter_groups.enable", False)) and bool(flat.get("trainer.use_v1", False)),
        "config": config_fingerprint(output.config),
        "provenance": {"engine": "verl", **{f"version of {k}": v for k, v in sorted((versions or {}).items())}},
    }
    about = {
        "engine": "verl",
        "versions": dict(versions or {}),
        "metrics_from": output.origin,
        "not_finite": not_finite,
        "checkpoints": {str(step): str(path) for step, path in sorted(output.checkpoints.items())},
    }
    write_json(run_dir / RUN, {**identity, "verl": about, "workers": []})
    for name, rows in ((METRICS, lines), (GROUPS, scores), (TIMINGS, timings)):
        text = "".join(json.dumps(row, sort_keys=True, allow_nan=False) + "\n" for row in rows)
        write_atomically(run_dir / name, lambda beside, text=text: beside.write_text(text, encoding="utf-8"))
    return output


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256 over every key that decides what a verl run computes; seeds, places and names are left out."""
    fields = {k: v for k, v in flatten(config).items() if not FREE_KEYS.fullmatch(k)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


# --- metrics ---------------------------------------------------------------------------------------------------------


def _metrics(directory: Path, files: Sequence[Path]) -> tuple[dict[int, dict[str, float]], str]:
    readers = (
        ("file", [p for p in files if p.suffix == ".jsonl"], _file_metrics),
        ("tensorboard", [p for p in files if p.name.startswith("events.out.tfevents")], _board_metrics),
        ("console", [p for p in files if p.suffix in (".log", ".txt", ".out")], _console_metrics),
    )
    for logger, candidates, read in readers:
        found = {path: series for path in candidates if (series := read(path))}
        if len(found) > 1:
            raise InputError(
                "this folder holds several verl runs",
                where=directory,
                expected="the output of one run",
                found=", ".join(str(p.relative_to(directory)) for p in found),
                next_step="name the folder of one of them",
            )
        if found:
            path, series = found.popitem()
            return series, f"{logger} logger: {path.relative_to(directory)}"
    raise InputError(
        "there are no metrics of a verl run",
        where=directory,
        expected="JSON lines of trainer.logger=[file], event files of [tensorboard], or a log with step:N lines",
        next_step="run verl with trainer.logger=[console,file]",
    )


def _file_metrics(path: Path) -> dict[int, dict[str, float]]:
    series: dict[int, dict[str, float]] = {}
    for entry in _json_lines(path):
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("data"), dict)
            or not isinstance(entry.get("step"), int)
        ):
            return {}
        # validation before the first step and the step itself may have a line each
        series.setdefault(entry["step"], {}).update(_numbers(entry["data"]))
    return series


def _board_metrics(path: Path) -> dict[int, dict[str, float]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return {}
    board = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    series: dict[int, dict[str, float]] = {}
    for name in board.Tags()["scalars"]:
        for event in board.Scalars(name):
            series.setdefault(event.step, {})[name] = float(event.value)
    return series if any("training/global_step" in step for step in series.values()) else {}


def _console_metrics(path: Path) -> dict[int, dict[str, float]]:
    series: dict[int, dict[str, float]] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _STEP.search(_COLOUR.sub("", line.rstrip()))
            if match is None:
                continue
            values = {}
            for pair in match[2].split(" - "):
                name, _, value = pair.rpartition(":")
                number = _NUMBER.match(value.strip())
                if name and number:
                    values[name] = float(number[1])
            series.setdefault(int(match[1]), {}).update(values)
    return series


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    return {k: _number(v) for k, v in data.items() if v is None or isinstance(v, (int, float))}


def _number(value: float | None) -> float:
    """``value``, NaN for none and an infinity for a whole number that no float holds."""
    try:
        return math.nan if value is None else value if math.isfinite(value) else float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _json_lines(path: Path, *, certain: bool = False) -> Iterable[Any]:
    """The JSON values of a file, line by line; a torn last line is left out.

    A file that does not begin with JSON yields nothing, unless it is ``certain`` that it is one of these.

    Raises:
        InputError: a line before others is no JSON.
    """
    torn: InputError | None = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if torn is not None:
                raise torn
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                if number == 1 and not certain:
                    return
                torn = InputError(f"a line is not JSON ({error})", where=f"{path}, line {number}")


# --- rollouts, configuration -----------------------------------------------------------------------------------------


def _rollouts(files: Sequence[Path]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for path in files:
        if path.suffix == ".jsonl" and path.stem.isdecimal():
            rows = [
                row
                for row in _json_lines(path, certain=True)
                if isinstance(row, dict) and {"input", "output", "score"} <= row.keys()
            ]
            # validation has a directory of its own, with the same names
            if rows and "val" not in path.parent.name:
                found[int(path.stem)] = rows
    return found


def _config(files: Sequence[Path]) -> dict[str, Any]:
    for path in files:
        if path.name == "config.yaml" and path.parent.name == ".hydra":
            return _resolved(path)
    return {}


def _resolved(path: Path) -> dict[str, Any]:
    import yaml

    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), hydra=True)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"the configuration is not YAML ({error})", where=path) from None
    if not isinstance(tree, dict):
        raise InputError("a configuration is a mapping", where=path, found=type(tree).__name__)
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        return _plain(tree)
    try:
        return _plain(OmegaConf.to_container(OmegaConf.create(tree), resolve=True))
    except (OmegaConfBaseException, ValueError, RecursionError):
        return _plain(tree)  # an interpolation of a resolver that only verl registers, or of a key that is not there


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: names are texts, and so is what JSON has no form for (infinities, dates, bytes)."""
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(below) for below in value]
    if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _seed(flat: Mapping[str, Any]) -> int:
    for name in ("actor_rollout_ref.rollout.seed", "data.seed"):
        if isinstance(flat.get(name), int):
            return flat[name]
    return 0


def _samples(config: Mapping[str, Any]) -> int:
    n = flatten(config).get("actor_rollout_ref.rollout.n", 1)
    return n if isinstance(n, int) and n > 0 else 1


def _from_samples(output: VerlOutput, run_dir: Path, step: int, *, n: int) -> tuple[dict[str, float], CurveStep | None]:
    """What single samples say about a step: metrics verl has under no name of ours, and its line of the curve."""
    rows, recorded = _checked(output, step), batch_path(run_dir, step)
    batch = read_batch(recorded) if recorded.exists() else None
    derived = _gap(batch.tensors) if batch is not None else {}
    if batch is not None:
        prompts = list(batch.prompt_ids)
        # The v1 trainer sorts its dump by names of its own.
        if len(rows) != len(batch) or "uid" in rows[0]:
            rows = [{}] * len(batch)
    else:
        asked = (str(row["input"]).encode("utf-8", "surrogatepass") for row in rows)
        prompts = [hashlib.sha256(text).hexdigest()[:16] for text in asked]
    if not prompts:
        return derived, None
    reward, score = _rewards(rows, batch.tensors if batch is not None else {}, output.metrics[step])
    values = {"reward": reward, "score": score}
    if batch is not None:
        values["response_length"] = (batch.tensors["response_mask"] != 0).sum(1).astype(float).tolist()
    if all(isinstance(row.get("acc"), (int, float)) and math.isfinite(_number(row["acc"])) for row in rows):
        values["correctness"] = [float(row["acc"]) for row in rows]
        derived["acc/before_filter"] = derived["acc/after_filter"] = math.fsum(values["correctness"]) / len(rows)
    derived["reward/before_filter"] = derived["reward/after_filter"] = math.fsum(values["score"]) / len(rows)
    scalars = {"log_prob_gap": derived[GAP]} if GAP in derived else {}
    try:
        group = CurveStep.from_samples(
            step=step, prompt_ids=prompts, uids=_groups(prompts, n), values=values, scalars=scalars
        )
    except InputError:
        # Groups cannot be told apart in this dump: there is no curve, but there are metrics.
        return derived, None
    return derived, group


def _checked(output: VerlOutput, step: int) -> Sequence[Mapping[str, Any]]:
    """The dumped rows of ``step``, whose scores are numbers."""
    rows = output.rollouts.get(step, [])
    for place, row in enumerate(rows, start=1):
        for name in ("score", "overlong_reward"):
            value = row.get(name)
            if value is None and name != "score":
                continue
            if not isinstance(value, (int, float)) or not math.isfinite(_number(value)):
                raise InputError(
                    "a dumped sample has a score that is no number",
                    where=f"{output.directory}: rollouts of step {step}, sample {place}: {name}",
                    expected="a finite number",
                    found=repr(value)[:80],
                )
    return rows


def _rewards(
    rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any], metrics: Mapping[str, float]
) -> tuple[list[float], list[float]]:
    """Reward and score (the reward before the overlong penalty, where the dump knows it) of every row.

    The dump's ``score`` is the reward, unless the reward function returns a ``score`` of its own, which then takes its
    place; the mean of the rewards, which the trainer logs, tells which of the two it is.
    """
    penalty = [float(row.get("overlong_reward") or 0.0) for row in rows]
    if "token_level_scores" in tensors:
        reward = tensors["token_level_scores"].astype(float).sum(1).tolist()
    else:
        shown = [float(row["score"]) for row in rows]
        mean = metrics.get("critic/score/mean", math.nan)
        with_penalty = [s + p for s, p in zip(shown, penalty, strict=True)]
        replaced = abs(math.fsum(with_penalty) / len(rows) - mean) < abs(math.fsum(shown) / len(rows) - mean)
        reward = with_penalty if replaced else shown
    return reward, [r - p for r, p in zip(reward, penalty, strict=True)]


def _gap(tensors: Mapping[str, Any]) -> dict[str, float]:
    if not {"rollout_log_probs", "old_log_probs", "response_mask"} <= tensors.keys():
        return {}
    import torch

    from alignment.rl.metrics import log_prob_gap

    arrays = (torch.from_numpy(tensors[name]) for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    return log_prob_gap(*arrays)


def _groups(prompts: Sequence[str], n: int) -> list[str]:
    """A prompt that came up several times in one batch has several groups of ``n``."""
    seen: dict[str, int] = {}
    groups = []
    for prompt in prompts:
        count = seen[prompt] = seen.get(prompt, -1) + 1
        groups.append(f"{prompt}@{count // n}")
    return groups
