"""Curves of distillation: recorded by its own pipeline, and gated like those of DAPO."""

from __future__ import annotations

import dataclasses
import math

import pytest

from alignment.baseline.gkd_curves import METRICS, judge_gkd
from alignment.baseline.provenance import provenance_of
from alignment.baseline.runs import (
    GKD_PRESETS,
    PRESETS,
    e2e_folder,
    load_curves,
    preset_config,
    record_curves,
    recording_config,
    write_curves,
)
from alignment.baseline.select import MissingBaseline
from alignment.errors import InputError
from alignment.numerics.curve_run import CurveRun, CurveStep
from alignment.numerics.random import portable_normal
from alignment.numerics.verdict import Outcome
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.run import RunResult

STEPS, GROUP = 20, 32


def learned(seed: int, *, gain: float = 0.2, prompts: str = "batch") -> CurveRun:
    """A student whose agreement rises by ``gain`` and whose divergence falls, with noise of its seed."""
    noise = portable_normal((STEPS, 2, GROUP), seed=seed, stream="gkd-curves") * 0.02
    steps = []
    for t in range(STEPS):
        part = (t + 1) / STEPS
        agreement = (0.5 + gain * part + noise[t, 0]).tolist()
        divergence = (0.3 - gain * part + noise[t, 1]).tolist()
        values = {"agreement": agreement, "divergence": divergence, "response_length": [4.0] * GROUP}
        steps.append(CurveStep.from_samples(step=t + 1, prompt_ids=[f"{prompts}{t}"] * GROUP, values=values))
    return CurveRun(seed=seed, device="cpu", config="f" * 64, total_steps=STEPS, filtered=False, steps=tuple(steps))


@pytest.fixture
def stored(tmp_path, commit, cpu):
    folder = e2e_folder(tmp_path, kind="cpu", chip=cpu.fingerprint().chip)
    write_curves(folder / "gkd-tiny.curves.json", "gkd-tiny", [learned(s) for s in range(101, 106)], provenance_of(cpu))
    return tmp_path


def judge(stored, cpu, **curve):
    asked = []

    def run(config: GkdConfig, before: int) -> RunResult:
        asked.append(config.trainer.seed)
        return RunResult(directory=stored, metrics=[], curve=learned(config.trainer.seed, **curve))

    config = preset_config("gkd-tiny")
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, seed=7))
    runs, verdicts = judge_gkd(config, "gkd-tiny", baselines=stored, device=cpu, run=run)
    assert len(runs) == len(asked) == len(set(asked))
    return verdicts


def test_a_student_that_learns_alike_passes(stored, cpu):
    verdicts = judge(stored, cpu)
    assert [v.outcome for v in verdicts] == [Outcome.PASS] * len(METRICS)
    assert [v.check for v in verdicts] == ["e2e/curve-gkd-tiny-agreement", "e2e/curve-gkd-tiny-divergence"]


def test_a_student_that_learns_half_as_much_fails_in_the_update(stored, cpu):
    verdicts = judge(stored, cpu, gain=0.1)
    assert [v.outcome for v in verdicts] == [Outcome.FAIL] * len(METRICS)
    assert {v.stage for v in verdicts} == {"update_student"}
    assert verdicts[0].next_command.startswith("alignment gkd --baseline baselines --config gkd-tiny")


def test_other_prompts_are_no_pass(stored, cpu):
    assert {v.outcome for v in judge(stored, cpu, prompts="other")} == {Outcome.ERROR}


def test_no_baseline_says_how_to_record_one(tmp_path, cpu):
    with pytest.raises(MissingBaseline, match="alignment baseline record --layer e2e --case gkd-tiny"):
        judge(tmp_path, cpu)


def test_presets_belong_to_their_pipeline():
    assert set(GKD_PRESETS) < set(PRESETS) and isinstance(preset_config("gkd-tiny"), GkdConfig)
    config = recording_config("gkd-tiny", seed=103, steps=5)
    assert isinstance(config, GkdConfig) and config.trainer.seed == 103 and config.trainer.total_training_steps == 5
    # The schedule and the data are the same in every run; what the student samples is not.
    assert config.gkd.seed == 42 and config.data.seed == preset_config("gkd-tiny").data.seed


def test_recording_runs_the_pipeline(tmp_path, commit, cpu):
    path = record_curves(tmp_path, "gkd-tiny", cpu, work=tmp_path / "work", seeds=(101, 102), steps=2)
    found = load_curves(path)
    assert path.name == "gkd-tiny.curves.json" and [r.seed for r in found.runs] == [101, 102]
    first, second = (run.steps[0] for run in found.runs)
    assert first.prompt_hash == second.prompt_hash and first.group_size == 64
    assert all(
        math.isfinite(step.groups[m.name].grand_mean) for run in found.runs for step in run.steps for m in METRICS
    )


def test_the_folder_has_to_exist(tmp_path, cpu):
    with pytest.raises(InputError):
        judge(tmp_path / "nowhere", cpu)
