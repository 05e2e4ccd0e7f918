"""End-to-end baselines: five sampled curves per setting, and recorded rollouts with the envelope of their replay.

``<root>/<kind>/<chip>/e2e/<preset>.curves.json`` beside ``.safetensors`` holds :class:`CurveRun` objects, their
per-prompt statistics as tensors. ``…/<preset>.replay/`` holds the recorded rollouts as the mock rollout writes them and
``replay.json``: the metrics of the replay, and per metric the :class:`Envelope` of at least five benignly perturbed ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from alignment.baseline.provenance import Provenance, content_hash, provenance_of
from alignment.baseline.record import refuse_unfit
from alignment.baseline.select import MissingBaseline, fallback_order
from alignment.baseline.store import chip_slug
from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.files import read_json, sync_directory, write_atomically, write_json
from alignment.numerics.budget import Envelope
from alignment.numerics.curve_run import CURVE_SCHEMA, CurveRun
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict
from alignment.rl.config import RunConfig, SkipConfig, TrainConfig, load_config
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_run import run_gkd
from alignment.rl.run import RunResult, replay_steps, run_dapo

SCHEMA = 1
GKD_PRESETS = ("gkd-tiny",)
PRESETS = ("dapo-tiny", "dapo-tiny-four-updates", "dapo-tiny-filtered", *GKD_PRESETS)
REPLAY_PRESETS = ("dapo-tiny", "dapo-tiny-four-updates")
# Never the seed of a judged run: a budget is not measured on what it judges.
CURVE_SEEDS = (101, 102, 103, 104, 105)
REPLAY_SEED = 101
REPLAY_STEPS = 4
ONE_ULP, MICRO_BATCHES = "one-ulp weights", "other micro batches"
REPLAY_FILE = "replay.json"
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ReplayMetric:
    """A metric that a replay is judged by, the stage it accuses, and what its roundoff floor is relative to.

    ``scale`` names another metric of the same step, or is a number in the metric's unit; None is the metric itself.
    """

    name: str
    stage: str
    module: str
    scale: str | float | None = None
    unit: str = ""


# In the order of the pipeline, so that the first one outside its envelope is where things part.
REPLAY_METRICS = (
    ReplayMetric(name="response_length/mean", stage="rollout", module="recorded responses", unit="tokens"),
    ReplayMetric(name="reward/before_filter", stage="reward", module="reward function", scale=1.0),
    ReplayMetric(
        name="training/rollout_log_probs_abs_diff_mean", stage="old_log_prob", module="actor", scale=1.0, unit="nats"
    ),
    ReplayMetric(name="actor/entropy", stage="actor_update", module="response tokens", unit="nats"),
    # On the first update the policy loss is about 0 by construction; its terms are not.
    ReplayMetric(name="actor/loss", stage="actor_update", module="policy loss", scale="actor/pg_scale"),
    ReplayMetric(name="actor/grad_norm", stage="actor_update", module="backward"),
)


@dataclass(frozen=True, kw_only=True)
class CurveBaseline:
    """Stored curves of one setting on one chip."""

    path: Path
    preset: str
    runs: tuple[CurveRun, ...]
    provenance: Provenance
    step: str = ""

    @property
    def title(self) -> str:
        return _title(self.path, self.provenance, self.step)


@dataclass(frozen=True, kw_only=True)
class ReplayBaseline:
    """Recorded rollouts (``record``, a folder) and the envelopes their replay has to stay in, by metric."""

    path: Path
    preset: str
    steps: int
    config: str
    envelopes: Mapping[str, Envelope]
    provenance: Provenance
    step: str = ""

    @property
    def record(self) -> Path:
        return self.path.parent

    @property
    def title(self) -> str:
        return _title(self.path.parent, self.provenance, self.step)


def _title(path: Path, provenance: Provenance, step: str) -> str:
    where = "/".join(path.parts[-4:])
    text = f"{where}, recorded {provenance.date[:10]} at {provenance.commit[:12]} with {provenance.stack}"
    return f"{text} ({step})" if step else text


def e2e_folder(root: Path, *, kind: str, chip: str) -> Path:
    return Path(root) / kind / chip_slug(chip) / "e2e"


# Recording.


def preset_config(preset: str) -> RunConfig:
    """A preset of the pipeline it belongs to."""
    return load_config(preset, kind=GkdConfig if preset in GKD_PRESETS else TrainConfig)


def recording_config(preset: str, *, seed: int, steps: int | None = None, dump: str | None = None) -> RunConfig:
    """A preset as it is recorded: no checkpoints, no resuming, its own seed, and rollouts dumped where asked."""
    config = preset_config(preset)
    trainer = dataclasses.replace(
        config.trainer,
        seed=seed,
        save_freq=-1,
        resume_mode="disable",
        logger=("jsonl",),
        total_training_steps=steps or config.trainer.total_training_steps,
    )
    policy = config.actor_rollout_ref
    if dump:
        rollout = dataclasses.replace(policy.rollout, skip=SkipConfig(enable=True, dump_dir=dump))
        policy = dataclasses.replace(policy, rollout=rollout)
    return dataclasses.replace(config, trainer=trainer, actor_rollout_ref=policy)


def record_curves(
    root: Path,
    preset: str,
    device: Device,
    *,
    work: Path,
    seeds: Sequence[int] = CURVE_SEEDS,
    steps: int | None = None,
    report: Report = lambda line: None,
) -> Path:
    """Runs a setting once per seed and stores the curves; runs that are finished in ``work`` are not run again.

    Raises:
        InputError: an emulated device, a dirty tree, or a run that cannot work.
    """
    refuse_unfit(device)
    provenance = provenance_of(device, hashes={"config": preset_config(preset).config_hash()})
    run = run_gkd if preset in GKD_PRESETS else run_dapo
    runs = []
    for seed in seeds:
        done = work / f"{preset}-seed-{seed}.json"
        if not _finished(done, provenance.commit):
            config = recording_config(preset, seed=seed, steps=steps)
            run_dir = work / f"{preset}-seed-{seed}"
            shutil.rmtree(run_dir, ignore_errors=True)
            result = run(config, run_dir=run_dir, device=torch_name(device))
            write_json(done, {"commit": provenance.commit, "curve": json.loads(result.curve.to_json())})
            shutil.rmtree(run_dir, ignore_errors=True)
            report(f"{preset}: seed {seed}, {result.curve.total_steps} steps")
        runs.append(CurveRun.from_json(json.dumps(read_json(done)["curve"])))
    fingerprint = provenance.fingerprint
    path = e2e_folder(root, kind=fingerprint["kind"], chip=fingerprint["chip"]) / f"{preset}.curves.json"
    write_curves(path, preset, runs, provenance)
    return path


def _finished(path: Path, commit: str) -> bool:
    return path.is_file() and read_json(path).get("commit") == commit


def torch_name(device: Device) -> str:
    """The name by which workers get the same device."""
    return "cpu" if device.kind == "cpu" else f"{device.kind}:{device.index}"


def record_replay(
    root: Path,
    preset: str,
    device: Device,
    *,
    work: Path,
    steps: int = REPLAY_STEPS,
    report: Report = lambda line: None,
) -> Path:
    """Records rollouts of a setting, replays them, and measures the envelope with six perturbed replays.

    Three replays start from weights moved by one ulp, three split the mini batches otherwise. The judged replay is
    unperturbed, so none of them is it.

    Raises:
        InputError: an emulated device, a dirty tree, or a run that cannot work.
    """
    refuse_unfit(device)
    name = torch_name(device)
    config = recording_config(preset, seed=REPLAY_SEED, steps=steps, dump="rollouts")
    recorded = work / f"{preset}-replay"
    shutil.rmtree(recorded, ignore_errors=True)
    run_dapo(config, run_dir=recorded / "run", device=name)
    record = recorded / "run" / "rollouts"
    base = replay_steps(config, record=record, run_dir=recorded / "base", device=name)
    replays, identities = [], []
    for seed in range(REPLAY_SEED + 1, REPLAY_SEED + 4):
        replays.append(
            replay_steps(config, record=record, run_dir=recorded / f"ulp-{seed}", device=name, perturbation=seed)
        )
        identities.append((seed, ONE_ULP))
    for parts in (2, 3, 5):
        split = _other_micro_batches(config, parts)
        replays.append(replay_steps(split, record=record, run_dir=recorded / f"split-{parts}", device=name))
        identities.append((parts, MICRO_BATCHES))
        report(f"{preset}: replayed with {MICRO_BATCHES}, 1/{parts} of the tokens each")
    envelopes = envelopes_of(base, replays, identities, config=config, device=device)
    provenance = provenance_of(device, hashes={"config": config.config_hash()})
    fingerprint = provenance.fingerprint
    target = e2e_folder(root, kind=fingerprint["kind"], chip=fingerprint["chip"]) / f"{preset}.replay"
    write_replay(
        target / REPLAY_FILE,
        record,
        preset=preset,
        config=base.curve.config,
        steps=steps,
        envelopes=envelopes,
        provenance=provenance,
    )
    shutil.rmtree(recorded, ignore_errors=True)
    return target / REPLAY_FILE


def _other_micro_batches(config: TrainConfig, parts: int) -> TrainConfig:
    actor = config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = max(longest, actor.ppo_max_token_len_per_gpu // parts)
    actor = dataclasses.replace(actor, ppo_max_token_len_per_gpu=tokens)
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(config.actor_rollout_ref, actor=actor))


def envelopes_of(
    base: RunResult,
    replays: Sequence[RunResult],
    identities: Sequence[tuple[int, str]],
    *,
    config: TrainConfig,
    device: Device,
) -> dict[str, Envelope]:
    """The envelope of every metric of :data:`REPLAY_METRICS`.

    Its floor is the roundoff of a mean over all response tokens of a step, in the dtype of the model.
    """
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    tokens = max(1, round(samples * max(row["response_length/mean"] for row in base.metrics)))
    made = {}
    for metric in REPLAY_METRICS:
        values = [row[metric.name] for row in base.metrics]
        if isinstance(metric.scale, str):
            scale = [abs(row[metric.scale]) for row in base.metrics]
        else:
            scale = [abs(value) if metric.scale is None else metric.scale for value in values]
        made[metric.name] = Envelope.from_replays(
            metric.name,
            values,
            [[row[metric.name] for row in replay.metrics] for replay in replays],
            seeds=[seed for seed, _ in identities],
            perturbation=[kind for _, kind in identities],
            device=device.label,
            dtype=config.actor_rollout_ref.model.dtype,
            reduction_length=tokens,
            scale=scale,
            steps=[int(row["step"]) for row in base.metrics],
            unit=metric.unit,
        )
    return made


# Judging a replay.


def judge_replay(baseline: ReplayBaseline, replay: RunResult, *, subject: str, device: Device) -> Verdict:
    """The metrics of a replay of ``baseline.record`` against their envelopes, step by step and stage by stage.

    Returns:
        FAIL names the first step, and in it the first stage, that left its envelope; ERROR another configuration.
    """
    measures: list[Measure] = []
    outside: list[tuple[int, int, ReplayMetric, Measure]] = []

    def verdict(outcome: Outcome, reason: str, where: Divergence | None = None) -> Verdict:
        return Verdict(
            check=f"e2e/replay-{baseline.preset}",
            layer="e2e",
            stage=where.stage if where else "actor_update",
            subject=subject,
            device=device.label,
            outcome=outcome,
            reason=reason,
            measures=tuple(measures),
            where=where,
            baseline=baseline.title,
            next_command=None if outcome is Outcome.PASS else f"alignment run --only replay --config {baseline.preset} --device {torch_name(device)}",
        )

    if replay.curve.config != baseline.config:
        return verdict(Outcome.ERROR, "the replayed configuration, model or data is not the recorded one")
    for order, metric in enumerate(REPLAY_METRICS):
        values = [row.get(metric.name, float("nan")) for row in replay.metrics]
        try:
            steps = [int(row["step"]) for row in replay.metrics]
            judged = baseline.envelopes[metric.name].judge_steps(
                values, run_seed=replay.curve.seed, run_perturbation="none", steps=steps
            )
        except InputError as error:
            return verdict(Outcome.ERROR, str(error))
        measures += judged
        outside += [(step, order, metric, m) for step, m in zip(steps, judged, strict=True) if not m.within]
    if outside:
        step, _, metric, measure = min(outside, key=lambda found: found[:2])
        where = Divergence(stage=metric.stage, module=metric.module, quantity=metric.name, detail=f"step {step}")
        return verdict(
            Outcome.FAIL, f"{measure.name} is {measure.value:.4g} from the baseline, allowed {measure.bound:.4g} ({measure.origin})", where
        )
    worst = max(measures, key=lambda m: m.used)
    return verdict(Outcome.PASS, f"{len(replay.metrics)} replayed steps inside their envelopes; {worst.name} used most: {worst.used:.0%}")


# Files.


def write_curves(path: Path, preset: str, runs: Sequence[CurveRun], provenance: Provenance) -> None:
    """Both files of a curve baseline; numbers per prompt go to the tensors, everything else to the JSON."""
    prompts: dict[str, list[str]] = {}
    tensors, described = {}, []
    for index, run in enumerate(runs):
        data = json.loads(run.to_json())
        for place, step in enumerate(data["steps"]):
            for name, statistics in step["groups"].items():
                for key, values in statistics.items():
                    tensors[f"{index}/{place}/{name}/{key}"] = torch.tensor([float(v) for v in values], dtype=torch.float64)
            ids = step.pop("prompt_ids")
            step["prompts"] = content_hash(ids)[:16]
            prompts[step["prompts"]] = ids
            step["groups"] = sorted(step["groups"])
        described.append(data)
    beside = path.with_suffix(".safetensors")
    write_atomically(beside, lambda target: save_file(tensors, target))
    data = {
        "schema": SCHEMA,
        "what": "curves",
        "preset": preset,
        "provenance": provenance.to_dict(),
        "prompts": prompts,
        "runs": described,
        "tensors": hashlib.sha256(beside.read_bytes()).hexdigest(),
    }
    write_json(path, {**data, "content": content_hash(data)})


def load_curves(path: Path, *, step: str = "") -> CurveBaseline:
    """A curve baseline.

    Raises:
        InputError: missing, damaged or edited.
    """
    data = _checked_json(path, "curves")
    beside = path.with_suffix(".safetensors")
    if not beside.is_file() or hashlib.sha256(beside.read_bytes()).hexdigest() != data["tensors"]:
        raise InputError("the tensors of the curves are missing or damaged", where=beside, next_step=_record_next(path))
    tensors = load_file(beside)
    runs = []
    for index, run in enumerate(data["runs"]):
        for place, entry in enumerate(run["steps"]):
            entry["prompt_ids"] = data["prompts"][entry.pop("prompts")]
            entry["groups"] = {
                name: {key: tensors[f"{index}/{place}/{name}/{key}"].tolist() for key in ("mean", "variance")}
                for name in entry["groups"]
            }
        runs.append(CurveRun.from_json(json.dumps(run | {"schema": CURVE_SCHEMA})))
    provenance = Provenance.from_dict(data["provenance"])
    return CurveBaseline(path=path, preset=data["preset"], runs=tuple(runs), provenance=provenance, step=step)


def write_replay(
    path: Path,
    record: Path,
    *,
    preset: str,
    config: str,
    steps: int,
    envelopes: Mapping[str, Envelope],
    provenance: Provenance,
) -> None:
    """The folder of a replay baseline: the recorded rollouts beside ``replay.json``; an older one is replaced whole."""
    beside = path.parent.with_name(f".{path.parent.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    files = {}
    for source in sorted(record.iterdir()):
        shutil.copyfile(source, beside / source.name)
        files[source.name] = hashlib.sha256(source.read_bytes()).hexdigest()
    data = {
        "schema": SCHEMA,
        "what": "replay",
        "preset": preset,
        "config": config,
        "steps": steps,
        "files": files,
        "envelopes": {name: envelope.to_dict() for name, envelope in envelopes.items()},
        "provenance": provenance.to_dict(),
    }
    write_json(beside / path.name, {**data, "content": content_hash(data)})
    shutil.rmtree(path.parent, ignore_errors=True)
    beside.rename(path.parent)
    sync_directory(path.parent.parent)


def load_replay(path: Path, *, step: str = "") -> ReplayBaseline:
    """A replay baseline.

    Raises:
        InputError: missing, damaged or edited, its rollouts included.
    """
    data = _checked_json(path, "replay")
    for name, expected in data["files"].items():
        file = path.parent / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != expected:
            raise InputError("a recorded rollout is missing or damaged", where=file, next_step=_record_next(path))
    return ReplayBaseline(
        path=path,
        preset=data["preset"],
        steps=data["steps"],
        config=data["config"],
        envelopes={name: Envelope.from_dict(value) for name, value in data["envelopes"].items()},
        provenance=Provenance.from_dict(data["provenance"]),
        step=step,
    )


def _checked_json(path: Path, what: str) -> dict:
    data = read_json(path)
    if not isinstance(data, dict) or data.get("what") != what or data.get("schema") != SCHEMA:
        raise InputError(f"the file holds no {what} of this schema", where=path, expected=f"{what}, schema {SCHEMA}")
    stated = data.pop("content", None)
    if stated != content_hash(data):
        raise InputError(
            f"the {what} file is damaged or was edited: its content does not match its hash",
            where=path,
            expected=stated,
            found=content_hash(data),
            next_step=_record_next(path),
        )
    return data


def _record_next(path: Path) -> str:
    return f"restore {path} from version control, or record it again: alignment baseline record --layer e2e"


def select_curves(root: Path, preset: str, *, kind: str, chip: str) -> CurveBaseline:
    """The curves a run on a device is judged by, in the order of :func:`alignment.baseline.select.fallback_order`.

    Raises:
        MissingBaseline: there are none.
    """
    path, step = _select(root, f"{preset}.curves.json", preset, kind=kind, chip=chip)
    return load_curves(path, step=step)


def select_replay(root: Path, preset: str, *, kind: str, chip: str) -> ReplayBaseline:
    """The recorded rollouts a replay on a device is judged by; see :func:`select_curves`."""
    path, step = _select(root, f"{preset}.replay/{REPLAY_FILE}", preset, kind=kind, chip=chip)
    return load_replay(path, step=step)


def _select(root: Path, name: str, preset: str, *, kind: str, chip: str) -> tuple[Path, str]:
    tried = fallback_order(kind, chip)
    for step in tried:
        slug = chip_slug(step.chip) if step.chip else "*"
        found = sorted(Path(root).glob(f"{step.kind}/{slug}/e2e/{name}"))
        if found:
            return max(found, key=lambda path: str(read_json(path).get("provenance", {}).get("date", ""))), step.name
    raise MissingBaseline(
        "there is no end-to-end baseline for this setting",
        where=f"{name} in {root}",
        expected=" → ".join(map(str, tried)),
        found="none of them",
        next_step=f"alignment baseline record --layer e2e --case {preset} --device {'cpu' if kind == 'npu' else kind}",
    )
