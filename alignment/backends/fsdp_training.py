"""The training engine on FSDP2 (``torch.distributed.fsdp.fully_shard``): every rank holds a shard of everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alignment.backends.fsdp_groups import gradient_scale, join_group
from alignment.backends.fsdp_model import (
    Piece, build_golden, build_transformers, check_names, decoder_blocks, pieces, recompute_activations, shard_rows,
)  # fmt: skip
from alignment.backends.golden_training import _read_tensors, require_finite
from alignment.backends.training import LossFunction, MicroBatch, OptimizerConfig, Outputs, UpdateReport, Workload
from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.files import read_json, write_atomically, write_json
from alignment.models.config import ARCHITECTURE, ModelConfig
from alignment.weights.checkpoint import CONFIG_FILE, SINGLE_FILE, iter_tensors, load_config

SHARD, LAYOUT = "shard_rank_{rank}.safetensors", "fsdp.json"


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """How the engine trains.

    Attributes:
        model: the implementation that is sharded. ``transformers`` is what people train, and so what is to be compared;
            there is no silent step down to ``golden`` where it is missing.
        reshard_after_forward: free a block's gathered parameters until the backward pass, which gathers them again.
        activation_checkpointing: keep the inputs of each block only.
        attn_implementation, experts_implementation: of transformers (the second of its releases from 5 on).
    """

    model: Literal["transformers", "golden"] = "transformers"
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    attn_implementation: str = "eager"
    experts_implementation: str = "eager"


class FsdpTrainingEngine:
    """A policy trained by FSDP2, a shard of it on every rank. See :class:`~alignment.backends.training.TrainingEngine`.

    Every rank is a data parallel rank with rows of its own. Weights of a lower precision than float32 are held, summed
    and stepped in float32 and gathered in their own precision. All ranks run as many passes as the one with most micro
    batches.

    Args:
        config: of the model.
        weights: its tensors by Hugging Face name, as a stream; every rank reads it and keeps its shard.
        optimizer: None for a frozen model.
        outputs: what a micro batch gives, a function of something to call for logits and the micro batch
            (:func:`alignment.rl.stages.policy_outputs`).
        dtype: of the gathered parameters and of what is computed with them.
        device: where the shards are.

    Raises:
        UnavailableError: transformers is asked for and not installed; FSDP2 or its communication does not work here.
        InputError: a model this engine does not train, or a tensor that is missing or does not fit.
    """

    collective = True
    """Whether :meth:`export_weights`, :meth:`save_state` and :meth:`load_state` must be called on every rank."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        weights: Iterable[tuple[str, Tensor]],
        optimizer: OptimizerConfig | None,
        outputs: Callable[[Any, MicroBatch], Outputs],
        dtype: torch.dtype,
        device: Device,
        settings: FsdpSettings | None = None,
    ) -> None:
        self.config, self.optimizer, self.dtype, self.device = config, optimizer, dtype, device
        self.settings = settings or FsdpSettings()
        self.updates = 0
        self._outputs, self._resident = outputs, True
        if config.tie_word_embeddings:
            raise InputError(
                "FSDP2 training of a tied head is not supported", where="tie_word_embeddings", expected=False
            )
        self._owns_group = join_group(device)
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.gradient_scale = gradient_scale(device)
        self._main_dtype = dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32
        self.model, self._logits_of = self._build()
        self._tensors = self._named_tensors()
        self._pieces = {name: self._pieces_of(name, tuple(t.shape)) for name, t in self._tensors.items()}
        self._fill(weights)
        self._optimizer: torch.optim.Optimizer | None = None
        if optimizer is None:
            self.model.requires_grad_(False)
        else:
            self._optimizer = self._build_optimizer()

    @classmethod
    def from_checkpoint(cls, directory: Path | str, **arguments: Any) -> FsdpTrainingEngine:
        """An engine that starts from the Hugging Face checkpoint in ``directory``; other arguments as above."""
        return cls(load_config(directory), weights=iter_tensors(directory), **arguments)

    # --- computing ---------------------------------------------------------------------------------------------------

    def forward(self, micro_batches: Sequence[MicroBatch], *, stage: str) -> list[dict[str, Tensor]]:
        """Outputs of every micro batch without gradients, on the host, in order."""
        self._require_resident(stage)
        results: list[dict[str, Tensor]] = []
        error: InputError | None = None
        with torch.no_grad():
            for micro_batch, idle in self._in_step(micro_batches, stage):
                outputs = self._outputs(self._logits_of, self._to_device(micro_batch))
                if not idle:
                    results.append({name: tensor.cpu() for name, tensor in outputs.items()})
                    error = error or _not_finite(results[-1], micro_batch, stage)
        self._agree(error, stage)
        return results

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
            InputError: the outputs or the gradient are not finite, on this rank or another (the weights are then
                left as they were).
        """
        self._require_resident(stage)
        if self._optimizer is None:
            raise InputError("a frozen engine has no optimizer", where=stage)
        totals: dict[str, float] = {}
        error: InputError | None = None
        self._optimizer.zero_grad(set_to_none=True)
        passes = 0
        for micro_batch, idle in self._in_step(micro_batches, stage):
            passes += 1
            on_device = self._to_device(micro_batch)
            outputs = self._outputs(self._logits_of, on_device)
            value, metrics = loss(outputs, on_device)
            # Idle passes serve the other ranks, whose gathering and summing wait for this one.
            (value * 0.0 if idle else value).backward()
            if not idle:
                error = error or _not_finite({k: v.detach().cpu() for k, v in outputs.items()}, micro_batch, stage)
                for name, metric in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(metric)
        self._agree(error, stage)
        gradients = self._complete_gradients()
        norms = self._norms(gradients)
        grad_norm = float(torch.linalg.vector_norm(torch.tensor(list(norms.values()), dtype=torch.float64)))
        if not math.isfinite(grad_norm):
            name = next(n for n, norm in norms.items() if not math.isfinite(norm))
            self._optimizer.zero_grad(set_to_none=True)
            raise InputError(
                "the gradient is not finite", where=f"{stage} · {name}", expected="finite", found=grad_norm
            )
        if observe_gradients:
            observe_gradients(self._stream(gradients))
        by_piece = self._norms(gradients, by_piece=True) if parameter_grad_norms else {}
        learning_rate = self._step(gradients, grad_norm)
        return UpdateReport(
            metrics=totals,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            parameter_grad_norms=by_piece,
            workload=Workload.of(micro_batches, passes=passes),
        )

    def _complete_gradients(self) -> dict[str, Tensor]:
        """The sharded gradients, as sums over the ranks."""
        gradients = {}
        for name, parameter in self._parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.gradient_scale != 1.0:
                parameter.grad.to_local().mul_(self.gradient_scale)
            gradients[name] = parameter.grad
        return gradients

    def _norms(self, gradients: Mapping[str, Tensor], *, by_piece: bool = False) -> dict[str, float]:
        """L2 norm over all ranks, of each tensor of the model or of each of the checkpoint."""
        import torch.distributed as dist

        squares, names = [], []
        for name, gradient in gradients.items():
            local, (start, _) = gradient.to_local(), self._rows(gradient)
            for piece in self._pieces[name] if by_piece else (Piece(name=name),):
                part = piece.of(local, start=start)
                names.append(piece.name)
                squares.append(
                    torch.zeros((), dtype=torch.float64, device=local.device)
                    if part is None
                    else torch.linalg.vector_norm(part, dtype=_wide(part)).double().square()
                )
        total = torch.stack(squares)
        dist.all_reduce(total)
        return dict(zip(names, total.sqrt().tolist()))

    def _step(self, gradients: Mapping[str, Tensor], grad_norm: float) -> float:
        config = self.optimizer
        # The small constant is the one of torch.nn.utils.clip_grad_norm_, so that both clip alike.
        scale = min(1.0, config.clip_grad / (grad_norm + 1e-6)) if config.clip_grad else 1.0
        if scale != 1.0:
            for gradient in gradients.values():
                gradient.to_local().mul_(scale)
        rate = config.learning_rate(self.updates)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return rate

    def _in_step(self, micro_batches: Sequence[MicroBatch], stage: str) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro batches, then idle ones up to the number that every rank runs."""
        counts = self._gather_numbers(len(micro_batches))
        if min(counts) == 0:
            raise InputError(
                "a rank has no micro batch", where=stage, expected="at least one", found=f"{counts} by rank"
            )
        yield from ((batch, False) for batch in micro_batches)
        yield from ((micro_batches[-1], True) for _ in range(max(counts) - len(micro_batches)))

    def _agree(self, error: InputError | None, stage: str) -> None:
        """Raises on every rank where one has failed, so that none waits for it."""
        failed = [rank for rank, bad in enumerate(self._gather_numbers(error is not None)) if bad]
        if error is not None:
            raise error
        if failed:
            raise InputError(f"rank {failed[0]} has failed", where=stage, next_step="read the error of that rank")

    def _gather_numbers(self, number: int) -> list[int]:
        if self.world_size == 1:
            return [int(number)]
        import torch.distributed as dist

        held = torch.zeros(self.world_size, dtype=torch.int64, device=self.device.torch_device)
        held[self.rank] = int(number)
        dist.all_reduce(held)
        return held.tolist()

    # --- weights -----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and tensor of every weight, one at a time; every rank gets all and has to read all."""
        self._require_resident("export_weights")
        yield from self._stream(self._tensors)

    def _stream(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by Hugging Face name: the shards of one are gathered at a time."""
        for name, tensor in tensors.items():
            whole = tensor.detach()
            if hasattr(whole, "full_tensor"):
                if tensors is self._tensors:
                    whole = whole.to(self.dtype)
                whole = whole.full_tensor()
            for piece in self._pieces[name]:
                yield piece.name, piece.of(whole)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self._tensors.items() if isinstance(p, nn.Parameter) and p.requires_grad)

    def _rows(self, tensor: Tensor) -> tuple[int, int]:
        """Which rows of dimension 0 of ``tensor`` are here; all of a tensor that is not sharded."""
        if not hasattr(tensor, "to_local"):
            return 0, len(tensor)
        return shard_rows(tensor.shape[0], self.rank, self.world_size)

    @torch.no_grad()
    def _fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        places = {piece.name: (name, piece) for name, all_of in self._pieces.items() for piece in all_of}
        missing = set(places)
        for name, tensor in weights:
            if name not in missing:
                if name in places:
                    raise InputError("a tensor came twice", where=name)
                if _is_passed_over(name, self.config):
                    continue
                raise InputError("a tensor that the configuration has no place for", where=name)
            missing.discard(name)
            held_in, piece = places[name]
            target = self._tensors[held_in]
            start, stop = self._rows(target)
            whole = list(piece.of(torch.empty(target.shape, device="meta")).shape)
            if list(tensor.shape) != whole:
                vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
                raise InputError(
                    "the vocabulary of the tensors is not that of the configuration"
                    if vocabulary
                    else "the shape does not fit the configuration",
                    where=name,
                    expected=whole,
                    found=list(tensor.shape),
                )
            local = target.to_local() if hasattr(target, "to_local") else target
            part = piece.of(local, start=start)
            if part is not None:
                part.copy_(tensor if piece.expert is not None else tensor[start:stop])
        if missing:
            raise InputError(
                f"the checkpoint lacks the tensor {min(missing)}"
                + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
            )

    # --- building ----------------------------------------------------------------------------------------------------

    def _build(self) -> tuple[nn.Module, Callable[..., Tensor]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        place = {"dtype": self._main_dtype, "device": self.device.torch_device}
        if self.settings.model == "golden":
            model, logits_of = build_golden(self.config, **place)
        elif self.settings.model == "transformers":
            model, logits_of = build_transformers(
                self.config,
                attn_implementation=self.settings.attn_implementation,
                experts_implementation=self.settings.experts_implementation,
                **place,
            )
        else:
            raise InputError(
                "no such model", where="fsdp_config.model", expected="transformers | golden", found=self.settings.model
            )
        check_names(model, self.config)
        self._adapt(model)
        mesh = init_device_mesh(self.device.kind, (self.world_size,))
        lower = self.dtype if self.dtype != self._main_dtype else None
        # Inputs are of the right precision already, and the rope tables are to stay wide.
        policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=self._main_dtype, cast_forward_inputs=False)
        shard = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": self.settings.reshard_after_forward}
        for block in decoder_blocks(model):
            if self.settings.activation_checkpointing:
                recompute_activations(block)
            fully_shard(block, **shard)
        fully_shard(model, **shard)
        _allocate(model, self.device.torch_device)
        model.train()
        return model, logits_of

    # What an engine that trains something else than all weights does otherwise.

    def _adapt(self, model: nn.Module) -> None:
        """Changes the model, on the meta device, before it is sharded."""

    def _named_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the sharded model by its name."""
        return dict(self.model.state_dict(keep_vars=True))

    def _pieces_of(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """The tensors, by the names that weights come and go under, in the model's tensor ``name``."""
        return pieces(name, shape)

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model that a checkpoint has."""
        yield from self._tensors.items()

    def _build_optimizer(self) -> torch.optim.Optimizer:
        config = self.optimizer
        parameters = dict(self._parameters())
        optimizer = torch.optim.AdamW(
            parameters.values(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        # Made now rather than in the first step, so that a state that was saved before it looks like any other.
        for parameter in parameters.values():
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer

    # --- state -------------------------------------------------------------------------------------------------------

    def save_state(self, directory: Path) -> None:
        """This rank's shard of main weights and optimizer, and, by rank 0, a Hugging Face checkpoint and the schedule.

        Called on every rank.
        """
        from safetensors.torch import save_file

        self._require_resident("save_state")
        directory = Path(directory)
        shard = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self._shard().items()}
        write_atomically(directory / SHARD.format(rank=self.rank), lambda beside: save_file(shard, beside))
        self._save_checkpoint(directory)
        if self.rank == 0:
            layout = {"world_size": self.world_size, "model": self.settings.model, "dtype": str(self.dtype)}
            write_json(directory / LAYOUT, {"updates": self.updates, "layout": layout})
        self._gather_numbers(0)

    def load_state(self, directory: Path) -> None:
        """The inverse of :meth:`save_state`, on every rank, with as many ranks.

        Raises:
            InputError: the state was saved under another layout, or a tensor is missing, left over or does not fit.
        """
        self._require_resident("load_state")
        directory = Path(directory)
        saved = read_json(directory / LAYOUT)
        here = {"world_size": self.world_size, "model": self.settings.model, "dtype": str(self.dtype)}
        if saved.get("layout") != here:
            raise InputError(
                "the state was saved under another layout",
                where=directory / LAYOUT,
                expected=here,
                found=saved.get("layout"),
                next_step="resume with the same layout, or start from the checkpoint in this folder",
            )
        updates = saved.get("updates")
        if type(updates) is not int or updates < 0:
            raise InputError("the number of updates is not a count", where=directory / LAYOUT, found=updates)
        target = self._shard()
        found = _read_tensors(directory / SHARD.format(rank=self.rank), target)
        with torch.no_grad():
            for name, tensor in target.items():
                tensor.copy_(found[name])
            if self._optimizer is not None:
                for state in self._optimizer.state.values():
                    state["step"].fill_(float(updates))
        self.updates = updates

    def _shard(self) -> dict[str, Tensor]:
        """Everything of this rank that a step changes, as views."""
        shard = {f"main.{name}": _local(tensor.detach()) for name, tensor in self._tensors.items()}
        if self._optimizer is not None:
            for name, parameter in self._parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    shard[f"{key}.{name}"] = _local(self._optimizer.state[parameter][key])
        return shard

    def _save_checkpoint(self, directory: Path) -> None:
        """The weights in the form that people use, one whole tensor in memory at a time."""
        import json

        from alignment.weights.tensor_file import plan_file, write_all

        stored = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
        wanted = []
        for name, tensor in self._exported():
            dtype = self.dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
            for piece in self._pieces[name]:
                shape = piece.of(torch.empty(tensor.shape, device="meta")).shape
                wanted.append((piece.name, stored[dtype], tuple(shape)))
        plan = plan_file(directory / SINGLE_FILE, wanted, metadata={"format": "pt"})
        places = {tensor.name: tensor for tensor in plan.tensors}

        def write(beside: Path) -> None:
            with open(beside, "r+b", buffering=0) as out:
                out.write(plan.header)
                for name, tensor in self.export_weights():
                    out.seek(places[name].begin)
                    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                    write_all(out, memoryview(data.numpy()))

        if self.rank == 0:
            write_atomically(plan.path, write)
            hf = {
                **self.config.to_hf(),
                "architectures": [ARCHITECTURE],
                "torch_dtype": str(self.dtype).removeprefix("torch."),
            }
            text = json.dumps(hf, indent=2, sort_keys=True) + "\n"
            write_atomically(directory / CONFIG_FILE, lambda beside: beside.write_text(text, encoding="utf-8"))
        else:
            for _ in self.export_weights():
                pass

    def offload(self) -> None:
        """Moves the shards of weights and optimizer to the host; computing is refused until :meth:`reload`."""
        self._move(torch.device("cpu"))
        self._resident = False
        self.device.empty_cache()

    def reload(self) -> None:
        """Brings everything back to the device."""
        self._move(self.device.torch_device)
        self._resident = True

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        self._tensors = self._named_tensors()
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
            for state in self._optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].to(device)

    def close(self) -> None:
        """Leaves the process group, if this engine has made it."""
        import torch.distributed as dist

        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _to_device(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return {name: tensor.to(self.device.torch_device) for name, tensor in micro_batch.items()}

    def _require_resident(self, stage: str) -> None:
        if not self._resident:
            raise InputError("the training engine is offloaded", where=stage, next_step="reload it before computing")


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for what is on the meta device; buffers that are there already keep their values."""
    kept = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer.copy_(kept[name])


def _not_finite(outputs: Outputs, micro_batch: MicroBatch, stage: str) -> InputError | None:
    try:
        require_finite(outputs, {k: v.cpu() for k, v in micro_batch.items()}, stage=stage)
    except InputError as error:
        return error
    return None


def _is_passed_over(name: str, config: ModelConfig) -> bool:
    """What a checkpoint may have besides the model's tensors."""
    parts = name.split(".")
    behind = parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= config.num_hidden_layers
    return behind or name.endswith("rotary_emb.inv_freq")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype.itemsize >= torch.float32.itemsize else torch.float32
