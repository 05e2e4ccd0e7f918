"""Faults of attention, experts, precision, weight sync and sampler: each one caught, placed, and gone afterwards."""

from __future__ import annotations

import pytest

from alignment.faults.audit import catch
from alignment.faults.catalogue import attention, dtype, moe, sampler, weight_sync
from alignment.faults.check import Setting
from alignment.faults.checks import all_checks

TOPICS = {
    "rotary", "attention", "cache", "experts", "router", "model", "weights", "sync", "sampler", "rollout", "precision",
    "accumulation",
}  # fmt: skip
COUNTS = {attention: 13, moe: 17, dtype: 13, weight_sync: 19, sampler: 9}
"""Entries of the public catalogue, by category."""
FAULTS = [fault for module in COUNTS for fault in module.FAULTS]


def checks():
    return [check for check in all_checks() if check.name.partition(".")[0] in TOPICS]


def test_the_catalogue_has_every_entry_of_its_categories():
    for module, count in COUNTS.items():
        assert len({fault.id for fault in module.FAULTS}) == count, module.__name__


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_product_passes(check, seed):
    assert [str(finding) for finding in check.findings(Setting(seed=seed))] == []


def _cheap_first(fault):
    # What only dear checks see goes to the nightly; every check has a fault of its own among the others.
    marks = [] if fault.layer == "unit-op" else [pytest.mark.slow]
    return pytest.param(fault, id=fault.id, marks=marks)


@pytest.mark.parametrize("fault", [_cheap_first(fault) for fault in FAULTS])
def test_each_fault_is_caught_where_it_is(fault):
    row = catch(fault, all_checks())
    assert row.caught, fault.why
    assert row.placed, f"{row.check} says {row.stage} · {row.place}: {row.evidence}"
    assert row.by_cheapest_layer, f"{row.check} at {row.layer}, expected {row.expected_layer}"
    caught_by = next(check for check in all_checks() if check.name == row.check)
    assert not caught_by.findings(), "the fault is still there after its block"


@pytest.mark.parametrize(
    ("id", "check", "named"),
    [
        ("moe-output-reduced-twice", "experts.layouts", "it is TP (= 2) times the right value"),
        ("aux-loss-scale-drops-parallel-factor", "router.side_gradients", "it is TP (= 2) times the right value"),
        ("group-list-first-count-wrong", "experts.permutation", "tokens per expert"),
        ("router-gemm-rounds-to-bf16", "router.precision", "float32"),
        ("nucleus-renormalisation-one-sided", "rollout.generations", "signed +"),
        ("raw-logprobs-from-rollout", "rollout.generations", "mean |Δ log p|"),
        ("cached-transposed-weight-stale", "sync.probes", "self_attn"),
        ("mla-absorbed-weights-stale", "sync.probes", "row 0"),
        ("tied-head-updated-on-one-side", "sync.probes", "decode"),
        ("unpermute-abs-of-minus-one", "experts.unpermute", "pairs elsewhere"),
    ],
)
def test_the_evidence_names_the_ratio_or_the_place(id, check, named):
    fault = next(fault for fault in FAULTS if fault.id == id)
    judge = next(one for one in all_checks() if one.name == check)
    with fault():
        evidence = " ".join(str(finding) for finding in judge.findings())
    assert named in evidence
