"""MindSpeed's own flash-attention adaptor, run on the emulated NPU: which scale does it hand to the kernel?

The adaptor replaces ``DotProductAttention.forward`` of megatron-core. Before commit a25e413e (of the branch
2.2.0_core_r0.12.1) it handed ``npu_fusion_attention`` 1/√(head width) where the module had a ``softmax_scale`` of its
own; with latent attention that scale has another head width and YaRN's mscale in it. The scale is read from the log of
what reached the operator, and the output and its gradients are compared with float64 golden.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.backends.plugin_process import (
    LABEL,
    drive_in_process,
    failed_to_run,
    install_emulated_npu,
    installed_from,
    main,
)
from alignment.backends.plugin_sources import PluginSource
from alignment.errors import UnavailableError
from alignment.models.attention import scaled_dot_product
from alignment.models.rope import yarn_mscale
from alignment.numerics.budget import Budget, Noise
from alignment.numerics.metrics import relative_l2
from alignment.numerics.random import portable_normal, portable_permutation
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

MODULE = "mindspeed.core.transformer.flash_attention.flash_attention.adaptor"
FORWARD = "dot_product_attention_forward_impl"
OPERATOR = "npu_fusion_attention"
# From core_r0.17.0 on the package imports this separate project to patch megatron; the adaptor is put in place here.
STUBBED_IF_MISSING = ("megatron_adaptor",)
FIXED = "take a MindSpeed whose adaptor hands over self.softmax_scale (2.2.0_core_r0.12.1 from commit a25e413e on)"
QUANTITIES = ("output", "query gradient", "key gradient", "value gradient")
_HEADS = 2
_SEED = 1
_NOISE_SEEDS = (101, 102, 103, 104, 105)
_COMPRESSED_MASK = 2048  # side of the mask the operator takes for packed sequences, whatever their length
_FAR_BACK = 65536  # MindSpeed's default of --pre-tockens: everything before a token is in its band


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One causal attention.

    Attributes:
        key_width: of a query and key head; for latent attention ``qk_nope_head_dim + qk_rope_head_dim``.
        value_width: of a value head, which is megatron's ``kv_channels``.
        softmax_scale: what megatron's latent attention passes to its core attention; None where it passes none.
        lengths: of the sequences; packed into one row where ``packed``, else a batch of equal lengths.
    """

    name: str
    key_width: int
    value_width: int
    softmax_scale: float | None
    lengths: tuple[int, ...]
    packed: bool = False


def _latent_scale(width: int) -> float:
    """mscale²/√width with YaRN's mscale for the factor 40 of DeepSeek-V3 (``modeling_deepseek.py``)."""
    return yarn_mscale(40.0, 1.0) ** 2 / math.sqrt(width)


CASES = (
    AttentionCase(name="plain", key_width=16, value_width=16, softmax_scale=None, lengths=(7, 7)),
    AttentionCase(name="mla_mscale", key_width=16, value_width=16, softmax_scale=_latent_scale(16), lengths=(7, 7)),
    AttentionCase(name="mla_head_widths", key_width=24, value_width=16, softmax_scale=24**-0.5, lengths=(7, 7)),
    AttentionCase(
        name="mla_packed", key_width=24, value_width=16, softmax_scale=_latent_scale(24), lengths=(5, 8), packed=True
    ),
)


def check_mindspeed(source: PluginSource, **limits: float) -> list[Verdict]:
    """One verdict per case (``mindspeed_attention.plain``, ``.mla_mscale``, …), from a process of its own.

    Raises:
        UnavailableError: megatron-core, einops or the emulated NPU cannot be had here.
    """
    return drive_in_process(__name__, source, **limits)


def drive(root: Path, subject: str) -> list[Verdict]:
    """The process's side of :func:`check_mindspeed`."""
    for name in ("megatron.core", "einops"):
        if not _importable(name):
            problem = f"{name} is not installed, and MindSpeed's attention is made of it"
            raise UnavailableError(problem, where="MindSpeed")
    from alignment.devices.emulated_npu.import_stubs import auto_stubs

    install_emulated_npu()
    with auto_stubs((), missing=STUBBED_IF_MISSING):
        adaptor = importlib.import_module(MODULE)
    installed_from(root, adaptor)
    megatron = importlib.import_module("megatron.core")
    subject = f"{subject} with megatron-core {megatron.__version__}"
    with _single_rank():
        return [_judged_or_error(case, getattr(adaptor, FORWARD), subject) for case in CASES]


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package it is in
        return False


@contextlib.contextmanager
def _single_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _judged_or_error(case: AttentionCase, forward: Any, subject: str) -> Verdict:
    try:
        return _judged(case, forward, subject)
    except Exception as error:  # a form of attention the adaptor cannot do must not hide what it does to the others
        return failed_to_run(f"mindspeed_attention.{case.name}", subject, error)


def _judged(case: AttentionCase, forward: Any, subject: str) -> Verdict:
    from alignment.devices import emulated_npu

    module = _module(case, forward)
    inputs = _inputs(case, _SEED)
    with emulated_npu.recorded_calls() as log:
        found = _run_adaptor(module, case, inputs)
    handed = float(log.only(OPERATOR)["scale"])
    golden = _attend(case, inputs, float(module.softmax_scale), torch.float64)
    scale = Measure(
        name=f"|scale handed to {OPERATOR} - softmax_scale|",
        value=abs(handed - float(module.softmax_scale)),
        bound=0.0,
        origin="exact: the number is passed on",
    )
    budgets = _budgets(case, float(module.softmax_scale))
    compared = {
        name: budgets[name].judge(relative_l2(found[name], golden[name]), run_seed=_SEED) for name in QUANTITIES
    }
    shown = (
        Measure(name="scale handed to the kernel", value=handed),
        Measure(name="softmax_scale of the module", value=float(module.softmax_scale)),
        Measure(name="max |output - golden|", value=float((found["output"] - golden["output"]).abs().max())),
    )
    wrong = [name for name, measure in compared.items() if not measure.within]
    if not scale.within:
        width = module.hidden_size_per_attention_head
        known = f" = 1/√{width}, the head width" if handed == 1.0 / math.sqrt(width) else ""
        quantity, reason = "scale", (
            f"{OPERATOR} was handed the scale {handed:.6f}{known}, and not softmax_scale {module.softmax_scale:.6f}"
        )
    elif wrong:
        quantity = wrong[0]
        reason = f"the scale is right, but {', '.join(wrong)} differ from golden"
    else:
        quantity, reason = None, f"{OPERATOR} was handed softmax_scale {handed:.6f}; output and gradients agree"
    return Verdict(
        check=f"mindspeed_attention.{case.name}",
        layer="layer",
        stage="operator",
        subject=subject,
        device=LABEL,
        outcome=Outcome.FAIL if quantity else Outcome.PASS,
        reason=reason,
        measures=(scale, *compared.values(), *shown),
        where=Divergence(stage="operator", module=MODULE, quantity=quantity) if quantity else None,
        next_command=FIXED if quantity == "scale" else None,
    )


def _module(case: AttentionCase, forward: Any) -> Any:
    """Megatron's core attention with MindSpeed's forward in it, configured as MindSpeed's arguments would."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=_HEADS * case.value_width,
        num_attention_heads=_HEADS,
        kv_channels=case.value_width,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    config.sparse_mode = 2 if case.packed else 0
    config.pre_tockens, config.next_tockens = _FAR_BACK, 0
    patched = type("DotProductAttention", (DotProductAttention,), {"forward": forward})
    return patched(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=case.softmax_scale,
    )


def _inputs(case: AttentionCase, seed: int) -> dict[str, Tensor]:
    """Query, key, value and the gradient of the output in float64, ``[tokens, batch, heads, width]``.

    Packed sequences are one row of a batch of 1. Values are those of float32, so every dtype starts from the same.
    """
    batch, tokens = (1, sum(case.lengths)) if case.packed else (len(case.lengths), case.lengths[0])
    widths = {"query": case.key_width, "key": case.key_width, "value": case.value_width, "gradient": case.value_width}
    return {
        name: portable_normal((tokens, batch, _HEADS, width), seed=seed, stream=name, dtype=torch.float32).double()
        for name, width in widths.items()
    }


def _run_adaptor(module: Any, case: AttentionCase, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    def to_device(name: str) -> Tensor:
        tensor = inputs[name].float().to("npu")
        return tensor.squeeze(1) if case.packed else tensor

    query, key, value = (to_device(name).requires_grad_() for name in ("query", "key", "value"))
    packed = None
    side = _COMPRESSED_MASK if case.packed else case.lengths[0]
    if case.packed:
        ends = torch.tensor(case.lengths).cumsum(0)  # the operator's form: no leading 0
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    hidden = torch.ones(side, side, dtype=torch.bool, device="npu").triu(1)
    output = module(query, key, value, hidden, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
    gradient = to_device("gradient")
    output.backward(gradient.reshape(output.shape))
    tensors = (output, query.grad, key.grad, value.grad)
    widths = (case.value_width, case.key_width, case.key_width, case.value_width)
    return {
        name: tensor.detach().cpu().double().reshape(*inputs["query"].shape[:3], width)
        for name, tensor, width in zip(QUANTITIES, tensors, widths, strict=True)
    }


def _attend(
    case: AttentionCase, inputs: dict[str, Tensor], scale: float, dtype: torch.dtype, order: Tensor | None = None
) -> dict[str, Tensor]:
    """Golden attention and its gradients in ``dtype``; ``order`` [t] permutes the keys, which changes rounding only."""
    query, key, value, gradient = (
        inputs[name].to(dtype).permute(1, 2, 0, 3).clone() for name in ("query", "key", "value", "gradient")
    )
    query, key, value = (tensor.requires_grad_() for tensor in (query, key, value))
    tokens = query.shape[2]
    order = torch.arange(tokens) if order is None else order
    sequence = (
        torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
        if case.packed
        else torch.zeros(tokens, dtype=torch.int64)
    )
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() & (sequence[:, None] == sequence)
    output = scaled_dot_product(
        query, key[:, :, order], value[:, :, order], scale=scale, mask=mask[:, order].expand(1, 1, -1, -1)
    )
    output.backward(gradient)
    tensors = (output, query.grad, key.grad, value.grad)
    return {n: t.detach().double().permute(2, 0, 1, 3) for n, t in zip(QUANTITIES, tensors, strict=True)}


def _budgets(case: AttentionCase, scale: float) -> dict[str, Budget]:
    """What float32 and the order of the reduction over keys do to golden attention, on inputs of other seeds."""
    values: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    tokens = _inputs(case, _SEED)["query"].shape[0]
    for seed in _NOISE_SEEDS:
        inputs = _inputs(case, seed)
        golden = _attend(case, inputs, scale, torch.float64)
        order = portable_permutation(tokens, seed=seed, stream="order of the keys")
        single = _attend(case, inputs, scale, torch.float32, order)
        for name in QUANTITIES:
            values[name].append(relative_l2(single[name], golden[name]))
    return {
        name: Budget.from_noise(
            Noise(values=tuple(v), seeds=_NOISE_SEEDS, perturbation="order of the keys in float32", device="cpu"),
            metric=f"{name} relative_l2",
            dtype=torch.float32,
            reduction_length=max(tokens, case.key_width),
        )
        for name, v in values.items()
    }


if __name__ == "__main__":
    main("alignment.backends.mindspeed_attention", drive)
