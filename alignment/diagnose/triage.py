"""Triage: two runs in, the six axes out, the cause first.

A run that parts from its baseline parts for one reason most of the time, and everything after it is a consequence. So a
stage that parts is laid at the door of the axis that explains it: another configuration, other data, other weights or
other scores each explain what is computed from them; only what is left unexplained is the software stack's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alignment.diagnose.axes import (
    AXES,
    AxisReport,
    Finding,
    data,
    hardware,
    hyperparameters,
    scoring,
    software,
    structure,
)
from alignment.diagnose.failure_modes import FailureMode, find_failure_modes
from alignment.diagnose.garbled import find_garbled
from alignment.diagnose.run_stages import RunData, StageVerdict, compare_runs, first_divergence, open_run
from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED, MISALIGNED, USAGE, Outcome


@dataclass(frozen=True, kw_only=True)
class Triage:
    """What the six axes say about a run and its baseline.

    ``causes`` are the findings of all axes, the cause first; ``modes`` the failure modes of the run that the baseline
    does not show; ``first`` the first stage that parts.
    """

    dut: Path
    baseline: Path
    axes: tuple[AxisReport, ...]
    causes: tuple[Finding, ...]
    modes: tuple[FailureMode, ...]
    first: StageVerdict | None

    @property
    def exit_code(self) -> int:
        """1 where a cause, a failure mode or a divergence was found; 2 where no axis had anything to compare."""
        if self.causes or self.modes or self.first is not None:
            return MISALIGNED
        return ALIGNED if any(axis.outcome is Outcome.PASS for axis in self.axes) else USAGE

    @property
    def next_commands(self) -> tuple[str, ...]:
        """What to run next: for each cause in turn its own command or its axis's; where there is none, every axis's."""
        by_axis = {axis.axis: axis.next_command for axis in self.axes}
        told = [cause.next_command or by_axis[cause.axis] for cause in self.causes] or by_axis.values()
        return tuple(dict.fromkeys(command for command in told if command))

    @property
    def open_commands(self) -> tuple[str, ...]:
        """What the other axes would like to have run: less urgent where a cause is known."""
        told = dict.fromkeys(axis.next_command for axis in self.axes if axis.next_command)
        return tuple(command for command in told if command not in self.next_commands)

    def to_dict(self) -> dict:
        return {
            "dut": str(self.dut),
            "baseline": str(self.baseline),
            "exit_code": self.exit_code,
            "causes": [vars(finding) for finding in self.causes],
            "failure_modes": [vars(mode) for mode in self.modes],
            "first_divergence": str(self.first) if self.first else None,
            "axes": [axis.to_dict() for axis in self.axes],
            "next_commands": list(self.next_commands),
            "open_commands": list(self.open_commands),
        }


def triage(dut: Path | RunData, baseline: Path | RunData, *, repeats: Sequence[Path] = ()) -> Triage:
    """Takes a run apart along the six axes.

    Args:
        dut: the run under test: of ours, or a folder that verl wrote.
        baseline: the run it should equal.
        repeats: further runs of the baseline's configuration, for the noise of metrics.

    Raises:
        InputError: a run cannot be read.
    """
    dut, baseline = (run if isinstance(run, RunData) else open_run(run) for run in (dut, baseline))
    stages = _stages(dut, baseline, repeats)
    garbled = find_garbled(dut, baseline)
    configuration = hyperparameters.check(dut, baseline)
    fed = data.check(dut, baseline)
    cards = hardware.check(dut.directory)
    weights = structure.check(dut, baseline, stages, garbled)
    scores = scoring.check(dut, baseline, stages)
    explained = any(axis.outcome is Outcome.FAIL for axis in (configuration, fed, cards, weights, scores))
    stack = software.check(dut, baseline, stages, explained=explained)
    axes = (configuration, fed, cards, stack, weights, scores)
    theirs = {mode.name for mode in find_failure_modes(baseline)}
    modes = [mode for mode in find_failure_modes(dut) if mode.name not in theirs]
    return Triage(
        dut=dut.directory,
        baseline=baseline.directory,
        axes=axes,
        causes=tuple(_ordered(axes)),
        modes=tuple(modes),
        first=first_divergence(stages),
    )


def _stages(dut: RunData, baseline: RunData, repeats: Sequence[Path]) -> list[StageVerdict]:
    try:
        return compare_runs(baseline, dut, repeats=list(repeats))
    except InputError as error:
        # Runs without a common step still have a configuration and data to compare.
        return [
            StageVerdict(
                step=0, stage="data", outcome=Outcome.INCONCLUSIVE, reason=f"stages cannot be compared: {error}"
            )
        ]


# What explains what: a temperature explains other tokens, other weights explain other log-probs, never the reverse.
_PRIORITY = {AXES[2]: 0, AXES[0]: 1, AXES[1]: 2, AXES[4]: 3, AXES[5]: 4, AXES[3]: 5}


def _ordered(axes: Sequence[AxisReport]) -> list[Finding]:
    """Garbled text before anything else, then by the axis that explains the others, then by weight."""
    findings = [finding for axis in axes for finding in axis.findings]
    return sorted(
        findings,
        key=lambda finding: (
            not finding.cause.startswith("garbled"),
            # A collective that was shown to be wrong is a fact about the machine, like a bad card.
            -1 if finding.cause == software.CONVICTED else _PRIORITY[finding.axis],
            -finding.weight,
        ),
    )
