"""A verl configuration from one of this project's: the same run, in verl's own tree, as values for its dotted keys.

Most keys are verl's already; :func:`verl_settings` renames the rest and refuses what verl's trainer would ignore in
silence. Keys verl's configuration does not declare start with ``++``, as Hydra wants it; the others must be declared,
so that a key verl renames is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import parse_yaml
from alignment.rl.config import COLLECTOR_KEY, TrainConfig, flatten

REWARD_FUNCTION = Path(__file__).with_name("verl_reward.py")
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
# verl's own limit on prompts plus answers, in tokens, of which the engine reserves a whole block.
BLOCK = 16

Settings = dict[str, Any]


def verl_settings(config: TrainConfig, *, device: str) -> Settings:
    """The dotted keys of ``config`` for ``python -m verl.trainer.main_ppo``.

    Args:
        config: a configuration of this project, with ``model.path`` and ``data.train_files`` that exist.
        device: ``cpu``, ``cuda`` or ``npu``; the CPU needs settings of its own (:func:`cpu_settings`).

    Raises:
        InputError: something that verl's trainer does not do or would leave out in silence.
    """
    policy, data, algorithm, trainer = config.actor_rollout_ref, config.data, config.algorithm, config.trainer
    actor, rollout, buffer = policy.actor, policy.rollout, config.reward_model.overlong_buffer
    _refuse(config)
    files = [str(Path(name).resolve()) for name in data.train_files]
    dtype = DTYPES[policy.model.dtype]
    mixed_precision = {"param_dtype": dtype, "reduce_dtype": "float32", "buffer_dtype": "float32"}
    micro = actor.ppo_micro_batch_size_per_gpu or actor.ppo_mini_batch_size * rollout.n // config.dp_size
    settings: Settings = {
        # The legacy loop: the one whose batches can be recorded; the other one wants 32 logical CPUs.
        "trainer.use_v1": False,
        "trainer.device": device,
        "trainer.nnodes": trainer.nnodes,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
        "trainer.total_epochs": trainer.total_epochs,
        "trainer.total_training_steps": trainer.total_training_steps,
        "trainer.save_freq": _save_freq(config),
        "trainer.resume_mode": "disable",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.balance_batch": trainer.balance_batch,
        "trainer.project_name": trainer.project_name,
        "trainer.experiment_name": trainer.experiment_name,
        "data.train_files": files,
        "data.val_files": files[:1],
        "data.val_max_samples": 1,
        "data.prompt_key": data.prompt_key,
        "data.reward_fn_key": data.reward_fn_key,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "data.train_batch_size": data.train_batch_size,
        "data.shuffle": data.shuffle,
        "data.seed": data.seed,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "actor_rollout_ref.model.path": str(Path(policy.model.path).resolve()),
        "actor_rollout_ref.actor.strategy": "fsdp2",
        # fsdp_config.dtype, which names the same thing, has no effect in verl 0.9.
        "++actor_rollout_ref.actor.fsdp_config.mixed_precision": mixed_precision,
        "++actor_rollout_ref.ref.fsdp_config.mixed_precision": mixed_precision,
        "actor_rollout_ref.actor.fsdp_config.seed": trainer.seed,
        # The last of them is what everyone but verl can load.
        "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "actor_rollout_ref.actor.clip_ratio_low": actor.clip_ratio_low,
        "actor_rollout_ref.actor.clip_ratio_high": actor.clip_ratio_high,
        "actor_rollout_ref.actor.clip_ratio_c": actor.clip_ratio_c,
        "actor_rollout_ref.actor.loss_agg_mode": actor.loss_agg_mode,
        "actor_rollout_ref.actor.use_kl_loss": actor.use_kl_loss,
        "actor_rollout_ref.actor.kl_loss_type": actor.kl_loss_type,
        "actor_rollout_ref.actor.kl_loss_coef": actor.kl_loss_coef,
        "actor_rollout_ref.actor.entropy_coeff": actor.entropy_coeff,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.actor.use_dynamic_bsz": actor.use_dynamic_bsz,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "actor_rollout_ref.actor.ppo_epochs": actor.ppo_epochs,
        "actor_rollout_ref.actor.shuffle": actor.shuffle,
        "actor_rollout_ref.actor.data_loader_seed": trainer.seed,
        "actor_rollout_ref.actor.grad_clip": actor.grad_clip,
        "actor_rollout_ref.actor.optim.lr": actor.optim.lr,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": actor.optim.lr_warmup_steps,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": actor.optim.lr_scheduler_type,
        "actor_rollout_ref.actor.optim.min_lr_ratio": actor.optim.min_lr_ratio,
        "actor_rollout_ref.actor.optim.weight_decay": actor.optim.weight_decay,
        "actor_rollout_ref.actor.optim.betas": list(actor.optim.betas),
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.dtype": dtype,
        "actor_rollout_ref.rollout.seed": trainer.seed,
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.rollout.temperature": rollout.temperature,
        "actor_rollout_ref.rollout.top_p": rollout.top_p,
        "actor_rollout_ref.rollout.top_k": rollout.top_k,
        "actor_rollout_ref.rollout.load_format": rollout.load_format,
        "actor_rollout_ref.rollout.free_cache_engine": rollout.free_cache_engine,
        "actor_rollout_ref.rollout.calculate_log_probs": rollout.calculate_log_probs,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": rollout.log_prob_micro_batch_size_per_gpu
        or micro,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": rollout.log_prob_use_dynamic_bsz,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": rollout.log_prob_max_token_len_per_gpu,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": policy.ref.log_prob_micro_batch_size_per_gpu
        or micro,
        "algorithm.adv_estimator": algorithm.adv_estimator,
        "algorithm.gamma": algorithm.gamma,
        "algorithm.lam": algorithm.lam,
        "algorithm.norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.kl_penalty": algorithm.kl_penalty,
        "algorithm.kl_ctrl.type": algorithm.kl_ctrl.type,
        "algorithm.kl_ctrl.kl_coef": algorithm.kl_ctrl.kl_coef,
        "algorithm.kl_ctrl.horizon": algorithm.kl_ctrl.horizon,
        "algorithm.kl_ctrl.target_kl": algorithm.kl_ctrl.target_kl,
        "reward.reward_manager.name": config.reward_model.reward_manager,
        "reward.custom_reward_function.path": str(REWARD_FUNCTION),
        "reward.custom_reward_function.name": "compute_score",
    }
    if actor.loss_agg_mode == "seq-mean-token-sum-norm":
        settings["actor_rollout_ref.actor.loss_scale_factor"] = actor.loss_scale_factor
    if buffer.enable:
        kwargs = "++reward.reward_kwargs"
        settings |= {
            f"{kwargs}.overlong_buffer_cfg.enable": True,
            f"{kwargs}.overlong_buffer_cfg.len": buffer.len,
            f"{kwargs}.overlong_buffer_cfg.penalty_factor": buffer.penalty_factor,
            f"{kwargs}.overlong_buffer_cfg.log": True,
            f"{kwargs}.max_resp_len": data.max_response_length,
        }
    return settings | (cpu_settings(config) if device == "cpu" else {})


def cpu_settings(config: TrainConfig | None = None) -> Settings:
    """What verl's trainer with vLLM needs on a host without an accelerator, for tiny models."""
    settings: Settings = {
        "actor_rollout_ref.model.use_remove_padding": False,
        "++actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "++actor_rollout_ref.rollout.enable_sleep_mode": False,
        "actor_rollout_ref.rollout.enforce_eager": True,
        "actor_rollout_ref.rollout.enable_prefix_caching": False,
        "actor_rollout_ref.rollout.enable_chunked_prefill": False,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        # Far below what the host has: the start-up check of vLLM would ask for most of its memory.
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": 64 << 20,
        # Live defect of vLLM 0.32: see docs/live-defects.md.
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.custom_ops": ["-rotary_embedding"],
        "reward.num_workers": 1,
        "++ray_kwargs.ray_init.num_gpus": 1,
        "ray_kwargs.ray_init.num_cpus": 8,
        "++ray_kwargs.ray_init.include_dashboard": False,
    }
    if config is not None:
        longest = config.data.max_prompt_length + config.data.max_response_length
        length = BLOCK * -(-(longest + 1) // BLOCK)
        sequences = min(config.data.train_batch_size * config.actor_rollout_ref.rollout.n, 256)
        settings |= {
            "++ray_kwargs.ray_init.num_gpus": config.trainer.n_gpus_per_node,
            "actor_rollout_ref.rollout.max_model_len": length,
            "actor_rollout_ref.rollout.max_num_seqs": sequences,
            "actor_rollout_ref.rollout.max_num_batched_tokens": max(length, 16 * length),
        }
    return settings


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings as Hydra's command-line arguments; ``None`` becomes ``null``."""
    return [f"{key}={_hydra(value)}" for key, value in settings.items()]


def merge(settings: Mapping[str, Any], overrides: list[str]) -> list[str]:
    """Arguments of ``settings`` with those left out that an override decides, then the overrides.

    Hydra refuses one key twice when one of them starts with ``+``.

    Raises:
        InputError: an override that is none (``a.b=value``, ``+a.b=value``, ``++a.b=value`` or ``~a.b``).
    """
    for text in overrides:
        if not re.match(r"(\+{0,2}[^=+~\s]+=|~[^=\s]+$)", text):
            raise InputError("an override is key=value", where=text, expected="a.b.c=value, +a.b.c=value or ~a.b.c")
    named = {text.partition("=")[0].lstrip("+~") for text in overrides}

    def decided(key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in named)

    kept = {key: value for key, value in settings.items() if not decided(key.lstrip("+"))}
    undeclared = {key.lstrip("+") for key in settings if key.startswith("++")}
    # A key that verl does not declare has to be added, also where someone only changes the value it has here.
    added = [f"++{text}" if text.partition("=")[0] in undeclared else text for text in overrides]
    return arguments(kept) + added


def refuse_watching(overrides: Sequence[str]) -> None:
    """Refuses overrides that would have this project watch the modules of a run.

    Raises:
        InputError: ``capture.*`` or ``ascend_precision_collector``, which act in this project's own workers alone.
    """
    for text in overrides:
        key = text.partition("=")[0].strip().lstrip("+~")
        if key in ("capture", COLLECTOR_KEY) or key.startswith("capture."):
            raise _unwatched(key)


def _unwatched(key: str) -> InputError:
    return InputError(
        "verl computes in workers of its own, whose modules are not watched from here", where=key,
        expected="no such key with engine=verl",
        next_step="let verl dump with msprobe (global_profiler.tool=precision_debugger) and compare the dumps, "
        "or run without engine=verl",
    )  # fmt: skip


def overlay(settings: Settings, others: Settings) -> Settings:
    """``settings`` changed by ``others``; a key that has to be added stays one, however the other one is written."""
    undeclared = {key.lstrip("+") for key in settings if key.startswith("++")}
    marked = {f"++{key}" if key in undeclared else key: value for key, value in others.items()}
    names = {key.lstrip("+") for key in marked}
    return {key: value for key, value in settings.items() if key.lstrip("+") not in names} | marked


def read_verl_yaml(path: Path) -> Settings:
    """The dotted settings of a YAML file in verl's own tree; one verl does not declare is written ``++a.b.c: value``.

    Raises:
        InputError: the file is missing, or no mapping.
    """
    import yaml

    try:
        tree = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the configuration cannot be read ({error.strerror})", where=path) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"the configuration is not YAML ({error})", where=path) from None
    if not isinstance(tree, Mapping):
        raise InputError("a configuration is a mapping", where=path, found=type(tree).__name__)
    tree = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    return flatten(tree)


def _hydra(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_hydra(v) for v in value)}]"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_hydra(v)}" for k, v in value.items()) + "}"
    return json.dumps(str(value), ensure_ascii=False) if value else "''"


def _save_freq(config: TrainConfig) -> int:
    frequency, steps = config.trainer.save_freq, config.trainer.total_training_steps
    # Ours: −1 saves after the last step, 0 never. verl's: −1 never.
    return (steps or -1) if frequency == -1 else frequency or -1


def _refuse(config: TrainConfig) -> None:
    if config.ascend_precision_collector is not None:
        raise _unwatched(COLLECTOR_KEY)
    if config.algorithm.filter_groups.enable:
        raise InputError(
            "verl's legacy trainer ignores dynamic sampling without a word",
            where="algorithm.filter_groups.enable",
            expected="false with engine=verl",
            found="true",
            next_step="switch it off, or run verl with trainer.use_v1=true from a YAML file of your own",
        )
    if config.use_critic:
        raise InputError(
            "engine=verl translates algorithms without a critic",
            where="algorithm.adv_estimator",
            expected="grpo or rloo",
            found=config.algorithm.adv_estimator,
            next_step="hand over a verl configuration with --config FILE.yaml",
        )
    if config.actor_rollout_ref.model.dtype not in DTYPES:
        raise InputError(
            "verl does not train in this dtype",
            where="actor_rollout_ref.model.dtype",
            expected=" | ".join(DTYPES),
            found=config.actor_rollout_ref.model.dtype,
        )
    if config.actor_rollout_ref.model.lora_rank:
        raise InputError(
            "engine=verl translates runs that train all weights",
            where="actor_rollout_ref.model.lora_rank",
            expected=0,
            found=config.actor_rollout_ref.model.lora_rank,
            next_step="hand over a verl configuration with --config FILE.yaml",
        )
    if not all(name.endswith(".parquet") for name in config.data.train_files):
        raise InputError(
            "verl reads parquet",
            where="data.train_files",
            expected="*.parquet",
            found=", ".join(config.data.train_files),
        )
