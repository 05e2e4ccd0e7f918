"""The policy on FSDP2, as a run's configuration describes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from alignment.backends.fsdp_training import FsdpSettings, FsdpTrainingEngine
from alignment.backends.training import OptimizerConfig
from alignment.devices.base import Device
from alignment.rl import stages
from alignment.rl.config import TrainConfig
from alignment.rl.fsdp_lora import FsdpLoraEngine
from alignment.rl.lora import adapter_of


def fsdp_policy(
    config: TrainConfig, checkpoint: Path, *, optimizer: OptimizerConfig | None, dtype: torch.dtype, device: Device
) -> FsdpTrainingEngine:
    """The policy (or, without ``optimizer``, the reference) from ``checkpoint``; ranks are those of the process group.

    A policy that is trained by an adapter is the checkpoint and a fresh adapter.

    Raises:
        UnavailableError: transformers is to be trained and is not installed, or FSDP2 does not work here.
        InputError: a model that the engine does not train.
    """
    policy = config.actor_rollout_ref
    adapter = adapter_of(config) if optimizer is not None else None
    return (FsdpLoraEngine if adapter else FsdpTrainingEngine).from_checkpoint(
        checkpoint,
        **({"adapter": adapter} if adapter else {}),
        optimizer=optimizer,
        outputs=stages.outputs_of_policy(config),
        dtype=dtype,
        device=device,
        settings=FsdpSettings(**dataclasses.asdict(policy.actor.fsdp_config)),
    )
