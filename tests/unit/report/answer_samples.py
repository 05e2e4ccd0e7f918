"""Answers of commands as they stand beside a run, with foreign text in every place that takes some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_reader import HOSTILE

from alignment.diagnose.ablation import Factor, effects, run_designs
from alignment.diagnose.axes import AXES, AxisReport, Finding
from alignment.diagnose.failure_modes import FailureMode
from alignment.diagnose.long_replay import BAR, METRICS, Drift, LongReplay, drift_curve, relative_error
from alignment.diagnose.run_stages import StageVerdict
from alignment.diagnose.triage import Triage
from alignment.faults.audit import Alarm, Audit, Row
from alignment.files import write_json
from alignment.numerics.verdict import Divergence, Measure, Outcome
from alignment.report.run_directory import finite

STEPS = 12
SEEDS = (1, 2, 3)
Values = list[float]


def series(*shifts: float) -> list[dict[str, float]]:
    """Metrics of a run whose step ``i`` is shifted by ``shifts[i % len(shifts)]``."""
    told = enumerate([float(step) for step in range(1, STEPS + 1)])
    return [{"step": int(v), **dict.fromkeys(METRICS, v + shifts[i % len(shifts)])} for i, v in told]


def replay(*, off: float = 2.0**-30, noise: tuple[float, ...] = (2.0**-31, 2.0**-32)) -> dict[str, Any]:
    """As ``alignment replay`` leaves it: off by ``off`` in every other step, and perturbed replays by ``noise``."""
    reference, own = series(0.0), series(0.0, off)
    perturbed = [series(one, off + one) for one in noise]
    drifts, curves = [], []
    for metric in METRICS:
        error, step, worst = relative_error(own, reference, metric=metric)
        errors = tuple(relative_error(rows, own, metric=metric)[0] for rows in perturbed)
        drifts.append(Drift(metric=metric, error=error, noise=errors, worst_step=step, worst_error=worst))
        curves.append(drift_curve(own, reference, perturbed, metric=metric))
    found = LongReplay(steps=STEPS, drifts=tuple(drifts), curves=tuple(curves))
    return finite({"device": HOSTILE, **found.to_dict(), "bar": BAR, "curves": [vars(curve) for curve in found.curves]})


def ablation(*, moved: dict[str, float] | None = None, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """As ``alignment ablate`` leaves it: each factor moves the curve by so much and a hundredth of the seed."""
    moved = {"scale": -2.0, HOSTILE: 0.0} if moved is None else moved
    factors = [Factor(name=name, overrides=(f"{name}=1",)) for name in moved]

    def level(setting: frozenset[str], changes: tuple[str, ...], seed: int) -> float:
        return 10.0 + seed + sum(moved[name] + (seed / 100 if moved[name] else 0.0) for name in setting)

    levels = run_designs(factors, seeds, full=False, level=level)
    return finite(
        {
            "run": "runs/one",
            "metric": HOSTILE,
            "factors": {factor.name: factor.overrides for factor in factors},
            "effects": [effect.to_dict() for effect in effects(factors, seeds, levels, full=False)],
            "levels": [{"factors": sorted(s), "seed": seed, "level": value} for (s, seed), value in levels.items()],
            "other_prompts": {name: 2 for name in moved},
            "curves": [
                {"factors": sorted(s), "seed": seed, "steps": [1, 2, 3], "values": [value - 1, value, value + 1]}
                for (s, seed), value in levels.items()
            ],
        }
    )


def stage(step: int, name: str, outcome: Outcome, reason: str = "as it should be") -> dict[str, Any]:
    """A stage of two runs as ``alignment compare --json`` prints it."""
    fails = outcome is Outcome.FAIL
    measure = Measure(name=HOSTILE, value=3.0, bound=1.0, unit="nats", origin="3 × the same of the first run")
    where = Divergence(stage=name, module=f"step {step}", quantity=HOSTILE, detail=reason)
    found = StageVerdict(
        step=step, stage=name, outcome=outcome, reason=reason, measures=(measure,), where=where if fails else None
    )
    return finite(found.verdict(subject="b", device="cpu", baseline="a").to_dict())


def finding(**changes: Any) -> dict[str, Any]:
    """A finding of two captures as ``alignment compare --json`` prints it."""
    return {
        "module": "layers.1.mlp", "direction": "forward", "status": "introduced", "quantity": "output",
        "at": "layers.1.mlp", "relative": 0.5, "sources": 1e-7, "value": 0.5, "limit": 1e-6, "excess": 5e5,
        "reason": "relative_l2", "origin": HOSTILE, **changes,
    }  # fmt: skip


def captured(step: int, name: str, outcome: Outcome, *, rank: int | None = None, **changes: Any) -> dict[str, Any]:
    """A stage of two captures as ``alignment compare --json`` prints it."""
    return {
        "step": step, "stage": name, "rank": rank, "outcome": outcome.value, "reason": HOSTILE, "first_forward": None,
        "first_backward": None, "findings": [], "unpaired": [], **changes,
    }  # fmt: skip


def comparison() -> dict[str, Any]:
    """Two runs that part in the second step, and their captures, which part in a module."""
    gap = {"what": "module", "side": "golden", "name": HOSTILE, "fails": True}
    found = [finding(), finding(module="layers.2", status="inherited", value="inf", excess="inf", reason="not finite")]
    parted = captured(2, "train", Outcome.FAIL, first_forward=found[0], findings=found, unpaired=[gap])
    stages = [
        stage(1, "reward", Outcome.PASS),
        stage(1, "update_actor", Outcome.INCONCLUSIVE, "nothing to judge by"),
        stage(2, "reward", Outcome.FAIL, HOSTILE),
    ]
    return {
        "stages": stages,
        "first": {"step": 2, "stage": "reward", "reason": HOSTILE},
        "capture": {"golden": f"a {HOSTILE}", "target": "b", "missing": [], "stages": [parted]},
    }


def triage() -> dict[str, Any]:
    """A cause, a failure mode, and a first divergence."""
    cause = Finding(axis=AXES[0], cause=f"temperature {HOSTILE}", evidence=HOSTILE, next_command="alignment dapo one")
    axes = (
        AxisReport(axis=AXES[0], outcome=Outcome.FAIL, reason="temperature", findings=(cause,), remarks=(HOSTILE,)),
        AxisReport(axis=AXES[1], outcome=Outcome.PASS, reason="the same prompts"),
        AxisReport(axis=AXES[2], outcome=Outcome.UNAVAILABLE, reason="no card", next_command="alignment stress"),
    )
    first = StageVerdict(step=3, stage="rollout", outcome=Outcome.FAIL, reason=HOSTILE)
    mode = FailureMode(name="KL spike", step=2, evidence=HOSTILE)
    return Triage(
        dut=Path("npu"), baseline=Path("gpu"), axes=axes, causes=(cause,), modes=(mode,), first=first
    ).to_dict()


def audit(*, check: str = HOSTILE, alarms: int = 0) -> dict[str, Any]:
    """One defect that a check catches or none does, and false alarms."""
    row = Row(
        fault=HOSTILE, category="moe", caught=bool(check), check=check, layer="unit-op", expected_layer="unit-op",
        culprit="router", seconds=1.0,
    )  # fmt: skip
    found = [Alarm(fault=HOSTILE, seed=seed, finding=HOSTILE) for seed in range(alarms)]
    return Audit(rows=[row], alarms=found, benign_runs=alarms, seconds=1.0).to_dict()


DOCUMENTS = {"replay": replay, "ablation": ablation, "comparison": comparison, "triage": triage, "audit": audit}


def write_answers(directory: Path) -> Path:
    """A directory that holds each of them."""
    for name, document in DOCUMENTS.items():
        write_json(directory / f"{name}.json", document())
    return directory
