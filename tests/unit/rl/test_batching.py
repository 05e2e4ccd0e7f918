from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import build_batch, rounding

from alignment.errors import InputError
from alignment.rl.aggregation import Counts
from alignment.rl.batching import Partition, balanced_partition, micro_batches, mini_batches, rank_shares, token_counts
from alignment.rl.config import ActorConfig
from alignment.rl.losses import ActorLoss
from alignment.rl.metrics import add_shares

LAW = settings(max_examples=60, deadline=None, derandomize=True)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=14)


def covers(partition: Partition, n: int) -> bool:
    rows = [i for part in partition.parts for i in part]
    return sorted(rows) == list(range(n)) and all(part and list(part) == sorted(part) for part in partition.parts)


def loads(partition, lengths):
    return [sum(lengths[i] for i in part) for part in partition.parts]


@LAW
@given(lengths=LENGTHS, data=st.data())
def test_every_sample_is_in_exactly_one_part(lengths, data):
    parts = data.draw(st.integers(1, len(lengths)))
    partition = balanced_partition(lengths, parts)
    assert covers(partition, len(lengths)) and len(partition.parts) == parts


@LAW
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=7), data=st.data())
def test_balance_is_within_grahams_bound_of_the_best_partition(lengths, data):
    """Longest first is within (4k − 1) / 3k of the best of all partitions (Graham 1969)."""
    parts = data.draw(st.integers(1, min(3, len(lengths))))
    best = min(
        max(sum(x for x, p in zip(lengths, choice) if p == k) for k in range(parts))
        for choice in itertools.product(range(parts), repeat=len(lengths))
    )
    found = max(loads(balanced_partition(lengths, parts), lengths))
    assert found * 3 * parts <= best * (4 * parts - 1)


@LAW
@given(lengths=LENGTHS, data=st.data())
def test_equal_sizes(lengths, data):
    parts = data.draw(st.sampled_from([k for k in range(1, len(lengths) + 1) if len(lengths) % k == 0]))
    partition = balanced_partition(lengths, parts, equal_size=True)
    assert covers(partition, len(lengths))
    assert {len(part) for part in partition.parts} == {len(lengths) // parts}


@LAW
@given(lengths=LENGTHS, data=st.data())
def test_dynamic_micro_batches_respect_the_budget_and_waste_nothing(lengths, data):
    budget = data.draw(st.integers(max(lengths), 2 * max(lengths) + sum(lengths)))
    partition = micro_batches(lengths, use_dynamic_bsz=True, max_token_len=budget)
    assert covers(partition, len(lengths))
    assert max(loads(partition, lengths)) <= budget
    assert len(partition.parts) >= -(-sum(lengths) // budget)
    if sum(lengths) <= budget:
        assert len(partition.parts) == 1
    assert micro_batches(lengths, use_dynamic_bsz=True, max_token_len=budget) == partition  # deterministic


@LAW
@given(lengths=LENGTHS, size=st.integers(1, 5))
def test_static_micro_batches_are_consecutive(lengths, size):
    partition = micro_batches(lengths, use_dynamic_bsz=False, micro_batch_size=size)
    assert [i for part in partition.parts for i in part] == list(range(len(lengths)))
    assert all(len(part) == size for part in partition.parts[:-1])


@LAW
@given(lengths=LENGTHS, data=st.data())
def test_restore_is_the_exact_inverse_of_split(lengths, data):
    parts = data.draw(st.integers(1, len(lengths)))
    partition = balanced_partition(lengths, parts)
    values = torch.arange(2 * len(lengths), dtype=torch.float32).reshape(-1, 2)
    pieces = [values[list(rows)] for rows in partition.parts]
    assert torch.equal(partition.restore(pieces), values)


def test_a_result_left_in_the_order_of_the_parts_would_be_seen():
    values = torch.arange(4)
    partition = micro_batches([1, 1, 9, 9], use_dynamic_bsz=True, max_token_len=10)
    pieces = [values[list(rows)] for rows in partition.parts]
    assert torch.cat(pieces).tolist() == [0, 2, 1, 3]
    assert partition.restore(pieces).tolist() == [0, 1, 2, 3]


def test_by_hand():
    assert balanced_partition([8, 7, 6, 5, 4], 2).parts == ((0, 3, 4), (1, 2))
    assert micro_batches([4, 4, 4], use_dynamic_bsz=True, max_token_len=8).parts == ((0, 2), (1,))
    assert micro_batches([4, 4, 4], use_dynamic_bsz=True, max_token_len=12).parts == ((0, 1, 2),)
    assert micro_batches([4, 4, 4], use_dynamic_bsz=True, max_token_len=12, at_least=2).parts == ((0, 2), (1,))
    assert micro_batches([4, 4, 4], use_dynamic_bsz=True, max_token_len=12, at_least=9).parts == ((0,), (1,), (2,))
    assert micro_batches([4, 4, 4], use_dynamic_bsz=False).parts == ((0, 1, 2),)
    # total 9 fits in two parts of 5 by count of tokens, but no two of the 3s share one
    assert len(micro_batches([3, 3, 3], use_dynamic_bsz=True, max_token_len=5).parts) == 3


def test_split_uses_real_tokens():
    batch = build_batch(lengths=(3, 5, 1, 4), prompt_lengths=(2, 4))
    assert token_counts(batch) == [5, 7, 5, 8]
    partition = micro_batches(token_counts(batch), use_dynamic_bsz=True, max_token_len=13)
    pieces = partition.split(batch)
    assert [len(p) for p in pieces] == [len(part) for part in partition.parts]
    assert torch.equal(partition.restore([p["responses"] for p in pieces]), batch["responses"])
    with pytest.raises(InputError, match="split: the batch does not fit the partition; expected 4; found 3"):
        partition.split(batch[:3])
    with pytest.raises(
        InputError, match=r"restore: the results do not fit the partition; expected \[2, 2\]; found \[1, 2\]"
    ):
        Partition(parts=((0, 1), (2, 3))).restore([torch.zeros(1), torch.zeros(2)])


@LAW
@given(seed=st.integers(0, 2**32), budget=st.integers(8, 40))
def test_loss_and_metrics_do_not_depend_on_dynamic_batching(seed, budget):
    batch = build_batch(seed=seed)
    counts = Counts.of(batch["response_mask"])
    run = ActorLoss(config=ActorConfig(use_kl_loss=True, loss_scale_factor=5), counts=counts)

    def shares(pieces):
        outputs = [{"log_probs": p["rollout_log_probs"], "entropy": p["entropys"]} for p in pieces]
        return add_shares({k: v.item() for k, v in run(o, p.tensors)[1].items()} for o, p in zip(outputs, pieces))

    whole = shares([batch])
    cut = shares(micro_batches(token_counts(batch), use_dynamic_bsz=True, max_token_len=budget).split(batch))
    magnitude = sum(float(batch[k].abs().sum()) for k in ("advantages", "old_log_probs", "ref_log_prob", "entropys"))
    for name in whole:
        assert abs(whole[name] - cut[name]) <= rounding(torch.float64, 20, magnitude * math.exp(3.0)), name


def test_mini_batches_are_the_same_for_every_number_of_ranks():
    assert mini_batches(8, 4).parts == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mini_batches(4, 2, order=[3, 0, 2, 1]).parts == ((0, 3), (1, 2))
    with pytest.raises(
        InputError,
        match="ppo_mini_batch_size: a step consists of whole mini batches; expected a divisor of 8 samples; found 3",
    ):
        mini_batches(8, 3)
    with pytest.raises(InputError, match="the order of the samples is no permutation"):
        mini_batches(4, 2, order=[0, 0, 1, 2])


def test_rank_shares():
    assert rank_shares([1, 1, 9, 9], 2).parts == ((0, 1), (2, 3))
    assert rank_shares([1, 1, 9, 9], 2, balance=True).parts == ((0, 2), (1, 3))
    with pytest.raises(
        InputError,
        match="shared out evenly over the data parallel ranks; expected a number of samples that divides by 3; found 4",
    ):
        rank_shares([1, 1, 1, 1], 3)


def test_errors():
    with pytest.raises(
        InputError,
        match="ppo_max_token_len_per_gpu, sample 1: a sample exceeds the token budget of a micro batch; expected "
        "at most 8 tokens; found 9",
    ):
        micro_batches([1, 9], use_dynamic_bsz=True, max_token_len=8)
    with pytest.raises(InputError, match="dynamic batching needs a token budget; expected > 0"):
        micro_batches([1], use_dynamic_bsz=True)
    with pytest.raises(InputError, match="there are no samples"):
        micro_batches([], use_dynamic_bsz=False)
    with pytest.raises(InputError, match="a micro batch has at least one sample; found 0"):
        micro_batches([1], use_dynamic_bsz=False, micro_batch_size=0)
    with pytest.raises(InputError, match="every part holds at least one sample; expected 1 … 2; found 3"):
        balanced_partition([1, 2], 3)
    with pytest.raises(
        InputError, match="equal parts need a number of samples that divides; expected a multiple of 2; found 3"
    ):
        balanced_partition([1, 2, 3], 2, equal_size=True)
