"""What every module of the model gives in one forward or in many decode steps, by the paths of the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from alignment.faults.check import HALF_THE_DIGITS, Finding, differs
from alignment.models import attention

SUFFIXES = (
    "embed_tokens",
    "input_layernorm",
    "kv_a_layernorm",
    "self_attn",
    "post_attention_layernorm",
    "mlp",
    "norm",
    "lm_head",
)


class Observed:
    """Outputs by module path, one entry per call; ``scales`` are those the attention was called with."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Tensor]] = {}
        self.attention: list[attention.AttentionCall] = []

    def keep(self, path: str, tensor: Tensor) -> None:
        self.calls.setdefault(path, []).append(tensor.detach())

    def whole(self, path: str) -> Tensor | None:
        """All calls of a module joined along the sequence, ``[b, s, …]``."""
        parts = self.calls.get(path)
        return torch.cat(parts, dim=1) if parts else None


@contextmanager
def observed(model: nn.Module) -> Iterator[Observed]:
    """Collects while the block runs."""
    found = Observed()
    handles = []
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if last in SUFFIXES or (last.isdigit() and path.count(".") == 2):
            handles.append(module.register_forward_hook(_keeping(found, path)))
        if last == "o_proj":
            core = path.removesuffix("o_proj") + "core"
            handles.append(module.register_forward_pre_hook(lambda m, inputs, core=core: found.keep(core, inputs[0])))
        if last == "post_attention_layernorm":
            residual = path.removesuffix(last) + "attention_residual"
            handles.append(module.register_forward_pre_hook(lambda m, inputs, at=residual: found.keep(at, inputs[0])))
        if last == "gate":
            handles.append(module.register_forward_hook(_keeping_routing(found, path)))
    try:
        with attention.observe_attention() as calls:
            yield found
        found.attention = calls
    finally:
        for handle in handles:
            handle.remove()


def _keeping(found: Observed, path: str):
    return lambda module, inputs, output: found.keep(path, output)


def _keeping_routing(found: Observed, path: str):
    def hook(module, inputs, output) -> None:
        chosen, weights = output
        spread = torch.zeros(len(chosen), module.config.n_routed_experts, dtype=weights.dtype).scatter(
            -1, chosen, weights
        )
        found.keep(path, spread)

    return hook


def first_divergence(
    found: Observed,
    rows: list[tuple[int, Tensor, Mapping[str, Tensor]]],
    *,
    stage: str,
    batch: int,
    expanded: bool = True,
    scale: float | None = None,
    bound: float = HALF_THE_DIGITS,
) -> list[Finding]:
    """The first module, in the order of computation, whose output is not the reference's.

    Args:
        rows: (row of the batch, columns of its real tokens as a mask ``[s]``, the reference's outputs of that
        sequence). batch: rows of the batch, to bring what modules computed on flattened tokens back to ``[b, s, …]``.
        expanded: whether queries and keys are those of expanded attention.
        scale: what the attention should be scaled with.
    """
    paths = list(rows[0][2])
    for path in paths:
        leaf = path.rpartition(".")[2]
        if leaf in ("query", "key"):
            continue
        whole = found.whole(path) if not path.endswith("mlp.gate") else None
        if path.endswith("mlp.gate") and path in found.calls:
            whole = torch.cat([part.unflatten(0, (batch, -1)) for part in found.calls[path]], dim=1)
        if whole is None:
            continue
        for row, real, golden in rows:
            place = f"{path}.residual" if leaf.isdigit() else path
            wrong = differs(whole[row][real], golden[path], stage=stage, place=place, what=f"row {row}", bound=bound)
            if wrong and leaf == "core" and expanded:
                return _inside_attention(found, rows, path, stage=stage, scale=scale, bound=bound) or wrong
            if wrong:
                return wrong
    return []


def _inside_attention(
    found: Observed, rows, path: str, *, stage: str, scale: float | None, bound: float
) -> list[Finding]:
    """Why the attention of one layer is wrong: its queries, its keys or its scale.

    Looked at only then: another form of attention (absorbed, or with all positions moved) has other queries and keys
    and the same result.
    """
    layer = int(path.split(".")[2])
    if layer >= len(found.attention):
        return []
    call = found.attention[layer]
    for what, tensor in (("query", call.query), ("key", call.key)):
        for row, real, golden in rows:
            place = path.replace("core", what)
            wrong = differs(
                tensor[row][:, real], golden[place], stage=stage, place=place, what=f"row {row}", bound=bound
            )
            if wrong:
                return wrong
    if scale is not None and abs(call.scale - scale) > bound * scale:
        place = path.replace("core", "softmax_scale")
        return [Finding(stage=stage, place=place, evidence=f"{call.scale:.6g} instead of {scale:.6g}")]
    return []
