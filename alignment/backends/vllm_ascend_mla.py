"""vLLM-Ascend's own MLA post-processing, run on the emulated NPU: are its derived tensors right, and do they stay so?

``AscendMLAImpl.process_weights_after_loading`` splits ``kv_b_proj`` into the two matrices of absorbed attention,
``W_UV`` and ``W_UK_T``, and makes them contiguous. They are copies: a weight update in place, which is what a
reinforcement-learning sync does, does not reach them until it runs again, and decode goes on with the old policy while
prefill uses the new one.

The class is made without its constructor, which wants a whole vLLM; what the method reads is set by hand, and what the
file imports of vLLM is stubbed. The method touches tensors only, and only tensors are asserted on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from alignment.backends.plugin_process import LABEL, drive_in_process, install_emulated_npu, installed_from, main
from alignment.backends.plugin_sources import PluginSource
from alignment.backends.weight_sync import bytes_of, reachable_tensors
from alignment.devices.aliasing import facts, sentinel_seen, shares_storage
from alignment.numerics.random import portable_normal
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

MODULE = "vllm_ascend.attention.mla_v1"
IMPLEMENTATION = "AscendMLAImpl"
DERIVED = ("W_UV", "W_UK_T")
# torch_npu._C is compiled, and looked at when classes are made; torchair is Ascend's graph compiler.
STUBBED = ("vllm", "torchair", "torch_npu._C")
# Written by the plugin's build (_build_info, its compiled operators), or optional beside it.
STUBBED_IF_MISSING = (
    *("vllm_ascend._build_info", "vllm_ascend.vllm_ascend_C"),
    *("acl", "einops", "msgpack", "regex", "transformers", "triton"),
)
BUILD_INFO = {"__device_type__": "A2", "__soc_version__": "ascend910b1"}
# dtypes of newer torch_npu releases that newer plugins look up while they are imported
TORCH_NPU_DTYPES = ("float4_e2m1fn_x2", "float4_e1m2fn_x2", "float8_e8m0fnu", "hifloat8")
# Files of newer releases import each other in a circle that only opens from this end.
IMPORTED_FIRST = ((), ("vllm_ascend.ops",))


@dataclass(frozen=True, kw_only=True)
class MLAShape:
    """Sizes of one latent attention in DeepSeek's names, small and all different so that no swap goes unseen."""

    num_heads: int = 3
    kv_lora_rank: int = 20
    qk_nope_head_dim: int = 8
    qk_rope_head_dim: int = 4
    v_head_dim: int = 6


def check_vllm_ascend(source: PluginSource, **limits: float) -> list[Verdict]:
    """Three verdicts on a source of vLLM-Ascend, from a process of its own.

    ``vllm_ascend_mla.after_loading`` (both tensors equal what ``kv_b_proj`` gives, bit for bit),
    ``vllm_ascend_mla.in_place_update`` (the same after ``kv_b_proj.weight`` was overwritten in place), and
    ``vllm_ascend_mla.post_processing_again`` (the same once the post-processing has run again).

    Raises:
        UnavailableError: the emulated NPU cannot be had here.
    """
    return drive_in_process(__name__, source, **limits)


def expected_tensors(weight: Tensor, shape: MLAShape) -> dict[str, Tensor]:
    """``W_UV`` [n, l, v] and ``W_UK_T`` [n, p, l] from ``kv_b_proj.weight`` [n · (p + v), l], in fresh memory.

    n heads, l = ``kv_lora_rank``, p = ``qk_nope_head_dim``, v = ``v_head_dim``. Source: DeepSeek-V2, arXiv:2405.04434,
    section 2.1.2 (W^UK and W^UV absorbed into the query and output projections), in the layout of vLLM's MLA backend.
    """
    p, v = shape.qk_nope_head_dim, shape.v_head_dim
    per_head = weight.detach().reshape(shape.num_heads, p + v, shape.kv_lora_rank)
    return {"W_UV": per_head[:, p:].transpose(1, 2).clone(), "W_UK_T": per_head[:, :p].clone()}


class _Linear(nn.Module):
    """As much of vLLM's linear layer as the post-processing reads: a weight [out, in] and how it is quantized."""

    def __init__(self, weight: Tensor, quant_method: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = quant_method
        self.input_size_per_partition = weight.shape[1]


def drive(root: Path, subject: str) -> list[Verdict]:
    """The process's side of :func:`check_vllm_ascend`."""
    from alignment.devices.emulated_npu.import_stubs import auto_stubs

    install_emulated_npu()
    import torch_npu

    for name in TORCH_NPU_DTYPES:
        if name not in vars(torch_npu):
            setattr(torch_npu, name, name)
    values = {f"vllm_ascend._build_info.{name}": value for name, value in BUILD_INFO.items()}
    with auto_stubs(STUBBED, missing=STUBBED_IF_MISSING, values=values) as stubs:
        importlib.import_module("torch_npu._C")
        module = _imported()
        installed_from(root, module)
        return list(_judged(module, subject, str(stubs)))


def _imported() -> ModuleType:
    for number, before in enumerate(IMPORTED_FIRST, start=1):
        try:
            for name in before:
                importlib.import_module(name)
            return importlib.import_module(MODULE)
        except ImportError as error:
            if number == len(IMPORTED_FIRST) or "circular import" not in str(error):
                raise
            for name in [n for n in sys.modules if n.split(".")[0] == "vllm_ascend"]:
                del sys.modules[name]
    raise AssertionError("unreachable")


def _implementation(module: ModuleType, shape: MLAShape, weight: Tensor) -> Any:
    utils = sys.modules.get("vllm_ascend.utils")
    for name in ("_ENABLE_NZ", "_IS_EAGLE_MODE"):  # 0.11: set by its constructor's caller, from a vLLM configuration
        if utils is not None and getattr(utils, name, False) is None:
            setattr(utils, name, False)
    implementation = object.__new__(getattr(module, IMPLEMENTATION))
    attributes = {
        **vars(shape),
        "qk_head_dim": shape.qk_nope_head_dim + shape.qk_rope_head_dim,
        "kv_b_proj": _Linear(weight, module.UnquantizedLinearMethod()),
        # what later releases decide on in the constructor: nothing is quantized, fused or sharded here
        "fused_qkv_a_proj": None,
        "enable_mlapo": False,
        "enable_kv_nz": False,
        "fa_quant_layer": False,
        "layer_sharding_kwargs": [],
    }
    for name, value in attributes.items():
        setattr(implementation, name, value)
    return implementation


def _judged(module: ModuleType, subject: str, stubs: str) -> Iterator[Verdict]:
    shape = MLAShape()
    size = (shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank)
    # float32: the post-processing casts no float32 weight to an internal format, so no configuration is needed
    loaded, synced = (
        portable_normal(size, seed=1, stream=f"kv_b_proj {step}", dtype=torch.float32).to("npu")
        for step in ("loaded", "synced")
    )
    implementation = _implementation(module, shape, loaded)
    implementation.process_weights_after_loading(torch.float32)

    def state(step: str) -> tuple[list[str], dict[str, Tensor]]:
        held = {name: getattr(implementation, name) for name in DERIVED}
        expected = expected_tensors(implementation.kv_b_proj.weight, shape)
        return [n for n in DERIVED if not torch.equal(bytes_of(held[n]), bytes_of(expected[n]))], held

    def kinship_of(name: str) -> str:
        reached = sentinel_seen(implementation.kv_b_proj.weight, getattr(implementation, name))
        return "a view of kv_b_proj.weight" if reached else "a copy: no write to kv_b_proj.weight reaches it"

    def verdict(check: str, wrong: list[str], bad: str, good: str, shown: list[Measure]) -> Verdict:
        held = Measure(
            name="derived tensors that are wrong",
            value=float(len(wrong)),
            bound=0.0,
            unit="tensors",
            origin="exact: splitting, transposing and copying change no bit",
        )
        return Verdict(
            check=f"vllm_ascend_mla.{check}",
            layer="layer",
            stage="weight_sync",
            subject=subject,
            device=LABEL,
            outcome=Outcome.FAIL if wrong else Outcome.PASS,
            reason=f"{', '.join(wrong)} {bad}" if wrong else good,
            measures=(held, *shown),
            where=Divergence(
                stage="weight_sync", module=f"{MODULE}.{IMPLEMENTATION}", quantity=wrong[0], detail=kinship_of(wrong[0])
            )
            if wrong
            else None,
            next_command="run the post-processing after every update" if wrong and check == "in_place_update" else None,
        )

    wrong, held = state("loaded")
    others = [n for n in _walked(implementation) if n not in DERIVED]
    kinship = [
        Measure(
            name=f"{name} sees a write to kv_b_proj.weight",
            value=float(sentinel_seen(implementation.kv_b_proj.weight, tensor)),
        )
        for name, tensor in held.items()
    ]
    kinship += [
        Measure(
            name=f"{name} shares the storage of kv_b_proj.weight",
            value=float(shares_storage(implementation.kv_b_proj.weight, tensor)),
        )
        for name, tensor in held.items()
    ]
    kinship.append(Measure(name="other tensors the layer holds", value=float(len(others)), unit="tensors"))
    good = "W_UV and W_UK_T are what kv_b_proj gives"
    yield verdict("after_loading", wrong, "are not what kv_b_proj gives", f"{good} (imported with {stubs})", kinship)

    with torch.no_grad():
        implementation.kv_b_proj.weight.copy_(synced)
    before = {name: facts(tensor) for name, tensor in held.items()}
    wrong, held = state("synced")
    far = [
        Measure(name=f"{name} relative_l2 from its recomputation", value=_apart(held[name], expected))
        for name, expected in expected_tensors(implementation.kv_b_proj.weight, shape).items()
    ]
    bad = "are stale after kv_b_proj.weight was updated in place"
    yield verdict("in_place_update", wrong, bad, f"{good} after an update in place", far)

    implementation.process_weights_after_loading(torch.float32)
    wrong, held = state("processed")
    moved = [n for n in DERIVED if facts(held[n]).data_ptr != before[n].data_ptr]
    address = Measure(
        name="derived tensors at a new address (a graph captured before reads the old one)",
        value=float(len(moved)),
        unit="tensors",
    )
    bad = "are not what kv_b_proj gives although the post-processing has run again"
    yield verdict("post_processing_again", wrong, bad, f"{good} once the post-processing has run again", [address])


def _walked(implementation: Any) -> list[str]:
    return [name for name, _ in reachable_tensors([("", implementation)])]


def _apart(found: Tensor, expected: Tensor) -> float:
    from alignment.numerics.metrics import relative_l2

    return relative_l2(found.cpu(), expected.cpu())


if __name__ == "__main__":
    main("alignment.backends.vllm_ascend_mla", drive)
