"""A minimal low-rank adapter (LoRA; Hu et al. 2021, arXiv 2106.09685) for any model, and the golden engine of it.

Our own and not ``peft``, for three reasons: parameter names stay those of the checkpoint, so the weight sync needs no
renaming; it works on modules that use a weight other than by calling a linear layer (the absorbed projections of MLA);
and the forward pass uses the *merged* weight W + (α/r)·B·A itself, so what is trained is bit for bit what the rollout
engine gets. The cost is one product B·A per adapted weight and forward, which a large model would not want to pay.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from alignment.backends.golden_training import WEIGHTS, GoldenTrainingEngine, require_finite
from alignment.backends.training import MicroBatch, OptimizerConfig
from alignment.errors import InputError
from alignment.numerics.random import portable_normal

if TYPE_CHECKING:
    from alignment.rl.config import RunConfig

UNMERGED = "lora.safetensors"
"""The model and the adapter apart, beside the merged weights: what the golden engine resumes from."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """``rank`` r, ``alpha`` (the update is scaled by α/r), and which weights are adapted.

    ``target_modules`` are names of modules with a two-dimensional weight, by their last part or as a pattern over the
    whole path (``*.self_attn.*``); ``all-linear`` is every one but embedding, router and head. ``seed`` draws the first
    factor, and ``where`` is the field that errors name.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: tuple[str, ...] = ("all-linear",)
    seed: int = 42
    where: str = "gkd.lora.target_modules"


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
        matrices = (n for n, p in model.named_parameters() if p.ndim == 2 and n.endswith(".weight"))
        self.targets = adapted_names(matrices, settings)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        weights = dict(model.named_parameters())
        for name in self.targets:
            rows, columns = weights[name].shape
            down = fresh_down(name, columns, settings).to(weights[name])
            # ParameterDict takes no dots: they separate modules.
            self.down[adapter_key(name)] = nn.Parameter(down)
            self.up[adapter_key(name)] = nn.Parameter(torch.zeros(rows, settings.rank).to(weights[name]))

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.base_model.config

    def merged_weight(self, name: str) -> Tensor:
        """W + (α/r)·B·A of one adapted weight."""
        weight = self.base_model.get_parameter(name)
        return weight + self.scaling * (self.up[adapter_key(name)] @ self.down[adapter_key(name)])

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
    """The golden training engine over a :class:`LoraModel`: only the adapter is trained, and exports are merged.

    So is the Hugging Face checkpoint of :meth:`save_state`. A merge cannot be taken apart, so a resume reads
    ``lora.safetensors``, which has the model's weights and the adapter's.
    """

    _resumed_from = UNMERGED

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

    def save_state(self, directory: Path) -> None:
        """As the golden engine's, and ``lora.safetensors``."""
        from safetensors.torch import save_file

        super().save_state(directory)
        merged = {name: tensor.cpu().contiguous().clone() for name, tensor in self.export_weights()}
        save_file(merged, Path(directory) / WEIGHTS, metadata={"format": "pt"})

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


class ActorWithoutAdapter:
    """The actor with its adapter disabled as the reference policy: no second model, and a second pass of the actor.

    Args:
        actor: an engine that has ``forward_base``.
        outputs: what a micro batch gives.
    """

    def __init__(self, actor: Any, outputs: Any) -> None:
        self.actor, self._outputs = actor, outputs

    @property
    def model(self) -> nn.Module:
        """The model that computes."""
        return self.actor.model

    def forward(self, micro_batches: Sequence[MicroBatch], *, stage: str) -> list[dict[str, Tensor]]:
        """See :class:`alignment.backends.training.TrainingEngine`."""
        return self.actor.forward_base(micro_batches, self._outputs, stage=stage)


def adapter_of(config: RunConfig) -> LoraSettings | None:
    """The adapter that a run's configuration asks for: ``gkd.lora`` in distillation, else ``model.lora_rank``."""
    lora, model = getattr(getattr(config, "gkd", None), "lora", None), config.actor_rollout_ref.model
    if lora is not None and lora.rank:
        return LoraSettings(
            rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules, seed=config.gkd.seed,
            where="gkd.lora.target_modules",
        )  # fmt: skip
    if not model.lora_rank:
        return None
    return LoraSettings(
        rank=model.lora_rank, alpha=model.lora_alpha, target_modules=model.target_modules, seed=config.trainer.seed,
        where="actor_rollout_ref.model.target_modules",
    )  # fmt: skip


def adapted_names(matrices: Iterable[str], settings: LoraSettings) -> tuple[str, ...]:
    """Which of the weights that are ``matrices``, by their names in a checkpoint, get an adapter.

    Raises:
        InputError: none.
    """
    skipped, last_parts = ("embed_tokens", "lm_head", "gate"), set()
    found, wanted = [], settings.target_modules
    for name in matrices:
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        last_parts.add(last)
        everything = "all-linear" in wanted and last not in skipped
        if everything or any(last == w or fnmatch.fnmatchcase(module, w) for w in wanted):
            found.append(name)
    if not found:
        raise InputError(
            "no weight of the model is adapted",
            where=settings.where,
            expected=f"all-linear, or some of {', '.join(sorted(last_parts))}",
            found=", ".join(wanted),
        )
    return tuple(found)


def fresh_down(name: str, columns: int, settings: LoraSettings) -> Tensor:
    """A [r, ``columns``] of the weight called ``name``, drawn N(0, 1/r) in float64, the same on every engine."""
    drawn = portable_normal((settings.rank, columns), seed=settings.seed, stream=f"lora/{name}")
    return drawn / settings.rank**0.5


def adapter_key(name: str) -> str:
    return name.replace(".", "/")
