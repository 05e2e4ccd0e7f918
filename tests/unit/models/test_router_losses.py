"""Router losses: their known values, and parts of a batch that add up to it."""

import math

import pytest
import torch

from alignment.models.router_losses import load_balancing_loss, side_scale, z_loss
from alignment.numerics.random import portable_normal

ROUNDING = 1e2 * torch.finfo(torch.float64).eps


def test_a_uniform_router_costs_one_and_a_collapsed_one_the_number_of_experts():
    uniform = torch.full((4, 4), 0.5, dtype=torch.float64)
    each = torch.arange(4)[:, None]
    assert float(load_balancing_loss(uniform, each)) == 1.0
    collapsed = torch.eye(4, dtype=torch.float64)[:1].expand(4, -1)
    assert float(load_balancing_loss(collapsed, torch.zeros(4, 1, dtype=torch.int64))) == 4.0


def test_parts_add_up_to_the_batch():
    logits = portable_normal((8, 5), seed=0, stream="logits")
    scores, chosen = torch.sigmoid(logits), logits.topk(2, dim=-1).indices
    load = torch.nn.functional.one_hot(chosen.flatten(), 5).sum(0)
    parts = [slice(0, 3), slice(3, 8)]
    balanced = sum(load_balancing_loss(scores[p], chosen[p], tokens=8, load=load) for p in parts)
    assert float(balanced) == pytest.approx(float(load_balancing_loss(scores, chosen)), rel=ROUNDING)
    assert float(sum(z_loss(logits[p], tokens=8) for p in parts)) == pytest.approx(float(z_loss(logits)), rel=ROUNDING)


def test_z_loss_is_of_logits():
    assert float(z_loss(torch.full((3, 4), 7.0, dtype=torch.float64))) == pytest.approx((7 + math.log(4)) ** 2, rel=ROUNDING)


def test_replicas_and_micro_batches_share_the_gradient():
    assert side_scale() == 1.0 and side_scale(micro_batches=4, tensor_parallel=2) == 1 / 8
