"""``npu_grouped_matmul``: one matrix product per group, as MoE layers use it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from torch_npu._operator import operator, unsupported

_ACTIVATIONS = {
    0: lambda y: y,
    1: torch.relu,
    2: lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    5: torch.nn.functional.silu,
}


@operator(differentiable=False)
def npu_grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    bias: list[torch.Tensor] | None = None,
    scale: list[torch.Tensor] | None = None,
    offset: list[torch.Tensor] | None = None,
    antiquant_scale: list[torch.Tensor] | None = None,
    antiquant_offset: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None,
    group_list: torch.Tensor | list[int] | None = None,
    activation_input: list[torch.Tensor] | None = None,
    activation_quant_scale: list[torch.Tensor] | None = None,
    activation_quant_offset: list[torch.Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
    tuning_config: list[int] | None = None,
) -> list[torch.Tensor]:
    """``torch_npu.npu_grouped_matmul``: ``y_i = act(x_i @ weight_i + bias_i)``. No gradient of its own.

    ``x`` and ``weight`` are lists. ``weight`` is one [k, n] per group, or a single [g, k, n]. Groups:

    * ``group_list=None`` (``group_type`` None or -1): ``x[i]`` with ``weight[i]``;
    * ``group_type`` 0 or None: the rows of the single ``x`` [m, k] are cut by ``group_list``;
    * ``group_type`` 2: the inner dimension of the single ``x`` [m, k] and ``weight`` [k, n] is cut, giving [g, m, n].

    ``group_list`` holds cumulative ends (``group_list_type`` 0) or sizes (1). ``split_item`` 0 and 1 return one tensor
    per group, 2 and 3 a single one. Rows of ``x`` past the last group are unspecified on hardware; here they are 0.
    Source: op-plugin docs, npu_grouped_matmul. Not emulated: quantised forms, ``group_list_type`` 2, ``act_type`` 3, 4.
    """
    for name, tensors in (("x", x), ("weight", weight)):
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"npu_grouped_matmul: {name} is a list of tensors, not a {type(tensors).__name__}")
    quantised = (scale, offset, antiquant_scale, antiquant_offset, per_token_scale)
    if any(argument is not None for argument in quantised) or not x[0].is_floating_point():
        raise unsupported("npu_grouped_matmul", "a quantised form")
    if act_type not in (None, *_ACTIVATIONS):
        raise unsupported("npu_grouped_matmul", f"act_type {act_type}")
    dtype = output_dtype or x[0].dtype
    activation = _ACTIVATIONS[act_type or 0]

    if group_type == 2:
        return [_inner_groups(x, weight, group_list, group_list_type).to(dtype)]
    rows = _row_groups(x, group_list, group_type, group_list_type)
    matrices = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    if len(matrices) != len(rows):
        raise RuntimeError(f"npu_grouped_matmul: {len(rows)} groups of rows, but {len(matrices)} weight matrices")
    outputs = []
    for index, (group, matrix) in enumerate(zip(rows, matrices, strict=True)):
        y = group.float() @ matrix.float()
        if bias:
            y = y + (bias[index] if len(bias) == len(matrices) else bias[0][index]).float()
        outputs.append(activation(y).to(dtype))
    if split_item not in (2, 3):
        return outputs
    unspecified = sum(tensor.shape[0] for tensor in x) - sum(group.shape[0] for group in rows)
    return [torch.cat([*outputs, outputs[0].new_zeros(unspecified, outputs[0].shape[-1])])]


def _ends(group_list: torch.Tensor | Sequence[int], group_list_type: int | None, extent: int) -> list[int]:
    values = group_list.tolist() if isinstance(group_list, torch.Tensor) else list(group_list)
    if group_list_type == 1:
        ends = torch.tensor(values).cumsum(0).tolist()
    elif group_list_type in (None, 0):
        ends = values
    else:
        raise unsupported("npu_grouped_matmul", f"group_list_type {group_list_type}")
    if any(later < earlier for earlier, later in pairwise([0, *ends])) or (ends and ends[-1] > extent):
        raise RuntimeError(
            f"npu_grouped_matmul: group_list {values} (group_list_type {group_list_type}) does not cut {extent} into "
            "groups"
        )
    return ends


def _row_groups(x, group_list, group_type, group_list_type) -> list[torch.Tensor]:
    if group_list is None:
        if group_type not in (None, -1):
            raise RuntimeError(f"npu_grouped_matmul: group_type {group_type} needs a group_list")
        return list(x)
    if group_type not in (None, 0):
        raise RuntimeError(f"npu_grouped_matmul: group_type is -1, 0 or 2, not {group_type} with a group_list")
    if len(x) > 1:
        return list(x)
    ends = _ends(group_list, group_list_type, x[0].shape[0])
    return [x[0][start:end] for start, end in pairwise([0, *ends])]


def _inner_groups(x, weight, group_list, group_list_type) -> torch.Tensor:
    if group_list is None or len(x) != 1 or len(weight) != 1:
        raise RuntimeError("npu_grouped_matmul: group_type 2 takes one x [m, k], one weight [k, n] and a group_list")
    ends = _ends(group_list, group_list_type, x[0].shape[1])
    left, right = x[0].float(), weight[0].float()
    return torch.stack([left[:, start:end] @ right[start:end] for start, end in pairwise([0, *ends])])
