"""Axis 1: every field of the two resolved configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from alignment.diagnose.axes import AXES, AxisReport, Finding, overrides, report
from alignment.diagnose.axes.megatron_arguments import megatron_arguments
from alignment.diagnose.run_stages import RunData
from alignment.rl.config import DEVICE_ONLY_FIELDS
from alignment.rl.run import FREE_IN_COMPARISON

AXIS = AXES[0]

# What a field can do to a reward curve, by what it is about; the first pattern that fits decides.
_WEIGHTS: tuple[tuple[int, str], ...] = (
    (
        0,
        r"^(trainer\.(project_name|experiment_name|logger|default_local_dir|.*_freq|nnodes|n_gpus_per_node|device)|hydra\.)",
    ),
    (0, r"^(actor_rollout_ref\.model\.(path|tokenizer_path|hf_config_path)|data\.(train|val)_files)$"),
    (0, r"(_dir$|_workers$|_timeout|nccl|profiler|tensorboard|dist_checkpointing_path)"),
    (3, r"(reward|critic|teacher).*path$"),
    (3, r"^(lr|min_lr|lr_\w+|weight_decay|clip_grad|adam_\w+|global_batch_size|seq_length|train_iters)$"),
    (
        3,
        r"(\.optim\.|\.lr$|clip_ratio|grad_clip|loss_agg_mode|loss_scale_factor|kl_|entropy_coeff|adv_estimator|norm_adv)",
    ),
    (3, r"(temperature|top_p|top_k|rollout\.n$|gamma|\.lam$|overlong|penalty_factor|filter_groups|reward_|scor)"),
    (3, r"(train_batch_size|ppo_mini_batch_size|ppo_epochs|max_(prompt|response)_length|total_training_steps)"),
    (
        2,
        r"(dtype|precision|softmax|rope|recompute|dist_checkpoint|load_format|attn_implementation|context_parallel|seed)",
    ),
    (
        2,
        r"(use_fused_kernels|free_cache_engine|enforce_eager|enable_chunked_prefill|prefix_caching|shuffle|deterministic)",
    ),
    (1, r""),
)
_MEANING = {3: "moves the curve", 2: "moves numbers", 1: "may move numbers", 0: "moves nothing"}


def weight_of(field: str) -> int:
    """How much ``field`` can move the curve: 3 what is learnt, 2 how it is computed, 1 perhaps, 0 not."""
    return next(weight for weight, pattern in _WEIGHTS if re.search(pattern, field))


def differences(dut: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields with other values: (of the baseline, of the run under test). A field that one side lacks is None there."""
    keys = sorted(set(dut) | set(baseline))
    return {key: (baseline.get(key), dut.get(key)) for key in keys if baseline.get(key) != dut.get(key)}


def _again(findings: Sequence[Finding], baseline: RunData) -> str:
    changes = overrides(baseline.config, [finding.cause for finding in findings])
    return f"run again with {changes or 'the value of the baseline for each field above'}"


def check(dut: RunData, baseline: RunData) -> AxisReport:
    """Fields that differ, the most powerful first. What only says where and on how many devices is set apart."""
    findings, apart = [], []
    own = [megatron_arguments(run.directory) for run in (dut, baseline)]
    if all(own):
        for name, (theirs, ours) in differences(*own).items():
            weight = weight_of(name)
            if weight == 0:
                apart.append(f"Megatron's {name}: {theirs} → {ours}")
                continue
            evidence = f"{theirs} → {ours} ({_MEANING[weight]})"
            findings.append(Finding(axis=AXIS, cause=f"Megatron's {name}", evidence=evidence, weight=weight))
    if not (dut.config and baseline.config):
        return report(
            AXIS,
            findings,
            compared=f"{len(own[0])} arguments of Megatron agree",
            remarks=[f"device only: {text}" for text in apart],
            unseen="" if all(own) else "a run has no resolved configuration",
        )
    for field, (theirs, ours) in differences(dut.config, baseline.config).items():
        weight = weight_of(field)
        if field in DEVICE_ONLY_FIELDS or field in FREE_IN_COMPARISON - {"trainer.seed"} or weight == 0:
            apart.append(f"{field}: {theirs} → {ours}")
        else:
            findings.append(
                Finding(axis=AXIS, cause=field, evidence=f"{theirs} → {ours} ({_MEANING[weight]})", weight=weight)
            )
    fields = len(set(dut.config) | set(baseline.config))
    return report(
        AXIS,
        findings,
        compared=f"{fields - len(apart)} of {fields} fields agree, the others say where and on how many devices",
        remarks=[f"device only: {text}" for text in apart],
        next_command=_again(sorted(findings, key=lambda finding: -finding.weight), baseline) if findings else "",
    )
