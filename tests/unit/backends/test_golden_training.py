from __future__ import annotations

from functools import partial

import pytest
import torch

from alignment.backends.golden_training import GoldenTrainingEngine, adamw_step, require_finite
from alignment.backends.training import OptimizerConfig, TrainingEngine, Workload
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.random import portable_integers, portable_normal
from alignment.rl.stages import policy_outputs

CONFIG = preset("tiny-deepseek")
SAMPLES, PROMPT, RESPONSE = 4, 5, 6


def micro_batch(rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    tokens = portable_integers(3, CONFIG.vocab_size, (SAMPLES, PROMPT + RESPONSE), seed=5, stream="tokens")
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    mask[1, -3:] = 0
    return {
        "input_ids": tokens[rows],
        "attention_mask": mask[rows],
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[rows],
        "responses": tokens[rows, PROMPT:],
        "response_mask": mask[rows, PROMPT:],
    }


def engine(*, dtype=torch.float64, frozen=False, seed=3, **optimizer) -> GoldenTrainingEngine:
    model = CausalLM(CONFIG, dtype=dtype).init_weights(seed)
    config = None if frozen else OptimizerConfig(**{"lr": 1e-2, **optimizer})
    return GoldenTrainingEngine(model, optimizer=config, outputs=partial(policy_outputs, temperature=1.0), device="cpu")


def token_mean(total: int):
    """The mean negative log-prob over ``total`` tokens: additive over micro batches."""

    def loss(outputs, micro):
        value = -(outputs["log_probs"] * micro["response_mask"]).sum() / total
        return value, {"loss": value.detach(), "tokens": micro["response_mask"].sum()}

    return loss


TOKENS = int(micro_batch()["response_mask"].sum())


def weights(engine: GoldenTrainingEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def test_the_engine_keeps_the_protocol():
    assert isinstance(engine(), TrainingEngine)


def test_an_update_says_what_it_computed():
    """Padding is no work: five positions of the rows are none."""
    parts = [micro_batch(slice(0, 1)), micro_batch(slice(1, None))]
    report = engine().update(parts, token_mean(TOKENS), stage="update_actor")
    assert report.workload == Workload(tokens=SAMPLES * (PROMPT + RESPONSE) - 5, micro_batches=2)


def test_log_prob_is_of_the_token_the_logits_predict():
    golden = engine()
    batch = micro_batch()
    [outputs] = golden.forward([batch], stage="old_log_prob")
    with torch.no_grad():
        logits = golden.model(batch["input_ids"], attention_mask=batch["attention_mask"])
    distribution = torch.distributions.Categorical(logits=logits[:, PROMPT - 1 : -1])
    real = batch["response_mask"].bool()
    bound = torch.finfo(torch.float64).eps * CONFIG.vocab_size
    assert (outputs["log_probs"] - distribution.log_prob(batch["responses"]))[real].abs().max() <= bound
    assert (outputs["entropy"] - distribution.entropy())[real].abs().max() <= bound * distribution.entropy().max()
    shifted = torch.distributions.Categorical(logits=logits[:, PROMPT:])
    assert (outputs["log_probs"] - shifted.log_prob(batch["responses"]))[real].abs().max() > bound


def test_adamw_is_torch_adamw_bit_for_bit():
    start = portable_normal((7, 5), seed=1, stream="weight")
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, foreach=False, **settings)
    ours, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 4):
        gradient = portable_normal((7, 5), seed=step, stream="gradient")
        theirs.grad = gradient.clone()
        optimizer.step()
        adamw_step(ours, gradient, exp_avg, exp_avg_sq, step=step, lr=3e-3, **settings)
    assert torch.equal(ours, theirs.detach())


def test_an_update_does_not_depend_on_the_micro_batches():
    whole, halves = engine(), engine()
    one = whole.update([micro_batch()], token_mean(TOKENS), stage="update_actor")
    two = halves.update([micro_batch(slice(0, 1)), micro_batch(slice(1, 4))], token_mean(TOKENS), stage="update_actor")
    # Sums over at most all tokens and all weights, in another order.
    size = TOKENS * max(p.numel() for p in whole.model.parameters())
    bound = torch.finfo(torch.float64).eps * size
    assert two.metrics["tokens"] == one.metrics["tokens"] == TOKENS
    assert abs(two.metrics["loss"] - one.metrics["loss"]) <= bound * abs(one.metrics["loss"])
    assert abs(two.grad_norm - one.grad_norm) <= bound * one.grad_norm
    # A mean of per-micro-batch means is another number: the shared count is what makes the terms add up.
    wrong = engine().update(
        [micro_batch(slice(0, 1)), micro_batch(slice(1, 4))],
        lambda outputs, micro: token_mean(2 * int(micro["response_mask"].sum()))(outputs, micro),
        stage="update_actor",
    )
    assert abs(wrong.metrics["loss"] - one.metrics["loss"]) > bound * abs(one.metrics["loss"])


def test_the_gradient_norm_is_global_and_clipping_uses_it():
    clipped, free = engine(clip_grad=0.5), engine(clip_grad=0.0)
    report = clipped.update([micro_batch()], token_mean(TOKENS), stage="update_actor", parameter_grad_norms=True)
    assert set(report.parameter_grad_norms) == {name for name, _ in clipped.model.named_parameters()}
    total = sum(norm**2 for norm in report.parameter_grad_norms.values()) ** 0.5
    assert abs(total - report.grad_norm) <= torch.finfo(torch.float64).eps * len(report.parameter_grad_norms) * total
    assert report.grad_norm > 0.5
    free.update([micro_batch()], token_mean(TOKENS), stage="update_actor")
    scale = 0.5 / (report.grad_norm + 1e-6)  # the constant is that of torch.nn.utils.clip_grad_norm_
    wanted = free._exp_avg["lm_head.weight"] * scale
    bound = torch.finfo(torch.float64).eps * 3 * wanted.abs()  # three roundings: gradient times scale, times 1 - beta1
    assert ((clipped._exp_avg["lm_head.weight"] - wanted).abs() <= bound).all()


def test_bfloat16_weights_move_through_their_main_weights():
    low = engine(dtype=torch.bfloat16, lr=1e-5, weight_decay=0.0)
    name = "model.layers.0.mlp.up_proj.weight"
    before, main = weights(low)[name], low._main[name].clone()
    for _ in range(3):
        low.update([micro_batch()], token_mean(TOKENS), stage="update_actor")
    assert low._main[name].dtype == torch.float32
    after = weights(low)[name]
    assert torch.equal(after, low._main[name].bfloat16())
    # Steps below half the spacing of bfloat16: only the main weights remember them.
    assert ((low._main[name] != main) & (after == before)).any()


def test_weights_leave_under_their_checkpoint_names_and_include_buffers():
    golden = engine()
    names = [name for name, _ in golden.export_weights()]
    assert names == list(golden.model.state_dict())
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names


def test_saved_state_continues_bit_for_bit(tmp_path):
    straight = engine(lr_warmup_steps=3)
    straight.update([micro_batch()], token_mean(TOKENS), stage="update_actor")
    straight.save_state(tmp_path)
    resumed = engine(seed=99, lr_warmup_steps=3)
    resumed.load_state(tmp_path)
    reports = [e.update([micro_batch()], token_mean(TOKENS), stage="update_actor") for e in (straight, resumed)]
    assert reports[0] == reports[1]
    assert all(torch.equal(t, weights(resumed)[n]) for n, t in weights(straight).items())


def test_saved_main_weights_are_not_the_rounded_ones(tmp_path):
    straight = engine(dtype=torch.bfloat16, lr=1e-5)
    straight.update([micro_batch()], token_mean(TOKENS), stage="update_actor")
    straight.save_state(tmp_path)
    resumed = engine(dtype=torch.bfloat16, seed=99, lr=1e-5)
    resumed.load_state(tmp_path)
    assert all(torch.equal(resumed._main[n], t) for n, t in straight._main.items())


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lacks 1 tensor(s); expected lm_head.weight"),
        (
            lambda tensors: tensors.update(stray=torch.zeros(1)),
            "has 1 tensor(s) too many; expected only known names; found stray",
        ),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2, 2)}), "does not fit"),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused_whole(tmp_path, change, words):
    from safetensors.torch import load_file, save_file

    engine().save_state(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    target = engine(seed=99)
    before = weights(target)
    with pytest.raises(InputError) as error:
        target.load_state(tmp_path)
    assert words in str(error.value) and "model.safetensors" in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in weights(target).items())


def test_a_truncated_checkpoint_is_refused(tmp_path):
    engine().save_state(tmp_path)
    path = tmp_path / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="optimizer.safetensors: the file is truncated or not safetensors"):
        engine().load_state(tmp_path)


def test_logits_that_are_not_finite_name_the_stage():
    golden = engine()
    with torch.no_grad():
        golden.model.lm_head.weight[7] = float("nan")
    with pytest.raises(
        InputError, match="old_log_prob · log_probs: the logits are not finite.*nan at sample 0, response token 0"
    ):
        golden.forward([micro_batch()], stage="old_log_prob")


def test_a_gradient_that_is_not_finite_names_stage_and_parameter_and_changes_nothing():
    golden = engine()
    before = weights(golden)

    def loss(outputs, micro):
        value, metrics = token_mean(TOKENS)(outputs, micro)
        return value * float("inf"), metrics

    with pytest.raises(InputError, match="update_actor · model.embed_tokens.weight: the gradient is not finite"):
        golden.update([micro_batch()], loss, stage="update_actor")
    assert all(torch.equal(t, before[n]) for n, t in weights(golden).items())


def test_frozen_and_offloaded_engines_refuse():
    frozen = engine(frozen=True)
    frozen.forward([micro_batch()], stage="ref_log_prob")
    with pytest.raises(InputError, match="update_actor: a frozen engine has no optimizer"):
        frozen.update([micro_batch()], token_mean(TOKENS), stage="update_actor")
    frozen.offload()
    with pytest.raises(InputError, match="ref_log_prob: the training engine is offloaded"):
        frozen.forward([micro_batch()], stage="ref_log_prob")
    frozen.reload()
    frozen.forward([micro_batch()], stage="ref_log_prob")


def test_offloading_between_updates_changes_no_bit():
    straight, sliced = engine(), engine()
    for _ in range(2):
        straight.update([micro_batch()], token_mean(TOKENS), stage="update_actor")
        sliced.offload()
        sliced.reload()
        sliced.update([micro_batch()], token_mean(TOKENS), stage="update_actor")
    assert all(torch.equal(t, weights(sliced)[n]) for n, t in weights(straight).items())


def test_the_schedule_warms_up_and_decays():
    config = OptimizerConfig(lr=1.0, lr_warmup_steps=4, lr_scheduler_type="cosine", total_steps=12, min_lr_ratio=0.25)
    assert [config.learning_rate(i) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert config.learning_rate(8) == 0.25 + 0.75 * 0.5
    assert config.learning_rate(12) == config.learning_rate(50) == 0.25
    with pytest.raises(InputError, match="total_steps: a cosine schedule has to know where it ends"):
        OptimizerConfig(lr_scheduler_type="cosine")


def test_logits_of_three_dimensions_are_named_by_sample_and_token():
    logits = torch.zeros(2, 3, 5)
    logits[1, 2, 4] = float("inf")
    mask = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="teacher_log_prob · logits.*inf at sample 1, response token 2"):
        require_finite({"logits": logits}, {"response_mask": mask}, stage="teacher_log_prob")
    mask[1, 2] = 0
    require_finite({"logits": logits}, {"response_mask": mask}, stage="teacher_log_prob")


def test_what_is_listed_by_active_token_is_named_by_its_number():
    listed = torch.tensor([0.0, float("nan"), 0.0])
    with pytest.raises(InputError, match="teacher_log_prob · token_log_probs.*nan at active token 1"):
        require_finite({"token_log_probs": listed}, {}, stage="teacher_log_prob")
