"""Recording: what may be recorded, what is measured, and what a reviewer sees."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest
import torch

from alignment.backends.case import observe
from alignment.backends.subject import SubjectAvailability, get_subject
from alignment.backends.torch_operators import FORWARD
from alignment.baseline import record as recording
from alignment.baseline.check import check_case
from alignment.baseline.diff import Change, changes, diff
from alignment.baseline.noise import INPUTS, MANY_ELEMENTS, ORDER, ULP, factor_of, measure_noise, perturbations
from alignment.baseline.provenance import Provenance, content_hash, installed_packages, provenance_of, source_commit, tensors_hash
from alignment.baseline.record import complete, record, refuse_unfit
from alignment.baseline.store import BaselineStore, load
from alignment.baseline.verify import missing, unused, verify
from alignment.devices.base import Device
from alignment.errors import InputError, UnavailableError
from alignment.numerics.verdict import Outcome


def test_an_emulated_device_is_refused_whatever_else_holds(commit):
    with pytest.raises(InputError, match=r"npu \(emulated\): results of an emulated device are never a baseline"):
        refuse_unfit(Device(kind="npu", emulated=True))


def test_a_dirty_tree_is_refused_and_nothing_is_written(monkeypatch, cpu, the, tmp_path):
    monkeypatch.setenv("ALIGNMENT_COMMIT", "abc-dirty")
    store = BaselineStore(tmp_path)
    with pytest.raises(InputError, match="not recorded from a dirty tree.*found abc-dirty. Next: commit the change"):
        record([the("swiglu-float32")], cpu, store)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("ALIGNMENT_RECORD_FROM_DIRTY_TREE", "1")
    refuse_unfit(cpu)


def test_sources_without_git_need_their_commit_in_the_environment(monkeypatch, cpu):
    monkeypatch.setattr(recording, "source_commit", lambda: "unknown")
    with pytest.raises(InputError, match="ALIGNMENT_COMMIT: the commit of the sources is unknown.*ALIGNMENT_COMMIT=<commit>"):
        refuse_unfit(cpu)


def test_the_commit_is_marked_dirty_by_changes_outside_the_baselines(tmp_path, monkeypatch):
    monkeypatch.delenv("ALIGNMENT_COMMIT", raising=False)

    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        return subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True).stdout

    assert source_commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").strip()
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "new.json").write_text("{}")
    assert source_commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert source_commit(tmp_path) == f"{head}-dirty"


def test_provenance_names_machine_packages_switches_and_hashes(commit, cpu):
    found = provenance_of(cpu, hashes={"config": "c0ffee"})
    assert found.commit == commit and found.hashes == {"config": "c0ffee"}
    assert found.packages["torch"] == installed_packages()["torch"]
    assert found.fingerprint["kind"] == "cpu" and found.fingerprint["cores"] >= 1
    assert "deterministic_algorithms" in found.determinism
    assert Provenance.from_dict(found.to_dict()) == found
    assert f"torch {torch.__version__}" in found.stack
    with pytest.raises(InputError, match="not a provenance record"):
        Provenance.from_dict({**found.to_dict(), "colour": "blue"})


def test_hashes_depend_on_names_dtypes_shapes_and_bytes_but_not_on_order():
    a, b = torch.arange(4.0), torch.zeros(2, 2)
    assert tensors_hash({"a": a, "b": b}) == tensors_hash({"b": b, "a": a})
    variants = [{"a": b, "b": a}, {"a": a.double(), "b": b}, {"a": a.view(2, 2), "b": b}, {"a": a + 1, "b": b}]
    assert len({tensors_hash(v) for v in [{"a": a, "b": b}, *variants]}) == 5
    assert content_hash({"x": 1, "y": 2}) == content_hash({"y": 2, "x": 1}) != content_hash({"x": 1})


def test_noise_comes_from_six_runs_none_of_which_is_the_judged_one(the):
    case = the("swiglu-bfloat16")
    runs = perturbations(case, case.quantities[0])
    assert sorted(run.kind for run in runs) == sorted([INPUTS, ULP, ORDER] * 2)
    assert len({run.seed for run in runs}) == 6 and case.seed not in {run.seed for run in runs}


def test_a_float32_quantity_of_bfloat16_inputs_is_not_measured_with_bfloat16_ulps(the):
    case = the("router.plain-bfloat16")
    by_name = {q.name: {run.kind for run in perturbations(case, q)} for q in case.quantities}
    assert by_name["scores_for_choice"] == {INPUTS, ORDER}
    assert by_name["grad.x"] == {INPUTS, ULP, ORDER}


def test_a_budget_measured_on_the_judged_run_is_refused(recorded, the, cpu):
    case = the("swiglu-float32")
    budget = load(recorded.paths(operator="swiglu")[0]).entries[f"{case.id}/torch"].budgets()["output"]["relative_l2"]
    assert budget.judge(0.0, run_seed=case.seed).within
    with pytest.raises(InputError, match="one of those the noise was measured on"):
        budget.judge(0.0, run_seed=case.seed + 1)


def test_moved_inputs_and_a_permuted_batch_are_really_run(the, cpu):
    seen = []

    class Spy:
        name, kinds = "torch", ("cpu",)

        def run(self, case, inputs, device):
            seen.append(inputs["x"].clone())
            return observe(FORWARD[case.operator], inputs, case.attributes, case.differentiable)

    case = the("swiglu-float32")
    noise = measure_noise(case, Spy(), cpu)
    assert all(value > 0 for value in noise["output"]["relative_l2"].values)
    runs = perturbations(case, case.quantities[0])
    for run, x in zip(runs, seen, strict=True):
        plain = case.inputs(seed=run.seed)["x"]
        if run.kind == INPUTS:
            assert torch.equal(x, plain)
        elif run.kind == ULP:
            assert not torch.equal(x, plain) and torch.allclose(x, plain, rtol=torch.finfo(x.dtype).eps, atol=0)
        else:
            assert sorted(map(tuple, x.flatten(1).tolist())) == sorted(map(tuple, plain.flatten(1).tolist()))


def test_a_fault_is_not_recorded_as_noise(commit, the, cpu, tmp_path, monkeypatch):
    from alignment.backends import torch_operators

    monkeypatch.setitem(torch_operators.FORWARD, "swiglu", lambda t, a: {"output": 2 * FORWARD["swiglu"](t, a)["output"]})
    wrong = torch_operators.FORWARD["swiglu"]
    monkeypatch.setitem(torch_operators.FORWARD, "swiglu", lambda t, a: {"output": t["x"].chunk(2, -1)[0] * 1.0})
    assert wrong is not torch_operators.FORWARD["swiglu"]
    store = BaselineStore(tmp_path)
    with pytest.raises(InputError, match="swiglu-float32: output: more than half of the digits are wrong"):
        record([the("swiglu-float32")], cpu, store)
    assert store.paths() == []


def test_recording_again_changes_no_value_of_the_same_machine(recorded, the, cpu):
    again = record([the("swiglu-float32")], cpu, recorded)
    assert [str(c) for c in again.changes] == []


def test_the_factor_is_tighter_for_norms_over_many_elements_and_for_llm_operators(the):
    llm, other, many = the("swiglu-float32"), the("embedding-float32"), MANY_ELEMENTS
    assert factor_of(llm, "relative_l2", many) < factor_of(other, "relative_l2", many) < factor_of(llm, "max_abs", many)
    assert factor_of(llm, "relative_l2", many - 1) == factor_of(llm, "max_abs", many)


def test_a_changed_value_is_shown_before_and_after(recorded, the, cpu, monkeypatch):
    from alignment.baseline import noise

    monkeypatch.setattr(noise, "factor_of", lambda case, metric, elements: 10.0)
    again = record([the("swiglu-float32")], cpu, recorded)
    changed = [c for c in again.changes if c.value == "quantities.output.budgets.relative_l2.value"]
    assert len(changed) == 1 and " → " in str(changed[0]) and "(+" in str(changed[0])
    assert changed[0].after > changed[0].before


def test_diff_pairs_files_and_shows_new_and_gone_entries(recorded, the, cpu, tmp_path):
    other = BaselineStore(tmp_path / "other")
    record([the("swiglu-float32"), the("matmul-float32")], cpu, other)
    shown = [str(c) for c in diff(recorded, other)]
    assert any(line.startswith("matmul-float32/torch: entry: none →") for line in shown)
    assert any(line.startswith("swiglu-bfloat16/torch: entry:") and line.endswith("→ none") for line in shown)
    assert not any("swiglu-float32" in line for line in shown)
    assert diff(recorded, recorded) == []


def test_a_change_prints_its_relative_size():
    assert str(Change(entry="e", value="v", before=2.0, after=3.0)) == "e: v: 2 → 3 (+50.0%)"
    assert str(Change(entry="e", value="v", before=None, after="x")) == "e: v: none → x"


def test_a_changed_case_shows_which_field_changed(recorded):
    entry = load(recorded.paths(operator="swiglu")[0]).entries["swiglu-float32/torch"]
    other = dataclasses.replace(entry, case={**entry.case, "seed": 5})
    assert [str(c).split(": ", 1)[1] for c in changes(entry, other)] == [f"case.seed: {entry.case['seed']} → 5 (-100.0%)"]


def test_recording_resumes_after_what_is_complete(recorded, the, cpu, monkeypatch):
    assert complete(recorded, the("swiglu-float32"), "torch", cpu)
    assert not complete(recorded, the("matmul-float32"), "torch", cpu)
    assert not complete(recorded, dataclasses.replace(the("swiglu-float32"), seed=5), "torch", cpu)
    monkeypatch.setenv("ALIGNMENT_COMMIT", "another")
    assert not complete(recorded, the("swiglu-float32"), "torch", cpu), "other sources record anew"


def test_a_subject_that_cannot_run_stops_the_recording(commit, the, cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(
        type(get_subject("torch", "unit")),
        "available",
        lambda self, device: SubjectAvailability(available=False, reason="no such luck"),
    )
    with pytest.raises(UnavailableError, match="subject torch: no such luck"):
        record([the("swiglu-float32")], cpu, BaselineStore(tmp_path))


def test_verify_finds_nothing_wrong_with_what_was_just_recorded(recorded):
    assert verify(recorded) == []
    assert unused(recorded) == []
    assert "swiglu-float32" not in missing(recorded, kind="cpu") and "matmul-float32" in missing(recorded, kind="cpu")


def test_verify_names_damage_other_cases_and_stale_golden_values(recorded, monkeypatch):
    from alignment.backends import golden_operators

    path = recorded.paths(operator="rms_norm")[0]
    path.write_text(path.read_text()[:-40])
    monkeypatch.setattr(golden_operators, "model_rms_norm", None)
    (finding,) = verify(recorded)
    assert finding.severity == "error" and "truncated" in finding.problem


def test_verify_recomputes_golden_values(recorded, monkeypatch):
    from alignment.backends import golden_operators

    right = golden_operators.model_rms_norm
    monkeypatch.setattr(golden_operators, "model_rms_norm", lambda x, w, *, eps: right(x, w, eps=2 * eps))
    findings = verify(recorded)
    assert {f.problem.split(":")[0] for f in findings} == {"output", "grad.x", "grad.weight"}
    assert verify(recorded, recompute=False) == []


def test_an_entry_that_no_case_uses_is_reported(recorded, monkeypatch):
    from alignment.baseline import verify as module

    monkeypatch.setattr(module, "cases", lambda: ())
    assert [u.split(": ")[1] for u in unused(recorded)] == [
        "rms_norm-float32/torch", "swiglu-bfloat16/torch", "swiglu-float32/torch",
    ]  # fmt: skip
    assert all(f.severity == "note" and "no case uses" in f.problem for f in module.verify(recorded))


def test_a_right_run_passes_against_its_recording(recorded, the, cpu):
    verdict = check_case(the("rms_norm-float32"), get_subject("torch", "unit"), cpu, recorded)
    assert verdict.outcome is Outcome.PASS
    assert verdict.baseline.startswith("cpu/") and "recorded 20" in verdict.baseline
