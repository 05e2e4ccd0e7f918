"""``npu_cross_entropy_loss``."""

from __future__ import annotations

import torch

from torch_npu._operator import operator, unsupported


@operator(differentiable=True)
def npu_cross_entropy_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``torch_npu.npu_cross_entropy_loss(input, target, ...) -> (loss, log_prob, zloss, lse_for_zloss)``.

    ``input`` [n, c], ``target`` int64 [n]. ``loss`` is [n] for ``reduction='none'``, else [1]; ``log_prob`` is
    ``log_softmax(input)``; the last two are empty. Only ``loss`` has a gradient. A negative ``ignore_index`` ignores
    nothing, as documented. Source: op-plugin docs, npu_cross_entropy_loss.
    """
    if lse_square_scale_for_zloss or return_zloss:
        raise unsupported("npu_cross_entropy_loss", "the z-loss")
    if ignore_index < 0 and bool((target < 0).any()):
        raise RuntimeError("npu_cross_entropy_loss: a negative ignore_index ignores nothing, but target has negatives")
    log_prob = torch.log_softmax(input.float(), -1)
    loss = torch.nn.functional.cross_entropy(
        input.float(),
        target,
        None if weight is None else weight.float(),
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    empty = input.new_empty(0)
    shaped = loss if reduction == "none" else loss.reshape(1)
    return shaped.to(input.dtype), log_prob.detach().to(input.dtype), empty, empty
