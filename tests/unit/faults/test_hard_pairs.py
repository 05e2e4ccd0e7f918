"""Defect and noise of one size: what is declared, the margin and the sign decide, not the magnitude."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from alignment.faults.catalogue import find_faults
from alignment.faults.check import Setting
from alignment.faults.checks import all_checks
from alignment.faults.seam import wrapped
from alignment.numerics.precision import Precision


def findings(name: str, setting: Setting | None = None) -> list[str]:
    check = next(check for check in all_checks() if check.name == name)
    return [str(finding) for finding in check.findings(setting)]


@pytest.mark.parametrize("seed", range(5))
def test_a_router_in_bfloat16_is_a_fault_only_where_float32_is_declared(seed):
    (fault,) = find_faults(["router-gemm-rounds-to-bf16"])
    with fault():
        assert findings("router.precision", Setting(seed=seed))
        assert findings("router.precision", Setting(seed=seed, precision=Precision(router="bfloat16"))) == []


@pytest.mark.parametrize("seed", range(5))
def test_near_ties_may_flip_and_decided_choices_may_not(seed):
    declared = Setting(seed=seed, precision=Precision(router="bfloat16"))
    (benign,) = find_faults(["near-tie-expert-flip"])
    with benign():
        assert findings("router.precision", declared) == []

    def decided(original):
        def forward(self, x):
            chosen, weights = original(self, x)
            # One token in fifty takes the next expert: fewer flips than near-ties make, but decided ones.
            chosen = chosen.clone()
            chosen[::50, 0] = (chosen[::50].max(-1).values + 1) % self.config.n_routed_experts
            return chosen, weights

        return forward

    with wrapped("alignment.models.moe:Router.forward", decided):
        assert "change experts by more than" in findings("router.precision", declared)[0]


def test_matmuls_with_ten_bits_are_a_fault_only_where_nobody_declared_them():
    (benign,) = find_faults(["fp32-hf32-matmul"])
    with benign():
        assert findings("precision.linears", Setting(precision=Precision(matmul="hf32"))) == []
        assert "linear.matmul" in findings("precision.linears")[0]


def test_a_head_in_bfloat16_is_a_fault_of_a_float32_engine_and_the_floor_of_a_bfloat16_one():
    (fault,) = find_faults(["lm-head-bf16-on-one-side"])
    with fault():
        assert any("lm_head" in finding for finding in findings("sync.probes"))
        assert findings("precision.gap") == []


def test_weights_of_one_step_of_1e_6_before_are_found_though_they_are_below_all_noise():
    def old(original):
        def update(self, stream, **options):
            self.count = getattr(self, "count", 0) + 1
            if self.count == 3:  # the update that moves weights by 1e-6
                return
            original(self, stream, **options)

        return update

    with wrapped("alignment.backends.golden_rollout:GoldenRollout.update_weights", old):
        found = findings("sync.tensors")
    assert found and "update 3 after sleep 1" in found[0]


def test_a_gap_with_a_sign_is_found_below_the_band_of_broken_stacks():
    def shifted(original):
        def gather(logits, tokens):
            found = original(logits, tokens)
            return found + 0.02 if logits.dtype == torch.bfloat16 else found

        return gather

    (benign,) = find_faults(["train-rollout-gap-normal-range"])
    with benign():
        assert findings("precision.gap") == []
    with wrapped("alignment.backends.golden_rollout:_gather_log_probs", shifted):
        assert any("rounding has no sign" in finding for finding in findings("precision.gap"))


def fp8_rollout(original):
    """The exporter rounds linear layers to e4m3 on their way to the engine."""

    def stream(model, *, dtype=None):
        from alignment.weights import fp8_rollout

        sent = dict(original(model, dtype=dtype))
        for name, tensor in fp8_rollout.effective_weights(iter(sent.items()), block=(128, 128)).items():
            yield name, tensor.to(sent[name].dtype)

    return stream


def test_an_fp8_rollout_is_right_where_it_is_declared_and_a_fault_where_it_is_not():
    declared = Setting(precision=dataclasses.replace(Precision(), rollout="float8_e4m3fn"))
    with wrapped("alignment.backends.weight_sync:stream_weights", fp8_rollout):
        assert "_proj" in findings("sync.tensors")[0]
        assert findings("sync.probes")
        assert findings("sync.tensors", declared) == []
        assert findings("sync.probes", declared) == []


def test_a_declared_fp8_rollout_does_not_excuse_old_weights():
    declared = Setting(precision=dataclasses.replace(Precision(), rollout="float8_e4m3fn"))
    (fault,) = find_faults(["rollout-one-version-behind"])
    with wrapped("alignment.backends.weight_sync:stream_weights", fp8_rollout), fault():
        assert findings("sync.tensors", declared)
