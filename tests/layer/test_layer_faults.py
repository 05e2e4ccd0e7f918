"""The checks of layers, both ways: a fault in one module is named there, and the right implementation passes."""

from __future__ import annotations

import pytest
import torch

from alignment.backends.catalogue import find_cases
from alignment.backends.golden_layers import GoldenLayers
from alignment.baseline.check import check_case
from alignment.baseline.record import record
from alignment.baseline.store import BaselineStore
from alignment.devices.base import get_device
from alignment.models import attention, mla, moe, norm, rope
from alignment.numerics.verdict import Outcome

DENSE, MOE = "decoder_layer.tiny-deepseek-dense-bfloat16", "decoder_layer.tiny-deepseek-moe-bfloat16"
MODEL = "causal_lm.tiny-deepseek-float32"


class Faulty(GoldenLayers):
    """The golden layers with one of the model's functions replaced while they run, and not while golden is computed."""

    def __init__(self, *replaced) -> None:
        self._replaced = replaced

    def run(self, case, inputs, device):
        with pytest.MonkeyPatch.context() as patch:
            for module, name, value in self._replaced:
                patch.setattr(module, name, value)
            return super().run(case, inputs, device)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = BaselineStore(tmp_path_factory.mktemp("baselines"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGNMENT_COMMIT", "0123456789abcdef")
        record(find_cases([DENSE, MOE, MODEL], "layer"), get_device("cpu"), folder)
    return folder


def judge(store, case_id, *replaced):
    (case,) = find_cases([case_id])
    return check_case(case, Faulty(*replaced), get_device("cpu"), store)


def without_bias(scores, bias, config):
    return right_selection(scores, torch.zeros_like(bias), config)


def without_scaling(scores, bias, config):
    chosen, weights = right_selection(scores, bias, config)
    return chosen, weights / config.routed_scaling_factor


def half_pairs(x, cos, sin):
    return right_rotation(torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2), cos, sin)


def sees_the_future(key_mask, **arguments):
    return right_mask(key_mask, **arguments).any(-2, keepdim=True).expand(-1, -1, key_mask.shape[1], -1)


right_selection, right_rotation, right_mask = moe.select_experts, rope.rotate_interleaved, attention.attention_mask_from


def right_norm(x, weight, *, eps):
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_without_eps_and_mean(x, weight, *, eps):
    return right_norm(x, weight, eps=eps) * 1.1


FAULTS = [
    (DENSE, (norm, "rms_norm", norm_without_eps_and_mean), "layers.0.input_layernorm", "input_layernorm"),
    (DENSE, (mla, "rotate_interleaved", half_pairs), "layers.0.self_attn.query", "query"),
    (DENSE, (mla, "softmax_scale", lambda config: config.v_head_dim**-0.5), "layers.0.self_attn.core", "core"),
    (DENSE, (mla, "softmax_scale", lambda config: config.q_head_dim**-0.5), "layers.0.self_attn.core", "core"),
    (MOE, (moe, "select_experts", without_bias), "layers.1.mlp.gate", "router_selected"),
    (MOE, (moe, "select_experts", without_scaling), "layers.1.mlp.gate", "router_weights"),
    (MODEL, (mla, "softmax_scale", lambda config: config.q_head_dim**-0.5), "model.layers.0", "layers.0"),
    (MODEL, (moe, "select_experts", without_scaling), "model.layers.1", "layers.1"),
]


@pytest.mark.parametrize(("case_id", "fault", "module", "quantity"), FAULTS)
def test_a_fault_is_named_at_the_first_module_that_parts(store, case_id, fault, module, quantity):
    verdict = judge(store, case_id, fault)
    assert verdict.outcome is Outcome.FAIL, verdict.reason
    assert (verdict.where.module, verdict.where.quantity) == (module, quantity)
    # Everything before the named quantity agrees.
    names = [m.name.split(" ")[0] for m in verdict.measures if not m.within]
    assert names[0] == quantity


@pytest.mark.parametrize("case_id", [DENSE, MOE, MODEL])
def test_the_right_layers_pass(store, case_id):
    verdict = judge(store, case_id)
    assert verdict.outcome is Outcome.PASS, (verdict.reason, verdict.where)


def test_a_loss_over_the_prompt_too_is_named_after_agreeing_logits(store, monkeypatch):
    from alignment.backends import golden_layers

    def mean_over_padding_too(logits, ids, real):
        return right(logits, ids, torch.ones_like(real))

    right = golden_layers.next_token_loss
    verdict = judge(store, MODEL, (golden_layers, "next_token_loss", mean_over_padding_too))
    assert (verdict.outcome, verdict.where.quantity, verdict.where.module) == (Outcome.FAIL, "loss", "loss")


def test_another_optimizer_is_named_after_agreeing_gradients(store):
    from alignment.backends import golden_layers

    def coupled_decay(weights, gradients):
        # Adam with L2 in the gradient, where AdamW decays the weight itself
        return right(weights, {n: g + 0.01 * weights[n] for n, g in gradients.items()})

    right = golden_layers.adamw_update
    verdict = judge(store, MODEL, (golden_layers, "adamw_update", coupled_decay))
    assert (verdict.outcome, verdict.where.module, verdict.where.quantity) == (Outcome.FAIL, "optimizer", "adamw_update")


def test_a_fault_in_one_parameters_gradient_is_named_by_its_name(store):
    from alignment.backends import golden_layers

    def one_parameter_doubled(weights, gradients):
        name = "model.layers.2.mlp.shared_experts.up_proj.weight"
        return right(weights, {**gradients, name: 2 * gradients[name]})

    right = golden_layers.gradient_observations
    verdict = judge(store, MODEL, (golden_layers, "gradient_observations", one_parameter_doubled))
    assert verdict.where.quantity == "grad_norms"
    assert verdict.where.detail.startswith("model.layers.2.mlp.shared_experts.up_proj.weight: found ")


def test_a_fault_of_the_golden_model_itself_is_told_from_one_of_the_subject(store, monkeypatch):
    monkeypatch.setattr(mla, "softmax_scale", lambda config: config.q_head_dim**-0.5)
    verdict = judge(store, DENSE)
    assert verdict.outcome is Outcome.FAIL
    assert (verdict.where.stage, verdict.where.quantity) == ("golden", "core")
