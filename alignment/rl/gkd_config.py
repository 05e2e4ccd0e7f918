"""The configuration of a distillation run: what every run has, and the section ``gkd`` in ms-swift's names.

Two vocabularies meet here. What DAPO has too keeps verl's names (``data.train_batch_size``,
``actor_rollout_ref.rollout.temperature``, ``actor_rollout_ref.actor.optim.lr``, …); what only distillation has keeps
those of ms-swift's GKD (``gkd.lmbda``, ``gkd.steps_per_generation``, ``gkd.gkd_logits_topk``, …):

========================== ============================================================
ms-swift                   here
========================== ============================================================
``global_batch_size``      ``data.train_batch_size`` (samples of one training step)
``max_completion_length``  ``data.max_response_length``
``teacher.gpus``           ``gkd.teacher_replicas``
``micro_batch_size``       ``gkd.micro_batch_size`` (fills ``actor.ppo_micro_batch_size_per_gpu``)
``tuner_type lora``        ``gkd.lora.rank`` above 0
========================== ============================================================
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal

from alignment.errors import InputError, UnavailableError
from alignment.rl.config import Dtype, RunConfig, filled, inherited_fields, positive, validate_run, within
from alignment.rl.multi_turn import SCHEDULERS, require_scheduler


class TeacherKind(str, Enum):
    """Where the teacher's distributions come from."""

    COLOCATED = "colocated"
    REPLICAS = "replicas"
    ADAPTER_DISABLED = "adapter_disabled"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """An adapter on the student (:mod:`alignment.rl.lora`).

    Attributes:
        rank: of the two factors; 0 trains all weights instead.
        alpha: the product of the factors is multiplied by ``alpha / rank``.
        target_modules: names of the linear layers that get one; ``all-linear`` takes all.
    """

    rank: int = 0
    alpha: float = 16.0
    target_modules: tuple[str, ...] = ("all-linear",)


@dataclass(frozen=True, kw_only=True)
class GkdSettings:
    """Generalised knowledge distillation.

    Attributes:
        lmbda: share of generations that are on-policy (the student generates); the others take dataset responses.
        beta: interpolation of the divergence: 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher).
        temperature: divides both sides' logits in the loss (inherits ``rollout.temperature``).
        sft_alpha: weight of the cross-entropy on dataset responses; 0 leaves it out.
        gkd_logits_topk: only the teacher's k most likely tokens; ``null`` is the whole vocabulary.
        teacher_model: checkpoint of the teacher.
        teacher_model_server: address of a server; refused, as in the source.
        teacher_replicas: inference actors that hold the teacher; 0 keeps it on the workers.
        teacher_engine: what a replica runs.
        teacher_dtype: of the teacher's weights (inherits ``model.dtype``).
        offload_teacher_model: the teacher leaves the device while it is not asked.
        steps_per_generation: training steps that one generation feeds.
        num_generations: read and ignored: distillation has exactly one completion per prompt.
        micro_batch_size: samples of a micro batch (inherits ``actor.ppo_micro_batch_size_per_gpu``; all at once where
            that is ``null`` too).
        max_length: tokens of a sample before its completion (inherits ``data.max_prompt_length``). While a training
            batch is encoded it is extended by ``data.max_response_length``.
        truncation_strategy: what happens to longer ones: ``delete`` draws others in their place, ``left`` and ``right``
            cut.
        max_resample_times: rounds of drawing.
        multi_turn_scheduler: name of a scheduler (:mod:`alignment.rl.multi_turn`); ``null`` is one turn.
        max_turns: most turns of the student.
        log_completions: write on-policy completions to ``completions.jsonl``.
        seq_kd: refused, as in the source (responses of the teacher are made before training).
        seed: of the on-/off-policy schedule, of the adapter and of the order in which prompts are drawn again.
        chunk_size: tokens whose probabilities exist at once in the loss.
        lora: an adapter on the student.
    """

    lmbda: float = 0.5
    beta: float = 0.5
    temperature: float | None = None
    sft_alpha: float = 0.0
    gkd_logits_topk: int | None = None
    teacher_model: str | None = None
    teacher_model_server: str | None = None
    teacher_replicas: int = 0
    teacher_engine: Literal["golden", "vllm"] = "golden"
    teacher_dtype: Dtype | None = None
    offload_teacher_model: bool = False
    steps_per_generation: int = 1
    num_generations: int = 1
    micro_batch_size: int | None = None
    max_length: int | None = None
    truncation_strategy: Literal["delete", "left", "right"] = "delete"
    max_resample_times: int = 3
    multi_turn_scheduler: str | None = None
    max_turns: int | None = None
    log_completions: bool = False
    seq_kd: bool = False
    seed: int = 42
    chunk_size: int = 512
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class GkdConfig(RunConfig):
    """A whole, checked distillation run. See :class:`~alignment.rl.config.RunConfig`."""

    presets: ClassVar[Path] = RunConfig.presets / "gkd"

    gkd: GkdSettings = field(default_factory=GkdSettings)

    def deciding_fields(self) -> dict[str, Any]:
        """See :meth:`RunConfig.deciding_fields`; the teacher goes by the hash of its weights, not by its path."""
        fields = super().deciding_fields()
        return {k: v for k, v in fields.items() if k not in ("gkd.teacher_model", "gkd.log_completions")}

    @property
    def teacher_kind(self) -> TeacherKind:
        """Replicas where there are any; the adapter disabled where the student has one and is its own teacher."""
        gkd = self.gkd
        if gkd.teacher_replicas:
            return TeacherKind.REPLICAS
        if gkd.lora.rank and gkd.teacher_model in (None, self.actor_rollout_ref.model.path):
            return TeacherKind.ADAPTER_DISABLED
        return TeacherKind.COLOCATED

    @property
    def generation_size(self) -> int:
        """Samples of one generation."""
        return self.data.train_batch_size * self.gkd.steps_per_generation

    @property
    def encoded_length(self) -> int:
        """Most tokens of a sample in a training batch."""
        return self.gkd.max_length + self.data.max_response_length

    @property
    def curve_gate(self) -> Literal["paired"]:
        """The prompts of a step depend on nothing that a device computes."""
        return "paired"

    def _inherited(self) -> dict[str, Any]:
        common = inherited_fields(self)
        policy, data = common["actor_rollout_ref"], common["data"]
        positive(
            "gkd", self.gkd, "steps_per_generation", "num_generations", "micro_batch_size", "max_length", "chunk_size"
        )
        gkd = filled(
            self.gkd,
            temperature=policy.rollout.temperature,
            teacher_dtype=policy.model.dtype,
            micro_batch_size=policy.actor.ppo_micro_batch_size_per_gpu,
            max_length=data.max_prompt_length,
        )
        actor = dataclasses.replace(
            policy.actor, ppo_mini_batch_size=data.train_batch_size, ppo_micro_batch_size_per_gpu=gkd.micro_batch_size
        )
        micro = {"log_prob_micro_batch_size_per_gpu": gkd.micro_batch_size}
        rollout, ref = dataclasses.replace(policy.rollout, n=1, **micro), dataclasses.replace(policy.ref, **micro)
        data = dataclasses.replace(data, gen_batch_size=data.train_batch_size * gkd.steps_per_generation)
        policy = dataclasses.replace(policy, actor=actor, rollout=rollout, ref=ref)
        return {**common, "actor_rollout_ref": policy, "data": data, "gkd": gkd}

    def _validate(self) -> None:
        if self.data.train_batch_size % self.dp_size:
            raise InputError(
                "the batch does not divide between the data parallel ranks",
                where="data.train_batch_size",
                expected=f"a multiple of dp_size = {self.dp_size}",
                found=self.data.train_batch_size,
            )
        validate_run(self)
        _validate_gkd(self)
        _validate_teacher(self)


def _validate_gkd(config: GkdConfig) -> None:
    gkd, actor = config.gkd, config.actor_rollout_ref.actor
    within("gkd", gkd, 0.0, 1.0, "lmbda", "beta")
    positive("gkd", gkd, "temperature", "gkd_logits_topk", "max_turns")
    for name in ("sft_alpha", "max_resample_times", "teacher_replicas"):
        if getattr(gkd, name) < 0:
            raise InputError("the value is not negative", where=f"gkd.{name}", expected="≥ 0", found=getattr(gkd, name))
    if gkd.lora.rank < 0 or gkd.lora.alpha <= 0:
        raise InputError("an adapter has a rank of at least 1 and a positive alpha", where="gkd.lora", found=gkd.lora)
    if gkd.seq_kd:
        raise UnavailableError(
            "sequence-level distillation (responses of the teacher) is not supported",
            where="gkd.seq_kd",
            expected="false",
            next_step="let the teacher answer the prompts once and train with gkd.lmbda=0 on that data",
        )
    if actor.use_dynamic_bsz:
        raise InputError(
            "distillation cuts micro batches by number of samples",
            where="actor_rollout_ref.actor.use_dynamic_bsz",
            expected="false, with gkd.micro_batch_size",
            found="true",
        )
    if actor.ppo_epochs != 1:
        raise InputError(
            "distillation passes over a batch once",
            where="actor_rollout_ref.actor.ppo_epochs",
            expected=1,
            found=actor.ppo_epochs,
        )
    if config.actor_rollout_ref.model.use_fused_kernels:
        raise InputError(
            "the divergence needs logits, which fused kernels do not make",
            where="actor_rollout_ref.model.use_fused_kernels",
            expected="false",
            found="true",
        )
    if config.engine.rollout == "vllm" and gkd.max_length > config.data.max_prompt_length:
        raise InputError(
            "the inference engine is built for prompts of data.max_prompt_length",
            where="gkd.max_length",
            expected=f"at most {config.data.max_prompt_length}",
            found=gkd.max_length,
            next_step="raise data.max_prompt_length",
        )
    if gkd.multi_turn_scheduler is not None:
        require_scheduler(gkd.multi_turn_scheduler, SCHEDULERS)


def _validate_teacher(config: GkdConfig) -> None:
    gkd, actor = config.gkd, config.actor_rollout_ref.actor
    kind, megatron = config.teacher_kind, actor.megatron
    if gkd.teacher_model_server and gkd.teacher_model:
        raise InputError(
            "a teacher model and a teacher server are two teachers",
            where="gkd.teacher_model_server",
            expected="one of gkd.teacher_model and gkd.teacher_model_server",
            found=gkd.teacher_model_server,
        )
    if gkd.teacher_model_server and not gkd.teacher_replicas:
        raise UnavailableError(
            "a teacher server is not supported",
            where="gkd.teacher_model_server",
            expected="null",
            found=gkd.teacher_model_server,
            next_step="set gkd.teacher_model (on the workers), or gkd.teacher_replicas above 0 as well",
        )
    if megatron.virtual_pipeline_model_parallel_size not in (None, 1):
        raise UnavailableError(
            "distillation does not support virtual pipeline stages",
            where="actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
            expected="null or 1",
            found=megatron.virtual_pipeline_model_parallel_size,
        )
    if kind is TeacherKind.REPLICAS:
        if gkd.lmbda < 1.0:
            raise UnavailableError(
                "teacher replicas score what the student generated, so every generation has to be on-policy",
                where="gkd.lmbda",
                expected="1 with gkd.teacher_replicas above 0",
                found=gkd.lmbda,
                next_step="set gkd.lmbda=1, or gkd.teacher_replicas=0 for a teacher on the workers",
            )
        if megatron.context_parallel_size > 1:
            raise InputError(
                "tables from teacher replicas cover whole sequences, which context parallel ranks do not hold",
                where="actor_rollout_ref.actor.megatron.context_parallel_size",
                expected="1 with gkd.teacher_replicas above 0",
                found=megatron.context_parallel_size,
                next_step="set gkd.teacher_replicas=0 for a teacher on the workers",
            )
        if gkd.gkd_logits_topk is None:
            raise InputError(
                "teacher replicas give their most likely tokens only",
                where="gkd.gkd_logits_topk",
                expected="a number with gkd.teacher_replicas above 0",
                found=None,
            )
        if gkd.teacher_model is None:
            raise InputError("the replicas have no model", where="gkd.teacher_model", expected="a checkpoint directory")
    if kind is TeacherKind.COLOCATED and gkd.teacher_model is None:
        raise InputError(
            "there is no teacher",
            where="gkd.teacher_model",
            expected="a checkpoint directory, or gkd.lora.rank above 0 for the student without its adapter",
        )
    if config.actor_rollout_ref.model.lora_rank:
        raise InputError(
            "the student's adapter has settings of its own", where="actor_rollout_ref.model.lora_rank", expected=0,
            found=config.actor_rollout_ref.model.lora_rank, next_step="set gkd.lora.rank",
        )  # fmt: skip
    if gkd.lora.rank and config.engine.train == "megatron":
        raise UnavailableError(
            "the adapter is trained by the golden and the FSDP engine only",
            where="gkd.lora.rank",
            expected="0, or engine.train=golden or fsdp",
            found=f"{gkd.lora.rank} with engine.train={config.engine.train}",
        )
