"""One decoder layer and the whole model, observed module by module: in float64 the golden values, else the subject ``torch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.backends.case import Case, Tensors, checked
from alignment.backends.routing import routing_gap
from alignment.backends.subject import EVERY_KIND, SubjectAvailability
from alignment.devices.base import Device
from alignment.models.attention import attention_mask_from, observe_attention
from alignment.models.block import DecoderLayer
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig, preset
from alignment.models.mla import AttentionContext
from alignment.models.precision import at_least_float32
from alignment.models.rope import RotaryTable
from alignment.numerics.random import portable_integers, portable_uniform

Attributes = Mapping[str, object]

SKETCH_COLUMNS = 8
UPDATE_SAMPLES = 2048
# The first step of Adam is g/(|g| + eps): with the usual 1e-8 an entry that has next to no gradient turns its rounding
# into a sign, and the noise of the step hides everything else.
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-5, "weight_decay": 0.01}


class GoldenLayers:
    """Runs the layer cases with the golden model's own code in the run dtype on the device."""

    name = "torch"
    kinds = EVERY_KIND

    def available(self, device: Device) -> SubjectAvailability:
        return SubjectAvailability(available=True, reason=f"torch {torch.__version__} on {device.label}")

    def supports(self, case: Case) -> bool:
        return case.operator in OBSERVE

    def run(self, case: Case, inputs: Tensors, device: Device) -> Tensors:
        placed = {name: tensor.to(device.torch_device) for name, tensor in inputs.items()}
        observed = OBSERVE[case.operator](placed, case.attributes)
        device.synchronize()
        return checked(case, observed, self.name)


@contextmanager
def hooked(hooks: Mapping[nn.Module, Callable], *, before: Mapping[nn.Module, Callable] | None = None):
    """Forward hooks (and pre-hooks) that are gone afterwards."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    handles += [module.register_forward_pre_hook(hook) for module, hook in (before or {}).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keep(into: dict, name: str) -> Callable:
    """A forward hook that keeps a module's output (the first of several)."""

    def hook(module, arguments, output):
        into[name] = output[0] if isinstance(output, tuple) else output

    return hook


def weights_of(inputs: Tensors) -> Tensors:
    return {name.removeprefix("weight."): t for name, t in inputs.items() if name.startswith("weight.")}


def rows(mask: Tensor) -> Tensor:
    """[b, s] as [b, s, 1], to zero what padding computed."""
    return mask.unsqueeze(-1)


def sketch(name: str, tensor: Tensor) -> Tensor:
    """A projection of the last axis on a few random sign vectors, in float64 on the host.

    It keeps relative L2 distances to about 1/√(rows · columns) (Achlioptas, *Database-friendly random projections*, JCSS
    66, 2003) at a fraction of the size. Vectors and short axes stay as they are.
    """
    tensor = tensor.detach().cpu().double()
    width = tensor.shape[-1]
    if tensor.dim() < 2 or width <= SKETCH_COLUMNS:
        return tensor
    signs = torch.where(portable_uniform((width, SKETCH_COLUMNS), seed=0, stream=f"sketch/{name}") < 0.5, -1.0, 1.0)
    return tensor @ signs.double() / SKETCH_COLUMNS**0.5


def decoder_layer(inputs: Tensors, attributes: Attributes) -> Tensors:
    """Observations of one decoder layer, in the dtype and on the device of ``inputs["hidden"]``."""
    config, index = preset(attributes["preset"]), attributes["layer_index"]
    hidden = inputs["hidden"].detach().clone().requires_grad_()
    layer = DecoderLayer(config, index, dtype=hidden.dtype, device=hidden.device)
    layer.load_state_dict(weights_of(inputs))
    found = _layer_forward(layer, hidden, inputs, config)
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(found["output"], [hidden, *parameters.values()], inputs["cotangent.output"])
    return {
        **masked_layer_observations(found, inputs),
        **layer_gradients(config, dict(zip(["hidden", *parameters], gradients))),
    }


def _layer_forward(layer: DecoderLayer, hidden: Tensor, inputs: Tensors, config: ModelConfig) -> Tensors:
    cos, sin = RotaryTable(config)(inputs["position_ids"], hidden.dtype)
    context = AttentionContext(cos=cos, sin=sin, mask=attention_mask_from(inputs["attention_mask"]))
    found: Tensors = {}
    attention, mlp = layer.self_attn, layer.mlp
    hooks = {
        layer.input_layernorm: keep(found, "input_layernorm"),
        attention.kv_a_layernorm: keep(found, "kv_a_layernorm"),
        attention: keep(found, "self_attn"),
        layer.post_attention_layernorm: keep(found, "post_attention_layernorm"),
        mlp: keep(found, "mlp"),
    }
    if config.q_lora_rank is not None:
        hooks[attention.q_a_layernorm] = keep(found, "q_a_layernorm")
    if hasattr(mlp, "gate"):
        hooks[mlp.gate] = lambda gate, arguments, output: found.update(
            router_observations(arguments[0], gate.weight, gate.e_score_correction_bias, *output)
        )
    core = {attention.o_proj: lambda module, arguments: found.__setitem__("core", arguments[0])}
    with hooked(hooks, before=core), observe_attention() as calls:
        found["output"] = layer(hidden, context)
    found["query"], found["key"] = calls[0].query, calls[0].key
    return found


def router_observations(x: Tensor, weight: Tensor, bias: Tensor, chosen: Tensor, weights: Tensor) -> Tensors:
    """Scores that the gate's input gives, its choice as multi-hot rows, and its weights spread over all experts.

    A gate does not return its scores; they are taken from its input and only set the margin of a near-tie.
    """
    wide = at_least_float32(x.dtype)
    x = x.reshape(-1, x.shape[-1])
    scores = torch.sigmoid(F.linear(x.to(wide), weight.to(wide))) + bias.to(wide)
    empty = torch.zeros_like(scores)
    return {
        "router_scores": scores,
        "router_selected": empty.scatter(-1, chosen, 1.0),
        "router_weights": empty.scatter(-1, chosen, weights.to(wide)),
    }


def masked_layer_observations(found: Tensors, inputs: Tensors) -> Tensors:
    """Zeroes what padding computed, and after the router what near-ties decide."""
    real = inputs["attention_mask"]
    decided = inputs["decided"]
    masks = {
        "query": real[:, None, :, None],
        "key": real[:, None, :, None],
        "router_scores": real.reshape(-1, 1),
        "router_selected": decided.reshape(-1, 1),
        "router_weights": decided.reshape(-1, 1),
        "mlp": rows(decided),
        "output": rows(decided),
    }
    return {name: tensor.detach() * masks.get(name, rows(real)).to(tensor.dtype) for name, tensor in found.items()}


def layer_gradients(config: ModelConfig, gradients: Tensors) -> Tensors:
    """Gradients by parameter: matrices as sketches, those of the routed experts stacked."""
    found: Tensors = {}
    for name, gradient in gradients.items():
        head, _, rest = name.partition("mlp.experts.")
        if not rest:
            found[f"grad.{name}"] = gradient if name == "hidden" else sketch(name, gradient)
        elif rest.startswith("0."):
            projection = rest.removeprefix("0.")
            stacked = torch.stack(
                [gradients[f"{head}mlp.experts.{e}.{projection}"] for e in range(config.n_routed_experts)]
            )
            found[f"grad.{head}mlp.experts.{projection}"] = sketch(projection, stacked)
    return found


@torch.no_grad()
def decided_tokens(inputs: Tensors, attributes: Attributes, margin: float) -> Tensor:
    """int64 [b, s]: 1 for real tokens whose routing no rounding can turn, judged by the float64 golden layer.

    A token is decided where both the gap between the last chosen and the first unchosen expert and, with groups, that
    between groups exceed ``margin``. All real tokens of a dense layer are.
    """
    config, index = preset(attributes["preset"]), attributes["layer_index"]
    real = inputs["attention_mask"]
    if not config.is_moe_layer(index):
        return real
    double = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    layer = DecoderLayer(config, index, dtype=torch.float64, device="cpu")
    layer.load_state_dict(weights_of(double))
    scores = _layer_forward(layer, double["hidden"], double, config)["router_scores"]
    return real * (routing_gap(scores, config) >= margin).long().view_as(real)


@torch.no_grad()
def undecided_tokens(model: CausalLM, input_ids: Tensor, real: Tensor, margin: float) -> Tensor:
    """bool [b, s]: real tokens whose routing in some layer of ``model`` is within ``margin`` of another."""
    gaps = []

    def note(gate: nn.Module, arguments, output) -> None:
        scores = router_observations(arguments[0], gate.weight, gate.e_score_correction_bias, *output)["router_scores"]
        gaps.append(routing_gap(scores, model.config))

    with hooked({layer.mlp.gate: note for layer in model.model.layers if hasattr(layer.mlp, "gate")}):
        model(input_ids, attention_mask=real)
    return (torch.stack(gaps).amin(0) < margin).view_as(real) & real.bool()


def causal_lm(inputs: Tensors, attributes: Attributes) -> Tensors:
    """Observations of the whole model: hidden states, logits, loss, gradient norms and one AdamW step."""
    config, weights = preset(attributes["preset"]), weights_of(inputs)
    ids, real = inputs["input_ids"], inputs["attention_mask"]
    model = CausalLM(config, dtype=weights["lm_head.weight"].dtype, device=ids.device)
    model.load_state_dict(weights)
    found: Tensors = {}
    with hooked({layer: keep(found, f"layers.{i}") for i, layer in enumerate(model.model.layers)}):
        logits = model(ids, attention_mask=real)
    return model_observations(found, logits, inputs, dict(model.named_parameters()))


def model_observations(
    hidden: Tensors,
    logits: Tensor,
    inputs: Tensors,
    parameters: Mapping[str, Tensor],
    *,
    unstack: Callable[[Mapping[str, Tensor]], Tensors] = dict,
) -> Tensors:
    """What every subject of the whole model is asked for, from its hidden states by layer, its logits and its parameters.

    Args:
        unstack: brings parameters that the subject stacks under the names on disk, one per expert.
    """
    real = inputs["attention_mask"]
    loss = next_token_loss(logits, inputs["input_ids"], real)
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)))
    # An expert without tokens may take no part at all.
    gradients = {n: torch.zeros_like(parameters[n]) if g is None else g for n, g in gradients.items()}
    return {
        **{name: sketch("hidden", state * rows(real).to(state.dtype)) for name, state in hidden.items()},
        "logits": logits.detach() * rows(real).to(logits.dtype),
        "loss": loss.detach(),
        **gradient_observations(unstack({n: p.detach() for n, p in parameters.items()}), unstack(gradients)),
    }


def gradient_observations(weights: Tensors, gradients: Tensors) -> Tensors:
    """Norm of every parameter's gradient, the global norm, and a sample of one AdamW step on wide master weights."""
    wide = {name: g.detach().to(at_least_float32(g.dtype)) for name, g in gradients.items()}
    norms = torch.stack([torch.linalg.vector_norm(wide[name]) for name in sorted(wide)])
    return {
        "grad_norms": norms,
        "grad_norm": torch.linalg.vector_norm(norms),
        "adamw_update": adamw_update({name: weights[name].to(wide[name].dtype) for name in wide}, wide),
    }


def adamw_update(weights: Tensors, gradients: Tensors) -> Tensor:
    """(w′ − w) / lr after one step of ``torch.optim.AdamW`` (Loshchilov and Hutter, arXiv:1711.05101), sampled evenly.

    The master weights are float32 at least, as in mixed-precision training.
    """
    masters = {name: nn.Parameter(weights[name].clone()) for name in sorted(weights)}
    for name, master in masters.items():
        master.grad = gradients[name].clone()
    torch.optim.AdamW(masters.values(), foreach=False, **ADAMW).step()
    steps = torch.cat([(masters[name].detach() - weights[name]).flatten() for name in masters]) / ADAMW["lr"]
    places = portable_integers(0, steps.numel(), UPDATE_SAMPLES, seed=0, stream="adamw update samples")
    return steps[places.to(steps.device)]


def next_token_loss(logits: Tensor, input_ids: Tensor, real: Tensor) -> Tensor:
    """Mean negative log-likelihood of the next real token, in float32 at least."""
    wide = logits[:, :-1].to(at_least_float32(logits.dtype))
    loss = F.cross_entropy(wide.flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
    mask = (real[:, 1:] * real[:, :-1]).flatten().to(loss.dtype)
    return (loss * mask).sum() / mask.sum()


OBSERVE = {"decoder_layer": decoder_layer, "causal_lm": causal_lm}
