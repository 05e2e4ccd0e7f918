"""The configuration of a training run, in verl's vocabulary and tree, as plain frozen dataclasses.

``TrainConfig.from_dict`` builds and checks one from nested dictionaries and needs nothing but the standard library;
:func:`load_config` reads YAML files or presets and dotted overrides (``actor_rollout_ref.actor.clip_ratio_high=0.28``).

Where names or meanings differ from verl's:

* ``null`` in a field documented as *inherits* is replaced when the configuration is built, as verl's ``oc.select``
  does.
* ``engine.train`` / ``engine.rollout`` and verl's ``actor.strategy`` / ``rollout.name`` are two names of one choice.
* ``rollout.skip.{enable,dump_dir}`` are verl's ``skip_rollout`` and ``skip_dump_dir``.
* ``reward_model.overlong_buffer`` is verl's ``reward_model.reward_kwargs.overlong_buffer_cfg``; its ``max_resp_len`` is
  ``data.max_response_length``.
* ``algorithm.filter_groups.{mode,reserve_size}``, ``trainer.{colocate,deterministic,seed,curve_gate}``, ``data.seed``
  and ``model.dtype`` are ours.
* ``ppo_mini_batch_size`` counts prompts, as in verl: a mini batch holds ``ppo_mini_batch_size · rollout.n`` samples
  over all data parallel ranks. ``*_per_gpu`` counts samples (or tokens) of one rank.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union

from alignment.errors import InputError, UnavailableError
from alignment.files import parse_yaml

if TYPE_CHECKING:
    from typing_extensions import Self

C = TypeVar("C", bound="RunConfig")
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts. Sizes are in prompts, lengths in tokens.

    Attributes:
        train_files: parquet files in verl's format, or JSON files of materialised prompts.
        prompt_key: column of the parquet files that holds the messages.
        reward_fn_key: column of the data source, for verl; the pipelines here read ``data_source``.
        max_prompt_length: longest prompt; prompts are padded to it on the left.
        max_response_length: most tokens that are generated for a prompt.
        train_batch_size: prompts of one training step.
        gen_batch_size: prompts of one generation round when dynamic sampling is on (inherits ``train_batch_size``).
        shuffle: draw the order of the prompts anew in every epoch.
        seed: of that order.
    """

    train_files: tuple[str, ...] = ()
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 1024
    gen_batch_size: int | None = None
    shuffle: bool = True
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy's checkpoint and how it is computed.

    Attributes:
        path: a Hugging Face checkpoint directory.
        dtype: of the trained weights and their compute.
        use_fused_kernels: log-probs without ever holding the logits (:mod:`alignment.rl.fused_head`).
        lora_rank: of an adapter that is trained instead of the weights (:mod:`alignment.rl.lora`); 0 for none.
        lora_alpha: the product of the adapter's factors is multiplied by ``lora_alpha / lora_rank``.
        target_modules: names of the linear layers that get an adapter; ``all-linear`` takes all.
    """

    path: str = ""
    dtype: Dtype = "float32"
    use_fused_kernels: bool = False
    lora_rank: int = 0
    lora_alpha: float = 16.0
    target_modules: tuple[str, ...] = ("all-linear",)


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """AdamW: a linear warm-up, then constant, or a cosine to ``min_lr_ratio · lr``.

    Attributes:
        lr: highest learning rate.
        lr_warmup_steps: updates of the linear warm-up.
        lr_scheduler_type: what follows the warm-up.
        min_lr_ratio: where the cosine ends, as a share of ``lr``.
        weight_decay: decoupled decay of all weights.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
    """

    lr: float = 1e-6
    lr_warmup_steps: int = 0
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class TransformerOverrides:
    """Settings of megatron-core's ``TransformerConfig`` that are no sizes: uneven stages and recomputation.

    Attributes:
        num_layers_in_first_pipeline_stage: layers of the first stage; the others share the rest evenly.
        num_layers_in_last_pipeline_stage: layers of the last stage.
        recompute_granularity: recompute whole layers (``full``) or parts of them (``selective``); ``null`` nothing.
        recompute_method: how ``full`` chooses layers.
        recompute_num_layers: how many layers ``full`` takes, or groups.
        recompute_modules: parts that ``selective`` recomputes.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """How ``engine.train=megatron`` spreads the policy over the ranks; ignored by other engines.

    Every rank has rows of its own, also where several hold one model: they exchange their rows and compute them together.

    Attributes:
        tensor_model_parallel_size: ranks that split each weight matrix; above 1 with sequence parallelism.
        pipeline_model_parallel_size: stages of layers.
        virtual_pipeline_model_parallel_size: pieces of each stage, interleaved; ``null`` is one.
        context_parallel_size: ranks that split each sequence.
        expert_model_parallel_size: ranks that share the routed experts out.
        expert_tensor_parallel_size: ranks that split each expert (inherits ``tensor_model_parallel_size``).
        use_distributed_optimizer: shard moments and main weights over the data parallel ranks.
        optimizer_cpu_offload: keep the optimizer's state on the host.
        override_transformer_config: further settings of the model.
        use_dist_checkpointing: take the first weights from ``dist_checkpointing_path`` instead of converting those of
            ``model.path`` on the way in.
        dist_checkpointing_path: a distributed checkpoint, made offline by ``alignment checkpoint to-dist``.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    use_distributed_optimizer: bool = True
    optimizer_cpu_offload: bool = False
    override_transformer_config: TransformerOverrides = field(default_factory=TransformerOverrides)
    use_dist_checkpointing: bool = False
    dist_checkpointing_path: str = ""


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """How ``engine.train=fsdp`` shards the policy over the ranks; ignored by other engines.

    Attributes:
        model: what is sharded: ``transformers`` (what people train) or the ``golden`` model.
        reshard_after_forward: free gathered parameters between the passes.
        activation_checkpointing: keep the inputs of each layer only.
        attn_implementation: of the transformers model.
        experts_implementation: of the transformers model.
    """

    model: Literal["transformers", "golden"] = "transformers"
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    attn_implementation: str = "eager"
    experts_implementation: str = "eager"


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy update.

    Attributes:
        strategy: verl's name for ``engine.train``, which it inherits.
        clip_ratio: half width of the band in which the probability ratio counts.
        clip_ratio_low: how far below 1 the ratio may fall (inherits ``clip_ratio``).
        clip_ratio_high: how far above 1 it may rise (inherits ``clip_ratio``).
        clip_ratio_c: bound of the ratio for negative advantages (dual clip).
        loss_agg_mode: how the losses of tokens become one number.
        loss_scale_factor: divides in ``seq-mean-token-sum-norm`` (inherits ``data.max_response_length``).
        use_kl_loss: add the KL divergence from the reference policy to the loss.
        kl_loss_type: its estimator.
        kl_loss_coef: its weight.
        entropy_coeff: weight of the entropy that is subtracted from the loss.
        ppo_mini_batch_size: prompts of one optimizer step, over all data parallel ranks.
        ppo_micro_batch_size_per_gpu: samples of a micro batch where ``use_dynamic_bsz`` is off; ``null`` takes a rank's
            share of the mini batch at once.
        use_dynamic_bsz: fill micro batches by tokens instead of samples.
        ppo_max_token_len_per_gpu: their token budget.
        ppo_epochs: passes over the samples of a step.
        shuffle: draw the order of the mini batches.
        grad_clip: largest norm of the gradient; 0 switches clipping off.
        optim: the optimizer.
        megatron: settings of that engine.
        fsdp_config: settings of that engine.
    """

    strategy: str | None = None
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: int | None = None
    use_kl_loss: bool = False
    kl_loss_type: KlType = "low_var_kl"
    kl_loss_coef: float = 0.001
    entropy_coeff: float = 0.0
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    ppo_epochs: int = 1
    shuffle: bool = False
    grad_clip: float = 1.0
    optim: OptimSettings = field(default_factory=OptimSettings)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass(frozen=True, kw_only=True)
class SkipConfig:
    """Mock rollout: the first run records its responses, later runs load them.

    Attributes:
        enable: record, or replay where a recording is.
        dump_dir: where recordings are; relative to the run's directory.
    """

    enable: bool = False
    dump_dir: str = "rollout_dump"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation, and the log-probs of the behaviour policy.

    What concerns the log-probs inherits the actor's, so that training and inference batch by one convention.

    Attributes:
        name: verl's name for ``engine.rollout``, which it inherits.
        n: samples of each prompt.
        temperature: divides the logits, in sampling and in the log-probs.
        top_p: smallest share of probability that is sampled from; 1 keeps all tokens.
        top_k: most tokens that are sampled from; −1 keeps all.
        load_format: how the engine gets its first weights: ``dummy`` (the trainer's overwrite them before the first
            rollout) or ``safetensors``.
        free_cache_engine: the engine sleeps between rollouts.
        calculate_log_probs: keep the engine's log-probs of what it generated (``rollout_log_probs``).
        dtype: of the engine's weights (inherits ``model.dtype``).
        log_prob_micro_batch_size_per_gpu: samples at once (inherits ``actor.ppo_micro_batch_size_per_gpu``).
        log_prob_use_dynamic_bsz: batch by tokens (inherits ``actor.use_dynamic_bsz``).
        log_prob_max_token_len_per_gpu: tokens at once (inherits ``actor.ppo_max_token_len_per_gpu``).
        skip: mock rollout.
    """

    name: str | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    load_format: Literal["dummy", "safetensors"] = "dummy"
    free_cache_engine: bool = True
    calculate_log_probs: bool = True
    dtype: Dtype | None = None
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool | None = None
    log_prob_max_token_len_per_gpu: int | None = None
    skip: SkipConfig = field(default_factory=SkipConfig)


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The frozen reference policy.

    Attributes:
        dtype: of its weights (inherits ``model.dtype``).
        log_prob_micro_batch_size_per_gpu: samples at once (inherits ``actor.ppo_micro_batch_size_per_gpu``).
        log_prob_use_dynamic_bsz: batch by tokens (inherits ``actor.use_dynamic_bsz``).
        log_prob_max_token_len_per_gpu: tokens at once (inherits ``actor.ppo_max_token_len_per_gpu``).
    """

    dtype: Dtype | None = None
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool | None = None
    log_prob_max_token_len_per_gpu: int | None = None


@dataclass(frozen=True, kw_only=True)
class ActorRolloutRefConfig:
    """Everything that starts from the policy's checkpoint.

    Attributes:
        model: the policy.
        actor: its update.
        rollout: its inference engine.
        ref: the reference policy.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model, used by ``adv_estimator=gae`` only. Fields that are ``null`` inherit the actor's.

    Attributes:
        optim: the optimizer.
        cliprange_value: how far a value may move from the one before the update.
        loss_agg_mode: how the losses of tokens become one number (inherits ``actor.loss_agg_mode``).
        ppo_mini_batch_size: prompts of one optimizer step (inherits ``actor.ppo_mini_batch_size``).
        ppo_micro_batch_size_per_gpu: samples of a micro batch (inherits ``actor.ppo_micro_batch_size_per_gpu``).
        use_dynamic_bsz: batch by tokens (inherits ``actor.use_dynamic_bsz``).
        ppo_max_token_len_per_gpu: token budget of a micro batch (inherits ``actor.ppo_max_token_len_per_gpu``).
        ppo_epochs: passes over the samples of a step (inherits ``actor.ppo_epochs``).
        shuffle: draw the order of the mini batches (inherits ``actor.shuffle``).
        grad_clip: largest norm of the gradient; 0 switches clipping off.
    """

    optim: OptimSettings = field(default_factory=lambda: OptimSettings(lr=1e-5))
    cliprange_value: float = 0.5
    loss_agg_mode: LossAggMode | None = None
    ppo_mini_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: int | None = None
    ppo_epochs: int | None = None
    shuffle: bool | None = None
    grad_clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class KlControlConfig:
    """Coefficient of the KL penalty in the reward.

    Attributes:
        type: ``adaptive`` steers the coefficient to ``target_kl``.
        kl_coef: the coefficient, or where it starts.
        horizon: samples over which it is steered.
        target_kl: divergence that is steered to, in nats.
    """

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling: groups whose ``metric`` is the same for all n samples are not trained on.

    Groups that do not qualify fill a batch that is still too small, and are reported (verl stops with an error).

    Attributes:
        enable: switch it on.
        metric: what has to differ within a group.
        max_num_gen_batches: most rounds of ``mode=regenerate``; 0 is no limit.
        mode: ``regenerate`` draws further prompts until ``train_batch_size`` groups qualify; which prompts are consumed
            then depends on the device. ``reserve`` gives every step its own spare prompts, so that all devices see the
            same prompts at every step.
        reserve_size: spare prompts of a step in ``mode=reserve``.
    """

    enable: bool = False
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = "acc"
    max_num_gen_batches: int = 10
    mode: Literal["regenerate", "reserve"] = "regenerate"
    reserve_size: int = 0


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages. DAPO is ``grpo`` with clip-higher, token-mean, filtering and overlong shaping.

    Attributes:
        adv_estimator: the estimator; ``gae`` trains a value model.
        gamma: discount of later rewards (``gae``).
        lam: weight of longer returns (``gae``).
        norm_adv_by_std_in_grpo: divide by the standard deviation of the group.
        use_kl_in_reward: subtract a KL penalty from the reward of every token.
        kl_penalty: its estimator.
        kl_ctrl: its coefficient.
        filter_groups: dynamic sampling.
    """

    adv_estimator: Literal["grpo", "gae", "rloo"] = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: KlType = "kl"
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)


@dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft punishment of responses that come close to the length limit.

    Attributes:
        enable: switch it on.
        len: tokens before the limit over which the punishment grows.
        penalty_factor: the punishment at the limit.
    """

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Scoring.

    Attributes:
        reward_manager: ``dapo`` applies the overlong buffer and reports ``acc``; ``naive`` only scores.
        overlong_buffer: the punishment of long responses.
    """

    reward_manager: Literal["naive", "dapo"] = "naive"
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run. ``n_gpus_per_node · nnodes`` is the number of data parallel ranks.

    Attributes:
        total_training_steps: ``null`` means all steps of ``total_epochs``.
        total_epochs: passes over the prompts.
        save_freq: steps between checkpoints; −1 saves only after the last step, 0 never.
        resume_mode: ``auto`` continues a run that its directory holds, ``resume_path`` the one that is named.
        resume_from_path: checkpoint that ``resume_path`` starts from.
        default_local_dir: where checkpoints go; relative to the run's directory.
        n_gpus_per_node: accelerators of each node (workers, on a machine without accelerators).
        nnodes: nodes.
        device: auto, cpu, cuda, npu or one of them with an index.
        seed: of everything that is drawn, but the order of the prompts.
        deterministic: switch on what makes two runs equal to the bit.
        logger: where metrics go; ``jsonl`` is ``metrics.jsonl``, which is written in any case.
        colocate: trainer and inference engine share the devices in turn.
        balance_batch: share samples out so that all ranks have about as many tokens.
        curve_gate: how the reward curve is compared: ``paired`` needs the same prompts on both devices; ``auto`` is
            paired unless prompts are regenerated.
        record_batches: write the batch of every step (tokens, log-probs, scores, advantages) into the run's directory,
            for comparison stage by stage.
        project_name: a name, kept in ``config.json`` and given to verl.
        experiment_name: a name, kept in ``config.json`` and given to verl.
    """

    total_training_steps: int | None = None
    total_epochs: int = 1
    save_freq: int = -1
    resume_mode: Literal["disable", "auto", "resume_path"] = "auto"
    resume_from_path: str | None = None
    default_local_dir: str = "checkpoints"
    n_gpus_per_node: int = 1
    nnodes: int = 1
    device: str = "auto"
    seed: int = 1
    deterministic: bool = True
    logger: tuple[Literal["console", "jsonl", "tensorboard"], ...] = ("console", "jsonl")
    colocate: bool = True
    balance_batch: bool = False
    curve_gate: Literal["auto", "paired", "unpaired"] = "auto"
    record_batches: bool = False
    project_name: str = "alignment"
    experiment_name: str = "dapo"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Which implementation trains and which one generates; ``golden`` is the plain one of this package.

    Attributes:
        train: ``golden``, ``fsdp`` or ``megatron``.
        rollout: ``golden`` or ``vllm``.
    """

    train: str = "golden"
    rollout: str = "golden"


COLLECTOR_KEY = "ascend_precision_collector"

DEVICE_ONLY_FIELDS = frozenset(
    {
        "trainer.device",
        "trainer.default_local_dir",
        "trainer.resume_mode",
        "trainer.resume_from_path",
        "trainer.save_freq",
        "trainer.logger",
        "trainer.record_batches",
        "trainer.project_name",
        "trainer.experiment_name",
        "actor_rollout_ref.rollout.skip.dump_dir",
        "actor_rollout_ref.model.path",
        "data.train_files",
        COLLECTOR_KEY,
    }
)
"""Fields that say where a run happens and not what it computes: :meth:`TrainConfig.config_hash` leaves them out.

The bytes behind ``model.path`` and ``data.train_files`` have hashes of their own (weights and data) in a baseline.
"""

YOUNGER_FIELDS: Mapping[str, Any] = {
    "actor_rollout_ref.model.use_fused_kernels": False,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16.0,
    "actor_rollout_ref.model.target_modules": ["all-linear"],
    "actor_rollout_ref.actor.megatron.use_dist_checkpointing": False,
    "actor_rollout_ref.actor.megatron.dist_checkpointing_path": "",
}
"""Fields younger than the first stored baselines, with the value under which a run computes what it did before them.

Fingerprints leave them out at that value, so that what was recorded then still answers to the same name.
"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every pipeline's configuration has: after construction no inherited field is ``null``.

    ``presets`` is the folder of those that come with the package.

    Raises:
        InputError: values that do not fit together, naming the field.
    """

    presets: ClassVar[Path] = Path(__file__).parent / "presets"

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ascend_precision_collector: str | None = None
    """The YAML file of the precision collector (:mod:`alignment.capture.collector_config`), or None for none.

    ``None`` and ``null`` as texts, as a command line passes them on, are none too. The key may carry the ``+`` with
    which the collector's documentation adds it to a tree that lacks it.
    """

    def __post_init__(self) -> None:
        if str(self.ascend_precision_collector).strip().lower() in ("none", "null", "~", ""):
            object.__setattr__(self, COLLECTOR_KEY, None)
        for name, value in self._inherited().items():
            object.__setattr__(self, name, value)
        self._validate()

    def _inherited(self) -> dict[str, Any]:
        return inherited_fields(self)

    def _validate(self) -> None:
        validate_run(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From nested dictionaries, as YAML gives them.

        Raises:
            InputError: an unknown key (with the nearest known one), a wrong type, or values that do not fit.
        """
        if f"+{COLLECTOR_KEY}" in data:
            data = {k.removeprefix("+") if k == f"+{COLLECTOR_KEY}" else k: v for k, v in data.items()}
        return _build(cls, data, path="", root=cls)

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries of plain values; ``from_dict`` gives an equal configuration back."""
        return _plain(self)

    def deciding_fields(self) -> dict[str, Any]:
        """Every field, flat, but ``YOUNGER_FIELDS`` at the value that changes nothing: what fingerprints are made of."""
        return {
            k: v for k, v in flatten(self.to_dict()).items() if k not in YOUNGER_FIELDS or v != YOUNGER_FIELDS[k]
        }

    def config_hash(self, *, exclude: Sequence[str] = ()) -> str:
        """SHA-256 over every field that decides what is computed (all but ``DEVICE_ONLY_FIELDS``), in hex.

        ``exclude`` leaves out further fields: runs that differ in ``trainer.seed`` alone repeat one experiment.

        Raises:
            InputError: an excluded field does not exist.
        """
        known = flatten(self.to_dict())
        for name in exclude:
            if name not in known:
                raise _unknown_key(name, set(known))
        fields = {k: v for k, v in self.deciding_fields().items() if k not in DEVICE_ONLY_FIELDS and k not in exclude}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def dp_size(self) -> int:
        """Number of data parallel ranks."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps per pass over the samples of a step: mini batches in the global batch."""
        return self.data.train_batch_size // self.actor_rollout_ref.actor.ppo_mini_batch_size


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The configuration of DAPO, GRPO and PPO. See :class:`RunConfig`."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    def _inherited(self) -> dict[str, Any]:
        common = inherited_fields(self)
        actor = common["actor_rollout_ref"].actor
        names = [f.name for f in dataclasses.fields(CriticConfig) if hasattr(actor, f.name)]
        return {**common, "critic": filled(self.critic, **{name: getattr(actor, name) for name in names})}

    def _validate(self) -> None:
        validate_run(self)
        _validate(self)

    @property
    def use_critic(self) -> bool:
        """Whether the algorithm needs a value model."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def use_reference(self) -> bool:
        """Whether the algorithm needs the reference policy's log-probs."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def curve_gate(self) -> Literal["paired", "unpaired"]:
        """How the reward curve is compared with a baseline's."""
        if self.trainer.curve_gate != "auto":
            return self.trainer.curve_gate
        filtering = self.algorithm.filter_groups
        return "unpaired" if filtering.enable and filtering.mode == "regenerate" else "paired"


def preset_names(kind: type[RunConfig] | None = None) -> tuple[str, ...]:
    """Names of the presets that come with the package for a pipeline, DAPO's by default."""
    return tuple(sorted(p.stem for p in (kind or TrainConfig).presets.glob("*.yaml")))


def load_config(
    source: str | Path | None = None, overrides: Sequence[str] = (), *, kind: type[C] | None = None
) -> C | TrainConfig:
    """A configuration from a YAML file or a preset, changed by dotted overrides.

    Args:
        source: path of a YAML file, name of a preset, or None for the defaults.
        overrides: ``a.b.c=value`` with a YAML value; later ones win. Adding keys (``+new=``) is refused: every key that
            has a meaning is in the tree already.
        kind: which pipeline's configuration; DAPO's by default.

    Raises:
        InputError: unknown preset or key (with the nearest known one), malformed file or override, wrong type.
        UnavailableError: there are overrides or interpolations (``${…}``) and OmegaConf is not installed.
    """
    root = kind or TrainConfig
    tree = _read_yaml(source, root) if source is not None else {}
    interpolates = any(isinstance(v, str) and "${" in v for v in flatten(tree).values())
    return root.from_dict(_override(tree, overrides, root) if overrides or interpolates else tree)


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flatten`: nested dictionaries from dotted keys."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def _read_yaml(source: str | Path, root: type[RunConfig]) -> Mapping[str, Any]:
    import yaml

    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        path, names = root.presets / f"{source}.yaml", preset_names(root)
        if str(source) not in names:
            near = difflib.get_close_matches(str(source), names, n=1)
            raise InputError(
                "there is no such preset",
                where=str(source),
                expected=f"a .yaml file or one of {', '.join(names)}",
                next_step=f"did you mean {near[0]}?" if near else None,
            )
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the configuration cannot be read ({error.strerror})", where=path) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"the configuration is not YAML ({error})", where=path) from None
    if tree is not None and not isinstance(tree, Mapping):
        raise InputError("a configuration is a mapping", where=path, found=type(tree).__name__)
    return tree or {}


def _override(tree: Mapping[str, Any], overrides: Sequence[str], root: type) -> dict[str, Any]:
    import yaml

    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise UnavailableError(
            f"overrides and interpolations need OmegaConf ({error})",
            where=overrides[0] if overrides else "configuration",
            next_step="pip install omegaconf",
        ) from None
    known = set(flatten(_plain_tree(root)))
    merged = OmegaConf.create(dict(tree))
    for text in overrides:
        text = text.removeprefix("+") if text.startswith(f"+{COLLECTOR_KEY}=") else text
        key, equals, _ = text.partition("=")
        if not equals:
            raise InputError("an override is key=value", where=text, expected="a.b.c=value")
        if key[:1] in "+~":
            raise InputError(
                "keys are neither added nor removed: every key that has a meaning is in the tree",
                where=text,
                expected=f"{key.lstrip('+~')}=…",
            )
        if key not in known:
            sections = {k.rpartition(".")[0] for k in known}
            if key in sections:
                raise InputError(
                    "an override sets one value, not a section", where=text, expected=f"{key}.<field>=value"
                )
            raise _unknown_key(key, known)
        try:
            merged.merge_with_dotlist([text])
        except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise InputError(f"the override cannot be read ({str(error).splitlines()[0]})", where=text) from None
    try:
        return OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(
            f"an interpolation cannot be resolved ({str(error).splitlines()[0]})", where="overrides"
        ) from None


def _unknown_key(key: str, known: set[str]) -> InputError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    same_leaf = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    best = difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0) or near
    return InputError("there is no such key", where=key, next_step=f"the nearest known key is {best[0]}")


def _build(cls: type, data: Any, path: str, root: type) -> Any:
    if not isinstance(data, Mapping):
        raise InputError(
            "a section is a mapping", where=path or "configuration", expected="a mapping", found=type(data).__name__
        )
    hints = typing.get_type_hints(cls)
    prefix = f"{path}." if path else ""
    for key in data:
        if key not in hints:
            raise _unknown_key(f"{prefix}{key}", set(flatten(_plain_tree(root))))
    values = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _build(hints[key], value, name, root)
        else:
            values[key] = _typed(hints[key], value, name)
    return cls(**values)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that the field declares, or an error that names the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        inner = next(a for a in arguments if a is not type(None))
        return _typed(inner, value, where)
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        near = difflib.get_close_matches(str(value), arguments, n=1)
        raise InputError(
            "the value is not one of the choices",
            where=where,
            expected=" | ".join(arguments),
            found=repr(value),
            next_step=f"did you mean {near[0]}?" if near else None,
        )
    if origin is tuple:
        many = len(arguments) == 2 and arguments[1] is Ellipsis
        if isinstance(value, str) and many:
            value = [value]
        if not isinstance(value, Sequence) or isinstance(value, str) or not (many or len(value) == len(arguments)):
            size = "a list" if many else f"a list of {len(arguments)}"
            raise InputError("the value has the wrong type", where=where, expected=size, found=repr(value))
        types_ = [arguments[0]] * len(value) if many else arguments
        return tuple(_typed(t, v, f"{where}[{i}]") for i, (t, v) in enumerate(zip(types_, value)))
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-6 (no dot) as text
        try:
            value, number = float(value), True
        except ValueError:
            pass
    if hint is float and number:
        if value != value or value in (float("inf"), float("-inf")):
            raise InputError("the value is not finite", where=where, expected="a number", found=value)
        return float(value)
    if hint is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    kind = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}[hint]
    raise InputError("the value has the wrong type", where=where, expected=kind, found=repr(value))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _plain_tree(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {k: _plain_tree(t) if dataclasses.is_dataclass(t) else None for k, t in hints.items()}


def filled(section: Any, **values: Any) -> Any:
    """`section` with the given values where it has None."""
    return dataclasses.replace(section, **{k: v for k, v in values.items() if getattr(section, k) is None})


def inherited_fields(config: RunConfig) -> dict[str, Any]:
    """The sections every run has, with ``null`` replaced where a field inherits.

    Raises:
        InputError: two names of one choice that differ.
    """
    policy, engine, data = config.actor_rollout_ref, config.engine, config.data
    for key, chosen, name, ours in (
        ("actor.strategy", policy.actor.strategy, "engine.train", engine.train),
        ("rollout.name", policy.rollout.name, "engine.rollout", engine.rollout),
    ):
        if chosen is not None and chosen != ours and ours != "golden":
            raise InputError(
                f"{name} and actor_rollout_ref.{key} name different engines", where=name, expected=chosen, found=ours
            )
    engine = EngineConfig(train=policy.actor.strategy or engine.train, rollout=policy.rollout.name or engine.rollout)
    actor = filled(
        policy.actor,
        strategy=engine.train,
        clip_ratio_low=policy.actor.clip_ratio,
        clip_ratio_high=policy.actor.clip_ratio,
        loss_scale_factor=data.max_response_length,
    )
    batching = {
        "log_prob_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
        "log_prob_use_dynamic_bsz": actor.use_dynamic_bsz,
        "log_prob_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
    }
    policy = dataclasses.replace(
        policy,
        actor=actor,
        rollout=filled(policy.rollout, name=engine.rollout, dtype=policy.model.dtype, **batching),
        ref=filled(policy.ref, dtype=policy.model.dtype, **batching),
    )
    data = filled(data, gen_batch_size=data.train_batch_size)
    return {"actor_rollout_ref": policy, "data": data, "engine": engine}


def positive(section: str, holder: Any, *names: str) -> None:
    """Refuse fields that are not above 0; ``null`` passes."""
    for name in names:
        value = getattr(holder, name)
        if value is not None and value <= 0:
            raise InputError("the value has to be positive", where=f"{section}.{name}", expected="> 0", found=value)


def within(section: str, holder: Any, low: float, high: float, *names: str) -> None:
    """Refuse fields outside low … high."""
    for name in names:
        if not low <= getattr(holder, name) <= high:
            raise InputError(
                "the value is out of range",
                where=f"{section}.{name}",
                expected=f"{low:g} … {high:g}",
                found=getattr(holder, name),
            )


def validate_run(config: RunConfig) -> None:
    """Refuse what no pipeline can work with, naming the field."""
    data, policy, trainer = config.data, config.actor_rollout_ref, config.trainer
    actor, rollout = policy.actor, policy.rollout
    buffer = config.reward_model.overlong_buffer
    positive("data", data, "max_prompt_length", "max_response_length", "train_batch_size", "gen_batch_size")
    positive("trainer", trainer, "n_gpus_per_node", "nnodes", "total_epochs", "total_training_steps")
    positive("actor_rollout_ref.rollout", rollout, "n", "temperature", "top_p")
    _validate_trained(config, "actor_rollout_ref.actor", actor)
    for section, holder in (("actor_rollout_ref.rollout", rollout), ("actor_rollout_ref.ref", policy.ref)):
        positive(section, holder, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
        if holder.log_prob_use_dynamic_bsz:
            _require_room(data, f"{section}.log_prob_max_token_len_per_gpu", holder.log_prob_max_token_len_per_gpu)
    positive("actor_rollout_ref.actor", actor, "loss_scale_factor", "clip_ratio_low", "clip_ratio_high")
    sizes = [f.name for f in dataclasses.fields(actor.megatron) if f.name.endswith("_size")]
    positive("actor_rollout_ref.actor.megatron", actor.megatron, *sizes)
    within("actor_rollout_ref.rollout", rollout, 0.0, 1.0, "top_p")
    if rollout.top_k == 0 or rollout.top_k < -1:
        raise InputError(
            "top_k keeps at least one token",
            where="actor_rollout_ref.rollout.top_k",
            expected="-1 (all) or ≥ 1",
            found=rollout.top_k,
        )
    if actor.clip_ratio_low >= 1.0:
        raise InputError(
            "the lower clip bound 1 − clip_ratio_low has to stay positive",
            where="actor_rollout_ref.actor.clip_ratio_low",
            expected="< 1",
            found=actor.clip_ratio_low,
        )
    if actor.clip_ratio_c <= 1.0:
        raise InputError(
            "dual clip bounds the ratio from above",
            where="actor_rollout_ref.actor.clip_ratio_c",
            expected="> 1",
            found=actor.clip_ratio_c,
        )
    if buffer.enable and not 0 < buffer.len <= data.max_response_length:
        raise InputError(
            "the overlong buffer lies inside the response",
            where="reward_model.overlong_buffer.len",
            expected=f"1 … data.max_response_length = {data.max_response_length}",
            found=buffer.len,
        )
    if buffer.enable and config.reward_model.reward_manager != "dapo":
        raise InputError(
            "only the dapo reward manager applies the overlong buffer",
            where="reward_model.reward_manager",
            expected="dapo",
            found=config.reward_model.reward_manager,
        )
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        raise InputError(
            "resume_mode=resume_path needs a checkpoint", where="trainer.resume_from_path", expected="a directory"
        )
    if trainer.save_freq < -1:
        raise InputError(
            "the value is out of range", where="trainer.save_freq", expected="-1, 0 or more", found=trainer.save_freq
        )


def _validate_adapter(config: TrainConfig) -> None:
    model, where = config.actor_rollout_ref.model, "actor_rollout_ref.model.lora_rank"
    if model.lora_rank < 0 or model.lora_alpha <= 0:
        raise InputError(
            "an adapter has a rank of at least 1 and a positive alpha", where=where,
            found=f"rank {model.lora_rank}, alpha {model.lora_alpha}",
        )  # fmt: skip
    if model.lora_rank and config.engine.train == "megatron":
        raise UnavailableError(
            "the adapter is trained by the golden and the FSDP engine only",
            where=where,
            expected="0, or engine.train=golden or fsdp",
            found=f"{model.lora_rank} with engine.train={config.engine.train}",
        )
    if model.lora_rank and config.use_reference and config.actor_rollout_ref.ref.dtype != model.dtype:
        raise InputError(
            "the reference is the actor without its adapter, and computes as it does",
            where="actor_rollout_ref.ref.dtype",
            expected=f"{model.dtype} with {where.rpartition('.')[2]}={model.lora_rank}",
            found=config.actor_rollout_ref.ref.dtype,
        )


def _validate(config: TrainConfig) -> None:
    """What the algorithms of :class:`TrainConfig` need beyond what every run does."""
    _validate_adapter(config)
    data, rollout, algorithm, trainer = config.data, config.actor_rollout_ref.rollout, config.algorithm, config.trainer
    filtering = algorithm.filter_groups
    _validate_trained(config, "critic", config.critic)
    within("algorithm", algorithm, 0.0, 1.0, "gamma", "lam")
    if algorithm.adv_estimator in ("grpo", "rloo") and rollout.n < 2:
        raise InputError(
            f"{algorithm.adv_estimator} compares the samples of a prompt with each other",
            where="actor_rollout_ref.rollout.n",
            expected="at least 2",
            found=rollout.n,
        )
    if filtering.enable and rollout.n < 2:
        raise InputError(
            "dynamic sampling needs groups", where="actor_rollout_ref.rollout.n", expected="at least 2", found=rollout.n
        )
    if filtering.enable and filtering.mode == "regenerate" and trainer.curve_gate == "paired":
        raise InputError(
            "regenerating prompts makes two devices consume different ones, which the paired gate cannot compare",
            where="trainer.curve_gate",
            expected="unpaired or auto",
            found="paired",
            next_step="set algorithm.filter_groups.mode=reserve, or algorithm.filter_groups.enable=false",
        )
    if filtering.enable and filtering.mode == "reserve":
        positive("algorithm.filter_groups", filtering, "reserve_size")
    if filtering.enable:
        regenerates = filtering.mode == "regenerate"
        prompts = data.gen_batch_size if regenerates else filtering.reserve_size
        if prompts * rollout.n % config.dp_size:
            raise InputError(
                "a generation round is shared out evenly over the data parallel ranks",
                where="data.gen_batch_size" if regenerates else "algorithm.filter_groups.reserve_size",
                expected=f"a number of prompts that, times rollout.n = {rollout.n}, divides by {config.dp_size} ranks",
                found=prompts,
            )
    if filtering.enable and filtering.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        raise InputError(
            "groups are filtered before the KL penalty enters the reward",
            where="algorithm.filter_groups.metric",
            expected="acc, score or seq_reward when algorithm.use_kl_in_reward is on",
            found=filtering.metric,
        )
    if filtering.max_num_gen_batches < 0:
        raise InputError(
            "the number of generation rounds is not negative",
            where="algorithm.filter_groups.max_num_gen_batches",
            expected="0 (no limit) or more",
            found=filtering.max_num_gen_batches,
        )


def _validate_trained(config: RunConfig, section: str, holder: Any) -> None:
    """Sizes and optimizer of something that is trained."""
    positive(section, holder, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs")
    positive(section, holder, "ppo_max_token_len_per_gpu")
    positive(f"{section}.optim", holder.optim, "lr", "eps")
    within(f"{section}.optim", holder.optim, 0.0, 1.0, "min_lr_ratio", "weight_decay")
    if holder.optim.lr_warmup_steps < 0 or holder.grad_clip < 0:
        raise InputError("warm-up and clipping are not negative", where=section)
    if not all(0.0 <= beta < 1.0 for beta in holder.optim.betas):
        raise InputError(
            "the value is out of range",
            where=f"{section}.optim.betas",
            expected="0 ≤ β < 1",
            found=holder.optim.betas,
        )
    _validate_batching(config, section, holder)


def _validate_batching(config: RunConfig, section: str, holder: Any) -> None:
    data, dp_size, n = config.data, config.dp_size, config.actor_rollout_ref.rollout.n
    if data.train_batch_size % holder.ppo_mini_batch_size:
        raise InputError(
            "a step consists of whole mini batches",
            where=f"{section}.ppo_mini_batch_size",
            expected=f"a divisor of data.train_batch_size = {data.train_batch_size}",
            found=holder.ppo_mini_batch_size,
        )
    samples = holder.ppo_mini_batch_size * n
    if samples % dp_size:
        raise InputError(
            "a mini batch is shared out evenly over the data parallel ranks",
            where=f"{section}.ppo_mini_batch_size",
            expected=f"ppo_mini_batch_size · rollout.n divisible by {dp_size} ranks",
            found=f"{holder.ppo_mini_batch_size} · {n} = {samples}",
        )
    micro = holder.ppo_micro_batch_size_per_gpu
    if not holder.use_dynamic_bsz and micro is not None and (samples // dp_size) % micro:
        raise InputError(
            "a rank's share of a mini batch consists of whole micro batches",
            where=f"{section}.ppo_micro_batch_size_per_gpu",
            expected=f"a divisor of {samples // dp_size}",
            found=micro,
        )
    if holder.use_dynamic_bsz:
        _require_room(data, f"{section}.ppo_max_token_len_per_gpu", holder.ppo_max_token_len_per_gpu)


def _require_room(data: DataConfig, where: str, budget: int) -> None:
    longest = data.max_prompt_length + data.max_response_length
    if budget < longest:
        raise InputError(
            "the token budget has to hold the longest sample",
            where=where,
            expected=f"at least data.max_prompt_length + data.max_response_length = {longest}",
            found=budget,
        )
