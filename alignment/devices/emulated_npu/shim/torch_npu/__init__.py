"""The emulated device's ``torch_npu``: the fused operators the Ascend stack calls, each logged and in plain PyTorch.

Signatures, defaults and semantics follow the public documentation in Ascend/op-plugin (``docs/zh/custom_APIs`` and the
schemas in ``op_plugin/config/op_plugin_functions.yaml``); an operator has gradients exactly where
``op_plugin/config/*derivatives.yaml`` gives it some. Low-precision inputs are computed in float32 and rounded once.
``alignment.devices.emulated_npu.recorded_calls`` shows what each call was handed. A name that is not here raises.
"""

from __future__ import annotations

import sys as _sys

import torch as _torch

from alignment.devices.emulated_npu import install as _install

_install()

from torch_npu.attention import npu_fusion_attention  # noqa: E402
from torch_npu.formats import Format, get_npu_format, npu_format_cast, npu_format_cast_  # noqa: E402
from torch_npu.grouped_matmul import npu_grouped_matmul  # noqa: E402
from torch_npu.loss import npu_cross_entropy_loss  # noqa: E402
from torch_npu.moe import (  # noqa: E402
    npu_moe_compute_expert_tokens,
    npu_moe_finalize_routing,
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
    npu_moe_token_permute,
    npu_moe_token_permute_with_routing_map,
    npu_moe_token_unpermute,
    npu_moe_token_unpermute_with_routing_map,
)
from torch_npu.pointwise import (  # noqa: E402
    npu_add_rms_norm,
    npu_rms_norm,
    npu_rotary_mul,
    npu_rotary_position_embedding,
    npu_swiglu,
)

__all__ = [
    "Format",
    "get_npu_format",
    "npu",
    "npu_add_rms_norm",
    "npu_cross_entropy_loss",
    "npu_format_cast",
    "npu_format_cast_",
    "npu_fusion_attention",
    "npu_grouped_matmul",
    "npu_moe_compute_expert_tokens",
    "npu_moe_finalize_routing",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing",
    "npu_moe_init_routing_v2",
    "npu_moe_token_permute",
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_with_routing_map",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_rotary_position_embedding",
    "npu_swiglu",
]

__version__ = f"{_torch.__version__.split('+')[0]}+emulated"

npu = _torch.npu
_sys.modules.update({f"{__name__}.npu": npu, f"{__name__}.npu.amp": npu.amp, f"{__name__}.npu.streams": npu.streams})


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # the import system and inspect probe these
        raise AttributeError(name)
    raise AttributeError(
        f"the emulated torch_npu has no {name!r}: add it to alignment/devices/emulated_npu/shim/torch_npu from its "
        "public documentation, or skip the test on the emulator"
    )
