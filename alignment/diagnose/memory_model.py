"""What training and rollout of a DeepSeek-style model need on one card, by pipeline stage and by phase.

Counts are exact (parameters by the map of names that shards them), activations follow the published accounting for MLA
and MoE under tensor and sequence parallelism. GB are 1024³ bytes throughout, as in the published table.

Per token and tensor parallel rank, in elements of the compute dtype (h hidden, q the query latent, kv the key/value
latent, r the rotary width, n heads, d_q query head, d_v value head, f feed-forward):

* attention and norms: (3·h + q + 3·kv + r + 2·n·d_q + 2·n·d_v) / TP
* dense feed-forward: 3·f / TP
* experts: (7·h + 3·f_moe) · top_k / TP for the routed copies, and 3·f_shared, *not* divided by TP

Sources: the memory table of the DeepSeek-V3 DAPO report this product is built from (reproduced to all digits by the
tests); unfused attention scores: Korthikanti et al. 2022 (arXiv:2205.05198), section 4, without dropout; micro batches
in flight: one-forward-one-backward, and its interleaved form (Narayanan et al. 2021, arXiv:2104.04473, section 2.2);
``HCCL_BUFFSIZE``: CANN, HCCL environment variables (each communicator holds twice that many MB).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from alignment.errors import InputError
from alignment.models.config import ModelConfig
from alignment.weights.checkpoint import expected_shapes
from alignment.weights.megatron_layout import ParallelSizes, owner
from alignment.weights.megatron_names import Split, megatron_parameters

GB = 1024**3
MB = 1024**2
HCCL_BUFFSIZE = 200
"""MB, the default of CANN."""

COMPRESSED_MASK = 2048
"""Side of the boolean causal mask that fused attention takes, however long the sequence is (sparse modes 2 to 4)."""

PHASES = ("rollout", "old_log_prob", "ref_log_prob", "update_actor")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How the policy is trained.

    Attributes:
        sizes: parallel sizes of the training engine.
        data_parallel: replicas; optimizer states are shared by them where ``distributed_optimizer`` is on.
        sequence_length, micro_batch: tokens of a row and rows of a micro batch.
        micro_batches: per replica and update; bounds what a pipeline has in flight. None is as many as it can hold.
        recompute: what is not kept for the backward pass: nothing, the attention scores, or everything but the inputs
            of every ``recompute_num_layers`` layers.
        fused_attention: whether scores [s, s] never exist.
        element_bytes, gradient_bytes, master_bytes, moment_bytes: of weights and activations, gradients, main weights
            (0 where the weights are their own) and both Adam moments together.
        offloaded: whether weights, gradients and optimizer leave the card while the rollout generates.
    """

    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    data_parallel: int = 1
    sequence_length: int = 4096
    micro_batch: int = 1
    micro_batches: int | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_num_layers: int = 1
    fused_attention: bool = True
    element_bytes: int = 2
    gradient_bytes: int = 4
    master_bytes: int = 4
    moment_bytes: int = 8
    distributed_optimizer: bool = True
    optimizer_offload: bool = False
    offloaded: bool = True
    reference: bool = True

    def __post_init__(self) -> None:
        for name in ("data_parallel", "sequence_length", "micro_batch", "recompute_num_layers", "element_bytes"):
            _at_least_one(name, getattr(self, name))
        if self.micro_batches is not None:
            _at_least_one("micro_batches", self.micro_batches)
        if self.recompute not in ("none", "selective", "full"):
            raise InputError(
                "unknown recomputation", where="recompute", expected="none, selective or full", found=self.recompute
            )


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """How the inference engine generates.

    Attributes:
        tensor_parallel, expert_parallel: dense layers are split by TP; routed experts by EP, each expert whole.
        sequences, length: rows alive at once and their longest length: what the latent cache has to hold.
        prefill_tokens: tokens that enter at once (one chunk, or whole prompts where prefill is not chunked).
        fused_prefill: whether prefill attention works with a compressed mask; otherwise the mask is broadcast to every
            head, ``[b, n / TP, s, s]``.
        cache_bytes: of an element of the latent cache.
    """

    tensor_parallel: int = 1
    expert_parallel: int = 1
    sequences: int = 1
    length: int = 4096
    prefill_tokens: int = 4096
    fused_prefill: bool = True
    element_bytes: int = 2
    cache_bytes: int = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "fused_prefill":
                _at_least_one(name, value)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one card of one pipeline stage.

    ``layers`` are (dense, MoE); ``activations`` of all micro batches ``in_flight`` together, without ``embedding`` and
    ``logits``, which only the first and the last stage hold.
    """

    stage: int
    layers: tuple[int, int]
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    in_flight: int
    activations: int
    embedding: int
    logits: int
    reference: int
    communication: int
    phases: Mapping[str, int]

    @property
    def static(self) -> int:
        """Bytes of weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Bytes the inference engine holds on one card."""

    parameters: int
    weights: int
    cache: int
    mask: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.mask + self.logits


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The whole answer: every pipeline stage, the rollout, and where the peak is.

    ``advice`` says for a card of ``card_bytes`` what does not fit and the largest micro batch, in tokens, that would.
    """

    stages: tuple[StageMemory, ...]
    rollout: RolloutMemory
    card_bytes: int
    advice: tuple[str, ...]

    @property
    def peak(self) -> tuple[int, int, str]:
        """Bytes, stage and phase of the highest point."""
        return max((held, stage.stage, phase) for stage in self.stages for phase, held in stage.phases.items())

    def to_dict(self) -> dict:
        held, stage, phase = self.peak
        return {**asdict(self), "peak": {"bytes": held, "stage": stage, "phase": phase}}


# --- activations -----------------------------------------------------------------------------------------------------


def attention_elements(config: ModelConfig) -> int:
    """Elements per token that the attention half of a layer keeps for its backward pass, over all tensor ranks."""
    q_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    latent = (config.q_lora_rank or 0) + 3 * config.kv_lora_rank + config.qk_rope_head_dim
    heads = 2 * config.num_attention_heads * (q_head_dim + config.v_head_dim)
    return 3 * config.hidden_size + latent + heads


def dense_layer_bytes(config: ModelConfig, *, tokens: int, tensor_parallel: int, element_bytes: int = 2) -> float:
    """Activations of one dense layer on one card."""
    elements = attention_elements(config) + 3 * config.intermediate_size
    return tokens * elements * element_bytes / tensor_parallel


def moe_layer_bytes(config: ModelConfig, *, tokens: int, tensor_parallel: int, element_bytes: int = 2) -> float:
    """Activations of one MoE layer on one card, with tokens spread evenly over the experts."""
    routed = (7 * config.hidden_size + 3 * config.moe_intermediate_size) * config.num_experts_per_tok
    shared = 3 * config.moe_intermediate_size * config.n_shared_experts
    return tokens * ((attention_elements(config) + routed) / tensor_parallel + shared) * element_bytes


def score_bytes(config: ModelConfig, *, rows: int, length: int, tensor_parallel: int, element_bytes: int = 2) -> float:
    """What unfused attention adds to a layer: probabilities ``[b, n / TP, s, s]``."""
    return rows * config.num_attention_heads / tensor_parallel * length * length * element_bytes


def embedding_bytes(config: ModelConfig, *, tokens: int, tensor_parallel: int, element_bytes: int = 2) -> float:
    """The embedding's output ``[s / TP, b, h]``."""
    return tokens * config.hidden_size * element_bytes / tensor_parallel


def logits_bytes(vocab_size: int, *, tokens: int, tensor_parallel: int = 1, element_bytes: int = 4) -> float:
    """Logits ``[b, s, v / TP]`` in float32: what the loss keeps, and what dynamic batching makes grow."""
    return tokens * vocab_size * element_bytes / tensor_parallel


def mask_bytes(config: ModelConfig, *, rows: int, length: int, tensor_parallel: int, fused: bool) -> int:
    """The attention mask of a prefill: a compressed causal triangle, or ``[b, 1, 1, s]`` broadcast to the scores."""
    if fused:
        return COMPRESSED_MASK * COMPRESSED_MASK
    return math.ceil(rows * config.num_attention_heads / tensor_parallel) * length * length


def cache_bytes(config: ModelConfig, *, tokens: int, element_bytes: int = 2) -> int:
    """The latent cache of ``tokens``: every tensor parallel rank holds all of it."""
    return tokens * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * element_bytes


def in_flight(sizes: ParallelSizes, stage: int, micro_batches: int | None) -> int:
    """Model chunks whose activations stage ``stage`` holds at its fullest (one chunk is all its layers without VPP)."""
    stages, chunks = sizes.pipeline_model_parallel_size, sizes.virtual
    most = stages - stage if chunks == 1 else (stages - stage - 1) * 2 + (chunks - 1) * stages + 1
    return most if micro_batches is None else min(most, micro_batches * chunks)


def hccl_bytes(communicators: int, *, buffer_mb: int = HCCL_BUFFSIZE) -> int:
    """What HCCL holds outside the framework's view: a send and a receive buffer per communicator."""
    return communicators * 2 * buffer_mb * MB


def communicators(sizes: ParallelSizes, data_parallel: int, rollout: RolloutPlan) -> int:
    """Process groups a card is in: the world, each parallel size above one (dense and expert side), the rollout's."""
    training = (
        sizes.tensor, sizes.pipeline_model_parallel_size, sizes.context_parallel_size, data_parallel,
        sizes.expert_model_parallel_size, sizes.expert_tensor, sizes.tensor * sizes.expert_model_parallel_size,
    )  # fmt: skip
    return 1 + sum(size > 1 for size in (*training, rollout.tensor_parallel, rollout.expert_parallel))


# --- the whole -------------------------------------------------------------------------------------------------------


@functools.cache
def stage_parameters(config: ModelConfig, sizes: ParallelSizes) -> tuple[tuple[int, int], ...]:
    """Parameters on one card of each pipeline stage: (dense and shared, routed experts)."""
    sizes.check(config)
    # One dense and one MoE layer stand for all of their kind: the whole model has tens of thousands of tensors.
    shapes = expected_shapes(dataclasses.replace(config, num_hidden_layers=2, first_k_dense_replace=1))
    counts = [[0, 0] for _ in range(sizes.pipeline_model_parallel_size)]
    for parameter in megatron_parameters(config):
        pipeline, _, expert = owner(parameter, config, sizes)
        if expert not in (None, 0):
            continue
        size = sizes.tensor if parameter.expert is None else sizes.expert_tensor
        kind = None if parameter.layer is None else int(parameter.layer >= config.first_k_dense_replace)
        elements = sum(
            math.prod(shapes[name if kind is None else name.replace(f".{parameter.layer}.", f".{kind}.", 1)])
            for name in parameter.hf_names
        )
        counts[pipeline][parameter.expert is not None] += (
            elements if parameter.split is Split.REPLICATED else elements // size
        )
    return tuple((dense, routed) for dense, routed in counts)


def estimate(
    config: ModelConfig,
    training: TrainingPlan,
    rollout: RolloutPlan,
    *,
    card_bytes: int = 64 * GB,
    buffer_mb: int = HCCL_BUFFSIZE,
) -> Estimate:
    """Bytes per pipeline stage and phase, the peak, and what would fit.

    ``rollout`` is on every card of training, in turns with it. Multi-token-prediction layers are not counted.

    Raises:
        InputError: sizes that do not fit the model.
    """
    counts = stage_parameters(config, training.sizes)

    def stages_of(training: TrainingPlan, rollout: RolloutPlan, engine: RolloutMemory) -> tuple[StageMemory, ...]:
        buffers = hccl_bytes(communicators(training.sizes, training.data_parallel, rollout), buffer_mb=buffer_mb)
        return tuple(
            _stage(config, training, number, of_stage, engine, buffers) for number, of_stage in enumerate(counts)
        )

    engine = rollout_memory(config, rollout)
    stages = stages_of(training, rollout, engine)

    def needs(phase: str, training: TrainingPlan = training, rollout: RolloutPlan = rollout) -> int:
        memory = rollout_memory(config, rollout) if phase == "rollout" else engine
        return max(stage.phases.get(phase, 0) for stage in stages_of(training, rollout, memory))

    return Estimate(
        stages=stages,
        rollout=engine,
        card_bytes=card_bytes,
        advice=_advice(config, training, rollout, stages, card_bytes, needs),
    )


def rollout_memory(config: ModelConfig, plan: RolloutPlan) -> RolloutMemory:
    """What the inference engine holds on a card while it generates.

    Raises:
        InputError: sizes that do not divide the model.
    """
    sizes = ParallelSizes(
        tensor_model_parallel_size=plan.tensor_parallel,
        expert_model_parallel_size=plan.expert_parallel,
        expert_tensor_parallel_size=1,
    )
    ((dense, routed),) = stage_parameters(config, sizes)
    rows = math.ceil(plan.prefill_tokens / plan.length)
    return RolloutMemory(
        parameters=dense + routed,
        weights=(dense + routed) * plan.element_bytes,
        cache=cache_bytes(config, tokens=plan.sequences * plan.length, element_bytes=plan.cache_bytes),
        mask=mask_bytes(
            config,
            rows=rows,
            length=min(plan.length, plan.prefill_tokens),
            tensor_parallel=plan.tensor_parallel,
            fused=plan.fused_prefill,
        ),
        logits=round(logits_bytes(config.vocab_size, tokens=plan.sequences, tensor_parallel=plan.tensor_parallel)),
    )


def _stage(
    config: ModelConfig,
    plan: TrainingPlan,
    number: int,
    counts: tuple[int, int],
    engine: RolloutMemory,
    communication: int,
) -> StageMemory:
    sizes = plan.sizes
    dense, routed = counts
    layers = [
        layer for chunk in range(sizes.virtual) for layer in sizes.layers(config, pipeline_rank=number, chunk=chunk)
    ]
    dense_layers = sum(layer < config.first_k_dense_replace for layer in layers)
    moe_layers = len(layers) - dense_layers
    first, last = number == 0, number == sizes.pipeline_model_parallel_size - 1
    rows = plan.micro_batch
    # Context parallel ranks have a share of the tokens each.
    tokens = rows * plan.sequence_length / sizes.context_parallel_size
    place = {"tokens": tokens, "tensor_parallel": sizes.tensor, "element_bytes": plan.element_bytes}
    layer_bytes = _kept(config, plan, dense_layers, moe_layers, tokens, first=first)
    chunks = in_flight(sizes, number, plan.micro_batches)
    micro_batches = math.ceil(chunks / sizes.virtual)
    logits = logits_bytes(config.vocab_size, tokens=tokens, tensor_parallel=sizes.tensor) if last else 0
    embedding = embedding_bytes(config, **place) if first else 0
    # Context parallel ranks hold equal weights too, and routed experts have replicas of their own: of the TP · CP · DP
    # ranks of a stage, EP · ETP hold different ones.
    replicas = plan.data_parallel * sizes.context_parallel_size
    expert_ranks = sizes.expert_model_parallel_size * sizes.expert_tensor
    expert_replicas = max(1, replicas * sizes.tensor // expert_ranks)
    shared, expert_shared = (replicas, expert_replicas) if plan.distributed_optimizer else (1, 1)
    per_parameter = plan.master_bytes + plan.moment_bytes
    optimizer = 0 if plan.optimizer_offload else round(per_parameter * (dense / shared + routed / expert_shared))
    weights, gradients = (dense + routed) * plan.element_bytes, (dense + routed) * plan.gradient_bytes
    activations = round(layer_bytes * chunks / sizes.virtual)
    working = _working(config, plan, dense_layers, moe_layers, tokens)
    held = weights + optimizer
    reference = weights if plan.reference else 0
    forward = round(working + logits + embedding)
    phases = {
        "rollout": engine.total + communication + (0 if plan.offloaded else held + gradients),
        "old_log_prob": held + forward + communication,
        **({"ref_log_prob": reference + forward + communication} if plan.reference else {}),
        "update_actor": round(
            held + gradients + activations + embedding * micro_batches + logits + communication
            + (working if plan.recompute == "full" else 0)
        ),
    }  # fmt: skip
    return StageMemory(
        stage=number,
        layers=(dense_layers, moe_layers),
        parameters=dense + routed,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        in_flight=micro_batches,
        activations=activations,
        embedding=round(embedding * micro_batches),
        logits=round(logits),
        reference=reference,
        communication=communication,
        phases=phases,
    )


def _kept(config: ModelConfig, plan: TrainingPlan, dense: int, moe: int, tokens: float, *, first: bool) -> float:
    """What the layers of a stage keep of one micro batch until its backward pass."""
    sizes = plan.sizes
    place = {"tokens": tokens, "tensor_parallel": sizes.tensor, "element_bytes": plan.element_bytes}
    if plan.recompute == "full":
        # The inputs of every group of layers; the very first of the model is the embedding's output, counted with it.
        groups = math.ceil((dense + moe) / plan.recompute_num_layers)
        return max(groups - first, 0) * embedding_bytes(config, **place)
    kept = dense * dense_layer_bytes(config, **place) + moe * moe_layer_bytes(config, **place)
    if not plan.fused_attention and plan.recompute == "none":
        kept += (dense + moe) * _scores(config, plan)
    return kept


def _working(config: ModelConfig, plan: TrainingPlan, dense: int, moe: int, tokens: float) -> float:
    """What a forward pass without gradients, or a recomputation, has alive: the layers it recomputes together."""
    place = {"tokens": tokens, "tensor_parallel": plan.sizes.tensor, "element_bytes": plan.element_bytes}
    together = plan.recompute_num_layers if plan.recompute == "full" else 1
    largest = max(
        (moe_layer_bytes(config, **place) if moe else 0.0), (dense_layer_bytes(config, **place) if dense else 0.0)
    )
    return largest * min(together, dense + moe) + (0 if plan.fused_attention else _scores(config, plan))


def _scores(config: ModelConfig, plan: TrainingPlan) -> float:
    # Each context rank has its share of the queries and all keys.
    return score_bytes(
        config,
        rows=plan.micro_batch,
        length=plan.sequence_length,
        tensor_parallel=plan.sizes.tensor * plan.sizes.context_parallel_size,
        element_bytes=plan.element_bytes,
    )


def _advice(
    config: ModelConfig,
    plan: TrainingPlan,
    rollout: RolloutPlan,
    stages: tuple[StageMemory, ...],
    card_bytes: int,
    needs: Callable[..., int],
) -> tuple[str, ...]:
    """What does not fit, by phase, and what would: the tokens of a micro batch, and the first change that is enough."""
    said = []
    for phase in PHASES:
        held, worst = max(((stage.phases.get(phase, 0), stage) for stage in stages), key=lambda pair: pair[0])
        if held <= card_bytes:
            continue
        line = f"{phase}: stage {worst.stage} needs {held / GB:.1f} GB of {card_bytes / GB:.0f}"
        if phase == "rollout":
            said.append(f"{line}; {_rollout_that_fits(config, plan, rollout, card_bytes, needs)}")
            continue
        # What is not held whatever the batch is.
        fixed = worst.communication + (worst.reference if phase == "ref_log_prob" else worst.weights + worst.optimizer)
        moving = held - fixed - (worst.gradients if phase == "update_actor" else 0)
        still = held - moving
        tokens = plan.micro_batch * plan.sequence_length
        changes = next(
            (flags for flags, other in _cheaper(plan) if needs(phase, training=other) <= card_bytes),
            "more pipeline, tensor or expert parallel ranks",
        )
        if still >= card_bytes:
            line += f"; what does not depend on the batch alone is {still / GB:.1f} GB"
        elif moving:
            fitting = int(tokens * (card_bytes - still) / moving)
            line += f"; {fitting} tokens in a micro batch would fit (it has {tokens})"
        said.append(f"{line}; {changes} would fit" if changes.startswith("--") else f"{line}; it takes {changes}")
    return tuple(said)


def _cheaper(plan: TrainingPlan) -> Iterator[tuple[str, TrainingPlan]]:
    """Plans that need less on a card, with the options that ask for them: time first, the host, then more cards."""
    recompute = [("", {})]
    if not plan.fused_attention and plan.recompute == "none":
        recompute.append(("--recompute selective", {"recompute": "selective"}))
    if plan.recompute != "full":
        recompute.append(("--recompute full", {"recompute": "full"}))
    offload = [("", {})] + ([] if plan.optimizer_offload else [("--optimizer-offload", {"optimizer_offload": True})])
    for times in (1, 2, 4, 8):
        cards = plan.data_parallel * times
        more = (f"--dp {cards}", {"data_parallel": cards}) if times > 1 else ("", {})
        for host in offload:
            for kept in recompute:
                flags = " ".join(part for part, _ in (kept, host, more) if part)
                if flags:
                    yield flags, dataclasses.replace(plan, **kept[1], **host[1], **more[1])


def _rollout_that_fits(
    config: ModelConfig, plan: TrainingPlan, rollout: RolloutPlan, card_bytes: int, needs: Callable[..., int]
) -> str:
    """Fewer rows alive at once where one would fit, else the fewest expert parallel ranks with which all would."""
    if needs("rollout", rollout=dataclasses.replace(rollout, sequences=1)) <= card_bytes:
        fits, too_many = 1, rollout.sequences
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if needs("rollout", rollout=dataclasses.replace(rollout, sequences=middle)) <= card_bytes:
                fits = middle
            else:
                too_many = middle
        return f"--sequences {fits} would fit (it has {rollout.sequences})"
    ranks = rollout.expert_parallel
    while ranks * 2 <= (config.n_routed_experts or 0) and config.n_routed_experts % (ranks * 2) == 0:
        ranks *= 2
        if needs("rollout", rollout=dataclasses.replace(rollout, expert_parallel=ranks)) <= card_bytes:
            return f"--rollout-ep {ranks} would fit"
    return "it takes more tensor parallel ranks" + ("" if plan.offloaded else ", or the policy on the host")


def _at_least_one(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise InputError("the value has to be a whole number of at least 1", where=name, found=value)
