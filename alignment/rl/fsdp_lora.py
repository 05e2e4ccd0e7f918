"""The adapter of :mod:`alignment.rl.lora` on FSDP2: frozen shards of the model, trained shards of the adapter.

Weights are replaced by their merged form where a module reads them (``torch.nn.utils.parametrize``), so the adapter lies
in the block it belongs to, is gathered with it, and whatever the block computes with is W + (α/r)·B·A. Names, draws and
the order of the merge are those of the golden adapter: both engines train the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from alignment.backends.fsdp_model import Piece, pieces
from alignment.backends.fsdp_training import FsdpTrainingEngine
from alignment.backends.training import MicroBatch
from alignment.errors import InputError
from alignment.rl.lora import LoraSettings, adapted_names, adapter_key, fresh_down

_PARAMETRIZED = ".parametrizations."


class _Switch:
    """Whether the adapter takes part."""

    on = True


class _LowRank(nn.Module):
    """W ↦ W + (α/r)·B·A. A stack of experts [E, rows, columns] has the factors of its ``halves`` one below another."""

    def __init__(self, weight: Tensor, settings: LoraSettings, halves: int, switch: _Switch) -> None:
        super().__init__()
        *stack, rows, columns = weight.shape
        self.down = nn.Parameter(weight.new_empty(*stack, halves * settings.rank, columns))
        self.up = nn.Parameter(weight.new_empty(*stack, rows, settings.rank))
        self._halves, self._scaling, self._switch = halves, settings.alpha / settings.rank, switch

    def forward(self, weight: Tensor) -> Tensor:
        if not self._switch.on:
            return weight
        return self.merged(weight, self.up, self.down)

    def merged(self, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """The merge of given factors."""
        if self._halves > 1:
            up, down = (t.unflatten(-2, (self._halves, -1)) for t in (up, down))
        return weight + self._scaling * (up @ down).reshape(weight.shape)


class FsdpLoraEngine(FsdpTrainingEngine):
    """A frozen policy on FSDP2 with an adapter that is trained; exports and checkpoints are merged.

    Args:
        adapter: rank, scale and which weights; the experts of a layer that are one tensor are adapted together.
        arguments: of :class:`~alignment.backends.fsdp_training.FsdpTrainingEngine`.

    Raises:
        InputError: no weight matches, or some experts of a stack and not all.
    """

    def __init__(
        self, config: Any, *, weights: Iterable[tuple[str, Tensor]], adapter: LoraSettings, **arguments: Any
    ) -> None:
        self._settings, self._switch = adapter, _Switch()
        self._adapters: dict[str, _LowRank] = {}
        super().__init__(config, weights=itertools.chain(weights, self._fresh()), **arguments)

    def forward_base(self, micro_batches: Sequence[MicroBatch], outputs: Any, *, stage: str) -> list[dict[str, Tensor]]:
        """As ``forward``, with the adapter disabled and outputs of one's own; called on every rank."""
        trained, self._outputs, self._switch.on = self._outputs, outputs, False
        try:
            return self.forward(micro_batches, stage=stage)
        finally:
            self._outputs, self._switch.on = trained, True

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and tensor of every weight, the adapter merged; every rank gets all and has to read all."""
        self._require_resident("export_weights")
        for name, tensor in self._exported():
            whole = self._whole(tensor)
            if name in self._adapters:
                up, down = (self._whole(self._tensors[_factor(side, name)]) for side in ("up", "down"))
                with torch.no_grad():
                    whole = self._adapters[name].merged(whole, up, down)
            for piece in self._pieces[name]:
                yield piece.name, piece.of(whole)

    def _whole(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(self.dtype).full_tensor() if hasattr(tensor, "full_tensor") else tensor

    # --- what FsdpTrainingEngine asks ---------------------------------------------------------------------------------

    def _adapt(self, model: nn.Module) -> None:
        model.requires_grad_(False)
        held = {n: p for n, p in model.named_parameters() if _is_matrix(n, p)}
        inside = {name: [piece.name for piece in pieces(name, tuple(p.shape))] for name, p in held.items()}
        chosen = set(adapted_names(itertools.chain.from_iterable(inside.values()), self._settings))
        for name, names in inside.items():
            taken = chosen.intersection(names)
            if not taken:
                continue
            if len(taken) < len(names):
                raise InputError(
                    "the experts of a layer are one tensor here and are adapted together",
                    where=self._settings.where, expected=f"all of {name}", found=f"{len(taken)} of {len(names)}",
                    next_step="set fsdp_config.model=golden, or choose all of them",
                )  # fmt: skip
            module, _, attribute = name.rpartition(".")
            halves = len(names) // held[name].shape[0] if held[name].ndim == 3 else 1
            self._adapters[name] = _LowRank(held[name], self._settings, halves, self._switch)
            parametrize.register_parametrization(
                model.get_submodule(module), attribute, self._adapters[name], unsafe=True
            )

    def _named_tensors(self) -> dict[str, Tensor]:
        weights, factors = {}, {}
        for name, tensor in super()._named_tensors().items():
            base, parametrized, rest = name.partition(_PARAMETRIZED)
            attribute, _, leaf = rest.partition(".")
            if not parametrized:
                weights[name] = tensor
            elif leaf == "original":
                weights[f"{base}.{attribute}"] = tensor
            else:
                factors[_factor(leaf.rpartition(".")[2], f"{base}.{attribute}")] = tensor
        return weights | factors

    def _pieces_of(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        side, _, key = name.partition(".")
        for weight in self._adapters:
            if side in ("up", "down") and key == adapter_key(weight):
                of_weight = pieces(weight, tuple(self._tensors[weight].shape))
                return [Piece(name=_factor(side, p.name), expert=p.expert, half=p.half) for p in of_weight]
        return super()._pieces_of(name, shape)

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        factors = {_factor(side, name) for name in self._adapters for side in ("up", "down")}
        return ((name, tensor) for name, tensor in self._tensors.items() if name not in factors)

    def _fresh(self) -> Iterator[tuple[str, Tensor]]:
        """The factors of an adapter that has learned nothing, as more tensors of the checkpoint."""
        for weight in self._adapters:
            rows, columns = self._tensors[weight].shape[-2:]
            for piece in self._pieces[weight]:
                down = fresh_down(piece.name, columns, self._settings)
                up = torch.zeros(rows if piece.half is None else rows // 2, self._settings.rank)
                # Rounded as the golden engine rounds, whose adapter has the dtype of the model.
                yield _factor("down", piece.name), down.to(self.dtype)
                yield _factor("up", piece.name), up


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return (parameter.ndim == 2 and name.endswith(".weight")) or len(pieces(name, tuple(parameter.shape))) > 1


def _factor(side: str, weight: str) -> str:
    return f"{side}.{adapter_key(weight)}"
