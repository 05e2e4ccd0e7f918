"""The same replayed batch on one rank and on every parallel layout of megatron-core, against the float64 golden engine.

Losses and gradients are those of the sum over micro batches: on one rank they accumulate without any communication. A
layout
that differs where the one rank agrees is convicted of its communication; one that agrees is cleared.
"""

from __future__ import annotations

import functools
import json

import megatron_world
import pytest
import torch
from megatron_world import (
    LEARNING_RATE,
    STEPS,
    VERSION,
    golden_outputs,
    policy_loss,
    replayed_rows,
    share,
    small_config,
    weights,
)
from safetensors.torch import load_file

from alignment.backends.golden_training import GoldenTrainingEngine
from alignment.backends.training import OptimizerConfig
from alignment.models.causal_lm import CausalLM

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron_core")]

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, CP = "virtual_pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# megatron-core's own column-parallel down projections instead of those every rank holds: a live defect, below.
STOCK = {TP: 2, "without": ["duplicated_down_projections"]}

# In bfloat16 only the forward pass is compared: a rounded activation flips near-ties of the router, and with them
# gradients.
BF16 = {"dtype": "bfloat16", "steps": 1}

ON_ONE = {
    "one_bf16": BF16,
    "one": {},
    "one_plain_optimizer": {"use_distributed_optimizer": False},
    "one_recompute": FULL,
    "one_moonlight": {"preset": "tiny-moonlight"},
}
ON_TWO = {
    "dp2": {"resume": "dp2"},
    "dp2_plain_optimizer": {"use_distributed_optimizer": False},
    "tp2": {TP: 2},
    "pp2": {PP: 2},
    "pp2_uneven": {PP: 2, "num_layers_in_first_pipeline_stage": 1},
    "pp2_vpp2": {PP: 2, VPP: 2, "resume": "pp2_vpp2"},
    "ep2": {EP: 2, "resume": "ep2"},
    "cp2": {CP: 2, "resume": "cp2"},
    "tp2_etp1_ep2": {TP: 2, ETP: 1, EP: 2},
    "tp2_selective": {TP: 2, "recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "pp2_full_recompute": {PP: 2, **FULL},
    "tp2_moonlight": {TP: 2, "preset": "tiny-moonlight"},
    "tp2_stock_projections": STOCK,
    "tp2_ep2_bf16": {TP: 2, EP: 2, ETP: 1, **BF16},
    "pp2_bf16": {PP: 2, **BF16},
}
ON_FOUR = {
    "tp2_ep2_etp1": {TP: 2, EP: 2, ETP: 1},
    "tp2_ep2_etp2": {TP: 2, EP: 2, ETP: 2},
    "tp2_pp2": {TP: 2, PP: 2},
    "cp2_tp2": {CP: 2, TP: 2},
}
MADE = {**ON_ONE, **ON_TWO, **ON_FOUR}
LAYOUTS = {name: layout for name, layout in MADE.items() if layout is not STOCK and "dtype" not in layout}
IN_BF16 = [name for name, layout in MADE.items() if "dtype" in layout]

# The bars of the project for megatron-core against the golden in float32 on the tiny presets: relative error of
# log-probs
# and losses, and relative L2 of gradients with a floor of this share of the global norm spread over all parameters.
LOSS_BAR, GRADIENT_BAR, GRADIENT_FLOOR = 1e-5, 1e-4, 1e-3
# Every reduction over ranks is one more rounding in another order; measured layouts stay below 2.5 times the one rank's
# error.
NOISE_FACTOR = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every layout computed, by one launch per number of ranks."""
    folder = tmp_path_factory.mktemp("layouts")
    for ranks, layouts in ((1, ON_ONE), (2, ON_TWO), (4, ON_FOUR)):
        megatron_world.launch(ranks, {"layouts": layouts, "results": str(folder)})
    return {
        name: {
            **json.loads((folder / f"{name}.json").read_text()),
            "tensors": load_file(folder / f"{name}.safetensors"),
        }
        for name in MADE
    }


class Golden:
    """The float64 golden engine on the same rows: the losses, norms, first gradients and final weights."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        config = small_config(name)
        model = CausalLM(config, dtype=torch.float64)
        model.load_state_dict(weights(config, dtype))
        engine = GoldenTrainingEngine(
            model, optimizer=OptimizerConfig(lr=LEARNING_RATE), outputs=golden_outputs, device="cpu"
        )
        rows = {k: v.double() if v.is_floating_point() else v for k, v in replayed_rows(config).items()}
        batches = share(rows, 0, 1)
        self.mask = rows["response_mask"]
        self.log_probs = torch.cat([o["log_probs"] for o in engine.forward(batches, stage="old_log_prob")])
        self.losses, self.norms, self.gradients = [], [], {}
        step = engine._step

        def keeping(gradients, norm, rate):
            self.gradients = self.gradients or {n: g.clone() for n, g in gradients.items()}
            step(gradients, norm, rate)

        engine._step = keeping
        for _ in range(STEPS):
            report = engine.update(batches, policy_loss, stage="update_actor")
            self.losses.append(report.metrics["loss"])
            self.norms.append(report.grad_norm)
        self.weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
        self.scale = float((rows["advantages"].abs() * self.mask).sum() / self.mask.sum())

    def gradient_errors(self, found: dict[str, torch.Tensor]) -> dict[str, float]:
        floor = GRADIENT_FLOOR * self.norms[0] / len(self.gradients) ** 0.5
        return {
            name: float((found[f"gradient.{name}"].double() - g).norm() / (g.norm() + floor))
            for name, g in self.gradients.items()
        }


@pytest.fixture(scope="module")
def golden():
    return functools.cache(Golden)


def of(golden, layout: str) -> Golden:
    return golden(LAYOUTS[layout].get("preset", "tiny-deepseek"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs(results, golden, layout):
    ours, reference = results[layout]["tensors"]["log_probs"], of(golden, layout)
    error = ((ours - reference.log_probs) * reference.mask).abs().max() / reference.log_probs.abs().max()
    assert error <= LOSS_BAR


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_of_three_steps(results, golden, layout):
    ours, reference = results[layout], of(golden, layout)
    for mine, theirs in zip(ours["losses"], reference.losses, strict=True):
        assert abs(mine - theirs) <= LOSS_BAR * max(abs(theirs), reference.scale)
    for mine, theirs in zip(ours["norms"], reference.norms, strict=True):
        assert abs(mine - theirs) <= LOSS_BAR * theirs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_parameter(results, golden, layout):
    errors = of(golden, layout).gradient_errors(results[layout]["tensors"])
    worst = max(errors, key=errors.get)
    assert errors[worst] <= GRADIENT_BAR, f"{worst}: {errors[worst]:.2e}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updated_weights(results, golden, layout):
    """AdamW divides by the gradient's own size: where that is noise the sign of a step is, too, whatever the layout.

    So the budget is measured: the distance of one rank's weights from the golden ones, times what a different order
    of sums
    may add.
    """
    reference = of(golden, layout).weights

    def distance(name: str) -> float:
        tensors = results[name]["tensors"]
        return float(sum((tensors[f"weight.{n}"].double() - w).square().sum() for n, w in reference.items()) ** 0.5)

    noise = distance("one_moonlight" if LAYOUTS[layout].get("preset") else "one")
    assert 0 < noise
    assert distance(layout) <= NOISE_FACTOR * noise


@pytest.mark.parametrize("layout", IN_BF16)
def test_bfloat16_log_probs(results, golden, layout):
    """Mean error against float64 from the same rounded weights, in multiples of one rank's."""
    reference = golden("tiny-deepseek", torch.bfloat16)

    def error(name: str) -> float:
        off = (results[name]["tensors"]["log_probs"] - reference.log_probs).abs() * reference.mask
        return float(off.sum() / reference.mask.sum())

    assert 0 < error("one_bf16")
    assert error(layout) <= NOISE_FACTOR * error("one_bf16")


@pytest.mark.parametrize("layout", [name for name, layout in MADE.items() if "resume" in layout])
def test_a_resumed_layout_makes_the_same_next_step_on_every_rank(results, layout):
    assert results[layout]["resumed"] is True


@pytest.mark.parametrize("layout", MADE)
def test_export_gives_back_the_checkpoint_bit_for_bit(results, layout):
    assert results[layout]["exported"]


# --- the live defect: MLA gradients under tensor parallelism without the fused layer
# -----------------------------------


def stock_errors(results, golden) -> dict[str, float]:
    return golden("tiny-deepseek").gradient_errors(results["tp2_stock_projections"]["tensors"])


@pytest.mark.xfail(strict=True, reason=f"megatron-core {VERSION} loses the rotary key's gradient under TP > 1")
def test_stock_down_projections_have_the_right_gradients(results, golden):
    assert max(stock_errors(results, golden).values()) <= GRADIENT_BAR


def test_stock_down_projections_agree_in_loss_and_not_in_the_gradient_of_the_shared_key(results, golden):
    """The signature: everything forward agrees; the first gradient that does not is the projection's own."""
    ours, reference = results["tp2_stock_projections"], golden("tiny-deepseek")
    assert abs(ours["losses"][0] - reference.losses[0]) <= LOSS_BAR * max(abs(reference.losses[0]), reference.scale)
    assert abs(ours["norms"][0] - reference.norms[0]) > LOSS_BAR * reference.norms[0]
    errors = stock_errors(results, golden)
    wrong = {name for name, error in errors.items() if error > GRADIENT_BAR}
    last = max(i for i in range(small_config("tiny-deepseek").num_hidden_layers))
    in_last_layer = {name for name in wrong if name.startswith(f"model.layers.{last}.")}
    # Backward reaches the last layer first: there nothing but the projection, and the norm that feeds it, is wrong.
    assert in_last_layer == {
        f"model.layers.{last}.self_attn.kv_a_proj_with_mqa.weight", f"model.layers.{last}.input_layernorm.weight",
    }  # fmt: skip
    assert not {"lm_head.weight", "model.norm.weight"} & wrong
