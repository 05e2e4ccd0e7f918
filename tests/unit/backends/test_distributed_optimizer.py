"""The distributed optimizer against AdamW of torch, over ranks, buckets, schedules, overflows and checkpoints."""

from __future__ import annotations

import pytest
import torch

from alignment.backends.distributed_optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    LossScaler,
    Scheduler,
    decays,
)
from alignment.backends.training import OptimizerConfig
from alignment.errors import InputError
from alignment.numerics.precision import error_growth, unit_roundoff
from alignment.numerics.random import portable_normal

SHAPES = {"a.weight": (5, 3), "norm": (7,), "b.weight": (11, 4), "c.bias": (2,)}
CONFIG = OptimizerConfig(
    lr=0.03,
    weight_decay=0.1,
    clip_grad=0.7,
    lr_warmup_steps=2,
    lr_scheduler_type="cosine",
    min_lr_ratio=0.1,
    total_steps=6,
)
TERMS = 512
"""More roundings than six steps put on one weight."""


def draw(name: str, *shape: int, dtype=torch.float64) -> torch.Tensor:
    return portable_normal(shape, seed=3, stream=name, dtype=dtype)


def weights(dtype=torch.float64) -> dict[str, torch.Tensor]:
    return {name: draw(name, *shape, dtype=dtype) for name, shape in SHAPES.items()}


def gradients(step: int, dp: int, scale: float = 1.0) -> list[dict[str, torch.Tensor]]:
    return [{n: scale * draw(f"{n}/{step}/{r}", *s) for n, s in SHAPES.items()} for r in range(dp)]


def close(found: torch.Tensor, golden: torch.Tensor) -> bool:
    return float((found - golden).abs().max()) <= error_growth(TERMS, unit_roundoff(torch.float64))


def torch_steps(count: int, dp: int) -> dict[str, torch.Tensor]:
    held = {name: w.requires_grad_() for name, w in weights().items()}
    groups = [
        {"params": [w for n, w in held.items() if w.ndim > 1], "weight_decay": CONFIG.weight_decay},
        {"params": [w for n, w in held.items() if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=CONFIG.betas, eps=CONFIG.eps)
    for step in range(count):
        for name, w in held.items():
            w.grad = sum(g[name] for g in gradients(step, dp))
        torch.nn.utils.clip_grad_norm_(held.values(), CONFIG.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.learning_rate(step)
        optimizer.step()
    return {n: w.detach() for n, w in held.items()}


def built(dp: int, **settings) -> tuple[DistributedOptimizer, Scheduler]:
    optimizer = DistributedOptimizer(weights(), config=CONFIG, dp=dp, bucket_size=20, **settings)
    return optimizer, Scheduler(optimizer, CONFIG)


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_steps_are_those_of_torch(dp, scale):
    optimizer, scheduler = built(dp, scaler=LossScaler(scale=scale))
    for step in range(5):
        optimizer.reduce(gradients(step, dp, scale))
        report = optimizer.step()
        scheduler.step()
        assert report.learning_rates == (CONFIG.learning_rate(step),) * 2 and not report.skipped
    golden = torch_steps(5, dp)
    assert all(close(optimizer.parameters[n], golden[n]) for n in SHAPES)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    optimizer, _ = built(2, scaler=LossScaler(scale=8.0, window=2))
    bad = gradients(0, 2, 8.0)
    bad[1]["c.bias"][1] = torch.inf
    optimizer.reduce(bad)
    assert optimizer.step().skipped and optimizer.scaler.scale == 4.0
    assert all(torch.equal(optimizer.parameters[n], w) for n, w in weights().items())
    for step in range(2):
        optimizer.reduce(gradients(step, 2, 4.0))
        assert not optimizer.step().skipped
    assert optimizer.scaler.scale == 8.0 and optimizer.steps == 2


@pytest.mark.parametrize("dp_after", [1, 2, 3])
def test_a_saved_state_continues_on_any_number_of_ranks(dp_after):
    first, schedule = built(2)
    for step in range(3):
        first.reduce(gradients(step, 2))
        first.step()
        schedule.step()
    second, resumed = built(dp_after)
    second.load_model(first.parameters)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    for optimizer in (first, second):
        total = {n: sum(g[n] for g in gradients(3, 2)) for n in SHAPES}
        zero = {n: torch.zeros_like(t) for n, t in total.items()}
        optimizer.reduce([total] + [zero] * (optimizer.dp - 1))
        optimizer.step()
    assert all(close(first.parameters[n], second.parameters[n]) for n in SHAPES)


def test_weights_loaded_into_the_model_are_the_ones_that_are_stepped():
    optimizer, _ = built(2)
    loaded = {n: w + 1 for n, w in weights().items()}
    optimizer.load_model(loaded)
    optimizer.reduce([{n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}] * 2)
    optimizer.step()
    for name, weight in loaded.items():
        decay = CONFIG.weight_decay if decays(name, weight) else 0.0
        assert torch.equal(optimizer.parameters[name], weight * (1.0 - CONFIG.learning_rate(0) * decay))


def test_low_precision_weights_keep_main_weights_in_float32():
    held = weights(torch.bfloat16)
    optimizer = DistributedOptimizer(held, config=OptimizerConfig(lr=1e-4, weight_decay=0.0), dp=2, bucket_size=20)
    for step in range(40):
        optimizer.reduce(gradients(0, 2))
        optimizer.step()
    main = optimizer.state_dict()["main"]
    assert all(torch.equal(held[n], main[n].bfloat16()) for n in SHAPES)
    assert any(not torch.equal(held[n], w) for n, w in weights(torch.bfloat16).items())


def test_a_chain_shows_the_groups_its_optimizers_use():
    (dense, _), (expert, _) = built(2), built(1)
    chain = ChainedOptimizer([dense, expert])
    scheduler = Scheduler(chain, CONFIG)
    chain.load_state_dict(chain.state_dict())
    for _ in range(3):
        scheduler.step()
    assert [g["lr"] for o in (dense, expert) for g in o.param_groups] == [CONFIG.learning_rate(3)] * 4


def test_missing_ranks_and_parameters_are_refused():
    optimizer, _ = built(2)
    with pytest.raises(InputError, match="every rank has gradients; expected 2; found 1"):
        optimizer.reduce(gradients(0, 1))
    state = optimizer.state_dict()
    del state["exp_avg"]["norm"]
    with pytest.raises(InputError, match="exp_avg: the optimizer state lacks a parameter; expected norm"):
        optimizer.load_state_dict(state)
