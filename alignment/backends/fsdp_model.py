"""What FSDP2 shards: the golden model or transformers' DeepseekV3, built without memory, and the names of its
pieces."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignment.errors import InputError, UnavailableError
from alignment.models.config import ModelConfig
from alignment.weights.checkpoint import expected_shapes

_FUSED = re.compile(r"(.*mlp\.experts)\.(gate_up_proj|down_proj)$")
_LATENT_NORM_EPS = 1e-6
"""What transformers' latent norms use, whatever the configuration says."""

LogitsOf = Callable[..., Tensor]
"""``(input_ids, *, attention_mask, position_ids) -> logits`` [b, s, v]."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of the checkpoint as a part of a tensor of the model.

    ``expert`` is its place in dimension 0 of a tensor that stacks experts, ``rows`` its half of the next dimension (0
    of 2, 1 of 2) where gate and up projection share one; both are None where the tensors are the same.
    """

    name: str
    expert: int | None = None
    half: int | None = None

    def of(self, tensor: Tensor, *, start: int = 0) -> Tensor | None:
        """The view of this piece in ``tensor``, whose rows begin at row ``start`` of the whole; None where it has none
        of it."""
        if self.expert is None:
            return tensor
        if not start <= self.expert < start + len(tensor):
            return None
        part = tensor[self.expert - start]
        return part if self.half is None else part.chunk(2)[self.half]


def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """The checkpoint's tensors in the model's tensor ``name``: several where transformers 5 stacks the experts."""
    fused = _FUSED.match(name)
    if not fused:
        return [Piece(name=name)]
    if fused[2] == "down_proj":
        return [Piece(name=f"{fused[1]}.{e}.down_proj.weight", expert=e) for e in range(shape[0])]
    return [
        Piece(name=f"{fused[1]}.{e}.{which}_proj.weight", expert=e, half=half)
        for e in range(shape[0])
        for half, which in enumerate(("gate", "up"))
    ]


def build_golden(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, LogitsOf]:
    """The golden model on the meta device."""
    from alignment.models.causal_lm import CausalLM

    model = CausalLM(config, dtype=dtype, device="meta")
    return model, model


def build_transformers(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str,
    experts_implementation: str,
) -> tuple[nn.Module, LogitsOf]:
    """transformers' ``DeepseekV3ForCausalLM``: parameters on the meta device, rope frequencies on ``device``.

    Raises:
        UnavailableError: transformers is not installed, or has no DeepseekV3.
        InputError: a setting that transformers does not compute.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UnavailableError(
            "transformers is not installed",
            where="fsdp_config.model",
            next_step="pip install transformers, or set fsdp_config.model=golden",
        )
    if importlib.util.find_spec("transformers.models.deepseek_v3") is None:
        from transformers import __version__

        raise UnavailableError(
            "this release of transformers has no DeepseekV3", expected="4.53 or later", found=__version__
        )
    if config.latent_norm_eps != _LATENT_NORM_EPS:
        raise InputError(
            "transformers fixes the ε of the latent norms",
            where="latent_norm_eps",
            expected=_LATENT_NORM_EPS,
            found=config.latent_norm_eps,
            next_step="set fsdp_config.model=golden",
        )
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    hf = DeepseekV3Config.from_dict({k: v for k, v in config.to_hf().items() if k not in ("torch_dtype", "dtype")})
    hf._attn_implementation = attn_implementation
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(hf).to(dtype)
    # Only releases that have a choice read it.
    model.config._experts_implementation = experts_implementation
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.ModuleList):
            module.register_forward_hook(_touch_every_expert)

    def logits_of(input_ids: Tensor, *, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        return model(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False).logits

    # What asks for log-probs instead of logits finds the output layer where the golden model has it.
    logits_of.lm_head = model.lm_head
    return model, logits_of


def _touch_every_expert(module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
    """Gives experts that no token chose a gradient of zero.

    transformers 4 skips them. FSDP2 sums the gradients that a rank *has*; ranks whose tokens chose other experts would
    sum tensors of different sizes.
    """
    return output + sum(p.sum() for p in module.experts.parameters()) * 0.0


def check_names(model: nn.Module, config: ModelConfig) -> None:
    """Refuses a model whose pieces are not the tensors of a checkpoint of ``config``."""
    expected = expected_shapes(config)
    found = {
        piece.name: tuple(piece.of(tensor).shape)
        for name, tensor in model.state_dict(keep_vars=True).items()
        for piece in pieces(name, tuple(tensor.shape))
    }
    strange = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
    if strange:
        raise InputError(
            f"the map of names does not fit this model: {strange[0]}",
            where=type(model).__module__,
            expected=expected.get(strange[0]),
            found=found.get(strange[0]),
        )


def recompute_activations(block: nn.Module) -> None:
    """Has the forward pass of ``block`` keep its inputs only, and run again in the backward pass.

    The method is wrapped, not the module, so that names stay and FSDP2's hooks stay outside of the recomputation.
    """
    from torch.utils.checkpoint import checkpoint

    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def shard_rows(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and behind the last of the ``rows`` in dimension 0 that FSDP2 gives to ``rank`` (``torch.chunk``'s
    rule)."""
    size = -(-rows // world_size)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def decoder_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The decoder layers, the units of sharding."""
    yield from model.model.layers
