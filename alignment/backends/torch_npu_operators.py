"""The subject ``torch_npu``: the fused operators that the Ascend stack calls. The only file that imports torch_npu.

Each is called the way MindSpeed or vLLM-Ascend calls it. On the emulated NPU the call log is read after every run, so a
result that some other path produced is not taken for that of the fused operator.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType

import torch
from torch.nn import functional as F

from alignment.backends.case import Case, Tensors, checked, observe
from alignment.backends.subject import SubjectAvailability
from alignment.backends.torch_operators import attention_mask, rope_tables, softmax_scale
from alignment.devices.base import Device
from alignment.errors import InputError

Attributes = Mapping[str, object]

FUSED = {
    "rms_norm": ("npu_rms_norm",),
    "add_rms_norm": ("npu_add_rms_norm",),
    "rope": ("npu_rotary_mul",),
    "attention": ("npu_fusion_attention",),
    "swiglu": ("npu_swiglu",),
    "router": ("npu_moe_gating_top_k",),
    "grouped_matmul": ("npu_grouped_matmul",),
    "token_permute": ("npu_moe_token_permute", "npu_moe_token_unpermute"),
    "log_prob": ("npu_cross_entropy_loss",),
}
"""The fused operators behind each operator of the catalogue; what is not here has none."""

_COMPRESSED_MASK = 2048  # side of the triangular mask that sparse modes 2 to 4 take, whatever the sequence length


class TorchNpuOperators:
    """Runs the unit cases with fused operators. Operators without a derivative are observed forward only."""

    name = "torch_npu"
    kinds = ("npu",)

    def available(self, device: Device) -> SubjectAvailability:
        if device.kind != "npu":
            return SubjectAvailability(available=False, reason="torch_npu runs on the npu only")
        if importlib.util.find_spec("torch_npu") is None:
            return SubjectAvailability(available=False, reason="torch_npu is not installed")
        return SubjectAvailability(available=True, reason=f"torch_npu on {device.label}")

    def supports(self, case: Case) -> bool:
        return case.operator in FUSED

    def run(self, case: Case, inputs: Tensors, device: Device) -> Tensors:
        placed = {name: tensor.to(device.torch_device) for name, tensor in inputs.items()}
        differentiable = () if case.operator in _FORWARD_ONLY else case.differentiable
        if device.emulated:
            from alignment.devices.emulated_npu import recorded_calls

            with recorded_calls() as log:
                observed = observe(_FORWARD[case.operator], placed, case.attributes, differentiable)
            require_fused(case, {call.name for call in log})
        else:
            observed = observe(_FORWARD[case.operator], placed, case.attributes, differentiable)
        device.synchronize()
        return checked(case, observed, self.name, partial=True)


def require_fused(case: Case, called: set[str]) -> None:
    """Refuses a result in which a fused operator of the case took no part.

    Raises:
        InputError: an operator of :data:`FUSED` was not called.
    """
    missing = [name for name in FUSED[case.operator] if name not in called]
    if missing:
        raise InputError(
            "the fused operator did not run, so its result was not judged",
            where=case.id,
            expected=", ".join(FUSED[case.operator]),
            found=", ".join(sorted(called)) or "no fused call",
        )


def _torch_npu() -> ModuleType:
    return importlib.import_module("torch_npu")


def rms_norm(t: Tensors, a: Attributes) -> Tensors:
    return {"output": _torch_npu().npu_rms_norm(t["x"], t["weight"], epsilon=a["eps"])[0]}


def add_rms_norm(t: Tensors, a: Attributes) -> Tensors:
    output, _, residual = _torch_npu().npu_add_rms_norm(t["x"], t["residual"], t["weight"], epsilon=a["eps"])
    return {"residual_out": residual, "output": output}


def rope(t: Tensors, a: Attributes) -> Tensors:
    x = t["x"]
    tables = (table[:, None].to(x.dtype) for table in rope_tables(t["position_ids"], a))
    if a["mode"] == "half":
        cos, sin = (torch.cat([table, table], dim=-1) for table in tables)
        return {"output": _torch_npu().npu_rotary_mul(x, cos, sin, rotary_mode="half")}
    cos, sin = (table.repeat_interleave(2, dim=-1) for table in tables)
    pairs = _torch_npu().npu_rotary_mul(x, cos, sin, rotary_mode="interleave")
    # The operator leaves pairs in place; DeepSeek's layout gathers their first members before the second ones.
    return {"output": torch.cat([pairs[..., 0::2], pairs[..., 1::2]], dim=-1)}


def attention(t: Tensors, a: Attributes) -> Tensors:
    if a["mask"] == "packed":
        return {"output": _packed_attention(t, a)}
    heads, real = t["q"].shape[1], t["segment_ids"] > 0
    if bool(real.all()):
        mask, mode = _compressed_mask(t["q"].device), 2
    else:
        mask, mode = ~attention_mask(t), 0
    output = _torch_npu().npu_fusion_attention(
        t["q"], t["k"], t["v"], heads, "BNSD", atten_mask=mask, scale=softmax_scale(a), sparse_mode=mode
    )[0]
    return {"output": output * real[:, None, :, None]}


def _packed_attention(t: Tensors, a: Attributes) -> torch.Tensor:
    """Layout TND: the real tokens of all rows in one line, cut at the ends of their segments."""
    segments = t["segment_ids"].cpu()
    b, s = segments.shape
    real = segments > 0
    key = (torch.arange(b)[:, None] * (s + 1) + segments)[real]
    ends = [i + 1 for i in range(len(key)) if i + 1 == len(key) or key[i + 1] != key[i]]
    place = real.flatten().nonzero()[:, 0].to(t["q"].device)
    q, k, v = (t[name].transpose(1, 2).flatten(0, 1)[place] for name in ("q", "k", "v"))
    output = _torch_npu().npu_fusion_attention(
        q, k, v, q.shape[1], "TND",
        atten_mask=_compressed_mask(q.device), scale=softmax_scale(a), sparse_mode=3,
        actual_seq_qlen=ends, actual_seq_kvlen=ends,
    )[0]  # fmt: skip
    rows = output.new_zeros(b * s, *output.shape[1:]).index_copy(0, place, output)
    return rows.unflatten(0, (b, s)).transpose(1, 2)


def _compressed_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(_COMPRESSED_MASK, _COMPRESSED_MASK, dtype=torch.bool, device=device).triu(1)


def swiglu(t: Tensors, a: Attributes) -> Tensors:
    return {"output": _torch_npu().npu_swiglu(t["x"], dim=-1)}


def router(t: Tensors, a: Attributes) -> Tensors:
    logits = F.linear(t["x"].float(), t["weight"].float())
    weights, chosen, scores = _torch_npu().npu_moe_gating_top_k(
        logits,
        a["top_k"],
        bias=t["bias"],
        k_group=a["topk_group"],
        group_count=a["n_group"],
        group_select_mode=1,
        norm_type=1,
        out_flag=True,
        routed_scaling_factor=a["routed_scaling_factor"],
    )
    empty = torch.zeros_like(scores)
    return {
        "scores_for_choice": scores + t["bias"],
        "selected": empty.scatter(-1, chosen.long(), 1.0),
        "weights": empty.scatter(-1, chosen.long(), weights),
    }


class _GroupedMatmul(torch.autograd.Function):
    """The operator has no derivative of its own; training stacks give it this one."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ends = ends
        return _grouped([x], [weight], ends, 0)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        grad_x = _grouped([gradient], [weight.transpose(1, 2).contiguous()], ctx.ends, 0)
        grad_weight = _grouped([x.t().contiguous()], [gradient], ctx.ends, 2)
        return grad_x, grad_weight, None


def _grouped(x: list[torch.Tensor], weight: list[torch.Tensor], ends: list[int], group_type: int) -> torch.Tensor:
    group_list = torch.tensor(ends, device=x[0].device)
    return _torch_npu().npu_grouped_matmul(x, weight, group_list=group_list, group_type=group_type, split_item=3)[0]


def grouped_matmul(t: Tensors, a: Attributes) -> Tensors:
    ends = torch.tensor(a["group_sizes"]).cumsum(0).tolist()
    return {"output": _GroupedMatmul.apply(t["x"], t["weight"], ends)}


def token_permute(t: Tensors, a: Attributes) -> Tensors:
    permuted, places = _torch_npu().npu_moe_token_permute(t["x"], t["expert_ids"].int())
    output = _torch_npu().npu_moe_token_unpermute(t["expert_output"], places, probs=t["probs"])
    return {"permuted": permuted, "output": output}


def log_prob(t: Tensors, a: Attributes) -> Tensors:
    logits = t["logits"].float()
    loss = _torch_npu().npu_cross_entropy_loss(logits.flatten(0, 1), t["labels"].flatten(), reduction="none")[0]
    log_p = F.log_softmax(logits, dim=-1)
    return {
        "log_prob": -loss.view(t["labels"].shape),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "cross_entropy": loss.mean(),
    }


_FORWARD = {
    f.__name__: f
    for f in (rms_norm, add_rms_norm, rope, attention, swiglu, router, grouped_matmul, token_permute, log_prob)
}
_FORWARD_ONLY = ("add_rms_norm",)
