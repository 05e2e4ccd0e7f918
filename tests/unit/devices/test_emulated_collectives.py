"""Collectives, DDP and FSDP2 over two processes, one emulated NPU each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from alignment.devices import emulated_npu

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(not emulated_npu.is_installed(), reason="tests the emulated NPU; run with --emulate-npu"),
]

PREAMBLE = """
import os, sys
from alignment.devices import emulated_npu
assert emulated_npu.install_if_requested()
import torch
import torch.distributed as dist
from torch import nn

rank, world = int(sys.argv[1]), 2
torch.set_num_threads(1)
torch.npu.set_device(rank)
dist.init_process_group({backend!r}, rank=rank, world_size=world)
"""

COLLECTIVES = """
t = torch.full((3,), rank + 1.0, device="npu")
assert t.device.index == rank
address = t.data_ptr()
dist.all_reduce(t)
assert t.tolist() == [3.0] * 3 and t.data_ptr() == address, "in place on the device's bytes"

gathered = [torch.empty(3, device="npu") for _ in range(world)]
dist.all_gather(gathered, torch.full((3,), float(rank), device="npu"))
assert [g[0].item() for g in gathered] == [0.0, 1.0]

flat = torch.empty(6, device="npu")
dist.all_gather_into_tensor(flat, torch.full((3,), float(rank), device="npu"))
assert flat.tolist() == [0.0] * 3 + [1.0] * 3

part = torch.empty(3, device="npu")
dist.reduce_scatter_tensor(part, torch.arange(6.0, device="npu"))
assert part.tolist() == [2.0 * (3 * rank + i) for i in range(3)]

view = torch.full((2, 2), float(rank), device="npu")
dist.broadcast(view[1], 0)
assert view.tolist() == [[rank, rank], [0.0, 0.0]], "a view is written through"

swapped = torch.empty(4, device="npu")
dist.all_to_all_single(swapped, torch.arange(4.0, device="npu") + 10 * rank)
assert swapped.tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]

objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]

if rank == 0:
    dist.send(torch.arange(3.0, device="npu"), 1)
else:
    received = torch.empty(3, device="npu")
    dist.recv(received, 0)
    assert received.tolist() == [0.0, 1.0, 2.0]
dist.barrier()
"""

# The gradient of the mean over both halves of a batch, from the data parallel wrapper and from one process.
PARALLEL = """
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

torch.manual_seed(1)
batch = torch.randn(4, 4)
reference = network()
reference(batch).pow(2).mean().backward()
mine = batch[2 * rank : 2 * rank + 2].npu()
terms = 4 * 8  # products summed into one gradient element

def check(gradient, expected):
    bound = torch.finfo(torch.float32).eps * terms * expected.abs().max()
    assert (gradient.cpu() - expected).abs().max() <= bound, (gradient, expected)

from torch.nn.parallel import DistributedDataParallel
wrapped = DistributedDataParallel(network().npu(), device_ids=[rank])
wrapped(mine).pow(2).mean().backward()
for p, q in zip(wrapped.parameters(), reference.parameters()):
    assert p.grad.device == torch.device("npu", rank)
    check(p.grad, q.grad)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sharded = network().npu()
fully_shard(sharded, mesh=init_device_mesh("npu", (world,)))
sharded(mine).pow(2).mean().backward()
# torch 2.7 with gloo reduces without dividing, on the cpu as well: there the factor is the world size.
old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8)
for p, q in zip(sharded.parameters(), reference.parameters()):
    check(p.grad.full_tensor() / (world if old else 1), q.grad)
optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
optimizer.step()
assert all(p.to_local().device == torch.device("npu", rank) for p in sharded.parameters())
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_two(body: str, backend: str) -> None:
    program = PREAMBLE.format(backend=backend) + body + "\ndist.destroy_process_group()\nprint('done')\n"
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ALIGNMENT_EMULATE_NPU": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0 and out == "done\n", err
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,npu:hccl"])
def test_collectives(backend):
    run_two(COLLECTIVES, backend)


def test_collectives_and_data_parallel_training_over_hccl():
    run_two(COLLECTIVES + PARALLEL, "hccl")


def test_a_failed_expectation_is_seen():
    with pytest.raises(AssertionError, match="sums are 3"):
        run_two("t = torch.ones(1, device='npu'); dist.all_reduce(t); assert t.item() == 3, 'sums are 3'", "hccl")
