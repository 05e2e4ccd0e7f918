"""Every parallel layout against one rank, in float64: values and gradients, exact up to the rounding of the sums."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.models.parallel import (
    collectives,
    context_parallel,
    data_parallel,
    expert_parallel,
    gradient_norm,
    packing,
    pipeline,
    sequence_parallel,
    side_loss,
    vocab_parallel,
)
from alignment.numerics.precision import error_growth, unit_roundoff
from alignment.numerics.random import portable_integers, portable_normal

TERMS = 4096
"""More terms than any sum of these toys has, through all layers."""


def close(found: torch.Tensor, golden: torch.Tensor) -> bool:
    found, golden = found.detach(), golden.detach()
    bound = error_growth(TERMS, unit_roundoff(torch.float64), model="deterministic") * float(golden.abs().max())
    return found.shape == golden.shape and float((found - golden).abs().max()) <= bound


def draw(*shape: int, stream: str) -> torch.Tensor:
    return portable_normal(shape, seed=7, stream=stream)


def ids(*shape: int) -> torch.Tensor:
    return portable_integers(3, 90, shape, seed=7, stream="ids")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    config = dataclasses.replace(preset("tiny-deepseek"), vocab_size=90, num_hidden_layers=4)
    return CausalLM(config, dtype=torch.float64).init_weights(5)


def gradients(model: CausalLM, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found)}


# --- collectives -----------------------------------------------------------------------------------------------------


def test_collectives_are_inverse_to_each_other():
    parts = [draw(3, 2, stream=f"c{r}") for r in range(4)]
    assert torch.equal(collectives.all_gather(parts)[2], torch.cat(parts))
    assert all(close(a, 4 * b) for a, b in zip(collectives.reduce_scatter(collectives.all_gather(parts)), parts))
    there = collectives.all_to_all([p.expand(3, 2).reshape(3, 2) for p in parts[:2]], split_dim=1, concat_dim=0)
    back = collectives.all_to_all(there, split_dim=0, concat_dim=1)
    assert all(torch.equal(a, b) for a, b in zip(back, parts[:2]))


@pytest.mark.parametrize("inner", [1, 2, 3, 6])
def test_nested_gather_is_undone_in_the_reverse_order(inner):
    parts = [draw(6, 2, stream=f"n{r}") for r in range(6)]
    gathered = collectives.nested_gather(parts, inner=inner)
    assert all(torch.equal(each, torch.cat(parts)) for each in gathered)
    assert all(close(a, 6 * b) for a, b in zip(collectives.nested_reduce_scatter(gathered, inner=inner), parts))


def test_uneven_parts_are_refused():
    with pytest.raises(InputError, match="cut into equal parts; expected a multiple of 2; found 3"):
        collectives.split_evenly(torch.zeros(3), 2)


# --- packing and context parallelism ---------------------------------------------------------------------------------


def test_a_pack_computes_what_its_sequences_compute_alone(model):
    rows, lengths = ids(3, 10), [4, 10, 7]
    mask = torch.stack([(torch.arange(10) >= 10 - n).long() for n in lengths])
    mask[1] = (torch.arange(10) < 10).long()
    packed = packing.pack(rows, mask, mask)
    logits = packing.unpack(packing.packed_logits(model, packed), mask)
    for row, n in enumerate(lengths):
        assert close(logits[row][mask[row] != 0], model(rows[row][mask[row] != 0][None])[0])
    assert packed.cu_seqlens.tolist() == [0, 4, 14, 21]
    assert packed.labels[0, 3] == 0 and packed.label_mask[0].sum() == 21 - 3
    assert torch.equal(packed.labels[0, 4:13], packed.input_ids[0, 5:14])


def test_local_indices_follow_the_zig_zag_within_each_sequence():
    cu = packing.cumulative_lengths([4, 4])
    assert context_parallel.local_indices(cu, 2, 0).tolist() == [0, 3, 4, 7]
    assert context_parallel.local_indices(cu, 2, 1).tolist() == [1, 2, 5, 6]
    with pytest.raises(InputError, match="two chunks per rank; expected lengths that are multiples of 4; found 6"):
        context_parallel.local_indices(packing.cumulative_lengths([6]), 2, 0)


@pytest.mark.parametrize("kind", context_parallel.KINDS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_context_parallelism_equals_one_rank_forward_and_backward(model, kind, cp):
    cu = packing.cumulative_lengths([8, 24, 16])
    tokens, weight = ids(1, 48), draw(1, 48, 90, stream="w")
    positions = packing.positions(cu)[None] * 3 + packing.segments(cu)[None]
    whole = model(tokens, position_ids=positions, segment_ids=packing.segments(cu)[None])
    parts = context_parallel.context_parallel_logits(
        model, tokens, cu_seqlens=cu, cp=cp, kind=kind, position_ids=positions
    )
    found = context_parallel.unshard(parts, cu)
    assert close(found, whole)
    golden = gradients(model, (whole * weight).sum())
    for name, gradient in gradients(model, (found * weight).sum()).items():
        assert close(gradient, golden[name]), name


def test_labels_are_shifted_before_they_are_sharded():
    cu, tokens = packing.cumulative_lengths([8, 16]), ids(1, 24)
    labels = context_parallel.unshard(context_parallel.local_labels(tokens, cu, 2), cu)
    assert torch.equal(labels, packing.shift_within(tokens, cu))


def test_a_partial_attention_without_keys_changes_nothing():
    q, k, v = (draw(1, 2, 3, 4, stream=s).requires_grad_() for s in "qkv")
    whole = context_parallel.partial_attention(q, k, v, scale=0.5, mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))
    none = context_parallel.partial_attention(q, k, v, scale=0.5, mask=torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    for pair in ((whole, none), (none, whole)):
        merged = context_parallel.merge(*pair)
        assert torch.equal(merged.out, whole.out) and torch.equal(merged.lse, whole.lse)
        for found, golden in zip(
            torch.autograd.grad(merged.out.sum(), (q, k, v), retain_graph=True),
            torch.autograd.grad(whole.out.sum(), (q, k, v), retain_graph=True),
        ):
            assert close(found, golden)


def test_unknown_kinds_and_uneven_heads_are_refused(model):
    with pytest.raises(InputError, match="unknown context parallelism; expected ring . ulysses; found star"):
        context_parallel.context_parallel_logits(
            model, ids(1, 8), cu_seqlens=packing.cumulative_lengths([8]), cp=2, kind="star"
        )
    with pytest.raises(InputError, match="heads are shared out evenly; expected a multiple of 3; found 4"):
        context_parallel.local_head_count(4, 3)


# --- vocabulary parallelism ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("offset", [0.0, -200.0, 300.0])
def test_vocabulary_shards_give_the_whole_distribution(tp, offset):
    vocab, hidden = 29, draw(5, 6, stream="h")
    weight, labels = draw(vocab, 6, stream="W"), portable_integers(0, vocab, (5,), seed=1, stream="y")
    logits = (hidden @ weight.t() + offset).requires_grad_()
    padded = torch.nn.functional.pad(logits, (0, vocab_parallel.padded_vocabulary(vocab, tp) - vocab))
    shards = collectives.split_evenly(padded, tp, dim=-1)
    log_p = torch.log_softmax(logits / 0.7, -1)
    golden = log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    found = vocab_parallel.log_probs_and_entropy(shards, labels, vocab_size=vocab, temperature=0.7)
    for mine, right in zip(found, golden):
        assert float((mine - right).detach().abs().max()) <= error_growth(
            vocab, unit_roundoff(torch.float64), model="deterministic"
        ) * (float(logits.detach().abs().max()) / 0.7 + 1)
        assert close(*(torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (mine, right)))


@pytest.mark.parametrize("tp", [1, 2, 4, 7])
def test_the_fused_head_has_the_gradients_of_the_plain_one(tp):
    vocab = 29
    hidden, weight = draw(5, 6, stream="h").requires_grad_(), draw(vocab, 6, stream="W").requires_grad_()
    labels, seed = portable_integers(0, vocab, (5,), seed=1, stream="y"), draw(5, stream="g")
    golden = torch.log_softmax(hidden @ weight.t() / 1.7, -1).gather(-1, labels[:, None])[:, 0]
    found = vocab_parallel.linear_log_probs(
        hidden, vocab_parallel.shard_vocabulary(weight, tp), labels, vocab_size=vocab, temperature=1.7
    )
    assert close(found, golden)
    for mine, right in zip(
        torch.autograd.grad((found * seed).sum(), (hidden, weight)),
        torch.autograd.grad((golden * seed).sum(), (hidden, weight)),
    ):
        assert close(mine, right)


def test_a_label_outside_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="a label is no token; expected 0 … 2; found"):
        vocab_parallel.log_probs_and_entropy([torch.zeros(1, 4)], torch.tensor([3]), vocab_size=3)


# --- sequence, pipeline, expert and data parallelism -----------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_sequence_parallel_block_equals_one_rank(tp):
    shapes = {"norm": (6,), "up": (8, 6), "down": (6, 8), "bias": (6,), "tower": (6, 6)}
    weights = {name: draw(*shape, stream=name) for name, shape in shapes.items()}
    x, seed = draw(2, 8, 6, stream="x").requires_grad_(), draw(2, 8, 6, stream="s")
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    normed = sequence_parallel.rms_norm(x, leaves["norm"])
    y = x + torch.nn.functional.silu(normed @ leaves["up"].t()) @ leaves["down"].t() + leaves["bias"]
    golden = y + torch.tanh(y @ leaves["tower"].t())
    (golden * seed).sum().backward()
    parts = [p.detach().clone().requires_grad_() for p in collectives.split_evenly(x, tp, dim=1)]
    block = sequence_parallel.SequenceParallelBlock(weights, tp)
    found = block.forward(parts)
    sum((o * s).sum() for o, s in zip(found, collectives.split_evenly(seed, tp, dim=1))).backward()
    assert close(torch.cat(found, 1), golden)
    assert close(torch.cat([p.grad for p in parts], 1), x.grad)
    for name, gradient in block.gradients().items():
        assert close(gradient, leaves[name].grad), name
    with pytest.raises(InputError, match="unknown consumers; expected sharded . replicated; found some"):
        sequence_parallel.gather_sequence(parts, consumers="some")


def test_pipeline_stages_know_their_layers_in_the_whole_model(model):
    chunks = pipeline.stages(8, pp=2, virtual=2)
    assert [[s.layers for s in c] for c in chunks] == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]
    assert pipeline.layer_number(chunks[1][0], 1) == 6
    with pytest.raises(InputError, match="layers are shared out evenly; expected a multiple of 3; found 4"):
        pipeline.stages(4, pp=3)
    micro, masks = [ids(2, 6), ids(1, 9)], [torch.ones(2, 6), torch.ones(1, 9)]
    masks[0][0, :3] = 0
    for found, tokens, mask in zip(
        pipeline.pipeline_logits(model, micro, pp=2, virtual=2, attention_masks=masks), micro, masks
    ):
        assert close(found[mask != 0], model(tokens, attention_mask=mask)[mask != 0])
    one, two = (pipeline.pipeline_logits(model, micro, pp=pp, scale_by_inverse_layer=True)[0] for pp in (1, 4))
    assert torch.equal(one, two) and not close(one, model(micro[0]))


@pytest.mark.parametrize("ranks,inner", [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_expert_parallel_layers_equal_one_rank(model, ranks, inner):
    moe = model.model.layers[1].mlp
    parts = [draw(5, 64, stream=f"t{r}") for r in range(ranks)]
    golden = [moe(part) for part in parts]
    for found in (
        expert_parallel.expert_parallel_gathered(moe, parts, inner=inner),
        expert_parallel.expert_parallel_exchanged(moe, parts),
    ):
        assert all(close(a, b) for a, b in zip(found, golden))


def test_capacity_drops_the_last_comers(model):
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 0]])
    kept = expert_parallel.kept_by_capacity(chosen, 4, 2)
    assert kept.tolist() == [[True, True], [True, True], [False, True], [True, False]]
    assert expert_parallel.capacity(10, 2, 8, 1.0) == 3
    moe, part = model.model.layers[1].mlp, draw(6, 64, stream="t")
    plenty = expert_parallel.expert_parallel_exchanged(moe, [part], capacity_factor=8.0)[0]
    assert close(plenty, moe(part))
    assert not close(expert_parallel.expert_parallel_exchanged(moe, [part], capacity_factor=0.5)[0], moe(part))


@pytest.mark.parametrize("dp,cp", [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_averaged_gradients_are_those_of_the_mean_over_all_tokens(dp, cp):
    weight = draw(4, stream="w").requires_grad_()
    micro = [{"x": draw(n, 4, stream=f"x{n}")} for n in range(1, 2 * dp * cp + 1)]

    def token_sum(batch):
        return (batch["x"] @ weight).square().sum(), len(batch["x"])

    everything = torch.cat([m["x"] for m in micro])
    (golden,) = torch.autograd.grad((everything @ weight).square().mean(), weight)
    value, found = data_parallel.token_mean_gradients(
        {"w": weight}, token_sum, [micro[i : i + 2] for i in range(0, len(micro), 2)], cp=cp
    )
    assert close(found["w"], golden)
    assert close(torch.tensor([value], dtype=torch.float64), (everything @ weight).square().mean().detach()[None])


def test_the_gradient_norm_counts_every_element_once():
    whole, copy = draw(8, stream="a"), draw(5, stream="b")
    gradients = {
        "a": gradient_norm.RankGradients(parts=collectives.split_evenly(whole.clone(), 4), kind="sharded"),
        "b": gradient_norm.RankGradients(parts=[copy.clone() for _ in range(4)], kind="replicated"),
    }
    golden = torch.linalg.vector_norm(torch.cat([whole, copy]))
    norm = gradient_norm.clip(gradients, max_norm=0.5)
    assert close(torch.tensor(norm, dtype=torch.float64), golden)
    after = torch.tensor(gradient_norm.global_norm(gradients), dtype=torch.float64)
    assert close(after, 0.5 * golden / (golden + 1e-6))
    with pytest.raises(InputError, match="unknown kind of gradient; expected sharded . replicated; found some"):
        gradient_norm.RankGradients(parts=[whole], kind="some")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_side_losses_count_like_the_main_loss(count):
    weight, micro = draw(4, stream="w").requires_grad_(), [draw(3, 4, stream=f"m{i}") for i in range(count)]

    def forward(x, side):
        y = x * weight
        return side.attach(y, 0.3 * y.square().mean()).sum()

    side_loss.run_schedule(micro, forward)
    golden = sum((x * weight).sum() + 0.3 * (x * weight).square().mean() for x in micro) / count
    assert close(weight.grad, torch.autograd.grad(golden, weight)[0])
