"""Expert parallelism: the experts of a layer over several ranks, each of which has tokens of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.models.moe import MixtureOfExperts
from alignment.models.parallel import collectives


def owners(experts: int, ep: int) -> list[list[int]]:
    """Which experts each rank holds: equal consecutive runs."""
    return [part.tolist() for part in collectives.split_evenly(torch.arange(experts), ep)]


def local_experts(
    moe: MixtureOfExperts, tokens: Tensor, chosen: Tensor, weights: Tensor, held: Sequence[int]
) -> Tensor:
    """What the experts ``held`` by one rank contribute to ``tokens`` [n, h]; the choices of other experts add 0."""
    out = torch.zeros_like(tokens)
    for expert in held:
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        if len(rows):
            out = out.index_add(
                0, rows, moe.experts[expert](tokens[rows]) * weights[rows, slots].unsqueeze(-1).to(tokens)
            )
    return out


def dispatch(parts: Sequence[Tensor], *, inner: int) -> list[Tensor]:
    """Every rank's tokens to every rank (the all-gather dispatcher), ``[n, …]`` to ``[ranks · n, …]``."""
    return collectives.nested_gather(parts, inner=inner)


def combine(parts: Sequence[Tensor], *, inner: int) -> list[Tensor]:
    """The contributions of all ranks, added up and given back to the owners of the tokens."""
    return collectives.nested_reduce_scatter(parts, inner=inner)


def expert_parallel_gathered(moe: MixtureOfExperts, parts: Sequence[Tensor], *, inner: int = 1) -> list[Tensor]:
    """A mixture-of-experts layer on a grid of ranks, by gather and reduce-scatter.

    Args:
        moe: the layer; rank r uses only the experts it holds.
        parts: ``[n, h]`` per rank, equal n.
        inner: ranks per inner group of the grid (tensor parallel).

    Returns:
        ``[n, h]`` per rank, shared experts included.
    """
    held = owners(len(moe.experts), len(parts))
    routed = [moe.gate(part) for part in parts]
    tokens = dispatch(parts, inner=inner)
    chosen = dispatch([c for c, _ in routed], inner=inner)
    weights = dispatch([w for _, w in routed], inner=inner)
    outputs = [local_experts(moe, tokens[r], chosen[r], weights[r], held[r]) for r in range(len(parts))]
    combined = combine(outputs, inner=inner)
    return [_with_shared(moe, part, out) for part, out in zip(parts, combined)]


def capacity(tokens: int, choices: int, experts: int, factor: float) -> int:
    """Places of an expert: ⌈factor · tokens · choices / experts⌉ (GShard, arXiv:2006.16668)."""
    return max(1, -(-int(factor * tokens * choices) // experts))


def kept_by_capacity(chosen: Tensor, experts: int, places: int) -> Tensor:
    """bool ``[n, k]``: which choices find a place, first come first served in the order of tokens and choices."""
    flat = torch.nn.functional.one_hot(chosen.flatten(), experts)
    place = (flat.cumsum(0) * flat).sum(-1)
    return (place <= places).view_as(chosen)


def expert_parallel_exchanged(
    moe: MixtureOfExperts, parts: Sequence[Tensor], *, capacity_factor: float | None = None
) -> list[Tensor]:
    """The same by all-to-all: only the chosen (token, expert) pairs travel, and come back weighted.

    Args:
        parts: ``[n, h]`` per rank; n may differ.
        capacity_factor: None for dropless, else pairs beyond the capacity of an expert (per sending rank) are dropped.
    """
    ranks = len(parts)
    held = owners(len(moe.experts), ranks)
    where = {expert: rank for rank, experts in enumerate(held) for expert in experts}
    sent: list[list[tuple[Tensor, Tensor, Tensor]]] = []
    routes = []
    for part in parts:
        chosen, weights = moe.gate(part)
        keep = torch.ones_like(chosen, dtype=torch.bool)
        if capacity_factor is not None:
            places = capacity(len(part), chosen.shape[1], len(moe.experts), capacity_factor)
            keep = kept_by_capacity(chosen, len(moe.experts), places)
        destination = torch.tensor([where[int(e)] for e in chosen.flatten()]).view_as(chosen)
        outgoing = []
        for rank in range(ranks):
            rows, slots = (keep & (destination == rank)).nonzero(as_tuple=True)
            outgoing.append((rows, chosen[rows, slots], weights[rows, slots]))
        sent.append(outgoing)
        routes.append(part)
    results = [torch.zeros_like(part) for part in parts]
    for rank in range(ranks):
        for source in range(ranks):
            rows, experts, weights = sent[source][rank]
            received = routes[source][rows]
            for expert in held[rank]:
                mine = experts == expert
                if bool(mine.any()):
                    out = moe.experts[expert](received[mine]) * weights[mine].unsqueeze(-1).to(received)
                    results[source] = results[source].index_add(0, rows[mine], out)
    return [_with_shared(moe, part, out) for part, out in zip(parts, results)]


def _with_shared(moe: MixtureOfExperts, tokens: Tensor, routed: Tensor) -> Tensor:
    return routed if moe.shared_experts is None else routed + moe.shared_experts(tokens)
