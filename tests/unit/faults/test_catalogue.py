"""The catalogue's faults: each one caught, placed, and gone afterwards; and the product without them."""

from __future__ import annotations

import pytest

from alignment.faults.audit import catch
from alignment.faults.catalogue import (
    attention, checkpoint, data, distill, dtype, loss, moe, parallel, sampler, weight_sync,
)  # fmt: skip
from alignment.faults.check import Setting
from alignment.faults.checks import all_checks

COUNTS = {
    attention: 13, moe: 17, dtype: 13, weight_sync: 19, sampler: 9,
    loss: 17, parallel: 14, checkpoint: 8, data: 7, distill: 8,
}  # fmt: skip
"""Entries of the public catalogue, by category."""
FAULTS = [fault for module in COUNTS for fault in module.FAULTS]
MODEL = {attention, moe, dtype, weight_sync, sampler}


def cheap_first(fault):
    # What only dear checks of the model see goes to the nightly; every check has a fault of its own among the others.
    dear = fault.layer != "unit-op" and any(fault in module.FAULTS for module in MODEL)
    return pytest.param(fault, id=fault.id, marks=[pytest.mark.slow] if dear else [])


def test_the_catalogue_has_every_entry_of_its_categories():
    for module, count in COUNTS.items():
        assert len({fault.id for fault in module.FAULTS}) == count, module.__name__
        assert {fault.category for fault in module.FAULTS} == {module.__name__.rpartition(".")[2].replace("_", "-")}


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.name)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_product_passes(check, seed):
    assert [str(finding) for finding in check.findings(Setting(seed=seed))] == []


@pytest.mark.parametrize("fault", [cheap_first(fault) for fault in FAULTS])
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
        ("loss-normalised-per-micro-batch", "training.split", "micro-batches"),
        ("cp-loss-factor-missing", "parallel_layouts.averaging", "1/CP (= 1/2)"),
        (
            "replicated-tower-grads-marked-sequence-parallel",
            "parallel_layouts.sequence",
            "TP (= 2) times the right value",
        ),
        (
            "side-loss-missing-microbatch-scale",
            "parallel_layouts.side_losses",
            "micro-batches (= 3) times the right value",
        ),
        ("grad-norm-counts-replicas", "parallel_layouts.norms", "√copies (= 2) times the right value"),
        ("kl-loss-subtracted", "losses.actor", "value, "),
        ("labels-rolled-after-sharding", "parallel_layouts.places", "rank 0: token, label, right label"),
        ("sampler-position-not-restored", "data_path.order", "resumed after"),
    ],
)
def test_the_evidence_names_the_ratio_or_the_place(id, check, named):
    fault = next(fault for fault in FAULTS if fault.id == id)
    judge = next(one for one in all_checks() if one.name == check)
    with fault():
        found = [str(finding) for finding in judge.findings()]
    assert any(named in text for text in found), found[:5]
