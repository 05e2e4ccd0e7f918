"""The worker: one data parallel rank of one or more roles. Its methods are the stages of a training step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alignment.backends.training import OptimizerConfig, ProcessGroupRanks, SoleRank, UpdateReport
from alignment.devices.base import Device, get_device
from alignment.errors import InputError
from alignment.rl import checkpoint, stages
from alignment.rl.batch import Batch
from alignment.rl.config import ActorConfig, CriticConfig, RunConfig
from alignment.rl.distill_loss import DistillCounts
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_stages import StudentUpdate, TeacherCache, ask_teacher, update_student
from alignment.rl.lora import ActorWithoutAdapter, LoraTrainingEngine, adapter_of
from alignment.rl.observers import ObserverSpec, close_observers, make_observers

TRAIN_ENGINES, ROLLOUT_ENGINES = ("golden", "fsdp", "megatron"), ("golden", "vllm")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Dispatch(Enum):
    """How a group hands a stage to its ranks."""

    SPLIT = "rows are shared out, answers are joined"
    SHARE = "the rows of every mini batch are shared out, answers come by rank"
    EVERY = "every rank gets all arguments, answers come by rank"


def dispatched(how: Dispatch) -> Callable:
    """Marks a method of :class:`Worker` as a stage that groups may call."""

    def mark(method: Callable) -> Callable:
        method.dispatch = how
        return method

    return mark


def dispatch_of(stage: str) -> Dispatch:
    """How ``stage`` is handed out.

    Raises:
        InputError: the worker has no such stage.
    """
    how = getattr(getattr(Worker, stage, None), "dispatch", None)
    if how is None:
        known = sorted(n for n, m in vars(Worker).items() if hasattr(m, "dispatch"))
        raise InputError("the worker has no such stage", where=stage, expected=", ".join(known))
    return how


@dataclass(frozen=True, kw_only=True)
class WorkerSetting:
    """What every worker of a run is built from.

    Attributes:
        config: the whole configuration.
        device: name for :func:`alignment.devices.base.get_device`; a kind with several devices gives each rank its own.
        total_steps: training steps of the whole run, for schedules that end.
        generates: False where every rollout is recorded, so that no inference engine is built.
        weights: another checkpoint for the first weights than ``model.path`` (its tokenizer stays in use), or None.
        observers: who watches the stages of every worker (:mod:`alignment.rl.observers`).
    """

    config: RunConfig
    device: str = "cpu"
    total_steps: int = 0
    generates: bool = True
    weights: str | None = None
    observers: tuple[ObserverSpec, ...] = ()


class Worker:
    """One rank. Roles that share a worker share its device and take turns on it.

    While the rollout generates, everything that trains is offloaded; while something trains, the inference engine
    sleeps at level 2, which destroys its weights. A worker with only one side never switches.

    Args:
        setting: the run.
        roles: of actor, rollout, reference, reward, critic; teacher is a replica that is asked as an inference server.
        rank, world_size: place among the data parallel ranks of the group.
        rendezvous: where rank 0 listens; None for one rank.
    """

    def __init__(
        self, setting: WorkerSetting, *, roles: Sequence[str], rank: int, world_size: int, rendezvous: str | None
    ) -> None:
        self.setting, self.config, self.roles = setting, setting.config, tuple(roles)
        self.rank, self.world_size = rank, world_size
        self._open = contextlib.ExitStack()
        self.device = _device_of_rank(setting.device, rank)
        if self.config.trainer.deterministic:
            from alignment.devices.determinism import deterministic

            self._open.enter_context(deterministic(self.config.trainer.seed, self.device, world_size=world_size))
        self.ranks = SoleRank()
        # A reference that is spread over ranks talks to them too.
        joined = {"actor", "critic"} if self.config.engine.train == "golden" else {"actor", "critic", "reference"}
        if world_size > 1 and joined & set(roles):
            self.ranks = ProcessGroupRanks(
                rank=rank, world_size=world_size, init_method=rendezvous, device_kind=self.device.kind
            )
            self._open.callback(self.ranks.close)
        self._checkpoint = Path(setting.weights or self.config.actor_rollout_ref.model.path)
        self.actor = self._build_actor() if "actor" in roles else None
        self.reference = self._build_reference() if "reference" in roles else None
        self.critic = self._build_critic() if "critic" in roles else None
        self.engine = self._build_rollout() if "rollout" in roles and setting.generates else None
        self.scorer = stages.Scorer(self.config) if "reward" in roles else None
        self.teacher = self._build_teacher() if "actor" in roles and isinstance(self.config, GkdConfig) else None
        self.replica = self._build_replica() if "teacher" in roles else None
        self._teacher_cache = TeacherCache()
        borrowed = isinstance(self.reference, ActorWithoutAdapter)
        self._trains = [e for e in (self.actor, None if borrowed else self.reference, self.critic) if e is not None]
        if self.teacher is not None and not self.config.gkd.offload_teacher_model:
            self._trains += [self.teacher.engine] if self.teacher.engine is not self.actor else []
        self._takes_turns = (
            self.engine is not None and bool(self._trains) and self.config.actor_rollout_ref.rollout.free_cache_engine
        )
        self._training, self._asleep = True, False
        if self._takes_turns:
            self._put_to_sleep()
        self.observers = make_observers(setting.observers, self)

    # --- the stages, in the order of a step ------------------------------------------------------------------------

    @dispatched(Dispatch.SPLIT)
    def rollout(self, batch: Batch) -> Batch:
        """Responses to prompts. Reads the list ``sample_key``, from which the draws of a sample follow."""
        if self.engine is None:
            raise InputError(
                "this generation round is not recorded, and no engine was brought up for the rounds that are",
                where="rollout",
                next_step="remove the record to have it written anew",
            )
        self._turn_to_rollout()
        return stages.generate(self.engine, batch, self.config)

    @dispatched(Dispatch.SPLIT)
    def reward(self, batch: Batch) -> Batch:
        """Scores, placed on the last token of each response."""
        return self.scorer(batch)

    @dispatched(Dispatch.SPLIT)
    def old_log_prob(self, batch: Batch) -> Batch:
        """Log-probs under the policy that is about to be updated."""
        self._turn_to_training()
        outputs = stages.forward(self.actor, batch, stages.rollout_batching(self.config), stage="old_log_prob")
        return batch.add({"old_log_probs": outputs["log_probs"], "entropys": outputs["entropy"]})

    @dispatched(Dispatch.SPLIT)
    def ref_log_prob(self, batch: Batch) -> Batch:
        """Log-probs under the policy the run started from."""
        self._turn_to_training()
        outputs = stages.forward(self.reference, batch, stages.reference_batching(self.config), stage="ref_log_prob")
        return batch.add({"ref_log_prob": outputs["log_probs"]})

    @dispatched(Dispatch.SPLIT)
    def values(self, batch: Batch) -> Batch:
        """The critic's values."""
        self._turn_to_training()
        outputs = stages.forward(self.critic, batch, stages.update_batching(self.config.critic), stage="values")
        return batch.add({"values": outputs["values"]})

    @dispatched(Dispatch.SHARE)
    def update_critic(self, batch: Batch, mini_batches: int, counts: Sequence[Any]) -> list[UpdateReport]:
        """One optimizer step of the critic per mini batch."""
        self._turn_to_training()
        return stages.update(
            self.critic,
            batch.chunk(mini_batches),
            counts,
            stages.update_batching(self.config.critic),
            stage="update_critic",
            loss=partial(stages.critic_loss, self.config),
        )

    @dispatched(Dispatch.SHARE)
    def update_actor(self, batch: Batch, mini_batches: int, counts: Sequence[Any]) -> list[UpdateReport]:
        """One optimizer step of the policy per mini batch."""
        self._turn_to_training()
        return stages.update(
            self.actor,
            batch.chunk(mini_batches),
            counts,
            stages.update_batching(self.config.actor_rollout_ref.actor),
            stage="update_actor",
            loss=partial(stages.actor_loss, self.config),
        )

    # --- the stages of distillation ----------------------------------------------------------------------------------

    @dispatched(Dispatch.SPLIT)
    def teacher_log_prob(self, batch: Batch) -> Batch:
        """What the teacher says about every active token; whole distributions stay here until the update takes them."""
        self._turn_to_training()
        return ask_teacher(self.teacher.score, batch, self.config, self._teacher_cache)

    @dispatched(Dispatch.SHARE)
    def update_student(self, batch: Batch, counts: DistillCounts) -> StudentUpdate:
        """One optimizer step of the student towards the teacher."""
        self._turn_to_training()
        return update_student(self.actor, batch, counts, self.config, self._teacher_cache)

    @dispatched(Dispatch.EVERY)
    def prompt_log_probs(self, sequences: list[list[int]], k: int) -> list:
        """A replica's answer: per sequence the k most likely tokens at every position."""
        return self.replica.prompt_log_probs(sequences, k)

    # --- weights ---------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights as a stream."""
        self._turn_to_training()
        yield from self.actor.export_weights()

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Feeds the inference engine, which is awake afterwards, rounding to the declared rollout dtype."""
        if self._asleep:
            self.engine.wake()
            self._asleep = False
        rollout, model = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.model
        if rollout.dtype != model.dtype:
            held = {name: tensor.dtype for name, tensor in self.engine.named_parameters()}
            stream = ((name, tensor.to(held.get(name, tensor.dtype))) for name, tensor in stream)
        self.engine.update_weights(stream)

    # --- state -----------------------------------------------------------------------------------------------------

    @dispatched(Dispatch.EVERY)
    def save(self, directory: str) -> None:
        """This rank's part of a checkpoint; what is equal on every rank is written by rank 0."""
        root = Path(directory)
        for role in ("actor", "critic"):
            if role in self.roles and (self.rank == 0 or getattr(getattr(self, role), "collective", False)):
                getattr(self, role).save_state(root / role)
        checkpoint.save_rng(root / self._rng_file())

    @dispatched(Dispatch.EVERY)
    def load(self, directory: str) -> None:
        """The inverse of :meth:`save`."""
        root = Path(directory)
        for role in ("actor", "critic"):
            if role in self.roles:
                getattr(self, role).load_state(root / role)
        checkpoint.load_rng(root / self._rng_file())

    @dispatched(Dispatch.EVERY)
    def describe(self) -> dict[str, Any]:
        """What this rank computes on."""
        return {
            "roles": list(self.roles),
            "rank": self.rank,
            "pid": os.getpid(),
            "device": self.device.label,
            "fingerprint": self.device.fingerprint().to_dict(),
        }

    def close(self) -> None:
        """Leaves the process group and gives back what determinism changed."""
        close_observers(self)
        self._open.close()

    # --- taking turns ----------------------------------------------------------------------------------------------

    def _turn_to_rollout(self) -> None:
        if self._takes_turns and self._training:
            for engine in self._trains:
                engine.offload()
            self._training = False

    def _turn_to_training(self) -> None:
        if self._takes_turns and not self._training:
            self._put_to_sleep()
            for engine in self._trains:
                engine.reload()
            self._training = True

    def _put_to_sleep(self) -> None:
        self.engine.sleep(level=2)
        self._asleep = True

    # --- building --------------------------------------------------------------------------------------------------

    def _build_teacher(self):
        from alignment.rl.teacher import worker_teacher

        return worker_teacher(self.config, self.actor, device=self.device)

    def _build_replica(self):
        from alignment.rl.teacher_replicas import replica_of

        replica = replica_of(self.config, device=self.device)
        self._open.callback(getattr(replica, "close", lambda: None))
        return replica

    def _build_actor(self):
        policy = self.config.actor_rollout_ref
        if adapter_of(self.config) and self.config.engine.train == "golden":
            return self._lora_engine(self._optimizer(policy.actor), DTYPES[policy.model.dtype])
        return self._policy_engine(self._optimizer(policy.actor), policy.model.dtype)

    def _build_reference(self):
        if self.actor is not None and adapter_of(self.config):
            return ActorWithoutAdapter(self.actor, stages.outputs_of_policy(self.config))
        return self._policy_engine(None, self.config.actor_rollout_ref.ref.dtype)

    def _policy_engine(self, optimizer: OptimizerConfig | None, dtype: str):
        _require_known("engine.train", self.config.engine.train, TRAIN_ENGINES)
        if self.config.engine.train == "megatron" and isinstance(self.config, GkdConfig):
            from alignment.rl.megatron_distillation import megatron_distillation

            return megatron_distillation(
                self.config, self._checkpoint, optimizer=optimizer, dtype=DTYPES[dtype], device=self.device
            )
        if self.config.engine.train == "megatron":
            from alignment.rl.megatron_policy import megatron_policy

            return megatron_policy(
                self.config, self._checkpoint, optimizer=optimizer, dtype=DTYPES[dtype], device=self.device
            )
        if self.config.engine.train == "fsdp":
            from alignment.rl.fsdp_policy import fsdp_policy

            engine = fsdp_policy(
                self.config, self._checkpoint, optimizer=optimizer, dtype=DTYPES[dtype], device=self.device
            )
            self._open.callback(engine.close)
            return engine
        from alignment.backends.golden_training import GoldenTrainingEngine

        return GoldenTrainingEngine.from_checkpoint(
            self._checkpoint,
            optimizer=optimizer,
            dtype=DTYPES[dtype],
            device=self.device.torch_device,
            outputs=stages.outputs_of_policy(self.config),
            ranks=self.ranks if optimizer else None,
        )

    def _lora_engine(self, optimizer: OptimizerConfig, dtype: torch.dtype):
        return LoraTrainingEngine.from_checkpoint(
            self._checkpoint,
            optimizer=optimizer,
            dtype=dtype,
            device=self.device.torch_device,
            outputs=stages.outputs_of_policy(self.config),
            ranks=self.ranks,
            settings=adapter_of(self.config),
        )

    def _build_critic(self):
        from alignment.rl.critic import critic_engine

        return critic_engine(
            self._checkpoint,
            seed=self.config.trainer.seed,
            optimizer=self._optimizer(self.config.critic),
            dtype=DTYPES[self.config.actor_rollout_ref.model.dtype],
            device=self.device.torch_device,
            ranks=self.ranks,
        )

    def _build_rollout(self):
        _require_known("engine.rollout", self.config.engine.rollout, ROLLOUT_ENGINES)
        if self.config.engine.rollout == "vllm":
            from alignment.rl.vllm_engine import vllm_engine

            trains = bool({"actor", "reference", "critic"} & set(self.roles))
            engine = vllm_engine(
                self.config,
                self._checkpoint,
                device=self.device,
                own_process=trains and (self.world_size > 1 or self.config.engine.train != "golden"),
                takes_turns=trains,
            )
            self._open.callback(engine.close)
            return engine
        from alignment.backends.golden_rollout import GoldenRollout

        rollout = self.config.actor_rollout_ref.rollout
        return GoldenRollout(
            dtype=DTYPES[rollout.dtype],
            device=self.device,
            load_format=rollout.load_format,
            checkpoint=self._checkpoint,
            seed=self.config.trainer.seed,
        )

    def _optimizer(self, settings: ActorConfig | CriticConfig) -> OptimizerConfig:
        optim = settings.optim
        updates_per_step = settings.ppo_epochs * self.config.data.train_batch_size // settings.ppo_mini_batch_size
        return OptimizerConfig(
            lr=optim.lr,
            betas=tuple(optim.betas),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            clip_grad=settings.grad_clip,
            lr_warmup_steps=optim.lr_warmup_steps,
            lr_scheduler_type=optim.lr_scheduler_type,
            min_lr_ratio=optim.min_lr_ratio,
            total_steps=self.setting.total_steps * updates_per_step,
        )

    def _rng_file(self) -> str:
        return f"rng_{self.roles[0]}_{self.rank}.safetensors"


def _require_known(key: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise InputError("there is no such engine in the pipeline", where=key, expected=" | ".join(known), found=name)


def _device_of_rank(name: str, rank: int) -> Device:
    device = get_device(name)
    if ":" in name or device.kind == "cpu":
        return device
    from alignment.devices.base import availability

    return get_device(f"{device.kind}:{rank % availability(device.kind).count}")
