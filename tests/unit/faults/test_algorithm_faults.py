"""Faults of losses, layouts, checkpoints, data and distillation: each one caught, placed, and gone afterwards."""

from __future__ import annotations

import pytest

from alignment.faults.audit import catch
from alignment.faults.catalogue import checkpoint, data, distill, loss, parallel
from alignment.faults.check import Setting
from alignment.faults.checks import all_checks

TOPICS = {
    "losses",
    "advantages",
    "distributions",
    "stages",
    "step",
    "training",
    "parallel_layouts",
    "streams",
    "optimizers",
    "turns",
    "rewards",
    "batches",
    "data_path",
    "checkpoints",
    "distillation",
}
COUNTS = {loss: 17, parallel: 14, checkpoint: 8, data: 7, distill: 8}
"""Entries of the public catalogue, by category."""
FAULTS = [fault for module in COUNTS for fault in module.FAULTS]


def checks():
    return [check for check in all_checks() if check.name.partition(".")[0] in TOPICS]


def test_the_catalogue_has_every_entry_of_its_categories():
    for module, count in COUNTS.items():
        assert len({fault.id for fault in module.FAULTS}) == count, module.__name__
        assert {fault.category for fault in module.FAULTS} == {module.__name__.rpartition(".")[2]}


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_product_passes(check, seed):
    assert [str(finding) for finding in check.findings(Setting(seed=seed))] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_each_fault_is_caught_where_it_is(fault):
    row = catch(fault, checks())
    assert row.caught, fault.why
    assert row.placed, f"{row.check} says {row.stage} · {row.place}: {row.evidence}"
    assert row.by_cheapest_layer, f"{row.check} at {row.layer}, expected {row.expected_layer}"
    caught_by = next(check for check in checks() if check.name == row.check)
    assert not caught_by.findings(), "the fault is still there after its block"


@pytest.mark.parametrize(
    ("id", "check", "named"),
    [
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
    with fault():
        found = [f.evidence for one in checks() if one.name == check for f in one.findings()]
    assert any(named in text for text in found), found[:5]
