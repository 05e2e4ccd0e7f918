"""Routing that was recorded in one engine, replayed in another: the experts of the rollout, weighed by the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig
from alignment.models.moe import MixtureOfExperts, Router
from alignment.models.precision import at_least_float32


def routers(model: CausalLM) -> list[tuple[int, Router]]:
    """(decoder layer, router) of the layers that have one; the first ``first_k_dense_replace`` layers have none."""
    layers = enumerate(model.model.layers)
    return [(index, layer.mlp.gate) for index, layer in layers if isinstance(layer.mlp, MixtureOfExperts)]


@contextmanager
def record_routing(model: CausalLM) -> Iterator[list[Tensor | None]]:
    """Collects the experts ``[n, k]`` of one forward, *by decoder layer*: None where a layer routes nothing."""
    recorded: list[Tensor | None] = [None] * len(model.model.layers)

    def keep(index: int):
        return lambda router, arguments, output: recorded.__setitem__(index, output[0].detach().clone())

    handles = [router.register_forward_hook(keep(index)) for index, router in routers(model)]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay_routing(model: CausalLM, recorded: Sequence[Tensor | None]) -> Iterator[None]:
    """Every router takes the experts recorded for its decoder layer and weighs them by its own scores.

    Raises:
        InputError: the record has another number of layers, or none for a layer that routes.
    """
    if len(recorded) != len(model.model.layers):
        raise InputError(
            "the record is of another model",
            where="replay_routing",
            expected=f"{len(model.model.layers)} layers",
            found=len(recorded),
        )
    handles = []
    for order, (index, router) in enumerate(routers(model)):
        experts = recorded[entry_of_layer(index, order)]
        if experts is None:
            raise InputError(
                "the record has no experts for a layer that routes", where=f"model.layers.{index}.mlp.gate"
            )
        handles.append(router.register_forward_hook(_replayed(experts)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def entry_of_layer(layer: int, order: int) -> int:
    """Which entry of a record belongs to the router of ``layer``, the ``order``-th of the model: records are by decoder
    layer, dense ones included.
    """
    return layer


def _replayed(experts: Tensor):
    def hook(router: Router, arguments, output):
        scores = _scores(router, arguments[0])
        return experts, weights_of(scores, experts, router.config)

    return hook


def weights_of(scores: Tensor, experts: Tensor, config: ModelConfig) -> Tensor:
    """What chosen experts are weighed with: as :func:`alignment.models.moe.select_experts`, step 3."""
    weights = scores.gather(1, experts)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor


def _scores(router: Router, x: Tensor) -> Tensor:
    wide = at_least_float32(x.dtype)
    return torch.sigmoid(F.linear(x.to(wide), router.weight.to(wide)))
