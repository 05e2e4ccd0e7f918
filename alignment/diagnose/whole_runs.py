"""Two whole runs: their stages by what they logged, and what their captures say where these cannot tell.

What two runs logged has no bound of its own once their weights have parted by rounding. A capture of both knows what
every tensor was computed from. Where it finds that a stage of a step agrees within the error of its sources, that
settles the log-probs of that stage, which it holds, and bounds what is averaged from it: a gradient norm by the
difference of the gradients, a loss and an entropy by that of the model's outputs. Everything else stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alignment.capture.readers import open_capture
from alignment.diagnose.capture_comparison import CaptureComparison, StageComparison, compare_captures
from alignment.diagnose.difference import rounding
from alignment.diagnose.names import NameMap
from alignment.diagnose.noise import DEFAULT_AMPLIFICATION, NoiseModel
from alignment.diagnose.run_data import RunData, open_run
from alignment.diagnose.run_stages import GAP_OF, OTHER_TOKENS, StageVerdict, compare_runs, first_divergence
from alignment.numerics.verdict import Measure, Outcome, Verdict

CAPTURE = "capture"
"""Folder of a run that holds its capture."""
_HELD_BY = {"weight_sync": ("rollout", "old_log_prob")}
"""Stages of a capture that together say what a stage of a run says; by default the one of that name."""
_NORMS = ("actor/grad_norm", "student/grad_norm")
_AVERAGES = {
    "actor/loss": "actor/pg_scale", "actor/pg_loss": "actor/pg_scale", "actor/kl_loss": "", "actor/entropy": "",
    "student/loss": "", "student/jsd_loss": "", "student/sft_loss": "",
}  # fmt: skip
"""Metrics that are averages over tokens, and the one that says how large what is averaged is; "" for their own size."""


@dataclass(frozen=True, kw_only=True)
class WholeRuns:
    """What two runs have in common.

    Attributes:
        stages: by what was logged, and settled by the capture; they end with the first failure.
        capture: of the steps in which the runs trained on equal tokens, or None where one run has none.
        parted: the step from which on the runs sampled other tokens, as chance has it; None if they never did.
    """

    stages: list[StageVerdict]
    capture: CaptureComparison | None
    parted: int | None

    @property
    def first(self) -> StageVerdict | None:
        """The first stage that fails."""
        return first_divergence(self.stages)

    def verdicts(self, *, subject: str, device: str, baseline: str) -> list[Verdict]:
        """One for every stage of the runs, then those of the captures."""
        found = [stage.verdict(subject=subject, device=device, baseline=baseline) for stage in self.stages]
        return found + (self.capture.verdicts(device) if self.capture is not None else [])


def compare_whole_runs(
    golden: Path,
    target: Path,
    *,
    repeats: Sequence[Path] = (),
    names: NameMap | None = None,
    noise: NoiseModel | None = None,
    allow_missing: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> WholeRuns:
    """Judges one run by another, see :func:`~alignment.diagnose.run_stages.compare_runs` and
    :func:`~alignment.diagnose.capture_comparison.compare_captures`, which ``progress`` is told of.

    Raises:
        InputError: a run or a capture that cannot be read, or two that have nothing in common.
    """
    first, second = open_run(Path(golden)), open_run(Path(target))
    stages = compare_runs(first, second, repeats=repeats, stop=False)
    parted = next((s.step for s in stages if s.outcome is not Outcome.FAIL and _other_tokens(s)), None)
    captures = Path(golden) / CAPTURE, Path(target) / CAPTURE
    capture = None
    if all(path.is_dir() for path in captures):
        readers = [open_capture(path) for path in captures]
        # What other tokens are computed to is no evidence. A step that one side lacks is, so both are asked.
        every = sorted({*readers[0].steps(), *readers[1].steps()})
        steps = [step for step in every if parted is None or step < parted]
        if steps:
            capture = compare_captures(
                *readers, names=names, noise=noise, steps=steps, allow_missing=allow_missing, progress=progress
            )
            stages = [_settled(stage, capture, first) for stage in stages]
    end = next((i for i, stage in enumerate(stages) if stage.outcome is Outcome.FAIL), len(stages))
    return WholeRuns(stages=stages[: end + 1], capture=capture, parted=parted)


def _other_tokens(stage: StageVerdict) -> bool:
    return stage.stage == "rollout" and any(m.name == OTHER_TOKENS and m.value > 0 for m in stage.measures)


def _settled(stage: StageVerdict, capture: CaptureComparison, run: RunData) -> StageVerdict:
    if stage.outcome is Outcome.PASS or not stage.measures:
        return stage
    wanted = _HELD_BY.get(stage.stage, (stage.stage,))
    held = [s for s in capture.stages if s.step == stage.step and s.stage in wanted]
    if {s.stage for s in held} != set(wanted) or any(s.outcome is not Outcome.PASS for s in held):
        return stage
    open_ends = {m.name for m in stage.measures if not m.within or m.bound is None and m.value != 0.0}
    measures = tuple(_explained(m, held, run, stage.step) if m.name in open_ends else m for m in stage.measures)
    if not all(m.within and (m.bound is not None or m.name.startswith(GAP_OF)) for m in measures):
        return stage
    said, count = stage.reason.partition(";")[0], sum(s.pairs for s in held)
    reason = f"{said}; explained by the captures, {count} tensors of which agree within the error of their sources"
    return replace(stage, outcome=Outcome.PASS, reason=reason, measures=measures, where=None)


def _explained(measure: Measure, held: Sequence[StageComparison], run: RunData, step: int) -> Measure:
    """The measure with the bound that a capture gives it; as it was where it gives none."""
    if measure.name.startswith(GAP_OF):
        return replace(measure, bound=None, origin="the capture holds the log-probs themselves")
    metrics = run.metrics[step]
    size = abs(metrics.get(measure.name, 0.0))
    if measure.name in _NORMS:
        # a norm differs by no more than what it is the norm of; with four standard deviations of two sketches
        bound = 1.1 * max(s.gradients for s in held) * size
        return replace(measure, bound=bound, origin="largest relative difference of the captured gradients")
    if measure.name in _AVERAGES:
        scale = max(size, abs(metrics.get(_AVERAGES[measure.name], 0.0)))
        alpha = DEFAULT_AMPLIFICATION["loss"]
        bound = alpha * math.hypot(max(s.outputs for s in held), rounding("float32")) * scale
        return replace(measure, bound=bound, origin=f"{alpha:g} × difference of the model's outputs, of its scale")
    return measure
