"""Axis 4: the software stack, and what is computed differently from equal inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from alignment.bisect.constraints import load_constraints
from alignment.bisect.known_bad import known_bad_of
from alignment.bisect.stack import Stack, load_stack
from alignment.diagnose.axes import AXES, AxisReport, Finding, read_answer, report
from alignment.diagnose.run_stages import RunData, StageVerdict
from alignment.numerics.verdict import Outcome, Verdict

AXIS = AXES[3]
STACK = "stack.yaml"
TESTED = "communication.json"
OPERATORS = "operators.json"
CONVICTED = "communication is wrong"
_MEGATRON = "actor_rollout_ref.actor.megatron."
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
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
    findings, tested = _tested(dut.directory)
    convicted = bool(findings)
    operators, judged_operators, remarks = _operators(dut.directory)
    findings += operators
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
    if parted is not None and not explained and not convicted and not operators:
        findings.append(_computed(parted, dut, baseline, bisect))
    judged = [stage for stage in stages if stage.outcome is not Outcome.INCONCLUSIVE]
    compared = f"{len(judged)} stages of {len({s.step for s in judged})} steps agree" if judged else "the stacks agree"
    if judged_operators:
        compared += f"; {judged_operators} operators are within their budgets"
    if tested:
        compared += f"; communication was tested: {tested}"
    both = ours is not None and theirs is not None
    unseen = (
        ""
        if both or judged or tested or judged_operators
        else "one stack at most was recorded, and no stage could be compared"
    )
    return report(
        AXIS,
        findings,
        compared=compared,
        remarks=remarks,
        unseen=unseen,
        next_command="; ".join(
            filter(
                None,
                (
                    bisect or "alignment bisect freeze -o RUN/stack.yaml in the environment of each run",
                    "" if judged_operators or operators else f"alignment run --only unit --json > RUN/{OPERATORS}",
                    communication_command(dut) if dut.world_size > 1 and not tested and not convicted else "",
                ),
            )
        ),
    )


def _operators(directory: Path) -> tuple[list[Finding], int, list[str]]:
    """What ``alignment run --only unit --json`` found against the baselines, worst operator first; how many passed.

    Raises:
        InputError: the file is no such answer.
    """
    verdicts = read_answer(directory / OPERATORS, command="alignment run --only unit --json")
    wrong = sorted((v for v in verdicts if v.outcome is Outcome.FAIL), key=_budgets_used, reverse=True)
    lines = [f"{v.check} ({v.subject}): {_budgets_used(v):.3g} budgets used" for v in wrong]
    if not wrong:
        return [], sum(v.outcome is Outcome.PASS for v in verdicts), []
    worst = wrong[0]
    finding = Finding(
        axis=AXIS,
        cause=f"the operator {worst.check} computes differently",
        evidence=f"{worst.reason}; {len(wrong)} operators are outside their budgets, this one by most",
        weight=4,
        next_command=worst.next_command or f"alignment run --only unit --subject {worst.subject}",
    )
    return [finding], 0, lines[1:]


def _budgets_used(verdict: Verdict) -> float:
    used = verdict.worst.used if verdict.worst is not None else None
    return math.inf if used is None or math.isnan(used) else used


def communication_command(run: RunData) -> str:
    """The communication test of a run's own model and layout, with its answer where triage looks for it."""
    into = f"--json > {run.directory / TESTED}"
    if run.engine == "alignment" and run.config:
        return f"alignment communication --run {run.directory} {into}"
    asked = [f"trainer.n_gpus_per_node={run.world_size}"]
    strategy = str(run.config.get("actor_rollout_ref.actor.strategy") or "")
    if strategy:
        asked.append(f"engine.train={'megatron' if strategy == 'megatron' else 'fsdp'}")
    for key in ("actor_rollout_ref.model.path", *(f"{_MEGATRON}{name}" for name in _SIZES)):
        value = run.config.get(key)
        if value not in (None, 1) and (strategy == "megatron" or key.endswith("path")):
            asked.append(f"{key}={value}")
    return f"alignment communication {' '.join(asked)} {into}"


def _tested(directory: Path) -> tuple[list[Finding], str]:
    """What ``alignment communication --json`` found and what it passed, where its answer lies in the run's folder.

    Raises:
        InputError: the file is no such answer.
    """
    verdicts = read_answer(directory / TESTED, command=f"alignment communication --run {directory} --json")
    findings = [
        Finding(
            axis=AXIS,
            cause=CONVICTED,
            evidence=verdict.reason,
            # A collective by name says more than a sum that is off.
            weight=6 if verdict.check.endswith("collectives") else 5,
            next_command=verdict.next_command or "",
        )
        for verdict in verdicts
        if verdict.outcome is Outcome.FAIL
    ]
    passed = [v.check.removeprefix("communication/") for v in verdicts if v.outcome is Outcome.PASS]
    return findings, ", ".join(passed)


def _computed(parted: StageVerdict, dut: RunData, baseline: RunData, bisect: str) -> Finding:
    ranks = [run.world_size for run in (dut, baseline)]
    capture = f"alignment compare {baseline.directory} {dut.directory}, both run with capture.detail=sketch"
    if parted.stage == "update_actor" and ranks[0] != ranks[1] and ranks[0] > 1 and _beyond(parted, baseline):
        return Finding(
            axis=AXIS,
            cause="communication",
            evidence=f"{ranks[0]} ranks against {ranks[1]} with one global batch: {parted.reason}",
            next_command=communication_command(dut),
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
