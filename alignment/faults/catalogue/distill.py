"""Defects of distillation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from alignment.faults.fault import Fault
from alignment.faults.seam import seam

TEACHER = ("teacher",)
LOSS = "alignment.rl.distill_loss"


@seam(f"{LOSS}:mixture")
def _roles_swapped(original):
    return lambda student_log, teacher_log, beta: original(student_log, teacher_log, 1.0 - beta)


@seam("alignment.rl.vocab_parallel:local_top_k")
def _local_ids(original):
    return lambda logits, k, *, start: original(logits, k, start=0)


@seam(f"{LOSS}:token_divergence")
def _teacher_untempered(original):
    def token_divergence(student_logits, teacher, *, beta, temperature=1.0, **how):
        told = {k: None if v is None else v * temperature for k, v in vars(teacher).items() if k != "topk_indices"}
        untempered = dataclasses.replace(teacher, **told)
        return original(student_logits, untempered, beta=beta, temperature=temperature, **how)

    return token_divergence


@seam("alignment.weights.checkpoint:load_config")
def _students_numbers(original):
    students = {}

    def load_config(directory):
        config = original(directory)
        # what global arguments held when the first model of the run was built
        student = students.setdefault(Path(directory).parent, config)
        return dataclasses.replace(config, rope_theta=student.rope_theta, rms_norm_eps=student.rms_norm_eps)

    return load_config


@seam("alignment.rl.gkd_stages:distill_loss")
def _own_counts(original):
    def distill_loss(config, counts, outputs, micro_batch):
        from alignment.rl import distill_loss as losses

        active = losses.active_positions(micro_batch["labels"])
        dataset = active & (micro_batch["dataset_response"] != 0).unsqueeze(1)
        own = losses.DistillCounts(tokens=int(active.sum()), sft_tokens=int(dataset.sum()))
        return original(config, own, outputs, micro_batch)

    return distill_loss


@seam(f"{LOSS}:kl_divergence")
def _masked_after_the_exponential(original):
    def kl_divergence(p_log, q_log):
        held = (p_log > -1e30).to(p_log)
        return (p_log.exp() * (p_log - q_log) * held).sum(-1)

    return kl_divergence


@seam(f"{LOSS}:kl_divergence")
def _arguments_swapped(original):
    return lambda p_log, q_log: original(q_log, p_log)


@seam("alignment.rl.gkd_data:encode_samples")
def _other_side_cut(original):
    def encode_samples(samples, encoder):
        from alignment.rl import gkd_data

        ours, theirs = original(samples, encoder)
        if theirs is None or encoder.truncation_strategy == "delete":
            return ours, theirs
        other = {"left": "right", "right": "left"}[encoder.truncation_strategy]
        changed = dataclasses.replace(encoder, truncation_strategy=other)
        views = [gkd_data.encode_view(s.teacher_prompt_ids or s.prompt_ids, s, changed) for s in samples]
        return ours, views

    return encode_samples


FAULTS = (
    Fault(
        id="jsd-mixture-weights-swapped",
        title="The mixture gives the student the teacher's weight",
        source="trl #3043",
        category="distill",
        stage=("teacher", "actor_update"),
        culprit="mixture",
        layer="unit-op",
        setting="β ≠ ½",
        why="M = βS + (1 − β)T instead of βT + (1 − β)S",
        apply=_roles_swapped,
    ),
    Fault(
        id="vocab-parallel-topk-local-ids",
        title="Top-k ids of a vocabulary shard lack its offset",
        source="ms-swift e98904c25",
        category="distill",
        stage=TEACHER,
        culprit="vocab_parallel",
        layer="unit-op",
        setting="TP > 1",
        why="the student learns ids of the first shard",
        apply=_local_ids,
    ),
    Fault(
        id="teacher-scored-at-other-temperature",
        title="The teacher is scored at temperature 1 whatever the student's is",
        source="slime 1da1bb19e, verl c165b3da1",
        category="distill",
        stage=TEACHER,
        culprit="temperature",
        layer="unit-op",
        setting="T ≠ 1",
        why="log p_T at 1 against the student at T",
        apply=_teacher_untempered,
    ),
    Fault(
        id="teacher-built-with-student-config",
        title="The teacher is built from the student's configuration",
        source="ms-swift db645d0cb, 4985b908e",
        category="distill",
        stage=TEACHER,
        culprit="config",
        layer="layer-logits",
        setting="a teacher with another rope_theta and norm epsilon",
        why="global arguments still described the student",
        apply=_students_numbers,
    ),
    Fault(
        id="distill-loss-per-micro-batch",
        title="The distillation loss is a mean over each micro batch",
        source="verl 594c51bc0 (#7200)",
        category="distill",
        stage=("teacher", "actor_update"),
        culprit="distill_loss",
        layer="layer-grad",
        setting="more than one micro batch",
        why="K micro batches make it K times too large",
        apply=_own_counts,
    ),
    Fault(
        id="padding-sentinel-overflows-exp",
        title="Masking comes after the exponential",
        source="ms-swift a003a4c64, verl 5cbad8379",
        category="distill",
        stage=("teacher", "advantage"),
        culprit="kl_divergence",
        layer="unit-op",
        setting="open slots of a ragged table",
        why="∞ · 0 is NaN",
        apply=_masked_after_the_exponential,
    ),
    Fault(
        id="kl-div-arguments-swapped",
        title="The arguments of the KL are swapped",
        source="modelscope/twinkle #112",
        category="distill",
        stage=TEACHER,
        culprit="kl_divergence",
        layer="unit-op",
        setting="student and teacher far apart",
        why="KL(q‖p) instead of KL(p‖q)",
        apply=_arguments_swapped,
    ),
    Fault(
        id="student-teacher-truncated-differently",
        title="Teacher and student are cut on different sides",
        source="ms-swift bf2694d9d",
        category="distill",
        stage=TEACHER,
        culprit="encode_samples",
        layer="unit-op",
        setting="samples longer than the limit",
        why="the pair was encoded outside the template's limits",
        apply=_other_side_cut,
    ),
)
