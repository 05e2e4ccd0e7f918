"""Checkpoints that fit one machine or one dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import DeviceOption, JsonOption, console_on
from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED, MISALIGNED

checkpoint_app = typer.Typer(no_args_is_help=True, help="Make a checkpoint that fits one machine or one dtype.")

SourceArgument = Annotated[Path, typer.Argument(help="A Hugging Face checkpoint.")]
TargetArgument = Annotated[Path, typer.Argument(help="The folder that is written.")]


@checkpoint_app.command("fp8-to-bf16")
def convert_fp8(source: SourceArgument, target: TargetArgument, as_json: JsonOption = False) -> None:
    """Block-scaled FP8 weights as BF16, file by file; a killed conversion continues when it is called again."""
    from dataclasses import asdict

    from alignment.report.progress import byte_progress
    from alignment.weights.fp8 import convert_fp8_checkpoint

    with byte_progress(console_on(True), quiet=as_json) as progress:
        done = convert_fp8_checkpoint(source, target, progress=progress)
    print(
        json.dumps(asdict(done)) if as_json else f"{target}: {done.dequantized} tensors converted, {done.copied} copied"
    )


@checkpoint_app.command("examine")
def examine(
    path: Annotated[
        Path,
        typer.Argument(help="A Hugging Face or distributed checkpoint, global_step_<N>, or the folder of those."),
    ],
    ranks: Annotated[Optional[int], typer.Option(min=1, help="Of the run that will resume from it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Can it be trusted? Files, keys, counts and layouts, before anything is loaded; exit 1 with every symptom."""
    from dataclasses import asdict

    from alignment.diagnose.resume_doctor import examine_checkpoint
    from alignment.report.progress import waiting

    with waiting(console_on(True), f"examining {path}", quiet=as_json):
        symptoms = examine_checkpoint(path, ranks=ranks)
    if as_json:
        print(json.dumps({"symptoms": [asdict(symptom) for symptom in symptoms]}, indent=1))
    else:
        counted = f"{len(symptoms)} symptom{'s' * (len(symptoms) > 1)}"
        for line in [*map(str, symptoms), counted if symptoms else f"{path}: can be trusted"]:
            print(line)
    raise typer.Exit(MISALIGNED if symptoms else ALIGNED)


@checkpoint_app.command("to-dist")
def write_dist_checkpoint(
    source: SourceArgument,
    target: TargetArgument,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: that of the run that will load it.")] = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """A Hugging Face checkpoint as megatron-core's distributed one, for actor.megatron.use_dist_checkpointing."""
    import torch

    from alignment.devices.base import get_device
    from alignment.report.progress import waiting
    from alignment.rl.megatron_policy import write_dist_checkpoint as write

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise InputError(
            "megatron-core has no such dtype here", where="--dtype", expected=", ".join(dtypes), found=dtype
        )
    with waiting(console_on(True), f"writing {target}", quiet=as_json):
        version = write(source, target, dtype=dtypes[dtype], device=get_device(device))
    if as_json:
        document = {"target": str(target), "source": str(source), "dtype": dtype, "megatron_core": version}
        print(json.dumps(document))
    else:
        print(f"{target}: written by megatron-core {version} from {source}")


@checkpoint_app.command("cut")
def cut(
    source: SourceArgument,
    target: TargetArgument,
    layers: Annotated[str, typer.Option(help="Layers to keep, in order: 0,3,60")],
    keep_mtp: Annotated[bool, typer.Option(help="Keep the multi-token-prediction layers.")] = False,
    as_json: JsonOption = False,
) -> None:
    """A small real checkpoint from a large one: the field's way from 671B to one machine."""
    from alignment.report.progress import byte_progress
    from alignment.weights.cut import cut_checkpoint

    try:
        kept = [int(part) for part in layers.split(",")]
    except ValueError:
        raise InputError("layers are numbers", where="--layers", expected="0,3,60", found=layers) from None
    with byte_progress(console_on(True), quiet=as_json) as progress:
        cut_checkpoint(source, target, layers=kept, keep_mtp=keep_mtp, progress=progress)
    if as_json:
        print(json.dumps({"target": str(target), "source": str(source), "layers": kept, "keep_mtp": keep_mtp}))
    else:
        print(f"{target}: {len(kept)} layers of {source}")
