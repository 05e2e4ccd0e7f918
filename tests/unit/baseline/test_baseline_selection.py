"""Selection: same chip, same kind, gpu for an NPU, cpu golden; the latest of several; a missing one says what to run."""

from __future__ import annotations

import dataclasses

import pytest

from alignment.backends.subject import get_subject
from alignment.baseline.check import check_case
from alignment.baseline.select import MissingBaseline, fallback_order, select
from alignment.baseline.store import BaselineStore, load
from alignment.numerics.verdict import Outcome


def relabelled(store, target, *, kind, chip, date, subject="torch"):
    """The swiglu baselines of ``store``, as if another device had recorded them."""
    file = load(store.paths(operator="swiglu")[0])
    entries = []
    for entry in file.entries.values():
        fingerprint = {**entry.provenance.fingerprint, "kind": kind, "chip": chip, "label": kind}
        provenance = dataclasses.replace(entry.provenance, fingerprint=fingerprint, date=date)
        entries.append(dataclasses.replace(entry, provenance=provenance, subject=subject))
    target.put(entries, file.tensors)


@pytest.fixture
def shelf(recorded, tmp_path):
    return BaselineStore(tmp_path / "shelf")


def test_the_order_is_explicit():
    def order(kind):
        return [str(step) for step in fallback_order(kind, "Chip 1")]

    assert order("cpu") == ["same chip (cpu chip-1)", "same kind (cpu)"]
    assert order("cuda") == ["same chip (cuda chip-1)", "same kind (cuda)", "cpu golden (cpu)"]
    assert order("npu") == ["same chip (npu chip-1)", "same kind (npu)", "gpu (cuda)", "cpu golden (cpu)"]


def test_each_step_wins_over_the_ones_after_it(recorded, shelf, the):
    case = the("swiglu-float32")
    steps = [("cpu", "Epyc", "cpu golden"), ("cuda", "H200", "gpu"), ("npu", "910B1", "same kind"), ("npu", "910B3", "same chip")]
    for kind, chip, expected in steps:
        relabelled(recorded, shelf, kind=kind, chip=chip, date="2026-01-01")
        chosen = select(shelf, case, "torch", kind="npu", chip="910B3")
        assert chosen.step.name == expected and chosen.file.chip == chip
    assert chosen.explain() == "same chip (npu 910b3): swiglu.json"


def test_what_was_tried_is_told(recorded, shelf, the):
    relabelled(recorded, shelf, kind="cpu", chip="Epyc", date="2026-01-01")
    chosen = select(shelf, the("swiglu-float32"), "torch_npu", kind="npu", chip="910B3")
    assert chosen.tried == ("same chip (npu 910b3): none", "same kind (npu): none", "gpu (cuda): none")
    assert chosen.title.endswith("(cpu golden)") and chosen.title.startswith("cpu/epyc/unit/swiglu-float32/torch, recorded 2026-01-01")


def test_the_latest_of_several_chips_wins(recorded, shelf, the):
    relabelled(recorded, shelf, kind="cuda", chip="H200", date="2026-01-02")
    relabelled(recorded, shelf, kind="cuda", chip="A100", date="2026-01-01")
    assert select(shelf, the("swiglu-float32"), "torch", kind="npu", chip="x").file.chip == "H200"


def test_the_subjects_own_baseline_comes_before_that_of_torch(recorded, shelf, the):
    relabelled(recorded, shelf, kind="cuda", chip="H200", date="2026-01-02")
    relabelled(recorded, shelf, kind="cuda", chip="H200", date="2026-01-01", subject="torch_npu")
    assert select(shelf, the("swiglu-float32"), "torch_npu", kind="cuda", chip="H200").entry.subject == "torch_npu"
    assert select(shelf, the("swiglu-float32"), "fsdp", kind="cuda", chip="H200").entry.subject == "torch"


def test_a_missing_baseline_says_where_it_looked_and_what_to_run(tmp_path, the, cpu):
    with pytest.raises(MissingBaseline) as error:
        select(BaselineStore(tmp_path), the("swiglu-float32"), "torch", kind="npu", chip="910B3")
    assert str(error.value) == (
        f"swiglu-float32 by torch in {tmp_path}: there is no baseline for this case; expected same chip (npu 910b3) → "
        "same kind (npu) → gpu (cuda) → cpu golden (cpu); found none of them. "
        "Next: alignment baseline record --case swiglu-float32 --subject torch --device cpu"
    )


def test_a_check_without_a_baseline_is_an_error_with_the_command(tmp_path, the, cpu):
    verdict = check_case(the("swiglu-float32"), get_subject("torch", "unit"), cpu, BaselineStore(tmp_path))
    assert verdict.outcome is Outcome.ERROR
    assert verdict.next_command == "alignment baseline record --case swiglu-float32 --subject torch --device cpu"
