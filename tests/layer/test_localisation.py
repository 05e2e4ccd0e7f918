"""Faults of public stacks, each recreated in one module of a small model, are named there; benign ones are not flagged.

The mechanisms are those of defects that were found in training and inference stacks; each acts in a forward or backward
pass of one module, in one layer, so there is one right answer.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch.nn import functional as F

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.diagnose.capture_comparison import compare_captures
from alignment.models import attention, mla, moe
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig
from alignment.numerics.perturbation import one_ulp
from alignment.numerics.random import portable_integers, portable_normal

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
    routed_scaling_factor=2.5, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    rope_theta=50000.0,
)  # fmt: skip
BATCH, LENGTH = 2, 24
ATTENTION, DENSE, EXPERTS, GATE = (
    "model.layers.1.self_attn",
    "model.layers.0.mlp",
    "model.layers.1.mlp",
    "model.layers.1.mlp.gate",
)


def make_model(dtype=torch.float32) -> CausalLM:
    model = CausalLM(CONFIG, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = portable_normal(tuple(p.shape), seed=1, stream=name, dtype=torch.float32)
            p.copy_(1 + 0.1 * noise if "norm" in name else 1.3 * noise / math.sqrt(p.shape[-1]))
        for name, b in model.named_buffers():
            if name.endswith("correction_bias"):
                b.copy_(0.2 * portable_normal(tuple(b.shape), seed=2, stream=name, dtype=torch.float32))
    return model.to(dtype)


IDS = portable_integers(0, CONFIG.vocab_size, (BATCH, LENGTH), seed=3, stream="ids")
WEIGHT = portable_normal((BATCH, LENGTH, CONFIG.vocab_size), seed=4, stream="loss", dtype=torch.float32)


def captured(
    directory, change=None, *, dtype=torch.float32, loss=lambda logits: (logits * WEIGHT).sum(), **options
) -> OwnCapture:
    model = make_model(dtype)
    context = change(model) if change is not None else None
    with context or contextlib.nullcontext():
        with capture(model, CaptureConfig(detail="sketch"), directory=directory) as session, session.step(0):
            loss(model(IDS, **options).float()).backward()
    return OwnCapture(directory)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("golden"))


# --- ways to be wrong -----------------------------------------------------------------------------------------------


def forward(path, wrap):
    """Another forward of one module: ``wrap(module, original)`` makes it."""

    def change(model):
        module = model.get_submodule(path)
        module.forward = wrap(module, module.forward)

    return change


def inside(path, owner, name, make):
    """One function of the product is another one while the module at ``path`` runs."""

    def wrap(module, original):
        def run(*args, **kwargs):
            right = getattr(owner, name)
            setattr(owner, name, make(right))
            try:
                return original(*args, **kwargs)
            finally:
                setattr(owner, name, right)

        return run

    return forward(path, wrap)


def output(path, bend):
    return forward(path, lambda module, original: lambda *args, **kwargs: bend(original(*args, **kwargs)))


def weight(path, bend):
    def change(model):
        p = model.get_parameter(path)
        with torch.no_grad():
            p.copy_(bend(p.clone()))

    return change


def attend(**changes):
    def make(right):
        def call(query, key, value, *, scale, mask):
            given = {"query": query, "key": key, "value": value, "scale": scale, "mask": mask}
            return right(**{**given, **{k: bend(given[k]) for k, bend in changes.items()}})

        return call

    return inside(ATTENTION, attention, "scaled_dot_product", make)


def rotary(make):
    return inside(ATTENTION, mla, "rotate_interleaved", make)


def halves(right):
    def rotate(x, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return rotate


def router(make):
    return inside(GATE, moe, "select_experts", make)


def biased_weights(right):
    def select(scores, bias, config):
        chosen, _ = right(scores, bias, config)
        weights = (scores + bias).gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor

    return select


def group_maximum(right):
    def select(scores, bias, config):
        choice = scores + bias
        groups = choice.view(len(choice), config.n_group, -1)
        kept = groups.amax(-1).topk(config.topk_group, -1).indices
        mask = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, kept, True)
        chosen = groups.masked_fill(~mask[..., None], -math.inf).flatten(1).topk(config.num_experts_per_tok, -1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor

    return select


def experts(bend):
    """``run_experts`` of one layer with ``bend(module, x, chosen, weights, original)`` in its place."""

    def change(model):
        module = model.get_submodule(EXPERTS)
        original = module.run_experts
        module.run_experts = lambda x, chosen, weights: bend(module, x, chosen, weights, original)

    return change


def wrong_first_count(module, x, chosen, weights, original):
    order = chosen.flatten().argsort(stable=True)
    counts = (chosen.flatten()[:, None] == torch.arange(8)).sum(0)
    wrong = counts.clone()
    wrong[0], wrong[-1] = counts[1], counts[-1] + counts[0] - counts[1]
    if int(wrong[-1]) < 0:
        wrong[-1], wrong[-2] = 0, wrong[-2] + wrong[-1]
    slices = x[order // chosen.shape[1]].split(wrong.tolist())
    outputs = torch.cat([e(part) for e, part in zip(module.experts, slices, strict=True)])
    return (outputs[order.argsort()].view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class Gradient(torch.autograd.Function):
    """The identity with another gradient."""

    @staticmethod
    def forward(context, x, bend):
        context.bend = bend
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return context.bend(gradient), None


def gradient(path, bend):
    """The gradient of a module's input is bent inside the module."""

    def wrap(module, original):
        return lambda x, *args, **kwargs: original(Gradient.apply(x, bend), *args, **kwargs)

    return forward(path, wrap)


def doubled_weight_gradient(model):
    module = model.get_submodule("model.layers.2.self_attn.o_proj")
    module.forward = lambda x: F.linear(x, Gradient.apply(module.weight, lambda g: 2 * g))


def half_precision_matmul(module, original):
    return lambda x: (x.half() @ module.weight.half().T).float()


def rounded_scores(module, original):
    def run(x):
        scores = torch.sigmoid(F.linear(x.bfloat16(), module.weight.bfloat16()).float())
        return moe.select_experts(scores, module.e_score_correction_bias, module.config)

    return run


def poison(y):
    y = y.clone()
    y.view(-1)[5] = math.nan
    return y


def residual(model):
    layer = model.get_submodule("model.layers.1")

    def run(hidden, context):
        hidden = (hidden.bfloat16() + layer.self_attn(layer.input_layernorm(hidden), context).bfloat16()).float()
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    layer.forward = run


def leaky(mask):
    return torch.ones_like(mask)


FAULTS = {
    "softmax scale of the value width": (attend(scale=lambda s: s * math.sqrt(24 / 16)), ATTENTION),
    "yarn correction missing": (attend(scale=lambda s: s / 1.59), ATTENTION),
    "rope pairs halves": (rotary(halves), ATTENTION),
    "rope second half not written": (
        rotary(lambda right: lambda x, cos, sin: torch.cat([right(x, cos, sin)[..., :4], x[..., 4:]], -1)),
        ATTENTION,
    ),
    "causal mask dropped": (attend(mask=leaky), ATTENTION),
    "mask shifted by one key": (
        attend(mask=lambda m: m.roll(1, -1) & m | torch.eye(LENGTH, dtype=torch.bool)),
        ATTENTION,
    ),
    "uniform attention": (attend(query=torch.zeros_like), ATTENTION),
    "heads of keys permuted": (attend(key=lambda k: k.roll(1, 1)), ATTENTION),
    "stale kv slots": (
        attend(value=lambda v: torch.cat([v[:, :, :1].expand(-1, -1, 4, -1), v[:, :, 4:]], 2)),
        ATTENTION,
    ),
    "positions collide in low precision": (
        rotary(
            lambda right: (
                lambda x, cos, sin: right(x, cos.roll(1, 1), sin.roll(1, 1)) if x.shape[1] == 1 else right(x, cos, sin)
            )
        ),
        ATTENTION,
    ),
    "router bias leaks into the weights": (router(biased_weights), GATE),
    "group score by maximum": (router(group_maximum), GATE),
    "routed scale not forwarded": (
        router(lambda right: lambda s, b, c: (lambda i, w: (i, w / c.routed_scaling_factor))(*right(s, b, c))),
        GATE,
    ),
    "router product rounded to bfloat16": (forward(GATE, rounded_scores), GATE),
    "gating kernel wrong beyond a row": (
        output(GATE, lambda out: (out[0], torch.cat([out[1][:40], 1 - out[1][40:]]))),
        GATE,
    ),
    "expert output reduced twice": (experts(lambda m, x, i, w, run: 2 * run(x, i, w)), EXPERTS),
    "token shards added": (experts(lambda m, x, i, w, run: (lambda y: y + y.roll(LENGTH, 0))(run(x, i, w))), EXPERTS),
    "first group count wrong": (experts(wrong_first_count), EXPERTS),
    "only local experts combined": (experts(lambda m, x, i, w, run: run(x, i, w * (i < 4))), EXPERTS),
    "weights combined in another order": (experts(lambda m, x, i, w, run: run(x, i, w.flip(-1))), EXPERTS),
    "activation hard-coded": (
        forward(DENSE, lambda m, run: lambda x: m.down_proj(F.gelu(m.gate_proj(x), approximate="tanh") * m.up_proj(x))),
        DENSE,
    ),
    "swiglu of another family": (
        forward(
            DENSE, lambda m, run: lambda x: m.down_proj(F.silu(1.702 * m.gate_proj(x)) / 1.702 * (m.up_proj(x) + 1))
        ),
        DENSE,
    ),
    "residual stream rounded": (residual, "model.layers.1"),
    "float32 product in half precision": (
        forward("model.layers.1.self_attn.o_proj", half_precision_matmul),
        "model.layers.1.self_attn.o_proj",
    ),
    "norm with another epsilon": (
        lambda model: setattr(model.get_submodule("model.layers.1.input_layernorm"), "eps", 1e-4),
        "model.layers.1.input_layernorm",
    ),
    "uninitialised padding": (output("model.layers.1.self_attn.o_proj", poison), "model.layers.1.self_attn.o_proj"),
    "logits in bfloat16": (output("lm_head", lambda y: y.bfloat16().float()), "lm_head"),
    "stale transposed weight": (
        weight("model.layers.1.self_attn.o_proj.weight", lambda w: w + 1e-3 * w.roll(1, 0)),
        "model.layers.1.self_attn.o_proj",
    ),
    "regrouped heads": (
        weight("model.layers.0.self_attn.q_b_proj.weight", lambda w: w.view(4, 24, -1).roll(1, 0).reshape_as(w)),
        "model.layers.0.self_attn.q_b_proj",
    ),
    "packed by storage": (
        weight("model.layers.2.mlp.experts.3.gate_proj.weight", lambda w: w.T.reshape(w.shape)),
        "model.layers.2.mlp.experts.3.gate_proj",
    ),
    "quantised gate": (weight(GATE + ".weight", lambda w: w.to(torch.float8_e4m3fn).float()), GATE),
    "tied head not updated": (weight("lm_head.weight", lambda w: 0.999 * w), "lm_head"),
    "lost shard": (
        weight("model.layers.0.mlp.down_proj.weight", lambda w: torch.cat([w[:-2], torch.zeros(2, w.shape[1])])),
        "model.layers.0.mlp.down_proj",
    ),
}
BACKWARD = {
    "weight gradient added twice": (doubled_weight_gradient, "model.layers.2.self_attn.o_proj"),
    "gathered gradient summed over replicas": (
        gradient("model.layers.1.self_attn.kv_b_proj", lambda g: 2 * g), "model.layers.1.self_attn.kv_b_proj",
    ),
    "input gradient lost": (gradient("lm_head", torch.zeros_like), "lm_head"),
    "average truncates": (
        gradient("model.layers.1.mlp.shared_experts.up_proj", torch.trunc), "model.layers.1.mlp.shared_experts.up_proj",
    ),
}  # fmt: skip


def compare(golden, directory, change, **options):
    return compare_captures(golden, captured(directory, change, **options)).stages[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_forward_pass_is_named_first(golden, tmp_path, name):
    change, culprit = FAULTS[name]
    stage = compare(golden, tmp_path, change)
    first = stage.localisation.first("forward")
    assert first is not None, stage.reason()
    assert first.module == culprit, stage.reason()


@pytest.mark.parametrize("name", BACKWARD)
def test_a_fault_of_the_backward_pass_is_named_first_and_forward_is_clean(golden, tmp_path, name):
    change, culprit = BACKWARD[name]
    stage = compare(golden, tmp_path, change)
    assert stage.localisation.first("forward") is None
    assert stage.localisation.first("backward").module == culprit, stage.reason()


@pytest.mark.parametrize("factor", (1.01, 2.0, -1.0))
def test_a_fault_of_the_loss_is_the_loss(golden, tmp_path, factor):
    stage = compare(golden, tmp_path, None, loss=lambda logits: factor * (logits * WEIGHT).sum())
    assert stage.first.module == "loss"


# --- what is no fault -----------------------------------------------------------------------------------------------


def split_product(path, parts=8):
    """Partial sums of a row-parallel linear layer, each rounded before they are reduced."""

    def wrap(module, original):
        def run(x):
            pairs = zip(x.chunk(parts, -1), module.weight.chunk(parts, -1), strict=True)
            return sum((a @ b.T).to(x.dtype).float() for a, b in pairs).to(x.dtype)

        return run

    return forward(path, wrap)


def every(*changes):
    def change(model):
        for one in changes:
            one(model)

    return change


def shuffled(right):
    def select(scores, bias, config):
        chosen, weights = right(scores, bias, config)
        return chosen.flip(-1), weights.flip(-1)

    return select


def other_order(model):
    layer = model.get_submodule("model.layers.1")

    def run(hidden, context):
        hidden = layer.self_attn(layer.input_layernorm(hidden), context) + hidden
        return layer.mlp(layer.post_attention_layernorm(hidden)) + hidden

    layer.forward = run


BENIGN = {
    "nothing": (None, {}),
    "partial sums of a row-parallel layer": (split_product("model.layers.1.self_attn.o_proj"), {}),
    "partial sums everywhere": (every(*(split_product(f"model.layers.{i}.self_attn.o_proj", 4) for i in range(3))), {}),
    "positions shifted": (None, {"position_ids": torch.arange(LENGTH)[None].expand(BATCH, -1) + 7}),
    "one ulp in the activations": (
        output("model.layers.0.mlp.up_proj", lambda y: y + (one_ulp(y.detach(), seed=5) - y.detach())), {},
    ),
    "choices listed in another order": (router(shuffled), {}),
    "attention by another formula": (
        inside(ATTENTION, attention, "scaled_dot_product", lambda right: lambda query, key, value, *, scale, mask:
            F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)),
        {},
    ),
    "sums in float64": (
        forward("model.layers.1.self_attn.o_proj", lambda m, run: lambda x: (x.double() @ m.weight.double().T).float()),
        {},
    ),
    "loss is logged times eight": (None, {"loss": lambda logits: ((logits * WEIGHT).sum() * 8) / 8}),
    "residual added the other way round": (other_order, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BENIGN)
def test_a_benign_difference_is_not_flagged(golden, tmp_path, name):
    change, options = BENIGN[name]
    stage = compare(golden, tmp_path, change, **options)
    assert stage.aligned, stage.reason()


def test_bfloat16_against_float32_is_not_flagged(golden, tmp_path):
    stage = compare(golden, tmp_path, None, dtype=torch.bfloat16)
    assert stage.aligned, stage.reason()
