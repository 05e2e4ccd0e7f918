"""Every parallel layout against one rank: values, and the gradient of every parameter and input with its ratio.

Packs hold several sequences of unequal length whose positions are not simply counted, vocabularies do not divide, ranks
hold unequal numbers of tokens, and weights are sharded, spread over the sequence, and replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from alignment.faults.check import HALF_THE_DIGITS, Check, Finding, Setting, allowed, differs, expect
from alignment.faults.reference import language_model, layouts
from alignment.numerics.random import portable_integers, portable_normal

STAGE, UPDATE = "old_log_prob", "actor_update"
LENGTHS = (8, 16, 8)
CP = 2


def bound_of(setting: Setting, terms: int) -> float:
    """Half of the digits of float64, or what the declared arithmetic explains where it is coarser than float32."""
    declared = setting.precision
    if declared.compute in ("float32", "float64") and declared.matmul == "ieee":
        return HALF_THE_DIGITS
    return max(HALF_THE_DIGITS, allowed(declared, terms))


def _cu() -> Tensor:
    return torch.tensor(layouts.starts(LENGTHS))


def places(setting: Setting) -> Iterator[Finding]:
    """Which tokens, positions, rotary rows and labels a rank of context parallelism gets, and that nothing is lost."""
    from alignment.models.parallel import context_parallel, packing

    total = sum(LENGTHS)
    tokens = portable_integers(3, 90, (1, total), seed=setting.seed, stream="layouts/ids")
    ids = tokens[0].tolist()
    made = packing.cumulative_lengths(list(LENGTHS)).tolist()
    yield from expect(
        made == layouts.starts(LENGTHS), stage=STAGE, place="packing.cumulative_lengths", evidence=f"{made}"
    )
    segment = [number for number, n in enumerate(LENGTHS) for _ in range(n)]
    counted = [i for n in LENGTHS for i in range(n)]
    for name, found, golden in (
        ("packing.segments", packing.segments(_cu()).tolist(), segment),
        ("packing.positions", packing.positions(_cu()).tolist(), counted),
        (
            "packing.shift_within",
            packing.shift_within(tokens, _cu(), fill=-1)[0].tolist(),
            [-1 if f is None else f for f in layouts.next_tokens(ids, LENGTHS)],
        ),
    ):
        yield from expect(found == golden, stage=STAGE, place=name, evidence=f"{found} instead of {golden}")
    local = [context_parallel.local_indices(_cu(), CP, rank) for rank in range(CP)]
    for rank in range(CP):
        golden = layouts.zigzag(LENGTHS, CP, rank)
        yield from expect(
            local[rank].tolist() == golden,
            stage=STAGE,
            place="context_parallel.local_indices",
            evidence=f"rank {rank} holds {local[rank].tolist()} instead of {golden}",
        )
    x = portable_normal((2, total, 3), seed=setting.seed, stream="layouts/x")
    parts = context_parallel.shard(x, _cu(), CP)
    for rank, part in enumerate(parts):
        yield from differs(
            part,
            x[:, layouts.zigzag(LENGTHS, CP, rank)],
            stage=STAGE,
            place="context_parallel.shard",
            what=f"rank {rank}",
        )
    back = context_parallel.unshard(parts, _cu())
    yield from differs(back, x, stage=STAGE, place="context_parallel.unshard")
    cos, sin = (portable_normal((1, total, 4), seed=setting.seed, stream=f"layouts/{n}") for n in ("cos", "sin"))
    for rank, pair in enumerate(context_parallel.local_rope(cos, sin, _cu(), CP)):
        for name, found, whole in zip(("cos", "sin"), pair, (cos, sin)):
            golden = whole[:, layouts.zigzag(LENGTHS, CP, rank)]
            yield from differs(
                found, golden, stage=STAGE, place=f"context_parallel.local_rope.{name}", what=f"rank {rank}"
            )
    following = layouts.next_tokens(ids, LENGTHS)
    for rank, labels in enumerate(context_parallel.local_labels(tokens, _cu(), CP)):
        wrong = [
            (i, got, following[i])
            for i, got in zip(layouts.zigzag(LENGTHS, CP, rank), labels[0].tolist())
            if following[i] is not None and got != following[i]
        ]
        yield from expect(
            not wrong,
            stage=STAGE,
            place="context_parallel.local_labels",
            evidence=f"rank {rank}: token, label, right label: {wrong[:3]}",
        )
    for mine in range(CP):
        for other in range(CP):
            q, k = layouts.zigzag(LENGTHS, CP, mine), layouts.zigzag(LENGTHS, CP, other)
            golden = [[segment[i] == segment[j] and j <= i for j in k] for i in q]
            found = context_parallel.causal_mask(torch.tensor(q), torch.tensor(k), _cu())[0, 0].tolist()
            yield from expect(
                found == golden,
                stage=STAGE,
                place="context_parallel.causal_mask",
                evidence=f"queries of rank {mine}, keys of rank {other}",
            )


def packs(setting: Setting) -> Iterator[Finding]:
    """What a pack holds: tokens, boundaries of *all* samples, labels, and a mask on the labels that count."""
    from alignment.models.parallel import packing

    seed, lengths = setting.seed, (5, 9, 3, 7)
    ids = portable_integers(3, 90, (4, 9), seed=seed, stream="layouts/pack")
    place = torch.arange(9)
    n = torch.tensor(lengths)[:, None]
    # two rows padded on the right, two on the left
    mask = torch.where(torch.tensor([[1], [1], [0], [0]]) == 1, place < n, place >= 9 - n).long()
    trained = (portable_integers(0, 2, (4, 9), seed=seed, stream="layouts/trained") * mask).long()
    # a response begins somewhere: its first token is predicted by a prompt token
    trained[1, 4:] = 1
    packed = packing.pack(ids * mask, mask, trained)
    flat, kept = ids[mask != 0].tolist(), trained[mask != 0].tolist()
    edges = layouts.starts(lengths)
    following, counted = layouts.next_tokens(flat, lengths), layouts.next_tokens(kept, lengths)
    facts = {
        "packing.pack.input_ids": (packed.input_ids[0].tolist(), flat),
        "packing.pack.cu_seqlens": (packed.cu_seqlens.tolist(), edges),
        "packing.pack.position_ids": (packed.position_ids[0].tolist(), [i for k in lengths for i in range(k)]),
        "packing.pack.segment_ids": (
            packed.segment_ids[0].tolist(),
            [s for s, k in enumerate(lengths) for _ in range(k)],
        ),
        "packing.pack.label_mask": (packed.label_mask[0].tolist(), [m or 0 for m in counted]),
        "packing.pack.labels": (
            [x for x, f in zip(packed.labels[0].tolist(), following) if f is not None],
            [f for f in following if f is not None],
        ),
    }
    for name, (found, golden) in facts.items():
        yield from expect(found == golden, stage=UPDATE, place=name, evidence=f"{found} instead of {golden}")
    values = portable_normal((1, sum(lengths), 2), seed=seed, stream="layouts/unpack")
    golden = torch.zeros(4, 9, 2, dtype=torch.float64)
    golden[mask != 0] = values[0]
    yield from differs(packing.unpack(values, mask), golden, stage=UPDATE, place="packing.unpack")


def attention(setting: Setting) -> Iterator[Finding]:
    """Ring attention and Ulysses, forward and backward, with scores large enough that a merge without maxima
    overflows.
    """
    from alignment.models.parallel import context_parallel

    seed, total = setting.seed, sum(LENGTHS)
    whole = {
        n: portable_normal((1, 4, total, w), seed=seed, stream=f"layouts/{n}")
        for n, w in (("q", 6), ("k", 6), ("v", 4))
    }
    pull = portable_normal((1, 4, total, 4), seed=seed, stream="layouts/pull")
    bound = bound_of(setting, total)
    for scale in (0.4, 40.0):
        leaves = {n: t.clone().requires_grad_() for n, t in whole.items()}
        golden = layouts.packed_attention(*leaves.values(), scale=scale, lengths=LENGTHS)
        rights = torch.autograd.grad((golden * pull).sum(), list(leaves.values()))
        size = max(float(g.abs().max()) for g in rights)
        for kind in ("ring_attention", "ulysses_attention"):
            parts = [context_parallel.shard(t, _cu(), CP, dim=2) for t in leaves.values()]
            outputs = getattr(context_parallel, kind)(*parts, scale=scale, cu_seqlens=_cu())
            found = context_parallel.unshard(outputs, _cu(), dim=2)
            where = {"place": f"context_parallel.{kind}", "bound": bound}
            yield from differs(found, golden, stage=STAGE, what=f"scale {scale:g}", **where)
            if tuple(found.shape) != tuple(golden.shape):
                continue
            gradients = torch.autograd.grad((found * pull).sum(), list(leaves.values()), allow_unused=True)
            for name, gradient, right in zip(whole, gradients, rights):
                gradient = torch.zeros_like(right) if gradient is None else gradient
                yield from differs(
                    gradient,
                    right,
                    stage=UPDATE,
                    what=f"gradient of {name}, scale {scale:g}",
                    scale=size,
                    ratios={"CP": CP},
                    **where,
                )


def merging(setting: Setting) -> Iterator[Finding]:
    """Partial attentions merge in any order and any number, however far their log-sum-exps lie apart."""
    from alignment.models.parallel import context_parallel

    q, k, v = (portable_normal((1, 2, n, 3), seed=setting.seed, stream=f"layouts/merge/{n}") for n in (2, 9, 10))
    v = v[:, :, :9]
    for spread in (1.0, 60.0):
        golden = layouts.packed_attention(q[:, :, -1:].expand(-1, -1, 9, -1), k, v, scale=spread, lengths=(9,))[
            :, :, -1
        ]
        scores = spread * torch.einsum("bhd,bhtd->bht", q[:, :, -1], k)
        mask = torch.ones(1, 1, 1, 3, dtype=torch.bool)
        parts = [
            context_parallel.partial_attention(
                q[:, :, -1:], k[:, :, i : i + 3], v[:, :, i : i + 3], scale=spread, mask=mask
            )
            for i in (0, 3, 6)
        ]
        for order in ((0, 1, 2), (2, 0, 1)):
            total = parts[order[0]]
            for i in order[1:]:
                total = context_parallel.merge(total, parts[i])
            where = {"stage": STAGE, "place": "context_parallel.merge", "what": f"scores of {spread:g}, order {order}"}
            yield from differs(total.out[:, :, 0], golden, **where)
            yield from differs(total.lse[:, :, 0], torch.logsumexp(scores, -1), **where)


def _model(setting: Setting, layers: int):
    from alignment.models.causal_lm import CausalLM
    from alignment.models.config import preset

    # Without experts: what is judged is the layout, and a near tie of a router would decide.
    config = dataclasses.replace(
        preset("tiny-deepseek"),
        vocab_size=41,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        q_lora_rank=12,
        kv_lora_rank=10,
        num_attention_heads=4,
    )
    return CausalLM(config, dtype=torch.float64).init_weights(setting.seed), config


def whole_model(setting: Setting) -> Iterator[Finding]:
    """A model under context parallelism and in pipeline stages, forward and backward, against the formula."""
    from alignment.models.parallel import context_parallel, packing

    model, config = _model(setting, 2)
    total = sum(LENGTHS)
    tokens = portable_integers(3, 41, (1, total), seed=setting.seed, stream="layouts/tokens")
    # positions with gaps that differ between the sequences, as tables of a pack have them
    gaps = portable_integers(1, 5, (total,), seed=setting.seed, stream="layouts/gaps")
    edges = layouts.starts(LENGTHS)
    position_ids = torch.cat([gaps[a:b].cumsum(0) for a, b in zip(edges, edges[1:])])
    pull = portable_normal((1, total, 41), seed=setting.seed, stream="layouts/whole")
    weights = dict(model.named_parameters())
    golden = torch.cat(
        [
            language_model.forward(tokens[0, a:b], weights, config, positions=position_ids[a:b])["lm_head"]
            for a, b in zip(edges, edges[1:])
        ]
    )[None]
    rights = torch.autograd.grad((golden * pull).sum(), list(weights.values()), allow_unused=True)
    bound = bound_of(setting, config.hidden_size * config.num_hidden_layers)
    plain = packing.packed_logits(
        model,
        packing.Pack(
            input_ids=tokens,
            position_ids=position_ids[None],
            segment_ids=packing.segments(_cu())[None],
            labels=tokens,
            label_mask=tokens,
            cu_seqlens=_cu(),
        ),
    )
    forms = {"packing.packed_logits": lambda: plain}
    for kind in ("ring", "ulysses"):
        forms[f"context_parallel.{kind}"] = lambda kind=kind: context_parallel.unshard(
            context_parallel.context_parallel_logits(
                model, tokens, cu_seqlens=_cu(), cp=CP, kind=kind, position_ids=position_ids[None]
            ),
            _cu(),
        )
    for name, form in forms.items():
        found = form()
        yield from differs(found, golden, stage=STAGE, place=f"{name}.logits", bound=bound)
        if name == "packing.packed_logits" or tuple(found.shape) != tuple(golden.shape):
            continue
        gradients = torch.autograd.grad((found * pull).sum(), list(weights.values()), allow_unused=True)
        for weight, gradient, right in zip(weights, gradients, rights):
            if right is None:
                continue
            gradient = torch.zeros_like(right) if gradient is None else gradient
            yield from differs(
                gradient, right, stage=UPDATE, place=f"{name}.gradient.{weight}", bound=bound, ratios={"CP": CP}
            )


def stages(setting: Setting) -> Iterator[Finding]:
    """Pipeline stages hold every layer once, number it as in the whole model, and compute what one stage computes."""
    from alignment.models.parallel import pipeline

    for layers, pp, virtual in ((4, 2, 1), (8, 2, 2), (12, 3, 2)):
        chunks = pipeline.stages(layers, pp=pp, virtual=virtual)
        order = [(stage, local) for chunk in chunks for stage in chunk for local in range(len(stage.layers))]
        held = [stage.layers[local] for stage, local in order]
        numbers = [pipeline.layer_number(stage, local) for stage, local in order]
        for place, found, golden in (
            ("pipeline.stages", held, list(range(layers))),
            ("pipeline.layer_number", numbers, list(range(1, layers + 1))),
        ):
            what = f"{found} instead of {golden} for {layers} layers, PP = {pp}, {virtual} chunks"
            yield from expect(found == golden, stage=UPDATE, place=place, evidence=what)
    model, _ = _model(setting, 4)
    ids = [portable_integers(3, 41, (2, n), seed=setting.seed, stream=f"layouts/pp/{n}") for n in (5, 7)]
    masks = [torch.ones_like(x) for x in ids]
    masks[0][0, :2] = 0
    for scaled in (False, True):
        with torch.no_grad():
            alone, staged = (
                pipeline.pipeline_logits(
                    model, ids, pp=pp, virtual=virtual, attention_masks=masks, scale_by_inverse_layer=scaled
                )
                for pp, virtual in ((1, 1), (2, 2))
            )
        for found, golden, mask in zip(staged, alone, masks):
            yield from differs(
                found[mask != 0],
                golden[mask != 0],
                stage=UPDATE,
                place="pipeline.pipeline_logits",
                what=f"scores scaled by layer: {scaled}",
                bound=bound_of(setting, 128),
            )


class _Experts(nn.Module):
    """A layer of experts with a fixed table in place of a router: which expert, and with which weight, by token."""

    def __init__(self, seed: int, experts: int, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.float64) for _ in range(experts))
        for i, expert in enumerate(self.experts):
            expert.weight = nn.Parameter(portable_normal((width, width), seed=seed, stream=f"layouts/expert/{i}"))
        self.shared_experts = nn.Linear(width, width, bias=False, dtype=torch.float64)
        self.shared_experts.weight = nn.Parameter(portable_normal((width, width), seed=seed, stream="layouts/shared"))
        self.table = portable_normal((width, experts), seed=seed, stream="layouts/table")

    def gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = torch.sigmoid(x @ self.table).topk(2, dim=-1)
        return best.indices, best.values

    def alone(self, x: Tensor) -> Tensor:
        chosen, weights = self.gate(x)
        rows = [
            sum(w * (self.experts[e].weight @ token) for e, w in zip(es.tolist(), ws))
            for token, es, ws in zip(x, chosen, weights)
        ]
        return torch.stack(rows) + x @ self.shared_experts.weight.T


def experts(setting: Setting) -> Iterator[Finding]:
    """Dispatch and combine over data and tensor parallel ranks, by gather and by exchange, forward and backward."""
    from alignment.models.parallel import collectives, expert_parallel

    seed = setting.seed
    for ranks, inner in ((4, 1), (8, 4)):
        moe = _Experts(seed, 8, 4)
        parts = [portable_normal((3, 4), seed=seed, stream=f"layouts/moe/{r}").requires_grad_() for r in range(ranks)]
        gathered = collectives.nested_gather(parts, inner=inner)
        for whole in gathered:
            yield from differs(whole, torch.cat(parts), stage="rollout", place="collectives.nested_gather")
        scattered = collectives.nested_reduce_scatter([torch.cat(parts)] * ranks, inner=inner)
        for rank, part in enumerate(scattered):
            yield from differs(
                part,
                ranks * parts[rank],
                stage="rollout",
                place="collectives.nested_reduce_scatter",
                what=f"rank {rank}",
            )
        held = sorted(e for rank in expert_parallel.owners(8, ranks) for e in rank)
        yield from expect(held == list(range(8)), stage="rollout", place="expert_parallel.owners", evidence=f"{held}")
        pull = [portable_normal((3, 4), seed=seed, stream=f"layouts/moe/pull/{r}") for r in range(ranks)]
        leaves = [*parts, *moe.parameters()]
        golden = [moe.alone(part) for part in parts]
        rights = torch.autograd.grad(sum((g * p).sum() for g, p in zip(golden, pull)), leaves, allow_unused=True)
        for name, form in (
            ("gathered", lambda: expert_parallel.expert_parallel_gathered(moe, parts, inner=inner)),
            ("exchanged", lambda: expert_parallel.expert_parallel_exchanged(moe, parts)),
        ):
            found = form()
            place = f"expert_parallel.expert_parallel_{name}.dispatch.combine"
            for rank, (mine, right) in enumerate(zip(found, golden)):
                yield from differs(mine, right, stage="rollout", place=place, what=f"rank {rank} of {ranks}")
            gradients = torch.autograd.grad(sum((f * p).sum() for f, p in zip(found, pull)), leaves, allow_unused=True)
            sizes = {"EP": ranks} | ({"TP": inner} if inner > 1 else {})
            for gradient, right in zip(gradients, rights):
                right = torch.zeros_like(gradient) if right is None and gradient is not None else right
                if right is None:
                    continue
                gradient = torch.zeros_like(right) if gradient is None else gradient
                yield from differs(gradient, right, stage=UPDATE, place=f"{place}.gradient", ratios=sizes)
    moe, part = _Experts(seed, 4, 4), portable_normal((7, 4), seed=seed, stream="layouts/capacity")
    chosen, weights = moe.gate(part)
    used, golden = [0] * 4, part @ moe.shared_experts.weight.T
    places_each = -(-int(0.75 * 7 * 2) // 4)
    for token in range(7):
        for expert, weight in zip(chosen[token].tolist(), weights[token]):
            used[expert] += 1
            if used[expert] <= places_each:
                golden = golden.index_add(
                    0, torch.tensor([token]), (weight * (moe.experts[expert].weight @ part[token]))[None]
                )
    found = expert_parallel.expert_parallel_exchanged(moe, [part], capacity_factor=0.75)[0]
    yield from differs(found, golden, stage="rollout", place="expert_parallel.capacity")


def sequence(setting: Setting) -> Iterator[Finding]:
    """Tensor and sequence parallelism: outputs, and the gradients of inputs and of weights of every kind."""
    from alignment.models.parallel import sequence_parallel

    seed, tp = setting.seed, 2
    shapes = {"norm": (6,), "up": (8, 6), "down": (6, 8), "bias": (6,), "tower": (6, 6)}
    weights = {n: portable_normal(s, seed=seed, stream=f"layouts/sp/{n}").requires_grad_() for n, s in shapes.items()}
    x = portable_normal((2, 8, 6), seed=seed, stream="layouts/sp/x").requires_grad_()
    pull = portable_normal((2, 8, 6), seed=seed, stream="layouts/sp/pull")
    normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights["norm"]
    inner = normed @ weights["up"].T
    hidden = x + (inner * torch.sigmoid(inner)) @ weights["down"].T + weights["bias"]
    golden = hidden + torch.tanh(hidden @ weights["tower"].T)
    rights = torch.autograd.grad((golden * pull).sum(), [x, *weights.values()])
    parts = [p.clone().requires_grad_() for p in x.detach().split(4, dim=1)]
    block = sequence_parallel.SequenceParallelBlock(weights, tp)
    outputs = block.forward(parts)
    place = "sequence_parallel.SequenceParallelBlock"
    yield from differs(torch.cat(outputs, 1), golden, stage=STAGE, place=f"{place}.forward")
    sum((o * p).sum() for o, p in zip(outputs, pull.split(4, dim=1))).backward()
    gradients = block.gradients()
    for name, right in zip(weights, rights[1:]):
        yield from differs(
            gradients[name], right, stage=UPDATE, place=f"sequence_parallel.reduced_gradient.{name}", ratios={"TP": tp}
        )
    found = torch.cat([p.grad for p in parts], 1)
    yield from differs(
        found, rights[0], stage=UPDATE, place="sequence_parallel.gathered_gradient.hidden", ratios={"TP": tp}
    )


def collectives_alone(setting: Setting) -> Iterator[Finding]:
    """The collectives by themselves, and both backward passes of a gather."""
    from alignment.models.parallel import collectives, sequence_parallel

    seed, tp = setting.seed, 2
    drawn = [portable_normal((4, 2), seed=seed, stream=f"layouts/c/{r}") for r in range(2)]
    total = drawn[0] + drawn[1]
    for name, result, right in (
        ("all_reduce", collectives.all_reduce(drawn)[1], total),
        ("all_gather", collectives.all_gather(drawn, dim=1)[0], torch.cat(drawn, 1)),
        ("reduce_scatter", torch.cat(collectives.reduce_scatter(drawn)), total),
        (
            "all_to_all",
            torch.cat(collectives.all_to_all(drawn, split_dim=0, concat_dim=1)),
            torch.cat([torch.cat([d[i : i + 2] for d in drawn], 1) for i in (0, 2)]),
        ),
    ):
        yield from differs(result, right, stage=UPDATE, place=f"collectives.{name}")
    g = [portable_normal((1, 4, 3), seed=seed, stream=f"layouts/g/{r}") for r in range(2)]
    for consumers, right in (
        ("sharded", [(g[0] + g[1])[:, :2], (g[0] + g[1])[:, 2:]]),
        ("replicated", [g[0][:, :2], g[1][:, 2:]]),
    ):
        found = sequence_parallel.gathered_gradient(g, consumers=consumers)
        yield from differs(
            torch.cat(found, 1),
            torch.cat(right, 1),
            stage=UPDATE,
            place=f"sequence_parallel.gathered_gradient.{consumers}",
            ratios={"TP": tp},
        )


def averaging(setting: Setting) -> Iterator[Finding]:
    """Token means over data and context parallel ranks whose micro batches hold unequal numbers of tokens."""
    from alignment.models.parallel import data_parallel

    seed = setting.seed
    weight = portable_normal((4,), seed=seed, stream="layouts/dp/w").requires_grad_()
    micro = [{"x": portable_normal((n, 4), seed=seed, stream=f"layouts/dp/{n}")} for n in (1, 5, 2, 7, 3, 4, 6, 2)]

    def token_sum(batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return ((batch["x"] @ weight).square() + batch["x"] @ weight).sum(), len(batch["x"])

    counted = data_parallel.global_tokens([[1, 5], [2, 7]])
    yield from expect(
        counted == 15, stage=UPDATE, place="data_parallel.token_mean.global_tokens", evidence=f"{counted}"
    )
    pair = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 5.0], dtype=torch.float64)]
    found = data_parallel.average_over_ranks(pair)
    yield from differs(
        found, (pair[0] + pair[1]) / 2, stage=UPDATE, place="data_parallel.token_mean.average_over_ranks"
    )
    every = torch.cat([m["x"] for m in micro])
    golden = ((every @ weight).square() + every @ weight).mean()
    (right,) = torch.autograd.grad(golden, weight)
    for dp, cp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)):
        size = len(micro) // (dp * cp)
        ranks = [micro[i : i + size] for i in range(0, len(micro), size)]
        value, found = data_parallel.token_mean_gradients({"w": weight}, token_sum, ranks, cp=cp)
        sizes = {name: n for name, n in (("CP", cp), ("DP", dp), ("micro-batches", size), ("DP·CP", dp * cp)) if n > 1}
        where = {"stage": UPDATE, "ratios": sizes}
        what = f"DP = {dp}, CP = {cp}"
        yield from differs(
            torch.tensor(value, dtype=torch.float64), golden, place="data_parallel.token_mean.loss", what=what, **where
        )
        yield from differs(found["w"], right, place="data_parallel.token_mean.gradient", what=what, **where)


def norms(setting: Setting) -> Iterator[Finding]:
    """The global gradient norm counts every element once, and clipping uses it."""
    from alignment.models.parallel import gradient_norm

    whole, copy, expert = (portable_normal((n,), seed=setting.seed, stream=f"layouts/n/{n}") for n in (8, 5, 12))

    def gradients() -> dict:
        return {
            "dense.sharded": gradient_norm.RankGradients(parts=[p.clone() for p in whole.split(2)], kind="sharded"),
            "norm.replicated": gradient_norm.RankGradients(parts=[copy.clone() for _ in range(4)], kind="replicated"),
            "experts.sharded": gradient_norm.RankGradients(parts=[p.clone() for p in expert.split(3)], kind="sharded"),
        }

    size = torch.cat([whole, copy, expert]).square().sum().sqrt()
    for name, kept in (("dense.sharded", whole), ("norm.replicated", copy), ("experts.sharded", expert)):
        found = torch.tensor(gradient_norm.global_norm({name: gradients()[name]}), dtype=torch.float64)
        right = kept.square().sum().sqrt()
        yield from differs(
            found, right, stage=UPDATE, place=f"gradient_norm.{name}", ratios={"copies": 4, "√copies": 2}
        )
    for limit in (0.3, 1e3):
        held = gradients()
        found = torch.tensor(gradient_norm.clip(held, max_norm=limit), dtype=torch.float64)
        yield from differs(found, size, stage=UPDATE, place="gradient_norm.global_norm")
        factor = min(1.0, limit / (float(size) + 1e-6))
        for name, kept in (("dense.sharded", whole), ("norm.replicated", copy), ("experts.sharded", expert)):
            parts = held[name].parts
            found = parts[3] if name == "norm.replicated" else torch.cat(list(parts))
            yield from differs(found, factor * kept, stage=UPDATE, place=f"gradient_norm.clip.{name}")


def side_losses(setting: Setting) -> Iterator[Finding]:
    """A side loss has the weight of the main loss for any number of micro batches."""
    from alignment.models.parallel import side_loss

    for count in (1, 3, 4):
        weight = portable_normal((4,), seed=setting.seed, stream="layouts/side").requires_grad_()
        micro = [portable_normal((3, 4), seed=setting.seed, stream=f"layouts/side/{i}") for i in range(count)]
        pieces = {}
        for name, main, side in (("main", 1.0, 0.0), ("side_loss", 0.0, 1.0), ("both", 1.0, 0.3)):

            def forward(x: Tensor, attached, main=main, side=side) -> Tensor:
                y = x * weight
                return main * attached.attach(y, side * y.square().mean()).sum()

            weight.grad = None
            side_loss.run_schedule(micro, forward)
            golden = sum(main * (x * weight).sum() + side * (x * weight).square().mean() for x in micro) / count
            (right,) = torch.autograd.grad(golden, weight)
            pieces[name] = (weight.grad.clone(), right)
        for name, (found, right) in pieces.items():
            yield from differs(
                found,
                right,
                stage=UPDATE,
                place=f"side_loss.{name}",
                what=f"{count} micro batches",
                ratios={"micro-batches": count},
            )


CHECKS = (
    Check(
        name="parallel_layouts.collectives",
        layer="unit-op",
        cost=0.001,
        run=collectives_alone,
        kept_because="it names the collective, where layouts see only its consequences",
    ),
    Check(name="parallel_layouts.places", layer="unit-op", cost=0.002, run=places),
    Check(name="parallel_layouts.packs", layer="unit-op", cost=0.003, run=packs),
    Check(
        name="parallel_layouts.merging",
        layer="unit-op",
        cost=0.005,
        run=merging,
        kept_because="the merge by itself, over log-sum-exps that no attention of this size has",
    ),
    Check(name="parallel_layouts.norms", layer="unit-op", cost=0.003, run=norms),
    Check(name="parallel_layouts.averaging", layer="layer-grad", cost=0.008, run=averaging),
    Check(
        name="parallel_layouts.side_losses",
        layer="layer-grad",
        cost=0.004,
        run=side_losses,
        kept_because="it names the schedule that sets the scale, where gradients only differ",
    ),
    Check(name="parallel_layouts.sequence", layer="layer-grad", cost=0.006, run=sequence),
    Check(name="parallel_layouts.experts", layer="unit-op", cost=0.04, run=experts),
    Check(
        name="parallel_layouts.attention",
        layer="layer-logits",
        cost=0.06,
        run=attention,
        kept_because="it names the attention, where a whole model only differs",
    ),
    Check(name="parallel_layouts.stages", layer="layer-logits", cost=0.04, run=stages),
    Check(
        name="parallel_layouts.whole_model",
        layer="layer-logits",
        cost=0.15,
        run=whole_model,
        kept_because="layouts whose parts are right and put together wrongly",
    ),
)
