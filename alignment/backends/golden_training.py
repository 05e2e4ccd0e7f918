"""The golden training engine: the plain model, explicit AdamW, gradients summed over micro batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from alignment.backends.training import (
    LossFunction,
    MicroBatch,
    OptimizerConfig,
    Outputs,
    SoleRank,
    UpdateReport,
    Workload,
)
from alignment.errors import InputError
from alignment.files import read_json, write_json

WEIGHTS, OPTIMIZER, SCHEDULE, CONFIG = "model.safetensors", "optimizer.safetensors", "schedule.json", "config.json"


def adamw_step(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place (Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2).

    θ ← θ(1 − ηλ); m ← β₁m + (1 − β₁)g; v ← β₂v + (1 − β₂)g²; θ ← θ − η·(m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε), with
    ``step`` = t counted from 1. All four tensors share shape and dtype.
    """
    beta1, beta2 = betas
    parameter.mul_(1.0 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1.0 - beta2**step)).add_(eps)
    parameter.addcdiv_(exp_avg, denominator, value=-lr / (1.0 - beta1**step))


class GoldenTrainingEngine:
    """A plain model trained by explicit AdamW: readable enough to be what other engines are compared with.

    Weights of a lower precision than float32 get float32 *main weights*, in which gradients add up and the optimizer
    steps; the model receives them rounded. Without ``optimizer`` the engine is a frozen reference.

    Args:
        model: any module for which ``outputs`` is defined.
        optimizer: None for a frozen model.
        outputs: what a micro batch gives, a function of model and micro batch (:mod:`alignment.rl.stages` has the
            policy's, :mod:`alignment.rl.critic` the critic's).
        device: where micro batches are moved to (the model is already there).
        ranks: the data parallel ranks, :class:`~alignment.backends.training.SoleRank` by default.
    """

    _resumed_from = WEIGHTS
    """The file of the model's tensors that :meth:`load_state` reads."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerConfig | None,
        outputs: Callable[[nn.Module, MicroBatch], Outputs],
        device: torch.device | str,
        ranks=None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.device = torch.device(device)
        self.ranks = ranks or SoleRank()
        self.updates = 0
        self._outputs = outputs
        self._resident = True
        self._main: dict[str, torch.Tensor] = {}
        self._exp_avg: dict[str, torch.Tensor] = {}
        self._exp_avg_sq: dict[str, torch.Tensor] = {}
        if optimizer is None:
            model.requires_grad_(False)
            return
        for name, parameter in self._trainable():
            low_precision = parameter.dtype.itemsize < torch.float32.itemsize
            self._main[name] = parameter.detach().float() if low_precision else parameter.detach()
            self._exp_avg[name] = torch.zeros_like(self._main[name])
            self._exp_avg_sq[name] = torch.zeros_like(self._main[name])

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path | str,
        *,
        optimizer: OptimizerConfig | None,
        outputs: Callable[[nn.Module, MicroBatch], Outputs],
        dtype: torch.dtype,
        device: torch.device | str,
        ranks=None,
    ) -> GoldenTrainingEngine:
        """A policy that starts from the Hugging Face checkpoint in ``directory``."""
        from alignment.weights.checkpoint import load_model

        model = load_model(directory, dtype=dtype, device=device)
        return cls(model, optimizer=optimizer, outputs=outputs, device=device, ranks=ranks)

    def forward(self, micro_batches: Sequence[MicroBatch], *, stage: str) -> list[dict[str, torch.Tensor]]:
        """Outputs of every micro batch without gradients, on the host.

        See :class:`~alignment.backends.training.TrainingEngine`.
        """
        self._require_resident(stage)
        results = []
        with torch.no_grad():
            for micro_batch in micro_batches:
                outputs = self._outputs(self.model, self._to_device(micro_batch))
                outputs = {name: tensor.cpu() for name, tensor in outputs.items()}
                require_finite(outputs, micro_batch, stage=stage)
                results.append(outputs)
        return results

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        *,
        stage: str,
        parameter_grad_norms: bool = False,
        observe_gradients: Callable[[Iterator[tuple[str, torch.Tensor]]], None] | None = None,
    ) -> UpdateReport:
        """One optimizer step over one mini batch. See :class:`~alignment.backends.training.TrainingEngine`.

        Args:
            observe_gradients: gets the gradient of every parameter, summed over micro batches and ranks, before
                clipping.

        Raises:
            InputError: the outputs or the gradient are not finite (the weights are then left as they were).
        """
        self._require_resident(stage)
        if self.optimizer is None:
            raise InputError("a frozen engine has no optimizer", where=stage)
        totals: dict[str, float] = {}
        gradients = {name: torch.zeros_like(main) for name, main in self._main.items()}
        for micro_batch in micro_batches:
            on_device = self._to_device(micro_batch)
            outputs = self._outputs(self.model, on_device)
            value, metrics = loss(outputs, on_device)
            value.backward()
            for name, parameter in self._trainable():
                if parameter.grad is not None:
                    gradients[name].add_(parameter.grad)
                    parameter.grad = None
            require_finite({k: v.detach().cpu() for k, v in outputs.items()}, micro_batch, stage=stage)
            for name, metric in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(metric)
        self.ranks.add_up(list(gradients.values()))
        norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()])
        grad_norm = float(torch.linalg.vector_norm(norms))
        if not math.isfinite(grad_norm):
            name = next(n for n, norm in zip(gradients, norms.tolist()) if not math.isfinite(norm))
            raise InputError(
                "the gradient is not finite", where=f"{stage} · {name}", expected="finite", found=grad_norm
            )
        if observe_gradients:
            observe_gradients(iter(gradients.items()))
        learning_rate = self.optimizer.learning_rate(self.updates)
        self._step(gradients, grad_norm, learning_rate)
        return UpdateReport(
            metrics=totals,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            parameter_grad_norms=dict(zip(gradients, norms.tolist())) if parameter_grad_norms else {},
            workload=Workload.of(micro_batches),
        )

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and tensor of every weight, one at a time."""
        yield from self.model.state_dict().items()

    def offload(self) -> None:
        """Moves weights, main weights and optimizer state to the host; computing is refused until :meth:`reload`."""
        self._move(torch.device("cpu"))
        self._resident = False

    def reload(self) -> None:
        """Moves everything back to the device."""
        self._move(self.device)
        self._resident = True

    def save_state(self, directory: Path) -> None:
        """Writes ``optimizer.safetensors``, ``schedule.json`` and a Hugging Face checkpoint (``config.json`` and
        ``model.safetensors``).
        """
        from safetensors.torch import save_file

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(_on_host(self.model.state_dict()), directory / self._resumed_from, metadata={"format": "pt"})
        save_file(_on_host(self._optimizer_state()), directory / OPTIMIZER)
        write_json(directory / SCHEDULE, {"updates": self.updates})
        config = getattr(self.model, "config", None)
        if config is not None:
            write_json(directory / CONFIG, config.to_hf())

    def load_state(self, directory: Path) -> None:
        """The inverse of :meth:`save_state`; everything is checked before anything is overwritten."""
        directory = Path(directory)
        weights = _read_tensors(directory / self._resumed_from, self.model.state_dict())
        state = _read_tensors(directory / OPTIMIZER, self._optimizer_state())
        updates = read_json(directory / SCHEDULE)["updates"]
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(weights[name])
            for name, tensor in self._optimizer_state().items():
                tensor.copy_(state[name])
        self.updates = updates

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        state = {f"exp_avg.{n}": t for n, t in self._exp_avg.items()}
        state.update({f"exp_avg_sq.{n}": t for n, t in self._exp_avg_sq.items()})
        shared = dict(self._trainable()) if self._main else {}
        state.update({f"main.{n}": t for n, t in self._main.items() if t.dtype != shared[n].dtype})
        return state

    def _step(self, gradients: Mapping[str, torch.Tensor], grad_norm: float, learning_rate: float) -> None:
        config = self.optimizer
        # The small constant is the one of torch.nn.utils.clip_grad_norm_, so that both clip alike.
        scale = min(1.0, config.clip_grad / (grad_norm + 1e-6)) if config.clip_grad else 1.0
        self.updates += 1
        with torch.no_grad():
            for name, parameter in self._trainable():
                main = self._main[name]
                adamw_step(
                    main,
                    gradients[name].mul_(scale),
                    self._exp_avg[name],
                    self._exp_avg_sq[name],
                    step=self.updates,
                    lr=learning_rate,
                    betas=config.betas,
                    eps=config.eps,
                    weight_decay=config.weight_decay,
                )
                if main.data_ptr() != parameter.data_ptr():
                    parameter.copy_(main)

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        parameters = dict(self.model.named_parameters())
        for name, main in self._main.items():
            shares = main.dtype == parameters[name].dtype
            self._main[name] = parameters[name].detach() if shares else main.to(device)
            self._exp_avg[name] = self._exp_avg[name].to(device)
            self._exp_avg_sq[name] = self._exp_avg_sq[name].to(device)

    def _to_device(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.device) for name, tensor in micro_batch.items()}

    def _require_resident(self, stage: str) -> None:
        if not self._resident:
            raise InputError("the training engine is offloaded", where=stage, next_step="reload it before computing")


def require_finite(outputs: Outputs, micro_batch: MicroBatch, *, stage: str) -> None:
    """Refuses outputs [b,r,…] (or [n,…] by active token) that are not finite where they count, naming the place."""
    for name, tensor in outputs.items():
        bad = ~torch.isfinite(tensor)
        if bad.ndim > 2:
            bad = bad.flatten(2).any(-1)
        if "response_mask" in micro_batch:
            bad &= micro_batch["response_mask"].bool()
        if bad.any():
            place = bad.nonzero()[0].tolist()
            values = tensor[tuple(place)].reshape(-1)
            value, count = values[~torch.isfinite(values)][0].item(), int(bad.sum())
            # What is listed by active token has no sample any more.
            where = f"sample {place[0]}, response token {place[1]}" if len(place) > 1 else f"active token {place[0]}"
            raise InputError(
                "the logits are not finite",
                where=f"{stage} · {name}",
                expected="finite numbers",
                found=f"{value} at {where} ({count} in all)",
                next_step="compare this stage's layers with the baseline from the embedding on",
            )


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _read_tensors(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except FileNotFoundError:
        raise InputError("the checkpoint lacks a file", where=path) from None
    except SafetensorError as error:
        raise InputError(f"the file is truncated or not safetensors ({error})", where=path) from None
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise InputError(
            f"the checkpoint lacks {len(missing)} tensor(s)",
            where=path,
            expected=missing[0],
            found="nothing by that name",
        )
    if extra:
        raise InputError(
            f"the checkpoint has {len(extra)} tensor(s) too many",
            where=path,
            expected="only known names",
            found=extra[0],
        )
    for name, tensor in expected.items():
        want, have = (tuple(tensor.shape), tensor.dtype), (tuple(found[name].shape), found[name].dtype)
        if want != have:
            raise InputError(
                "a tensor of the checkpoint does not fit", where=f"{path} · {name}", expected=want, found=have
            )
    return found
