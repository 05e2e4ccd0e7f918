"""The subject ``torch``: operators written with plain aten ops, independently of the golden model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from alignment.backends.case import Case, Tensors, checked, observe
from alignment.backends.subject import EVERY_KIND, SubjectAvailability
from alignment.devices.base import Device

Attributes = Mapping[str, object]


class TorchOperators:
    """Runs the unit cases with what PyTorch itself dispatches to on the device."""

    name = "torch"
    kinds = EVERY_KIND

    def available(self, device: Device) -> SubjectAvailability:
        return SubjectAvailability(available=True, reason=f"torch {torch.__version__} on {device.label}")

    def supports(self, case: Case) -> bool:
        return case.operator in FORWARD

    def run(self, case: Case, inputs: Tensors, device: Device) -> Tensors:
        placed = {name: tensor.to(device.torch_device) for name, tensor in inputs.items()}
        observed = observe(FORWARD[case.operator], placed, case.attributes, case.differentiable)
        device.synchronize()
        return checked(case, observed, self.name)


def rms_norm(t: Tensors, a: Attributes) -> Tensors:
    return {"output": F.rms_norm(t["x"], t["weight"].shape, t["weight"], a["eps"])}


def add_rms_norm(t: Tensors, a: Attributes) -> Tensors:
    residual = t["x"] + t["residual"]
    return {"residual_out": residual, "output": F.rms_norm(residual, t["weight"].shape, t["weight"], a["eps"])}


def rope_tables(position_ids: torch.Tensor, a: Attributes) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [b, s, rope_dim / 2] in float32, whatever the run dtype.

    The angles are taken in float64 on the host: an NPU has no float64, and in float32 position 5000 is off by 2e-4 rad.
    """
    half = torch.arange(0, a["rope_dim"], 2, dtype=torch.float64)
    frequency = a["theta"] ** (-half / a["rope_dim"])
    amplitude = 1.0
    if a["factor"]:
        low, high = (
            a["rope_dim"]
            * math.log(a["original_max_position_embeddings"] / (turns * 2 * math.pi))
            / (2 * math.log(a["theta"]))
            for turns in (a["beta_fast"], a["beta_slow"])
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), a["rope_dim"] - 1)
        kept = 1 - ((half / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
        frequency = frequency / a["factor"] * (1 - kept) + frequency * kept
        amplitude = yarn_mscale(a["factor"], a["mscale"]) / yarn_mscale(a["factor"], a["mscale_all_dim"])
    angle = position_ids.cpu()[..., None].double() * frequency
    return tuple((table * amplitude).float().to(position_ids.device) for table in (angle.cos(), angle.sin()))


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope(t: Tensors, a: Attributes) -> Tensors:
    cos, sin = (table[:, None] for table in rope_tables(t["position_ids"], a))
    if a["mode"] == "interleave":
        first, second = t["x"][..., 0::2], t["x"][..., 1::2]
    else:
        first, second = t["x"].chunk(2, dim=-1)
    return {"output": torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(t["x"].dtype)}


def attention_mask(t: Tensors) -> torch.Tensor:
    """Boolean mask [b, 1, s, s], True where a query may look; a padded query looks at itself, to stay finite."""
    segments = t["segment_ids"]
    s = segments.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=segments.device).tril()
    together = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
    itself = torch.eye(s, dtype=torch.bool, device=segments.device)
    return ((together & causal) | itself)[:, None]


def softmax_scale(a: Attributes) -> float:
    scale = (a["qk_nope_head_dim"] + a["qk_rope_head_dim"]) ** -0.5
    return scale * yarn_mscale(a["factor"], a["mscale_all_dim"]) ** 2


def attention(t: Tensors, a: Attributes) -> Tensors:
    out = F.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=attention_mask(t), scale=softmax_scale(a))
    return {"output": out * (t["segment_ids"] > 0)[:, None, :, None]}


def swiglu(t: Tensors, a: Attributes) -> Tensors:
    gate, up = t["x"].chunk(2, dim=-1)
    return {"output": F.silu(gate) * up}


def router(t: Tensors, a: Attributes) -> Tensors:
    scores = torch.sigmoid(F.linear(t["x"].float(), t["weight"].float()))
    choice = scores.detach() + t["bias"]
    groups = choice.unflatten(-1, (a["n_group"], -1))
    group_scores = groups.topk(2, dim=-1).values.sum(-1)
    chosen_groups = torch.zeros_like(group_scores).scatter(-1, group_scores.topk(a["topk_group"]).indices, 1.0).bool()
    choice = groups.masked_fill(~chosen_groups[..., None], -math.inf).flatten(-2)
    selected = torch.zeros_like(scores).scatter(-1, choice.topk(a["top_k"]).indices, 1.0)
    weights = scores * selected
    if a["norm_topk_prob"]:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return {
        "scores_for_choice": scores.detach() + t["bias"],
        "selected": selected,
        "weights": weights * a["routed_scaling_factor"],
    }


def grouped_matmul(t: Tensors, a: Attributes) -> Tensors:
    rows = t["x"].split(list(a["group_sizes"]))
    return {"output": torch.cat([part @ weight for part, weight in zip(rows, t["weight"])])}


def token_permute(t: Tensors, a: Attributes) -> Tensors:
    k = t["expert_ids"].shape[1]
    order = t["expert_ids"].flatten().argsort(stable=True)
    weighted = t["expert_output"] * t["probs"].flatten()[order][:, None]
    back = torch.zeros_like(t["x"]).index_add(0, order // k, weighted.to(t["x"].dtype))
    return {"permuted": t["x"][order // k], "output": back}


def log_prob(t: Tensors, a: Attributes) -> Tensors:
    logits = t["logits"].float()
    log_probs = F.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, t["labels"][..., None])[..., 0]
    entropy = torch.logsumexp(logits, dim=-1) - (log_probs.exp() * logits).sum(-1)
    return {
        "log_prob": chosen,
        "entropy": entropy,
        "cross_entropy": F.cross_entropy(logits.flatten(0, 1), t["labels"].flatten()),
    }


def matmul(t: Tensors, a: Attributes) -> Tensors:
    return {"output": F.linear(t["x"], t["weight"])}


def embedding(t: Tensors, a: Attributes) -> Tensors:
    return {"output": F.embedding(t["input_ids"], t["weight"])}


FORWARD = {
    f.__name__: f
    for f in (
        rms_norm,
        add_rms_norm,
        rope,
        attention,
        swiglu,
        router,
        grouped_matmul,
        token_permute,
        log_prob,
        matmul,
        embedding,
    )
}
