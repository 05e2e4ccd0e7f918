"""The attention kernel and its masks against the definition, pair by pair."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.fault import OPERATOR
from alignment.faults.reference import language_model
from alignment.models import attention, linear_attention

KERNEL = "attention.scaled_dot_product"

# Rows of segment ids; 0 is padding. Unequal in every row, so that no row's boundaries fit another.
LAYOUTS = {
    "whole": [[1] * 7, [1] * 7],
    "padded": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]],
    "packed": [[1, 1, 1, 2, 2, 2, 3], [1, 2, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 0, 0]],
}


def _allowed(segments: list[list[int]], queries: int) -> Tensor:
    """By its definition: a real key, not later than the query, of the query's segment."""
    rows, width = len(segments), len(segments[0])
    allowed = torch.zeros(rows, queries, width, dtype=torch.bool)
    for row in range(rows):
        for q in range(queries):
            slot = width - queries + q
            for key in range(slot + 1):
                allowed[row, q, key] = segments[row][key] > 0 and segments[row][key] == segments[row][slot]
    return allowed


def masks(setting: Setting) -> Iterator[Finding]:
    """Masks of padded and packed batches, for whole sequences and for the last slots alone."""
    for name, segments in LAYOUTS.items():
        ids = torch.tensor(segments)
        for queries in (len(segments[0]), 3, 1):
            found = attention.attention_mask_from(
                (ids > 0).long(), query_slots=queries, segment_ids=ids if name == "packed" else None
            )
            golden = _allowed(segments, queries)
            if name != "packed":
                # Without segments a query that is padding still has a row, which nobody reads.
                real = (ids > 0)[:, -queries:, None]
                found, golden = found & real.unsqueeze(1), golden & real
            wrong = found.squeeze(1) != golden
            place = "attention_mask.segment_ids" if name == "packed" else "attention_mask"
            yield from expect(
                not bool(wrong.any()),
                stage="old_log_prob" if queries == len(segments[0]) else "rollout",
                place=place,
                evidence=f"{name}, {queries} queries: {int(wrong.sum())} pairs are wrong, "
                f"first {wrong.nonzero()[:1].tolist()}",
            )


def kernel(setting: Setting) -> Iterator[Finding]:
    """Values and gradients under every layout, with wider keys than values and with one key head shared by all.

    Every call is made twice, the second time after another one, and inputs are looked at afterwards: a kernel has no
    memory and leaves what it was given as it was.
    """
    for name, segments in LAYOUTS.items():
        for shared in (False, True):
            rows, width, heads = len(segments), len(segments[0]), 2
            allowed = _allowed(segments, width)
            inputs = {
                "q": toy.normal((rows, heads, width, 6), setting.seed, f"{name} q"),
                "k": toy.normal((rows, 1 if shared else heads, width, 6), setting.seed, f"{name} k"),
                "v": toy.normal((rows, 1 if shared else heads, width, 5), setting.seed, f"{name} v"),
            }
            scale = 0.6
            golden_leaves = {key: value.clone().requires_grad_() for key, value in inputs.items()}
            golden = torch.stack(
                [
                    torch.stack(
                        [
                            language_model.attend(
                                golden_leaves["q"][row, head],
                                golden_leaves["k"][row, 0 if shared else head],
                                golden_leaves["v"][row, 0 if shared else head],
                                scale,
                                allowed[row],
                            )
                            for head in range(heads)
                        ]
                    )
                    for row in range(rows)
                ]
            )
            cotangent = toy.normal(tuple(golden.shape), setting.seed, f"{name} cotangent")
            golden_gradients = torch.autograd.grad(golden, list(golden_leaves.values()), cotangent)
            mask = allowed.unsqueeze(1)
            for call in ("first call", "second call"):
                leaves = {key: value.clone().requires_grad_() for key, value in inputs.items()}
                given = mask.clone()
                found = attention.scaled_dot_product(leaves["q"], leaves["k"], leaves["v"], scale=scale, mask=given)
                what = f"{name}{', shared key' if shared else ''}, {call}"
                yield from differs(found, golden, stage=OPERATOR, place=KERNEL, what=what)
                for key, gradient, right in zip(
                    leaves, torch.autograd.grad(found, list(leaves.values()), cotangent), golden_gradients
                ):
                    yield from differs(gradient, right, stage=OPERATOR, place=f"{KERNEL}.grad_{key}", what=what)
                untouched = torch.equal(given, mask) and all(torch.equal(leaves[key], inputs[key]) for key in inputs)
                yield from expect(
                    untouched, stage=OPERATOR, place=KERNEL, evidence=f"{what}: an input was changed in place"
                )


def linear(setting: Setting) -> Iterator[Finding]:
    """The gated delta rule over a pack equals each sequence for itself, as products of matrices."""
    heads, lengths, width, out = 2, (4, 3, 1), 4, 3
    tokens = sum(lengths)
    q, k = (toy.normal((heads, tokens, width), setting.seed, f"linear {n}") for n in "qk")
    k = k / k.norm(dim=-1, keepdim=True)
    v = toy.normal((heads, tokens, out), setting.seed, "linear v")
    decay, beta = (torch.sigmoid(toy.normal((heads, tokens), setting.seed, f"linear {n}")) for n in ("decay", "beta"))
    cumulative = torch.tensor([0, *lengths]).cumsum(0)
    found = linear_attention.gated_delta_rule(q, k, v, decay=decay, beta=beta, cu_seqlens=cumulative)
    golden = torch.zeros(heads, tokens, out, dtype=torch.float64)
    for head in range(heads):
        for start, end in zip(cumulative.tolist(), cumulative.tolist()[1:]):
            for t in range(start, end):
                total = torch.zeros(out, width, dtype=torch.float64)
                for i in range(start, t + 1):
                    term = beta[head, i] * torch.outer(v[head, i], k[head, i])
                    for j in range(i + 1, t + 1):
                        forget = torch.eye(width, dtype=torch.float64) - beta[head, j] * torch.outer(
                            k[head, j], k[head, j]
                        )
                        term = decay[head, j] * term @ forget
                    total = total + term
                golden[head, t] = total @ q[head, t]
    yield from differs(
        found, golden, stage="old_log_prob", place="linear_attention.gated_delta_rule.state", what="pack of 4, 3 and 1"
    )


CHECKS = (
    Check(
        name="attention.masks",
        layer="unit-op",
        cost=0.005,
        run=masks,
        kept_because="it names the mask, where the kernel and the model see only values",
    ),  # fmt: skip
    Check(
        name="attention.kernel",
        layer="unit-op",
        cost=0.02,
        run=kernel,
        kept_because="the kernel by itself, forward and backward, where the model only differs",
    ),  # fmt: skip
    Check(name="attention.linear", layer="unit-op", cost=0.01, run=linear),
)
