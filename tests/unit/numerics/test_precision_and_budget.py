"""Unit roundoff, error growth, budgets, error ratios and envelopes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.numerics import budget as module
from alignment.numerics.budget import (
    ENVELOPE_FACTOR,
    Budget,
    Envelope,
    Noise,
    Precision,
    error_growth,
    error_ratio,
    error_ratios,
    policy_loss_scale,
    unit_roundoff,
)
from alignment.numerics.identities import (
    entropy_in_range,
    first_kl,
    first_update_ratio,
    log_prob_agreement,
    log_probs_nonpositive,
    train_inference_gap,
)
from alignment.numerics.metrics import relative_l2, ulp_distance
from alignment.numerics.perturbation import one_ulp
from alignment.numerics.random import portable_normal, portable_uniform


def noise(values=(1e-3, 2e-3, 1e-3, 1e-3, 1e-3), seeds=(1, 2, 3, 4, 5), kind="one-ulp inputs"):
    return Noise(values=values, seeds=seeds, perturbation=kind, device="cpu")


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [
        (torch.float64, -53),
        ("fp32", -24),
        (torch.float16, -11),
        ("torch.bfloat16", -8),
        ("tf32", -11),
        ("hf32", -12),
        ("float8_e4m3fn", -4),
        ("fp8_e5m2", -3),
    ],
)
def test_unit_roundoff(dtype, exponent):
    assert unit_roundoff(dtype) == 2.0**exponent


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_unit_roundoff_is_attained_by_rounding(dtype):
    x = 1.0 + portable_uniform(4096, seed=0, stream="x")
    error = ((x.to(dtype).to(torch.float64) - x).abs() / x).max()
    assert unit_roundoff(dtype) / 2 < error <= unit_roundoff(dtype)


def test_error_growth_formulas():
    u = 2.0**-24
    assert error_growth(1024, u) == pytest.approx(32 * u, rel=64 * u)
    assert error_growth(1024, u, model="deterministic") == 1024 * u / (1 - 1024 * u)
    with pytest.raises(InputError, match="reduction_length × unit roundoff < 1; found 16.0"):
        error_growth(4096, 2.0**-8, model="deterministic")
    with pytest.raises(InputError, match="an int ≥ 1; found 0"):
        error_growth(0, u)
    with pytest.raises(InputError, match="probabilistic or deterministic; found optimistic"):
        error_growth(4, u, model="optimistic")


def test_floor_covers_a_real_float32_sum_and_not_a_bfloat16_one():
    n = 4096
    x = portable_normal((256, n), seed=0, stream="x").float().abs()
    golden = x.double().sum(-1)
    floor = Precision().floor(n)
    assert relative_l2(x.cumsum(-1)[:, -1], golden) <= floor
    assert relative_l2(x.bfloat16().cumsum(-1)[:, -1], golden) > floor


def test_declared_precision_is_what_counts():
    n = 256
    assert Precision(matmul="tf32").unit_roundoff() == 2.0**-11
    assert Precision(matmul="tf32").unit_roundoff("elementwise") == 2.0**-24
    # the mode concerns float32 matmuls only
    assert Precision(compute="bf16", matmul="tf32").floor(n) == Precision(compute="bf16").floor(n)
    assert Precision(matmul="hf32").floor(n) > Precision().floor(n) * 100
    declared = Precision(compute="bfloat16", router="float32", rollout="fp8")
    assert declared.unit_roundoff("router") == 2.0**-24
    assert declared.unit_roundoff("rollout") == 2.0**-4
    assert declared.unit_roundoff("matmul") == 2.0**-8
    assert Precision(compute="float32", router="bf16").floor(n, operator="router") > 2.0**-8
    # 16-bit matmuls accumulate in float32 unless something else is declared
    assert Precision(compute="bf16").floor(n) < 2 * 2.0**-8 < Precision(compute="bf16", accumulate="bf16").floor(n)
    assert declared.describe("rollout") == "float8_e4m3fn"
    assert Precision(matmul="hf32").describe() == "float32 (hf32 matmul)"
    assert Precision.from_dict(json.loads(json.dumps(declared.to_dict()))) == declared


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Precision(compute="int8"), "unknown floating-point dtype"),
        (lambda: Precision(matmul="xf32"), "expected ieee, tf32 or hf32; found xf32"),
        (lambda: Precision().floor(4, operator="attention"), "expected matmul, elementwise, router, rollout"),
        (lambda: Precision.from_dict({"matmull": "ieee"}), "did you mean matmul?"),
        (lambda: Precision.from_dict([]), "expected a mapping of fields; found list"),
    ],
)
def test_bad_precision_is_named(call, message):
    with pytest.raises(InputError) as error:
        call()
    assert message in str(error.value)


def test_bound_is_a_multiple_of_the_worst_noise():
    budget = Budget.from_noise(noise(), metric="relative_l2", dtype="float32", reduction_length=64, factor=3)
    assert budget.value == 3 * 2e-3
    assert budget.origin == "3 × worst of 5 runs (one-ulp inputs) on cpu"
    assert budget.judge(6e-3, run_seed=99).within
    assert not budget.judge(math.nextafter(6e-3, 1), run_seed=99).within
    assert not budget.judge(math.nan, run_seed=99).within
    assert not budget.judge(math.inf, run_seed=99).within


def test_floor_takes_over_when_noise_is_nil():
    budget = Budget.from_noise(noise([0.0] * 5), dtype=torch.float32, reduction_length=64, factor=2)
    assert budget.value == Precision().floor(64) > 0
    assert budget.origin == "unit roundoff of float32, growth √n·u (Higham and Mary 2019) over n = 64"
    declared = Budget.from_noise(noise([0.0] * 5), dtype=Precision(matmul="hf32"), reduction_length=64, factor=2)
    assert declared.value > budget.value
    assert "float32 (hf32 matmul)" in declared.origin
    scaled = Budget.from_roundoff(metric="sum", dtype="float32", reduction_length=64, scale=8.0, unit="nats")
    assert scaled.value == 8 * budget.value and scaled.unit == "nats" and scaled.noise is None


def test_a_budget_refuses_the_run_its_noise_comes_from():
    budget = Budget.from_noise(noise(), metric="relative_l2", dtype="float32", reduction_length=64)
    message = "budget of relative_l2: the judged run is one of those the noise was measured on"
    with pytest.raises(InputError, match=message + ".*found seed 3"):
        budget.judge(0.0, run_seed=3)
    with pytest.raises(InputError, match=message):
        budget.judge(0.0, run_seed=3, run_perturbation="one-ulp inputs")
    assert budget.judge(0.0, run_seed=3, run_perturbation="none").within
    assert budget.judge(0.0, run_seed=6, run_perturbation="one-ulp inputs").within


def test_a_budget_made_from_the_run_under_test_would_hide_its_error():
    """Why: a faulty run inside its own noise is always within."""
    faulty = 1.0
    own = noise([*noise().values[:4], faulty], seeds=[1, 2, 3, 4, 7])
    budget = Budget.from_noise(own, dtype="float32", reduction_length=64)
    assert faulty <= budget.value
    with pytest.raises(InputError, match="found seed 7"):
        budget.judge(faulty, run_seed=7)
    honest = Budget.from_noise(noise(), dtype="float32", reduction_length=64)
    assert not honest.judge(faulty, run_seed=7).within


def test_several_perturbation_kinds_share_one_noise():
    kinds = ["one-ulp inputs", "one-ulp inputs", "one-ulp inputs", "reduction order", "reduction order"]
    mixed = noise(seeds=[1, 2, 3, 1, 2], kind=kinds)
    budget = Budget.from_noise(mixed, dtype="float32", reduction_length=64)
    assert "(one-ulp inputs, reduction order)" in budget.origin
    assert budget.judge(0.0, run_seed=3, run_perturbation="reduction order").within


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: noise([1.0] * 4, range(4)), "expected at least 5 perturbed runs; found 4"),
        (lambda: noise(seeds=(1, 1, 2, 3, 4)), "counted twice"),
        (lambda: noise(seeds=(1, 2, 3, 4)), "one perturbation for all runs or"),
        (lambda: noise(seeds=(1, 2, 3, 4), kind="x"), "every noise value has a seed; expected 5 seeds; found 4"),
        (lambda: noise((1.0, 1.0, 1.0, 1.0, math.nan)), "finite values ≥ 0; found nan"),
        (lambda: noise((1.0, 1.0, 1.0, 1.0, -1.0)), "finite values ≥ 0; found -1.0"),
        (lambda: Budget.from_noise(noise(), dtype="fp32", reduction_length=1, factor=0.5), "fails at random"),
        (lambda: Budget(metric="x", value=math.inf, origin="o"), "a bound is a finite magnitude"),
        (lambda: Budget(metric="x", value=-1.0, origin="o"), "a bound is a finite magnitude"),
        (lambda: Budget(metric="x", value=1.0, origin=""), "a matter of taste"),
        (lambda: Budget.from_dict({"metric": "x", "value": 1.0, "orign": "o"}), "did you mean origin?"),
        (lambda: Budget.from_dict({"metric": "x"}), "unreadable record"),
        (lambda: error_ratio(0.0, math.nan, metric="m", floor=0.0), "the baseline error is not a magnitude"),
    ],
)
def test_bad_budgets_are_named(call, message):
    with pytest.raises(InputError) as error:
        if message.startswith("one perturbation"):
            noise(seeds=(1, 2, 3, 4), kind=("a",) * 5)
        call()
    assert message in str(error.value)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e300), min_size=5, max_size=8), st.floats(1, 4))
def test_json_keeps_every_bit(values, factor):
    seeds = tuple(range(len(values)))
    budget = Budget.from_noise(noise(values, seeds), dtype="bf16", reduction_length=9, factor=factor)
    assert Budget.from_dict(json.loads(json.dumps(budget.to_dict(), allow_nan=False))) == budget


def test_error_ratio():
    measure = error_ratio(1.9e-3, 1e-3, metric="relative_l2", floor=1e-7)
    assert measure.within and measure.bound == 2e-3
    assert not error_ratio(1.9e-3, 1e-3, metric="relative_l2", floor=1e-7, factor=module.ERROR_RATIO_LLM).within
    assert not error_ratio(math.nan, 1e-3, metric="relative_l2", floor=1e-7).within
    lucky = error_ratio(5e-8, 1e-9, metric="relative_l2", floor=1e-7)
    assert lucky.within and lucky.origin.startswith("floor from unit roundoff")


def test_error_ratio_is_not_inverted():
    """A far better subject passes and a far worse one fails, not the other way round."""
    assert error_ratio(1e-6, 1e-3, metric="m", floor=0.0).within
    assert not error_ratio(1e-3, 1e-6, metric="m", floor=0.0).within


def test_error_ratios_judge_small_values_apart():
    n = 64
    a, b = (portable_normal((200, n), seed=0, stream=s).float() for s in "ab")
    golden = (a.double() * b.double()).sum(-1)
    # the last row cancels to nothing: its error is that of its terms
    a[-1, 1::2], b[-1, 1::2] = -a[-1, ::2], b[-1, ::2]
    golden[-1] = 0.0
    baseline, subject = (a * b).sum(-1), (a * b).flip(-1).cumsum(-1)[:, -1]
    ordinary, small = error_ratios(subject, baseline, golden, metric="dot", dtype="float32", reduction_length=n)
    assert (ordinary.name, small.name) == ("dot relative_l2", "dot small values max_abs")
    assert ordinary.within and small.within
    broken = subject.clone()
    broken[-1] = 0.01
    ordinary, small = error_ratios(broken, baseline, golden, metric="dot", dtype="float32", reduction_length=n)
    assert ordinary.within and not small.within
    ordinary, _ = error_ratios(subject.bfloat16(), baseline, golden, metric="dot", dtype="float32", reduction_length=n)
    assert not ordinary.within


def test_error_ratios_propagate_nan_and_refuse_a_broken_golden():
    golden = portable_normal(8, seed=0, stream="g")
    subject = golden.float()
    subject[2] = math.nan
    measures = error_ratios(subject, golden.float(), golden, metric="x", dtype="float32", reduction_length=1)
    assert not all(m.within for m in measures)
    with pytest.raises(InputError, match="the reference is not finite"):
        error_ratios(golden, golden, golden * math.nan, metric="x", dtype="float32", reduction_length=1)


BASE = [0.8, 0.7, 0.65]
REPLAYS = [[x + sign * j * 1e-4 for x in BASE] for j in (1, 2, 3) for sign in (-1, 1)][:5]


def envelope(**changes):
    run = {"seeds": range(1, 6), "perturbation": "one-ulp inputs", "device": "cpu"}
    arguments = {**run, "dtype": "float32", "reduction_length": 64, **changes}
    return Envelope.from_replays(
        arguments.pop("metric", "grad_norm"),
        arguments.pop("base", BASE),
        arguments.pop("replays", REPLAYS),
        **arguments,
    )


def test_envelope_is_three_times_the_spread():
    stored = envelope()
    spread = max(abs(r[0] - BASE[0]) for r in REPLAYS)
    assert stored.spread[0] == spread and stored.steps == (1, 2, 3)
    inside = [BASE[0] + ENVELOPE_FACTOR * spread * 0.999, *BASE[1:]]
    measure = stored.judge(inside, run_seed=0)
    assert measure.within and measure.name == "grad_norm at step 1"
    assert measure.origin == "3 × spread of 5 perturbed replays on cpu"
    outside = [*BASE[:2], BASE[2] - ENVELOPE_FACTOR * spread * 1.001]
    measure = stored.judge(outside, run_seed=0)
    assert not measure.within and measure.name == "grad_norm at step 3"
    assert [m.within for m in stored.judge_steps(outside, run_seed=0)] == [True, True, False]
    assert not stored.judge([math.nan, *outside[1:]], run_seed=0).within
    assert stored.judge([math.nan, *outside[1:]], run_seed=0).name == "grad_norm at step 1"


def test_envelope_floor_and_scale_of_the_policy_loss():
    bitwise = envelope(replays=[BASE] * 5)
    assert bitwise.floor[0] == BASE[0] * Precision().floor(64)
    assert bitwise.judge(BASE, run_seed=0).origin == "3 × floor from unit roundoff on cpu"
    for metric, base in (("actor/pg_loss", BASE), ("grad_norm", [0.0, *BASE[1:]])):
        with pytest.raises(InputError, match=r"no scale of its own; expected scale = mean \|advantage · ratio\|"):
            envelope(metric=metric, base=base)
    tiny = [1e-9, -2e-9, 1e-9]
    scaled = envelope(metric="actor/pg_loss", base=tiny, replays=[tiny] * 5, scale=[0.7] * 3)
    # relative to itself the loss has the wrong sign; relative to its terms it is rounding
    assert scaled.judge([-x for x in tiny], run_seed=0).within
    assert not scaled.judge([x + 1e-3 for x in tiny], run_seed=0).within


def test_policy_loss_scale():
    advantages, ratio = torch.tensor([[1.0, -2.0, 9.0]]), torch.tensor([[1.0, 0.5, 9.0]])
    assert policy_loss_scale(advantages, ratio, torch.tensor([[1, 1, 0]])) == 1.0
    with pytest.raises(InputError, match="no response token"):
        policy_loss_scale(advantages, ratio, torch.zeros(1, 3))


def test_envelope_refuses_its_own_replays_and_other_steps():
    stored = envelope()
    with pytest.raises(InputError, match="envelope of grad_norm: the judged run is one of those"):
        stored.judge(BASE, run_seed=2)
    with pytest.raises(InputError, match="lengths differ; expected 3; found 2"):
        stored.judge(BASE[:2], run_seed=0)
    with pytest.raises(InputError, match=r"other steps; expected \(1, 2, 3\); found \(2, 1, 3\)"):
        stored.judge(BASE, run_seed=0, steps=[2, 1, 3])
    with pytest.raises(InputError, match="ascending; found"):
        envelope(steps=[1, 3, 3])
    with pytest.raises(InputError, match="at least 5 perturbed runs; found 4"):
        envelope(replays=REPLAYS[:4], seeds=range(4))
    with pytest.raises(InputError, match="replay 0: lengths differ"):
        envelope(replays=[BASE[:2]] * 5)
    with pytest.raises(InputError, match="not finite"):
        envelope(replays=[*REPLAYS[:4], [math.nan] * 3])


def test_envelope_json_keeps_every_bit():
    stored = envelope(perturbation=["a", "b", "a", "b", "a"])
    text = json.dumps(stored.to_dict(), allow_nan=False)
    assert Envelope.from_dict(json.loads(text)) == stored
    with pytest.raises(InputError, match="did you mean spread?"):
        Envelope.from_dict({**stored.to_dict(), "spred": []})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_ulp_moves_everything_by_exactly_one(dtype):
    x = portable_normal((50, 7), seed=0, stream="x", dtype=dtype)
    moved = one_ulp(x, seed=1)
    assert moved.dtype == dtype and moved.shape == x.shape
    assert bool((moved != x).all())
    assert ulp_distance(moved, x) == 1
    assert bool((moved > x).any()) and bool((moved < x).any())
    assert torch.equal(moved, one_ulp(x, seed=1)) and not torch.equal(moved, one_ulp(x, seed=2))
    # non-contiguous storage gives the same result
    assert torch.equal(one_ulp(x.T.contiguous().T, seed=1), moved)


def test_one_ulp_leaves_masks_and_infinities():
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(torch.float32).max])
    for seed in range(4):
        moved = one_ulp(x, seed=seed)
        assert torch.equal(moved[:4], x[:4]) and bool(moved[4].isnan()) and bool(moved[5].isfinite())
    with pytest.raises(InputError, match="one ulp is defined for"):
        one_ulp(torch.arange(3), seed=0)


MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
LOG_PROB = torch.tensor([[-0.5, -1.0, 7.0], [-2.0, 7.0, 7.0]])


def test_identities_hold_on_right_tensors():
    other = LOG_PROB.masked_fill(MASK == 0, -3.0)
    for identity in (log_prob_agreement, first_kl, first_update_ratio):
        measure = identity(LOG_PROB, other, MASK)
        assert measure.within and measure.value == 0.0 and measure.origin.startswith("exact: ")
    assert log_probs_nonpositive(LOG_PROB, MASK).within
    assert entropy_in_range(-LOG_PROB, MASK, vocab_size=16).within
    gap, signed, largest = train_inference_gap(LOG_PROB, LOG_PROB + 0.02, MASK)
    assert gap.within and "healthy" in gap.origin and signed.value == pytest.approx(0.02, abs=unit_roundoff("fp32"))
    assert signed.bound is None and largest.bound is None


@pytest.mark.parametrize("shift", [1e-6, -1e-6, math.nan])
def test_identities_fail_on_a_difference(shift):
    moved = LOG_PROB.double() + shift
    for identity in (log_prob_agreement, first_kl, first_update_ratio):
        assert not identity(moved, LOG_PROB.double(), MASK).within
    budget = Budget.from_roundoff(metric="ratio", dtype="float32", reduction_length=2**16)
    assert first_update_ratio(moved, LOG_PROB.double(), MASK, budget=budget).within is (shift == shift)


def test_identities_name_what_is_wrong():
    assert not log_probs_nonpositive(LOG_PROB + 1, MASK).within
    assert log_probs_nonpositive(LOG_PROB + 1, MASK).value == 0.5
    assert not log_probs_nonpositive(LOG_PROB * math.nan, MASK).within
    assert entropy_in_range(-LOG_PROB, MASK, vocab_size=4).value == 2.0 - math.log(4)
    assert entropy_in_range(torch.zeros(2, 3), MASK, vocab_size=16).value == math.inf
    assert not entropy_in_range(LOG_PROB * math.nan, MASK, vocab_size=16).within
    for shift, band in ((0.03, "elevated"), (0.07, "broken")):
        gap, *_ = train_inference_gap(LOG_PROB, LOG_PROB + shift, MASK)
        assert band in gap.origin and gap.within is (band != "broken")
    assert not train_inference_gap(LOG_PROB, LOG_PROB * math.nan, MASK)[0].within
    with pytest.raises(InputError, match=r"ref_log_prob: shape differs from response_mask; expected \(2, 3\)"):
        first_kl(LOG_PROB, LOG_PROB[:1], MASK)
    with pytest.raises(InputError, match="no response token"):
        first_kl(LOG_PROB, LOG_PROB, MASK * 0)
