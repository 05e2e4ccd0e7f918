"""A distillation run against the stored curves of its preset: does the student come as near to its teacher, as fast?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from alignment.baseline.runs import select_curves
from alignment.devices.base import Device
from alignment.numerics.curves import CurveMetric, CurveResult, nightly_gate
from alignment.numerics.verdict import Outcome, Verdict
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.run import RunResult

# Without a least margin: what counts is a share of what the baseline runs gained. A student gains little over the spread of
# its seeds (its batches are its own answers or the data set's, by lot), too little for a bounded deficit to be shown by
# three runs. So the nightly gate judges: red where a deficit is significant, green where none was found, and its reason
# says which deficit would have been.
AGREEMENT = CurveMetric(name="agreement", higher_is_better=True, least_margin=0.0)
DIVERGENCE = CurveMetric(name="divergence", higher_is_better=False, least_margin=0.0, unit="nats")
METRICS = (AGREEMENT, DIVERGENCE)


def judge_gkd(
    config: GkdConfig,
    preset: str,
    *,
    baselines: Path,
    device: Device,
    run: Callable[[GkdConfig, int], RunResult],
) -> tuple[list[RunResult], list[Verdict]]:
    """Runs a configuration, up to three times with other seeds where one run does not decide, and judges its curves.

    Args:
        config: of the run; its prompts are those of the baseline, so runs are paired.
        preset: name under which the baselines are stored.
        baselines: their folder.
        device: where it runs.
        run: (configuration, how many ran before) → a finished run.

    Raises:
        MissingBaseline: there are no curves of the preset.
    """
    stored = select_curves(baselines, preset, kind=device.kind, chip=device.fingerprint().chip)
    runs: list[RunResult] = []
    while True:
        runs.append(run(config, len(runs)))
        results = [nightly_gate(stored.runs, [r.curve for r in runs], metric=metric) for metric in METRICS]
        undecided = any(r.outcome is Outcome.INCONCLUSIVE and r.more_runs for r in results)
        if not undecided or any(r.outcome in (Outcome.FAIL, Outcome.ERROR) for r in results):
            break
        seed = config.trainer.seed + 1
        while any(r.seed == seed for r in stored.runs):
            seed += 1
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, seed=seed))
    return runs, [_verdict(result, preset, device, stored.title, config) for result in results]


def _verdict(result: CurveResult, preset: str, device: Device, baseline: str, config: GkdConfig) -> Verdict:
    seed = config.trainer.seed + 1
    again = f"alignment gkd --baseline baselines --config {preset} --device {device.kind} trainer.seed={seed}"
    return result.verdict(
        check=f"e2e/curve-{preset}-{result.metric}",
        subject="golden",
        device=device.label,
        stage="update_student",
        baseline=baseline,
        next_command=None if result.outcome is Outcome.PASS else again,
    )
