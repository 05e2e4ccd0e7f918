"""A minimal low-rank adapter (LoRA; Hu et al. 2021, arXiv 2106.09685) for any model, and an engine that trains it.

Our own and not ``peft``, for three reasons: parameter names stay those of the checkpoint, so the weight sync needs no
renaming; it works on modules that use a weight other than by calling a linear layer (the absorbed projections of MLA);
and the forward pass uses the *merged* weight W + (α/r)·B·A itself, so what is trained is bit for bit what the rollout
engine gets. The cost is one product B·A per adapted weight and forward, which a large model would not want to pay.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from alignment.backends.golden_training import GoldenTrainingEngine, require_finite
from alignment.backends.training import MicroBatch, OptimizerConfig
from alignment.errors import InputError
from alignment.numerics.random import portable_normal


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """``rank`` r, ``alpha`` (the update is scaled by α/r), and which weights are adapted.

    ``target_modules`` are names of modules with a two-dimensional weight, by their last part or as a pattern over the
    whole path (``*.self_attn.*``); ``all-linear`` is every one but embedding and head.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: tuple[str, ...] = ("all-linear",)
    seed: int = 42


class LoraModel(nn.Module):
    """A frozen model and an adapter on some of its weights.

    A is drawn N(0, 1/r), B is zero, so an adapter that has not learned anything changes nothing. Called like the model;
    :meth:`base` is the model without the adapter.

    Raises:
        InputError: no weight matches.
    """

    def __init__(self, model: nn.Module, settings: LoraSettings) -> None:
        super().__init__()
        self.base_model = model.requires_grad_(False)
        self.scaling = settings.alpha / settings.rank
        self.targets = tuple(_targets(model, settings.target_modules))
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        weights = dict(model.named_parameters())
        for name in self.targets:
            rows, columns = weights[name].shape
            drawn = portable_normal((settings.rank, columns), seed=settings.seed, stream=f"lora/{name}")
            down = (drawn / settings.rank**0.5).to(weights[name])
            # ParameterDict takes no dots: they separate modules.
            self.down[_key(name)] = nn.Parameter(down)
            self.up[_key(name)] = nn.Parameter(torch.zeros(rows, settings.rank).to(weights[name]))

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.base_model.config

    def merged_weight(self, name: str) -> Tensor:
        """W + (α/r)·B·A of one adapted weight."""
        weight = self.base_model.get_parameter(name)
        return weight + self.scaling * (self.up[_key(name)] @ self.down[_key(name)])

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The model with its adapted weights."""
        merged = {name: self.merged_weight(name) for name in self.targets}
        return functional_call(self.base_model, merged, arguments, keywords)

    def base(self, *arguments: Any, **keywords: Any) -> Any:
        """The model with its adapter disabled: the teacher of self-distillation."""
        return self.base_model(*arguments, **keywords)

    def merged_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model in its checkpoint's names, adapted weights merged: what a weight sync sends."""
        for name, tensor in self.base_model.state_dict().items():
            with torch.no_grad():
                yield name, self.merged_weight(name) if name in self.targets else tensor


class LoraTrainingEngine(GoldenTrainingEngine):
    """The golden training engine over a :class:`LoraModel`: only the adapter is trained, and exports are merged."""

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path | str,
        *,
        optimizer: OptimizerConfig | None,
        outputs: Any,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: Any = None,
        settings: LoraSettings | None = None,
    ) -> LoraTrainingEngine:
        """A policy that starts from a checkpoint, with a fresh adapter."""
        from alignment.weights.checkpoint import load_model

        model = LoraModel(load_model(directory, dtype=dtype, device=device), settings or LoraSettings()).to(device)
        return cls(model, optimizer=optimizer, outputs=outputs, device=device, ranks=ranks)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and tensor of every weight, the adapter merged."""
        yield from self.model.merged_state()

    def forward_base(self, micro_batches: Sequence[MicroBatch], outputs: Any, *, stage: str) -> list[dict[str, Tensor]]:
        """As ``forward``, with the adapter disabled and outputs of one's own."""
        self._require_resident(stage)
        answers = []
        with torch.no_grad():
            for micro_batch in micro_batches:
                made = outputs(self.model.base, self._to_device(micro_batch))
                answers.append({name: tensor.cpu() for name, tensor in made.items()})
                require_finite(answers[-1], micro_batch, stage=stage)
        return answers


def _targets(model: nn.Module, wanted: Sequence[str]) -> Iterator[str]:
    weights = {n: p for n, p in model.named_parameters() if p.ndim == 2 and n.endswith(".weight")}
    skipped = ("embed_tokens", "lm_head", "gate")
    found = []
    for name in weights:
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        everything = "all-linear" in wanted and last not in skipped
        if everything or any(last == w or fnmatch.fnmatchcase(module, w) for w in wanted):
            found.append(name)
    if not found:
        last = sorted({n.removesuffix(".weight").rpartition(".")[2] for n in weights})
        raise InputError(
            "no weight of the model is adapted",
            where="gkd.lora.target_modules",
            expected=f"all-linear, or some of {', '.join(last)}",
            found=", ".join(wanted),
        )
    yield from found


def _key(name: str) -> str:
    return name.replace(".", "/")
