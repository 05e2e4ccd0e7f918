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


def compared(tmp_path, golden, target, scales=(None, None), x=None):
    x = drawn(2, TOKENS, WIDTH, stream="x") if x is None else x
    captures = []
    for name, model, scale in (("golden", golden, scales[0]), ("target", target, scales[1])):
        with capture(model, CaptureConfig(backward=False, settings=False), directory=tmp_path / name) as session:
            with session.step(0), torch.no_grad():
                model(x, scale=scale)
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


class Gain(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * self.by


class Behind(Net):
    """What comes before the blocks may be wrong as well."""

    def __init__(self, by):
        super().__init__(looks=(False,))
        self.gain = Gain(by)

    def forward(self, x, scale):
        return super().forward(self.gain(x), scale)


@pytest.mark.parametrize(
    ("by", "named"),
    [(2.02, [("gain", "out output")]), (6.0, [("", "in kwargs.scale"), ("gain", "out output")])],
    ids=["less", "more"],
)
def test_an_input_beside_a_fault_is_harmless_if_the_fault_is_less_than_it_is(tmp_path, by, named):
    # a fault as large as the input itself would explain whatever the block made of it
    scale = drawn(2, TOKENS, stream="scale")
    stage = compared(tmp_path, Behind(2.0), Behind(by), scales=(scale, scale * drawn(2, TOKENS, stream="off")))
    assert places(stage) == named


EXPERTS, ROWS = 2, 64


class Projection(nn.Module):
    """In bfloat16, its sum over K in so many parts."""

    def __init__(self, parts):
        super().__init__()
        self.weight, self.parts = nn.Parameter(drawn(ROWS, WIDTH, stream="projection").bfloat16()), parts

    def forward(self, x):
        return sum(a @ b for a, b in zip(x.chunk(self.parts, -1), self.weight.chunk(self.parts, 0), strict=True))


class Gate(nn.Module):
    """Every other token to every other expert, but for those that change places."""

    def __init__(self, exchanged):
        super().__init__()
        self.exchanged = exchanged

    def forward(self, x):
        chosen = torch.arange(ROWS) % EXPERTS
        chosen[: 2 * self.exchanged] = chosen[: 2 * self.exchanged].flip(0)
        return chosen.unsqueeze(-1)


class Mixture(nn.Module):
    def __init__(self, exchanged, parts):
        super().__init__()
        self.projection, self.gate = Projection(parts), Gate(exchanged)
        self.experts = nn.ModuleList(Gain(1.0 + i) for i in range(EXPERTS))

    def forward(self, x, scale=None):
        x = self.projection(x)
        chosen, out = self.gate(x)[:, 0], torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out[chosen == i] = expert(x[chosen == i])
        return out


@pytest.mark.parametrize(
    ("exchanged", "parts", "aligned"),
    [(1, 2, True), (1, 1, False), (ROWS // 2, 2, False)],
    ids=["ties", "exact", "all"],
)
def test_choices_that_change_places_are_near_ties_where_there_is_noise_and_few_moved(
    tmp_path, exchanged, parts, aligned
):
    # every expert is given as many tokens as before, so the index holds the same values in another order
    stage = compared(tmp_path, Mixture(0, 1), Mixture(exchanged, parts), x=drawn(ROWS, ROWS, stream="x").bfloat16())
    assert stage.aligned is aligned, stage.reason()
    assert aligned or stage.first.at == "experts.0" and stage.first.quantity == "in args.0"


class Turned(nn.Module):
    """Blocks that are given a table of cosines, which is made of positions."""

    def __init__(self):
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList(Block(drawn(WIDTH, WIDTH, stream=f"layer {i}"), True) for i in range(2))

    def forward(self, x, scale):
        table = self.table(scale)
        for layer in self.layers:
            x = layer(x, table)
        return x


class Table(nn.Module):
    def forward(self, positions):
        return torch.cos(positions * 0.1)


def placed(positions):
    return torch.tensor(positions)[None].expand(2, -1).contiguous()


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (range(5, 5 + TOKENS), [("", "in kwargs.scale"), ("table", "out output"), ("model.layers.0", "out output")]),
        ((0, 1, 2, 0, 1, 2), [("", "in kwargs.scale")]),
        ((5, 6, 7, 8, 9, 11), [("", "in kwargs.scale")]),
    ],
    ids=["shifted", "begun again", "shifted but for one"],
)
def test_behind_positions_that_are_a_constant_apart_whatever_goes_wrong_is_named_as_well(tmp_path, target, named):
    golden = list(range(TOKENS))
    stage = compared(tmp_path, Turned(), Turned(), scales=(placed(golden), placed(list(target))))
    assert places(stage) == named
