"""How gradients add up: over micro-batches, over ranks, and where two large numbers nearly cancel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from alignment.backends import golden_training
from alignment.backends.training import OptimizerConfig
from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, differs
from alignment.faults.reference.language_model import log_softmax
from alignment.models.parallel import data_parallel
from alignment.numerics.precision import unit_roundoff
from alignment.rl import distill_loss

MICRO_BATCHES = 33


class _Watched:
    """A sole rank that keeps what it is asked to add up."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def add_up(self, tensors) -> None:
        """Keeps copies."""
        self.seen = [tensor.clone() for tensor in tensors]


def micro_batches(setting: Setting) -> Iterator[Finding]:
    """Many small gradients of one sign on a large sum, and one alone: each parameter's total, in float64 and
    float32.
    """
    for dtype, bound in ((torch.float64, None), (torch.float32, unit_roundoff("float32") * MICRO_BATCHES)):
        model = nn.Linear(3, 2).to(dtype)
        rows = [(1 + 2.0**-9 * toy.normal((4, 3), setting.seed, f"micro {n}")).to(dtype) for n in range(MICRO_BATCHES)]
        rank = _Watched()
        engine = golden_training.GoldenTrainingEngine(
            model,
            optimizer=OptimizerConfig(lr=1e-6),
            outputs=lambda m, batch: {"values": m(batch["x"])},
            device="cpu",
            ranks=rank,
        )
        names = [name for name, _ in model.named_parameters()]
        engine.update(
            [{"x": x} for x in rows], lambda outputs, batch: (outputs["values"].sum(), {}), stage="actor_update"
        )
        total = sum(x.double().sum(0) for x in rows)
        golden = {"weight": total.expand(2, 3), "bias": torch.full((2,), 4.0 * MICRO_BATCHES, dtype=torch.float64)}
        for name, found in zip(names, rank.seen):
            yield from differs(
                found, golden[name], stage="actor_update", place=f"gradient.{name}", bound=bound,
                what=f"{MICRO_BATCHES} micro-batches in {dtype}", ratios={"micro-batches": MICRO_BATCHES},
            )  # fmt: skip


def ranks(setting: Setting) -> Iterator[Finding]:
    """The mean over ranks of gradients large and small, positive and negative."""
    for count in (1, 2, 3):
        for size in (1e3, 0.3, 1e-5):
            parts = [toy.normal((4, 5), setting.seed, f"rank {n}", scale=size) for n in range(count)]
            yield from differs(
                data_parallel.average_over_ranks(parts),
                sum(parts) / count,
                stage="actor_update",
                place="data_parallel.average_over_ranks.gradient",
                what=f"DP {count}, gradients of {size:g}",
                ratios={"DP": count},
            )


def cancellation(setting: Setting) -> Iterator[Finding]:
    """The gradient of the divergence between two distributions that are close: a small difference of large numbers."""
    for beta in (0.0, 0.1, 0.9, 1.0):
        for dtype in (torch.float64, torch.float32):
            teacher = toy.normal((6, 30), setting.seed, "teacher", scale=2.0)
            student = teacher + 1e-2 * toy.normal((6, 30), setting.seed, "student")
            student, teacher = student.to(dtype), teacher.to(dtype)
            leaf, golden_leaf = student.clone().requires_grad_(), student.double().clone().requires_grad_()
            value = distill_loss.jsd(torch.log_softmax(leaf, -1), torch.log_softmax(teacher, -1), beta)
            (found,) = torch.autograd.grad(value.sum(), leaf)
            s, t = log_softmax(golden_leaf), log_softmax(teacher.double())
            if beta in (0.0, 1.0):
                golden = (t.exp() * (t - s)).sum(-1) if beta == 0.0 else (s.exp() * (s - t)).sum(-1)
            else:
                m = torch.log(beta * t.exp() + (1 - beta) * s.exp())
                golden = beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)
            (right,) = torch.autograd.grad(golden.sum(), golden_leaf)
            # Probabilities differ by a hundredth, and each is off by a few roundings.
            bound = 1e4 * unit_roundoff(str(dtype).removeprefix("torch.")) / max(1e-2, min(beta, 1 - beta) or 1.0)
            yield from differs(
                found,
                right,
                stage="actor_update",
                place="distill_loss.jsd.gradient",
                what=f"β = {beta}, {dtype}",
                bound=bound,
            )


CHECKS = (
    Check(
        name="accumulation.ranks",
        layer="unit-op",
        cost=0.001,
        run=ranks,
        kept_because="it names the average, where layouts see only its consequences",
    ),  # fmt: skip
    Check(
        name="accumulation.micro_batches",
        layer="unit-op",
        cost=0.01,
        run=micro_batches,
        kept_because="it names the parameter, where steps see only a norm",
    ),  # fmt: skip
    Check(
        name="accumulation.cancellation",
        layer="layer-grad",
        cost=0.01,
        run=cancellation,
        kept_because="the gradient where student and teacher meet, which far rows do not show",
    ),  # fmt: skip
)
