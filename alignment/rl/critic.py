"""The critic: a value per response token, from the policy's backbone and a scalar head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from alignment.backends.golden_training import GoldenTrainingEngine
from alignment.backends.training import MicroBatch, OptimizerConfig, Outputs
from alignment.models.precision import at_least_float32


def value_outputs(model: nn.Module, micro_batch: MicroBatch) -> Outputs:
    """``values`` [b, r]: the expected return when token i of the response is about to be chosen.

    As for log-probs, that is the model's output one position to the left of the token.
    """
    response_length = micro_batch["responses"].shape[1]
    values = model(
        micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"], position_ids=micro_batch["position_ids"]
    )
    return {"values": values[:, -response_length - 1 : -1].to(at_least_float32(values.dtype))}


def critic_engine(
    directory: Path | str,
    *,
    seed: int,
    optimizer: OptimizerConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    ranks=None,
) -> GoldenTrainingEngine:
    """A critic whose backbone starts as the policy checkpoint in ``directory``; the head is drawn from ``seed``."""
    from alignment.models.value_model import ValueModel
    from alignment.weights.checkpoint import load_model

    policy = load_model(directory, dtype=dtype, device=device)
    model = ValueModel.from_policy(policy, seed=seed)
    return GoldenTrainingEngine(model, optimizer=optimizer, outputs=value_outputs, device=device, ranks=ranks)
