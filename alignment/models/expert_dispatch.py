"""Tokens to experts and back: permutation maps with capacity, and the experts as one operator, whole or cut over ranks.

Ranks are simulated: a list has one entry per rank. The layouts must all give what one rank gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.errors import InputError
from alignment.models.parallel import collectives

ELSEWHERE = -1
"""In a permutation map: the pair is computed by another rank, or was dropped."""

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Some experts as stacked tensors.

    Attributes:
        gate, up: ``[e, i, h]``; down: ``[e, h, i]``.
        gate_bias, up_bias: ``[e, i]`` or None; down_bias: ``[e, h]`` or None.
        activation: a key of :data:`ACTIVATIONS`.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"

    def __len__(self) -> int:
        return self.gate.shape[0]

    def cut(self, rank: int, ranks: int) -> ExpertWeights:
        """Every expert's part for one of ``ranks`` tensor parallel ranks; the bias behind the sum is on rank 0
        alone.
        """

        def rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.chunk(ranks, dim=1)[rank]

        return ExpertWeights(
            gate=rows(self.gate), up=rows(self.up), down=self.down.chunk(ranks, dim=2)[rank],
            gate_bias=rows(self.gate_bias), up_bias=rows(self.up_bias),
            down_bias=self.down_bias if rank == 0 else None, activation=self.activation,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """How the (token, choice) pairs are sorted by expert.

    Attributes:
        rows: int64 ``[m]``, the pair (token · k + choice) at each permuted row.
        place: int64 ``[n · k]``, the row of each pair, or :data:`ELSEWHERE`.
        counts: int64 ``[e]``, rows per expert.
    """

    rows: Tensor
    place: Tensor
    counts: Tensor


def permutation(chosen: Tensor, experts: range, *, capacity: int | None = None) -> Permutation:
    """The pairs of ``experts``, by expert and in it by token; without those of other experts.

    Args:
        chosen: int64 ``[n, k]``, experts of each token.
        experts: the ones held here.
        capacity: an expert keeps its first ``capacity`` pairs in the order of the tokens and drops the others.
    """
    flat = chosen.flatten()
    # Stable: which pairs an expert drops, and the order of its rows, depend on it.
    order = flat.argsort(stable=True)
    cumulative = torch.stack([(flat[order] <= expert).sum() for expert in experts])
    before = int((flat < experts.start).sum())
    counts = counts_from_offsets(cumulative - before)
    rows = order[before : before + int(counts.sum())]
    if capacity is not None:
        kept = torch.cat([torch.arange(int(n)) < capacity for n in counts])
        rows, counts = rows[kept], counts.clamp(max=capacity)
    place = torch.full_like(flat, ELSEWHERE)
    place[rows] = torch.arange(len(rows))
    return Permutation(rows=rows, place=place, counts=counts)


def counts_from_offsets(cumulative: Tensor) -> Tensor:
    """Rows per expert from the cumulative ones: c₀, c₁ − c₀, … (the ``group_list`` that grouped matmuls take)."""
    return torch.diff(cumulative, prepend=cumulative.new_zeros(1))


def permute(x: Tensor, chosen: Tensor, how: Permutation) -> Tensor:
    """Tokens ``[n, h]`` as rows ``[m, h]``, sorted by expert."""
    return x[how.rows // chosen.shape[1]]


def unpermute(rows: Tensor, weights: Tensor, how: Permutation) -> Tensor:
    """Σ_j weights[:, j] · (the row of pair j), ``[n, h]``; a pair that is elsewhere adds nothing."""
    held = how.place != ELSEWHERE
    # A row of zeros behind the others is what pairs elsewhere read.
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    index = torch.where(held, how.place, torch.full_like(how.place, len(rows)))
    return (padded[index].view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def gated_activation(gate: Tensor, up: Tensor, *, kind: str = "silu") -> Tensor:
    """act(gate) · up with the activation the model is configured with.

    Raises:
        InputError: an unknown activation.
    """
    if kind not in ACTIVATIONS:
        raise InputError("unknown activation", where="activation", expected=", ".join(ACTIVATIONS), found=kind)
    return ACTIVATIONS[kind](gate) * up


def run_grouped(rows: Tensor, counts: Tensor, weights: ExpertWeights) -> Tensor:
    """Every expert on its rows: ``[m, h]`` to ``[m, h]``, biases included."""
    outputs = []
    for expert, part in enumerate(rows.split(counts.tolist())):
        gate = F.linear(part, weights.gate[expert], _of(weights.gate_bias, expert))
        up = F.linear(part, weights.up[expert], _of(weights.up_bias, expert))
        inner = gated_activation(gate, up, kind=weights.activation)
        outputs.append(F.linear(inner, weights.down[expert], _of(weights.down_bias, expert)))
    return torch.cat(outputs)


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    held: range | None = None,
    capacity: int | None = None,
) -> Tensor:
    """Σ_j weights[:, j] · expert[chosen[:, j]](x) over the experts ``held`` here (all by default), ``[n, h]``.

    A weight multiplies the whole output of its expert, the bias of the down projection included.
    """
    how = permutation(chosen, held if held is not None else range(len(experts)), capacity=capacity)
    return unpermute(run_grouped(permute(x, chosen, how), how.counts, experts), weights, how)


def tensor_parallel(x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights, *, ranks: int) -> list[Tensor]:
    """Ranks that cut every expert: each has all tokens, its partial sums are added up once. One output per rank."""
    parts = [routed_experts(x, chosen, weights, experts.cut(rank, ranks)) for rank in range(ranks)]
    return reduce_partial_sums(parts)


def sequence_parallel(
    x: Sequence[Tensor], chosen: Sequence[Tensor], weights: Sequence[Tensor], experts: ExpertWeights
) -> list[Tensor]:
    """Tensor parallel ranks that hold different tokens outside the experts: gather, partial sums, reduce-scatter."""
    ranks = len(x)
    everyone = [collectives.all_gather(list(part))[0] for part in (x, chosen, weights)]
    return reduce_token_shards([routed_experts(*everyone, experts.cut(rank, ranks)) for rank in range(ranks)])


def reduce_partial_sums(parts: Sequence[Tensor]) -> list[Tensor]:
    """Partial sums of the same tokens: one all-reduce."""
    return collectives.all_reduce(parts)


def reduce_token_shards(parts: Sequence[Tensor]) -> list[Tensor]:
    """Partial sums of all tokens to each rank's own tokens: one reduce-scatter, after which nothing may be added up."""
    return collectives.reduce_scatter(parts)


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
