"""Collectives that go wrong below the functions that engines call, as in a library or on a link."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

WRONG_RANK = 1
WRONG_PLACE = 3
WRONG_BIT = 12
_others: dict[tuple[int, ...], dist.ProcessGroup] = {}


def make_groups(*members: tuple[int, ...]) -> None:
    """Groups a fault may use; every rank has to take part in making them, before it is switched on."""
    for ranks in members:
        _others[ranks] = dist.new_group(list(ranks))


@contextlib.contextmanager
def replaced(name: str, make: Callable) -> Iterator[None]:
    """``torch.distributed.name`` replaced by what ``make`` makes of it."""
    before = getattr(dist, name)
    setattr(dist, name, make(before))
    try:
        yield
    finally:
        setattr(dist, name, before)


@contextlib.contextmanager
def lost_contribution():
    """One rank's summands never arrive."""

    def wrong(all_reduce):
        def call(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            if dist.get_rank() == WRONG_RANK:
                tensor.zero_()
            return all_reduce(tensor, op=op, group=group, async_op=async_op)

        return call

    with replaced("all_reduce", wrong):
        yield


@contextlib.contextmanager
def mean_of_ranks():
    """A mean where a sum was asked for."""

    def wrong(all_reduce):
        def call(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            all_reduce(tensor, op=op, group=group)
            if tensor.is_floating_point():
                tensor.div_(dist.get_world_size(group))

        return call

    with replaced("all_reduce", wrong):
        yield


@contextlib.contextmanager
def low_precision():
    """float32 is added in bfloat16."""

    def wrong(all_reduce):
        def call(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            if tensor.dtype != torch.float32:
                return all_reduce(tensor, op=op, group=group)
            low = tensor.bfloat16()
            all_reduce(low, op=op, group=group)
            tensor.copy_(low)

        return call

    with replaced("all_reduce", wrong):
        yield


@contextlib.contextmanager
def wrong_group():
    """The neighbours are added instead of the ranks of the group; :func:`make_groups` has made both."""

    def wrong(all_reduce):
        def call(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            mine = next(g for ranks, g in _others.items() if dist.get_rank() in ranks)
            return all_reduce(tensor, op=op, group=mine, async_op=async_op)

        return call

    with replaced("all_reduce", wrong):
        yield


@contextlib.contextmanager
def bit_flip():
    """One bit of one element of what one rank receives."""

    def wrong(all_reduce):
        def call(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            all_reduce(tensor, op=op, group=group)
            if dist.get_rank() == WRONG_RANK and tensor.dtype == torch.float32:
                tensor.view(-1).view(torch.int32)[WRONG_PLACE] ^= 1 << WRONG_BIT

        return call

    with replaced("all_reduce", wrong):
        yield


@contextlib.contextmanager
def swapped_order():
    """The parts of the first two ranks of a gather change places."""

    def in_list(all_gather):
        def call(tensor_list, tensor, group=None, async_op=False):
            all_gather(tensor_list, tensor, group=group)
            first = tensor_list[0].clone()
            tensor_list[0].copy_(tensor_list[1])
            tensor_list[1].copy_(first)

        return call

    def in_tensor(all_gather):
        def call(output_tensor, input_tensor, group=None, async_op=False):
            work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
            if work is not None:
                work.wait()
            parts = output_tensor.view(dist.get_world_size(group), -1)
            parts[:2] = parts[:2].flip(0).clone()
            return work

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced("all_gather", in_list))
        for name in ("all_gather_into_tensor", "all_gather_single"):
            if hasattr(dist, name):
                stack.enter_context(replaced(name, in_tensor))
        yield


@contextlib.contextmanager
def stale_message():
    """A rank that receives from anyone gets the first message again in place of the second."""
    kept: list[torch.Tensor] = []

    def wrong(recv):
        def call(tensor, src=None, group=None, tag=0, group_src=None):
            source = recv(tensor, src=src, group=group, tag=tag, group_src=group_src)
            kept.append(tensor.clone())
            if len(kept) == 2:
                tensor.copy_(kept[0])
            return source

        return call

    with replaced("recv", wrong):
        yield


@contextlib.contextmanager
def no_reduction():
    """An engine that forgets to add up over its ranks: no collective is wrong, one is missing."""
    from unittest import mock

    from alignment.backends.training import ProcessGroupRanks

    with mock.patch.object(ProcessGroupRanks, "add_up", lambda self, tensors: None):
        yield
