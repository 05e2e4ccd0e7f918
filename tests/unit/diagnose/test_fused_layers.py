"""Layers that one side fuses and the other keeps apart: equal models agree, exchanged parts are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.diagnose.capture_comparison import compare_captures

WIDTH, KEYS, INNER = 16, 8, 32
DETAILS = ("statistics", "sketch", "tensor")


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        sizes = {"q_proj": WIDTH, "k_proj": KEYS, "v_proj": KEYS}
        for name, size in ({"qkv_proj": WIDTH + 2 * KEYS} if fused else sizes).items():
            setattr(self, name, nn.Linear(WIDTH, size, bias=False))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        if hasattr(self, "qkv_proj"):
            q, k, v = self.qkv_proj(x).split([WIDTH, KEYS, KEYS], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        k, v = torch.cat([k, k], -1), torch.cat([v, v], -1)
        return self.o_proj(torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5, -1) @ v)


class FeedForward(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        for name, size in ({"gate_up_proj": 2 * INNER} if fused else {"gate_proj": INNER, "up_proj": INNER}).items():
            setattr(self, name, nn.Linear(WIDTH, size, bias=False))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(nn.functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(fused), FeedForward(fused)

    def forward(self, x):
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block(fused) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Whole(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.model = Model(fused)

    def forward(self, input_ids):
        return self.model(input_ids)


def apart() -> Whole:
    torch.manual_seed(0)
    return Whole(False)


def exchanged_halves(state):
    name = "model.layers.1.mlp.gate_up_proj.weight"
    state[name] = state[name].roll(INNER, 0)


def exchanged_keys_and_values(state):
    name = "model.layers.1.self_attn.qkv_proj.weight"
    q, k, v = state[name].split([WIDTH, KEYS, KEYS])
    state[name] = torch.cat([q, v, k])


def a_wrong_row(state):
    weight = state["model.layers.0.self_attn.qkv_proj.weight"]
    weight[WIDTH + 1] = weight[WIDTH + 2]


def fused(change=lambda state: None) -> Whole:
    """The same numbers with its layers fused."""
    parts, model, state = apart().state_dict(), Whole(True), {}
    for name in model.state_dict():
        for whole, names in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if whole in name:
                state[name] = torch.cat([parts[name.replace(whole, part)] for part in names])
                break
        else:
            state[name] = parts[name]
    change(state)
    model.load_state_dict(state)
    return model


def recorded(model, directory, detail):
    ids = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(1))
    with capture(model, CaptureConfig(detail=detail, parameter_gradients=True), directory=directory) as session:
        with session.step(0):
            model(input_ids=ids).square().mean().backward()
    return OwnCapture(directory)


@pytest.mark.parametrize("detail", DETAILS)
def test_separate_and_fused_layers_agree_in_both_directions(tmp_path, detail):
    both = recorded(apart(), tmp_path / "apart", detail), recorded(fused(), tmp_path / "fused", detail)
    for golden, target in (both, both[::-1]):
        [stage] = compare_captures(golden, target).stages
        assert stage.aligned, stage.reason()
        assert {gap.name for gap in stage.unpaired if gap.fails} == set()


WRONG = {
    exchanged_halves: ("model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp"),
    exchanged_keys_and_values: ("model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn"),
    a_wrong_row: ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.qkv_proj"),
}
"""What is wrong: where it is named from tensors, and where from sketches, which joined rows lack, and from statistics,
which do not depend on the order of rows."""


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_exchanged_parts_of_a_fused_layer_are_found(tmp_path, change, detail):
    both = recorded(apart(), tmp_path / "apart", detail), recorded(fused(change), tmp_path / "fused", detail)
    for golden, target in (both, both[::-1]):
        [stage] = compare_captures(golden, target).stages
        assert not stage.aligned and stage.first is not None
        assert stage.first.module == WRONG[change][detail != "tensor"]
