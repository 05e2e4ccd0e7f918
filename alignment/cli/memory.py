"""Memory: what a layout needs, and what a step took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import DeviceOption, EmulateOption, JsonOption, console_on, find_device, one_thread, say
from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED, MISALIGNED

memory_app = typer.Typer(
    no_args_is_help=True, help="Estimate what a layout needs on a card, and measure what a step took."
)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A preset of the golden model, or a folder with a config.json.")
]


@memory_app.command("estimate")
def estimate_memory(
    model: ModelArgument,
    tp: Annotated[int, typer.Option(help="tensor_model_parallel_size")] = 1,
    pp: Annotated[int, typer.Option(help="pipeline_model_parallel_size")] = 1,
    vpp: Annotated[Optional[int], typer.Option(help="virtual_pipeline_model_parallel_size")] = None,
    cp: Annotated[int, typer.Option(help="context_parallel_size")] = 1,
    ep: Annotated[int, typer.Option(help="expert_model_parallel_size")] = 1,
    etp: Annotated[Optional[int], typer.Option(help="expert_tensor_parallel_size (TP by default)")] = None,
    dp: Annotated[int, typer.Option(help="Data parallel replicas.")] = 1,
    first_pp: Annotated[Optional[int], typer.Option(help="num_layers_in_first_pipeline_stage")] = None,
    last_pp: Annotated[Optional[int], typer.Option(help="num_layers_in_last_pipeline_stage")] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a row.")] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Rows of a micro batch.")] = 1,
    micro_batches: Annotated[
        Optional[int], typer.Option(help="Per replica and update; as many as fit by default.")
    ] = None,
    recompute: Annotated[str, typer.Option(help="none, selective or full")] = "none",
    recompute_layers: Annotated[int, typer.Option(help="recompute_num_layers")] = 1,
    unfused_attention: Annotated[bool, typer.Option(help="Scores and broadcast masks exist in memory.")] = False,
    reference: Annotated[bool, typer.Option(help="Whether a reference policy is held.")] = True,
    optimizer_offload: Annotated[bool, typer.Option(help="optimizer_cpu_offload")] = False,
    rollout_tp: Annotated[Optional[int], typer.Option(help="Of the inference engine (TP by default).")] = None,
    rollout_ep: Annotated[Optional[int], typer.Option(help="Of the inference engine (EP by default).")] = None,
    sequences: Annotated[int, typer.Option(help="Rows alive at once in the rollout.")] = 1,
    prefill_tokens: Annotated[int, typer.Option(help="Tokens that enter the rollout at once.")] = 4096,
    card_gb: Annotated[float, typer.Option(help="Memory of one card, in 1024³ bytes.")] = 64.0,
    hccl_buffsize: Annotated[int, typer.Option(help="HCCL_BUFFSIZE in MB; each communicator holds twice that.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Static memory, activations, caches and buffers per pipeline stage and phase; exit 1 when a phase does not fit."""
    from rich.table import Table

    from alignment.diagnose.memory_model import GB, PHASES, RolloutPlan, TrainingPlan, estimate
    from alignment.weights.megatron_layout import ParallelSizes

    sizes = ParallelSizes(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_layers_in_first_pipeline_stage=first_pp,
        num_layers_in_last_pipeline_stage=last_pp,
    )
    found = estimate(
        _config_of(model),
        TrainingPlan(
            sizes=sizes,
            data_parallel=dp,
            sequence_length=sequence,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            recompute=recompute,
            recompute_num_layers=recompute_layers,
            fused_attention=not unfused_attention,
            reference=reference,
            optimizer_offload=optimizer_offload,
        ),
        RolloutPlan(
            tensor_parallel=rollout_tp or tp,
            expert_parallel=rollout_ep or ep,
            sequences=sequences,
            length=sequence,
            prefill_tokens=prefill_tokens,
            fused_prefill=not unfused_attention,
        ),
        card_bytes=round(card_gb * GB),
        buffer_mb=hccl_buffsize,
    )
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        raise typer.Exit(MISALIGNED if found.advice else ALIGNED)
    phases = [phase for phase in PHASES if phase in found.stages[0].phases]
    columns = (
        "stage",
        "dense",
        "MoE",
        "weights",
        "gradients",
        "optimizer",
        "in\nflight",
        "acti-\nvations",
        "logits",
        # The names of phases in full, also on a narrow page.
        *(phase.replace("_", "\n") for phase in phases),
    )
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", title="GB (1024³ bytes) on one card")
    for stage in found.stages:
        numbers = (stage.weights, stage.gradients, stage.optimizer)
        table.add_row(
            str(stage.stage),
            *map(str, stage.layers),
            *(f"{n / GB:.2f}" for n in numbers),
            str(stage.in_flight),
            f"{(stage.activations + stage.embedding) / GB:.2f}",
            f"{stage.logits / GB:.2f}",
            *(f"{stage.phases[phase] / GB:.2f}" for phase in phases),
        )
    console = console_on(False)
    console.print(table)
    held, stage, phase = found.peak
    engine = found.rollout
    for line in (
        f"rollout engine: weights {engine.weights / GB:.2f}, latent cache {engine.cache / GB:.2f}, "
        f"mask {engine.mask / GB:.3f}, logits {engine.logits / GB:.3f} GB",
        f"communication buffers: {found.stages[0].communication / GB:.2f} GB, outside the framework's view",
        f"peak: {held / GB:.2f} GB in {phase} on stage {stage}, of {card_gb:g} GB",
        *(found.advice or (f"it fits: {card_gb - held / GB:.2f} GB are left on the fullest card",)),
    ):
        say(console, line)
    raise typer.Exit(MISALIGNED if found.advice else ALIGNED)


@memory_app.command("profile")
def profile_memory(
    model: Annotated[
        Optional[str], typer.Argument(metavar="[MODEL]", help="A preset, or a folder with a config.json.")
    ] = None,
    trace: Annotated[
        Optional[Path], typer.Option(help="npu_module_mem*.csv of Ascend's profiler, or a folder with one.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Samples.")] = 4,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 16,
    response_length: Annotated[int, typer.Option(min=1, help="Tokens of each response.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    device: DeviceOption = "auto",
    emulate_npu: EmulateOption = False,
    as_json: JsonOption = False,
) -> None:
    """One step of the golden engines measured phase by phase against the model; or what a profiler's record holds."""
    if (model is None) == (trace is None):
        raise InputError(
            "one thing is profiled", where="memory profile", expected="MODEL, or --trace", found="both or neither"
        )
    if trace is not None:
        _show_trace(trace, as_json)
        return
    import torch

    from alignment.diagnose.memory_profile import profile_step
    from alignment.report.progress import tasks

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise InputError("unknown dtype", where="--dtype", expected=", ".join(dtypes), found=dtype)
    chosen, console = find_device(device, emulate_npu), console_on(False)
    with one_thread(), tasks(console_on(True), "measuring", quiet=as_json) as progress:
        phases = profile_step(
            _config_of(model),
            device=chosen,
            dtype=dtypes[dtype],
            rows=rows,
            prompt_length=prompt_length,
            response_length=response_length,
            progress=progress,
        )
    if as_json:
        print(json.dumps({"device": chosen.label, "phases": [p.to_dict() for p in phases]}, indent=1))
        return
    _table(
        console,
        ("phase", "before", "peak", "model", "residual", "after", "released", "outside"),
        [
            (
                p.phase,
                *(f"{n / 1e6:.1f}" for n in (p.before, p.peak, p.modelled, p.residual, p.after, p.released)),
                "not measured" if p.outside is None else f"{p.outside / 1e6:.1f}",
            )
            for p in phases
        ],
        title=f"MB on {chosen.label}",
    )


def _show_trace(trace: Path, as_json: bool) -> None:
    from alignment.diagnose.memory_profile import outside_framework, read_module_memory

    parts = read_module_memory(trace)
    outside = outside_framework(parts)
    if as_json:
        components = [
            {
                "device": p.device,
                "component": p.component,
                "peak": p.peak,
                "points": len(p.times),
                "unmatched": p.unmatched,
            }
            for p in parts
        ]
        print(json.dumps({"components": components, "outside_framework": outside}, indent=1))
        return
    console = console_on(False)
    _table(
        console,
        ("card", "component", "peak GB", "points"),
        [(p.device, p.component, f"{p.peak / 1024**3:.3f}", str(len(p.times))) for p in parts],
        title=str(trace),
    )
    for card, total in outside.items():
        console.print(f"{card}: {total / 1024**3:.3f} GB outside the framework's view", markup=False, highlight=False)


def _table(console, columns: tuple[str, ...], rows: list[tuple[str, ...]], *, title: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold", title=escape(title))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _config_of(model: str):
    from alignment.models.config import PRESETS, preset
    from alignment.weights.checkpoint import load_config

    return preset(model) if model in PRESETS or not Path(model).is_dir() else load_config(model)
