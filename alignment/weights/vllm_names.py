"""Where vLLM keeps the tensors of a Hugging Face checkpoint: fused parameters and how they are cut over ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError

FUSED = {
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's merged linear layers and the ones of the checkpoint they hold, top to bottom."""

_EXPERTS = re.compile(r"(.*mlp\.experts)(?:\.routed_experts)?$")


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor of the checkpoint; ``dim`` is the dimension that ranks cut, if they do."""

    name: str
    tensor: Tensor
    dim: int | None


def unfused(module: str, weight: Tensor, rows: Sequence[int], dim: int | None) -> Iterator[Shard]:
    """The linear layers of the checkpoint in the weight of vLLM's ``module``, whose parts have ``rows`` rows here.

    Raises:
        InputError: the parts do not fill the weight.
    """
    parent, _, last = module.rpartition(".")
    parts = FUSED.get(last)
    if parts is None:
        yield Shard(f"{module}.weight", weight, dim)
        return
    if len(parts) != len(rows) or sum(rows) != weight.shape[0]:
        raise InputError(
            "vLLM's fused layer has other parts than expected",
            where=module,
            expected=f"{' and '.join(parts)}, {weight.shape[0]} rows together",
            found=f"parts of {list(rows)} rows",
        )
    for part, held in zip(parts, weight.split(list(rows))):
        yield Shard(f"{parent}.{part}.weight", held, dim)


def unstacked_experts(
    module: str, w13: Tensor, w2: Tensor, experts: Sequence[int], *, tensor_parallel: bool
) -> Iterator[Shard]:
    """The experts of the checkpoint in vLLM's ``w13 [e, 2i, h]`` and ``w2 [e, h, i]``.

    Args:
        experts: the number of each expert held here.
        tensor_parallel: whether ranks cut every expert (i is a part of its width) instead of sharing out experts.
    """
    prefix = _EXPERTS.match(module)[1]
    half = w13.shape[1] // 2
    for place, expert in enumerate(experts):
        column, row = (0, 1) if tensor_parallel else (None, None)
        yield Shard(f"{prefix}.{expert}.gate_proj.weight", w13[place, :half], column)
        yield Shard(f"{prefix}.{expert}.up_proj.weight", w13[place, half:], column)
        yield Shard(f"{prefix}.{expert}.down_proj.weight", w2[place], row)


def joined(shards: Sequence[Shard]) -> Tensor:
    """The whole tensor from what the ranks hold of it, in the order of the ranks."""
    first = shards[0]
    if first.dim is None or len(shards) == 1:
        return first.tensor
    return torch.cat([shard.tensor for shard in shards], dim=first.dim)
