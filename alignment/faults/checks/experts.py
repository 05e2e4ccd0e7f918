"""Routing, dispatch and experts: token by token, expert by expert, and in every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, allowed, differs, expect
from alignment.faults.fault import OPERATOR
from alignment.faults.reference import routing
from alignment.models import expert_dispatch, mlp, moe, router_losses, router_replay
from alignment.models.config import ModelConfig
from alignment.models.parallel import side_loss
from alignment.numerics.precision import unit_roundoff

GATE = "mlp.gate.select_experts"
MANY_ROWS = 1100

ROUTINGS = {
    "one group": toy.PLAIN,
    "groups": toy.YARN,
    "no normalisation": dataclasses.replace(toy.YARN, norm_topk_prob=False),
    "one choice": dataclasses.replace(toy.PLAIN, num_experts_per_tok=1),
}


def selection(setting: Setting) -> Iterator[Finding]:
    """Choices and weights, with a bias as large as the scores; the last rows of a long batch like the first ones."""
    for name, config in ROUTINGS.items():
        scores, bias, golden_choice, golden_weights = _routed(name, setting.seed)
        chosen, weights = moe.select_experts(scores, bias, config)
        what = f"{name}, {len(scores)} tokens"
        selected = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        wrong = (selected != golden_choice).any(-1)
        yield from expect(
            not bool(wrong.any()),
            stage=OPERATOR,
            place=f"{GATE}.choice",
            evidence=f"{what}: {int(wrong.sum())} tokens go to other experts, "
            f"the first is {wrong.nonzero()[:1].tolist()}",
        )
        spread = torch.zeros_like(scores).scatter(-1, chosen, weights)
        yield from differs(spread, golden_weights, stage=OPERATOR, place=f"{GATE}.weights", what=what)


@lru_cache(maxsize=16)
def _routed(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = ROUTINGS[name]
    tokens = MANY_ROWS if name == "groups" else 40
    scores = torch.sigmoid(toy.normal((tokens, config.n_routed_experts), seed, f"scores {name}"))
    bias = toy.normal((config.n_routed_experts,), seed, "bias", scale=0.5)
    chosen, weights = routing.choose(scores, bias, config)
    ones = torch.ones_like(weights)
    return scores, bias, routing.spread(chosen, ones, scores.shape[1]), routing.spread(chosen, weights, scores.shape[1])


def gate_precision(setting: Setting) -> Iterator[Finding]:
    """The router of a bfloat16 model: scores as exact as the declared dtype of the router, float32 unless it says so.

    A token may change its experts where the scores of the two are closer than that dtype can tell apart; a flip beyond
    the margin, and a weight beyond the bound, were computed in something narrower.
    """
    declared = dataclasses.replace(setting.precision, compute="bfloat16", router=setting.precision.router or "float32")
    config = dataclasses.replace(toy.YARN, hidden_size=64, n_routed_experts=16, norm_topk_prob=True)
    subject = moe.Router(config, dtype=torch.bfloat16, device="cpu")
    x = toy.normal((300, 64), setting.seed, "gate x").bfloat16()
    with torch.no_grad():
        subject.weight.copy_(toy.normal((16, 64), setting.seed, "gate weight", scale=0.2))
        subject.e_score_correction_bias.copy_(toy.normal((16,), setting.seed, "gate bias", scale=0.2))
        chosen, weights = subject(x)
        logits = x.double() @ subject.weight.double().T
    scores = 1 / (1 + torch.exp(-logits))
    bias = subject.e_score_correction_bias.double()
    # How far each score may be off: a rounding of the logits is relative to the sum of |products|, the slope of the
    # sigmoid is s (1 − s), and the score itself is rounded to float32 at least.
    reach = x.double().abs() @ subject.weight.detach().double().abs().T
    off = (
        allowed(declared, 64, operator="router") * scores * (1 - scores) * reach + 4 * unit_roundoff("float32") * scores
    )
    margin = 2 * off.max(-1).values
    golden_choice, golden_weights = routing.choose(scores, bias, config)
    selected = torch.zeros(len(x), 16, dtype=torch.float64).scatter(-1, chosen, 1.0)
    right = routing.spread(golden_choice, torch.ones_like(golden_weights), 16)
    same = (selected == right).all(-1)
    # A group's score is a sum of two.
    undecided = _group_margin(scores + bias, config) <= 2 * margin
    flipped = ~same & ~undecided & (_lost(scores + bias, selected, right) > margin)
    kind = declared.dtype("router")
    yield from expect(
        not bool(flipped.any()),
        stage=OPERATOR,
        place="mlp.gate",
        evidence=f"{int(flipped.sum())} of {len(x)} tokens change experts by more than a router in {kind} can be off "
        f"({float(margin.max()):.2g})",
    )
    found = torch.zeros(len(x), 16, dtype=torch.float64).scatter(-1, chosen, weights.double())
    golden = routing.spread(golden_choice, golden_weights, 16)
    # w = f s / Σ s over the chosen ones: the error of s, and that of the sum.
    total, total_off = ((right * part).sum(-1, keepdim=True) for part in (scores, off))
    room = config.routed_scaling_factor * (off / total + scores * total_off / total**2) * right
    room = room + 8 * unit_roundoff("float32") * golden
    if bool(same.any()):
        share = ((found - golden).abs() / room.clamp_min(torch.finfo(torch.float64).tiny))[same]
        yield from expect(
            bool((share <= 1).all()),
            stage=OPERATOR,
            place="mlp.gate",
            evidence=f"weights are off by up to {float(share.max()):.3g} times what a router in {kind} explains",
        )


def _lost(scores: Tensor, selected: Tensor, right: Tensor) -> Tensor:
    """By how much the best expert a token lost beats the worst one it took instead."""
    lost = scores.masked_fill(~((right > 0) & (selected == 0)), float("-inf")).amax(-1)
    taken = scores.masked_fill(~((selected > 0) & (right == 0)), float("inf")).amin(-1)
    return lost - taken


def _group_margin(scores: Tensor, config: ModelConfig) -> Tensor:
    """How far the last group that is kept is from the first that is not; a choice of groups moves several experts."""
    if config.n_group == config.topk_group:
        return torch.full((len(scores),), float("inf"), dtype=scores.dtype)
    by_group = scores.unflatten(-1, (config.n_group, -1)).topk(2, dim=-1).values.sum(-1).sort(descending=True).values
    return by_group[:, config.topk_group - 1] - by_group[:, config.topk_group]


def swiglu(setting: Setting) -> Iterator[Finding]:
    """The gated layer, values and gradients."""
    subject = mlp.SwiGLU(6, 6, dtype=torch.float64, device="cpu")
    weights = {
        f"mlp.{k}.weight": toy.normal((6, 6), setting.seed, f"swiglu {k}")
        for k in ("gate_proj", "up_proj", "down_proj")
    }
    with torch.no_grad():
        for name, parameter in subject.named_parameters():
            parameter.copy_(weights[f"mlp.{name}"])
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    x, cotangent = (toy.normal((5, 6), setting.seed, f"swiglu {n}") for n in ("x", "cotangent"))
    golden = routing.gated_mlp(x, leaves, "mlp")
    found = subject(x)
    yield from differs(found, golden, stage=OPERATOR, place="mlp.swiglu")
    gradients = torch.autograd.grad(found, [p for _, p in subject.named_parameters()], cotangent)
    right = torch.autograd.grad(golden, list(leaves.values()), cotangent)
    for (name, _), gradient, expected in zip(subject.named_parameters(), gradients, right):
        yield from differs(gradient, expected, stage=OPERATOR, place=f"mlp.swiglu.{name}", what="gradient")


def activation(setting: Setting) -> Iterator[Finding]:
    """Every activation an expert may be configured with."""
    gate, up = (toy.normal((4, 9), setting.seed, f"activation {n}", scale=2.0) for n in ("gate", "up"))
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    golden = {"silu": gate / (1 + torch.exp(-gate)) * up, "gelu_tanh": gate * (1 - 1 / (torch.exp(2 * inner) + 1)) * up}
    for kind, right in golden.items():
        found = expert_dispatch.gated_activation(gate, up, kind=kind)
        yield from differs(found, right, stage="rollout", place="mlp.experts.activation", what=kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scene:
    x: Tensor
    chosen: Tensor
    weights: Tensor
    experts: expert_dispatch.ExpertWeights
    by_expert: Tensor
    """[e, n, h]: every expert on every token, bias included."""


@lru_cache(maxsize=16)
def _scene(seed: int, kind: str, biased: bool) -> _Scene:
    # Square experts: a transposed matrix fits as well.
    experts, tokens, hidden, k = 4, 12, 6, 2
    gate, up, down = (toy.normal((experts, hidden, hidden), seed, f"scene {n}") for n in ("gate", "up", "down"))
    biases = [
        toy.normal((experts, hidden), seed, f"scene {n} bias") if biased else None for n in ("gate", "up", "down")
    ]
    x = toy.normal((tokens, hidden), seed, "scene x")
    # Expert 2 gets few tokens, expert 0 many: counts differ.
    scores = toy.normal((tokens, experts), seed, "scene scores") + torch.tensor(
        [1.0, 0.0, -1.0, 0.3], dtype=torch.float64
    )
    chosen = scores.topk(k, dim=-1).indices
    weights = torch.softmax(scores.gather(1, chosen), dim=-1)
    everything = []
    for e in range(experts):
        a = x @ gate[e].T + (biases[0][e] if biased else 0)
        b = x @ up[e].T + (biases[1][e] if biased else 0)
        inner = (2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3)
        act = a / (1 + torch.exp(-a)) if kind == "silu" else a * (1 - 1 / (torch.exp(2 * inner) + 1))
        everything.append((act * b) @ down[e].T + (biases[2][e] if biased else 0))
    stacked = expert_dispatch.ExpertWeights(
        gate=gate, up=up, down=down, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2], activation=kind
    )
    return _Scene(x=x, chosen=chosen, weights=weights, experts=stacked, by_expert=torch.stack(everything))


def _mixed(scene: _Scene, held: range, capacity: int | None = None) -> Tensor:
    out, seen = torch.zeros_like(scene.x), [0] * len(scene.by_expert)
    for token in range(len(scene.x)):
        for choice in range(scene.chosen.shape[1]):
            expert = int(scene.chosen[token, choice])
            seen[expert] += 1
            if expert in held and (capacity is None or seen[expert] <= capacity):
                out[token] += scene.weights[token, choice] * scene.by_expert[expert, token]
    return out


def permutation(setting: Setting) -> Iterator[Finding]:
    """Counts per expert, and a map that brings every row back to its token; pairs of other ranks are marked."""
    for seed in range(3):
        scene = _scene(setting.seed + seed, "silu", False)
        for held, capacity in ((range(4), None), (range(1, 3), None), (range(2, 4), None), (range(4), 4)):
            how = expert_dispatch.permutation(scene.chosen, held, capacity=capacity)
            counts = torch.tensor([int((scene.chosen == e).sum()) for e in held])
            counts = counts if capacity is None else counts.clamp(max=capacity)
            yield from expect(
                torch.equal(how.counts, counts),
                stage="rollout",
                place="mlp.experts.group_list",
                evidence=f"{how.counts.tolist()} tokens per expert, {int(how.counts.sum())} in all, "
                f"instead of {counts.tolist()}",
            )
            pairs = [
                (int(e), t * scene.chosen.shape[1] + c)
                for t, row in enumerate(scene.chosen.tolist())
                for c, e in enumerate(row)
            ]
            order = []
            for e in held:
                mine = [pair for owner, pair in pairs if owner == e]
                order += mine if capacity is None else mine[:capacity]
            yield from expect(
                how.rows.tolist() == order,
                stage="rollout",
                place="mlp.experts.permutation",
                evidence=f"rows {how.rows.tolist()} instead of {order} (by expert, in it by token)",
            )


def unpermute(setting: Setting) -> Iterator[Finding]:
    """Rows summed back to their tokens; a pair that is computed elsewhere or was dropped adds nothing."""
    scene = _scene(setting.seed, "silu", False)
    tokens, k = scene.chosen.shape
    for marked in (0, 3, 7):
        place = torch.arange(tokens * k).roll(5)
        place[:marked] = expert_dispatch.ELSEWHERE
        kept = place != expert_dispatch.ELSEWHERE
        rows = toy.normal((tokens * k, 6), setting.seed, "unpermute")
        how = expert_dispatch.Permutation(rows=torch.arange(0), place=place, counts=torch.arange(0))
        golden = torch.zeros(tokens, 6, dtype=torch.float64)
        for pair in kept.nonzero().flatten().tolist():
            golden[pair // k] += scene.weights[pair // k, pair % k] * rows[place[pair]]
        found = expert_dispatch.unpermute(rows, scene.weights, how)
        yield from differs(
            found, golden, stage="rollout", place="mlp.experts.unpermute", what=f"{marked} pairs elsewhere"
        )


def dispatch(setting: Setting) -> Iterator[Finding]:
    """Experts with biases and either activation, all of them and one rank's share, with and without capacity."""
    for kind in ("silu", "gelu_tanh"):
        for biased in (False, True):
            scene = _scene(setting.seed, kind, biased)
            place = (
                "mlp.experts.down_proj.bias"
                if biased
                else f"mlp.experts.{'activation' if kind != 'silu' else 'dispatch'}"
            )
            for capacity in (None, 4):
                found = expert_dispatch.routed_experts(
                    scene.x, scene.chosen, scene.weights, scene.experts, capacity=capacity
                )
                golden = _mixed(scene, range(4), capacity)
                yield from differs(found, golden, stage="rollout", place=place, what=f"{kind}, capacity {capacity}")
    scene = _scene(setting.seed, "silu", True)
    for start in (0, 2):
        held = range(start, start + 2)
        share = dataclasses.replace(
            scene.experts,
            **{
                f: getattr(scene.experts, f)[start : start + 2]
                for f in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
            },
        )
        found = expert_dispatch.routed_experts(scene.x, scene.chosen, scene.weights, share, held=held)
        yield from differs(
            found,
            _mixed(scene, held),
            stage="rollout",
            place="mlp.experts.unpermute",
            what=f"experts {list(held)} of 4",
        )


def layouts(setting: Setting) -> Iterator[Finding]:
    """Experts cut over tensor parallel ranks, with replicated tokens and with tokens of their own, against one rank."""
    for biased in (False, True):
        scene = _scene(setting.seed, "silu", biased)
        golden = _mixed(scene, range(4))
        for ranks in (2, 3):
            found = expert_dispatch.tensor_parallel(scene.x, scene.chosen, scene.weights, scene.experts, ranks=ranks)
            for rank, output in enumerate(found):
                yield from differs(
                    output, golden, stage="rollout", place="mlp.experts.reduce", what=f"TP {ranks}, rank {rank}",
                    ratios={"TP": ranks},
                )  # fmt: skip
            shards = [tensor.chunk(ranks) for tensor in (scene.x, scene.chosen, scene.weights)]
            found = expert_dispatch.sequence_parallel(*shards, scene.experts)
            for rank, (output, right) in enumerate(zip(found, golden.chunk(ranks))):
                yield from differs(
                    output, right, stage="rollout", place="mlp.experts.reduce.token_shards",
                    what=f"SP {ranks}, rank {rank}", ratios={"TP": ranks},
                )  # fmt: skip


def losses(setting: Setting) -> Iterator[Finding]:
    """Load balancing and z-loss by their formulas."""
    logits = toy.normal((9, 5), setting.seed, "losses", scale=3.0) + 2.0
    scores, chosen = torch.sigmoid(logits), logits.topk(2, dim=-1).indices
    share = torch.stack([(chosen == e).sum() for e in range(5)]).double() / (9 * 2)
    mean = torch.stack([(scores[:, e] / scores.sum(-1)).mean() for e in range(5)])
    found = router_losses.load_balancing_loss(scores, chosen)
    yield from differs(found, 5 * (share * mean).sum(), stage="actor_update", place="router.load_balancing_loss")
    golden = torch.log(torch.exp(logits).sum(-1)).square().mean()
    yield from differs(router_losses.z_loss(logits), golden, stage="actor_update", place="router.z_loss")


def side_gradients(setting: Setting) -> Iterator[Finding]:
    """The gradient a router gets from its own losses is that of the whole batch in every layout."""
    x, weight = toy.normal((12, 4), setting.seed, "side x"), toy.normal((5, 4), setting.seed, "side weight")
    for micro, tensor in ((1, 1), (2, 1), (1, 2), (4, 2), (3, 1)):
        parts = x.chunk(micro)
        whole = weight.clone().requires_grad_()
        golden = sum(torch.logsumexp(part @ whole.T, -1).square().mean() for part in parts) / micro
        (right,) = torch.autograd.grad(golden, whole)
        found = torch.zeros_like(weight)
        for part in parts:
            for _ in range(tensor):
                leaf = weight.clone().requires_grad_()
                side = side_loss.SideLoss()
                side.set_scale(router_losses.side_scale(micro_batches=micro, tensor_parallel=tensor))
                activation = side.attach(part @ leaf.T, router_losses.z_loss(part @ leaf.T))
                found += torch.autograd.grad((activation * 0).sum(), leaf)[0]
        yield from differs(
            found,
            right,
            stage="actor_update",
            place="router.aux_loss.gradient",
            what=f"{micro} micro-batches, TP {tensor}",
            ratios={"TP": tensor} if micro == 1 else {"TP": tensor, "micro-batches": micro},
        )


def replay(setting: Setting) -> Iterator[Finding]:
    """Experts recorded in one forward are the ones the same layers take in another model, behind dense layers, too."""
    for name, config in toy.MODELS.items():
        batch = toy.ragged(name, setting.seed)
        recording, replaying = toy.model(name, setting.seed), toy.model(name, setting.seed + 1000)
        own: dict[int, Tensor] = {}
        handles = [
            layer.mlp.gate.register_forward_hook(lambda m, i, o, at=at: own.__setitem__(at, o[0]))
            for at, layer in enumerate(recording.model.layers)
            if at >= config.first_k_dense_replace
        ]
        with torch.no_grad(), router_replay.record_routing(recording) as record:
            recording(batch.input_ids, attention_mask=batch.attention_mask)
        for handle in handles:
            handle.remove()
        taken: dict[int, Tensor] = {}
        with torch.no_grad(), router_replay.replay_routing(replaying, record):
            handles = [
                layer.mlp.gate.register_forward_hook(lambda m, i, o, at=at: taken.__setitem__(at, o[0]))
                for at, layer in enumerate(replaying.model.layers)
                if at >= config.first_k_dense_replace
            ]
            replaying(batch.input_ids, attention_mask=batch.attention_mask)
            for handle in handles:
                handle.remove()
        for at, experts in own.items():
            right = torch.equal(taken[at].sort(-1).values, experts.sort(-1).values)
            yield from expect(
                right,
                stage="old_log_prob",
                place=f"model.layers.{at}.mlp.gate.replay",
                evidence=f"{name}: layer {at} does not take the experts that were recorded for it",
            )


CHECKS = (
    Check(
        name="experts.activation",
        layer="unit-op",
        cost=0.001,
        run=activation,
        kept_because="it names the activation, where experts only differ",
    ),  # fmt: skip
    Check(
        name="experts.swiglu",
        layer="unit-op",
        cost=0.002,
        run=swiglu,
        kept_because="it names the layer, with the gradients of its weights",
    ),  # fmt: skip
    Check(
        name="experts.permutation",
        layer="unit-op",
        cost=0.004,
        run=permutation,
        kept_because="it names counts and map, where outputs only differ",
    ),  # fmt: skip
    Check(
        name="experts.unpermute",
        layer="unit-op",
        cost=0.003,
        run=unpermute,
        kept_because="it names the marker, where outputs only differ",
    ),  # fmt: skip
    Check(
        name="router.losses",
        layer="unit-op",
        cost=0.001,
        run=losses,
        kept_because="load balancing is no entry of the catalogue",
    ),  # fmt: skip
    Check(
        name="router.selection",
        layer="unit-op",
        cost=0.02,
        run=selection,
        kept_because="it names choice or weight, over more rows than any model here",
    ),  # fmt: skip
    Check(
        name="router.precision",
        layer="unit-op",
        cost=0.03,
        run=gate_precision,
        kept_because="the margin decides near-ties of a bfloat16 model, which float64 has not",
    ),  # fmt: skip
    Check(
        name="experts.dispatch",
        layer="layer-logits",
        cost=0.01,
        run=dispatch,
        kept_because="a share of the experts, capacity and biases together, as an engine runs them",
    ),  # fmt: skip
    Check(name="experts.layouts", layer="layer-logits", cost=0.01, run=layouts),
    Check(name="router.replay", layer="layer-logits", cost=0.1, run=replay),
    Check(name="router.side_gradients", layer="layer-grad", cost=0.01, run=side_gradients),
)
