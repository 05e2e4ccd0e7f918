"""Weights that attention has absorbed: one name wherever the module that computes with them lies, and no work twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from alignment.capture import hooks
from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.diagnose.capture_comparison import compare_captures

HEADS, NOPE, VALUE, RANK = 2, 4, 3, 8
WEIGHT = "layer.kv_b_proj.weight"


class Attention(nn.Module):
    """Answers with what the values of a latent are; ``inner``, as vLLM's, holds the layer and matrices of its own."""

    def __init__(self, *, inner: bool, absorbed: bool) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        if inner:
            self.mla_attn = Inner(self.kv_b_proj, absorbed)

    def forward(self, latent):
        if hasattr(self, "mla_attn"):
            return self.mla_attn(latent)
        return self.kv_b_proj(latent).unflatten(-1, (HEADS, -1))[..., NOPE:]


class Inner(nn.Module):
    def __init__(self, layer: nn.Linear, absorbed: bool) -> None:
        super().__init__()
        self.kv_b_proj = layer
        self._absorbed = absorbed
        self.derive()

    def derive(self):
        key, value = self.kv_b_proj.weight.detach().unflatten(0, (HEADS, -1)).split([NOPE, VALUE], dim=1)
        self.W_UK_T, self.W_UV = key.clone(), value.transpose(1, 2).clone()

    def forward(self, latent):
        if self._absorbed:
            return torch.einsum("...r,hrv->...hv", latent, self.W_UV)
        return self.kv_b_proj(latent).unflatten(-1, (HEADS, -1))[..., NOPE:]


class Model(nn.Module):
    def __init__(self, **form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Attention(**form)

    def forward(self, latent):
        return self.layer(latent)


def captured(directory, model, *, between=lambda: None, calls=1) -> OwnCapture:
    with capture(model, CaptureConfig(backward=False, settings=False), directory=directory) as session:
        with session.step(0):
            for _ in range(calls):
                model(torch.linspace(-1, 1, 3 * RANK).view(3, RANK))
                between()
    assert session.failure is None
    return OwnCapture(directory)


def weights(reader) -> list[str]:
    return [row.module for row in reader.rows(0, "train", 0) if row.kind == "parameter"]


@pytest.mark.parametrize("stale", (False, True))
@pytest.mark.parametrize("absorbed", (False, True), ids=("prefill", "decode"))
def test_the_layer_of_an_inner_module_is_compared_under_its_own_name(tmp_path, absorbed, stale):
    golden, target = Model(inner=False, absorbed=False), Model(inner=True, absorbed=absorbed)
    if stale:
        target.layer.mla_attn.W_UK_T.mul_(2)
    first, second = captured(tmp_path / "a", golden), captured(tmp_path / "b", target)
    assert weights(first) == weights(second) == [WEIGHT]
    stage = compare_captures(first, second, allow_missing=("*.mla_attn",)).stages[0]
    assert stage.failures == []
    if stale and absorbed:
        assert (stage.first.module, stage.first.quantity) == ("layer.kv_b_proj", "parameter weight")
    else:
        assert stage.aligned, stage.reason()


CHANGES = {
    "nothing": (lambda inner: None, 1),
    "W_UK_T is written": (lambda inner: inner.W_UK_T.mul_(2), 3),
    "W_UV is written": (lambda inner: inner.W_UV.mul_(2), 3),
    "both are derived anew": (lambda inner: inner.derive(), 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_matrices_are_put_together_where_they_have_changed(tmp_path, monkeypatch, name):
    change, times = CHANGES[name]
    seen = []
    monkeypatch.setattr(hooks, "joined", lambda parts, of=hooks.joined: seen.append(parts) or of(parts))
    target = Model(inner=True, absorbed=True)
    kept = []

    def between():
        kept.append((target.layer.mla_attn.W_UK_T, target.layer.mla_attn.W_UV))
        change(target.layer.mla_attn)

    assert weights(captured(tmp_path, target, between=between, calls=3)) == [WEIGHT] * times
    assert len(seen) == times


def test_matrices_that_inference_mode_made_are_recorded(tmp_path):
    target = Model(inner=True, absorbed=True)
    with torch.inference_mode():
        target.layer.mla_attn.derive()
    assert target.layer.mla_attn.W_UV.is_inference()
    assert weights(captured(tmp_path, target, calls=2)) == [WEIGHT]
