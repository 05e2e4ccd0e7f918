"""Which tensors an FP8 rollout rounds, and the scales of FP8 training from step to step."""

import torch

from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.weights.fp8 import SCALE_SUFFIX
from alignment.weights.fp8_rollout import effective_weights, is_quantised, quantised_stream
from alignment.weights.fp8_scaling import DelayedScaling

KEPT = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight")


def test_linear_layers_are_rounded_and_nothing_else():
    state = CausalLM(preset("tiny-moonlight"), dtype=torch.bfloat16).init_weights(0).state_dict()
    sent = dict(quantised_stream(state.items()))
    rounded = {name.removesuffix(SCALE_SUFFIX) for name in sent if name.endswith(SCALE_SUFFIX)}
    assert rounded == {name for name in state if "_proj" in name}
    held = effective_weights(state.items())
    assert held.keys() == state.keys()
    assert all(torch.equal(held[name], state[name]) for name in (*KEPT, "model.layers.1.mlp.gate.e_score_correction_bias"))
    changed = [name for name in rounded if not torch.equal(held[name], state[name])]
    assert len(changed) == len(rounded)
    assert not is_quantised("model.layers.1.mlp.gate.weight", state["model.layers.1.mlp.gate.weight"])


def test_the_first_step_has_a_scale_and_the_history_forgets():
    scaling = DelayedScaling(history=2)
    codes, scale = scaling.quantize(torch.tensor([448.0, -1.0]))
    assert float(scale) == 1.0 and codes.float().tolist() == [448.0, -1.0]
    assert float(scaling.quantize(torch.tensor([44.8]))[1]) == 1.0, "the step before is remembered"
    assert float(scaling.quantize(torch.tensor([0.0]))[1]) == float(torch.tensor(44.8) / 448), "the one before it is not"
    assert float(DelayedScaling().quantize(torch.zeros(2))[1]) == 1.0
