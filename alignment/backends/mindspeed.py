"""MindSpeed in front of megatron-core on an NPU: its adaptor imported first, multi-latent attention switched on."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from alignment.errors import InputError, UnavailableError
from alignment.models.config import ModelConfig
from alignment.weights.megatron_layout import ParallelSizes

ADAPTOR = "mindspeed.megatron_adaptor"


class Arguments(dict):
    """Settings as a mapping and as attributes: releases differ in which of them ``repatch`` takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


def import_first() -> Any:
    """Imports MindSpeed's adaptor, which replaces parts of torch and megatron-core, and returns the module.

    The adaptor reads ``sys.argv`` as its own command line when it is imported, so ours is hidden from it.

    Raises:
        UnavailableError: MindSpeed is not installed.
        InputError: megatron-core was imported before it, so that parts of it would stay as they are.
    """
    if ADAPTOR in sys.modules:
        return sys.modules[ADAPTOR]
    if importlib.util.find_spec("mindspeed") is None:
        raise UnavailableError(
            "megatron-core needs MindSpeed on an NPU, and it is not installed",
            where="engine.train=megatron",
            next_step="install the MindSpeed that belongs to your megatron-core (2.2.0_core_r0.12.1 for 0.12.1)",
        )
    if "megatron.core" in sys.modules:
        raise InputError(
            "megatron-core was imported before MindSpeed's adaptor",
            where=ADAPTOR,
            expected="the adaptor first",
            next_step="build the engine before anything else imports megatron.core",
        )
    arguments = sys.argv[:]
    try:
        sys.argv[:] = arguments[:1]
        return importlib.import_module(ADAPTOR)
    finally:
        sys.argv[:] = arguments


def configure(config: ModelConfig, sizes: ParallelSizes, *, bf16: bool) -> Arguments:
    """Tells MindSpeed what the model and its layout are and has it patch accordingly; returns what it was told.

    ``multi_latent_attention`` is what its MLA feature looks for; the widths and ranks are the ones its attention
    reads. ``use_flash_attn`` selects the fused attention of the NPU.
    """
    told = Arguments(
        multi_latent_attention=True,
        use_flash_attn=True,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        num_attention_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_experts=config.n_routed_experts if config.first_k_dense_replace < config.num_hidden_layers else None,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
        context_parallel_size=sizes.context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor,
        sequence_parallel=sizes.tensor > 1,
        bf16=bf16,
    )
    adaptor = import_first()
    if not hasattr(adaptor, "repatch"):
        raise InputError(
            "this MindSpeed cannot be configured from a program",
            where=ADAPTOR,
            expected="a function repatch",
            next_step="use a MindSpeed release for megatron-core 0.12 or later",
        )
    adaptor.repatch(told)
    return told
