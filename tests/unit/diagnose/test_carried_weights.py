"""Free runs: weights that updates set apart are judged by the updates, and fields by the stage that made them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from comparison_rows import row
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.diagnose.capture_comparison import (
    compare_captures,
    learn_noise,
    load_noise,
    save_noise,
)
from alignment.diagnose.carried import Update
from alignment.diagnose.difference import RESOLUTION
from alignment.diagnose.localise import ALONE, UPDATE, UPDATE_SIZE
from alignment.diagnose.noise import UPDATE_AMPLIFICATION, NoiseModel
from alignment.numerics.verdict import Outcome

STEPS, WIDTH = 5, 64
ADAM = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}


class Split(nn.Linear):
    """The same product, added up in another order: what another device does."""

    def forward(self, x):
        half = self.in_features // 2
        left = nn.functional.linear(x[..., :half], self.weight[:, :half])
        return left + nn.functional.linear(x[..., half:], self.weight[:, half:]) + self.bias


def network(layer, dtype):
    torch.manual_seed(0)
    sizes = ((WIDTH, 2 * WIDTH), (2 * WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
    return nn.Sequential(*(part for size in sizes for part in (layer(*size), nn.Tanh()))).to(dtype)


def run(
    folder, layer, *, dtype=torch.float32, skipped=(), frozen=(), moved=(), late=(), stale=(), updates=1, seed=1, data=0,
    config=CaptureConfig(detail="sketch", settings=False), **optim,
):  # fmt: skip
    """A training of ``STEPS`` steps, captured; float32 master weights under those of low precision, as engines have."""
    model = network(layer, dtype)
    masters = {n: p.detach().float().clone().requires_grad_() for n, p in model.named_parameters()}
    if frozen:
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    optimizer = torch.optim.AdamW(masters.values(), **{**ADAM, **optim})
    generator = torch.Generator().manual_seed(seed)
    with capture(model, config, directory=folder) as session:
        for step in range(STEPS):
            x, y = (torch.randn(128, WIDTH, generator=generator) for _ in range(2))
            if step == data and data:
                y = -y
            with session.step(step):
                for _ in range(updates):
                    model.zero_grad()
                    (model(x.to(dtype)).float() - y).square().mean().backward()
                    for name, parameter in model.named_parameters():
                        masters[name].grad = None if parameter.grad is None else parameter.grad.float()
                    if step not in skipped:
                        optimizer.step()
                    with torch.no_grad():
                        for name, parameter in model.named_parameters():
                            if name not in stale or step == 0:
                                parameter.copy_(masters[name])
                            if name in moved or (name in late and step == 2):
                                parameter.mul_(1 + 2.0**-10)
    return OwnCapture(folder)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """By settings, each trained once."""
    made = {}

    def of(**settings):
        key = repr(sorted(settings.items(), key=str))
        if key not in made:
            made[key] = run(tmp_path_factory.mktemp("golden"), nn.Linear, **settings)
        return made[key]

    return of


def outcomes(comparison):
    return [stage.outcome for stage in comparison.stages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"updates": 3}, {"lr": 1e-5}, {"lr": 1e-6, "updates": 2}], ids=str)
def test_free_runs_that_round_otherwise_are_aligned_to_the_end(golden, tmp_path, dtype, settings):
    """Small learning rates: of a bias in bfloat16 an element or none moves in a step, on one side or on both."""
    target = run(tmp_path, Split, dtype=dtype, **settings)
    comparison = compare_captures(golden(dtype=dtype, **settings), target)
    assert outcomes(comparison) == [Outcome.PASS] * STEPS, [stage.reason() for stage in comparison.stages]


FAULTS = {
    "learning rate": ({"lr": 1.02 * ADAM["lr"]}, 1),
    "learning rate of bfloat16": ({"lr": 2 * ADAM["lr"], "dtype": torch.bfloat16}, 1),
    "decay": ({"weight_decay": 0.1}, 1),
    "second moment": ({"betas": (0.9, 0.95)}, 2),
    "no update": ({"skipped": (1,)}, 2),
    "no update of bfloat16": ({"skipped": (1,), "dtype": torch.bfloat16}, 2),
    "one weight scaled": ({"late": ("2.weight",)}, 3),
    "half of the weights stale": ({"stale": ("0.weight", "0.bias", "2.weight"), "dtype": torch.bfloat16}, 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_differs_by_more_than_its_gradients_is_named_where_it_happened(golden, tmp_path, fault):
    settings, step = FAULTS[fault]
    right = {name: value for name, value in settings.items() if name == "dtype"}
    comparison = compare_captures(golden(**right), run(tmp_path, Split, **settings))
    assert outcomes(comparison)[: step + 1] == [Outcome.PASS] * step + [Outcome.FAIL]
    first = comparison.first.first
    assert first.reason in (UPDATE, UPDATE_SIZE, ALONE) and first.quantity.startswith("parameter")
    assert (first.reason == ALONE) == (fault.startswith("no update") or "stale" in fault)
    assert f"since step {step - 1}" in first.origin
    if "stale" in fault:
        named = {(f.module, f.quantity) for f in comparison.first.localisation.introduced if f.reason == ALONE}
        assert named == {("0", "parameter weight"), ("0", "parameter bias"), ("2", "parameter weight")}
    if fault == "one weight scaled":
        assert [f.module for f in comparison.first.localisation.introduced] == ["2"]
    text = comparison.first.verdict("t", "cpu", "g").next_command
    assert text == "look at the optimizer: learning rate, betas, weight decay, clipping, and whether it stepped at all"
    # what follows is no news
    for stage in comparison.stages[step + 1 :]:
        statuses = {f.status for f in stage.localisation.findings if f.quantity.startswith("parameter")}
        assert statuses <= {"inherited"}, stage.step


def test_a_weight_that_golden_never_moves_may_not_move(golden, tmp_path):
    frozen = golden(frozen=("2.weight",), weight_decay=0.0)
    target = run(tmp_path, Split, frozen=("2.weight",), moved=("2.weight",), weight_decay=0.0)
    comparison = compare_captures(frozen, target)
    assert comparison.first.step == 1
    first = comparison.first.first
    assert (first.module, first.reason) == ("2", ALONE)
    assert first.origin.startswith("the target moves the weight, the other one leaves it as it was")


def test_a_gradient_that_is_wrong_is_named_and_the_weights_behind_it_inherit(golden, tmp_path):
    comparison = compare_captures(golden(), run(tmp_path, Split, data=2))
    assert outcomes(comparison)[:3] == [Outcome.PASS, Outcome.PASS, Outcome.FAIL]
    later = comparison.stages[3].localisation.findings
    weights = [finding for finding in later if finding.quantity.startswith("parameter")]
    assert weights and {finding.status for finding in weights} == {"inherited"}


@pytest.mark.parametrize(
    "config, reason",
    [
        (CaptureConfig(detail="statistics", settings=False), "as that takes sketches and gradients"),
        (CaptureConfig(settings=False, parameter_gradients=False), "as no gradients were captured"),
    ],
)  # fmt: skip
def test_without_sketches_or_gradients_nobody_knows(tmp_path, config, reason):
    captures = [run(tmp_path / kind.__name__, kind, config=config, dtype=torch.bfloat16) for kind in (nn.Linear, Split)]
    comparison = compare_captures(*captures)
    assert outcomes(comparison)[0] is Outcome.PASS and outcomes(comparison)[-1] is Outcome.INCONCLUSIVE
    assert Outcome.FAIL not in outcomes(comparison)
    assert reason in comparison.stages[-1].reason() and "nobody knows by how much they may" in comparison.first.reason()
    assert comparison.first.next_command("t").startswith("capture update_actor with both")
    assert comparison.to_dict()["stages"][-1]["unknown"]


def test_tensors_are_as_good_as_sketches(tmp_path):
    config = CaptureConfig(detail="tensor", settings=False)
    captures = [run(tmp_path / kind.__name__, kind, config=config) for kind in (nn.Linear, Split)]
    assert outcomes(compare_captures(*captures)) == [Outcome.PASS] * STEPS
    wrong = run(tmp_path / "wrong", Split, config=config, lr=1.02 * ADAM["lr"])
    assert compare_captures(captures[0], wrong).first.first.reason in (UPDATE, UPDATE_SIZE)


def test_a_calibration_says_how_far_updates_are_apart(golden, tmp_path):
    captures = [golden(dtype=torch.bfloat16), run(tmp_path / "benign", Split, dtype=torch.bfloat16)]
    path = tmp_path / "noise.json"
    save_noise(learn_noise(*captures), path)
    noise = load_noise([path])
    assert len(noise.updates) >= 4 * 6 // 2
    assert math.exp(max(noise.updates)) < UPDATE_AMPLIFICATION, "what is taken for granted covers it"
    assert outcomes(compare_captures(*captures, noise=noise)) == [Outcome.PASS] * STEPS
    wrong = run(tmp_path / "wrong", Split, dtype=torch.bfloat16, lr=2 * ADAM["lr"])
    first = compare_captures(captures[0], wrong, noise=load_noise([path])).first.first
    assert first.reason in (UPDATE, UPDATE_SIZE) and "calibration" in first.origin


def held(stages, weight, other):
    """A step in which the engine holds one weight and the trainer another one."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 32))
    layers = {
        stage: [
            row("lin.weight", w, kind="parameter", role="input", path="weight", parent="lin"),
            row("lin", x, role="input", path="args.0", parent=""),
            row("lin", x @ w, parent=""),
        ]
        for stage, w in zip(stages, (weight, other))
    }
    return Stages(**layers)


def test_two_stages_hold_one_weight_where_golden_has_one():
    w = np.random.default_rng(0).standard_normal((32, 32))
    noise = 1e-5 * np.random.default_rng(2).standard_normal((32, 32))
    stages = ("rollout", "old_log_prob")
    golden = held(stages, w, w)
    found = compare_captures(golden, held(stages, w, w + noise)).stages[1].first
    assert (found.module, found.reason) == ("lin", "difference from rollout")
    assert found.origin == "golden has the weight of rollout here"
    # an engine that rounds the weights has other numbers with reason
    rounded, coarse = held(stages, w, w), torch.tensor(w).bfloat16().double().numpy()
    for stage, weight in (("rollout", coarse), ("old_log_prob", w)):
        first = row("lin.weight", weight, kind="parameter", role="input", path="weight", parent="lin")
        rounded._stages[stage][0] = replace(first, dtype="bfloat16" if stage == "rollout" else "float32")
    found = [f for s in compare_captures(golden, rounded).stages for f in s.localisation.findings]
    assert not [finding for finding in found if finding.quantity == "parameter weight"]
    # and where golden has two, as in two formats, nothing follows
    apart = held(stages, w, w + 1e-3)
    assert compare_captures(apart, held(stages, w, w + 1e-3 + noise)).stages[1].first.reason == "relative difference"


def test_the_limit_of_an_update():
    noise = NoiseModel()
    noise.expect_tests(1)
    plain = Update(since=1, relative=0.1, gradients=1e-4, elements=10**6, numbers=1024)
    assert noise.update(plain).relative == UPDATE_AMPLIFICATION * math.sqrt(math.hypot(1e-4, RESOLUTION))
    assert noise.update(replace(plain, gradients=None)).relative == math.inf
    # many roundings: the root of b + b², and a little for chance; few: some whole ones
    b = UPDATE_AMPLIFICATION * math.sqrt(1e-4)
    many, few = (noise.update(replace(plain, roundings=n)).relative for n in (1e8, 4.0))
    assert 1.0 < many / math.sqrt(b + b * b) < 1.01 and few >= 1.0
    assert noise.few_roundings(replace(plain, roundings=4.0)) and not noise.few_roundings(replace(plain, roundings=1e3))
    # what was rounded otherwise before is made up for
    assert noise.update(replace(plain, roundings=1e4, owed=1e4)).relative > 1.0
    # an update that is lost is as large as its own difference, with half of its square gone
    lost = replace(plain, relative=1.0, size=-0.5, roundings=1e6)
    assert noise.update(lost).size < 0.5 < noise.update(replace(lost, mixed=True)).size


class Stages:
    """A capture in memory of one step with several stages."""

    root = "stages"

    def __init__(self, **stages):
        self._stages = stages

    def steps(self):
        return [1]

    def stages(self, step):
        return list(self._stages)

    def ranks(self, step, stage):
        return [0]

    def rows(self, step, stage, rank):
        return iter(self._stages[stage])


def value(name, x, role):
    return row(name, x, kind="value", role=role, path=name, parent="", class_name="")


def batch(*, log_probs=0.0, on_the_way=0.0, advantages=0.0):
    """Log-probs that a model computed, and what the driver makes of them."""
    rng = np.random.default_rng(0)
    h, w, noise = rng.standard_normal((64, 32)), rng.standard_normal((32, 32)), rng.standard_normal((64, 32))
    out = h @ w + log_probs * noise
    adv = rng.standard_normal((64, 32)) * (1.0 + advantages)
    model = [
        row("lin.weight", w, kind="parameter", role="input", path="weight", parent="lin"),
        row("lin", h + log_probs * noise, role="input", path="args.0", parent=""),
        row("lin", out, parent=""),
    ]
    return {
        "old_log_prob": [*model, value("old_log_probs", out, "output")],
        "advantage": [value("old_log_probs", out + on_the_way * noise, "input"), value("advantages", adv, "output")],
    }


def test_a_field_is_judged_where_it_was_made_and_handed_on_as_it_is():
    golden = Stages(**batch())

    def unlike(**change):
        found = compare_captures(golden, Stages(**batch(**change)))
        return {(s.stage, f.quantity, f.status) for s in found.stages for f in s.localisation.findings}

    # far above the rounding of float32: named where the model computes it, and no news where it is only handed on
    found = unlike(log_probs=1e-4)
    assert {status for stage, _, status in found if stage == "advantage"} <= {"inherited"}
    assert ("old_log_prob", "introduced") in {(stage, status) for stage, _, status in found}
    assert unlike(on_the_way=1e-3) == {("advantage", "value old_log_probs", "introduced")}
    assert unlike(advantages=1e-4) == {("advantage", "value advantages", "introduced")}
    assert not unlike()
