"""Subjects: where they are, and that the fused operators of the NPU really run with the values they should get."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from alignment.backends.catalogue import cases, find_cases
from alignment.backends.subject import SUBJECTS, Subject, get_subject, subject_entries
from alignment.backends.torch_npu_operators import FUSED, TorchNpuOperators, require_fused
from alignment.backends.transformers_layers import TransformersLayers, unstacked
from alignment.devices.base import Device, get_device
from alignment.errors import InputError
from alignment.numerics.precision import unit_roundoff

FUSED_CASES = [case for case in cases("unit") if case.operator in FUSED]


def test_every_subject_loads_without_what_it_adapts_and_says_whether_it_can_run():
    for entry in SUBJECTS:
        subject = entry.load()
        assert isinstance(subject, Subject) and subject.name == entry.name and subject.kinds == entry.kinds
        answer = subject.available(get_device("cpu"))
        assert answer.reason, "a reason in both cases"


def test_an_unknown_subject_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="the unit layer has no subject 'megatron'; expected torch, torch_npu"):
        get_subject("megatron", "unit")
    assert [e.name for e in subject_entries("layer", names=("transformers",))] == ["transformers"]


def test_torch_npu_is_unavailable_off_the_npu_with_the_reason():
    answer = TorchNpuOperators().available(get_device("cpu"))
    assert (answer.available, answer.reason) == (False, "torch_npu runs on the npu only")


def test_transformers_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = TransformersLayers().available(get_device("cpu"))
    assert not answer.available and answer.reason.startswith("transformers is not installed (pip install")


def test_stacked_experts_come_apart_under_the_names_on_disk():
    stacked = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    named = unstacked({"mlp.experts.gate_up_proj": stacked, "mlp.experts.down_proj": stacked, "norm.weight": stacked})
    assert torch.equal(named["mlp.experts.1.gate_proj.weight"], stacked[1, :2])
    assert torch.equal(named["mlp.experts.0.up_proj.weight"], stacked[0, 2:])
    assert torch.equal(named["mlp.experts.1.down_proj.weight"], stacked[1])
    assert torch.equal(named["norm.weight"], stacked)


def test_a_result_without_the_fused_call_is_refused():
    (case,) = find_cases(["token_permute-float32"])
    with pytest.raises(InputError, match="the fused operator did not run.*expected npu_moe_token_permute, npu_moe_token_unp"):
        require_fused(case, {"npu_moe_token_permute"})
    require_fused(case, set(FUSED["token_permute"]))


def logged(case):
    """The fused calls of one run on the emulated NPU; a real NPU keeps no log, and there the results alone are judged."""
    from alignment.devices.emulated_npu import recorded_calls

    device = get_device("npu")
    if not device.emulated:
        pytest.skip("a real NPU keeps no log of calls")
    with recorded_calls() as log:
        TorchNpuOperators().run(case, case.inputs(), device)
    return log


@pytest.mark.npu
@pytest.mark.parametrize("case", FUSED_CASES, ids=[case.id for case in FUSED_CASES])
def test_the_fused_operator_really_runs_in_the_run_dtype(case):
    log = logged(case)
    for name in FUSED[case.operator]:
        assert log.named(name), f"{name} was not called"
    first = log.named(FUSED[case.operator][0])[0]
    wide = case.operator in ("router", "log_prob")
    found = next(iter(first.dtypes.values()))
    assert (found[0] if isinstance(found, tuple) else found) == ("float32" if wide else case.dtype)


@pytest.mark.npu
@pytest.mark.parametrize("variant", ["mla", "mla-yarn"])
def test_the_scale_that_reaches_the_attention_kernel_is_that_of_192_wide_heads(variant):
    (case,) = find_cases([f"attention.{variant}-float32"])
    scale = logged(case).only("npu_fusion_attention")["scale"]
    mscale = {"mla": 1.0, "mla-yarn": 0.1 * 1.0 * torch.tensor(40.0, dtype=torch.float64).log().item() + 1.0}[variant]
    assert scale == pytest.approx(192**-0.5 * mscale**2, rel=unit_roundoff("float32"))
    assert scale != pytest.approx(128**-0.5, rel=unit_roundoff("bfloat16"))


@pytest.mark.npu
@pytest.mark.parametrize(
    ("variant", "layout", "mode"), [("mla", "BNSD", 2), ("padding", "BNSD", 0), ("packed", "TND", 3)]
)
def test_attention_is_called_in_the_layout_and_mask_mode_of_its_variant(variant, layout, mode):
    (case,) = find_cases([f"attention.{variant}-bfloat16"])
    call = logged(case).only("npu_fusion_attention")
    assert (call["input_layout"], call["sparse_mode"]) == (layout, mode)
    if variant == "packed":
        assert call["actual_seq_qlen"] == [3, 7, 8, 9, 14]


@pytest.mark.npu
def test_the_router_kernel_gets_bias_groups_and_scaling():
    (case,) = find_cases(["router.groups-bfloat16"])
    call = logged(case).only("npu_moe_gating_top_k")
    assert (call["k"], call["group_count"], call["k_group"]) == (4, 4, 2)
    assert (call["norm_type"], call["group_select_mode"], call["routed_scaling_factor"]) == (1, 1, 2.446)
    assert call.dtypes["bias"] == call.dtypes["x"] == "float32"


@pytest.mark.npu
def test_a_path_around_the_fused_operator_is_noticed(monkeypatch):
    from alignment.backends import torch_npu_operators, torch_operators

    device = get_device("npu")
    if not device.emulated:
        pytest.skip("a real NPU keeps no log of calls")
    (case,) = find_cases(["swiglu-float32"])
    monkeypatch.setitem(torch_npu_operators._FORWARD, "swiglu", torch_operators.swiglu)
    with pytest.raises(InputError, match="swiglu-float32: the fused operator did not run.*found no fused call"):
        TorchNpuOperators().run(case, case.inputs(), device)


def test_an_emulated_device_is_labelled_so():
    assert dataclasses.replace(get_device("cpu"), kind="npu", emulated=True).label == "npu (emulated)"
    assert Device(kind="npu").label == "npu"
