"""Error budgets: bounds made of measured noise and unit roundoff, that know where they come from.

Golden is float64. The noise of the baseline device is measured when a baseline is recorded, over J ≥ 5 runs that differ
by a benign perturbation (inputs moved by one ulp, another order of reduction). A bound is a small multiple of the worst
of them, with a floor from unit roundoff and reduction length. A budget never judges a run its noise was measured on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from alignment.errors import InputError
from alignment.numerics import metrics
from alignment.numerics.known_keys import known_keys
from alignment.numerics.precision import Precision, dtype_name, error_growth, unit_roundoff
from alignment.numerics.verdict import Measure

__all__ = [
    "ENVELOPE_FACTOR",
    "ERROR_RATIO",
    "ERROR_RATIO_LLM",
    "MINIMUM_RUNS",
    "Budget",
    "Envelope",
    "Noise",
    "Precision",
    "dtype_name",
    "error_growth",
    "error_ratio",
    "error_ratios",
    "policy_loss_scale",
    "unit_roundoff",
]

MINIMUM_RUNS = 5
ENVELOPE_FACTOR = 3.0
ERROR_RATIO = 2.0
ERROR_RATIO_LLM = 1.5


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What a metric did in J ≥ 5 perturbed runs of the baseline.

    ``values`` are the metric's magnitudes (≥ 0), ``seeds`` those of the perturbations, ``perturbation`` their kind
    (``one-ulp inputs``, ``reduction order``, …; one for all or one per run), ``device`` the label of where they ran.

    Raises:
        InputError: fewer than five runs, unequal lengths, a repeated run, a value that is NaN, infinite or negative.
    """

    values: tuple[float, ...]
    seeds: tuple[int, ...]
    perturbation: str | tuple[str, ...]
    device: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(float(v) for v in self.values))
        object.__setattr__(self, "seeds", tuple(int(s) for s in self.seeds))
        if not isinstance(self.perturbation, str):
            object.__setattr__(self, "perturbation", tuple(self.perturbation))
        _require_runs(self.runs, len(self.values), "Noise")
        for value in self.values:
            if not (math.isfinite(value) and value >= 0.0):
                raise InputError("noise is a magnitude", where="Noise", expected="finite values ≥ 0", found=value)

    @property
    def runs(self) -> tuple[tuple[int, str], ...]:
        """(seed, perturbation) of every run."""
        return _identities(self.seeds, self.perturbation)

    @property
    def worst(self) -> float:
        """The largest value."""
        return max(self.values)

    def to_dict(self) -> dict:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        return _jsonable(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping) -> Noise:
        """The inverse of :meth:`to_dict`; unknown keys are refused."""
        return _build(cls, data)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How large a metric may be, in which unit, and why.

    ``noise`` is None for a bound that comes from theory or exactness alone.

    Raises:
        InputError: the bound is negative, NaN or infinite, or has no origin.
    """

    metric: str
    value: float
    unit: str = ""
    origin: str
    noise: Noise | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))
        if not (math.isfinite(self.value) and self.value >= 0.0):
            raise InputError(
                "a bound is a finite magnitude", where=f"budget of {self.metric}", expected="≥ 0", found=self.value
            )
        if not self.origin:
            raise InputError(
                "a bound without an origin is a matter of taste",
                where=f"budget of {self.metric}",
                expected="measured noise, unit roundoff, exactness or a test",
            )

    @classmethod
    def from_noise(
        cls,
        noise: Noise,
        *,
        metric: str = "error",
        dtype: Precision | torch.dtype | str,
        reduction_length: int,
        factor: float = ENVELOPE_FACTOR,
        unit: str = "",
        operator: str = "matmul",
        scale: float = 1.0,
        model: str = "probabilistic",
    ) -> Budget:
        """bound = max(factor × worst measured noise, scale × floor).

        The floor is :meth:`Precision.floor` for the declared precision and ``reduction_length`` n. It is relative;
        for a metric with a unit, ``scale`` is the size of the values it is relative to (Σ|terms|, max |golden|, …).

        Args:
            factor: multiple of the worst noise, ≥ 1.
            operator: matmul, elementwise, router or rollout: which declared precision applies.
        """
        if not (math.isfinite(factor) and factor >= 1.0):
            raise InputError(
                "a budget below the measured noise fails at random", where="factor", expected="≥ 1", found=factor
            )
        floor, reason = _floor(dtype, reduction_length, operator, model, scale)
        if factor * noise.worst >= floor:
            kinds = ", ".join(sorted({kind for _, kind in noise.runs}))
            reason = f"{factor:g} × worst of {len(noise.values)} runs ({kinds}) on {noise.device}"
        return cls(metric=metric, value=max(factor * noise.worst, floor), unit=unit, origin=reason, noise=noise)

    @classmethod
    def from_roundoff(
        cls,
        *,
        metric: str,
        dtype: Precision | torch.dtype | str,
        reduction_length: int,
        unit: str = "",
        operator: str = "matmul",
        scale: float = 1.0,
        model: str = "probabilistic",
    ) -> Budget:
        """The floor of :meth:`from_noise` alone: for laws that hold up to rounding, where there is no baseline."""
        floor, reason = _floor(dtype, reduction_length, operator, model, scale)
        return cls(metric=metric, value=floor, unit=unit, origin=reason)

    @classmethod
    def exact(cls, *, metric: str, reason: str, unit: str = "") -> Budget:
        """A bound of zero, with the reason why nothing may differ."""
        return cls(metric=metric, value=0.0, unit=unit, origin=f"exact: {reason}")

    def judge(self, value: float, *, run_seed: int, run_perturbation: str | None = None) -> Measure:
        """``value`` against this bound; NaN and infinity are outside.

        Args:
            run_seed, run_perturbation: identity of the judged run. Without a perturbation the seed alone decides.

        Raises:
            InputError: the judged run is one of those the noise was measured on.
        """
        if self.noise is not None:
            _refuse_own_run(self.noise.runs, run_seed, run_perturbation, f"budget of {self.metric}")
        return Measure(name=self.metric, value=float(value), bound=self.value, unit=self.unit, origin=self.origin)

    def to_dict(self) -> dict:
        """JSON-ready form with full-precision floats; :meth:`from_dict` reads it back bit for bit."""
        return _jsonable(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping) -> Budget:
        """The inverse of :meth:`to_dict`; unknown keys are refused."""
        return _build(cls, data, noise=Noise)


def error_ratio(
    error: float, baseline_error: float, *, metric: str, floor: float, factor: float = ERROR_RATIO, unit: str = ""
) -> Measure:
    """err(subject, golden) ≤ c · err(baseline, golden), never stricter than ``floor``; c = 2, 1.5 for LLM operators.

    Raises:
        InputError: the baseline's error is not a finite magnitude, or the floor is not.
    """
    for name, number in (("baseline error", baseline_error), ("floor", floor)):
        if not (math.isfinite(number) and number >= 0.0):
            raise InputError(f"the {name} is not a magnitude", where=metric, expected="finite, ≥ 0", found=number)
    bound = factor * baseline_error
    origin = f"{factor:g} × error of the baseline against float64 golden"
    if bound < floor:
        bound, origin = floor, "floor from unit roundoff (the baseline is more accurate than its dtype promises)"
    return Measure(name=metric, value=float(error), bound=bound, unit=unit, origin=origin)


def error_ratios(
    x: metrics.Values,
    baseline: metrics.Values,
    golden: metrics.Values,
    *,
    metric: str,
    dtype: Precision | torch.dtype | str,
    reduction_length: int,
    factor: float = ERROR_RATIO,
    operator: str = "matmul",
) -> tuple[Measure, ...]:
    """The error-ratio rule on tensors: ordinary values by relative error, small ones apart by absolute error.

    A result that cancelled to almost nothing carries the absolute error of its terms, so its relative error says
    nothing. With r = rms(golden) and f = :meth:`Precision.floor`, elements with |golden| < f·r are *small*:

    * ordinary: ‖x − golden‖₂/‖golden‖₂ over them, floor f;
    * small: max |x − golden| over them, floor f·r.

    Returns:
        One measure for each class that has elements.
    """
    x, baseline, golden = (metrics._tensor(t).reshape(-1).cpu() for t in (x, baseline, golden))
    floor = Precision.of(dtype).floor(reduction_length, operator=operator)
    # called for its checks: finite golden, equal shapes, no empty tensor
    metrics.max_abs(x, golden), metrics.max_abs(baseline, golden)
    golden = golden.to(torch.float64)
    size = float(golden.square().mean().sqrt())
    small = golden.abs() < floor * size
    measures = []
    for name, chosen, error, at_least in (
        ("relative_l2", ~small, metrics.relative_l2, floor),
        ("small values max_abs", small, metrics.max_abs, floor * size),
    ):
        if bool(chosen.any()):
            ours, theirs = error(x[chosen], golden[chosen]), error(baseline[chosen], golden[chosen])
            name = f"{metric} {name}"
            measures.append(error_ratio(ours, theirs, metric=name, floor=at_least, factor=factor))
    return tuple(measures)


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What a metric does over replayed steps: the baseline, its spread under perturbation, and the floor, per step.

    A replay has the tokens, rewards and old log-probs of the baseline, so only arithmetic differs. With x_{j,t} the
    metric at step t of the replay perturbed with noise j = 1 … J ≥ 5 (x_{0,t}: unperturbed),
    E_t = max_j |x_{j,t} − x_{0,t}|, and a device passes where |x_t − x_{0,t}| ≤ factor · max(E_t, floor_t).

    ``scale`` is what the floor is relative to: |x_{0,t}| for positive, well-scaled metrics (grad norm, entropy), and
    mean |advantage · ratio| (:func:`policy_loss_scale`) for the policy loss, which is ≈ 0 by construction on the first
    update.

    Raises:
        InputError: fewer than five replays, unsorted or repeated steps, unequal lengths, values that are not finite.
    """

    metric: str
    steps: tuple[int, ...]
    base: tuple[float, ...]
    spread: tuple[float, ...]
    floor: tuple[float, ...]
    seeds: tuple[int, ...]
    perturbation: str | tuple[str, ...]
    device: str
    factor: float = ENVELOPE_FACTOR
    unit: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(int(s) for s in self.steps))
        object.__setattr__(self, "seeds", tuple(int(s) for s in self.seeds))
        if not isinstance(self.perturbation, str):
            object.__setattr__(self, "perturbation", tuple(self.perturbation))
        where = f"envelope of {self.metric}"
        _require_runs(self.runs, len(self.seeds), where)
        _require_steps(self.steps, where)
        for name in ("base", "spread", "floor"):
            values = tuple(float(v) for v in getattr(self, name))
            object.__setattr__(self, name, values)
            _require_length(values, self.steps, f"{where}, {name}")
            low = -math.inf if name == "base" else 0.0
            if not all(math.isfinite(v) and v >= low for v in values):
                raise InputError("the values of a baseline are finite", where=f"{where}, {name}", found=values)

    @property
    def runs(self) -> tuple[tuple[int, str], ...]:
        """(seed, perturbation) of every replay."""
        return _identities(self.seeds, self.perturbation)

    @classmethod
    def from_replays(
        cls,
        metric: str,
        base: Sequence[float],
        replays: Sequence[Sequence[float]],
        *,
        seeds: Sequence[int],
        perturbation: str | Sequence[str],
        device: str,
        dtype: Precision | torch.dtype | str,
        reduction_length: int,
        steps: Sequence[int] | None = None,
        scale: Sequence[float] | None = None,
        factor: float = ENVELOPE_FACTOR,
        operator: str = "matmul",
        unit: str = "",
    ) -> Envelope:
        """Measures E_t over ``replays`` [J][T] of ``base`` [T]; the floor is scale_t × :meth:`Precision.floor`.

        Args:
            scale: per step [T]; None for |base|, which is refused where the base is 0 and for a policy loss.
        """
        where = f"envelope of {metric}"
        for j, replay in enumerate(replays):
            _require_length(replay, base, f"{where}, replay {j}")
            if not all(map(math.isfinite, replay)):
                raise InputError("a replay of the baseline is not finite", where=f"{where}, replay {j}")
        _require_length(replays, seeds, f"{where}, replays")
        if scale is None:
            if any(name in metric for name in ("pg_loss", "policy_loss")) or any(value == 0.0 for value in base):
                raise InputError(
                    "a metric that vanishes by construction has no scale of its own",
                    where=where,
                    expected="scale = mean |advantage · ratio| per step",
                    found="scale=None",
                    next_step="pass scale=[policy_loss_scale(...), ...]",
                )
            scale = [abs(value) for value in base]
        _require_length(scale, base, f"{where}, scale")
        relative = Precision.of(dtype).floor(reduction_length, operator=operator)
        return cls(
            metric=metric,
            steps=tuple(range(1, len(base) + 1)) if steps is None else tuple(steps),
            base=tuple(base),
            spread=tuple(max(abs(r[t] - base[t]) for r in replays) if replays else 0.0 for t in range(len(base))),
            floor=tuple(relative * s for s in scale),
            seeds=tuple(seeds),
            perturbation=perturbation if isinstance(perturbation, str) else tuple(perturbation),
            device=device,
            factor=factor,
            unit=unit,
        )

    def judge_steps(
        self,
        values: Sequence[float],
        *,
        run_seed: int,
        run_perturbation: str | None = None,
        steps: Sequence[int] | None = None,
    ) -> tuple[Measure, ...]:
        """One measure per step: |x_t − x_{0,t}| against its bound.

        Args:
            steps: the steps of ``values``; None where they are the envelope's own.

        Raises:
            InputError: other steps or another number of them, or the judged run is one of the replays.
        """
        where = f"envelope of {self.metric}"
        _refuse_own_run(self.runs, run_seed, run_perturbation, where)
        if steps is not None and tuple(steps) != self.steps:
            raise InputError("the judged run has other steps", where=where, expected=self.steps, found=tuple(steps))
        _require_length(values, self.steps, where)
        measures = []
        for step, x, base, spread, floor in zip(self.steps, values, self.base, self.spread, self.floor, strict=True):
            what = f"spread of {len(self.seeds)} perturbed replays" if spread >= floor else "floor from unit roundoff"
            measures.append(
                Measure(
                    name=f"{self.metric} at step {step}",
                    value=abs(float(x) - base),
                    bound=self.factor * max(spread, floor),
                    unit=self.unit,
                    origin=f"{self.factor:g} × {what} on {self.device}",
                )
            )
        return tuple(measures)

    def judge(self, values: Sequence[float], **run) -> Measure:
        """The step that used most of its bound (NaN first); arguments as :meth:`judge_steps`."""
        return max(self.judge_steps(values, **run), key=lambda m: math.inf if math.isnan(m.value) else m.used)

    def to_dict(self) -> dict:
        """JSON-ready form with full-precision floats; :meth:`from_dict` reads it back bit for bit."""
        return _jsonable(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping) -> Envelope:
        """The inverse of :meth:`to_dict`; unknown keys are refused."""
        return _build(cls, data)


def policy_loss_scale(advantages: torch.Tensor, ratio: torch.Tensor, response_mask: torch.Tensor) -> float:
    """mean |advantage · ratio| over response tokens, all [b, r]: the size of the terms the policy loss sums.

    Raises:
        InputError: unequal shapes, or a mask without a token.
    """
    if not advantages.shape == ratio.shape == response_mask.shape:
        found = [tuple(t.shape) for t in (advantages, ratio, response_mask)]
        raise InputError("one shape for all", where="policy_loss_scale", expected="[b, r] three times", found=found)
    chosen = response_mask.cpu() > 0
    if not bool(chosen.any()):
        raise InputError("the mask has no response token", where="policy_loss_scale", expected="at least one 1")
    return float((advantages.detach().cpu().double() * ratio.detach().cpu().double())[chosen].abs().mean())


def _floor(
    dtype: Precision | torch.dtype | str, reduction_length: int, operator: str, model: str, scale: float
) -> tuple[float, str]:
    if not (math.isfinite(scale) and scale >= 0.0):
        raise InputError("the scale of a floor is a magnitude", where="scale", expected="finite, ≥ 0", found=scale)
    precision = Precision.of(dtype)
    floor = scale * precision.floor(reduction_length, operator=operator, model=model)
    rule = "√n·u (Higham and Mary 2019)" if model == "probabilistic" else "n·u/(1 − n·u) (Higham 2002)"
    return floor, f"unit roundoff of {precision.describe(operator)}, growth {rule} over n = {reduction_length}"


def _identities(seeds: Sequence[int], perturbation: str | tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    kinds = (perturbation,) * len(seeds) if isinstance(perturbation, str) else perturbation
    if len(kinds) != len(seeds):
        raise InputError("one perturbation for all runs or one for each", expected=len(seeds), found=len(kinds))
    return tuple(zip(seeds, kinds, strict=True))


def _require_runs(runs: tuple[tuple[int, str], ...], count: int, where: str) -> None:
    if len(runs) != count:
        raise InputError("every noise value has a seed", where=where, expected=f"{count} seeds", found=len(runs))
    if len(set(runs)) != len(runs):
        raise InputError("the same perturbed run is counted twice", where=where, expected="distinct runs", found=runs)
    if count < MINIMUM_RUNS:
        raise InputError(
            "too few runs to know the noise",
            where=where,
            expected=f"at least {MINIMUM_RUNS} perturbed runs",
            found=count,
            next_step="record the baseline with more perturbations",
        )


def _require_steps(steps: tuple[int, ...], where: str) -> None:
    if not steps or any(b <= a for a, b in zip(steps, steps[1:], strict=False)):
        raise InputError("steps are missing, repeated or unsorted", where=where, expected="ascending", found=steps)


def _require_length(values: Sequence, like: Sequence, where: str) -> None:
    if len(values) != len(like):
        raise InputError("lengths differ", where=where, expected=len(like), found=len(values))


def _refuse_own_run(runs: tuple[tuple[int, str], ...], seed: int, perturbation: str | None, where: str) -> None:
    own = (seed, perturbation) in runs if perturbation is not None else any(seed == s for s, _ in runs)
    if own:
        raise InputError(
            "the judged run is one of those the noise was measured on",
            where=where,
            expected="a run with another seed or perturbation",
            found=f"seed {seed}" + (f", {perturbation}" if perturbation is not None else ""),
            next_step="judge another run, or say run_perturbation= if it was not perturbed this way",
        )


def _jsonable(data: dict) -> dict:
    return {
        key: list(v) if isinstance(v, tuple) else _jsonable(v) if isinstance(v, dict) else v for key, v in data.items()
    }


def _build(cls, data: Mapping, **nested: type):
    arguments = known_keys(cls, data)
    for key, kind in nested.items():
        if arguments.get(key) is not None:
            arguments[key] = kind.from_dict(arguments[key])
    try:
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()})
    except (TypeError, ValueError) as error:
        raise InputError("unreadable record", where=cls.__name__, found=str(error)) from None
