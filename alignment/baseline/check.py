"""Judging a run: observe a case, compare it with the stored golden values, and say how much of the budget was used."""

from __future__ import annotations

import math
from collections.abc import Mapping

from alignment.backends.case import Case, Quantity, Tensors, checked
from alignment.backends.subject import Subject
from alignment.baseline.measure import declared_fault, errors, flips, worst_place
from alignment.baseline.noise import budgets
from alignment.baseline.select import MissingBaseline, Selection, record_command, select
from alignment.baseline.store import BaselineStore, inputs_hash, require_same_case
from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.numerics.budget import Budget, Noise, Precision
from alignment.numerics.metrics import relative_l2
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

UNPERTURBED = "none"


def check_case(
    case: Case, subject: Subject, device: Device, store: BaselineStore, *, declared: Precision | None = None
) -> Verdict:
    """Runs ``case`` by ``subject`` on ``device`` and judges it by the best matching baseline in ``store``.

    Args:
        declared: the precision the run declares (TF32, HF32, …), by which it is then judged.

    Returns:
        PASS or FAIL with every measure, UNAVAILABLE where the subject cannot run, ERROR where there is no usable baseline
        or nothing was observed. A fault of the golden model itself, seen against the stored values, is a FAIL of ``golden``.
    """
    judged = _Judgement(case, subject, device)
    available = subject.available(device)
    if not available.available:
        return judged.verdict(Outcome.UNAVAILABLE, available.reason)
    inputs = case.inputs()
    try:
        fingerprint = device.fingerprint()
        chosen = select(store, case, subject.name, kind=device.kind, chip=fingerprint.chip)
        require_same_case(chosen.entry, case.identity(), inputs_hash(inputs), where=chosen.file.path)
    except MissingBaseline as error:
        return judged.verdict(Outcome.ERROR, str(error), next_command=error.next_step)
    except InputError as error:
        return judged.verdict(Outcome.ERROR, str(error), next_command=record_command(case, subject.name, device.kind))
    judged.chosen = chosen
    golden = chosen.file.golden(case.id)
    try:
        judged.recompute_golden(inputs, golden)
    except InputError as error:
        return judged.verdict(Outcome.ERROR, str(error), next_command=record_command(case, subject.name, device.kind))
    if judged.where is None:
        try:
            observed = checked(case, subject.run(case, inputs, device), subject.name, partial=True)
        except Exception as error:  # whatever an implementation under test raises is a finding about it, not about us
            return judged.verdict(
                Outcome.ERROR, f"the subject raised {type(error).__name__}: {error}", next_command=judged.rerun_command()
            )
        judged.observations(observed, golden, declared)
    return judged.conclude()


class _Judgement:
    def __init__(self, case: Case, subject: Subject, device: Device) -> None:
        self.case, self.subject, self.device = case, subject, device
        self.chosen: Selection | None = None
        self.measures: list[Measure] = []
        self.where: Divergence | None = None
        self.observed = 0

    def recompute_golden(self, inputs: Tensors, stored: Tensors) -> None:
        for quantity, measure in golden_faults(self.case, inputs, stored):
            self.measures.append(measure)
            self._diverges(quantity, "the golden model no longer computes its stored value", stage="golden")

    def observations(self, observed: Tensors, golden: Tensors, declared: Precision | None) -> None:
        allowed = self._budgets(golden, declared)
        for quantity in self.case.quantities:
            if quantity.name not in observed:
                continue
            self.observed += 1
            found, reference = observed[quantity.name], golden[quantity.name]
            fault = declared_fault(self.case, quantity, found, reference)
            if fault:
                self.measures.append(
                    Measure(name=f"{quantity.name} as declared", value=1.0, bound=0.0, origin="exact: declared shape and dtype")
                )
                self._diverges(quantity, fault)
                continue
            if quantity.kind == "choice":
                self._choice(quantity, found, golden, allowed)
                continue
            values = errors(quantity, found, reference)
            measures = [
                budget.judge(values[metric], run_seed=self.case.seed, run_perturbation=UNPERTURBED)
                for metric, budget in allowed.get(quantity.name, {}).items()
            ]
            self.measures += measures
            if not measures:
                self.measures += [Measure(name=f"{quantity.name} {m}", value=v) for m, v in values.items()]
            if not all(m.within for m in measures):
                self._diverges(quantity, worst_place(quantity, found, reference))

    def _choice(self, quantity: Quantity, found, golden: Tensors, allowed: Mapping) -> None:
        # Both scores of a near-tie may be off by the whole budget of the scores.
        budget = allowed[quantity.scores]["max_abs"]
        scores = golden[quantity.scores]
        margin = 2.0 * budget.value * float(scores.double().square().mean().sqrt())
        count, worst = flips(found, golden[quantity.name], scores, margin=margin)
        origin = f"exact: no choice may differ by more than the near-tie margin {margin:.3g} of its scores"
        self.measures.append(Measure(name=f"{quantity.name} decided flips", value=float(count), bound=0.0, origin=origin))
        if count:
            self._diverges(quantity, f"{count} of {scores.shape[0]} choices differ, by up to {worst:.3g} of score")

    def _budgets(self, golden: Tensors, declared: Precision | None) -> dict[str, dict[str, Budget]]:
        stored = self.chosen.entry.budgets()
        if declared is None:
            return stored
        noise: dict[str, dict[str, Noise]] = {
            name: {metric: budget.noise for metric, budget in metrics.items()} for name, metrics in stored.items()
        }
        return budgets(self.case, noise, golden, declared=declared)

    def _diverges(self, quantity: Quantity, detail: str, *, stage: str | None = None) -> None:
        if self.where is None:
            self.where = Divergence(
                stage=stage or self.case.stage, module=quantity.module, quantity=quantity.name, detail=detail
            )

    def conclude(self) -> Verdict:
        if self.where is not None:
            worst = max((m for m in self.measures if not m.within), key=_used)
            return self.verdict(
                Outcome.FAIL,
                f"{worst.name} = {worst.value:.4g} {worst.unit}".rstrip()
                + f", {_times(worst)} its budget of {worst.bound:.4g} ({worst.origin})",
                next_command=self.rerun_command(),
            )
        judged = [m for m in self.measures if m.bound is not None]
        if not judged:
            return self.verdict(Outcome.ERROR, "the subject observed nothing that a budget judges")
        worst = max(judged, key=_used)
        unseen = len(self.case.quantities) - self.observed
        reason = f"{self.observed} quantities inside their budgets; {worst.name} used most: {worst.used:.0%}"
        return self.verdict(Outcome.PASS, reason + (f"; {unseen} not observable in this subject" if unseen else ""))

    def rerun_command(self) -> str:
        tests = {"unit": "tests/unit/backends/test_operator_baselines.py", "layer": "tests/layer/test_layer_baselines.py"}
        return f'pytest {tests[self.case.layer]} -k "{self.case.id}-{self.subject.name}" --device {self.device.kind}'

    def verdict(self, outcome: Outcome, reason: str, *, next_command: str | None = None) -> Verdict:
        return Verdict(
            check=f"{self.case.layer}/{self.case.id}",
            layer=self.case.layer,
            stage=self.case.stage,
            subject=self.subject.name,
            device=self.device.label,
            outcome=outcome,
            reason=reason,
            measures=tuple(self.measures),
            where=self.where,
            baseline=self.chosen.title if self.chosen else None,
            next_command=next_command,
        )


def golden_faults(case: Case, inputs: Tensors, stored: Tensors) -> list[tuple[Quantity, Measure]]:
    """Quantities that the golden model of today computes farther from the stored values than float64 can explain.

    The bound of a quantity is the deterministic growth of rounding errors over the reductions of all quantities up to it.

    Raises:
        InputError: the stored values lack a quantity or have another shape.
    """
    recomputed = case.golden_observations(inputs)
    faults, length = [], 0
    for quantity in case.quantities:
        length += quantity.reduction_length
        if quantity.name not in stored:
            raise InputError("the baseline lacks a quantity", where=f"{case.id}: {quantity.name}")
        metric = f"golden {quantity.name} relative_l2"
        budget = Budget.from_roundoff(metric=metric, dtype="float64", reduction_length=length, model="deterministic")
        value = relative_l2(recomputed[quantity.name].double(), stored[quantity.name])
        measure = budget.judge(value, run_seed=case.seed)
        if not measure.within:
            faults.append((quantity, measure))
    return faults


def _used(measure: Measure) -> float:
    return math.inf if math.isnan(measure.value) else measure.used


def _times(measure: Measure) -> str:
    used = _used(measure)
    return f"{used:.3g} ×" if math.isfinite(used) else "outside"
