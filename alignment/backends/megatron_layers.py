"""The subject ``megatron``: megatron-core's decoder layer and small model, observed where modules can be hooked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alignment.backends.case import Case, Tensors, checked
from alignment.backends.golden_layers import (
    hooked,
    layer_gradients,
    masked_layer_observations,
    model_observations,
    weights_of,
)
from alignment.backends.megatron_groups import join_groups
from alignment.backends.megatron_model import (
    BuildSettings,
    build_chunks,
    engine_scope,
    megatron_availability,
    naming_of,
)
from alignment.backends.subject import EVERY_KIND, SubjectAvailability
from alignment.devices.base import Device
from alignment.models.config import ModelConfig, preset
from alignment.weights.megatron_layout import (
    LocalParameter,
    ParallelSizes,
    Place,
    local_parameters,
    to_megatron,
    unshard,
)

ONE_RANK = ParallelSizes()


class MegatronLayers:
    """One rank of megatron-core with the case's weights, converted as a checkpoint's are.

    Args:
        settings: how layers are built; a core attention under test goes here.
    """

    name = "megatron"
    kinds = EVERY_KIND

    def __init__(self, settings: BuildSettings | None = None) -> None:
        self.settings = settings or BuildSettings()

    def available(self, device: Device) -> SubjectAvailability:
        return megatron_availability(device)

    def supports(self, case: Case) -> bool:
        return case.operator in ("decoder_layer", "causal_lm")

    def run(self, case: Case, inputs: Tensors, device: Device) -> Tensors:
        placed = {name: tensor.to(device.torch_device) for name, tensor in inputs.items()}
        observe = {"decoder_layer": self._decoder_layer, "causal_lm": self._causal_lm}[case.operator]
        with engine_scope(device):
            observed = observe(placed, case, device)
        device.synchronize()
        return checked(case, observed, self.name, partial=True)

    def _model(
        self, config: ModelConfig, weights: Tensors, dtype: torch.dtype, device: Device
    ) -> tuple[nn.Module, Any]:
        join_groups(ONE_RANK, device)
        [model] = build_chunks(config, ONE_RANK, dtype=dtype, device=device, settings=self.settings)
        tensors = dict(model.named_parameters())
        held = {**tensors, **dict(model.named_buffers())}
        locals_ = list(local_parameters(config, ONE_RANK, Place(), naming_of(device, self.settings)))
        with torch.no_grad():
            for local, tensor in to_megatron(
                config, ONE_RANK, Place(), weights.items(), naming_of(device, self.settings)
            ):
                held[local.name].copy_(tensor)
        return model.train(), [local for local in locals_ if local.name in tensors]

    def _decoder_layer(self, inputs: Tensors, case: Case, device: Device) -> Tensors:
        whole, index = preset(case.attributes["preset"]), case.attributes["layer_index"]
        config = dataclasses.replace(
            whole, num_hidden_layers=1, first_k_dense_replace=0 if whole.is_moe_layer(index) else 1
        )
        zeros = torch.zeros(config.vocab_size, config.hidden_size)
        weights = {
            "model.embed_tokens.weight": zeros,
            **{f"model.layers.0.{name}": tensor for name, tensor in weights_of(inputs).items()},
            "model.norm.weight": torch.ones(config.hidden_size),
            "lm_head.weight": zeros,
        }
        hidden = inputs["hidden"].detach().clone().requires_grad_()
        model, parameters = self._model(config, weights, hidden.dtype, device)
        layer = model.decoder.layers[0]
        front = Front(inputs["attention_mask"])
        found: Tensors = {}
        with _observing(layer, front, found):
            output, _ = layer(front.pack(hidden).transpose(0, 1).contiguous(), attention_mask=None)
        found["output"] = front.unpack(output.transpose(0, 1))
        held = dict(model.named_parameters())
        of_layer = [p for p in parameters if p.parameter.layer is not None]
        leaves = [hidden, *(held[p.name] for p in of_layer)]
        gradients = torch.autograd.grad(found["output"], leaves, inputs["cotangent.output"], allow_unused=True)
        gradients = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients)]
        named = under_hf_names(of_layer, gradients[1:], prefix="model.layers.0.")
        return {
            **masked_layer_observations(found, inputs),
            **layer_gradients(config, {"hidden": gradients[0], **named}),
        }

    def _causal_lm(self, inputs: Tensors, case: Case, device: Device) -> Tensors:
        config = preset(case.attributes["preset"])
        model, parameters = self._model(config, weights_of(inputs), case.torch_dtype, device)
        front = Front(inputs["attention_mask"])
        found: Tensors = {}
        hooks = {layer: _keep_rows(found, f"layers.{i}", front) for i, layer in enumerate(model.decoder.layers)}
        ids = front.pack(inputs["input_ids"])
        with hooked(hooks):
            logits = front.unpack(model(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids), None))
        held = dict(model.named_parameters())
        mine = {p.name: held[p.name] for p in parameters}
        by_name = {p.name: p for p in parameters}

        def unstack(tensors: Mapping[str, Tensor]) -> Tensors:
            return under_hf_names([by_name[n] for n in tensors], list(tensors.values()))

        return model_observations(found, logits, inputs, mine, unstack=unstack)


def under_hf_names(parameters: list[LocalParameter], tensors: list[Tensor], *, prefix: str = "") -> Tensors:
    """Tensors of one rank under the names of a checkpoint, without ``prefix``."""
    return {
        name.removeprefix(prefix): part
        for local, tensor in zip(parameters, tensors, strict=True)
        for name, part in unshard(local.parameter, [tensor])
    }


class Front:
    """Moves the real tokens of each row to the front, where megatron-core counts positions from 0, and back.

    Padding goes behind, where no real token sees it.
    """

    def __init__(self, mask: Tensor) -> None:
        self._order = torch.argsort(mask, dim=1, descending=True, stable=True)
        self._back = torch.argsort(self._order, dim=1, stable=True)

    def pack(self, x: Tensor) -> Tensor:
        """[b, s, …] with real tokens first."""
        return _take(x, self._order)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return _take(x, self._back)


def _take(x: Tensor, order: Tensor) -> Tensor:
    index = order.view(*order.shape, *[1] * (x.dim() - 2)).expand_as(x)
    return x.gather(1, index)


def _keep_rows(into: Tensors, name: str, front: Front):
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        into[name] = front.unpack(tensor.transpose(0, 1))

    return hook


def _observing(layer: nn.Module, front: Front, found: Tensors):
    """Hooks on what the specification keeps apart; Transformer Engine's fused norms stay unseen."""
    attention = layer.self_attention
    modules = {
        "input_layernorm": layer.input_layernorm,
        "q_a_layernorm": getattr(attention, "q_layernorm", None),
        "kv_a_layernorm": getattr(attention, "kv_layernorm", None),
        "self_attn": attention,
        "post_attention_layernorm": layer.pre_mlp_layernorm,
        "mlp": layer.mlp,
    }
    hooks = {
        module: _keep_rows(found, name, front)
        for name, module in modules.items()
        if module is not None and type(module).__name__ != "IdentityOp"
    }

    def core(module: nn.Module, arguments: Any, output: Tensor) -> None:
        for name, tensor in zip(("query", "key"), arguments):
            found[name] = front.unpack(tensor.transpose(0, 1)).transpose(1, 2)
        found["core"] = front.unpack(output.transpose(0, 1))

    hooks[attention.core_attention] = core
    if hasattr(layer.mlp, "router"):

        def router(module: nn.Module, arguments: Any, output: tuple[Tensor, Tensor]) -> None:
            x = arguments[0]
            length, rows = x.shape[:2]

            def by_row(tensor: Tensor) -> Tensor:
                return front.unpack(tensor.view(length, rows, -1).transpose(0, 1)).flatten(0, 1)

            scores = torch.sigmoid(nn.functional.linear(x.float(), module.weight.float())) + module.expert_bias
            found["router_scores"] = by_row(scores)
            found["router_selected"] = by_row(output[1].float())
            found["router_weights"] = by_row(output[0].float())

        hooks[layer.mlp.router] = router
    return hooked(hooks)
