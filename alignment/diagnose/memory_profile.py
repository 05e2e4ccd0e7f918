"""Memory as it was: the phases of a training step measured on a device, and what Ascend's profiler wrote down.

Three views of one number disagree for good reasons. The framework's allocator counts tensors; the process (or the card)
also holds what never went through it: communication buffers, the runtime, memory an inference engine mapped itself. The
model says what the tensors should be. Each phase shows all three, and the difference by name; what is outside is
measured where the device's memory is that of the machine, and read from the profiler's record on a card.
"""

from __future__ import annotations

import csv
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from alignment.devices.base import Device
from alignment.devices.memory import resident_bytes
from alignment.errors import InputError
from alignment.models.config import ModelConfig

MODULE_MEMORY = "npu_module_mem*.csv"
_COLUMNS = ("Component", "Timestamp(us)", "Total Reserved(KB)")
KB = 1024


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """One phase of a step, in bytes.

    Attributes:
        before, peak, after: the allocator's count at its start, at its highest point and at its end.
        outside: what the process holds beyond the allocator's count at the end; what the framework cannot see. None
            where it is not measured: on a card, whose memory the process's own pages say nothing about.
        modelled: what the tensors of the phase should be at its peak.
    """

    phase: str
    before: int
    peak: int
    after: int
    outside: int | None
    modelled: int

    @property
    def released(self) -> int:
        """What the phase gave back (negative: what it left)."""
        return self.before - self.after

    @property
    def residual(self) -> int:
        """Measured peak minus the model: temporaries of single operators, mostly."""
        return self.peak - self.modelled

    def to_dict(self) -> dict:
        return {**asdict(self), "residual": self.residual, "released": self.released}


def profile_step(
    config: ModelConfig,
    *,
    device: Device,
    dtype: torch.dtype = torch.float32,
    rows: int = 4,
    prompt_length: int = 16,
    response_length: int = 16,
    seed: int = 0,
    progress: Callable[[str], None] = lambda phase: None,
) -> tuple[PhaseMemory, ...]:
    """One step of the golden engines on ``device``, by phase: rollout, sleep, old_log_prob, ref_log_prob, update_actor,
    offload.

    The policy is on the host while the reference computes, as :func:`~alignment.diagnose.memory_model.estimate` has it.

    Args:
        config: the model, with dummy weights from ``seed``.
        rows, prompt_length, response_length: of the one micro batch.

    Raises:
        InputError: sizes below one.
    """
    from alignment.backends.golden_rollout import GoldenRollout
    from alignment.backends.golden_training import GoldenTrainingEngine
    from alignment.backends.rollout import SamplingParams
    from alignment.backends.training import OptimizerConfig
    from alignment.models.causal_lm import CausalLM
    from alignment.numerics.random import portable_integers
    from alignment.rl.stages import policy_outputs

    for name, value in (("rows", rows), ("prompt_length", prompt_length), ("response_length", response_length)):
        if value < 1:
            raise InputError("the value has to be at least 1", where=name, found=value)
    sizes = GoldenSizes(config, dtype=dtype, rows=rows, prompt=prompt_length, response=response_length)
    found: list[PhaseMemory] = []

    @contextmanager
    def phase(name: str, modelled: int) -> Iterator[None]:
        progress(name)
        gc.collect()
        device.empty_cache()
        device.synchronize()
        device.reset_peak_memory()
        before = device.memory_allocated()
        yield
        device.synchronize()
        peak = device.max_memory_allocated()
        gc.collect()
        device.empty_cache()
        after = device.memory_allocated()
        outside = _outside(device, after)
        found.append(PhaseMemory(phase=name, before=before, peak=peak, after=after, outside=outside, modelled=modelled))

    place = {"dtype": dtype, "device": device.torch_device}
    prompts = portable_integers(0, config.vocab_size, (rows, prompt_length), seed=seed, stream="memory/prompts")
    with phase("rollout", sizes.rollout):
        engine = GoldenRollout(config, dtype=dtype, device=device, load_format="dummy", seed=seed)
        made = engine.generate(
            prompts,
            torch.ones_like(prompts),
            SamplingParams(max_new_tokens=response_length, seed=seed),
            torch.arange(rows),
        )
    responses, response_mask = made.responses.cpu(), made.response_mask.cpu()
    del made
    with phase("sleep", sizes.awake):
        engine.sleep(level=2)
    ids = torch.cat([prompts, responses], dim=1)
    mask = torch.cat([torch.ones_like(prompts), response_mask.to(prompts.dtype)], dim=1)
    micro_batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
        "responses": responses,
        "response_mask": response_mask,
    }
    outputs = partial(policy_outputs, temperature=1.0)
    with phase("old_log_prob", sizes.asleep + sizes.old_log_prob):
        trainer = GoldenTrainingEngine(
            CausalLM(config, **place).init_weights(seed),
            optimizer=OptimizerConfig(lr=1e-6),
            outputs=outputs,
            device=device.torch_device,
        )
        trainer.forward([micro_batch], stage="old_log_prob")
    trainer.offload()
    # A CPU is its own host.
    away = sizes.resident if device.kind == "cpu" else 0
    with phase("ref_log_prob", sizes.asleep + sizes.ref_log_prob + away):
        reference = GoldenTrainingEngine(
            CausalLM(config, **place).init_weights(seed), optimizer=None, outputs=outputs, device=device.torch_device
        )
        reference.forward([micro_batch], stage="ref_log_prob")
    del reference
    trainer.reload()
    with phase("update_actor", sizes.asleep + sizes.update_actor):
        trainer.update(
            [micro_batch],
            lambda outputs, batch: ((outputs["log_probs"] * batch["response_mask"]).sum(), {}),
            stage="update_actor",
        )
    with phase("offload", sizes.asleep + sizes.resident):
        trainer.offload()
    return tuple(found)


def _outside(device: Device, allocated: int) -> int | None:
    """Pages of this process beyond ``allocated``, where the device's memory is among them."""
    on_the_host = device.kind == "cpu" or device.emulated
    return max(resident_bytes() - allocated, 0) if on_the_host else None


class GoldenSizes:
    """What the golden engines' tensors take, in bytes, at the peak of each phase.

    Attributes:
        rollout: weights, absorbed projections, latent cache, and the logits of one decode step.
        awake: weights and absorbed projections, before the engine sleeps.
        asleep: what level 2 leaves on the device: the absorbed projections.
        resident: weights and optimizer states.
        old_log_prob: weights, optimizer states, and logits with their log-softmax.
        ref_log_prob: weights of the reference, and the same logits and log-softmax.
        update_actor: weights and optimizer states with accumulated gradients, and the larger of the activations and the
            gradients of one backward pass.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, rows: int, prompt: int, response: int) -> None:
        from alignment.diagnose.memory_model import attention_elements, stage_parameters
        from alignment.weights.megatron_layout import ParallelSizes

        element, wide = dtype.itemsize, max(dtype.itemsize, 4)
        parameters = sum(stage_parameters(config, ParallelSizes())[0])
        tokens, length = rows * (prompt + response), prompt + response
        weights = parameters * element
        heads = config.num_attention_heads
        absorbed = (
            config.num_hidden_layers * heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
        ) * element
        cache = tokens * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * element
        self.parameters = parameters
        self.asleep, self.awake = absorbed, weights + absorbed
        self.rollout = weights + absorbed + cache + rows * config.vocab_size * (element + wide)
        states = parameters * (2 * wide + (wide if element < wide else 0))
        logits = tokens * config.vocab_size * element
        # Log-softmax and its exponential, over the response.
        tables = 2 * rows * response * config.vocab_size * wide
        self.resident = weights + states
        self.old_log_prob = self.resident + logits + tables
        self.ref_log_prob = weights + logits + tables
        routed = config.num_experts_per_tok * (2 * config.hidden_size + 4 * config.moe_intermediate_size)
        shared = 4 * config.moe_intermediate_size * config.n_shared_experts
        dense = config.first_k_dense_replace
        per_token = config.num_hidden_layers * (3 * config.hidden_size + attention_elements(config)) + (
            dense * 4 * config.intermediate_size + (config.num_hidden_layers - dense) * (routed + shared)
        )
        scores = 3 * config.num_hidden_layers * rows * heads * length * length
        activations = (tokens * per_token + scores) * wide
        gradients = parameters * wide
        self.update_actor = self.resident + gradients + max(activations + logits + 2 * tables, parameters * element)


# --- the profiler's record -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ComponentMemory:
    """What one component of the runtime (``APP``, ``HCCL``, ``RUNTIME``, …) reserved on a card over time, in bytes.

    ``times`` are microseconds as the profiler gives them; ``unmatched`` counts its rows that only say that something
    was given back (−1).
    """

    component: str
    device: str
    times: tuple[float, ...]
    reserved: tuple[int, ...]
    unmatched: int = 0

    @property
    def peak(self) -> int:
        return max(self.reserved, default=0)


def read_module_memory(path: Path) -> tuple[ComponentMemory, ...]:
    """``npu_module_mem*.csv`` of Ascend's profiler, a file or a folder with one below it, by card and component.

    Columns (CANN, profile data file reference): ``Component``, ``Timestamp(us)``, ``Total Reserved(KB)`` with −1 for a
    row that only shows memory given back, and ``Device`` or ``Device_id``.

    Raises:
        InputError: no such file, several of them, a column is missing, or a row is no number; file and line are named.
    """
    if path.is_dir():
        files = sorted(path.rglob(MODULE_MEMORY))
        if len(files) != 1:
            raise InputError(
                "one record of the profiler is read",
                where=path,
                expected=f"one {MODULE_MEMORY}",
                found=", ".join(str(f.relative_to(path)) for f in files[:4]) or "none",
            )
        path = files[0]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file cannot be read ({error})", where=path) from error
    table = csv.DictReader(text.splitlines())
    columns = [name.strip() for name in table.fieldnames or ()]
    missing = [name for name in _COLUMNS if name not in columns]
    if missing or not {"Device", "Device_id"} & set(columns):
        raise InputError(
            "not a record of component memory",
            where=path,
            expected=", ".join(_COLUMNS) + " and Device",
            found=", ".join(columns) or "an empty file",
        )
    table.fieldnames = columns
    series: dict[tuple[str, str], list[tuple[float, int]]] = {}
    unmatched: dict[tuple[str, str], int] = {}
    for row in table:
        key = ((row.get("Device") or row.get("Device_id") or "").strip(), (row["Component"] or "").strip())
        try:
            time, reserved = float(row["Timestamp(us)"]), float(row["Total Reserved(KB)"])
            if not (math.isfinite(time) and math.isfinite(reserved)) or reserved < -1:
                raise ValueError
        except (TypeError, ValueError):
            raise InputError(
                "the row is not a time and a size",
                where=f"{path}, line {table.line_num}",
                expected="numbers; sizes in KB, or -1",
                found=f"{row['Timestamp(us)']!r}, {row['Total Reserved(KB)']!r}",
            ) from None
        series.setdefault(key, [])
        if reserved == -1:
            unmatched[key] = unmatched.get(key, 0) + 1
        else:
            series[key].append((time, round(reserved * KB)))
    return tuple(
        ComponentMemory(
            component=component,
            device=device,
            times=tuple(time for time, _ in sorted(points)),
            reserved=tuple(size for _, size in sorted(points)),
            unmatched=unmatched.get((device, component), 0),
        )
        for (device, component), points in sorted(series.items())
    )


def outside_framework(components: tuple[ComponentMemory, ...]) -> dict[str, int]:
    """Per card, the peaks of every component but ``APP``, the framework's own: what its counters never show."""
    totals: dict[str, int] = {}
    for part in components:
        if part.component != "APP":
            totals[part.device] = totals.get(part.device, 0) + part.peak
    return totals
