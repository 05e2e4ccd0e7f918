"""What a device's results do under changes that must not matter: the measured part of every budget."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from alignment.backends.case import Case, Quantity, Tensors, checked
from alignment.backends.subject import Subject
from alignment.baseline.measure import METRICS, errors, size_of
from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.numerics.budget import ENVELOPE_FACTOR, ERROR_RATIO, ERROR_RATIO_LLM, Budget, Noise, Precision
from alignment.numerics.perturbation import one_ulp
from alignment.numerics.random import portable_permutation

MANY_ELEMENTS = 1024
INPUTS, ULP, ORDER = "other inputs", "one-ulp inputs", "order of reductions"


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """One benign run: its inputs are drawn from ``seed``, never the judged one, and changed as ``kind`` says."""

    seed: int
    kind: str


def perturbations(case: Case, quantity: Quantity) -> tuple[Perturbation, ...]:
    """The runs that measure the noise of one quantity: six, on seeds other than the judged one.

    Two have other inputs, two inputs moved by one ulp, two another order of reductions. A quantity that an operator
    computes in float32 from bfloat16 inputs gets other inputs in place of moved ones: a bfloat16 ulp is no rounding of
    its arithmetic, and a budget made of it would let a bfloat16 router pass.
    """
    wide = case.layer == "unit" and quantity.dtype is not None and quantity.dtype != case.dtype
    kinds = (INPUTS, ULP, ORDER, INPUTS, ULP, ORDER)
    return tuple(
        Perturbation(seed=case.seed + 1 + j + len(kinds) * (wide and kind == ULP), kind=INPUTS if wide and kind == ULP else kind)
        for j, kind in enumerate(kinds)
    )


def measure_noise(case: Case, subject: Subject, device: Device) -> dict[str, dict[str, Noise]]:
    """Noise of every metric of every quantity that the subject observes, by quantity and metric.

    Raises:
        InputError: a perturbed run is not finite, or does not observe what the others do.
    """
    runs = {run for quantity in case.quantities for run in perturbations(case, quantity)}
    found = {run: _errors_of(case, subject, device, run) for run in sorted(runs, key=lambda run: run.seed)}
    return {
        quantity.name: {
            metric: _noise([(run, found[run][quantity.name][metric]) for run in perturbations(case, quantity)], device)
            for metric in METRICS[quantity.kind]
        }
        for quantity in case.quantities
        if all(quantity.name in observed for observed in found.values())
    }


def _noise(series: list[tuple[Perturbation, float]], device: Device) -> Noise:
    return Noise(
        values=tuple(value for _, value in series),
        seeds=tuple(run.seed for run, _ in series),
        perturbation=tuple(run.kind for run, _ in series),
        device=device.label,
    )


def _errors_of(case: Case, subject: Subject, device: Device, run: Perturbation) -> dict[str, dict[str, float]]:
    inputs = case.inputs(seed=run.seed)
    golden = case.golden_observations(inputs)
    if run.kind == ULP:
        moved = {n: one_ulp(inputs[n], seed=run.seed, stream=f"one-ulp/{n}") for n in activations(case, inputs)}
        observed = subject.run(case, {**inputs, **moved}, device)
    elif run.kind == ORDER:
        with _other_threads(device):
            observed = _reordered(case, subject, inputs, device, run.seed)
    else:
        observed = subject.run(case, inputs, device)
    observed = checked(case, observed, subject.name, partial=True)
    return {q.name: errors(q, observed[q.name], golden[q.name]) for q in case.quantities if q.name in observed}


def activations(case: Case, inputs: Tensors) -> tuple[str, ...]:
    """The inputs that carry activations: those the case names, else all real ones but weights, biases and cotangents."""
    kept = ("weight", "bias", "cotangent.")
    return case.perturbed or tuple(n for n, t in inputs.items() if t.is_floating_point() and not n.startswith(kept))


def _reordered(case: Case, subject: Subject, inputs: Tensors, device: Device, seed: int) -> Tensors:
    if not case.batched:
        return subject.run(case, inputs, device)
    order = portable_permutation(inputs[case.batched[0]].shape[0], seed=seed, stream="order of the batch")
    back = order.argsort()
    observed = subject.run(case, {k: v[order] if k in case.batched else v for k, v in inputs.items()}, device)
    restored = {*case.batched_outputs, *(f"grad.{name}" for name in case.batched)}
    return {k: v[back.to(v.device)] if k in restored else v for k, v in observed.items()}


@contextlib.contextmanager
def _other_threads(device: Device) -> Iterator[None]:
    """On a CPU another number of kernel threads, which cuts long reductions elsewhere; nothing on other devices."""
    threads = torch.get_num_threads()
    if device.kind == "cpu":
        torch.set_num_threads(1 if threads > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def precision_of(case: Case, quantity_dtype: str | None, declared: Precision | None = None) -> Precision:
    """The precision a quantity is judged by: what the run declares, with the quantity's own dtype where it has one."""
    if declared is None:
        return Precision(compute=quantity_dtype or case.dtype, router="float32")
    if quantity_dtype is None:
        return declared
    return Precision(**{**declared.to_dict(), "compute": quantity_dtype})


def factor_of(case: Case, metric: str, elements: int) -> float:
    """How many times the baseline's noise is allowed.

    A norm over many elements hardly fluctuates between runs: 1.5 for the operators an LLM lives on, else 2. The largest
    error, and a norm over few elements, depend on single ones and take the factor of an envelope of few runs.
    """
    if metric != "relative_l2" or elements < MANY_ELEMENTS:
        return ENVELOPE_FACTOR
    return ERROR_RATIO_LLM if case.llm_operator else ERROR_RATIO


def budgets(
    case: Case, noise: dict[str, dict[str, Noise]], golden: Tensors, *, declared: Precision | None = None
) -> dict[str, dict[str, Budget]]:
    """The budget of every metric: a multiple of the worst noise, and never below the roundoff of the declared precision."""
    made: dict[str, dict[str, Budget]] = {}
    for quantity in case.quantities:
        for metric, unit in METRICS[quantity.kind].items():
            if metric not in noise.get(quantity.name, {}):
                continue
            made.setdefault(quantity.name, {})[metric] = Budget.from_noise(
                noise[quantity.name][metric],
                metric=f"{quantity.name} {metric}",
                dtype=precision_of(case, quantity.dtype, declared),
                reduction_length=quantity.reduction_length,
                factor=factor_of(case, metric, golden[quantity.name].numel()),
                unit=unit,
                scale=size_of(quantity, golden[quantity.name]) if metric == "max_abs" else 1.0,
            )
    return made


def refuse_lost_digits(case: Case, noise: dict[str, dict[str, Noise]]) -> None:
    """Refuses to store as noise what has lost more than half of its digits: that is a fault, and a budget would hide it.

    Raises:
        InputError: a quantity of a unit case is farther from golden than the square root of its unit roundoff.
    """
    for quantity in case.quantities:
        found = noise.get(quantity.name, {}).get("relative_l2")
        limit = precision_of(case, quantity.dtype).unit_roundoff() ** 0.5
        if case.layer == "unit" and found is not None and found.worst > limit:
            raise InputError(
                "more than half of the digits are wrong; that is no noise and is not recorded",
                where=f"{case.id}: {quantity.name}",
                expected=f"relative_l2 ≤ √u = {limit:.3g}",
                found=f"{found.worst:.3g}",
            )
