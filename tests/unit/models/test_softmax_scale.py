"""The softmax scale of latent attention, as the attention really applies it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from alignment.models import attention, mla
from alignment.models.attention import attention_mask_from, observe_attention
from alignment.models.config import ModelConfig, YarnScaling, preset
from alignment.models.mla import AttentionContext, MultiHeadLatentAttention, softmax_scale
from alignment.models.rope import RotaryTable
from alignment.numerics.random import portable_normal

LENGTH = 6
DEEPSEEK_YARN = preset("deepseek-v3-671b").rope_scaling
# The real head widths of Moonlight and DeepSeek-V3 (128 + 64 against a value head of 128), with few heads.
REAL_WIDTHS = replace(preset("moonlight-16b-a3b"), num_attention_heads=2, hidden_size=256, kv_lora_rank=64)
CASES = {
    "moonlight widths": (REAL_WIDTHS, 192**-0.5),
    "deepseek widths and yarn": (
        replace(REAL_WIDTHS, rope_scaling=DEEPSEEK_YARN, q_lora_rank=48),
        192**-0.5 * (0.1 * math.log(40) + 1) ** 2,
    ),
    "mscale_all_dim decides": (
        replace(
            REAL_WIDTHS,
            rope_scaling=YarnScaling(factor=8, original_max_position_embeddings=64, mscale=0.5, mscale_all_dim=1.5),
        ),
        192**-0.5 * (0.15 * math.log(8) + 1) ** 2,
    ),
    "yarn without mscale_all_dim": (
        replace(REAL_WIDTHS, rope_scaling=YarnScaling(factor=8, original_max_position_embeddings=64, mscale=0.5)),
        192**-0.5,
    ),
}


class _SoftmaxInputs(TorchFunctionMode):
    """Records what reaches ``torch.softmax``, whoever computed it and with whatever scale."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.softmax, torch.nn.functional.softmax):
            self.seen.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def applied_scale(config: ModelConfig, *, absorbed: bool) -> Tensor:
    """Softmax input over q·k for every allowed pair: the scale of the computation."""
    layer = MultiHeadLatentAttention(config, 0, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(portable_normal(tuple(parameter.shape), seed=3, stream=name) * parameter.shape[-1] ** -0.5)
    layer.absorb()
    hidden = portable_normal((1, LENGTH, config.hidden_size), seed=3, stream="hidden")
    cos, sin = RotaryTable(config)(torch.arange(LENGTH)[None], torch.float64)
    mask = attention_mask_from(torch.ones(1, LENGTH))
    context = AttentionContext(cos=cos, sin=sin, mask=mask, absorbed=absorbed)
    with torch.no_grad(), observe_attention() as calls, _SoftmaxInputs() as softmax:
        layer(hidden, context)
    (call,), (scores,) = calls, softmax.seen
    products = torch.matmul(call.query, call.key.transpose(-1, -2))
    allowed = mask.expand_as(scores)
    return scores[allowed] / products[allowed]


def is_scale(found: Tensor, expected: float) -> bool:
    """Two roundings, the product's and the quotient's, may lie between them."""
    return bool(((found - expected).abs() <= 2 * torch.finfo(torch.float64).eps * expected).all())


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("name", CASES)
def test_the_scale_applied_is_that_of_the_whole_query_head(name, absorbed):
    config, expected = CASES[name]
    assert softmax_scale(config) == pytest.approx(expected, rel=4 * torch.finfo(torch.float64).eps)
    assert is_scale(applied_scale(config, absorbed=absorbed), softmax_scale(config))


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
def test_the_width_of_a_value_head_is_detected(absorbed, monkeypatch):
    monkeypatch.setattr(mla, "softmax_scale", lambda config: config.v_head_dim**-0.5)
    assert not is_scale(applied_scale(REAL_WIDTHS, absorbed=absorbed), 192**-0.5)


def test_a_kernel_that_ignores_its_argument_is_detected(monkeypatch):
    """Reading the argument, or an attribute, would not see this one."""
    right = attention.scaled_dot_product
    monkeypatch.setattr(
        attention, "scaled_dot_product", lambda q, k, v, *, scale, mask: right(q, k, v, scale=128**-0.5, mask=mask)
    )
    assert not is_scale(applied_scale(REAL_WIDTHS, absorbed=False), 192**-0.5)


def test_mscale_enters_squared(monkeypatch):
    config, expected = CASES["deepseek widths and yarn"]
    monkeypatch.setattr(mla, "softmax_scale", lambda c: c.q_head_dim**-0.5 * mla.softmax_mscale(c.rope_scaling))
    assert not is_scale(applied_scale(config, absorbed=False), expected)


def test_every_layer_attends_through_the_one_function(golden, tokens):
    config = preset("tiny-deepseek")
    model = golden(config)
    with observe_attention() as calls:
        model(tokens(config, 2, LENGTH))
    assert [call.scale for call in calls] == [softmax_scale(config)] * config.num_hidden_layers
    with observe_attention() as calls:
        model.absorb()
        model.prefill(tokens(config, 2, LENGTH), model.new_cache(2, LENGTH), absorbed=True)
    assert [call.key.shape[1] for call in calls] == [1] * config.num_hidden_layers
    model(tokens(config, 2, LENGTH))
    assert len(calls) == config.num_hidden_layers, "an observer that has ended sees nothing more"
