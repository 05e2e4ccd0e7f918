"""Axis 4: the software stack, and what is computed differently from equal inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alignment.bisect.constraints import load_constraints
from alignment.bisect.known_bad import known_bad_of
from alignment.bisect.stack import Stack, load_stack
from alignment.diagnose.axes import AXES, AxisReport, Finding, report
from alignment.diagnose.run_stages import RunData, StageVerdict
from alignment.numerics.verdict import Outcome

AXIS = AXES[3]
STACK = "stack.yaml"
COMMUNICATION = 0.01
"""Relative difference of loss or gradient norm between one process and many, from which communication is convicted: the
field's rule."""


def check(dut: RunData, baseline: RunData, stages: Sequence[StageVerdict], *, explained: bool) -> AxisReport:
    """Known-bad and infeasible versions, and the first stage that parts although its inputs agree.

    Args:
        stages: what :func:`alignment.diagnose.run_stages.compare_runs` found.
        explained: whether another axis already says why a stage parts.
    """
    ours, theirs = (_stack(run.directory) for run in (dut, baseline))
    findings: list[Finding] = []
    remarks: list[str] = []
    bisect = ""
    if ours is not None:
        broken = load_constraints().violation(ours)
        if broken:
            findings.append(Finding(axis=AXIS, cause="versions that do not go together", evidence=broken))
        spared = {entry.id for entry in known_bad_of(theirs)} if theirs is not None else set()
        for entry in known_bad_of(ours):
            if entry.id not in spared:
                findings.append(
                    Finding(axis=AXIS, cause=entry.title, evidence=f"{entry.symptom}; {entry.repair} ({entry.source})")
                )
    if ours is not None and theirs is not None:
        changed = theirs.changed(ours)
        remarks += [f"{name}: {theirs.pins.get(name, 'absent')} → {ours.pins.get(name, 'absent')}" for name in changed]
        if changed:
            bisect = (
                f"alignment bisect run --good {baseline.directory / STACK} --bad {dut.directory / STACK} --probe CHECK"
            )
    parted = next((stage for stage in stages if stage.outcome is Outcome.FAIL), None)
    if parted is not None and not explained:
        findings.append(_computed(parted, dut, baseline, bisect))
    judged = [stage for stage in stages if stage.outcome is not Outcome.INCONCLUSIVE]
    compared = f"{len(judged)} stages of {len({s.step for s in judged})} steps agree" if judged else "the stacks agree"
    both = ours is not None and theirs is not None
    unseen = "" if both or judged else "one stack at most was recorded, and no stage could be compared"
    return report(
        AXIS,
        findings,
        compared=compared,
        remarks=remarks,
        unseen=unseen,
        next_command=bisect or "alignment bisect freeze -o RUN/stack.yaml in the environment of each run",
    )


def _computed(parted: StageVerdict, dut: RunData, baseline: RunData, bisect: str) -> Finding:
    ranks = [run.world_size for run in (dut, baseline)]
    capture = f"alignment compare {baseline.directory} {dut.directory}, both run with capture.detail=sketch"
    if parted.stage == "update_actor" and ranks[0] != ranks[1] and ranks[0] > 1 and _beyond(parted, baseline):
        return Finding(
            axis=AXIS,
            cause="communication",
            evidence=f"{ranks[0]} ranks against {ranks[1]} with one global batch: {parted.reason}",
            next_command=f"alignment dapo trainer.n_gpus_per_node={ranks[1]} on the device, against the same baseline",
        )
    return Finding(
        axis=AXIS,
        cause=f"{parted.stage} computes differently from equal inputs",
        evidence=f"step {parted.step}: {parted.reason}",
        weight=2,
        next_command=capture if not bisect else f"{capture}; then {bisect}",
    )


def _beyond(parted: StageVerdict, baseline: RunData) -> bool:
    """Whether a metric is further from the baseline's value than rounding makes it: more than the field's 1 % of it."""
    values = baseline.metrics.get(parted.step, {})
    return any(
        m.value > COMMUNICATION * abs(values[m.name]) for m in parted.measures if m.name in values and not m.within
    )


def _stack(directory: Path) -> Stack | None:
    path = directory / STACK
    return load_stack(path) if path.is_file() else None
