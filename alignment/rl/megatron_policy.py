"""The policy on megatron-core, as a run's configuration describes it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from alignment.backends import megatron_dist_checkpoint
from alignment.backends.megatron_model import BuildSettings, Recompute
from alignment.backends.megatron_training import MegatronSettings, MegatronTrainingEngine, TokenOutputs
from alignment.backends.training import OptimizerConfig, Outputs
from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.rl.config import MegatronConfig, RunConfig
from alignment.rl.log_prob import log_probs_and_entropy
from alignment.rl.mock_rollout import hash_checkpoint
from alignment.weights.megatron_layout import ParallelSizes


def megatron_policy(
    config: RunConfig,
    checkpoint: Path,
    *,
    optimizer: OptimizerConfig | None,
    dtype: torch.dtype,
    device: Device,
    outputs: TokenOutputs | None = None,
) -> MegatronTrainingEngine:
    """The policy (or, without ``optimizer``, the reference) from ``checkpoint``; ranks are those of the process group.

    ``outputs`` is what logits and next tokens give, log-probs and entropies by default.

    Raises:
        UnavailableError: megatron-core is not installed.
        InputError: sizes that do not fit the model or the number of ranks, or fused log-probs.
    """
    policy = config.actor_rollout_ref
    if policy.model.use_fused_kernels:
        raise InputError(
            "fused log-probs need the whole vocabulary on one rank, which megatron-core's output layer does not hold",
            where="actor_rollout_ref.model.use_fused_kernels",
            expected="False with engine.train=megatron",
            found=True,
            next_step="set it to False: the vocabulary is split by tensor_model_parallel_size instead",
        )
    return MegatronTrainingEngine.from_checkpoint(
        checkpoint,
        optimizer=optimizer,
        outputs=outputs or partial(token_outputs, temperature=policy.rollout.temperature),
        dtype=dtype,
        device=device,
        settings=dataclasses.replace(
            megatron_settings(policy.actor.megatron, seed=config.trainer.seed),
            dist_checkpoint=_dist_checkpoint(config, Path(checkpoint)),
        ),
    )


def megatron_settings(megatron: MegatronConfig, *, seed: int) -> MegatronSettings:
    """``actor_rollout_ref.actor.megatron`` as the engine takes it."""
    overrides = megatron.override_transformer_config
    return MegatronSettings(
        sizes=ParallelSizes(
            tensor_model_parallel_size=megatron.tensor_model_parallel_size,
            pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
            context_parallel_size=megatron.context_parallel_size,
            expert_model_parallel_size=megatron.expert_model_parallel_size,
            expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
            num_layers_in_first_pipeline_stage=overrides.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=overrides.num_layers_in_last_pipeline_stage,
        ),
        build=BuildSettings(
            recompute=Recompute(
                recompute_granularity=overrides.recompute_granularity,
                recompute_method=overrides.recompute_method,
                recompute_num_layers=overrides.recompute_num_layers,
                recompute_modules=overrides.recompute_modules,
            )
        ),
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
        if megatron.optimizer_cpu_offload
        else {},
        seed=seed,
    )


def _dist_checkpoint(config: RunConfig, checkpoint: Path) -> Path | None:
    """The distributed checkpoint in place of ``checkpoint``: of the policy's own weights and of no other model's.

    Raises:
        InputError: none is named, or it holds the weights of another checkpoint.
    """
    megatron, policy = config.actor_rollout_ref.actor.megatron, Path(config.actor_rollout_ref.model.path)
    if not megatron.use_dist_checkpointing or checkpoint.resolve() != policy.resolve():
        return None
    if not megatron.dist_checkpointing_path:
        raise InputError(
            "no distributed checkpoint is named",
            where="actor_rollout_ref.actor.megatron.dist_checkpointing_path",
            expected="a folder",
            next_step="write one with alignment checkpoint to-dist",
        )
    folder = Path(megatron.dist_checkpointing_path)
    megatron_dist_checkpoint.check_source(folder, hash_checkpoint(policy))
    return folder


def write_dist_checkpoint(checkpoint: Path, directory: Path, *, dtype: torch.dtype, device: Device) -> str:
    """The Hugging Face checkpoint as megatron-core's distributed one, by one rank; gives megatron-core's version.

    Raises:
        UnavailableError: megatron-core is not installed, or does not write them with this torch.
        InputError: the directory is not empty.
    """
    from alignment.backends.megatron_groups import leave_groups

    there = torch.distributed.is_initialized()
    engine = MegatronTrainingEngine.from_checkpoint(
        checkpoint, optimizer=None, outputs=lambda logits, following: {}, dtype=dtype, device=device
    )
    try:
        megatron_dist_checkpoint.write(engine, directory, source=hash_checkpoint(checkpoint))
    finally:
        leave_groups()
        if not there:
            # Later engines of this process would take the group of one for theirs.
            torch.distributed.destroy_process_group()
    return engine.version


def token_outputs(logits: Tensor, following: Tensor, *, temperature: float) -> Outputs:
    """``log_probs`` and ``entropy`` [b, s] of the tokens ``following`` [b, s] under ``logits`` [b, s, v]."""
    log_probs, entropy = log_probs_and_entropy(logits, following, temperature=temperature)
    return {"log_probs": log_probs, "entropy": entropy}
