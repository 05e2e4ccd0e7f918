"""``use_fused_kernels``: the same numbers and gradients without the logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.random import portable_integers
from alignment.rl import stages
from alignment.rl.config import TrainConfig
from alignment.rl.fused_head import fused_policy_outputs

EPS = torch.finfo(torch.float64).eps
TEMPERATURE = 0.7
PROMPT, RESPONSE = 5, 6


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(preset("tiny-moonlight"), dtype=torch.float64).init_weights(seed=3)


@pytest.fixture(scope="module")
def rows(model) -> dict[str, torch.Tensor]:
    ids = portable_integers(3, model.config.vocab_size, (3, PROMPT + RESPONSE), seed=1, stream="fused-head")
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1, -3:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:],
    }


def gradients(model, outputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (outputs["log_probs"].sum() + outputs["entropy"].square().sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk_size", (1, 4, 1024))
def test_values_and_gradients_are_those_of_the_plain_form(model, rows, chunk_size):
    plain = stages.policy_outputs(model, rows, temperature=TEMPERATURE)
    fused = fused_policy_outputs(model, rows, temperature=TEMPERATURE, chunk_size=chunk_size)
    # One logit adds hidden_size products, its softmax vocab_size terms.
    bound = EPS * model.config.hidden_size * model.config.vocab_size
    for name in ("log_probs", "entropy"):
        assert (fused[name] - plain[name]).abs().max() <= bound * plain[name].abs().max(), name
    expected, found = gradients(model, plain), gradients(model, fused)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= bound * gradient.norm(), name


def test_the_logits_are_never_whole(model, rows):
    widest = []
    whole = rows["responses"].numel() * model.config.vocab_size

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            made = function(*arguments, **(keywords or {}))
            wide = isinstance(made, torch.Tensor) and made.shape[-1:] == (model.config.vocab_size,)
            # A transposed view of the weight is as wide and is no logits.
            if wide and made.data_ptr() != model.lm_head.weight.data_ptr():
                widest.append(made.numel())
            return made

    def most(outputs) -> int:
        widest.clear()
        with Watch(), torch.no_grad():
            outputs()
        return max(widest)

    assert most(lambda: stages.policy_outputs(model, rows, temperature=TEMPERATURE)) >= whole
    fused = most(lambda: fused_policy_outputs(model, rows, temperature=TEMPERATURE, chunk_size=2))
    assert fused <= 2 * model.config.vocab_size < whole


def test_the_output_layer_is_itself_again_afterwards(model, rows):
    before = model(rows["input_ids"], attention_mask=rows["attention_mask"])
    fused_policy_outputs(model, rows, temperature=TEMPERATURE)
    assert torch.equal(model(rows["input_ids"], attention_mask=rows["attention_mask"]), before)
    with pytest.raises(InputError, match="temperature"):
        fused_policy_outputs(model, rows, temperature=0.0)
    assert torch.equal(model(rows["input_ids"], attention_mask=rows["attention_mask"]), before)


def test_another_output_layer_is_refused(rows):
    class Biased(nn.Module):
        lm_head = nn.Linear(2, 2)

    for model, found in ((Biased(), "Linear"), (nn.Linear(2, 2), "no lm_head")):
        with pytest.raises(InputError, match=f"(?s)use_fused_kernels.*{found}"):
            fused_policy_outputs(model, rows, temperature=1.0)


def test_the_configuration_chooses_and_old_fingerprints_stand():
    off, on = TrainConfig(), TrainConfig.from_dict({"actor_rollout_ref": {"model": {"use_fused_kernels": True}}})
    assert stages.outputs_of_policy(off).func is stages.policy_outputs
    assert stages.outputs_of_policy(on).func is fused_policy_outputs
    assert "actor_rollout_ref.model.use_fused_kernels" not in off.deciding_fields()
    assert on.deciding_fields()["actor_rollout_ref.model.use_fused_kernels"] is True
    assert on.config_hash() != off.config_hash()
