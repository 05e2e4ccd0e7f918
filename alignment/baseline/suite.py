"""``alignment run``: every layer of checks in the order of their cost, then a whole training run, all against baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from alignment.baseline.provenance import provenance_of
from alignment.baseline.store import BaselineStore
from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.files import write_json
from alignment.numerics.verdict import Divergence, Outcome, Verdict
from alignment.rl.config import TrainConfig, load_config

PARTS = ("unit", "layer", "weight_sync", "replay", "curve")
# The seed of a judged run: the baselines use others, so no run is compared with a copy of itself.
JUDGED_SEED = 7


class SuiteProgress(Protocol):
    """What draws progress; it is also told about the stages and steps of training runs."""

    def begin(self, part: str, total: int) -> None:
        """A part of ``total`` checks or steps begins."""

    def advance(self, note: str = "") -> None:
        """One of them is done."""

    def on_stage(self, step: int, total_steps: int, stage: str) -> None:
        """A stage of a training step begins."""

    def on_step(self, step: int, total_steps: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """A training step has ended."""


@dataclass(frozen=True, kw_only=True)
class SuiteSetting:
    """What a run of the suite judges.

    Attributes:
        device: where the subjects compute.
        baselines: folder of the stored baselines.
        run_dir: where the run leaves its files.
        config: preset (or YAML file) of the training run; its name is that of its end-to-end baselines.
        overrides: dotted changes to it. What changes the experiment itself has no baseline and is an error.
        parts: which of :data:`PARTS`.
        subjects: implementations to judge; all without any.
        executor: ``ray`` or ``inprocess``.
        worker_setup: ``module:function`` that every worker process calls first.
    """

    device: Device
    baselines: Path
    run_dir: Path
    config: str = "dapo-tiny"
    overrides: tuple[str, ...] = ()
    parts: tuple[str, ...] = PARTS
    subjects: tuple[str, ...] = ()
    executor: str = "ray"
    worker_setup: str | None = None

    def checked(self) -> SuiteSetting:
        """Itself, if everything that can be known before the first check is right.

        Raises:
            InputError: no such folder, part, subject or configuration.
        """
        from alignment.backends.subject import SUBJECTS

        if not self.baselines.is_dir():
            raise InputError("the folder of the baselines does not exist", where="--baseline", found=self.baselines)
        known = sorted({entry.name for entry in SUBJECTS})
        for name in self.subjects:
            if name not in known:
                raise InputError("there is no such subject", where="--subject", expected=", ".join(known), found=name)
        self.training_config()
        return self

    def in_directory(self, run_dir: Path) -> SuiteSetting:
        """The same, leaving its files in ``run_dir``."""
        return dataclasses.replace(self, run_dir=run_dir)

    def training_config(self) -> TrainConfig:
        """The configuration of the judged training runs: their own seed unless the user names one."""
        fixed = ("trainer.resume_mode=disable", "trainer.save_freq=0", f"trainer.seed={JUDGED_SEED}")
        return load_config(self.config, [*fixed, *self.overrides])

    @property
    def preset(self) -> str:
        """The name under which end-to-end baselines of the configuration are stored."""
        return Path(self.config).stem


def run_suite(setting: SuiteSetting, progress: SuiteProgress) -> list[Verdict]:
    """Every verdict of the chosen parts, in order. A part that cannot be carried out is an ERROR, and the rest goes on."""
    from alignment.devices.determinism import deterministic

    hashes = {"config": setting.training_config().config_hash()}
    write_json(setting.run_dir / "provenance.json", provenance_of(setting.device, hashes=hashes).to_dict())
    judges = {"unit": _cases, "layer": _cases, "weight_sync": _weight_sync, "replay": _replay, "curve": _curve}
    verdicts: list[Verdict] = []
    with deterministic(JUDGED_SEED, setting.device):
        for part in setting.parts:
            try:
                # One by one, so that what was judged before an error is kept.
                for verdict in judges[part](part, setting, progress):
                    verdicts.append(verdict)
            except Exception as error:  # a kernel that fails, no memory, …: it says nothing about alignment
                verdicts.append(_error(part, setting, error))
    return verdicts


def _error(part: str, setting: SuiteSetting, error: Exception) -> Verdict:
    expected = isinstance(error, InputError)
    return _undecided(
        part,
        setting,
        Outcome.ERROR,
        str(error) if expected else f"{type(error).__name__}: {error}",
        next_command=error.next_step if expected else f"alignment run --only {part} --device {setting.device.kind}",
    )


def _undecided(
    part: str, setting: SuiteSetting, outcome: Outcome, reason: str, *, next_command: str | None = None
) -> Verdict:
    layer = part if part in ("unit", "layer") else "e2e"
    return Verdict(
        check=f"{layer}/{part}",
        layer=layer,
        stage=part,
        subject=", ".join(setting.subjects) or "golden",
        device=setting.device.label,
        outcome=outcome,
        reason=reason,
        next_command=next_command,
    )


def _cases(part: str, setting: SuiteSetting, progress: SuiteProgress) -> Iterator[Verdict]:
    from alignment.backends.catalogue import cases
    from alignment.backends.subject import subject_entries
    from alignment.baseline.check import check_case

    store, device = BaselineStore(setting.baselines), setting.device
    subjects = [e.load() for e in subject_entries(part, names=setting.subjects) if device.kind in e.kinds]
    work = [(case, subject) for case in cases(part) for subject in subjects if subject.supports(case)]
    if not work:
        yield _undecided(part, setting, Outcome.UNAVAILABLE, f"no such subject computes a case of this layer on {device.kind}")
        return
    progress.begin(part, len(work))
    for case, subject in work:
        yield check_case(case, subject, device, store)
        progress.advance(case.id)


def _weight_sync(part: str, setting: SuiteSetting, progress: SuiteProgress) -> list[Verdict]:
    from alignment.backends.golden_sync import golden_weight_sync

    progress.begin(part, 1)
    verdicts = golden_weight_sync(setting.device)
    progress.advance()
    return verdicts


def _replay(part: str, setting: SuiteSetting, progress: SuiteProgress) -> list[Verdict]:
    from alignment.baseline.runs import REPLAY_PRESETS, REPLAY_SEED, judge_replay, select_replay, torch_name
    from alignment.rl.run import replay_steps

    device = setting.device
    if setting.preset not in REPLAY_PRESETS:
        reason = f"rollouts are recorded for {', '.join(REPLAY_PRESETS)} only"
        return [_undecided(part, setting, Outcome.UNAVAILABLE, reason)]
    stored = select_replay(setting.baselines, setting.preset, kind=device.kind, chip=device.fingerprint().chip)
    config = setting.training_config()
    # The recorded rollouts are those of this seed, whichever one the user trains with.
    trainer = dataclasses.replace(config.trainer, seed=REPLAY_SEED, total_training_steps=stored.steps)
    config = dataclasses.replace(config, trainer=trainer)
    progress.begin(part, stored.steps)
    replay = replay_steps(
        config, record=stored.record, run_dir=setting.run_dir / part, device=torch_name(device)
    )
    for _ in range(stored.steps):
        progress.advance()
    return [judge_replay(stored, replay, subject="golden", device=device)]


def _curve(part: str, setting: SuiteSetting, progress: SuiteProgress) -> list[Verdict]:
    """A free-running training run; where it does not decide, up to two more with other seeds."""
    from alignment.baseline.runs import select_curves, torch_name
    from alignment.numerics import curves
    from alignment.rl.run import run_dapo

    device = setting.device
    stored = select_curves(setting.baselines, setting.preset, kind=device.kind, chip=device.fingerprint().chip)
    runs: list[curves.CurveRun] = []
    metrics: list[dict[str, float]] = []
    while True:
        config = setting.training_config()
        if runs:
            trainer = dataclasses.replace(config.trainer, seed=_unused_seed(runs[-1].seed, stored.runs))
            config = dataclasses.replace(config, trainer=trainer)
        name = "dapo" if not runs else f"dapo-{len(runs) + 1}"
        progress.begin(name, config.trainer.total_training_steps or 0)
        result = run_dapo(
            config,
            run_dir=setting.run_dir / name,
            executor=setting.executor,
            device=torch_name(device),
            progress=progress,
            worker_setup=setting.worker_setup if setting.executor == "ray" else None,
        )
        runs.append(result.curve)
        metrics = metrics or result.metrics
        gate = curves.paired_gate if config.curve_gate == "paired" else curves.unpaired_gate
        results = [
            gate(stored.runs, runs, metric=metric) for metric in (curves.REWARD, curves.RESPONSE_LENGTH)
        ]
        undecided = any(r.outcome is Outcome.INCONCLUSIVE and r.more_runs for r in results)
        if not undecided or any(r.outcome in (Outcome.FAIL, Outcome.ERROR) for r in results):
            break
    another = _unused_seed(runs[-1].seed, stored.runs)
    again = f"alignment run --only curve --config {setting.config} --device {device.kind} trainer.seed={another}"
    verdicts = [_identities(setting, stored.runs, config=setting.training_config(), metrics=metrics)]
    verdicts += [
        result.verdict(
            check=f"e2e/curve-{setting.preset}-{result.metric}",
            subject="golden",
            device=device.label,
            baseline=stored.title,
            next_command=None if result.outcome is Outcome.PASS else again,
        )
        for result in results
    ]
    return verdicts


def _unused_seed(seed: int, baselines) -> int:
    """The next seed that no baseline sampled with."""
    seed += 1
    while any(run.seed == seed for run in baselines):
        seed += 1
    return seed


def _identities(setting: SuiteSetting, baselines, *, config: TrainConfig, metrics: Sequence[Mapping[str, float]]) -> Verdict:
    from alignment.baseline.identities import judge_identities
    from alignment.rl.run import located
    from alignment.weights.checkpoint import load_config as load_model_config

    model = load_model_config(Path(located(config).actor_rollout_ref.model.path))
    measures = judge_identities(metrics, baselines, config=config, model=model)
    outside = [m for m in measures if not m.within]
    where = None
    if outside:
        first = outside[0]
        stage = "rollout" if "rollout" in first.name else "actor_update"
        where = Divergence(stage=stage, module="actor", quantity=first.name)
    return Verdict(
        check="e2e/identities",
        layer="e2e",
        stage=where.stage if where else "actor_update",
        subject="golden",
        device=setting.device.label,
        outcome=Outcome.FAIL if outside else Outcome.PASS,
        reason=(
            f"{outside[0].name} = {outside[0].value:.4g} breaks an identity ({outside[0].origin})"
            if outside
            else f"{len(measures)} identities hold in all {len(metrics)} steps"
        ),
        measures=tuple(measures),
        where=where,
        next_command="alignment run --only layer,weight_sync,replay" if outside else None,
    )


