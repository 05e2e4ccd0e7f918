"""The subject ``transformers``: Hugging Face's DeepseekV3 on the device, observed where its modules can be hooked."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from alignment.backends.case import Case, Tensors, checked
from alignment.backends.golden_layers import (
    hooked,
    keep,
    layer_gradients,
    masked_layer_observations,
    model_observations,
    weights_of,
)
from alignment.backends.subject import EVERY_KIND, SubjectAvailability
from alignment.devices.base import Device
from alignment.models.config import ModelConfig, preset
from alignment.weights.checkpoint import save_checkpoint

_FUSED = re.compile(r"(.*mlp\.experts)\.(gate_up_proj|down_proj)$")


class TransformersLayers:
    """Loads the case's weights as a checkpoint, as its users do, and runs the plain (``eager``) kernels."""

    name = "transformers"
    kinds = EVERY_KIND

    def available(self, device: Device) -> SubjectAvailability:
        if importlib.util.find_spec("transformers") is None:
            return SubjectAvailability(
                available=False, reason="transformers is not installed (pip install 'npu-alignment[test]')"
            )
        from transformers import __version__

        if not _has_deepseek():
            return SubjectAvailability(
                available=False, reason=f"transformers {__version__} has no DeepseekV3; 4.53 is the first tested"
            )
        return SubjectAvailability(available=True, reason=f"transformers {__version__} on {device.label}")

    def supports(self, case: Case) -> bool:
        return case.operator in ("decoder_layer", "causal_lm")

    def run(self, case: Case, inputs: Tensors, device: Device) -> Tensors:
        placed = {name: tensor.to(device.torch_device) for name, tensor in inputs.items()}
        observe = {"decoder_layer": _decoder_layer, "causal_lm": _causal_lm}[case.operator]
        observed = observe(placed, case.attributes, inputs, case.torch_dtype)
        device.synchronize()
        return checked(case, observed, self.name, partial=True)


def _has_deepseek() -> bool:
    return importlib.util.find_spec("transformers.models.deepseek_v3") is not None


def load_transformers(config: ModelConfig, weights: Tensors, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A ``DeepseekV3ForCausalLM`` read from a checkpoint of ``weights``, in ``dtype`` on ``device``."""
    from transformers import DeepseekV3ForCausalLM, __version__
    from transformers.utils import logging

    # transformers 5 renamed the argument.
    precision = {"dtype" if int(__version__.split(".")[0]) >= 5 else "torch_dtype": dtype}
    with tempfile.TemporaryDirectory() as folder, _quiet(logging):
        directory = Path(folder) / "model"
        save_checkpoint(directory, config, weights)
        model = DeepseekV3ForCausalLM.from_pretrained(directory, attn_implementation="eager", **precision)
    # Eager for the experts too where this version has a choice: grouped kernels would be another subject.
    model.config._experts_implementation = "eager"
    return model.to(device).train()


@contextlib.contextmanager
def _quiet(logging) -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def unstacked(tensors: Mapping[str, Tensor]) -> Tensors:
    """One tensor per expert under the names on disk, whatever the layout in memory."""
    named: Tensors = {}
    for name, tensor in tensors.items():
        fused = _FUSED.match(name)
        if not fused:
            named[name] = tensor
            continue
        for expert, part in enumerate(tensor):
            if fused[2] == "down_proj":
                named[f"{fused[1]}.{expert}.down_proj.weight"] = part
            else:
                gate, up = part.chunk(2)
                named[f"{fused[1]}.{expert}.gate_proj.weight"] = gate
                named[f"{fused[1]}.{expert}.up_proj.weight"] = up
    return named


def _decoder_layer(placed: Tensors, attributes: Mapping, inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """The layer as the only one of a model that is fed embeddings, which every version of transformers accepts."""
    whole = preset(attributes["preset"])
    moe = whole.is_moe_layer(attributes["layer_index"])
    config = dataclasses.replace(whole, num_hidden_layers=1, first_k_dense_replace=0 if moe else 1)
    weights = {f"model.layers.0.{name}": tensor for name, tensor in weights_of(inputs).items()}
    frame = {
        "model.embed_tokens.weight": torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype),
        "model.norm.weight": torch.ones(config.hidden_size, dtype=dtype),
        "lm_head.weight": torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype),
    }
    hidden = placed["hidden"].detach().clone().requires_grad_()
    model = load_transformers(config, {**weights, **frame}, dtype=dtype, device=hidden.device)
    layer = model.model.layers[0]
    found: Tensors = {}
    attention = layer.self_attn
    hooks = {
        layer.input_layernorm: keep(found, "input_layernorm"),
        attention.kv_a_layernorm: keep(found, "kv_a_layernorm"),
        attention: keep(found, "self_attn"),
        layer.post_attention_layernorm: keep(found, "post_attention_layernorm"),
        layer.mlp: keep(found, "mlp"),
        layer: keep(found, "output"),
    }
    if config.q_lora_rank is not None:
        hooks[attention.q_a_layernorm] = keep(found, "q_a_layernorm")
    core = {attention.o_proj: lambda module, arguments: found.__setitem__("core", arguments[0])}
    with hooked(hooks, before=core):
        model.model(
            inputs_embeds=hidden,
            attention_mask=placed["attention_mask"],
            position_ids=placed["position_ids"],
            use_cache=False,
        )
    parameters = dict(layer.named_parameters())
    leaves = [hidden, *parameters.values()]
    gradients = torch.autograd.grad(found["output"], leaves, placed["cotangent.output"], allow_unused=True)
    # transformers leaves out experts without tokens.
    gradients = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients)]
    named = unstacked(dict(zip(parameters, gradients[1:])))
    return {**masked_layer_observations(found, placed), **layer_gradients(config, {"hidden": gradients[0], **named})}


def _causal_lm(placed: Tensors, attributes: Mapping, inputs: Tensors, dtype: torch.dtype) -> Tensors:
    config = preset(attributes["preset"])
    real = placed["attention_mask"]
    model = load_transformers(config, weights_of(inputs), dtype=dtype, device=real.device)
    found: Tensors = {}
    with hooked({layer: keep(found, f"layers.{i}") for i, layer in enumerate(model.model.layers)}):
        output = model(
            input_ids=placed["input_ids"],
            attention_mask=real,
            position_ids=(real.cumsum(-1) - 1).clamp_min(0),
            use_cache=False,
        )
    return model_observations(found, output.logits, placed, dict(model.named_parameters()), unstack=unstacked)
