"""An FP8 rollout: which weights of a checkpoint are quantised, and what a trainer's weights become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from alignment.weights.fp8 import SCALE_SUFFIX, dequantize, quantize

KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
"""Parts of the names that stay as they are: embeddings, head, norms, and the router, whose rounding turns choices
(DeepSeek-V3 report, arXiv:2412.19437, section 3.3.1)."""


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether an FP8 checkpoint stores this tensor in FP8: matrices of linear layers and experts, nothing else."""
    return tensor.ndim == 2 and name.endswith(".weight") and not any(part in f"{name}." for part in KEPT)


def quantised_stream(
    stream: Iterable[tuple[str, Tensor]], *, block: tuple[int, int] = (128, 128)
) -> Iterator[tuple[str, Tensor]]:
    """The stream as an FP8 engine takes it: codes and ``…_scale_inv`` of what is quantised, the rest unchanged."""
    for name, tensor in stream:
        if is_quantised(name, tensor):
            codes, scale = quantize(tensor, block=block)
            yield name, codes
            yield f"{name}{SCALE_SUFFIX}", scale
        else:
            yield name, tensor


def effective_weights(
    stream: Iterable[tuple[str, Tensor]], *, block: tuple[int, int] = (128, 128)
) -> dict[str, Tensor]:
    """The weights an FP8 engine computes with, in BF16 where they were quantised."""
    held: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name, tensor in quantised_stream(stream, block=block):
        if name.endswith(SCALE_SUFFIX):
            scales[name.removesuffix(SCALE_SUFFIX)] = tensor
        else:
            held[name] = tensor
    return {name: dequantize(t, scales[name], block=block) if name in scales else t for name, t in held.items()}
