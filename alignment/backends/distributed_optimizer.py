"""A distributed optimizer on simulated ranks: main weights in shards, buckets, loss scaling, chains and a scheduler.

The design is Megatron-LM's ``DistributedOptimizer`` (Rajbhandari et al., *ZeRO*, arXiv:1910.02054, stage 1):
gradients are reduced and scattered, every rank steps its shard of the main weights, and the stepped weights are
gathered through the gradient buffers, bucket by bucket.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alignment.backends.golden_training import adamw_step
from alignment.backends.training import OptimizerConfig
from alignment.errors import InputError
from alignment.models.parallel import collectives


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did.

    Attributes:
        skipped: whether a gradient was not finite, so that nothing moved.
        grad_norm: of the unscaled gradient, before clipping.
        learning_rates: one per parameter group.
        loss_scale: what the losses of this step were multiplied with.
    """

    skipped: bool
    grad_norm: float
    learning_rates: tuple[float, ...]
    loss_scale: float


class LossScaler:
    """A dynamic loss scale: halved where a gradient overflows, doubled after ``window`` good steps (Micikevicius et
    al., *Mixed precision training*, arXiv:1710.03740)."""

    def __init__(self, *, scale: float = 1.0, window: int = 0) -> None:
        self.scale, self.window, self.good_steps = scale, window, 0

    def update(self, *, overflow: bool) -> None:
        """Takes note of a step; with ``window`` = 0 the scale is constant."""
        if not self.window:
            return
        if overflow:
            self.scale, self.good_steps = max(1.0, self.scale / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Scale and place in the window."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """The inverse."""
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to biases and to the weights of norms (one-dimensional)."""
    return parameter.ndim > 1


@dataclass(kw_only=True)
class Bucket:
    """Some parameters in one flat buffer, which is padded to a multiple of the ranks.

    Attributes:
        names: in order.
        offsets: where each begins in the buffer.
        length: of the buffer.
        buffer: the gradients; the gathered weights pass through it as well.
    """

    names: list[str]
    offsets: list[int]
    length: int
    buffer: Tensor


class DistributedOptimizer:
    """AdamW over ``dp`` simulated ranks.

    Args:
        parameters: the model's weights by name, changed in place by :meth:`step`. Below float32 they get float32 main
            weights, else main weights of their own dtype.
        config: learning rate and its schedule, betas, eps, weight decay and clipping.
        dp: ranks that the main weights and the state are spread over.
        bucket_size: elements after which a bucket is closed.
        scaler: the loss scale; constant 1 by default.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        config: OptimizerConfig,
        dp: int,
        bucket_size: int = 64,
        scaler: LossScaler | None = None,
    ) -> None:
        self.parameters, self.config, self.dp = dict(parameters), config, dp
        self.scaler = scaler or LossScaler()
        self.steps = 0
        self.buckets = self._buckets(bucket_size)
        self.param_groups: list[dict[str, Any]] = [
            {"decay": True, "weight_decay": config.weight_decay, "lr": config.lr},
            {"decay": False, "weight_decay": 0.0, "lr": config.lr},
        ]
        kinds = {bucket.buffer.dtype for bucket in self.buckets}
        self.main_dtype = kinds.pop()
        # [bucket][rank]
        self.main = [self._shards(self._flat(bucket)) for bucket in self.buckets]
        self.exp_avg = [[torch.zeros_like(s) for s in shards] for shards in self.main]
        self.exp_avg_sq = [[torch.zeros_like(s) for s in shards] for shards in self.main]

    def reduce(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """Adds up the gradients of the ranks (of *scaled* losses) into the buffers.

        Raises:
            InputError: another number of ranks than the optimizer has.
        """
        if len(gradients) != self.dp:
            raise InputError("every rank has gradients", where="reduce", expected=self.dp, found=len(gradients))
        for bucket in self.buckets:
            bucket.buffer.zero_()
            for name, offset in zip(bucket.names, bucket.offsets):
                for of_rank in gradients:
                    flat = of_rank[name].to(self.main_dtype).flatten()
                    bucket.buffer[offset : offset + flat.numel()] += flat

    def gradient_of(self, bucket: Bucket, rank: int) -> Tensor:
        """The gradient of a rank's shard, unscaled: a view's quotient, not the buffer."""
        return collectives.split_evenly(bucket.buffer, self.dp)[rank] / self.scaler.scale

    def gradient_norm(self, shards: Sequence[Sequence[Tensor]]) -> float:
        """√Σ g² over all shards of all ranks: each element once."""
        return math.sqrt(math.fsum(float(g.double().square().sum()) for of_bucket in shards for g in of_bucket))

    def step(self) -> StepReport:
        """One step from the reduced gradients: unscale, look for overflow, clip, AdamW, gather.

        Returns:
            See :class:`StepReport`; with ``skipped`` weights, state and step count are as they were.
        """
        shards = [[self.gradient_of(bucket, rank) for rank in range(self.dp)] for bucket in self.buckets]
        scale, rates = self.scaler.scale, tuple(group["lr"] for group in self.param_groups)
        norm = self.gradient_norm(shards)
        if not self.is_finite(shards):
            self.scaler.update(overflow=True)
            return StepReport(skipped=True, grad_norm=norm, learning_rates=rates, loss_scale=scale)
        factor = min(1.0, self.config.clip_grad / (norm + 1e-6)) if self.config.clip_grad else 1.0
        self.steps += 1
        with torch.no_grad():
            for number, bucket in enumerate(self.buckets):
                for rank in range(self.dp):
                    self._step_shard(bucket, number, rank, shards[number][rank] * factor)
        self.gather()
        self.scaler.update(overflow=False)
        return StepReport(skipped=False, grad_norm=norm, learning_rates=rates, loss_scale=scale)

    def is_finite(self, shards: Sequence[Sequence[Tensor]]) -> bool:
        """Whether the gradients of *all* ranks are finite: one rank's overflow stops all of them."""
        return all(bool(torch.isfinite(g).all()) for of_bucket in shards for g in of_bucket)

    def gather(self) -> None:
        """Every rank's stepped shard into the weights of the model, through the gradient buffers.

        The buffers of buckets that wait for their turn hold weights that are still needed: only a bucket that has been
        read is cleared.
        """
        for number, bucket in enumerate(self.buckets):
            bucket.buffer.copy_(collectives.all_gather(self.main[number])[0])
        with torch.no_grad():
            for bucket in self.buckets:
                for name, offset in zip(bucket.names, bucket.offsets):
                    weight = self.parameters[name]
                    weight.copy_(bucket.buffer[offset : offset + weight.numel()].view_as(weight))
                self.clear(bucket)

    def clear(self, bucket: Bucket) -> None:
        """Zeroes the buffer of one bucket."""
        bucket.buffer.zero_()

    def reload_main_weights(self) -> None:
        """Takes the model's present weights as main weights: after something else has loaded them."""
        for number, bucket in enumerate(self.buckets):
            for main, fresh in zip(self.main[number], self._shards(self._flat(bucket))):
                main.copy_(fresh)

    def load_model(self, weights: Mapping[str, Tensor]) -> None:
        """Loads weights into the model, and into the main weights, which would overwrite them at the next step."""
        with torch.no_grad():
            for name, weight in self.parameters.items():
                weight.copy_(weights[name])
        self.reload_main_weights()

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, whole (not in shards): another number of ranks can load it.

        ``main``, ``exp_avg`` and ``exp_avg_sq`` by parameter name, ``steps``, ``param_groups`` and ``scaler``.
        """
        tensors = {kind: self._whole(getattr(self, kind)) for kind in ("main", "exp_avg", "exp_avg_sq")}
        groups = [dict(group) for group in self.param_groups]
        return {**tensors, "steps": self.steps, "param_groups": groups, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; the parameter groups get new dictionaries, as torch's optimizers do.

        Raises:
            InputError: a parameter is missing from the state.
        """
        for kind in ("main", "exp_avg", "exp_avg_sq"):
            held = getattr(self, kind)
            for number, bucket in enumerate(self.buckets):
                missing = [name for name in bucket.names if name not in state[kind]]
                if missing:
                    raise InputError("the optimizer state lacks a parameter", where=kind, expected=missing[0])
                flat = torch.zeros(bucket.length, dtype=self.main_dtype)
                for name, offset in zip(bucket.names, bucket.offsets):
                    values = state[kind][name].flatten()
                    flat[offset : offset + values.numel()] = values
                for mine, theirs in zip(held[number], self._shards(flat)):
                    mine.copy_(theirs)
        self.steps = state["steps"]
        self.param_groups = [dict(group) for group in state["param_groups"]]
        self.scaler.load_state_dict(state["scaler"])

    def _step_shard(self, bucket: Bucket, number: int, rank: int, gradient: Tensor) -> None:
        size = bucket.length // self.dp
        start, end = rank * size, (rank + 1) * size
        for name, offset in zip(bucket.names, bucket.offsets):
            weight = self.parameters[name]
            low, high = max(start, offset), min(end, offset + weight.numel())
            if low >= high:
                continue
            group = self.param_groups[0 if decays(name, weight) else 1]
            part = slice(low - start, high - start)
            adamw_step(
                self.main[number][rank][part],
                gradient[part],
                self.exp_avg[number][rank][part],
                self.exp_avg_sq[number][rank][part],
                step=self.steps,
                lr=group["lr"],
                betas=self.config.betas,
                eps=self.config.eps,
                weight_decay=group["weight_decay"],
            )

    def _buckets(self, bucket_size: int) -> list[Bucket]:
        buckets: list[Bucket] = []
        names: list[str] = []
        offsets: list[int] = []
        length = 0
        kind = next(iter(self.parameters.values())).dtype
        main = kind if kind.itemsize >= torch.float32.itemsize else torch.float32

        def close() -> None:
            padded = -(-length // self.dp) * self.dp
            buckets.append(Bucket(names=names, offsets=offsets, length=padded, buffer=torch.zeros(padded, dtype=main)))

        for name, parameter in self.parameters.items():
            names.append(name)
            offsets.append(length)
            length += parameter.numel()
            if length >= bucket_size:
                close()
                names, offsets, length = [], [], 0
        if names:
            close()
        return buckets

    def _flat(self, bucket: Bucket) -> Tensor:
        flat = torch.zeros(bucket.length, dtype=bucket.buffer.dtype)
        for name, offset in zip(bucket.names, bucket.offsets):
            values = self.parameters[name].detach().flatten()
            flat[offset : offset + values.numel()] = values.to(flat.dtype)
        return flat

    def _shards(self, flat: Tensor) -> list[Tensor]:
        return [part.clone() for part in collectives.split_evenly(flat, self.dp)]

    def _whole(self, held: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        result = {}
        for bucket, shards in zip(self.buckets, held, strict=True):
            flat = torch.cat(list(shards))
            for name, offset in zip(bucket.names, bucket.offsets):
                weight = self.parameters[name]
                result[name] = flat[offset : offset + weight.numel()].view(weight.shape).clone()
        return result


class ChainedOptimizer:
    """Several optimizers as one: dense and expert weights have different groups of ranks."""

    def __init__(self, optimizers: Sequence[DistributedOptimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups the optimizers use *now*: they make new ones when they load a state."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> list[StepReport]:
        """One step of each."""
        return [optimizer.step() for optimizer in self.optimizers]

    def state_dict(self) -> list[dict[str, Any]]:
        """The states of all, in order."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """The inverse."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


class Scheduler:
    """Sets the learning rate of every parameter group before each step, by :meth:`OptimizerConfig.learning_rate`."""

    def __init__(self, optimizer: DistributedOptimizer | ChainedOptimizer, config: OptimizerConfig) -> None:
        self.optimizer, self.config, self.updates = optimizer, config, 0
        self._apply()

    def step(self) -> None:
        """After an update (not after a skipped one): the next one's rate."""
        self.updates += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Where the schedule stands."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues there."""
        self.updates = state["updates"]
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.updates)
