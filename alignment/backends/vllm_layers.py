"""vLLM module by module: what every part of every decoder layer computes in a prefill, against the golden model.

The engine must be in this process and eager: modules of another process, or inside a captured graph, cannot be watched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from alignment.backends.golden_layers import hooked, keep
from alignment.backends.vllm_rollout import VllmRollout
from alignment.errors import UnavailableError
from alignment.models.causal_lm import CausalLM
from alignment.numerics.budget import Budget, Noise
from alignment.numerics.metrics import relative_l2
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

METRIC = "relative L2"
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def golden_observations(model: CausalLM, ids: Sequence[int]) -> dict[str, Tensor]:
    """Outputs ``[s, …]`` of the layers' parts, the layers, the last norm and the head, in order of computation."""
    found: dict[str, Tensor] = {}
    hooks = {}
    for index, layer in enumerate(model.model.layers):
        name = f"model.layers.{index}"
        hooks |= {getattr(layer, part): keep(found, f"{name}.{part}") for part in PARTS}
        hooks[layer] = keep(found, f"{name}.output")
    hooks[model.model.norm] = keep(found, "model.norm")
    with torch.no_grad(), hooked(hooks):
        found["lm_head"] = model(torch.tensor([list(ids)], device=model.device))
    return {name: tensor[0].cpu() for name, tensor in found.items()}


def vllm_observations(engine: VllmRollout, ids: Sequence[int]) -> dict[str, Tensor]:
    """The same of one prefill in vLLM.

    Its norms add the residual on the way and its layers hand hidden states and residual on apart; a layer's output is
    their sum.

    Raises:
        UnavailableError: the engine captures graphs or lives in other processes.
    """
    model = engine._model
    if not engine._llm.llm_engine.vllm_config.model_config.enforce_eager:
        raise UnavailableError("modules inside a captured graph cannot be watched", where="vllm: enforce_eager=False")
    found: dict[str, Tensor] = {}

    def copied(name: str):
        # Kernels work in place: what is kept must be a copy made at once.
        def hook(module, arguments, output) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    def summed(name: str):
        def hook(module, arguments, output) -> None:
            hidden, residual = output
            found[name] = hidden.detach() + residual.detach()

        return hook

    hooks = {}
    for index, layer in enumerate(model.model.layers):
        name = f"model.layers.{index}"
        hooks |= {getattr(layer, part): copied(f"{name}.{part}") for part in PARTS}
        hooks[layer] = summed(f"{name}.output")
    hooks[model.model.norm] = copied("model.norm")
    with hooked(hooks):
        engine._run([list(ids)], [{"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "detokenize": False}])
    with torch.no_grad():
        found["lm_head"] = model.compute_logits(found["model.norm"])
    return {name: tensor[: len(ids)].cpu() for name, tensor in found.items()}


def layer_budgets(model: CausalLM, prompts: Mapping[int, Sequence[int]]) -> dict[str, Budget]:
    """How far a correct engine may be from the golden model in float64, by observation.

    The noise is that of the model itself in its own dtype over ``prompts`` by seed; no engine takes part.
    """
    exact = _in_float64(model)
    values: dict[str, list[float]] = {}
    for ids in prompts.values():
        golden, found = golden_observations(exact, ids), golden_observations(model, ids)
        for name in golden:
            values.setdefault(name, []).append(relative_l2(found[name], golden[name]))
    return {
        name: Budget.from_noise(
            Noise(values=tuple(v), seeds=tuple(prompts), perturbation="tokens of another seed", device="cpu"),
            metric=METRIC,
            dtype=model.dtype,
            reduction_length=model.config.hidden_size,
        )
        for name, v in values.items()
    }


def check_layers(
    engine: VllmRollout, model: CausalLM, ids: Sequence[int], budgets: Mapping[str, Budget], *, seed: int
) -> list[Verdict]:
    """One verdict per decoder layer (``layer.dense.0``, ``layer.moe.1``, …) and one for norm and head.

    Each names the first observation that left its budget, so a fault is blamed on the layer it is in; what follows from
    it in later layers fails too and says so.
    """
    golden, found = golden_observations(_in_float64(model), ids), vllm_observations(engine, ids)
    verdicts: list[Verdict] = []
    first: str | None = None
    for check, names in _by_layer(model, golden):
        measures = [
            _named(budgets[name].judge(relative_l2(found[name], golden[name]), run_seed=seed), name) for name in names
        ]
        bad = [name for name, measure in zip(names, measures) if not measure.within]
        where = None
        if bad:
            origin = "" if first is None else f"; follows from {first}"
            module, _, quantity = bad[0].rpartition(".")
            where = Divergence(
                stage="rollout", module=module or "model", quantity=quantity, detail=f"{bad[0]} is the first{origin}"
            )
            first = first or bad[0]
        verdicts.append(
            Verdict(
                check=check,
                layer="layer",
                stage="rollout",
                subject="vllm",
                device=engine.device.label,
                outcome=Outcome.FAIL if bad else Outcome.PASS,
                reason=f"{len(bad)} of {len(names)} observations leave their budget"
                if bad
                else "every part agrees with golden",
                measures=tuple(measures),
                where=where,
                next_command="pytest -m engine tests/layer/test_vllm_layers.py" if bad else None,
            )
        )
    return verdicts


def _named(measure: Measure, name: str) -> Measure:
    import dataclasses

    return dataclasses.replace(measure, name=f"{name} {METRIC}")


def _by_layer(model: CausalLM, names: Mapping[str, Tensor]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match:
            kind = "moe" if model.config.is_moe_layer(int(match[1])) else "dense"
        check = f"layer.{kind}.{match[1]}" if match else "layer.head"
        groups.setdefault(check, []).append(name)
    return list(groups.items())


def _in_float64(model: CausalLM) -> CausalLM:
    exact = CausalLM(model.config, dtype=torch.float64, device=model.device)
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    return exact.requires_grad_(False)
