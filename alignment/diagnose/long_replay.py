"""The figure the field quotes: mean relative loss error over many replayed steps, beside what noise alone makes of it.

Both sides train on the same recorded tokens, so their losses may differ by rounding only, which training amplifies. The
bar of the field, 1 % over 2 000 steps, says what is usable; the measured envelope says what this model and this many
steps can do by themselves. Where one unit in the last place alone makes more than the bar, nothing can be held to it,
and the envelope decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from alignment.errors import InputError
from alignment.numerics.budget import ENVELOPE_FACTOR
from alignment.numerics.verdict import ALIGNED, MISALIGNED, Outcome
from alignment.rl.config import TrainConfig
from alignment.rl.executor import Executor
from alignment.rl.run import RunResult, replay_steps

BAR = 0.01
"""Mean relative loss error over 2 000 steps that the DeepSeek-V3 report takes as aligned."""

METRICS = ("actor/loss", "actor/grad_norm")
"""The loss is what the field quotes. With one update per step the ratio is 1 and the loss does not depend on the
weights at all, so the gradient norm, which always does, is held to its own envelope beside it."""

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Σ|Δ| / Σ|reference| of a metric over a replay, the same of perturbed replays, and where it was largest."""

    metric: str
    error: float
    noise: tuple[float, ...]
    worst_step: int
    worst_error: float

    @property
    def envelope(self) -> float | None:
        """The largest error of a perturbed replay times the factor of every envelope; None where noise is not known."""
        return ENVELOPE_FACTOR * max(self.noise) if self.noise else None

    @property
    def drowned(self) -> bool:
        """Whether noise alone makes more of the loss than the field's bar allows, so that the bar says nothing."""
        return self.metric == METRICS[0] and bool(self.noise) and max(self.noise) > BAR

    @property
    def within(self) -> bool | None:
        """Inside the envelope, and for the loss under the field's bar unless that is :attr:`drowned`; None where there
        is neither to judge by.
        """
        quoted = BAR if self.metric == METRICS[0] and not self.drowned else None
        bounds = [bound for bound in (quoted, self.envelope) if bound is not None]
        return all(self.error <= bound for bound in bounds) if bounds else None

    @property
    def judgement(self) -> str:
        """``within``, ``OUTSIDE`` or ``not judged``."""
        return {True: "within", False: "OUTSIDE", None: "not judged"}[self.within]

    def to_dict(self) -> dict:
        return {**asdict(self), "envelope": self.envelope, "within": self.within, "drowned": self.drowned}


@dataclass(frozen=True, kw_only=True)
class DriftCurve:
    """A metric of a replay step by step, for drawing.

    ``drift`` is |Δ| over the mean |reference|, whose mean is the error that is judged, and ``noise`` the same of every
    perturbed replay; ``so_far`` is Σ|Δ| / Σ|reference| over the steps so far and ``envelope`` its bound there, whose
    last values are those of :class:`Drift`. None where the reference is 0 so far.
    """

    metric: str
    steps: tuple[int, ...]
    reference: tuple[float, ...]
    replay: tuple[float, ...]
    drift: tuple[float, ...]
    noise: tuple[tuple[float, ...], ...]
    so_far: tuple[float | None, ...]
    envelope: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class LongReplay:
    """How far a replay drifted over ``steps``, one :class:`Drift` and one :class:`DriftCurve` per metric."""

    steps: int
    drifts: tuple[Drift, ...]
    curves: tuple[DriftCurve, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """A pass takes every metric inside its bounds; one that has none leaves it open."""
        judged = [drift.within for drift in self.drifts]
        if False in judged:
            return Outcome.FAIL
        return Outcome.INCONCLUSIVE if None in judged else Outcome.PASS

    @property
    def exit_code(self) -> int:
        return ALIGNED if self.outcome is Outcome.PASS else MISALIGNED

    def to_dict(self) -> dict:
        loss = self.drifts[0]
        return {
            "steps": self.steps,
            "error": loss.error,
            "bar": BAR,
            "outcome": self.outcome.value,
            "exit_code": self.exit_code,
            "drifts": [drift.to_dict() for drift in self.drifts],
        }


def relative_error(found: Rows, reference: Rows, *, metric: str = METRICS[0]) -> tuple[float, int, float]:
    """Σ|Δ| / Σ|reference| over the steps, the step with the largest |Δ|, and that over the mean |reference|.

    The ratio of sums and not the mean of ratios: a policy loss passes through zero.

    Raises:
        InputError: other steps, or a reference that is 0 throughout.
    """
    steps = [int(row["step"]) for row in reference]
    if not steps or [int(row["step"]) for row in found] != steps:
        raise InputError(
            "the runs have other steps", where="replay", expected=f"{len(steps)} steps", found=f"{len(found)} steps"
        )
    size = sum(abs(row[metric]) for row in reference)
    if not size:
        raise InputError("the reference is 0 throughout", where=metric, expected="values other than 0")
    differences = [abs(a[metric] - b[metric]) for a, b in zip(found, reference, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    return sum(differences) / size, steps[worst], differences[worst] * len(steps) / size


def drift_curve(own: Rows, reference: Rows, perturbed: Sequence[Rows], *, metric: str) -> DriftCurve:
    """``own`` against ``reference``, and every perturbed replay against ``own``, step by step; all have equal steps."""
    drift, so_far = _step_errors(own, reference, metric)
    noise = [_step_errors(rows, own, metric) for rows in perturbed]
    bounds = zip(*(one for _, one in noise)) if noise else ()
    return DriftCurve(
        metric=metric,
        steps=tuple(int(row["step"]) for row in reference),
        reference=tuple(row[metric] for row in reference),
        replay=tuple(row[metric] for row in own),
        drift=drift,
        noise=tuple(one for one, _ in noise),
        so_far=so_far,
        envelope=tuple(None if None in errors else ENVELOPE_FACTOR * max(errors) for errors in bounds),
    )


def _step_errors(found: Rows, reference: Rows, metric: str) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """|Δ| of every step over the mean |reference|, and Σ|Δ| / Σ|reference| up to every step."""
    sizes = [abs(row[metric]) for row in reference]
    differences = [abs(a[metric] - b[metric]) for a, b in zip(found, reference, strict=True)]
    mean = sum(sizes) / len(sizes)
    so_far = tuple(a / b if b else None for a, b in zip(accumulate(differences), accumulate(sizes)))
    return tuple(difference / mean for difference in differences), so_far


def long_replay(
    config: TrainConfig,
    *,
    record: Path,
    reference: Rows,
    run_dir: Path,
    steps: int,
    device: str | None = None,
    perturbations: Sequence[int] = (1, 2, 3),
    executor: str | Executor = "inprocess",
    progress: Callable[[str], None] = lambda line: None,
) -> LongReplay:
    """Replays ``record`` as ``config`` says, and as often again as there are ``perturbations`` of one ulp.

    Args:
        reference: one row of metrics per recorded step, of the device that is trusted.
        executor: as in :func:`alignment.rl.run.run_dapo`.

    Raises:
        InputError: fewer recorded steps than asked for.
    """
    if len(reference) < steps:
        raise InputError("fewer steps were recorded", where=record, expected=f"{steps}", found=len(reference))
    reference = reference[:steps]

    def replay(name: str, perturbation: int | None) -> RunResult:
        progress(name)
        return replay_steps(
            config,
            record=record,
            run_dir=run_dir / name,
            device=device,
            steps=steps,
            perturbation=perturbation,
            executor=executor,
        )

    own = replay("replay", None).metrics
    # Noise is measured against the replay it perturbs, on the device that is judged.
    perturbed = [replay(f"ulp-{seed}", seed).metrics for seed in perturbations]
    drifts, curves = [], []
    for metric in METRICS:
        error, worst_step, worst_error = relative_error(own, reference, metric=metric)
        noise = tuple(relative_error(rows, own, metric=metric)[0] for rows in perturbed)
        drifts.append(Drift(metric=metric, error=error, noise=noise, worst_step=worst_step, worst_error=worst_error))
        curves.append(drift_curve(own, reference, perturbed, metric=metric))
    return LongReplay(steps=steps, drifts=tuple(drifts), curves=tuple(curves))
