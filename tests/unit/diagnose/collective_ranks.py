"""Four gloo ranks that make one of each collective, right and wrong, and record them. Run by torch.multiprocessing."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

import collective_faults
import numpy as np
import torch
import torch.distributed as dist

from alignment.diagnose.collective_record import RECORD, CollectiveRecorder
from alignment.numerics.random import portable_normal

SIZE = 4
ROWS = ((0, 1), (2, 3))
COLUMNS = ((0, 2), (1, 3))
SCATTERS_LISTS = hasattr(dist, "reduce_scatter_single")
"""Older gloo reduces and scatters one tensor only."""
FAULTS = ("lost_contribution", "mean_of_ranks", "low_precision", "wrong_group", "bit_flip", "swapped_order")


def numbers(rank: int, *shape: int, stream: str = "x", dtype=torch.float32) -> torch.Tensor:
    return portable_normal(shape, seed=rank, stream=f"collectives/{stream}", dtype=dtype)


def every_kind(rank: int, rows) -> None:
    """One of each, on the world and on a row of two."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        dist.all_reduce(numbers(rank, 3, 5, dtype=dtype))
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        dist.all_reduce(numbers(rank, 4), op=op)
    dist.all_reduce(torch.arange(3) + rank)
    dist.all_reduce(numbers(rank, 6), group=rows)
    dist.all_reduce_coalesced([numbers(rank, 2), numbers(rank, 7)])
    work = dist.all_reduce(numbers(rank, 5), async_op=True)
    work.wait()
    # As megatron-core reduces its buckets: outputs are valid after the block, or after the manager's wait.
    for waits in (False, True):
        with dist.distributed_c10d._coalescing_manager(async_ops=waits) as manager:
            for size in (3, 4):
                dist.all_reduce(numbers(rank, size))
        if waits:
            manager.wait()
    if SCATTERS_LISTS:
        dist.reduce_scatter(torch.empty(2, 3), [numbers(rank, 2, 3, stream=f"to {r}") for r in range(SIZE)])
    dist.all_gather([torch.empty(2, 3) for _ in range(SIZE)], numbers(rank, 2, 3))
    dist.all_gather_into_tensor(torch.empty(SIZE * 2, 3), numbers(rank, 2, 3))
    dist.reduce_scatter_tensor(torch.empty(2, 3), numbers(rank, SIZE * 2, 3))
    dist.all_to_all_single(torch.empty(SIZE, 3), numbers(rank, SIZE, 3))
    sent = [rank + 1] * SIZE
    got = [source + 1 for source in range(SIZE)]
    dist.all_to_all_single(
        torch.empty(sum(got), 2), numbers(rank, sum(sent), 2), output_split_sizes=got, input_split_sizes=sent
    )
    ones = np.ones(SIZE, dtype=np.int64)
    dist.all_to_all_single(
        torch.empty(SIZE, 2), numbers(rank, SIZE, 2), output_split_sizes=ones, input_split_sizes=ones
    )
    dist.broadcast(numbers(rank, 4), src=2)
    dist.reduce(numbers(rank, 4), dst=3)
    dist.gather(numbers(rank, 4), [torch.empty(4) for _ in range(SIZE)] if rank == 1 else None, dst=1)
    dist.scatter(torch.empty(4), [numbers(r, 4) for r in range(SIZE)] if rank == 1 else None, src=1)
    dist.all_gather_object([None] * SIZE, {"rank": rank})
    neighbour = rank ^ 1
    if rank % 2:
        dist.recv(torch.empty(3), src=neighbour)
    else:
        dist.send(numbers(rank, 3), dst=neighbour)
    both = [
        dist.P2POp(dist.isend, numbers(rank, 3), neighbour),
        dist.P2POp(dist.irecv, torch.empty(3), neighbour),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    waiting = dist.irecv(torch.empty(2), src=neighbour), dist.isend(numbers(rank, 2), dst=neighbour)
    for work in waiting:
        work.wait()


def sums_and_gathers(rank: int, rows) -> None:
    """A right collective first, then the two that faults are planted in, twice: the first wrong one has to be named."""
    dist.broadcast(numbers(rank, 4), src=0)
    for turn in range(2):
        dist.all_reduce(numbers(rank, 3, 5, stream=f"sum {turn}"), group=rows)
        parts = [torch.empty(2, 3) for _ in range(2)]
        dist.all_gather(parts, numbers(rank, 2, 3, stream=f"part {turn}"), group=rows)


def from_anyone(rank: int, rows) -> None:
    """Rank 0 takes what comes, three times each way, and a row of two likewise; who comes first is chance."""
    if rank == 0:
        for _ in range(1, SIZE):
            dist.recv(torch.empty(3), tag=1)
        for work in [dist.irecv(torch.empty(2), tag=2) for _ in range(1, SIZE)]:
            work.wait()
    else:
        dist.send(numbers(rank, 3, stream="anyone"), dst=0, tag=1)
        dist.send(numbers(rank, 2, stream="anyone, later"), dst=0, tag=2)
    # In a group of two ranks count from 0 again: whoever says who sent has to mean the world's.
    if rank % 2:
        dist.recv(torch.empty(3), group=rows, tag=3)
    else:
        dist.send(numbers(rank, 3, stream="in a row"), dst=rank + 1, group=rows, tag=3)


def by_tag(rank: int, rows) -> None:
    """Messages of a pair that are taken in another order than they were sent, as their tags say."""
    neighbour = rank ^ 1
    if rank % 2:
        first, second = torch.empty(3), torch.empty(3)
        dist.recv(second, src=neighbour, tag=12)
        dist.recv(first, src=neighbour, tag=11)
    else:
        works = [dist.isend(numbers(rank, 3, stream=f"tag {tag}"), dst=neighbour, tag=tag) for tag in (11, 12)]
        for work in works:
            work.wait()


def past_the_functions(rank: int, rows) -> None:
    """A collective as a method of the group: seen, and not recorded."""
    options = dist.AllreduceOptions()
    rows.allreduce([numbers(rank, 2)], options).wait()


def recorded(rank: int, folder: Path, work, rows, fault=None) -> None:
    recorder = CollectiveRecorder()
    with fault() if fault else contextlib.nullcontext():
        recorder.begin()
        try:
            work(rank, rows)
        finally:
            recorder.end()
    recorder.save(folder / RECORD.format(rank=rank))


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ROWS}
    collective_faults.make_groups(*COLUMNS)
    rows = next(group for ranks, group in groups.items() if rank in ranks)
    before = {name: vars(dist)[name] for name in ("all_reduce", "batch_isend_irecv")}
    recorded(rank, Path(folder) / "clean", every_kind, rows)
    assert before == {name: vars(dist)[name] for name in before}
    recorded(rank, Path(folder) / "unseen", past_the_functions, rows)
    recorded(rank, Path(folder) / "anyone", from_anyone, rows)
    recorded(rank, Path(folder) / "tags", by_tag, rows)
    recorded(rank, Path(folder) / "stale", from_anyone, rows, collective_faults.stale_message)
    for name in FAULTS:
        recorded(rank, Path(folder) / name, sums_and_gathers, rows, getattr(collective_faults, name))
    dist.barrier()
    dist.destroy_process_group()
