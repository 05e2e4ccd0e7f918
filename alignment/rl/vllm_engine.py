"""``engine.rollout=vllm``: the rollout engine of a run, from its configuration."""

from __future__ import annotations

from pathlib import Path

from alignment.backends.vllm_rollout import VllmRollout
from alignment.devices.base import Device
from alignment.errors import UnavailableError
from alignment.rl.config import TrainConfig


def vllm_engine(
    config: TrainConfig, checkpoint: Path, *, device: Device, own_process: bool, takes_turns: bool
) -> VllmRollout:
    """vLLM with the run's model, dtype, load format and lengths.

    Args:
        own_process: keep it out of this process, where torch.distributed belongs to the trainer.
        takes_turns: whether something trains in the same worker.

    Raises:
        UnavailableError: the run lets the engine sleep, and its build cannot.
        InputError: a model or a setting that vLLM does not support.
    """
    from alignment.rl.worker import DTYPES

    rollout = config.actor_rollout_ref.rollout
    if device.kind == "cpu" and rollout.free_cache_engine and takes_turns:
        raise UnavailableError(
            "the CPU build of vLLM cannot sleep",
            where="actor_rollout_ref.rollout.free_cache_engine",
            expected="false",
            found="true",
            next_step="set actor_rollout_ref.rollout.free_cache_engine=false",
        )
    return VllmRollout(
        dtype=DTYPES[rollout.dtype],
        device=device,
        load_format=rollout.load_format,
        checkpoint=checkpoint,
        seed=config.trainer.seed,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        own_process=own_process,
    )
