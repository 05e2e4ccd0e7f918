from __future__ import annotations

import pytest
import torch

from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.executor import Placement, join, run_setup, shares
from alignment.rl.worker import Dispatch, Worker, dispatch_of

ROLES = ("actor", "rollout", "reward")


def numbered(count: int) -> Batch:
    return Batch({"row": torch.arange(count)}, {"uid": list(range(count))})


def rows(batch: Batch, partition) -> list[list[int]]:
    return [part["row"].tolist() for part in partition.split(batch)]


def test_every_mini_batch_is_shared_out_on_its_own():
    assert rows(numbered(8), shares("update_actor", numbered(8), 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows(numbered(8), shares("update_actor", numbered(8), 2, mini_batches=2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert rows(numbered(8), shares("update_actor", numbered(8), 1, mini_batches=2)) == [list(range(8))]


def test_balanced_shares_have_equal_sizes_and_even_tokens(make_batch):
    batch = make_batch(lengths=(5, 5, 1, 1, 5, 5, 1, 1), prompt_lengths=(2, 2, 2, 2))
    plain, balanced = (shares("old_log_prob", batch, 2, balance=balance) for balance in (False, True))
    tokens = [[int(part["attention_mask"].sum()) for part in p.split(batch)] for p in (plain, balanced)]
    uneven = make_batch(lengths=(5, 5, 5, 5, 1, 1, 1, 1), prompt_lengths=(2, 2, 2, 2))
    apart = [int(p["attention_mask"].sum()) for p in shares("old_log_prob", uneven, 2).split(uneven)]
    even = [int(p["attention_mask"].sum()) for p in shares("old_log_prob", uneven, 2, balance=True).split(uneven)]
    assert tokens[0] == tokens[1] == [20, 20]
    assert apart == [28, 12] and even == [20, 20]


@pytest.mark.parametrize("balance", [False, True])
def test_joined_answers_are_in_the_order_of_the_rows(make_batch, balance):
    batch = make_batch(lengths=(5, 5, 5, 5, 1, 1, 1, 1), prompt_lengths=(2, 2, 2, 2))
    partition = shares("old_log_prob", batch, 2, mini_batches=2, balance=balance)
    joined = join(partition, partition.split(batch))
    assert joined.meta == batch.meta
    assert all(torch.equal(joined[name], tensor) for name, tensor in batch.tensors.items())


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(
        InputError, match="rollout: the batch does not divide.*2 ranks × 2 mini batches; found 6 samples"
    ):
        shares("rollout", numbered(6), 2, mini_batches=2)


def test_placement_groups():
    assert Placement(roles=ROLES).groups() == [ROLES]
    assert Placement(roles=ROLES, colocated=False).groups() == [("actor",), ("rollout",), ("reward",)]


def test_the_dispatch_of_a_stage():
    assert dispatch_of("rollout") is Dispatch.SPLIT
    assert dispatch_of("update_actor") is Dispatch.SHARE
    assert dispatch_of("save") is Dispatch.EVERY
    with pytest.raises(
        InputError, match="generate: the worker has no such stage; expected describe, load, old_log_prob"
    ):
        dispatch_of("generate")
    with pytest.raises(InputError, match="close: the worker has no such stage"):
        dispatch_of("close")
    assert callable(Worker.close)


called = []


def note() -> None:
    called.append("here")


def test_a_setup_is_called_by_its_name():
    run_setup(f"{__name__}:note")
    run_setup(None)
    assert called == ["here"]
