"""What runs inside vLLM's workers. vLLM imports this module by name; nothing else of alignment does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from alignment.backends import vllm_cpu
from alignment.weights.vllm_names import Shard, unfused, unstacked_experts

if os.environ.get(vllm_cpu.KEEP_WEIGHTS) == "1":
    # A worker in a process of its own imports this before it builds its model.
    vllm_cpu.install_keeping()

DERIVED = ("W_UK_T", "W_UV")
FORCED = "alignment_forced_tokens"


class ForcedTokens(AdapterLogitsProcessor):
    """Leaves one token of the vocabulary at each step of a request that says which: real decode steps, given tokens."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        forced = (params.extra_args or {}).get(FORCED)
        if forced is None:
            return None

        def force(output_ids: list[int], logits: Tensor) -> Tensor:
            token = forced[len(output_ids)]
            kept = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = kept
            return logits

        return force


class WorkerExtension:
    """Methods vLLM adds to its worker; the driver calls them by name on all ranks."""

    def alignment_configure(self, options: dict) -> None:
        """``update``, ``way_rounds``, ``latent_norm_eps`` and the rest of what :class:`VllmRollout` decided."""
        self._alignment = options
        shared_out = self.vllm_config.parallel_config.enable_expert_parallel
        if self.device.type == "cpu" and shared_out and self._alignment_mends("expert_map"):
            vllm_cpu.install_expert_map()
        for name, module in self._alignment_model().named_modules():
            if isinstance(module, RMSNorm) and name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = options["latent_norm_eps"]

    def _alignment_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def _alignment_mends(self, name: str) -> bool:
        return name in self._alignment["way_rounds"]

    # --- updates ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def alignment_begin_update(self) -> None:
        model = self._alignment_model()
        cpu = self.device.type == "cpu"
        if self._alignment["update"] == "layerwise":
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            if cpu and self._alignment_mends("expert_repack"):
                vllm_cpu.forget_kernels(model)
            with set_current_vllm_config(self.vllm_config):
                initialize_layerwise_reload(model)
            return
        for module in experts_of(model).values():
            if cpu and self._alignment_mends("expert_repack"):
                vllm_cpu.unpack_experts(module)
            for name in ("w13_weight", "w2_weight"):
                # Post-processing registers new parameters, some of them without what loads a shard into them.
                if not hasattr(getattr(module, name), "weight_loader"):
                    getattr(module, name).weight_loader = module.weight_loader

    @torch.no_grad()
    def alignment_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write whole tensors of the checkpoint into this rank's part of them."""
        with set_current_vllm_config(self.vllm_config):
            self._alignment_model().load_weights(weights)

    def alignment_load_file(self, path: str) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            self.alignment_load((name, file.get_tensor(name)) for name in file.keys())

    @torch.no_grad()
    def alignment_end_update(self, post_process: bool) -> None:
        model = self._alignment_model()
        cpu = self.device.type == "cpu"
        with set_current_vllm_config(self.vllm_config):
            if self._alignment["update"] == "layerwise":
                from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

                finalize_layerwise_reload(model, self.model_runner.model_config)
                return
            if post_process:
                from vllm.model_executor.model_loader.utils import process_weights_after_loading

                process_weights_after_loading(model, self.model_runner.model_config, self.device)
        if cpu and self._alignment_mends("expert_repack"):
            for module in experts_of(model).values():
                vllm_cpu.pack_experts(module)

    def alignment_post_process(self) -> None:
        """Only what is derived from parameters: the absorbed projections of MLA."""
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            for module in attentions_of(self._alignment_model()).values():
                module.process_weights_after_loading(self.model_runner.model_config.dtype)

    def alignment_detach_derived(self) -> None:
        """Give the absorbed projections contiguous memory of their own, as vLLM-Ascend makes them."""
        for module in attentions_of(self._alignment_model()).values():
            for name in DERIVED:
                copy = getattr(module, name).detach().clone(memory_format=torch.contiguous_format)
                is_parameter = isinstance(getattr(module, name), nn.Parameter)
                setattr(module, name, nn.Parameter(copy, requires_grad=False) if is_parameter else copy)

    # --- what the engine holds -------------------------------------------------------------------------------------

    def alignment_held(self, folder: str, rank_file: str) -> dict[str, int | None]:
        """Write this rank's shards into a file of ``folder``; their cut dimensions are the answer."""
        shards = list(held_shards(self._alignment_model()))
        self._alignment_write(folder, rank_file, {s.name: s.tensor for s in shards})
        return {s.name: s.dim for s in shards}

    def alignment_derived(self, folder: str, rank_file: str) -> dict[str, int | None]:
        """As :meth:`alignment_held` for the derived tensors and, under ``recomputed.``, what they should be."""
        found = {}
        for name, (module, quantity) in derived_of(self._alignment_model()).items():
            found[name] = getattr(module, quantity)
            found[f"recomputed.{name}"] = recompute(module, quantity)
        self._alignment_write(folder, rank_file, found)
        return dict.fromkeys(found, 0)

    def _alignment_write(self, folder: str, rank_file: str, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        path = Path(folder) / rank_file.format(rank=self.rank)
        save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, path)

    # --- generation ------------------------------------------------------------------------------------------------

    def alignment_logprobs_mode(self, mode: str) -> str:
        """Switch what log-probs mean (vLLM's ``logprobs_mode``); the mode before is the answer."""
        sampler = self.model_runner.sampler
        before, sampler.logprobs_mode = sampler.logprobs_mode, mode
        return before


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold stacked routed experts."""
    return {name: module for name, module in model.named_modules() if "w13_weight" in module._parameters}


def attentions_of(model: nn.Module) -> dict[str, Any]:
    """What holds the absorbed projections, by the checkpoint's name of the attention.

    That is the MLA module in current releases, and its ``impl`` (no module) in earlier ones and in vLLM-Ascend.
    """
    found = {}
    for name, module in model.named_modules():
        for holder in (module, getattr(module, "impl", None)):
            if getattr(holder, "W_UV", None) is not None:
                found.setdefault(name.split(".self_attn")[0] + ".self_attn", holder)
    return found


def derived_of(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """(holder, attribute) of every derived tensor by full name."""
    return {f"{name}.{q}": (holder, q) for name, holder in attentions_of(model).items() for q in DERIVED}


def recompute(attention: Any, quantity: str) -> Tensor:
    """``W_UK_T [h, qk_nope, kv_lora]`` or ``W_UV [h, kv_lora, v]`` from ``kv_b_proj.weight``, in new memory."""
    nope, value = attention.qk_nope_head_dim, attention.v_head_dim
    per_head = attention.kv_b_proj.weight.detach().reshape(-1, nope + value, attention.kv_lora_rank)
    if quantity == "W_UK_T":
        return per_head[:, :nope].clone(memory_format=torch.contiguous_format)
    return per_head[:, nope:].transpose(1, 2).clone(memory_format=torch.contiguous_format)


def held_shards(model: nn.Module) -> Iterator[Shard]:
    """Every tensor of the checkpoint as this rank holds it, un-fused and un-packed; views of the engine's own memory
    wherever its layout is the checkpoint's.
    """
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            if not (tied and name.endswith("lm_head")):
                yield Shard(f"{name}.weight", module.weight.detach(), 0 if module.tp_size > 1 else None)
        elif isinstance(module, LinearBase):
            yield from _linear(name, module)
            # The router keeps its correction bias on the layer that scores.
            for extra, tensor in module.named_parameters(recurse=False):
                if extra != "weight":
                    yield Shard(f"{name}.{extra}", tensor.detach(), None)
        elif "w13_weight" in module._parameters:
            yield from _experts(name, module)
        else:
            for own, tensor in module.named_parameters(recurse=False):
                if own not in DERIVED:
                    yield Shard(f"{name}.{own}", tensor.detach(), None)


def _linear(name: str, module: LinearBase) -> Iterator[Shard]:
    row = isinstance(module, RowParallelLinear)
    parallel = getattr(module, "tp_size", 1) > 1
    rows = list(getattr(module, "output_partition_sizes", None) or [module.output_size])
    columns = getattr(module, "input_size_per_partition", module.input_size)
    weight = module.weight.detach()
    if not weight.numel():
        weight = vllm_cpu.read_packed_linear(module, rows=sum(rows), columns=columns, dtype=weight.dtype)
    dim = (1 if row else 0) if parallel and hasattr(module, "input_size_per_partition") else None
    yield from unfused(name, weight, rows, dim)


def _experts(name: str, module: nn.Module) -> Iterator[Shard]:
    w13, w2 = vllm_cpu.expert_weights(module)
    where = getattr(module, "_expert_map", None)
    local = range(w13.shape[0])
    if where is not None:
        local = sorted((e for e in range(len(where)) if where[e] >= 0), key=lambda e: int(where[e]))
    parallel = module.moe_config.moe_parallel_config
    yield from unstacked_experts(name, w13, w2, local, tensor_parallel=not parallel.use_ep and parallel.tp_size > 1)
