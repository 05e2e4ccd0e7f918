"""The ranks of an FSDP2 run, and what this release of torch makes of the gradients it sums over them."""

from __future__ import annotations

import datetime
import math

import torch
from torch import nn

from alignment.devices.base import Device
from alignment.errors import UnavailableError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_TIMEOUT = datetime.timedelta(seconds=120)


def gradient_scale(device: Device) -> float:
    """By what the gradients of FSDP2 have to be multiplied to be *sums* over the ranks, found out by trying.

    FSDP2 is meant to give means, for which the answer is the number of ranks. torch 2.7 over gloo gives twice as much
    in some versions; such a constant is corrected. The probe is a linear map whose gradient is known on every rank,
    sharded as models are: a block within a root, with rows for some ranks only.

    Raises:
        UnavailableError: the factor differs between parameters or is no number, so that nothing can be corrected.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world_size, rank = dist.get_world_size(), dist.get_rank()
    probe = nn.Sequential(nn.Linear(3, 2 * world_size + 1, bias=False), nn.Linear(2 * world_size + 1, 1, bias=False))
    probe.to(device.torch_device)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.fill_(1.0)
    mesh = init_device_mesh(device.kind, (world_size,))
    fully_shard(probe[0], mesh=mesh)
    fully_shard(probe, mesh=mesh)
    # Powers of two: every product and sum below is exact.
    probe(torch.full((1, 3), 2.0**rank, device=device.torch_device)).sum().backward()
    total = float(sum(2.0**r for r in range(world_size)))
    expected = (total, 3.0 * total)
    factors = []
    for parameter, sum_over_ranks in zip(probe.parameters(), expected):
        whole = parameter.grad.full_tensor()
        factors += [float(whole.min()) / sum_over_ranks, float(whole.max()) / sum_over_ranks]
    low, high = min(factors), max(factors)
    if not (math.isfinite(low) and low > 0 and high - low <= 4 * torch.finfo(torch.float32).eps * high):
        raise UnavailableError(
            "FSDP2 of this torch sums gradients wrongly",
            where=f"torch {torch.__version__}, {BACKENDS[device.kind]}, {world_size} ranks",
            expected=f"one factor, 1/{world_size}, for every parameter",
            found=f"{low:.6g} to {high:.6g}",
            next_step="use another release of torch, or engine.train=golden",
        )
    # The mean over three ranks is rounded; the number of ranks is not.
    nearest = round(2.0 / high) / 2.0
    return nearest if abs(nearest * high - 1.0) <= 4 * torch.finfo(torch.float32).eps else 1.0 / high


def join_group(device: Device) -> bool:
    """Makes a process group of one rank where there is none; True where it did."""
    import torch.distributed as dist

    if dist.is_initialized():
        return False
    dist.init_process_group(BACKENDS[device.kind], store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    return True
