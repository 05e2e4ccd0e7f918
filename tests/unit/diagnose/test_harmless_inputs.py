"""A tensor that one module does not look at is not harmless for that: who computed it wrongly, who is given it and goes
wrong, and what leaves the run with it stay accused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.diagnose.capture_comparison import compare_captures
from alignment.numerics.random import portable_normal

WIDTH, TOKENS = 8, 6


class Rotation(nn.Module):
    def __init__(self, speed):
        super().__init__()
        self.speed = speed

    def forward(self, x):
        return torch.cos(torch.arange(x.shape[1]) * self.speed).expand(x.shape[0], -1).contiguous()


class Block(nn.Module):
    """Looks at the scale, or is given it and does not."""

    def __init__(self, weight, looks):
        super().__init__()
        self.weight, self.looks = nn.Parameter(weight), looks

    def forward(self, x, scale):
        return x @ self.weight * (scale.unsqueeze(-1) if self.looks else 1.0)


class Net(nn.Module):
    def __init__(self, *, looks, speed=None, hands_out=False):
        super().__init__()
        self.rotation = None if speed is None else Rotation(speed)
        self.layers = nn.ModuleList(Block(drawn(WIDTH, WIDTH, stream=f"layer {i}"), look) for i, look in enumerate(looks))
        self.hands_out = hands_out

    def forward(self, x, scale=None):
        scale = scale if self.rotation is None else self.rotation(x)
        for layer in self.layers:
            x = layer(x, scale)
        return (x, scale) if self.hands_out else x


def drawn(*shape, stream):
    return portable_normal(shape, seed=3, stream=stream, dtype=torch.float32)


def compared(tmp_path, golden, target, scales=(None, None)):
    captures = []
    for name, model, scale in (("golden", golden, scales[0]), ("target", target, scales[1])):
        with capture(model, CaptureConfig(backward=False, settings=False), directory=tmp_path / name) as session:
            with session.step(0), torch.no_grad():
                model(drawn(2, TOKENS, WIDTH, stream="x"), scale=scale)
        captures.append(OwnCapture(tmp_path / name))
    [stage] = compare_captures(*captures).stages
    return stage


def places(stage):
    return [(f.module, f.quantity) for f in stage.localisation.introduced]


@pytest.mark.parametrize(
    ("looks", "hands_out"), [((False, True), False), ((False,), True), ((False,), False)], ids=["used", "out", "unused"]
)
def test_who_computed_a_tensor_wrongly_is_accused_whoever_ignores_it(tmp_path, looks, hands_out):
    made = [Net(looks=looks, speed=speed, hands_out=hands_out) for speed in (0.1, 0.3)]
    stage = compared(tmp_path, *made)
    assert places(stage) == [("rotation", "out output")] and not stage.aligned


def test_an_input_that_one_layer_ignores_is_named_beside_the_one_that_goes_wrong(tmp_path):
    made = [Net(looks=(False, True)) for _ in range(2)]
    scale = drawn(2, TOKENS, stream="scale")
    stage = compared(tmp_path, *made, scales=(scale, scale * drawn(2, TOKENS, stream="off")))
    assert places(stage) == [("model.layers.1", "out output"), ("", "in kwargs.scale")]


def test_an_input_that_the_run_hands_out_again_is_not_harmless(tmp_path):
    made = [Net(looks=(False,), hands_out=True) for _ in range(2)]
    scale = drawn(2, TOKENS, stream="scale")
    stage = compared(tmp_path, *made, scales=(scale, scale * drawn(2, TOKENS, stream="off")))
    assert ("", "in kwargs.scale") in places(stage)


def test_an_input_that_nobody_looks_at_is_a_remark(tmp_path):
    made = [Net(looks=(False, False)) for _ in range(2)]
    scale = drawn(2, TOKENS, stream="scale")
    stage = compared(tmp_path, *made, scales=(scale, scale * drawn(2, TOKENS, stream="off")))
    assert stage.aligned and "differ without effect" in stage.reason()
