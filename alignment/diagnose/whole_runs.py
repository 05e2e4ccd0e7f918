"""Two whole runs: their stages by what they logged, and what their captures say where these cannot tell.

What two runs logged has no bound of its own once their weights have parted by rounding: log-probs follow the weights,
and gradient norms have none at all. A capture of both knows what every tensor was computed from. Where it finds that a
stage of a step agrees within the error of its sources, that settles what was logged of it; everything else stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alignment.capture.readers import open_capture
from alignment.diagnose.capture_comparison import CaptureComparison, compare_captures
from alignment.diagnose.names import NameMap
from alignment.diagnose.noise import NoiseModel
from alignment.diagnose.run_stages import GAP_OF, OTHER_TOKENS, OTHERWISE, StageVerdict, compare_runs, first_divergence
from alignment.numerics.verdict import Outcome, Verdict

CAPTURE = "capture"
"""Folder of a run that holds its capture."""
_HELD_BY = {"weight_sync": ("rollout", "old_log_prob")}
"""Stages of a capture that together say what a stage of a run says; by default the one of that name."""


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
) -> WholeRuns:
    """Judges one run by another, see :func:`~alignment.diagnose.run_stages.compare_runs` and
    :func:`~alignment.diagnose.capture_comparison.compare_captures`.

    Raises:
        InputError: a run or a capture that cannot be read, or two that have nothing in common.
    """
    stages = compare_runs(golden, target, repeats=repeats, stop=False)
    parted = next((s.step for s in stages if s.outcome is not Outcome.FAIL and _other_tokens(s)), None)
    captures = Path(golden) / CAPTURE, Path(target) / CAPTURE
    capture = None
    if all(path.is_dir() for path in captures):
        readers = [open_capture(path) for path in captures]
        steps = sorted(set(readers[0].steps()) & set(readers[1].steps()))
        if parted is not None and any(step < parted for step in steps):
            # What other tokens are computed to is no evidence.
            steps = [step for step in steps if step < parted]
        capture = compare_captures(*readers, names=names, noise=noise, steps=steps, allow_missing=allow_missing)
        stages = [_settled(stage, capture) for stage in stages]
    end = next((i for i, stage in enumerate(stages) if stage.outcome is Outcome.FAIL), len(stages))
    return WholeRuns(stages=stages[: end + 1], capture=capture, parted=parted)


def _other_tokens(stage: StageVerdict) -> bool:
    return stage.stage == "rollout" and any(m.name == OTHER_TOKENS and m.value > 0 for m in stage.measures)


def _settled(stage: StageVerdict, capture: CaptureComparison) -> StageVerdict:
    if stage.outcome is Outcome.PASS or not stage.measures:
        return stage
    open_ends = [m for m in stage.measures if not m.within or m.bound is None]
    if not all(m.name.startswith(GAP_OF) or m.name in OTHERWISE for m in open_ends if m.value != 0.0):
        return stage
    wanted = _HELD_BY.get(stage.stage, (stage.stage,))
    held = [s for s in capture.stages if s.step == stage.step and s.stage in wanted]
    if {s.stage for s in held} != set(wanted) or any(s.outcome is not Outcome.PASS for s in held):
        return stage
    count = sum(s.pairs for s in held)
    measures = tuple(replace(m, bound=None) if m in open_ends else m for m in stage.measures)
    said = stage.reason.partition(";")[0]
    reason = f"{said}; explained by the captures, {count} tensors of which agree within the error of their sources"
    return replace(stage, outcome=Outcome.PASS, reason=reason, measures=measures, where=None)
