"""megatron-core's ``GPTModel`` for a DeepSeek-V3-style configuration: the one place that builds it, on every device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import math
import runpy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.backends.subject import SubjectAvailability
from alignment.devices.base import Device
from alignment.errors import InputError, UnavailableError
from alignment.models.config import ModelConfig
from alignment.weights.megatron_layout import ParallelSizes
from alignment.weights.megatron_names import Naming

VERSIONS = ("0.12.", "0.13.", "0.16.")

WAY_ROUNDS = {
    "duplicated_down_projections": "without Transformer Engine, the down projections of MLA are gathered over tensor "
    "parallel ranks, and the gradient that the shared rotary key gets from the other ranks' heads is lost",
    "group_score_of_two": "groups of experts are ranked by the sum of their best topk // group_topk scores, not of "
    "their best two",
    "latent_norm_eps": "the latent norms use rms_norm_eps; the published model uses 1e-6 whatever that says",
    "softmax_mscale": "0.12 scales the softmax by mscale instead of mscale_all_dim",
}
"""Defects of the installed releases that are mended here unless a test asks to see them; see docs/live-defects.md."""

RECOMPUTE = {"full": ("uniform", "block"), "selective": (None,)}


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Which activations are computed again in backward, in megatron-core's names; granularity None keeps all."""

    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.recompute_granularity is None:
            return
        if self.recompute_granularity not in RECOMPUTE:
            raise InputError(
                "unknown recomputation",
                where="recompute_granularity",
                expected="full or selective",
                found=self.recompute_granularity,
            )
        if self.recompute_method not in RECOMPUTE[self.recompute_granularity]:
            raise InputError(
                "unknown recomputation",
                where="recompute_method",
                expected=f"{RECOMPUTE[self.recompute_granularity]} with {self.recompute_granularity}",
                found=self.recompute_method,
            )


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """How a model is built beside its shape and sizes.

    Attributes:
        transformer: further fields of ``MLATransformerConfig``, as verl's ``override_transformer_config``.
        core_attention: replaces the core attention of every layer: the place for a kernel under test.
        way_rounds: names of :data:`WAY_ROUNDS` in force.
    """

    recompute: Recompute = field(default_factory=Recompute)
    transformer: Mapping[str, Any] = field(default_factory=dict)
    core_attention: type | None = None
    way_rounds: Collection[str] = frozenset(WAY_ROUNDS)


def installed_version() -> str:
    """The installed megatron-core.

    Raises:
        UnavailableError: none is installed.
        InputError: it is one this adapter was never run with.
    """
    spec = importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(
            "megatron-core is not installed",
            where="engine.train=megatron",
            next_step="pip install 'npu-alignment[megatron]'",
        )
    # Read, not imported: on an NPU MindSpeed has to be imported before megatron.core, on a CPU the shims be in force.
    version = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "package_info.py"))["__version__"]
    check_version(version)
    return version


def megatron_availability(device: Device) -> SubjectAvailability:
    """Whether megatron-core can run on ``device`` here, and if not, why; imports neither it nor MindSpeed."""
    try:
        version = installed_version()
    except (UnavailableError, InputError) as error:
        return SubjectAvailability(available=False, reason=str(error))
    if device.kind == "npu" and importlib.util.find_spec("mindspeed") is None:
        return SubjectAvailability(
            available=False, reason=f"megatron-core {version} needs MindSpeed on an NPU, and it is not installed"
        )
    return SubjectAvailability(available=True, reason=f"megatron-core {version} on {device.label}")


def check_version(version: str) -> None:
    """Refuses a release whose internals this adapter does not know.

    Raises:
        InputError: another release than those in :data:`VERSIONS`.
    """
    if not version.startswith(VERSIONS):
        raise InputError(
            "this release of megatron-core is not supported",
            where="megatron-core",
            expected=", ".join(f"{v}x" for v in VERSIONS),
            found=version,
        )


@contextlib.contextmanager
def engine_scope(device: Device) -> Iterator[None]:
    """What has to be in force while megatron-core's code runs: shims on a CPU, MindSpeed's adaptor on an NPU."""
    if device.kind == "cpu":
        from alignment.backends.megatron_cpu import on_cpu

        with on_cpu():
            yield
        return
    if device.kind == "npu":
        from alignment.backends.mindspeed import import_first

        import_first()
    elif not transformer_engine_available(device):
        from alignment.backends.megatron_cpu import without_transformer_engine

        with without_transformer_engine():
            yield
        return
    yield


def transformer_engine_available(device: Device) -> bool:
    """Whether layers come from Transformer Engine's specification; on an NPU MindSpeed mends megatron-core's own."""
    return device.kind == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def naming_of(device: Device, settings: BuildSettings) -> Naming:
    """What the parameters built on ``device`` are called, and how they are cut."""
    if transformer_engine_available(device):
        return Naming.TRANSFORMER_ENGINE
    return Naming.LOCAL if "duplicated_down_projections" in settings.way_rounds else Naming.LOCAL_GATHERED


def transformer_config(
    config: ModelConfig, sizes: ParallelSizes, *, dtype: torch.dtype, device: Device, settings: BuildSettings
) -> Any:
    """``MLATransformerConfig`` for ``config``, with names that changed between releases put right.

    Raises:
        InputError: a setting that megatron-core does not compute, or a field that this release does not have.
    """
    from megatron.core.transformer import MLATransformerConfig

    if not config.norm_topk_prob and config.num_experts_per_tok > 1:
        raise InputError(
            "megatron-core always normalises sigmoid routing weights",
            where="norm_topk_prob",
            expected=True,
            found=False,
        )
    uneven = sizes.num_layers_in_first_pipeline_stage is None and sizes.num_layers_in_last_pipeline_stage is not None
    if installed_version().startswith("0.12.") and sizes.virtual > 1 and uneven:
        raise InputError(
            "this release of megatron-core numbers the layers of such stages wrongly",
            where="num_layers_in_last_pipeline_stage with virtual_pipeline_model_parallel_size",
            expected="num_layers_in_first_pipeline_stage too",
            found=installed_version(),
        )
    if config.tie_word_embeddings:
        raise InputError("the adapter keeps the head apart", where="tie_word_embeddings", expected=False, found=True)
    known = {f.name for f in dataclasses.fields(MLATransformerConfig)}
    fields = {
        **_shape(config),
        **_rope(config, known),
        **_parallel(config, sizes),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # Although a checkpoint replaces every value: initialising is also what marks a weight as cut over tensor ranks,
        # and
        # an unmarked one is missing from the gradient norm.
        "perform_initialization": True,
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "variable_seq_lengths": False,
    }
    if device.kind == "cpu":
        from alignment.backends import megatron_cpu

        fields.update(megatron_cpu.configuration())
    recompute = {k: v for k, v in vars(settings.recompute).items() if v}
    if "recompute_modules" in recompute:
        recompute["recompute_modules"] = list(recompute["recompute_modules"])
    fields.update(recompute, **settings.transformer)
    unknown = sorted(set(fields) - known)
    if unknown:
        raise InputError(
            f"this release of megatron-core has no setting {unknown[0]!r}", where="override_transformer_config"
        )
    return MLATransformerConfig(**fields)


def _shape(config: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.intermediate_size,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    }
    if config.first_k_dense_replace < config.num_hidden_layers:
        shared = config.moe_intermediate_size * config.n_shared_experts
        grouped = config.n_group > 1
        fields.update(
            num_moe_experts=config.n_routed_experts,
            moe_ffn_hidden_size=config.moe_intermediate_size,
            moe_shared_expert_intermediate_size=shared or None,
            moe_layer_freq=[int(config.is_moe_layer(i)) for i in range(config.num_hidden_layers)],
            moe_router_topk=config.num_experts_per_tok,
            moe_router_num_groups=config.n_group if grouped else None,
            moe_router_group_topk=config.topk_group if grouped else None,
            moe_router_topk_scaling_factor=config.routed_scaling_factor,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            # The checkpoint's bias is part of the policy; an update by load would change it behind the optimizer's
            # back.
            moe_router_bias_update_rate=0.0,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_token_dispatcher_type="alltoall",
        )
    return fields


def _rope(config: ModelConfig, known: set[str]) -> dict[str, Any]:
    yarn = config.rope_scaling
    # 0.13 renamed the field.
    original = (
        "original_max_position_embeddings" if "original_max_position_embeddings" in known else "max_position_embeddings"
    )
    if yarn is None:
        return {
            "rope_type": "rope",
            "rotary_base": config.rope_theta,
            "rotary_scaling_factor": 1.0,
            "mscale_all_dim": 0.0,
        }
    # Without both fields the table is scaled by YaRN's own factor, which is what 1 and 0 give.
    both = bool(yarn.mscale and yarn.mscale_all_dim)
    return {
        "rope_type": "yarn",
        "rotary_base": config.rope_theta,
        "rotary_scaling_factor": yarn.factor,
        original: yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale if both else 1.0,
        "mscale_all_dim": yarn.mscale_all_dim if both else 0.0,
    }


def _parallel(config: ModelConfig, sizes: ParallelSizes) -> dict[str, Any]:
    first, last = sizes.num_layers_in_first_pipeline_stage, sizes.num_layers_in_last_pipeline_stage
    if sizes.pipeline_model_parallel_size == 2 and first is not None:
        # 0.12 divides by the number of stages in between, which is none; the last stage has what is left anyway.
        last = None
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline_model_parallel_size,
        "context_parallel_size": sizes.context_parallel_size,
        "expert_model_parallel_size": sizes.expert_model_parallel_size,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        # MoE and MLA are only right with it: tokens, and the rotary key's gradient, are shared out over tensor ranks.
        "sequence_parallel": sizes.tensor > 1,
        # On two stages the next and the previous rank are one, and only this form keeps their messages apart.
        "overlap_p2p_comm": sizes.virtual > 1,
        "batch_p2p_comm": sizes.virtual == 1,
    }


def build_chunks(
    config: ModelConfig, sizes: ParallelSizes, *, dtype: torch.dtype, device: Device, settings: BuildSettings
) -> list[nn.Module]:
    """The model chunks of this rank, uninitialised. The parallel groups must exist.

    Raises:
        InputError: see :func:`transformer_config`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    if device.kind == "npu":
        from alignment.backends.mindspeed import configure

        configure(config, sizes, bf16=dtype is torch.bfloat16)
    shared = transformer_config(config, sizes, dtype=dtype, device=device, settings=settings)
    staged = "vp_stage" in inspect.signature(GPTModel.__init__).parameters
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), sizes.pipeline_model_parallel_size
    chunks = []
    for chunk in range(sizes.virtual):
        extra = {"vp_stage": chunk if sizes.virtual > 1 else None} if staged else {}
        if not staged and sizes.virtual > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        model = GPTModel(
            config=shared,
            transformer_layer_spec=layer_spec(shared, device=device, settings=settings, **extra),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == stages - 1 and chunk == sizes.virtual - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=config.rope_theta,
            **extra,
        )
        if device.kind != "cpu":
            model = model.to(device.torch_device)
        # megatron-core builds some weights in float32 and casts the whole, but keeps the router's bias wide.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        _mend(model, config, settings)
        chunks.append(model)
    return chunks


def layer_spec(shared: Any, *, device: Device, settings: BuildSettings, **stage: Any) -> Any:
    """The layers of one chunk: Transformer Engine's where it is installed, else megatron-core's own, mended."""
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    engine = transformer_engine_available(device)
    known = inspect.signature(get_gpt_decoder_block_spec).parameters
    spec = get_gpt_decoder_block_spec(
        shared, use_transformer_engine=engine, **{k: v for k, v in stage.items() if k in known}
    )
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if settings.core_attention is not None:
            attention.core_attention = settings.core_attention
        elif not engine and device.kind != "npu":
            # On an NPU the specification's own is MindSpeed's fused attention.
            attention.core_attention = CausalCoreAttention
        if engine:
            continue
        if not isinstance(getattr(latent, "TELinear", None), type):
            # The attention asks whether its linears are of this class, and which of them every rank holds whole.
            latent.TELinear = DuplicatedLinear
        if "duplicated_down_projections" in settings.way_rounds:
            attention.linear_kv_down_proj = DuplicatedLinear
            attention.linear_q_down_proj = DuplicatedLinear
    return spec


def _mend(model: nn.Module, config: ModelConfig, settings: BuildSettings) -> None:
    scale = latent_softmax_scale(config)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        if "latent_norm_eps" in settings.way_rounds:
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                norm = getattr(attention, name, None)
                if norm is not None and hasattr(norm, "eps"):
                    norm.eps = config.latent_norm_eps
        if "softmax_mscale" in settings.way_rounds:
            attention.softmax_scale = scale
            if hasattr(attention.core_attention, "softmax_scale") and settings.core_attention is None:
                attention.core_attention.softmax_scale = scale
        if hasattr(layer.mlp, "router") and config.n_group > 1 and "group_score_of_two" in settings.way_rounds:
            layer.mlp.router.routing = functools.partial(_with_scores_of_two, layer.mlp.router.routing)


def latent_softmax_scale(config: ModelConfig) -> float:
    """mscale² / √(query head width), mscale that of ``mscale_all_dim`` (DeepSeek-V3, ``modeling_deepseek.py``)."""
    from alignment.models.rope import softmax_mscale

    return softmax_mscale(config.rope_scaling) ** 2 / math.sqrt(config.q_head_dim)


def _with_scores_of_two(routing: Any, *args: Any, **kwargs: Any) -> Any:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    stock = moe_utils.group_limited_topk
    moe_utils.group_limited_topk = group_limited_topk
    try:
        return routing(*args, **kwargs)
    finally:
        moe_utils.group_limited_topk = stock


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """The best ``topk`` experts of the ``group_topk`` groups whose best two scores sum highest.

    DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).

    Same arguments and results as megatron-core's function of this name.
    """
    by_group = scores.view(num_tokens, num_groups, -1)
    kept = by_group.topk(2, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
    mask = torch.zeros_like(by_group[..., 0]).scatter_(1, kept, 1).bool()
    allowed = mask.unsqueeze(-1).expand_as(by_group).reshape(num_tokens, num_experts)
    best = scores.masked_fill(~allowed, float("-inf")).topk(topk, dim=-1)
    return best.values, best.indices


class DuplicatedLinear(nn.Module):
    """A linear that every tensor parallel rank holds whole and applies to its share of the sequence.

    Its weight's gradient is summed over the tensor parallel ranks by megatron-core, which the attribute
    ``sequence_parallel`` asks for. Transformer Engine's ``TELinear(parallel_mode="duplicated")`` does the same.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """``x`` [s, b, in] to [s, b, out], and no bias."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        """The weight as megatron-core's distributed checkpoints take it: whole, the same on every rank."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets)


class CausalCoreAttention(nn.Module):
    """Causal attention with a value width other than the key's, and context parallelism by gathering keys and values.

    megatron-core's own core attention takes equal widths and one context rank only.
    """

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **others: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        # megatron-core reads the attribute of every core attention.
        self.hidden_size_per_attention_head = 0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> Tensor:
        """``query``, ``key`` [s, b, h, d] and ``value`` [s, b, h, v] of this rank's tokens to [s, b, h·v]."""
        from megatron.core import parallel_state

        size = parallel_state.get_context_parallel_world_size()
        allowed = None
        if size > 1:
            group = parallel_state.get_context_parallel_group()
            order = torch.cat([zigzag(len(query) * size, size, rank) for rank in range(size)]).to(query.device)
            place = torch.argsort(order)
            key, value = (GatherSequence.apply(t, group).flatten(0, 1)[place] for t in (key, value))
            mine = zigzag(len(key), size, parallel_state.get_context_parallel_rank()).to(query.device)
            allowed = torch.arange(len(key), device=query.device)[None] <= mine[:, None]
        out = F.scaled_dot_product_attention(
            *(t.permute(1, 2, 0, 3) for t in (query, key, value)),
            attn_mask=allowed,
            is_causal=allowed is None,
            scale=self.softmax_scale,
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict:
        return {}


class GatherSequence(torch.autograd.Function):
    """[s, …] of every context rank stacked to [ranks, s, …]; backward sums what every rank asks of this one's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        torch.distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad[torch.distributed.get_rank(ctx.group)], None


def zigzag(length: int, size: int, rank: int) -> Tensor:
    """Positions of a context parallel rank: of 2·size equal pieces the ``rank``-th from either end."""
    if size == 1:
        return torch.arange(length)
    pieces = torch.arange(length).view(2 * size, -1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
