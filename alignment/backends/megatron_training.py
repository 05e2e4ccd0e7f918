"""The training engine on megatron-core: the same adapter on CPU, CUDA and NPU, on one rank or many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.backends import megatron_dist_checkpoint, megatron_state
from alignment.backends.golden_training import require_finite
from alignment.backends.megatron_groups import MegatronGroups, context_order, join_groups
from alignment.backends.megatron_model import BuildSettings, build_chunks, engine_scope, installed_version, naming_of
from alignment.backends.training import LossFunction, MicroBatch, OptimizerConfig, Outputs, UpdateReport, Workload
from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.models.config import ModelConfig
from alignment.weights.checkpoint import expected_shapes, iter_tensors, load_config
from alignment.weights.indexed_save import check_index, read_index, save_stream
from alignment.weights.megatron_layout import ParallelSizes, local_parameters, to_hugging_face, to_megatron
from alignment.weights.megatron_names import MegatronParameter, Split, megatron_parameters

TokenOutputs = Callable[[Tensor, Tensor], Outputs]
"""``log_probs`` and ``entropy`` [b, s] of the next tokens [b, s] under logits [b, s, v]."""


@dataclass(frozen=True, kw_only=True)
class MegatronSettings:
    """How the engine trains, in megatron-core's and verl's names.

    Attributes:
        use_distributed_optimizer: share optimizer states over the data parallel ranks.
        grad_reduce_in_fp32: sum gradients over micro batches and ranks in float32.
        optimizer: further fields of megatron-core's ``OptimizerConfig`` (``optimizer_cpu_offload``, …), as verl's
            ``override_optimizer_config``.
        dist_checkpoint: take the first weights from this distributed checkpoint
            (:mod:`alignment.backends.megatron_dist_checkpoint`) and not from the stream.
    """

    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    build: BuildSettings = field(default_factory=BuildSettings)
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = True
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    dist_checkpoint: Path | None = None


class MegatronTrainingEngine:
    """A policy trained by megatron-core. See :class:`~alignment.backends.training.TrainingEngine`.

    To the pipeline every rank is a data parallel rank with rows of its own. Ranks that hold parts of one model exchange
    their rows first and compute all of them together; each answers for its own.

    Args:
        config: of the model.
        weights: its tensors by Hugging Face name, as a stream; every rank reads it. Not read where ``settings`` name a
            distributed checkpoint.
        optimizer: None for a frozen model.
        outputs: what logits and next tokens give.
        device: where the model is.
        settings: sizes and switches.

    Raises:
        UnavailableError: megatron-core is not installed.
        InputError: another release of it, sizes that do not fit the model or the ranks, a setting it does not compute,
            or a tensor that is missing or does not fit.
    """

    collective = True
    """Whether :meth:`export_weights`, :meth:`save_state` and :meth:`load_state` must be called on every rank."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        weights: Iterator[tuple[str, Tensor]],
        optimizer: OptimizerConfig | None,
        outputs: TokenOutputs,
        dtype: torch.dtype,
        device: Device,
        settings: MegatronSettings | None = None,
    ) -> None:
        settings = settings or MegatronSettings()
        if dtype not in (torch.float32, torch.bfloat16):
            raise InputError("megatron-core trains in float32 or bfloat16", where="model.dtype", found=dtype)
        self.version = installed_version()
        settings.sizes.check(config)
        self.config, self.settings, self.optimizer, self.dtype = config, settings, optimizer, dtype
        self.device, self.updates = device, 0
        self._outputs, self._resident = outputs, True
        # False hands ``outputs`` this rank's part of the vocabulary.
        self.gathers_vocabulary = True
        self._naming = naming_of(device, settings.build)
        self._shapes = expected_shapes(config)
        with engine_scope(device):
            self.groups: MegatronGroups = join_groups(settings.sizes, device, seed=settings.seed)
            settings.sizes.check(config, world_size=self.groups.world_size)
            modules = build_chunks(config, settings.sizes, dtype=dtype, device=device, settings=settings.build)
            self.modules: list[torch.nn.Module] = modules
            self._tensors = self._named_tensors(modules)
            if settings.dist_checkpoint is None:
                self._fill(weights)
            else:
                megatron_dist_checkpoint.read(self, settings.dist_checkpoint)
            self.chunks, self._megatron_optimizer = self._trainable(modules)

    @classmethod
    def from_checkpoint(cls, directory: Path | str, **arguments: Any) -> MegatronTrainingEngine:
        """An engine that starts from the Hugging Face checkpoint in ``directory``; other arguments as above."""
        return cls(load_config(directory), weights=iter_tensors(directory), **arguments)

    # --- computing ---------------------------------------------------------------------------------------------------

    def forward(self, micro_batches: Sequence[MicroBatch], *, stage: str) -> list[dict[str, Tensor]]:
        """Outputs of every micro batch without gradients, on the host, in order."""
        self._require_resident(stage)
        with engine_scope(self.device), torch.no_grad():
            for chunk in self.chunks:
                chunk.eval()
            shared, mine, count = self._exchange(micro_batches)
            results = self._run(shared, None, count=count, forward_only=True)
        own = [results[i][0] for i in mine]
        for outputs, micro_batch in zip(own, micro_batches):
            require_finite(outputs, micro_batch, stage=stage)
        return own

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        *,
        stage: str,
        parameter_grad_norms: bool = False,
        observe_gradients: Callable[[Iterator[tuple[str, Tensor]]], None] | None = None,
    ) -> UpdateReport:
        """One optimizer step over one mini batch. See :class:`~alignment.backends.training.TrainingEngine`.

        Args:
            observe_gradients: gets the gradient of every parameter under its Hugging Face name, summed over micro
                batches and ranks, before clipping; it has to read the stream to its end, on every rank.

        Raises:
            InputError: the outputs or the gradient are not finite (the weights are then left as they were).
        """
        self._require_resident(stage)
        if self.optimizer is None:
            raise InputError("a frozen engine has no optimizer", where=stage)
        with engine_scope(self.device):
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self._megatron_optimizer.zero_grad()
            shared, mine, count = self._exchange(micro_batches)
            results = self._run(shared, loss, count=count, forward_only=False)
            totals: dict[str, float] = {}
            for index, micro_batch in zip(mine, micro_batches):
                outputs, metrics = results[index]
                require_finite(outputs, micro_batch, stage=stage)
                for name, metric in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(metric)
            norms: dict[str, float] = {}
            if parameter_grad_norms or observe_gradients:
                megatron_state.complete_gradients(self.chunks, self.settings.use_distributed_optimizer)
                if observe_gradients:
                    observe_gradients(self._gradients())
                if parameter_grad_norms:
                    norms = {name: float(torch.linalg.vector_norm(g.float())) for name, g in self._gradients()}
            grad_norm, learning_rate = self._step(stage)
        sizes = self.settings.sizes
        workload = Workload.of(
            shared,
            passes=count,
            pipeline_stages=sizes.pipeline_model_parallel_size,
            pipeline_chunks=sizes.virtual,
        )
        return UpdateReport(
            metrics=totals,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            parameter_grad_norms=norms,
            workload=workload,
        )

    def _step(self, stage: str) -> tuple[float, float]:
        optimizer = self._megatron_optimizer
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm() or 0.0)
        if not math.isfinite(norm):
            raise InputError("the gradient is not finite", where=stage, expected="finite", found=norm)
        rate = self.optimizer.learning_rate(self.updates)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        self.updates += 1
        return norm, rate

    def _exchange(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[dict[str, Tensor]], range, int]:
        """The micro batches of the replica, which of them are ours, and how many every rank has to run."""
        host = [{name: tensor.cpu() for name, tensor in batch.items()} for batch in micro_batches]
        by_rank = self.groups.share_in_replica(host)
        shared = [batch for batches in by_rank for batch in batches]
        start = sum(len(batches) for batches in by_rank[: self.groups.replica_rank])
        count = self.groups.most(len(shared))
        if self.settings.sizes.virtual > 1:
            stages = self.settings.sizes.pipeline_model_parallel_size
            count = math.ceil(count / stages) * stages
        if not shared:
            raise InputError("there is no micro batch", where="megatron")
        return shared, range(start, start + len(host)), count

    def _run(
        self, shared: Sequence[MicroBatch], loss: LossFunction | None, *, count: int, forward_only: bool
    ) -> list[tuple[dict, dict]]:
        """Outputs (host) and metrics of every micro batch, on every rank of the replica."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # Idle passes repeat the last micro batch, for nothing.
        real, shared = len(shared), [*shared, *[shared[-1]] * (count - len(shared))]
        rows = [_Rows(batch) for batch in shared]
        length = self._length(max(r.longest for r in rows))
        height = max(len(r.lengths) for r in rows)
        context, size = self.groups.context_rank, self.settings.sizes.context_parallel_size
        mine = context_order(length, size).view(size, -1)[context]
        results: list[tuple[dict, dict]] = []
        device = self.device.torch_device

        def forward_step(numbers: Iterator[int], model: Any, *_: Any):
            number = next(numbers)
            tokens, following = rows[number].padded(height, length)
            here = tokens[:, mine].to(device)
            if size == 1:
                # The model is given no mask: this is how a capture knows what is padding.
                here.real_tokens = rows[number].real(height, length)
            positions = mine.expand(height, -1).to(device)
            logits = model(here, positions, None)

            def finish(logits: Tensor, non_loss_data: bool = False):
                logits = self.groups.gather_vocabulary(logits) if self.gathers_vocabulary else logits
                by_token = self._outputs(logits, following[:, mine].to(device))
                outputs = {k: rows[number].responses(self.groups.gather_context(v)) for k, v in by_token.items()}
                metrics: Mapping[str, Any] = {}
                value = torch.zeros((), device=device)
                if loss is not None:
                    on_device = {name: tensor.to(device) for name, tensor in shared[number].items()}
                    value, metrics = loss(outputs, on_device)
                    if number >= real:
                        value = value * 0.0
                results.append(
                    ({k: v.detach().cpu() for k, v in outputs.items()}, {k: float(v) for k, v in metrics.items()})
                )
                # As many "tokens" as is harmless: the loss is a sum already.
                return value, torch.ones((), dtype=torch.int, device=device), {}

            return logits, finish

        chunks = self.chunks
        numbers = [iter(range(len(rows))) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=numbers if len(chunks) > 1 else numbers[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(rows),
            seq_length=length,
            micro_batch_size=height,
            decoder_seq_length=length,
            forward_only=forward_only,
        )
        if self.settings.sizes.pipeline_model_parallel_size > 1:
            results = next(
                r for r in self.groups.share_in_replica(results if self.groups.last_stage else None) if r is not None
            )
        return results

    def _length(self, longest: int) -> int:
        """Tokens per row: ``longest`` rounded up to what tensor and context parallel ranks can share out."""
        sizes = self.settings.sizes
        multiple = sizes.tensor * (2 * sizes.context_parallel_size if sizes.context_parallel_size > 1 else 1)
        return math.ceil(longest / multiple) * multiple

    # --- weights -----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and tensor of every weight, one at a time; every rank gets all and has to read all."""
        self._require_resident("export_weights")
        yield from self._export(lambda local: self._tensors[local.chunk, local.name].detach())

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        def gradient(local: Any) -> Tensor:
            tensor = self._tensors[local.chunk, local.name]
            return tensor.main_grad if hasattr(tensor, "main_grad") else torch.zeros_like(tensor)

        buffers = {p.hf_names[0] for p in self._all() if p.is_buffer}
        yield from ((name, tensor) for name, tensor in self._export(gradient, gradients=True) if name not in buffers)

    def _export(self, held: Callable[[Any], Tensor], *, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
        here = {local.parameter.name: local for local in self._local()}
        dtype = torch.float32 if gradients and self.settings.grad_reduce_in_fp32 else self.dtype

        def fetch(parameter: MegatronParameter) -> list[Tensor]:
            local = here.get(parameter.name)
            with engine_scope(self.device), torch.no_grad():
                return self.groups.parts(
                    parameter,
                    self.config,
                    None if local is None else held(local),
                    shape=self._part_shape(parameter),
                    dtype=torch.float32 if parameter.is_buffer else dtype,
                )

        yield from to_hugging_face(self.config, fetch, self._naming)

    def _part_shape(self, parameter: MegatronParameter) -> tuple[int, ...]:
        shape = list(self._shapes[parameter.hf_names[0]])
        size = self.settings.sizes.tensor if parameter.expert is None else self.settings.sizes.expert_tensor
        if parameter.split is Split.COLUMNS:
            shape[1] //= size
        elif parameter.split is not Split.REPLICATED:
            shape[0] = shape[0] * len(parameter.hf_names) // size
        return tuple(shape)

    def _local(self) -> Iterator[Any]:
        yield from local_parameters(self.config, self.settings.sizes, self.groups.place, self._naming)

    def _all(self) -> Iterator[MegatronParameter]:
        yield from megatron_parameters(self.config, self._naming)

    def _named_tensors(self, modules: Sequence[torch.nn.Module]) -> dict[tuple[int, str], Tensor]:
        """Parameters and buffers of this rank by chunk and name, after making sure that the map knows each of them."""
        found = {
            (chunk, name): tensor
            for chunk, module in enumerate(modules)
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
        }
        expected = {(local.chunk, local.name) for local in self._local()}
        parameters = {(c, name) for c, module in enumerate(modules) for name, _ in module.named_parameters()}
        strange = sorted((parameters - expected) | (expected - found.keys()))
        if strange:
            raise InputError(
                f"the map of names does not fit this model: {strange[0][1]}", where=f"megatron-core {self.version}"
            )
        return {key: found[key] for key in found if key in expected}

    @torch.no_grad()
    def _fill(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for local, tensor in to_megatron(self.config, self.settings.sizes, self.groups.place, weights, self._naming):
            target = self._tensors[local.chunk, local.name]
            if target.shape != tensor.shape:
                vocabulary = local.parameter.stage is not None and local.parameter.split is Split.ROWS
                raise InputError(
                    "the vocabulary of the tensors is not that of the configuration"
                    if vocabulary
                    else "the shape does not fit the configuration",
                    where=local.parameter.hf_names[0],
                    expected=list(target.shape),
                    found=list(tensor.shape),
                )
            target.copy_(tensor)

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def _trainable(self, modules: list[torch.nn.Module]) -> tuple[list[Any], Any]:
        if self.optimizer is None:
            for module in modules:
                module.requires_grad_(False)
            return modules, None
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.settings.grad_reduce_in_fp32,
            use_distributed_optimizer=self.settings.use_distributed_optimizer,
            overlap_grad_reduce=False,
        )
        shared = modules[0].config
        chunks = [
            DistributedDataParallel(config=shared, ddp_config=ddp, module=module, disable_bucketing=index > 0)
            for index, module in enumerate(modules)
        ]
        # The loss is a sum over micro batches and ranks already: nothing is divided by a number of tokens.
        shared.finalize_model_grads_func = lambda model, num_tokens=None, **others: finalize_model_grads(
            model, None, **others
        )
        shared.no_sync_func = None
        optimizer = megatron_state.build_optimizer(
            chunks,
            self.optimizer,
            dtype=self.dtype,
            distributed=self.settings.use_distributed_optimizer,
            overrides=self.settings.optimizer,
        )
        return chunks, optimizer

    # --- state -------------------------------------------------------------------------------------------------------

    def save_state(self, directory: Path) -> None:
        """Weights as a Hugging Face checkpoint (written by rank 0), this rank's optimizer state, and the schedule.

        Called on every rank.
        """
        self._require_resident("save_state")
        megatron_state.save(self, Path(directory))

    def load_state(self, directory: Path) -> None:
        """The inverse of :meth:`save_state`, with the same sizes and number of ranks, on every rank.

        Raises:
            InputError: the state was saved under another layout, or a tensor is missing or does not fit.
        """
        self._require_resident("load_state")
        megatron_state.load(self, Path(directory))

    def save_checkpoint(self, directory: Path, *, like: Path, allow_missing: Sequence[str] = ()) -> None:
        """The weights as a Hugging Face checkpoint with the files of the one in ``like``, written by rank 0.

        Called on every rank; every rank refuses before anything is written.

        Args:
            allow_missing: see :func:`alignment.weights.indexed_save.check_index`.

        Raises:
            InputError: a file of the index would be skipped because of a key that training never produces.
        """
        self._require_resident("save_checkpoint")
        index = read_index(like)
        check_index(index, self.config, allow_missing=allow_missing)
        stream = self.export_weights()
        if self.groups.rank == 0:
            save_stream(directory, self.config, stream, index=index, allow_missing=allow_missing)
        for _ in stream:
            pass
        self.groups.barrier()

    def offload(self) -> None:
        """Moves weights, gradients and optimizer states to the host and gives the memory of the device back."""
        if self._resident:
            self._parked = megatron_state.park(
                self.modules, self.chunks, self._megatron_optimizer, device_kind=self.device.kind
            )
            self._resident = False
            self.device.empty_cache()

    def reload(self) -> None:
        """Brings everything back to the device."""
        if not self._resident:
            self._parked()
            self._resident = True

    def _require_resident(self, stage: str) -> None:
        if not self._resident:
            raise InputError("the training engine is offloaded", where=stage, next_step="reload it before computing")


class _Rows:
    """The rows of a micro batch, real tokens moved to the front: megatron-core counts positions from 0."""

    def __init__(self, batch: MicroBatch) -> None:
        mask = batch["attention_mask"] != 0
        width = batch["responses"].shape[1]
        self.lengths = mask.sum(1).tolist()
        self.longest = max(self.lengths)
        self._tokens = [row[keep] for row, keep in zip(batch["input_ids"], mask)]
        # Where the logits stand that predict a response token: at the real token before it.
        self._before = (mask.cumsum(1) - 2).clamp_min(0)[:, mask.shape[1] - width :]

    def padded(self, height: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens after them, [height, length], with token 0 where there is none."""
        tokens = torch.zeros(height, length, dtype=torch.int64)
        for row, real in enumerate(self._tokens):
            tokens[row, : len(real)] = real
        return tokens, torch.cat([tokens[:, 1:], torch.zeros(height, 1, dtype=torch.int64)], dim=1)

    def real(self, height: int, length: int) -> Tensor:
        """1 where :meth:`padded` has a token, [height, length]."""
        lengths = torch.tensor([*self.lengths, *[0] * (height - len(self.lengths))])
        return (torch.arange(length) < lengths[:, None]).to(torch.int64)

    def responses(self, by_token: Tensor) -> Tensor:
        """[height, length] at the places of the responses: [b, r]; further dimensions stay."""
        places = self._before.to(by_token.device)
        places = places.view(*places.shape, *[1] * (by_token.ndim - 2)).expand(-1, -1, *by_token.shape[2:])
        return by_token[: len(places)].gather(1, places)
