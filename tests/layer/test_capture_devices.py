"""A capture on an NPU is compared with one on a CPU: what the two round otherwise is no divergence, a fault is one."""

from __future__ import annotations

import pytest
import torch

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.devices.base import get_device
from alignment.diagnose.capture_comparison import compare_captures
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.random import portable_integers

pytestmark = pytest.mark.npu
CONFIG = preset("tiny-moonlight")
SAMPLES, TOKENS = 128, 24
"""As many as a step of the embedded task has: the more elements, the longer the chains of their sums."""


def captured(folder, device, *, scale=1.0):
    model = CausalLM(CONFIG, dtype=torch.float32).init_weights(1).to(device)
    ids = portable_integers(0, CONFIG.vocab_size, (SAMPLES, TOKENS), seed=2, stream="ids").to(device)
    normed = model.model.layers[1].input_layernorm
    handle = normed.register_forward_hook(lambda module, args, output: output * scale)
    with capture(model, CaptureConfig(detail="sketch"), directory=folder) as session, session.step(0):
        model(ids).float().log_softmax(-1).mean().backward()
    handle.remove()
    return OwnCapture(folder)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("golden"), torch.device("cpu"))


def test_equal_runs_are_aligned_without_a_calibration(golden, tmp_path):
    [stage] = compare_captures(golden, captured(tmp_path, get_device("npu").torch_device)).stages
    assert stage.aligned, stage.reason()
    assert stage.pairs > 100


def test_a_norm_that_scales_is_named(golden, tmp_path):
    # sixteen units in the last place, all one way
    scale = 1 + 16 * torch.finfo(torch.float32).eps
    [stage] = compare_captures(golden, captured(tmp_path, get_device("npu").torch_device, scale=scale)).stages
    assert not stage.aligned and stage.first.module == "model.layers.1.input_layernorm"
