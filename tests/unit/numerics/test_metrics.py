"""Metrics against SciPy and NumPy oracles, their laws, and what NaN, infinity and emptiness do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.numerics import metrics
from alignment.numerics.random import portable_normal
from alignment.numerics.verdict import Measure

EPS = torch.finfo(torch.float64).eps
PAIRWISE = [metrics.relative_l2, metrics.max_abs, metrics.mean_abs, metrics.ulp_distance, metrics.cosine]
finite = st.floats(-1e6, 1e6, allow_subnormal=False)
vectors = st.lists(st.tuples(finite, finite), min_size=1, max_size=30)


def normal(*shape, stream="x"):
    return portable_normal(shape, seed=0, stream=stream)


def rel(n):
    """A sum of n float64 terms in any order agrees this closely for well-conditioned data."""
    return {"rel": 4 * n * EPS, "abs": 0.0}


def test_pairwise_metrics_agree_with_numpy_and_scipy():
    x, ref = normal(40, 50), normal(40, 50, stream="ref")
    a, b = x.numpy().ravel(), ref.numpy().ravel()
    n = a.size
    assert metrics.relative_l2(x, ref) == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), **rel(n))
    assert metrics.max_abs(x, ref) == np.abs(a - b).max()
    assert metrics.mean_abs(x, ref) == pytest.approx(np.abs(a - b).mean(), **rel(n))
    # the cosine of independent vectors is ~1/√n, so its absolute error counts
    assert abs(metrics.cosine(x, ref) - (1 - scipy.spatial.distance.cosine(a, b))) <= 4 * n * EPS
    signed = metrics.signed_mean_difference(x + 0.25, ref)
    assert signed.mean == pytest.approx((a + 0.25 - b).mean(), **rel(n))
    assert signed.standard_error == pytest.approx(scipy.stats.sem(a - b), **rel(n))
    assert signed.z == pytest.approx(scipy.stats.ttest_1samp(a + 0.25 - b, 0).statistic, **rel(n))
    assert signed.count == n


def test_distribution_metrics_agree_with_scipy():
    p, q = normal(16, 33).log_softmax(-1), normal(16, 33, stream="q").log_softmax(-1)
    kl = scipy.stats.entropy(p.exp().numpy(), q.exp().numpy(), axis=-1)
    tv = 0.5 * np.abs(p.exp().numpy() - q.exp().numpy()).sum(-1)
    assert metrics.kl_divergence(p, q) == pytest.approx(kl.mean(), **rel(33))
    assert metrics.kl_divergence(p, q, reduction="max") == pytest.approx(kl.max(), **rel(33))
    assert metrics.total_variation(p, q) == pytest.approx(tv.mean(), **rel(33))
    assert metrics.total_variation(p, q, reduction="max") == pytest.approx(tv.max(), **rel(33))


def test_kl_of_close_distributions_does_not_cancel():
    """For q = p shifted by h on two outcomes, KL = h²·(…) is far below the rounding of Σ p ln(p/q)."""
    h = 2.0**-40
    p = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    q = torch.tensor([[0.5 + h, 0.5 - h]], dtype=torch.float64).log()
    # ln q carries a rounding error of EPS·ln 2, so h itself is known to EPS / h
    assert metrics.kl_divergence(p, q) == pytest.approx(2 * h * h, rel=8 * EPS / h)


def test_kl_edges():
    log = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64).log()
    assert metrics.kl_divergence(log, log) == 0.0
    assert metrics.kl_divergence(log[:1], log[1:]) == pytest.approx(math.log(2), **rel(2))
    assert metrics.kl_divergence(log[1:], log[:1]) == math.inf
    assert math.isnan(metrics.kl_divergence(log + math.nan, log))
    assert math.isnan(metrics.total_variation(log, log + math.nan))
    far = torch.tensor([[-900.0, 0.0]], dtype=torch.float64)
    assert metrics.kl_divergence(far, far.flip(-1)) == pytest.approx(900.0, **rel(2))


def test_logits_in_place_of_log_probs_do_not_look_close():
    logits = normal(4, 9)
    assert metrics.kl_divergence(logits + 1.0, logits.log_softmax(-1)) > 1.0


@settings(max_examples=60, deadline=None)
@given(vectors, st.sampled_from([0.5, 2.0, -4.0]))
def test_laws(pairs, scale):
    x, ref = (torch.tensor(v, dtype=torch.float64) for v in zip(*pairs, strict=True))
    assert metrics.max_abs(x, x) == metrics.relative_l2(x, x) == metrics.ulp_distance(x, x) == 0.0
    assert metrics.max_abs(x, ref) == metrics.max_abs(ref, x)
    assert metrics.ulp_distance(x, ref) == metrics.ulp_distance(ref, x) == metrics.ulp_distance(-x, -ref)
    # scaling by a power of two is exact
    assert metrics.relative_l2(x * scale, ref * scale) == metrics.relative_l2(x, ref)
    assert metrics.max_abs(x * scale, ref * scale) == abs(scale) * metrics.max_abs(x, ref)
    assert abs(metrics.cosine(x, ref)) <= 1.0
    assert abs(metrics.cosine(-x, ref) + metrics.cosine(x, ref)) <= EPS or not (x.any() and ref.any())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=2, max_size=12))
def test_divergence_laws(pairs):
    p, q = (torch.tensor(v, dtype=torch.float64).log_softmax(-1)[None] for v in zip(*pairs, strict=True))
    kl, tv = metrics.kl_divergence(p, q), metrics.total_variation(p, q)
    slack = 8 * len(pairs) * EPS
    assert kl >= 0.0 and 0.0 <= tv <= 1.0 + slack
    # Pinsker's inequality
    assert tv <= math.sqrt(kl / 2) + slack
    assert metrics.kl_divergence(p, p) == 0.0


@pytest.mark.parametrize("metric", PAIRWISE)
def test_chunks_do_not_change_the_result(metric, monkeypatch):
    x, ref = normal(7, 11), normal(7, 11, stream="ref")
    whole = metric(x, ref)
    monkeypatch.setattr(metrics, "_CHUNK", 5)
    assert metric(x, ref) == pytest.approx(whole, rel=0, abs=4 * 77 * EPS)
    assert math.isnan(metric(x.masked_fill(x == x[-1, -1], math.nan), ref)) or metric is metrics.ulp_distance


def test_rows_in_chunks(monkeypatch):
    x, ref = normal(13, 5), normal(13, 5, stream="ref")
    before = metrics.decided_flips(x, ref, k=2, margin=0.5), metrics.kl_divergence(x, ref, reduction="max")
    monkeypatch.setattr(metrics, "_CHUNK", 11)
    assert (metrics.decided_flips(x, ref, k=2, margin=0.5), metrics.kl_divergence(x, ref, reduction="max")) == before


def test_signed_difference_in_chunks(monkeypatch):
    x, ref = normal(101), normal(101, stream="ref") + 1e6
    whole = metrics.signed_mean_difference(x, ref)
    monkeypatch.setattr(metrics, "_CHUNK", 7)
    parts = metrics.signed_mean_difference(x, ref)
    assert parts == pytest.approx(whole, rel=0, abs=1e6 * 101 * EPS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ulp_distance_counts_representable_values(dtype):
    info = torch.finfo(dtype)
    one = torch.ones(1, dtype=dtype)
    assert metrics.ulp_distance(one + info.eps, one) == 1
    # below a power of two the values are twice as dense
    assert metrics.ulp_distance(one - info.eps / 2, one) == 1
    assert metrics.ulp_distance(one - info.eps, one) == 2
    smallest = torch.tensor([info.smallest_normal], dtype=dtype) * info.eps
    assert metrics.ulp_distance(smallest, -smallest) == 2
    zero = torch.zeros(1, dtype=dtype)
    assert metrics.ulp_distance(zero, -zero) == 0
    top = torch.tensor([info.max], dtype=dtype)
    assert metrics.ulp_distance(top, -top) > 0
    assert metrics.ulp_distance(top * 2, top) == math.inf
    assert metrics.ulp_distance(one * math.nan, one) == math.inf


def test_ulp_distance_across_all_float64_is_exact_arithmetic():
    top = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert metrics.ulp_distance(top, -top) == float(2 * (0x7FF0000000000000 - 1))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_ulp_distance_in_fp8(name):
    dtype = getattr(torch, name)
    x = torch.tensor([1.0, -2.0]).to(dtype)
    assert metrics.ulp_distance(torch.tensor([1.0 + torch.finfo(dtype).eps, -2.0]).to(dtype), x) == 1


@settings(max_examples=60, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 50))
def test_ulp_distance_is_the_number_of_nextafter_steps(start, steps):
    value = np.float32(start)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            value = np.nextafter(value, np.float32(np.inf))
    if np.isfinite(value):
        assert metrics.ulp_distance(torch.tensor([value]), torch.tensor([start], dtype=torch.float32)) == steps


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("metric", [*PAIRWISE, lambda x, ref: metrics.signed_mean_difference(x, ref).mean])
def test_a_bad_value_under_test_is_never_within_a_bound(metric, bad, place):
    ref = torch.arange(1.0, 5.0, dtype=torch.float64)
    x = ref.clone()
    x[place] = bad
    value = metric(x, ref)
    assert not math.isfinite(value)
    assert not Measure(name="m", value=value, bound=torch.finfo(torch.float64).max).within


@pytest.mark.parametrize("metric", [*PAIRWISE, metrics.signed_mean_difference])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_never_equal_to_nan(metric, bad):
    broken = torch.tensor([1.0, bad], dtype=torch.float64)
    with pytest.raises(InputError, match="the reference is not finite.*NaN or infinity"):
        metric(broken, broken)


def test_zero_vectors():
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert metrics.relative_l2(zero, zero) == 0.0
    assert metrics.relative_l2(one, zero) == math.inf
    assert math.isnan(metrics.relative_l2(one * math.nan, zero))
    assert metrics.cosine(zero, zero) == 1.0
    assert metrics.cosine(zero, one) == metrics.cosine(one, zero) == 0.0


def test_extreme_magnitudes_do_not_overflow():
    for scale in (2.0**900, 2.0**-900):
        extreme = torch.tensor([scale, -scale], dtype=torch.float64)
        assert metrics.relative_l2(1.5 * extreme, extreme) == 0.5
        assert metrics.cosine(extreme, extreme) == pytest.approx(1.0, **rel(2))


def test_dtypes_may_differ_against_a_float64_golden():
    golden = normal(64)
    assert 0 < metrics.relative_l2(golden.bfloat16(), golden) <= torch.finfo(torch.bfloat16).eps
    with pytest.raises(InputError, match=r"counts in one dtype; expected torch.bfloat16; found torch.float64.*ref.to"):
        metrics.ulp_distance(golden.bfloat16(), golden)


@pytest.mark.parametrize("metric", [*PAIRWISE, metrics.kl_divergence, metrics.total_variation])
def test_shape_dtype_and_emptiness_are_usage_errors(metric):
    x = normal(2, 3)
    with pytest.raises(InputError, match=r"shape differs.*expected \(3, 2\); found \(2, 3\)"):
        metric(x, x.T)
    with pytest.raises(InputError, match="floating-point tensors; found torch.int64"):
        metric(x.long(), x.long())
    with pytest.raises(InputError, match="compares nothing"):
        metric(x[:0], x[:0])


def test_no_broadcasting():
    with pytest.raises(InputError, match="shape differs"):
        metrics.max_abs(normal(3), normal(1))


def test_flips_tell_decisions_from_near_ties():
    ref = torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0 - 2.0**-10, 0.0], [0.0, 2.0, 1.0]], dtype=torch.float64)
    assert metrics.decided_flips(ref, ref, margin=0.0) == metrics.Flips(0, 0, 3, 0.0)
    swapped = ref[:, [1, 0, 2]]
    flips = metrics.decided_flips(swapped, ref, margin=0.5)
    assert (flips.decided, flips.near_ties, flips.rows, flips.worst) == (2, 1, 3, 2.0)
    assert flips.decided_rate == 2 / 3


def test_a_near_tie_at_the_top_does_not_excuse_a_choice_from_the_bottom():
    ref = torch.tensor([[1.0, 1.0, -5.0]])
    assert metrics.decided_flips(torch.tensor([[0.0, 0.0, 1.0]]), ref, margin=0.1).decided == 1


def test_top_k_flips_ignore_order_within_the_set():
    ref = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    assert metrics.decided_flips(torch.tensor([[3.0, 4.0, 2.0, 1.0]]), ref, k=2, margin=0.0).decided == 0
    assert metrics.decided_flips(torch.tensor([[4.0, 1.0, 2.0, 3.0]]), ref, k=2, margin=1.5).decided == 1
    assert metrics.decided_flips(torch.tensor([[4.0, 1.0, 2.0, 3.0]]), ref, k=2, margin=2.0).near_ties == 1
    assert metrics.decided_flips(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), ref, k=4, margin=0.0).decided == 0


def test_flips_with_masked_and_broken_scores():
    ref = torch.tensor([[1.0, -math.inf, 0.0]])
    assert metrics.decided_flips(ref, ref, k=3, margin=0.0) == metrics.Flips(0, 0, 1, 0.0)
    flips = metrics.decided_flips(torch.tensor([[-math.inf, 1.0, 0.0]]), ref, margin=1e9)
    assert (flips.decided, flips.worst) == (1, math.inf)
    assert metrics.decided_flips(torch.tensor([[1.0, math.nan, 0.0]]), ref, margin=1e9).decided == 1
    with pytest.raises(InputError, match="the reference is not finite"):
        metrics.decided_flips(ref, torch.tensor([[1.0, math.nan, 0.0]]), margin=0.0)


def brute_force_flips(x, ref, k, margin):
    decided = 0
    for a, b in zip(x.tolist(), ref.tolist(), strict=True):
        top_a, top_b = (set(sorted(range(len(s)), key=lambda i: -s[i])[:k]) for s in (a, b))
        if top_a != top_b:
            decided += max(b[i] for i in top_b - top_a) - min(b[i] for i in top_a - top_b) > margin
    return decided


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4))
def test_flips_agree_with_brute_force(seed, k, levels):
    """Few levels make ties frequent."""
    x, ref = ((portable_normal((9, 6), seed=seed, stream=s) * levels).round().to(torch.float64) for s in ("x", "ref"))
    assert metrics.decided_flips(x, ref, k=k, margin=1.0).decided == brute_force_flips(x, ref, k, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: metrics.decided_flips(x, x, k=4, margin=0.0), "expected 1 ≤ k ≤ 3; found 4"),
        (lambda x: metrics.decided_flips(x, x, margin=math.nan), "a margin is a finite score difference"),
        (lambda x: metrics.decided_flips(x, x, margin=-1.0), "expected ≥ 0; found -1.0"),
        (lambda x: metrics.kl_divergence(x, x, reduction="sum"), "expected mean or max; found sum"),
        (lambda x: metrics.kl_divergence(x[0, 0], x[0, 0]), "needs a last dimension"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(InputError) as error:
        call(normal(2, 3))
    assert message in str(error.value)


def test_signed_difference_of_one_and_of_a_constant():
    one = torch.ones(1, dtype=torch.float64)
    assert math.isnan(metrics.signed_mean_difference(one, one).z)
    assert metrics.signed_mean_difference(torch.ones(4), torch.ones(4)).z == 0.0
    assert metrics.signed_mean_difference(torch.ones(4), torch.zeros(4)).z == math.inf
