"""Do two stacks learn alike? Gates on sampled training curves, where tokens differ and relative error says nothing.

A 1 % gate on sampled reward is red on two identical systems. What is compared instead is one number per run, the
projection of its curve on a straight rise, against the spread measured over at least five baseline runs.

With m baseline runs and k subject runs of T steps, r_t the pre-filter mean reward at step t:

* **level at step 1**, before any update, so that only inference can differ: d₁ = r̄_subject,1 − r̄_baseline,1 beyond
  z_{α/2}·SE₁ is a rollout or weight-sync fault;
* **learning deficit**: τ_t = t/T, w_t = τ_t / Σ τ_u², y = Σ_t w_t (r_t − r̄_start) with one start for all runs,
  D = ȳ_subject − ȳ_baseline, in reward units at the end of the window. SE = s·√(1/m + 1/k) with s² the variance of y
  pooled over runs; t = D/SE has ν = m − 1 degrees of freedom for k = 1, else m + k − 2;
* **verdict** with margin Δ = max(least margin, 20 % of the baseline's gain), failure first: FAIL if t < −t_{α,ν} and
  |D| ≥ Δ/2; PASS if D − t_{0.95,ν}·SE > −Δ; else INCONCLUSIVE, which more runs resolve (k up to 3). Better than the
  baseline is reported, never red by itself. A two-sided metric (response length) has |t| > t_{α/2,ν} and
  |D| + t_{0.95,ν}·SE < Δ instead.

Every gate returns a :class:`CurveResult`; what cannot be compared (shuffled prompts, a missing step, NaN, no variance,
another configuration, copies of one run) is ERROR with the reason, never PASS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

from alignment.errors import InputError
from alignment.numerics.curve_run import CurveRun, CurveStep, GroupStatistics
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

__all__ = [
    "CurveMetric",
    "CurveResult",
    "CurveRun",
    "CurveStep",
    "GroupStatistics",
    "RESPONSE_LENGTH",
    "REWARD",
    "cusum",
    "drift_gate",
    "gate_uncalibrated",
    "nightly_gate",
    "paired_gate",
    "unpaired_gate",
]

MINIMUM_BASELINES = 5
MOST_RUNS = 3
ALPHA = 0.01
GAIN_SHARE = 0.20
NIGHTLY_RED, NIGHTLY_GREEN, NIGHTLY_FINAL = 0.002, 0.15, 0.01
CUSUM_SLACK, CUSUM_ALARM, CUSUM_HISTORY = 0.5, 5.0, 10


@dataclass(frozen=True, kw_only=True)
class CurveMetric:
    """A quantity of :attr:`CurveStep.groups` and how it is gated.

    ``higher_is_better`` True or False gates one side, None both. ``least_margin`` is in ``unit``, or a share of the
    baseline's level at step 1 where ``margin_is_relative``.
    """

    name: str
    higher_is_better: bool | None
    least_margin: float
    margin_is_relative: bool = False
    unit: str = ""


REWARD = CurveMetric(name="reward", higher_is_better=True, least_margin=0.05)
RESPONSE_LENGTH = CurveMetric(
    name="response_length", higher_is_better=None, least_margin=0.05, margin_is_relative=True, unit="tokens"
)


@dataclass(frozen=True, kw_only=True)
class CurveResult:
    """What a gate found. The numbers are None where the outcome is ERROR.

    ``deficit`` is D, ``p_value`` the chance of a t as bad under equal systems (one- or two-sided as the metric is),
    ``detectable`` the deficit found with 90 % power at this spread, ``more_runs`` how many runs would resolve an
    inconclusive result.
    """

    outcome: Outcome
    reason: str
    metric: str
    measures: tuple[Measure, ...] = ()
    where: Divergence | None = None
    level_difference: float | None = None
    level_p_value: float | None = None
    deficit: float | None = None
    standard_error: float | None = None
    p_value: float | None = None
    margin: float | None = None
    detectable: float | None = None
    more_runs: int = 0

    def verdict(
        self,
        *,
        check: str,
        subject: str,
        device: str,
        stage: str = "actor_update",
        baseline: str | None = None,
        next_command: str | None = None,
    ) -> Verdict:
        """As the verdict of an end-to-end check; a level fault overrides ``stage``."""
        return Verdict(
            check=check,
            layer="e2e",
            stage=self.where.stage if self.where else stage,
            subject=subject,
            device=device,
            outcome=self.outcome,
            reason=self.reason,
            measures=self.measures,
            where=self.where,
            baseline=baseline,
            next_command=next_command,
        )


@dataclass(frozen=True)
class _Statistics:
    """Everything the decisions need, in the metric's own direction."""

    level: float
    level_error: float
    deficit: float
    error: float
    freedom: int
    spread: float
    margin: float
    gain: float
    m: int
    k: int


def paired_gate(
    baseline: Sequence[CurveRun],
    subject: Sequence[CurveRun],
    *,
    metric: CurveMetric = REWARD,
    alpha: float = ALPHA,
    level_alpha: float = ALPHA,
) -> CurveResult:
    """Runs that consumed the same prompts in the same order: filtering off, or regeneration from a per-step reserve.

    Level: SE₁² = (1/k + 1/m) · P⁻² · Σ_i s_i²/G with s_i² the variance of prompt i over the G samples of a group,
    averaged over the baseline runs. The prompts themselves cancel.

    Args:
        baseline: at least five runs of one configuration with distinct seeds.
        subject: 1 … 3 runs.
        alpha, level_alpha: false-alarm rates of the deficit and of the level test.
    """
    return _gate(baseline, subject, metric, paired=True, decide=_single_stage(alpha, level_alpha))


def unpaired_gate(
    baseline: Sequence[CurveRun],
    subject: Sequence[CurveRun],
    *,
    metric: CurveMetric = REWARD,
    alpha: float = ALPHA,
    level_alpha: float = ALPHA,
) -> CurveResult:
    """Runs with dynamic sampling on, which consume different prompts from step 2 on.

    The deficit test is that of :func:`paired_gate`. The level is compared over prompts: with V the variance over
    distinct prompts of a prompt's mean (over all its groups on one side) and U their number,
    SE₁² = V_subject/U_subject + V_baseline/U_baseline, conservative where both sides saw the same prompts.
    """
    return _gate(baseline, subject, metric, paired=False, decide=_single_stage(alpha, level_alpha))


def nightly_gate(
    baseline: Sequence[CurveRun], subject: Sequence[CurveRun], *, metric: CurveMetric = REWARD, paired: bool = True
) -> CurveResult:
    """Two stages, for every night: one run first; p < 0.002 is red, p > 0.15 green, else two more seeds decide at 0.01.

    Call it with one run; where it returns INCONCLUSIVE (``more_runs`` says how many), call it again with that run and
    the new ones. With m = 5 the deficit gives 1.1 % false alarms at 1.3 runs a night, the level 0.2 % a look. A
    significant deficit below Δ/2 is reported and not red. Green here means *no deficit found*; ``detectable`` says what
    would have been.
    """
    return _gate(baseline, subject, metric, paired=paired, decide=_two_stage)


def gate_uncalibrated(
    baseline: CurveRun,
    subject: CurveRun,
    *,
    metric: CurveMetric = REWARD,
    drift: float = 0.05,
    alpha: float = ALPHA,
    paired: bool = True,
) -> CurveResult:
    """Only one stored run: the spread between runs is *declared*, not measured, and the result says ``uncalibrated``.

    z = D / √(Var y_baseline + Var y_subject + drift²), with Var y = Σ_t w_t² · P⁻² · Σ_i s_i²/G the sampling variance
    of one run and ``drift`` the declared standard deviation, in the metric's unit, of how trajectories part.
    """
    if not (math.isfinite(drift) and drift > 0.0):
        raise InputError("the declared drift is a spread", where="drift", expected="> 0", found=drift)
    try:
        _check_preconditions([baseline], [subject], metric, paired)
        sampling = _sampling_variance(baseline, metric) + _sampling_variance(subject, metric)
        error = math.sqrt(sampling + drift * drift)
        stats = _statistics([baseline], [subject], metric, paired, error=error)
    except InputError as fault:
        return _error(metric, fault)
    result = _decide(stats, metric, alpha, alpha, quantile=lambda p, _: NormalDist().inv_cdf(p))
    return replace(result, reason=f"uncalibrated (one stored run, declared drift {drift:g}): {result.reason}")


def cusum(history: Sequence[float], deficits: Sequence[float]) -> list[float]:
    """S_n = max(0, S_{n−1} − z_n − 0.5) over nightly deficits, z standardised by ≥ 10 accepted nights.

    Args:
        history: deficits D of accepted nights; their mean and sample standard deviation standardise.
        deficits: the nights since, oldest first.

    Raises:
        InputError: fewer than ten accepted nights, values that are not finite, or a history without spread.
    """
    if len(history) < CUSUM_HISTORY:
        raise InputError(
            "too few accepted nights to watch for drift",
            where="cusum",
            expected=f"at least {CUSUM_HISTORY}",
            found=len(history),
        )
    if not all(map(math.isfinite, [*history, *deficits])):
        raise InputError("a nightly deficit is not finite", where="cusum", found=[*history, *deficits])
    center = fmean(history)
    spread = math.sqrt(_variance(history))
    if spread == 0.0:
        raise InputError("the accepted nights have no spread: copies of one night?", where="cusum", found=list(history))
    sums, value = [], 0.0
    for deficit in deficits:
        value = max(0.0, value - (deficit - center) / spread - CUSUM_SLACK)
        sums.append(value)
    return sums


def drift_gate(history: Sequence[float], deficits: Sequence[float], *, metric: CurveMetric = REWARD) -> CurveResult:
    """FAIL when the CUSUM of the nights reached 5: for small lasting deficits that no single night shows.

    About one false alarm in 900 nights where the history gives mean and spread exactly; more often with ten nights than
    with fifty. For a metric where lower is better the sign is turned; a two-sided one is watched on both sides. ERROR
    where :func:`cusum` refuses.
    """
    signs = {True: (1.0,), False: (-1.0,), None: (1.0, -1.0)}[metric.higher_is_better]
    try:
        if not deficits:
            raise InputError("no night to judge", where="drift_gate", expected="at least one deficit", found=0)
        sums = [cusum([s * d for d in history], [s * d for d in deficits]) for s in signs]
    except InputError as fault:
        return _error(metric, fault)
    # any excursion counts: an alarm does not heal by later good nights, it is acknowledged by new accepted history
    peak = max(max(series) for series in sums)
    measure = Measure(
        name=f"{metric.name} CUSUM",
        value=peak,
        bound=math.nextafter(CUSUM_ALARM, 0.0),
        unit="σ",
        origin=f"CUSUM, slack {CUSUM_SLACK:g}, alarm at {CUSUM_ALARM:g}, {len(history)} accepted nights",
    )
    if peak >= CUSUM_ALARM:
        first = 1 + min(n for series in sums for n, value in enumerate(series) if value >= CUSUM_ALARM)
        reason = (
            f"{metric.name} drifts: the CUSUM reached {peak:.2f} σ, alarm at {CUSUM_ALARM:g}, first in night {first}"
        )
        return CurveResult(outcome=Outcome.FAIL, reason=reason, metric=metric.name, measures=(measure,))
    reason = f"no drift of {metric.name} over {len(deficits)} nights: CUSUM at most {peak:.2f} σ of {CUSUM_ALARM:g}"
    return CurveResult(outcome=Outcome.PASS, reason=reason, metric=metric.name, measures=(measure,))


def _gate(baseline, subject, metric, *, paired, decide) -> CurveResult:
    baseline, subject = list(baseline), list(subject)
    try:
        if len(baseline) < MINIMUM_BASELINES:
            raise InputError(
                "the spread between runs must be measured before a threshold is fixed",
                where="baseline",
                expected=f"at least {MINIMUM_BASELINES} runs",
                found=len(baseline),
                next_step="record more seeds, or use the uncalibrated gate with one stored run",
            )
        if not 1 <= len(subject) <= MOST_RUNS:
            raise InputError("subject runs", where="subject", expected=f"1 … {MOST_RUNS}", found=len(subject))
        _check_preconditions(baseline, subject, metric, paired)
        stats = _statistics(baseline, subject, metric, paired)
    except InputError as fault:
        return _error(metric, fault)
    return decide(stats, metric)


def _single_stage(alpha: float, level_alpha: float):
    for name, value in (("alpha", alpha), ("level_alpha", level_alpha)):
        if not 0.0 < value < 0.5:
            raise InputError("a false-alarm rate", where=name, expected="0 < α < 0.5", found=value)
    return lambda stats, metric: _decide(stats, metric, alpha, level_alpha)


def _decide(stats: _Statistics, metric: CurveMetric, alpha: float, level_alpha: float, quantile=None) -> CurveResult:
    quantile = quantile or _t_quantile
    critical = quantile(1.0 - (alpha / 2 if metric.higher_is_better is None else alpha), stats.freedom)
    p_value = _p_value(stats, metric, gaussian=quantile is not _t_quantile)
    result = _measured(stats, metric, critical, level_alpha, p_value, quantile)
    if (fault := _level_fault(result, stats, metric, level_alpha)) is not None:
        return fault
    how = f"{_shortfall_text(stats, metric)}, p = {p_value:.2g} at α = {alpha:g}, margin {stats.margin:.3g}"
    if _shortfall(stats, metric) > critical * stats.error and abs(stats.deficit) >= stats.margin / 2:
        return replace(result, outcome=Outcome.FAIL, reason=how)
    reach = quantile(0.95, stats.freedom) * stats.error
    if _shortfall(stats, metric) + reach < stats.margin:
        return replace(result, outcome=Outcome.PASS, reason=f"within the margin: {how}")
    more = MOST_RUNS - stats.k
    hint = (
        f"add {more} runs" if more > 0 else f"the spread {stats.spread:.3g} is too large for {stats.k} runs to decide"
    )
    return replace(result, outcome=Outcome.INCONCLUSIVE, reason=f"not decided: {how}; {hint}", more_runs=max(more, 0))


def _two_stage(stats: _Statistics, metric: CurveMetric) -> CurveResult:
    p_value = _p_value(stats, metric)
    first = stats.k < MOST_RUNS
    threshold = NIGHTLY_RED if first else NIGHTLY_FINAL
    critical = _t_quantile(1.0 - (threshold / 2 if metric.higher_is_better is None else threshold), stats.freedom)
    result = _measured(stats, metric, critical, NIGHTLY_RED, p_value, _t_quantile)
    if (fault := _level_fault(result, stats, metric, NIGHTLY_RED)) is not None:
        return fault
    how = f"{_shortfall_text(stats, metric)}, p = {p_value:.2g}"
    small = abs(stats.deficit) < stats.margin / 2
    if stats.k == 1 and p_value > NIGHTLY_GREEN:
        return replace(result, outcome=Outcome.PASS, reason=f"no deficit found: {how} > {NIGHTLY_GREEN:g}")
    if p_value < threshold and not small and stats.k in (1, MOST_RUNS):
        return replace(result, outcome=Outcome.FAIL, reason=f"{how} < {threshold:g}")
    if first:
        more = MOST_RUNS - stats.k
        reason = f"not decided: {how}; run {more} more seeds for the final test at {NIGHTLY_FINAL:g}"
        return replace(result, outcome=Outcome.INCONCLUSIVE, reason=reason, more_runs=more)
    note = f", below half the margin {stats.margin:.3g}" if p_value < threshold else f" ≥ {threshold:g}"
    return replace(result, outcome=Outcome.PASS, reason=f"no deficit found: {how}{note}")


def _measured(stats, metric, critical, level_alpha, p_value, quantile) -> CurveResult:
    """The numbers of a decision, with the outcome still open."""
    z = NormalDist().inv_cdf(1.0 - level_alpha / 2)
    detectable = (critical + quantile(0.9, stats.freedom)) * stats.error
    source = f"spread {stats.spread:.3g} of {stats.m} baseline runs" if stats.m > 1 else "declared drift"
    measures = (
        Measure(
            name=f"{metric.name} level at step 1",
            value=stats.level,
            bound=z * stats.level_error,
            unit=metric.unit,
            origin=f"z test at α = {level_alpha:g} on the sampling error within groups",
        ),
        Measure(
            name=f"{metric.name} deficit",
            value=max(0.0, _shortfall(stats, metric)),
            bound=max(critical * stats.error, stats.margin / 2),
            unit=metric.unit,
            origin=f"t test, {source}; at least half the margin {stats.margin:.3g}",
        ),
        Measure(name=f"{metric.name} difference at the end", value=stats.deficit, unit=metric.unit),
        Measure(name=f"{metric.name} detectable deficit", value=detectable, unit=metric.unit, origin="90 % power"),
        Measure(name=f"{metric.name} p-value", value=p_value),
    )
    return CurveResult(
        outcome=Outcome.INCONCLUSIVE,
        reason="",
        metric=metric.name,
        measures=measures,
        level_difference=stats.level,
        level_p_value=2.0 * NormalDist().cdf(-abs(stats.level) / stats.level_error) if stats.level_error else 1.0,
        deficit=stats.deficit,
        standard_error=stats.error,
        p_value=p_value,
        margin=stats.margin,
        detectable=detectable,
    )


def _level_fault(
    result: CurveResult, stats: _Statistics, metric: CurveMetric, level_alpha: float
) -> CurveResult | None:
    if result.measures[0].within:
        return None
    sigmas = stats.level / stats.level_error
    detail = f"{metric.name} differs by {stats.level:+.4g}{_unit(metric)}, {sigmas:+.1f} standard errors"
    return replace(
        result,
        outcome=Outcome.FAIL,
        reason=f"rollout or weight-sync fault: {detail} at step 1, before any update (α = {level_alpha:g})",
        where=Divergence(
            stage="rollout",
            module="inference engine or weight sync",
            quantity=f"{metric.name} at step 1",
            detail=detail,
        ),
    )


def _shortfall(stats: _Statistics, metric: CurveMetric) -> float:
    """How much worse the subject ends, ≥ 0 for worse; for a two-sided metric how far off."""
    return {True: -stats.deficit, False: stats.deficit, None: abs(stats.deficit)}[metric.higher_is_better]


def _shortfall_text(stats: _Statistics, metric: CurveMetric) -> str:
    side = "above" if stats.deficit > 0 else "below"
    return (
        f"{metric.name} ends {abs(stats.deficit):.4g}{_unit(metric)} {side} the baseline "
        f"(t = {stats.deficit / stats.error:+.2f}, {stats.k} against {stats.m} runs, spread {stats.spread:.3g})"
    )


def _unit(metric: CurveMetric) -> str:
    return f" {metric.unit}" if metric.unit else ""


def _p_value(stats: _Statistics, metric: CurveMetric, *, gaussian: bool = False) -> float:
    t = _shortfall(stats, metric) / stats.error
    tail = NormalDist().cdf(-t) if gaussian else _t_tail(t, stats.freedom)
    return 2.0 * tail if metric.higher_is_better is None else tail


def _t_quantile(probability: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(probability, freedom))


def _t_tail(value: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.sf(value, freedom))


def _weights(total: int) -> list[float]:
    tau = [t / total for t in range(1, total + 1)]
    square = math.fsum(u * u for u in tau)
    return [u / square for u in tau]


def _projection(curve: Sequence[float], start: float) -> float:
    return math.fsum(w * (r - start) for w, r in zip(_weights(len(curve)), curve, strict=True))


def _statistics(baseline, subject, metric: CurveMetric, paired: bool, *, error: float | None = None) -> _Statistics:
    name, m, k = metric.name, len(baseline), len(subject)
    level = fmean(run.curve(name)[0] for run in subject) - fmean(run.curve(name)[0] for run in baseline)
    level_error = (_paired_level_error if paired else _unpaired_level_error)(baseline, subject, name)
    if level_error == 0.0 and level != 0.0:
        raise InputError(
            f"{name} has no variance at step 1, so its difference cannot be judged", where="level test", found=level
        )
    start = fmean(run.curve(name)[0] for run in baseline)
    y_base = [_projection(run.curve(name), start) for run in baseline]
    y_subject = [_projection(run.curve(name), start) for run in subject]
    if error is None:
        squares = (m - 1) * _variance(y_base) + ((k - 1) * _variance(y_subject) if k > 1 else 0.0)
        freedom = m - 1 if k == 1 else m + k - 2
        spread = math.sqrt(squares / freedom)
        error = spread * math.sqrt(1.0 / m + 1.0 / k)
    else:
        freedom, spread = 0, error
    if error == 0.0:
        raise InputError(
            f"the runs have no spread in {name}: copies of one run?",
            where="baseline",
            expected="runs with distinct seeds",
        )
    least = metric.least_margin * (abs(start) if metric.margin_is_relative else 1.0)
    gain = fmean(y_base)
    return _Statistics(
        level=level,
        level_error=level_error,
        deficit=fmean(y_subject) - gain,
        error=error,
        freedom=freedom,
        spread=spread,
        margin=max(least, GAIN_SHARE * abs(gain)),
        gain=gain,
        m=m,
        k=k,
    )


def _paired_level_error(baseline, subject, name: str) -> float:
    first = [run.steps[0] for run in baseline]
    prompts = len(first[0].prompt_ids)
    within = math.fsum(v for step in first for v in step.groups[name].variance) / len(first) / first[0].group_size
    return math.sqrt((1.0 / len(subject) + 1.0 / len(baseline)) * within) / prompts


def _unpaired_level_error(baseline, subject, name: str) -> float:
    return math.sqrt(_mean_variance(baseline, name) + _mean_variance(subject, name))


def _mean_variance(runs, name: str) -> float:
    by_prompt: dict[str, list[float]] = {}
    for run in runs:
        for prompt, mean in zip(run.steps[0].prompt_ids, run.steps[0].groups[name].mean, strict=True):
            by_prompt.setdefault(prompt, []).append(mean)
    means = [fmean(values) for values in by_prompt.values()]
    if len(means) < 2:
        raise InputError("too few prompts at step 1", where=name, expected="at least 2", found=len(means))
    return _variance(means) / len(means)


def _sampling_variance(run: CurveRun, metric: CurveMetric) -> float:
    terms = []
    for weight, step in zip(_weights(len(run.steps)), run.steps, strict=True):
        variance = math.fsum(step.groups[metric.name].variance) / step.group_size
        terms.append(weight * weight * variance / len(step.prompt_ids) ** 2)
    return math.fsum(terms)


def _variance(values: Sequence[float]) -> float:
    center = fmean(values)
    return math.fsum((v - center) ** 2 for v in values) / (len(values) - 1)


def _check_preconditions(baseline, subject, metric: CurveMetric, paired: bool) -> None:
    runs = [*baseline, *subject]
    reference = baseline[0]
    for run in runs:
        _check_steps(run)
    for run in runs:
        _same("total_steps", reference, run)
        _same("config", reference, run, next_step="compare runs of one configuration")
        _same("filtered", reference, run)
        _check_values(run, metric.name)
    _check_distinct(runs, lambda run: run.identity)
    # a subject may repeat a baseline bit for bit (another device, one seed); the baselines may not repeat each other
    for side in (baseline, subject):
        _check_distinct(side, lambda run: tuple(step.groups[metric.name] for step in run.steps))
    if paired:
        if reference.filtered:
            raise InputError(
                "filtered runs consume different prompts",
                where=reference.label,
                expected="filtering off",
                found="filtered=True",
                next_step="use the unpaired gate, or run with filtering off",
            )
        _check_same_prompts(reference, runs)


def _check_steps(run: CurveRun) -> None:
    numbers = [step.step for step in run.steps]
    wanted = list(range(1, run.total_steps + 1))
    if numbers == wanted and numbers:
        return
    problem = "steps are not 1 … T in order"
    if not set(numbers) & set(wanted):
        problem = "no step in common"
    elif len(set(numbers)) != len(numbers):
        problem = f"repeated steps {sorted({n for n in numbers if numbers.count(n) > 1})}"
    elif missing := sorted(set(wanted) - set(numbers)):
        problem = f"missing steps {missing}"
    elif numbers != sorted(numbers):
        problem = "unsorted steps"
    raise InputError(problem, where=run.label, expected=f"1 … {run.total_steps}", found=numbers)


def _same(name: str, reference: CurveRun, run: CurveRun, next_step: str | None = None) -> None:
    expected, found = getattr(reference, name), getattr(run, name)
    if expected != found:
        raise InputError(f"another {name}", where=run.label, expected=expected, found=found, next_step=next_step)


def _check_values(run: CurveRun, name: str) -> None:
    total = 0.0
    for step in run.steps:
        where = f"{run.label}, step {step.step}"
        if name not in step.groups:
            raise InputError(f"{name} was not recorded", where=where, expected=name, found=sorted(step.groups))
        if step.group_size < 2:
            raise InputError(
                "a group of one has no variance", where=where, expected="group_size ≥ 2", found=step.group_size
            )
        stats = step.groups[name]
        if not all(map(math.isfinite, (*stats.mean, *stats.variance))):
            raise InputError(f"{name} is not finite", where=where, expected="finite values", found="NaN or infinity")
        if min(stats.variance) < 0.0:
            raise InputError(f"negative variance of {name}", where=where, found=min(stats.variance))
        total += math.fsum(stats.variance)
    if total == 0.0:
        raise InputError(f"{name} has no variance: every sample of every group is equal", where=run.label, found=0.0)


def _check_distinct(runs: Sequence[CurveRun], key: Callable[[CurveRun], object]) -> None:
    seen: dict[object, CurveRun] = {}
    for run in runs:
        if key(run) in seen:
            raise InputError(
                "one run is used twice, so the spread would be measured on itself",
                where=run.label,
                expected="runs with distinct seeds",
                found=f"the same as {seen[key(run)].label}",
            )
        seen[key(run)] = run


def _check_same_prompts(reference: CurveRun, runs: Sequence[CurveRun]) -> None:
    for run in runs:
        for ours, theirs in zip(reference.steps, run.steps, strict=True):
            where = f"{run.label}, step {ours.step}"
            if ours.group_size != theirs.group_size:
                raise InputError("another group_size", where=where, expected=ours.group_size, found=theirs.group_size)
            if ours.prompt_ids != theirs.prompt_ids:
                same = sorted(ours.prompt_ids) == sorted(theirs.prompt_ids)
                raise InputError(
                    "the same prompts in another order" if same else "other prompts",
                    where=where,
                    expected=f"prompt hash {ours.prompt_hash[:12]}",
                    found=theirs.prompt_hash[:12],
                    next_step="use one data seed and turn filtering off, or use the unpaired gate",
                )


def _error(metric: CurveMetric, fault: InputError) -> CurveResult:
    return CurveResult(outcome=Outcome.ERROR, reason=f"cannot compare: {fault}", metric=metric.name)
