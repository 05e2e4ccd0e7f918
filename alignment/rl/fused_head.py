"""``model.use_fused_kernels``: log-probs and entropies straight from hidden states, without the logits.

verl's fused kernels replace the output layer and the loss behind it by one operation that never holds ``[b, s, v]``.
Here the output layer is asked for log-probs instead of logits while the model runs
(:func:`alignment.rl.log_prob.linear_log_probs_and_entropy`), so everything around it (FSDP2's gathering, hooks,
recomputation) stays what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from alignment.backends.training import MicroBatch, Outputs
from alignment.errors import InputError
from alignment.rl.log_prob import linear_log_probs_and_entropy, response_logits

_HEAD = "lm_head"


def fused_policy_outputs(
    model: Callable[..., Tensor], micro_batch: MicroBatch, *, temperature: float, chunk_size: int = 1024
) -> Outputs:
    """What :func:`alignment.rl.stages.policy_outputs` gives, with ``chunk_size`` tokens' logits alive at a time.

    Only the positions that predict a response reach the vocabulary at all: b·r of b·s rows. Equal to the plain form up
    to the order in which a matrix product of another shape adds its ``h`` terms.

    Args:
        model: gives logits, and has its output layer as ``lm_head`` (a linear layer without bias).
        micro_batch: as :func:`alignment.rl.stages.policy_outputs` takes it.

    Raises:
        InputError: the output layer is no such layer.
    """
    head = getattr(model, _HEAD, None)
    if head is None or getattr(head, "bias", None) is not None or getattr(head, "weight", None) is None:
        raise InputError(
            "fused log-probs need a plain output layer",
            where="actor_rollout_ref.model.use_fused_kernels",
            expected=f"{_HEAD}: a linear layer without bias",
            found=type(head).__name__ if head is not None else f"no {_HEAD}",
            next_step="set use_fused_kernels=False",
        )
    responses = micro_batch["responses"]

    def forward(hidden: Tensor) -> Tensor:
        predicting = response_logits(hidden, responses.shape[1])
        made = linear_log_probs_and_entropy(
            predicting, head.weight, responses, temperature=temperature, chunk_size=chunk_size
        )
        return torch.stack(made, dim=-1)

    with _answering(head, forward):
        both = model(
            micro_batch["input_ids"],
            attention_mask=micro_batch["attention_mask"],
            position_ids=micro_batch["position_ids"],
        )
    log_probs, entropy = both.unbind(-1)
    return {"log_probs": log_probs, "entropy": entropy}


@contextlib.contextmanager
def _answering(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """``head`` computes ``forward`` meanwhile; its hooks run as always."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
