"""Pipeline parallelism: which layers a stage holds, and a forward through the stages, one micro batch after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.models.attention import attention_mask_from, default_positions, scaled_dot_product
from alignment.models.causal_lm import CausalLM
from alignment.models.parallel.context_parallel import run_layer


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Some layers of a model.

    Attributes:
        layers: their indices in the *whole* model, from 0.
    """

    layers: tuple[int, ...]


def stages(layers: int, *, pp: int, virtual: int = 1) -> list[list[Stage]]:
    """``stages(…)[chunk][rank]``: rank r holds, of every one of the ``virtual`` chunks, the r-th piece (Narayanan et
    al., *Efficient large-scale language model training*, arXiv:2104.04473, interleaved schedule).

    Raises:
        InputError: the layers do not divide.
    """
    if layers % (pp * virtual):
        raise InputError(
            "layers are shared out evenly", where="pipeline", expected=f"a multiple of {pp * virtual}", found=layers
        )
    size = layers // (pp * virtual)
    return [
        [Stage(layers=tuple(range((chunk * pp + rank) * size, (chunk * pp + rank + 1) * size))) for rank in range(pp)]
        for chunk in range(virtual)
    ]


def layer_number(stage: Stage, local: int) -> int:
    """The number of a stage's ``local``-th layer in the whole model, from 1: features that depend on depth read it."""
    return stage.layers[local] + 1


def pipeline_logits(
    model: CausalLM,
    micro_batches: Sequence[Tensor],
    *,
    pp: int,
    virtual: int = 1,
    attention_masks: Sequence[Tensor] | None = None,
    scale_by_inverse_layer: bool = False,
) -> list[Tensor]:
    """Logits ``[b, s, v]`` of each micro batch, through all stages in order.

    Args:
        micro_batches: int64 ``[b, s]`` each.
        attention_masks: ``[b, s]`` each, non-zero for real tokens; all by default.
        scale_by_inverse_layer: divide the scores of a layer by its number, as GPT-2 does with
            ``scale_attn_by_inverse_layer_idx`` and Megatron-LM's query-key layer scaling does in between.
    """
    order = [stage for chunk in stages(len(model.model.layers), pp=pp, virtual=virtual) for stage in chunk]
    results = []
    for number, input_ids in enumerate(micro_batches):
        real = torch.ones_like(input_ids) if attention_masks is None else attention_masks[number]
        rope = model.model.rotary(default_positions(real), model.dtype)
        mask = attention_mask_from(real)

        def attend(queries, keys, values, *, scale, number, mask=mask):
            factor = scale / number if scale_by_inverse_layer else scale
            return [scaled_dot_product(queries[0], keys[0], values[0], scale=factor, mask=mask)]

        hidden = model.model.embed_tokens(input_ids)
        for stage in order:
            for local, index in enumerate(stage.layers):
                number_of = layer_number(stage, local)
                hidden = run_layer(model.model.layers[index], [hidden], [rope], attend, number=number_of)[0]
        results.append(model.lm_head(model.model.norm(hidden)))
    return results
