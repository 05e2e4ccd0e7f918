"""The catalogue of unit cases: the operators a DeepSeek-style model and its RL losses are made of.

Shapes are small, head widths are the real ones (192 for queries and keys, 128 for values) where the width is
the point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from alignment.backends import golden_operators as golden
from alignment.backends.case import DTYPES, Case, Draw, Quantity, Tensors, observe
from alignment.backends.routing import NEAR_TIE_ROUNDOFFS, routing_gap
from alignment.numerics.precision import unit_roundoff

SEED = 20250828

PLAIN = {"theta": 50000.0, "factor": 0.0, "mscale": 0.0, "mscale_all_dim": 0.0}
# Two different mscale fields, so that a table correction and a softmax correction cannot be taken for each other.
YARN = {
    "theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
MLA_HEAD = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
TINY_HEAD = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20}


@cache
def operator_cases() -> tuple[Case, ...]:
    """Every unit case, in the order of the catalogue; building inputs and golden values waits until they are asked for."""
    return tuple(case for dtype in DTYPES for case in _cases(dtype))


def _cases(dtype: str):
    def case(
        operator: str,
        build: Callable[[Draw], Tensors],
        *,
        reductions: Mapping[str, int],
        differentiable: tuple[str, ...],
        quantities: tuple[Quantity, ...] | None = None,
        wide: tuple[str, ...] = (),
        **more,
    ) -> Case:
        # wide: quantities that are float32 in every run dtype
        quantities = quantities or tuple(
            Quantity(name=name, module=operator, reduction_length=n, dtype="float32" if name in wide else None)
            for name, n in reductions.items()
        )
        forward = getattr(golden, operator)

        def golden_function(inputs: Tensors, attributes: Mapping[str, object]) -> Tensors:
            return observe(forward, inputs, attributes, differentiable)

        return Case(
            operator=operator,
            dtype=dtype,
            seed=SEED,
            build=build,
            golden=golden_function,
            quantities=quantities,
            differentiable=differentiable,
            **more,
        )

    hidden, tokens = 128, 16

    def rms_norm(draw: Draw) -> Tensors:
        # Rows whose mean square is about eps tell a missing or misplaced eps from a right one.
        rows = torch.tensor([1.0, 3e-3]).reshape(2, 1, 1)
        return {
            "x": (draw.normal("x", 2, 8, hidden, dtype=torch.float64) * rows).to(DTYPES[dtype]),
            "weight": draw.uniform("weight", hidden, low=0.5, high=1.5),
            "cotangent.output": draw.normal("cotangent", 2, 8, hidden),
        }

    yield case(
        "rms_norm",
        rms_norm,
        reductions={"output": hidden, "grad.x": hidden, "grad.weight": tokens},
        differentiable=("x", "weight"),
        batched=("x", "cotangent.output"),
        batched_outputs=("output",),
        llm_operator=True,
        attributes={"eps": 1e-6},
    )

    def add_rms_norm(draw: Draw) -> Tensors:
        return {
            "x": draw.normal("x", 2, 8, hidden),
            "residual": draw.normal("residual", 2, 8, hidden),
            "weight": draw.uniform("weight", hidden, low=0.5, high=1.5),
            "cotangent.residual_out": draw.normal("cotangent.residual", 2, 8, hidden),
            "cotangent.output": draw.normal("cotangent", 2, 8, hidden),
        }

    yield case(
        "add_rms_norm",
        add_rms_norm,
        reductions={"residual_out": 2, "output": hidden, "grad.x": hidden, "grad.residual": hidden, "grad.weight": tokens},
        differentiable=("x", "residual", "weight"),
        batched=("x", "residual", "cotangent.residual_out", "cotangent.output"),
        batched_outputs=("residual_out", "output"),
        llm_operator=True,
        attributes={"eps": 1e-5},
    )

    def rope(draw: Draw) -> Tensors:
        return {
            "x": draw.normal("x", 2, 2, 12, 64),
            "position_ids": draw.integers("position_ids", 2, 12, low=0, high=5000),
            "cotangent.output": draw.normal("cotangent", 2, 2, 12, 64),
        }

    for kind, table in (("plain", PLAIN), ("yarn", YARN)):
        for mode in ("half", "interleave"):
            yield case(
                "rope",
                rope,
                variant=f"{kind}-{mode}",
                reductions={"output": 2, "grad.x": 2},
                differentiable=("x",),
                batched=("x", "position_ids", "cotangent.output"),
                batched_outputs=("output",),
                llm_operator=True,
                attributes={**table, "rope_dim": 64, "mode": mode},
            )

    def attention(segments: list[list[int]], heads: int, width: Mapping[str, int]) -> Callable[[Draw], Tensors]:
        b, s = len(segments), len(segments[0])
        qk, v = width["qk_nope_head_dim"] + width["qk_rope_head_dim"], width["v_head_dim"]

        def build(draw: Draw) -> Tensors:
            segment_ids = torch.tensor(segments)
            return {
                "q": draw.normal("q", b, heads, s, qk),
                "k": draw.normal("k", b, heads, s, qk),
                "v": draw.normal("v", b, heads, s, v),
                "segment_ids": segment_ids,
                "cotangent.output": draw.normal("cotangent", b, heads, s, v) * (segment_ids > 0)[:, None, :, None],
            }

        return build

    whole = [[1] * 8, [1] * 8]
    padded = [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 0]]
    packed = [[1, 1, 1, 2, 2, 2, 2, 3], [1, 2, 2, 2, 2, 2, 0, 0]]
    for variant, segments, width, table in (
        ("mla", whole, MLA_HEAD, PLAIN),
        ("mla-yarn", whole, MLA_HEAD, YARN),
        ("padding", padded, TINY_HEAD, PLAIN),
        ("packed", packed, TINY_HEAD, YARN),
    ):
        qk = width["qk_nope_head_dim"] + width["qk_rope_head_dim"]
        yield case(
            "attention",
            attention(segments, 2, width),
            variant=variant,
            reductions={"output": 8, "grad.q": qk, "grad.k": qk, "grad.v": 8},
            differentiable=("q", "k", "v"),
            batched=("q", "k", "v", "segment_ids", "cotangent.output"),
            batched_outputs=("output",),
            llm_operator=True,
            attributes={**width, **table, "mask": variant},
        )

    def swiglu(draw: Draw) -> Tensors:
        return {"x": draw.normal("x", 2, 8, 128, scale=2.0), "cotangent.output": draw.normal("cotangent", 2, 8, 64)}

    yield case(
        "swiglu",
        swiglu,
        reductions={"output": 2, "grad.x": 2},
        differentiable=("x",),
        batched=("x", "cotangent.output"),
        batched_outputs=("output",),
        llm_operator=True,
    )

    experts = 16

    def router(routing: Mapping[str, object]) -> Callable[[Draw], Tensors]:
        def build(draw: Draw) -> Tensors:
            # The router's weight and bias are float32 in every run dtype (DeepSeek-V3 keeps its gate in float32).
            weight = draw.normal("weight", experts, 64, scale=0.15, dtype=torch.float32)
            bias = draw.normal("bias", experts, scale=0.1, dtype=torch.float32)
            candidates = draw.normal("x", 4 * tokens, 64)
            scores = torch.sigmoid(candidates.double() @ weight.double().T) + bias
            gap = routing_gap(scores, golden.router_config(experts, routing))
            decided = (gap >= NEAR_TIE_ROUNDOFFS * unit_roundoff(dtype)).nonzero().flatten()
            return {
                # Rows that a moved input would route otherwise say nothing about arithmetic.
                "x": candidates[decided[:tokens]],
                "weight": weight,
                "bias": bias,
                "cotangent.weights": draw.normal("cotangent", tokens, experts, dtype=torch.float32),
            }

        return build

    for variant, groups in (("plain", (1, 1)), ("groups", (4, 2))):
        routing = {
            "n_group": groups[0],
            "topk_group": groups[1],
            "top_k": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.446,
        }
        yield case(
            "router",
            router(routing),
            variant=variant,
            reductions={},
            quantities=(
                Quantity(name="scores_for_choice", module="router", reduction_length=64, dtype="float32"),
                Quantity(name="selected", module="router", kind="choice", scores="scores_for_choice", dtype="float32"),
                Quantity(name="weights", module="router", reduction_length=64, dtype="float32"),
                Quantity(name="grad.x", module="router", reduction_length=experts),
                Quantity(name="grad.weight", module="router", reduction_length=tokens, dtype="float32"),
            ),
            differentiable=("x", "weight"),
            batched=("x", "cotangent.weights"),
            batched_outputs=("scores_for_choice", "selected", "weights"),
            llm_operator=True,
            attributes=routing,
        )

    group_sizes = (5, 0, 3, 8)

    def grouped_matmul(draw: Draw) -> Tensors:
        return {
            "x": draw.normal("x", tokens, 64),
            "weight": draw.normal("weight", len(group_sizes), 64, 32, scale=0.125),
            "cotangent.output": draw.normal("cotangent", tokens, 32),
        }

    yield case(
        "grouped_matmul",
        grouped_matmul,
        reductions={"output": 64, "grad.x": 32, "grad.weight": max(group_sizes)},
        differentiable=("x", "weight"),
        llm_operator=True,
        attributes={"group_sizes": group_sizes},
    )

    top_k = 3

    def token_permute(draw: Draw) -> Tensors:
        ranked = draw.uniform("expert_ids", tokens, 8, dtype=torch.float64).argsort(dim=-1, stable=True)
        return {
            "x": draw.normal("x", tokens, 64),
            "expert_ids": ranked[:, :top_k].contiguous(),
            "expert_output": draw.normal("expert_output", tokens * top_k, 64),
            "probs": draw.uniform("probs", tokens, top_k, low=0.1, high=1.0),
            "cotangent.permuted": draw.normal("cotangent.permuted", tokens * top_k, 64),
            "cotangent.output": draw.normal("cotangent", tokens, 64),
        }

    yield case(
        "token_permute",
        token_permute,
        reductions={"permuted": 1, "output": top_k, "grad.x": top_k, "grad.expert_output": 1, "grad.probs": 64},
        differentiable=("x", "expert_output", "probs"),
        llm_operator=True,
    )

    vocabulary = 96

    def log_prob(draw: Draw) -> Tensors:
        return {
            "logits": draw.normal("logits", 2, 8, vocabulary, scale=3.0),
            "labels": draw.integers("labels", 2, 8, low=0, high=vocabulary),
            "cotangent.log_prob": draw.normal("cotangent.log_prob", 2, 8, dtype=torch.float32),
            "cotangent.entropy": draw.normal("cotangent.entropy", 2, 8, dtype=torch.float32),
            "cotangent.cross_entropy": draw.normal("cotangent.cross_entropy", dtype=torch.float32),
        }

    yield case(
        "log_prob",
        log_prob,
        reductions={"log_prob": vocabulary, "entropy": vocabulary, "cross_entropy": vocabulary, "grad.logits": vocabulary},
        wide=("log_prob", "entropy", "cross_entropy"),
        differentiable=("logits",),
        batched=("logits", "labels", "cotangent.log_prob", "cotangent.entropy"),
        batched_outputs=("log_prob", "entropy"),
    )

    def matmul(draw: Draw) -> Tensors:
        return {
            "x": draw.normal("x", 2, 8, 256),
            "weight": draw.normal("weight", 24, 256, scale=1 / 16),
            "cotangent.output": draw.normal("cotangent", 2, 8, 24),
        }

    yield case(
        "matmul",
        matmul,
        reductions={"output": 256, "grad.x": 24, "grad.weight": tokens},
        differentiable=("x", "weight"),
        batched=("x", "cotangent.output"),
        batched_outputs=("output",),
        llm_operator=True,
    )

    def embedding(draw: Draw) -> Tensors:
        return {
            "input_ids": draw.integers("input_ids", 2, 12, low=0, high=10),
            "weight": draw.normal("weight", 32, 64),
            "cotangent.output": draw.normal("cotangent", 2, 12, 64),
        }

    yield case(
        "embedding",
        embedding,
        reductions={"output": 1, "grad.weight": 8},
        differentiable=("weight",),
        perturbed=("weight",),
        batched=("input_ids", "cotangent.output"),
        batched_outputs=("output",),
    )
