"""The gates on sampled curves: calibration and power on synthetic runs, and everything that must be an ERROR."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import scipy

from alignment.errors import InputError
from alignment.numerics import curves
from alignment.numerics.curves import (
    RESPONSE_LENGTH,
    REWARD,
    CurveMetric,
    CurveRun,
    CurveStep,
    GroupStatistics,
    cusum,
    drift_gate,
    gate_uncalibrated,
    nightly_gate,
    paired_gate,
    unpaired_gate,
)
from alignment.numerics.random import portable_normal, portable_uniform
from alignment.numerics.verdict import Outcome, Verdict

START, BASELINE_END, BROKEN_END = -0.9, -0.6, -0.8
SPREAD = 0.026
STEPS, PROMPTS, GROUP = 6, 3, 8
WITHIN = 0.2


def simulate(count, *, end=BASELINE_END, start=START, stream="null", spread=SPREAD, filtered=False, **changes):
    """``count`` runs whose y has standard deviation ``spread`` and whose samples have standard deviation WITHIN.

    Sampling within groups accounts for Σ w² · WITHIN²/(P·G) of the variance of y, a drift of the trajectory, linear in
    the step, for the rest.
    """
    weights = np.array(curves._weights(STEPS))
    sampling = math.sqrt((weights**2).sum() * WITHIN**2 / (PROMPTS * GROUP))
    drift = math.sqrt(spread**2 - sampling**2) * portable_normal(count, seed=0, stream=f"{stream}/drift").numpy()
    noise = portable_normal((count, STEPS, PROMPTS, GROUP), seed=0, stream=f"{stream}/samples").numpy() * WITHIN
    tau = np.arange(1, STEPS + 1) / STEPS
    path = (
        start
        + (end - start) * (tau - tau[0]) / (1 - tau[0])
        + drift[:, None] * (tau - tau[0]) / (weights @ (tau - tau[0]))
    )
    samples = path[:, :, None, None] + noise
    means, variances = samples.mean(-1).tolist(), samples.var(-1, ddof=1).tolist()
    return [
        CurveRun(
            seed=i,
            device=stream,
            config="c0ffee",
            total_steps=STEPS,
            filtered=filtered,
            steps=tuple(
                CurveStep(
                    step=t + 1,
                    prompt_ids=tuple(f"p{t * PROMPTS + p}" for p in range(PROMPTS)),
                    group_size=GROUP,
                    groups={"reward": GroupStatistics(mean=tuple(means[i][t]), variance=tuple(variances[i][t]))},
                )
                for t in range(STEPS)
            ),
            **changes,
        )
        for i in range(count)
    ]


def change_step(run, index, **changes):
    steps = list(run.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)
    return dataclasses.replace(run, steps=tuple(steps))


def change_reward(run, change, steps=range(STEPS)):
    for index in steps:
        old = run.steps[index].groups["reward"]
        new = GroupStatistics(mean=tuple(change(m) for m in old.mean), variance=old.variance)
        run = change_step(run, index, groups={"reward": new})
    return run


def mirrored(run):
    return change_reward(run, lambda m: -m)


@pytest.fixture(scope="module")
def baseline():
    return simulate(5, stream="gpu")


@pytest.fixture(scope="module")
def equal():
    return simulate(1, stream="npu")[0]


@pytest.fixture(scope="module")
def broken():
    return simulate(1, stream="broken", end=BROKEN_END)[0]


@pytest.fixture(scope="module")
def nulls():
    """2 000 nights: five baseline runs and three of an equal subject each."""
    runs = simulate(2000 * 8)
    return [(runs[8 * i : 8 * i + 5], runs[8 * i + 5 : 8 * i + 8]) for i in range(2000)]


def rate_within_three_standard_errors(alarms, trials, nominal):
    return abs(alarms / trials - nominal) <= 3 * math.sqrt(nominal * (1 - nominal) / trials)


# -- calibration and power -------------------------------------------------------------------------------------------


def test_null_curves_alarm_at_the_nominal_rate(nulls):
    alpha = 0.05
    results = [paired_gate(base, subject[:1], alpha=alpha, level_alpha=alpha) for base, subject in nulls]
    level = [not r.measures[0].within for r in results]
    deficit = [r.p_value < alpha and abs(r.deficit) >= r.margin / 2 for r in results]
    assert rate_within_three_standard_errors(sum(level), len(nulls), alpha)
    assert rate_within_three_standard_errors(sum(deficit), len(nulls), alpha)
    failed = [r.outcome is Outcome.FAIL for r in results]
    assert failed == [a or b for a, b in zip(level, deficit, strict=True)]
    # the deficit's p-value is uniform under equal systems, over its whole range
    assert scipy.stats.kstest([r.p_value for r in results], "uniform").pvalue > 1e-3
    # better than the baseline is never red
    assert not any(f and r.deficit > 0 for f, r, bad in zip(failed, results, level, strict=True) if not bad)


def test_null_curves_with_three_runs_alarm_at_the_nominal_rate(nulls):
    alpha = 0.05
    results = [paired_gate(base, subject, alpha=alpha) for base, subject in nulls[:1000]]
    assert rate_within_three_standard_errors(sum(r.p_value < alpha for r in results), len(results), alpha)


def test_nightly_false_alarms_and_runs(nulls):
    """The deficit alone: 1.1 % at 1.3 runs a night, as designed; a level alarm at 0.2 % a look comes on top."""
    red = continued = 0
    for base, subject in nulls:
        result = nightly_gate(base, subject[:1])
        if result.outcome is Outcome.INCONCLUSIVE:
            assert result.more_runs == 2
            continued += 1
            result = nightly_gate(base, subject)
        assert result.outcome in (Outcome.PASS, Outcome.FAIL)
        red += result.outcome is Outcome.FAIL and result.where is None
    assert rate_within_three_standard_errors(red, len(nulls), 0.011)
    # every continued night costs two more runs: 1.3 runs a night
    assert rate_within_three_standard_errors(continued, len(nulls), curves.NIGHTLY_GREEN - curves.NIGHTLY_RED)


def test_the_broken_case_is_found(nulls):
    """−0.9 → −0.8 against −0.9 → −0.6 at m = 5, k = 1, spread 0.026."""
    broken = simulate(300, stream="broken", end=BROKEN_END)
    found = [paired_gate(nulls[i][0], [run]).outcome is Outcome.FAIL for i, run in enumerate(broken)]
    assert sum(found) >= 0.9 * len(found)
    nightly = []
    for i in range(100):
        result = nightly_gate(nulls[i][0], broken[3 * i : 3 * i + 1])
        if result.outcome is Outcome.INCONCLUSIVE:
            result = nightly_gate(nulls[i][0], broken[3 * i : 3 * i + 3])
        nightly.append(result.outcome is Outcome.FAIL)
    assert sum(nightly) >= 0.92 * len(nightly)


def test_unpaired_gate_is_calibrated_and_finds_the_broken_case(nulls):
    def fresh(run, night):
        steps = tuple(
            dataclasses.replace(step, prompt_ids=tuple(f"{run.seed}/{night}/{p}" for p in step.prompt_ids))
            for step in run.steps
        )
        return dataclasses.replace(run, filtered=True, steps=steps)

    alpha, sample = 0.05, nulls[:800]
    results = [
        unpaired_gate([fresh(r, i) for r in base], [fresh(subject[0], i)], alpha=alpha)
        for i, (base, subject) in enumerate(sample)
    ]
    assert rate_within_three_standard_errors(sum(r.p_value < alpha for r in results), len(sample), alpha)
    broken = simulate(60, stream="broken", end=BROKEN_END)
    found = [
        unpaired_gate([fresh(r, i) for r in nulls[i][0]], [fresh(run, i)]).outcome is Outcome.FAIL
        for i, run in enumerate(broken)
    ]
    assert sum(found) >= 0.9 * len(found)


def test_a_relative_error_gate_is_red_on_equal_systems(nulls):
    """Why none of this is a 1 % gate."""
    red = 0
    for base, subject in nulls[:200]:
        ours, theirs = subject[0].curve("reward"), base[0].curve("reward")
        red += np.mean([abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]) > 0.01
    assert red > 0.9 * 200


# -- formulas --------------------------------------------------------------------------------------------------------


def test_statistics_agree_with_numpy_and_scipy(baseline, equal, broken):
    tau = np.arange(1, STEPS + 1) / STEPS
    w = tau / (tau**2).sum()
    y = np.array([w @ np.array(run.curve("reward")) for run in baseline])
    for subject in ([equal], [equal, broken]):
        ours = np.array([w @ np.array(run.curve("reward")) for run in subject])
        result = paired_gate(baseline, subject)
        oracle = scipy.stats.ttest_ind(ours, y, alternative="less") if len(subject) > 1 else None
        ulps = 100 * np.finfo(np.float64).eps
        assert result.deficit == pytest.approx(ours.mean() - y.mean(), rel=ulps, abs=ulps)
        if oracle is not None:
            assert result.p_value == pytest.approx(oracle.pvalue, rel=1000 * ulps)
            assert result.deficit / result.standard_error == pytest.approx(oracle.statistic, rel=1000 * ulps)
        else:
            error = y.std(ddof=1) * math.sqrt(1 + 1 / 5)
            assert result.standard_error == pytest.approx(error, rel=1000 * ulps)
            assert result.p_value == pytest.approx(scipy.stats.t.cdf(result.deficit / error, 4), rel=1000 * ulps)


def test_level_error_formula(baseline, equal):
    result = paired_gate(baseline, [equal], level_alpha=0.01)
    variance = np.array([run.steps[0].groups["reward"].variance for run in baseline]).mean(0)
    error = math.sqrt((1 + 1 / 5) / PROMPTS**2 * variance.sum() / GROUP)
    ulps = 100 * np.finfo(np.float64).eps
    assert result.measures[0].bound == pytest.approx(scipy.stats.norm.ppf(0.995) * error, rel=1e6 * ulps)
    expected = np.mean(equal.curve("reward")[0]) - np.mean([r.curve("reward")[0] for r in baseline])
    assert result.level_difference == pytest.approx(expected, abs=ulps)


def test_a_straight_rise_is_read_in_reward_units():
    """y of r_t = start + g·t/T is g: what the curve gained by the end of the window."""
    curve = [-0.9 + 0.3 * t / STEPS for t in range(1, STEPS + 1)]
    assert curves._projection(curve, -0.9) == pytest.approx(0.3, rel=100 * np.finfo(np.float64).eps)


def test_margin_is_a_fifth_of_the_gain_but_not_less_than_the_least(baseline, equal):
    result = paired_gate(baseline, [equal])
    assert result.margin == pytest.approx(0.2 * np.mean([
        curves._projection(r.curve("reward"), np.mean([b.curve("reward")[0] for b in baseline])) for r in baseline
    ]))  # fmt: skip
    demanding = dataclasses.replace(REWARD, least_margin=0.5)
    assert paired_gate(baseline, [equal], metric=demanding).margin == 0.5


# -- verdicts --------------------------------------------------------------------------------------------------------


def test_verdicts_of_the_three_kinds(baseline, broken):
    failed = paired_gate(baseline, [broken])
    assert failed.outcome is Outcome.FAIL
    assert re.match(
        r"reward ends 0\.1\d+ below the baseline \(t = -.*\), p = .* at α = 0.01, margin 0.0", failed.reason
    )
    assert not failed.measures[1].within
    better = change_reward(simulate(1, stream="npu")[0], lambda m: m + 0.2, range(1, STEPS))
    passed = paired_gate(baseline, [better])
    assert passed.outcome is Outcome.PASS and "above the baseline" in passed.reason
    assert all(m.within for m in passed.measures)
    a_bit = change_reward(baseline[2], lambda m: m - 0.03, range(1, STEPS))
    open_ = paired_gate(baseline, [dataclasses.replace(a_bit, device="npu")])
    assert open_.outcome is Outcome.INCONCLUSIVE and open_.more_runs == 2 and "add 2 runs" in open_.reason


def test_a_level_fault_is_named_as_rollout_or_weight_sync(baseline, equal):
    shifted = change_reward(equal, lambda m: m - 0.3)
    result = paired_gate(baseline, [shifted])
    assert result.outcome is Outcome.FAIL
    assert result.reason.startswith("rollout or weight-sync fault: reward differs by -0.3")
    verdict = result.verdict(check="curve/reward", subject="torch", device="cpu", baseline="b1")
    assert (verdict.stage, verdict.where.quantity) == ("rollout", "reward at step 1")
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
    # the level is two-sided: a better start is a fault as well, since nothing was learned yet
    assert paired_gate(baseline, [change_reward(equal, lambda m: m + 0.3)]).where is not None


def test_failure_is_tested_before_equivalence(baseline):
    """A large margin must not turn a significant deficit above half of it into a pass."""
    shift = 0.12
    lowered = [change_reward(run, lambda m: m - shift, range(1, STEPS)) for run in simulate(3, stream="npu")]
    metric = dataclasses.replace(REWARD, least_margin=2 * shift)
    result = paired_gate(baseline, lowered, metric=metric, alpha=0.05)
    assert abs(result.deficit) < result.margin
    assert result.outcome is (Outcome.FAIL if abs(result.deficit) >= shift else Outcome.PASS)
    assert paired_gate(
        baseline, lowered, metric=dataclasses.replace(metric, least_margin=shift), alpha=0.05
    ).outcome is (Outcome.FAIL)


def test_a_significant_difference_below_half_the_margin_is_not_red(baseline):
    runs = simulate(3, stream="npu")
    lowered = [change_reward(run, lambda m: m - 0.15, range(1, STEPS)) for run in runs]
    metric = dataclasses.replace(REWARD, least_margin=1.0)
    for gate in (paired_gate, nightly_gate):
        result = gate(baseline, lowered, metric=metric)
        assert result.p_value < 0.01 and result.outcome is Outcome.PASS


def test_response_length_is_two_sided(baseline):
    def as_length(run, scale=100.0):
        for i, step in enumerate(run.steps):
            old = step.groups["reward"]
            new = GroupStatistics(
                mean=tuple(200 + scale * m for m in old.mean), variance=tuple(scale**2 * v for v in old.variance)
            )
            run = change_step(run, i, groups={**step.groups, "response_length": new})
        return run

    base = [as_length(run) for run in baseline]
    longer = as_length(simulate(1, stream="npu", end=BASELINE_END + 0.4)[0])
    shorter = as_length(simulate(1, stream="npu", end=BASELINE_END - 0.4)[0])
    for subject, side in ((longer, "above"), (shorter, "below")):
        result = paired_gate(base, [subject], metric=RESPONSE_LENGTH)
        assert result.outcome is Outcome.FAIL and f"tokens {side} the baseline" in result.reason
    assert paired_gate(base, [longer]).outcome is Outcome.PASS
    same = [as_length(run) for run in simulate(3, stream="npu")]
    result = paired_gate(base, same, metric=dataclasses.replace(RESPONSE_LENGTH, least_margin=0.2))
    assert result.outcome is Outcome.PASS and result.margin == pytest.approx(0.2 * 110, rel=0.1)


def test_lower_is_better_is_the_mirror_image(baseline, equal, broken):
    loss = CurveMetric(name="reward", higher_is_better=False, least_margin=0.05)
    for subject in (equal, broken):
        direct = paired_gate(baseline, [subject])
        mirror = paired_gate([mirrored(r) for r in baseline], [mirrored(subject)], metric=loss)
        assert (mirror.outcome, mirror.p_value, mirror.deficit) == (direct.outcome, direct.p_value, -direct.deficit)


def test_nightly_stages(baseline, broken):
    middling = change_reward(dataclasses.replace(baseline[0], device="npu"), lambda m: m - 0.06, range(1, STEPS))
    first = nightly_gate(baseline, [middling])
    assert first.outcome is Outcome.INCONCLUSIVE and "run 2 more seeds" in first.reason
    two = nightly_gate(baseline, [middling, simulate(2, stream="npu2")[1]])
    assert two.outcome is Outcome.INCONCLUSIVE and two.more_runs == 1
    final = nightly_gate(baseline, [middling, *simulate(2, stream="broken", end=BROKEN_END)])
    assert final.outcome is Outcome.FAIL and "< 0.01" in final.reason
    assert nightly_gate(baseline, [change_reward(broken, lambda m: m - 0.5, range(1, STEPS))]).outcome is Outcome.FAIL


def test_uncalibrated_says_so(baseline, equal, broken):
    result = gate_uncalibrated(baseline[0], change_reward(broken, lambda m: m - 0.2, range(1, STEPS)))
    assert result.outcome is Outcome.FAIL and result.reason.startswith(
        "uncalibrated (one stored run, declared drift 0.05)"
    )
    assert gate_uncalibrated(baseline[0], equal).outcome in (Outcome.PASS, Outcome.INCONCLUSIVE)
    w = np.array(curves._weights(STEPS))
    variance = sum(
        (w**2) @ np.array([sum(s.groups["reward"].variance) / GROUP / PROMPTS**2 for s in run.steps])
        for run in (baseline[0], equal)
    )
    expected = math.sqrt(variance + 0.03**2)
    assert gate_uncalibrated(baseline[0], equal, drift=0.03).standard_error == pytest.approx(expected)
    assert gate_uncalibrated(baseline[0], mirrored(equal), paired=False).outcome is Outcome.FAIL
    with pytest.raises(InputError, match="declared drift"):
        gate_uncalibrated(baseline[0], equal, drift=0.0)


# -- what must be an ERROR -------------------------------------------------------------------------------------------


def nan_at(run, index=4, value=math.nan):
    old = run.steps[index].groups["reward"]
    return change_step(run, index, groups={"reward": dataclasses.replace(old, mean=(value, *old.mean[1:]))})


def without_variance(run):
    for i, step in enumerate(run.steps):
        old = step.groups["reward"]
        run = change_step(run, i, groups={"reward": dataclasses.replace(old, variance=(0.0,) * PROMPTS)})
    return run


def shuffled(run, index=3):
    return change_step(run, index, prompt_ids=run.steps[index].prompt_ids[::-1])


def with_steps(run, steps):
    return dataclasses.replace(run, steps=tuple(steps))


UNFIT = {
    "shuffled prompts": (shuffled, "step 4: the same prompts in another order; expected prompt hash"),
    "other prompts": (lambda r: change_step(r, 0, prompt_ids=("x", "y", "z")), "step 1: other prompts"),
    "missing step": (lambda r: with_steps(r, r.steps[:4] + r.steps[5:]), "missing steps [5]; expected 1 … 6"),
    "run that stopped early": (lambda r: with_steps(r, r.steps[:-2]), "missing steps [5, 6]"),
    "no steps": (lambda r: with_steps(r, ()), "no step in common"),
    "no common step": (
        lambda r: with_steps(r, [dataclasses.replace(s, step=s.step + 100) for s in r.steps]),
        "no step in common",
    ),
    "unsorted steps": (lambda r: with_steps(r, r.steps[::-1]), "unsorted steps"),
    "repeated step": (lambda r: with_steps(r, (*r.steps, r.steps[2])), "repeated steps [3]"),
    "NaN reward": (nan_at, "step 5: reward is not finite"),
    "infinite reward": (lambda r: nan_at(r, value=-math.inf), "step 5: reward is not finite"),
    "no variance": (without_variance, "reward has no variance"),
    "another config": (lambda r: dataclasses.replace(r, config="bad"), "another config; expected c0ffee; found bad"),
    "another length": (
        lambda r: dataclasses.replace(r, total_steps=5, steps=r.steps[:5]),
        "another total_steps; expected 6; found 5",
    ),
    "filtered": (lambda r: dataclasses.replace(r, filtered=True), "another filtered; expected False; found True"),
    "metric not recorded": (lambda r: change_step(r, 1, groups={}), "step 2: reward was not recorded; expected reward"),
    "group of one": (lambda r: change_step(r, 1, group_size=1), "a group of one has no variance"),
    "another group size": (lambda r: change_step(r, 1, group_size=4), "another group_size; expected 8; found 4"),
    "negative variance": (
        lambda r: change_step(
            r, 0, groups={"reward": GroupStatistics(mean=(0.0,) * PROMPTS, variance=(-1.0,) * PROMPTS)}
        ),
        "negative variance of reward",
    ),
}


@pytest.mark.parametrize("side", ["subject", "baseline"])
@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_compared_is_an_error(case, side, baseline, equal):
    spoil, message = UNFIT[case]
    base, subject = list(baseline), equal
    if side == "subject":
        subject = spoil(subject)
    else:
        base[-1] = spoil(base[-1])
    for gate in (paired_gate, nightly_gate):
        result = gate(base, [subject])
        assert result.outcome is Outcome.ERROR
        assert result.reason.startswith("cannot compare: ") and message in result.reason
        assert result.verdict(check="c", subject="s", device="d").outcome is Outcome.ERROR
    single = gate_uncalibrated(base[-1], subject)
    assert single.outcome is Outcome.ERROR and message.split(";")[0] in single.reason


def test_both_sides_broken_alike_is_still_an_error(baseline, equal):
    """NaN on both sides is not agreement, and neither is a step both lack."""
    for spoil in (
        nan_at,
        without_variance,
        lambda r: with_steps(r, r.steps[:-1]),
        lambda r: with_steps(r, r.steps[::-1]),
    ):
        result = paired_gate([spoil(r) for r in baseline], [spoil(equal)])
        assert result.outcome is Outcome.ERROR


def test_filtered_runs_need_the_unpaired_gate(baseline, equal):
    filtered = [dataclasses.replace(r, filtered=True) for r in (*baseline, equal)]
    result = paired_gate(filtered[:5], filtered[5:])
    assert result.outcome is Outcome.ERROR and "use the unpaired gate" in result.reason
    assert unpaired_gate(filtered[:5], filtered[5:]).outcome is not Outcome.ERROR
    # which does not care about prompts after step 1, and still about everything else
    other = change_step(filtered[5], 4, prompt_ids=("x", "y", "z"))
    assert unpaired_gate(filtered[:5], [other]).outcome is not Outcome.ERROR
    for case in ("missing step", "NaN reward", "no variance", "unsorted steps", "another config"):
        assert unpaired_gate(filtered[:5], [UNFIT[case][0](filtered[5])]).outcome is Outcome.ERROR


def test_the_spread_is_measured_on_other_runs(baseline, equal):
    cases = [
        (baseline[:4], [equal], "at least 5 runs; found 4"),
        (baseline, [], "expected 1 … 3; found 0"),
        (baseline, [equal] * 4, "expected 1 … 3; found 4"),
        ([*baseline[:4], baseline[0]], [equal], "one run is used twice"),
        (baseline, [baseline[1]], "the same as gpu, seed 1"),
        ([*baseline[:4], dataclasses.replace(baseline[0], seed=77)], [equal], "the same as gpu, seed 0"),
        (baseline, [equal, dataclasses.replace(equal, seed=77)], "the same as npu, seed 0"),
    ]
    for base, subject, message in cases:
        result = paired_gate(base, subject)
        assert result.outcome is Outcome.ERROR and message in result.reason


def test_a_device_that_repeats_the_baseline_bit_for_bit_is_fine(baseline):
    twin = dataclasses.replace(baseline[2], device="npu")
    assert paired_gate(baseline, [twin]).outcome in (Outcome.PASS, Outcome.INCONCLUSIVE)


def test_constant_first_step_is_judged_only_when_equal(baseline, equal):
    def all_wrong(run, mean=START):
        stats = GroupStatistics(mean=(mean,) * PROMPTS, variance=(0.0,) * PROMPTS)
        return change_step(run, 0, groups={"reward": stats})

    base = [all_wrong(r) for r in baseline]
    assert paired_gate(base, [all_wrong(equal)]).outcome is not Outcome.ERROR
    result = paired_gate(base, [all_wrong(equal, START + 0.1)])
    assert result.outcome is Outcome.ERROR and "no variance at step 1" in result.reason


# -- mistakes a public suite made, each planted here ------------------------------------------------------------------


def improved(run):
    return change_reward(run, lambda m: m + 0.3, range(1, STEPS))


def collapsed_at_the_end(run):
    """A collapse in one step alone: no allowance forgives a share of the steps."""
    return change_reward(run, lambda m: m - 2.0, [STEPS - 1])


def learned_in_reverse(run):
    """The same values in reverse order, the level at step 1 kept: a comparison of sorted values would not see it."""
    reward = [step.groups["reward"] for step in run.steps[1:]]
    for i, stats in enumerate(reversed(reward)):
        run = change_step(run, i + 1, groups={"reward": stats})
    return run


def wrong_answers(baseline, equal, broken):
    """What the paired gate says on subjects whose outcome is known, where it is not what it should be."""
    good = {Outcome.PASS, Outcome.INCONCLUSIVE}
    cases = {
        "broken": (broken, {Outcome.FAIL}),
        "equal": (equal, good),
        "better": (improved(equal), {Outcome.PASS}),
        "collapsed at the end": (collapsed_at_the_end(equal), {Outcome.FAIL}),
    }
    cases |= {name: (spoil(equal), {Outcome.ERROR}) for name, (spoil, _) in UNFIT.items()}
    wrong = {name for name, (subject, wanted) in cases.items() if outcome(baseline, subject) not in wanted}
    backwards = [with_steps(run, run.steps[::-1]) for run in (*baseline, equal)]
    if outcome(backwards[:5], backwards[5]) is not Outcome.ERROR:
        wrong.add("all unsorted")
    steep = simulate(6, stream="steep", end=-START)
    if outcome(steep[:5], learned_in_reverse(steep[5])) is not Outcome.FAIL:
        wrong.add("reversed")
    return wrong


def outcome(baseline, subject):
    try:
        return paired_gate(baseline, [subject], alpha=0.05).outcome
    except (KeyError, ValueError, ZeroDivisionError, IndexError):
        return "crash"


def test_the_gate_answers_right_on_every_known_subject(baseline, equal, broken):
    assert wrong_answers(baseline, equal, broken) == set()


MISTAKES = {
    "an inverted comparison": ("_shortfall", lambda stats, metric: stats.deficit, {"broken", "better"}),
    "better is red": ("_shortfall", lambda stats, metric: abs(stats.deficit), {"better"}),
    "one step may fail": (
        "_projection",
        lambda curve, start: np.mean(sorted(curve)[1:]) - start,
        {"collapsed at the end"},
    ),
    "sorted values are compared": (
        "_projection",
        lambda curve, start: float(np.array(curves._weights(len(curve))) @ (np.sort(curve) - start)),
        {"reversed"},
    ),
    "NaN equals NaN": ("_check_values", lambda run, name: None, {"NaN reward"}),
    "steps are taken as they come": ("_check_steps", lambda run: None, {"all unsorted"}),
    "prompts are not compared": ("_check_same_prompts", lambda reference, runs: None, {"shuffled prompts"}),
    "a bound nothing exceeds": ("_t_quantile", lambda probability, freedom: math.inf, {"broken"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_caught(mistake, baseline, equal, broken, monkeypatch):
    name, wrong, caught_by = MISTAKES[mistake]
    monkeypatch.setattr(curves, name, wrong)
    assert caught_by <= wrong_answers(baseline, equal, broken)


def test_stored_runs_keep_every_bit(baseline):
    run = dataclasses.replace(nan_at(baseline[0], value=math.inf), provenance={"torch": "2.9"})
    run = change_step(run, 2, scalars={"kept_fraction": 1 / 3, "log_prob_gap": math.nan})
    text = run.to_json()
    back = CurveRun.from_json(text)
    assert back.to_json() == text
    assert back.steps[:2] == run.steps[:2] and back.steps[3:] == run.steps[3:]
    assert math.isnan(back.steps[2].scalars["log_prob_gap"]) and back.steps[4].groups["reward"].mean[0] == math.inf
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_rounding_before_storing_changes_the_verdict_numbers(baseline, equal):
    stored = CurveRun.from_json(equal.to_json())
    exact = paired_gate(baseline, [equal])
    assert paired_gate(baseline, [stored]) == exact
    assert paired_gate(baseline, [change_reward(equal, lambda m: round(m, 3))]).p_value != exact.p_value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON document"),
        ("[]", "unknown curve schema; expected 1; found list"),
        ('{"schema": 2}', "expected 1; found 2"),
        ('{"schema": 1, "sed": 3}', "did you mean seed?"),
        ('{"schema": 1, "seed": 3}', "unreadable curve; found KeyError: 'steps'"),
        (
            '{"schema": 1, "seed": "3", "device": "cpu", "config": "", "total_steps": 1, "filtered": true, "steps":[]}',
            "CurveRun.seed: wrong type; expected int; found '3'",
        ),
    ],
)
def test_unreadable_curves_are_named(text, message):
    with pytest.raises(InputError) as error:
        CurveRun.from_json(text)
    assert message in str(error.value)


def test_step_from_samples():
    step = CurveStep.from_samples(
        step=1,
        prompt_ids=["b", "a", "b", "a"],
        values={"reward": [1.0, 0.0, 0.0, 0.0], "response_length": [3, 4, 5, 8]},
        scalars={"kept_fraction": 0.5},
    )
    assert (step.prompt_ids, step.group_size) == (("b", "a"), 2)
    assert step.groups["reward"] == GroupStatistics(mean=(0.5, 0.0), variance=(0.5, 0.0))
    assert step.groups["response_length"] == GroupStatistics(mean=(4.0, 6.0), variance=(2.0, 8.0))
    correct = CurveStep.from_samples(step=1, prompt_ids=["a", "a"], values={"correctness": [True, False]})
    assert correct.groups["correctness"].mean == (0.5,)
    twice = CurveStep.from_samples(step=1, prompt_ids=["a"] * 4, uids=list("1122"), values={"reward": [0, 1, 2, 3]})
    assert twice.prompt_ids == ("a", "a") and twice.groups["reward"].mean == (0.5, 2.5)
    for arguments, message in (
        ({"prompt_ids": ["a", "a", "b"], "values": {}}, "the same number of samples; found [1, 2]"),
        ({"prompt_ids": ["a", "b"], "uids": ["1", "1"], "values": {}}, "samples of two prompts; found 1"),
        ({"prompt_ids": ["a", "a"], "values": {"reward": [1.0]}}, "one value per sample; expected 2; found 1"),
        (
            {"prompt_ids": ["a", "a"], "values": {"reward": [1.0, "x"]}},
            "reward: not a number; expected a float; found 'x'",
        ),
    ):
        with pytest.raises(InputError) as error:
            CurveStep.from_samples(step=1, **arguments)
        assert message in str(error.value)


# -- drift over nights -----------------------------------------------------------------------------------------------


def test_cusum_formula():
    history = [0.01, -0.01] * 5
    sigma = np.std(history, ddof=1)
    sums = cusum(history, [-2 * sigma, -2 * sigma, 3 * sigma, -sigma])
    assert sums == pytest.approx([1.5, 3.0, 0.0, 0.5])


def test_cusum_finds_small_lasting_deficits_and_rarely_alarms():
    """One false alarm in about 900 nights: Siegmund's approximation to the run length, with overshoot 1.166."""
    b, nights, chains = curves.CUSUM_ALARM + 1.166, 12000, 300
    expected = (math.exp(b) - b - 1) / (2 * curves.CUSUM_SLACK**2)
    assert 850 < expected < 1000
    z = portable_normal((nights, chains), seed=0, stream="nights").numpy()
    sums, run_length = np.zeros(chains), np.full(chains, float(nights))
    for night in range(nights):
        sums = np.maximum(0.0, sums - z[night] - curves.CUSUM_SLACK)
        run_length = np.where((sums >= curves.CUSUM_ALARM) & (run_length == nights), night + 1, run_length)
    # a run length is close to exponential, so its standard error is the mean over √chains
    assert abs(run_length.mean() - expected) <= 3 * expected / math.sqrt(chains)
    # the vectorised chain is the one the module computes, with a history of exactly mean 0 and deviation 1
    history = [math.sqrt(9 / 10), -math.sqrt(9 / 10)] * 5
    ours = cusum(history, z[:200, 0].tolist())
    check = 0.0
    for value, reading in zip(ours, z[:200, 0], strict=True):
        check = max(0.0, check - reading - curves.CUSUM_SLACK)
        assert value == pytest.approx(check, rel=1e4 * np.finfo(np.float64).eps, abs=1e4 * np.finfo(np.float64).eps)


def test_drift_gate():
    history = (portable_uniform(20, seed=0, stream="history") - 0.5).tolist()
    sigma = float(np.std(history, ddof=1))
    steady = drift_gate(history, history)
    assert steady.outcome is Outcome.PASS and steady.measures[0].within
    slow = drift_gate(history, [float(np.mean(history)) - 1.6 * sigma] * 6)
    assert slow.outcome is Outcome.FAIL and "first in night 5" in slow.reason and not slow.measures[0].within
    # an alarm does not heal by itself, and rising reward is no alarm unless the metric is two-sided
    assert drift_gate(history, [-2 * sigma] * 6 + [2 * sigma] * 20).outcome is Outcome.FAIL
    assert drift_gate(history, [2 * sigma] * 20).outcome is Outcome.PASS
    assert drift_gate(history, [2 * sigma] * 20, metric=RESPONSE_LENGTH).outcome is Outcome.FAIL
    for past, nights, message in (
        (history[:9], [0.0], "at least 10; found 9"),
        ([0.1] * 10, [0.0], "copies of one night?"),
        (history, [math.nan], "a nightly deficit is not finite"),
        (history, [], "no night to judge"),
    ):
        result = drift_gate(past, nights)
        assert result.outcome is Outcome.ERROR and message in result.reason


@pytest.mark.parametrize("name", ["alpha", "level_alpha"])
def test_false_alarm_rates_are_checked(name, baseline, equal):
    with pytest.raises(InputError, match=f"{name}: a false-alarm rate; expected 0 < α < 0.5; found 1"):
        paired_gate(baseline, [equal], **{name: 1})
