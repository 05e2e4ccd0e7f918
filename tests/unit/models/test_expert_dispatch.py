"""Permutation maps and grouped experts against the mixture of the model, and in every layout."""

import pytest
import torch

from alignment.errors import InputError
from alignment.models.config import preset
from alignment.models.expert_dispatch import (
    ELSEWHERE, ExpertWeights, counts_from_offsets, gated_activation, permutation, permute, routed_experts,
    sequence_parallel, tensor_parallel, unpermute,
)  # fmt: skip
from alignment.models.moe import MixtureOfExperts
from alignment.numerics.random import portable_integers, portable_normal, portable_uniform

ROUNDING = 1e3 * torch.finfo(torch.float64).eps


@pytest.fixture(scope="module")
def layer():
    config = preset("tiny-moonlight")
    moe = MixtureOfExperts(config, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            parameter.copy_(0.1 * portable_normal(tuple(parameter.shape), seed=0, stream=name))
    return moe


@pytest.fixture(scope="module")
def stacked(layer):
    parts = {n: torch.stack([getattr(e, f"{n}_proj").weight for e in layer.experts]) for n in ("gate", "up", "down")}
    return ExpertWeights(**parts)


@pytest.fixture(scope="module")
def tokens(layer):
    x = portable_normal((6, layer.config.hidden_size), seed=0, stream="x")
    chosen = portable_uniform((6, 8), seed=0, stream="order").argsort(-1)[:, :3]
    return x, chosen, portable_uniform((6, 3), seed=0, stream="weights")


def close(found, expected):
    found, expected = found.detach(), expected.detach()
    assert float((found - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


def test_grouped_experts_are_the_mixture_of_the_model(layer, stacked, tokens):
    with torch.no_grad():
        close(routed_experts(*tokens, stacked), layer.run_experts(*tokens))


def test_ranks_together_are_one_rank(stacked, tokens):
    whole = routed_experts(*tokens, stacked)
    for rank in tensor_parallel(*tokens, stacked, ranks=2):
        close(rank, whole)
    shards = sequence_parallel(*(t.chunk(2) for t in tokens), stacked)
    close(torch.cat(shards), whole)
    held = []
    for start in (0, 4):
        part = ExpertWeights(**{n: getattr(stacked, n)[start : start + 4] for n in ("gate", "up", "down")})
        held.append(routed_experts(*tokens, part, held=range(start, start + 4)))
    close(sum(held), whole)


def test_an_expert_over_capacity_drops_its_last_tokens():
    chosen = torch.tensor([[0], [1], [0], [0], [1]])
    how = permutation(chosen, range(2), capacity=2)
    assert how.rows.tolist() == [0, 2, 1, 4] and how.counts.tolist() == [2, 2]
    assert how.place.tolist() == [0, 2, 1, ELSEWHERE, 3]
    x = torch.arange(5.0)[:, None]
    back = unpermute(permute(x, chosen, how), torch.ones(5, 1), how)
    assert back.flatten().tolist() == [0, 1, 2, 0, 4]


def test_counts_are_differences_from_zero():
    assert counts_from_offsets(torch.tensor([3, 3, 7])).tolist() == [3, 0, 4]
    drawn = portable_integers(0, 9, (5,), seed=0, stream="counts")
    assert torch.equal(counts_from_offsets(drawn.cumsum(0)), drawn)


def test_an_unknown_activation_is_refused():
    with pytest.raises(InputError, match="unknown activation; expected silu, gelu_tanh; found relu"):
        gated_activation(torch.ones(1), torch.ones(1), kind="relu")
