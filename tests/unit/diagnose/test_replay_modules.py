"""Modules of the target on inputs of golden: one fault behind another is still named, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from comparison_rows import MemoryCapture, chain
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.diagnose.replay_modules import first_divergence, replay_modules
from alignment.errors import InputError
from alignment.numerics.random import portable_normal


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = 1.0

    def forward(self, x, *, mask):
        return x + self.down(torch.tanh(self.up(x)) * self.scale) * mask


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        for name, parameter in self.named_parameters():
            parameter.data.copy_(portable_normal(tuple(parameter.shape), seed=0, stream=name, dtype=torch.float32))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, mask=torch.ones(x.shape[0], 1))
        return x


@pytest.fixture
def golden(tmp_path):
    x = portable_normal((5, 8), seed=1, stream="x", dtype=torch.float32)
    with capture(model := Model(), CaptureConfig(detail="tensor"), directory=tmp_path) as session, session.step(0):
        model(x)
    return OwnCapture(tmp_path)


def replay(golden, change=lambda model: None):
    model = Model()
    with torch.no_grad():
        change(model)
    return replay_modules(model, golden, step=0, stage="train")


def test_the_same_model_repeats_golden_exactly(golden):
    found = replay(golden)
    assert len(found) > 10
    assert {r.relative for r in found} == {0.0}
    assert first_divergence(found) is None


def test_two_faults_are_both_named_and_nothing_between_them(golden):
    def change(model):
        model.blocks[0].up.weight.mul_(1.5)
        model.blocks[2].scale = 1.1

    places = [(r.module, r.at, r.quantity) for r in replay(golden, change) if r.diverges]
    assert places == [("blocks.0.up", "blocks.0.up", "out output"), ("blocks.2", "blocks.2.down", "in args.0")]


def test_nan_and_shapes_are_problems(golden):
    def change(model):
        model.blocks[1].down.bias.fill_(float("nan"))

    assert "40 NaN, golden has 0" in first_divergence(replay(golden, change)).problem


def test_a_capture_without_tensors_is_refused():
    with pytest.raises(InputError, match="golden holds no tensors to replay"):
        replay_modules(Model(), MemoryCapture(chain(detail="sketch")), step=0, stage="train")
    with pytest.raises(InputError, match="none of golden's modules"):
        replay_modules(Model(), MemoryCapture(chain(detail="tensor")), step=0, stage="train")
