"""Which rank of a megatron-core run holds what, and how tensors get there from a Hugging Face checkpoint and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.config import ModelConfig
from alignment.weights.megatron_names import MegatronParameter, Naming, Split, megatron_parameters


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """How a model is spread over ranks, in megatron-core's (and verl's) names.

    ``expert_tensor_parallel_size`` None is the tensor parallel size, as in megatron-core. Stages hold equally many
    layers but the first and the last, where ``num_layers_in_*_pipeline_stage`` says how many (over all virtual stages).
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None

    @property
    def tensor(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def expert_tensor(self) -> int:
        """Ranks that share the matrices of one routed expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def virtual(self) -> int:
        """Model chunks per pipeline rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def model_parallel(self) -> int:
        """Ranks that compute the same samples together."""
        return self.tensor * self.pipeline_model_parallel_size * self.context_parallel_size

    def check(self, config: ModelConfig, *, world_size: int | None = None) -> None:
        """Refuses sizes that ``config`` or the number of ranks cannot be divided by.

        Raises:
            InputError: naming the size, what it has to divide and what was found.
        """
        for name, value in vars(self).items():
            if value is not None and (type(value) is not int or value < 1):
                raise _unfit(name, "an integer of at least 1", value)
        divided = [
            ("tensor_model_parallel_size", self.tensor, "num_attention_heads", config.num_attention_heads),
            ("tensor_model_parallel_size", self.tensor, "vocab_size", config.vocab_size),
            ("tensor_model_parallel_size", self.tensor, "intermediate_size", config.intermediate_size),
        ]
        moe = config.first_k_dense_replace < config.num_hidden_layers
        if moe:
            shared = config.moe_intermediate_size * config.n_shared_experts
            divided += [
                ("tensor_model_parallel_size", self.tensor, "the width of the shared experts", shared),
                (
                    "expert_model_parallel_size",
                    self.expert_model_parallel_size,
                    "n_routed_experts",
                    config.n_routed_experts,
                ),
                (
                    "expert_tensor_parallel_size",
                    self.expert_tensor,
                    "moe_intermediate_size",
                    config.moe_intermediate_size,
                ),
            ]
        elif self.expert_model_parallel_size > 1:
            raise _unfit(
                "expert_model_parallel_size", "1, for the model has no routed experts", self.expert_model_parallel_size
            )
        for name, size, what, total in divided:
            if total % size:
                raise _unfit(name, f"a divisor of {what} = {total}", size)
        self._check_pipeline(config)
        if world_size is not None:
            expert = self.expert_tensor * self.expert_model_parallel_size * self.pipeline_model_parallel_size
            for what, product in (
                ("tensor · pipeline · context", self.model_parallel),
                ("expert tensor · expert · pipeline", expert),
            ):
                if world_size % product:
                    raise _unfit("the number of ranks", f"a multiple of {product} ({what} parallel sizes)", world_size)

    def _check_pipeline(self, config: ModelConfig) -> None:
        stages, chunks = self.pipeline_model_parallel_size, self.virtual
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        if config.tie_word_embeddings and stages > 1:
            raise _unfit("pipeline_model_parallel_size", "1 with tie_word_embeddings", stages)
        if stages == 1 and (chunks > 1 or first or last):
            raise _unfit(
                "pipeline_model_parallel_size",
                "more than 1 with virtual stages or layers per first or last stage",
                stages,
            )
        counts = self._layers_per_stage(config)
        if counts is None:
            left = config.num_hidden_layers - (first or 0) - (last or 0)
            between = stages - (first is not None) - (last is not None)
            raise _unfit(
                "pipeline_model_parallel_size",
                f"{left} layer(s) shared equally by {between} stage(s)",
                stages,
                next_step="set num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
            )
        uneven = [count for count in counts if count % chunks]
        if uneven:
            raise _unfit("virtual_pipeline_model_parallel_size", f"a divisor of a stage's {uneven[0]} layer(s)", chunks)

    def _layers_per_stage(self, config: ModelConfig) -> list[int] | None:
        stages = self.pipeline_model_parallel_size
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        left = config.num_hidden_layers - (first or 0) - (last or 0)
        between = stages - (first is not None) - (last is not None)
        if left < 0 or between < 0 or (left if between == 0 else left % between):
            return None
        counts = [left // between if between else 0] * stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return counts if all(counts) else None

    def layers(self, config: ModelConfig, *, pipeline_rank: int, chunk: int = 0) -> range:
        """The decoder layers of one model chunk: stages in turn, as often as there are virtual stages."""
        per_chunk = [count // self.virtual for count in self._layers_per_stage(config) or ()]
        start = chunk * sum(per_chunk) + sum(per_chunk[:pipeline_rank])
        return range(start, start + per_chunk[pipeline_rank])

    def experts(self, config: ModelConfig, *, expert_rank: int) -> range:
        """The routed experts of one expert parallel rank."""
        count = config.n_routed_experts // self.expert_model_parallel_size
        return range(expert_rank * count, (expert_rank + 1) * count)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place in each of the groups that cut parameters."""

    tensor: int = 0
    pipeline: int = 0
    expert: int = 0
    expert_tensor: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """A parameter as one rank holds it: in which model chunk, and under which name."""

    parameter: MegatronParameter
    chunk: int
    name: str


def places(sizes: ParallelSizes) -> list[Place]:
    """Every distinct place; ranks that share one hold the same."""
    ranges = (sizes.tensor, sizes.pipeline_model_parallel_size, sizes.expert_model_parallel_size, sizes.expert_tensor)
    return [
        Place(tensor=t, pipeline=p, expert=e, expert_tensor=et)
        for t, p, e, et in itertools.product(*(range(n) for n in ranges))
    ]


def owner(parameter: MegatronParameter, config: ModelConfig, sizes: ParallelSizes) -> tuple[int, int, int | None]:
    """Pipeline rank, model chunk and (of a routed expert) expert parallel rank that hold ``parameter``."""
    last = sizes.pipeline_model_parallel_size - 1
    expert = None
    if parameter.expert is not None:
        expert = parameter.expert // (config.n_routed_experts // sizes.expert_model_parallel_size)
    if parameter.layer is None:
        return (0, 0, None) if parameter.stage == "first" else (last, sizes.virtual - 1, None)
    pipeline, chunk = _stage_of_layer(config, sizes)[parameter.layer]
    return pipeline, chunk, expert


@lru_cache(maxsize=8)
def _stage_of_layer(config: ModelConfig, sizes: ParallelSizes) -> dict[int, tuple[int, int]]:
    stages = itertools.product(range(sizes.pipeline_model_parallel_size), range(sizes.virtual))
    return {layer: (p, c) for p, c in stages for layer in sizes.layers(config, pipeline_rank=p, chunk=c)}


def local_parameters(
    config: ModelConfig, sizes: ParallelSizes, place: Place, naming: Naming = Naming.LOCAL
) -> Iterator[LocalParameter]:
    """What the rank at ``place`` holds, in the order of the forward pass."""
    for parameter in megatron_parameters(config, naming):
        pipeline, chunk, expert = owner(parameter, config, sizes)
        if pipeline != place.pipeline or expert not in (None, place.expert):
            continue
        layer = index = None
        if parameter.layer is not None:
            layer = parameter.layer - sizes.layers(config, pipeline_rank=pipeline, chunk=chunk).start
        if parameter.expert is not None:
            index = parameter.expert - sizes.experts(config, expert_rank=expert).start
        yield LocalParameter(
            parameter=parameter, chunk=chunk, name=parameter.local_name(naming, layer=layer, expert=index)
        )


def shard(parameter: MegatronParameter, tensors: Sequence[Tensor], *, rank: int, size: int) -> Tensor:
    """The part of rank ``rank`` of ``size`` tensor parallel ranks, from the tensors named ``parameter.hf_names``.

    Raises:
        InputError: a dimension that ``size`` does not divide.
    """
    if parameter.split is Split.REPLICATED or (size == 1 and len(tensors) == 1):
        return tensors[0]
    dim = 1 if parameter.split is Split.COLUMNS else 0
    parts = []
    for name, tensor in zip(parameter.hf_names, tensors, strict=True):
        if tensor.shape[dim] % size:
            raise InputError(
                "the tensor cannot be shared out",
                where=name,
                expected=f"dimension {dim} a multiple of {size}",
                found=list(tensor.shape),
            )
        parts.append(tensor.chunk(size, dim=dim)[rank])
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def unshard(parameter: MegatronParameter, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The inverse of :func:`shard`: the named tensors of a checkpoint from the parts in order of their ranks."""
    if parameter.split is Split.REPLICATED:
        yield parameter.hf_names[0], shards[0]
    elif parameter.split is Split.GATED:
        halves = [part.chunk(2) for part in shards]
        for name, parts in zip(parameter.hf_names, zip(*halves)):
            yield name, torch.cat(parts) if len(parts) > 1 else parts[0]
    else:
        dim = 1 if parameter.split is Split.COLUMNS else 0
        yield parameter.hf_names[0], torch.cat(list(shards), dim=dim) if len(shards) > 1 else shards[0]


def to_megatron(
    config: ModelConfig,
    sizes: ParallelSizes,
    place: Place,
    tensors: Iterable[tuple[str, Tensor]],
    naming: Naming = Naming.LOCAL,
) -> Iterator[tuple[LocalParameter, Tensor]]:
    """The parameters of one rank from a stream of a checkpoint's tensors, each as soon as it is complete.

    Only what ``place`` needs is kept, and only until its partner (gate and up projection) has come, so the memory taken
    is that of a few tensors if the stream keeps them near each other.

    Raises:
        InputError: the stream ends before a tensor has come.
    """
    waiting = {
        name: local for local in local_parameters(config, sizes, place, naming) for name in local.parameter.hf_names
    }
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors:
        local = waiting.pop(name, None)
        if local is None:
            continue
        kept[name] = tensor
        parameter = local.parameter
        if any(partner in waiting for partner in parameter.hf_names):
            continue
        rank, size = _within(parameter, sizes, place)
        yield local, shard(parameter, [kept.pop(partner) for partner in parameter.hf_names], rank=rank, size=size)
    if waiting:
        name = next(iter(waiting))
        raise InputError(
            f"the checkpoint lacks the tensor {name}" + (f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""),
            where=waiting[name].parameter.name,
        )


def to_hugging_face(
    config: ModelConfig, fetch: Callable[[MegatronParameter], Sequence[Tensor]], naming: Naming = Naming.LOCAL
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors, one parameter at a time.

    Args:
        fetch: the parts of a parameter in order of their (expert) tensor parallel ranks, wherever they come from.
    """
    for parameter in megatron_parameters(config, naming):
        yield from unshard(parameter, fetch(parameter))


def fetch_from(
    config: ModelConfig,
    sizes: ParallelSizes,
    states: Mapping[Place, Mapping[tuple[int, str], Tensor]],
    naming: Naming = Naming.LOCAL,
) -> Callable[[MegatronParameter], Sequence[Tensor]]:
    """``fetch`` for :func:`to_hugging_face` over the states of all ranks in one process.

    Args:
        states: by place, tensors by model chunk and local name.
    """
    names = {
        place: {local.parameter.name: local for local in local_parameters(config, sizes, place, naming)}
        for place in states
    }

    def fetch(parameter: MegatronParameter) -> list[Tensor]:
        pipeline, _, expert = owner(parameter, config, sizes)
        size = sizes.tensor if parameter.expert is None else sizes.expert_tensor
        parts = []
        for rank in range(1 if parameter.split is Split.REPLICATED else size):
            routed = parameter.expert is not None
            place = Place(
                tensor=0 if routed else rank, pipeline=pipeline, expert=expert or 0, expert_tensor=rank if routed else 0
            )
            local = names[place][parameter.name]
            parts.append(states[place][local.chunk, local.name])
        return parts

    return fetch


def _within(parameter: MegatronParameter, sizes: ParallelSizes, place: Place) -> tuple[int, int]:
    return (place.tensor, sizes.tensor) if parameter.expert is None else (place.expert_tensor, sizes.expert_tensor)


def _unfit(name: str, expected: str, found: object, *, next_step: str | None = None) -> InputError:
    return InputError("unsupported parallel size", where=name, expected=expected, found=found, next_step=next_step)
