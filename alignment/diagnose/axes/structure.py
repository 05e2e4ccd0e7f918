"""Axis 5: the model's structure, its weights, and what the engines really hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alignment.diagnose.axes import AXES, AxisReport, Finding, report
from alignment.diagnose.garbled import Garbled
from alignment.diagnose.run_stages import RunData, StageVerdict
from alignment.files import read_json
from alignment.numerics.verdict import Outcome

AXIS = AXES[4]
_MODEL = "actor_rollout_ref.model.path"
_BOOKKEEPING = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
    "auto_map",
    "use_cache",
)
SYNC = "pytest tests/e2e/test_weight_sync.py, or alignment run --only weight_sync"


def check(dut: RunData, baseline: RunData, stages: Sequence[StageVerdict], garbled: Garbled | None) -> AxisReport:
    """Garbled text first (it is a symptom of wrong weights), then the configuration, the tensors, and their sync."""
    findings: list[Finding] = []
    compared = []
    if garbled is not None:
        findings.append(
            Finding(
                axis=AXIS,
                cause="garbled rollout: the inference engine holds other weights, or derives others from them",
                evidence=garbled.reason,
                weight=5,
                next_command=SYNC,
            )
        )
    folders = [run.config.get(_MODEL) and Path(str(run.config[_MODEL])) for run in (dut, baseline)]
    if all(folder and (folder / "config.json").is_file() for folder in folders):
        findings += _config(*folders)
        findings += _tensors(*folders)
        compared.append("configuration and tensors of the first weights agree")
    else:
        hashes = [run.provenance_hash("model_hash") for run in (dut, baseline)]
        if None not in hashes:
            compared.append("the first weights have one hash")
            if hashes[0] != hashes[1]:
                findings.append(
                    Finding(axis=AXIS, cause="other first weights", evidence=f"{hashes[1][:12]} → {hashes[0][:12]}")
                )
    parted = next((stage for stage in stages if stage.outcome is Outcome.FAIL), None)
    if parted is not None and parted.stage == "weight_sync":
        findings.append(Finding(axis=AXIS, cause="weight sync", evidence=parted.reason, weight=4, next_command=SYNC))
    synced = [stage for stage in stages if stage.stage == "weight_sync"]
    if synced:
        compared.append(f"{len(synced)} weight syncs leave engine and trainer as close as the baseline's")
    return report(
        AXIS,
        findings,
        compared="; ".join(compared),
        unseen="" if compared else "neither checkpoints nor hashes nor log-probs of both runs are there",
    )


def _config(ours: Path, theirs: Path) -> list[Finding]:
    a, b = read_json(ours / "config.json"), read_json(theirs / "config.json")
    return [
        Finding(axis=AXIS, cause=f"model configuration: {key}", evidence=f"{b.get(key)} → {a.get(key)}", weight=4)
        for key in sorted(set(a) | set(b))
        if a.get(key) != b.get(key) and key not in _BOOKKEEPING
    ]


def _tensors(ours: Path, theirs: Path) -> list[Finding]:
    """The first tensor that one checkpoint lacks, or that has another shape, dtype or other bits; and how many."""
    shapes = [dict(_shapes(folder)) for folder in (ours, theirs)]
    strange = sorted(shapes[0].keys() ^ shapes[1].keys())
    if strange:
        where = "only in the run" if strange[0] in shapes[0] else "missing from the run"
        return [Finding(axis=AXIS, cause="parameter census", evidence=f"{strange[0]} is {where} ({len(strange)} such)")]
    odd = [name for name, kind in shapes[0].items() if kind != shapes[1][name]]
    if odd:
        name = odd[0]
        return [
            Finding(
                axis=AXIS, cause="shape or dtype of a tensor", evidence=f"{name}: {shapes[1][name]} → {shapes[0][name]}"
            )
        ]
    from alignment.weights.checkpoint import iter_tensors

    other = dict(_lazily(theirs))
    different = [name for name, tensor in iter_tensors(ours) if not _equal(tensor, other[name]())]
    if not different:
        return []
    return [
        Finding(
            axis=AXIS,
            cause="other first weights",
            evidence=f"{len(different)} of {len(shapes[0])} tensors differ, {different[0]} first",
        )
    ]


def _equal(x: Tensor, y: Tensor) -> bool:
    """Equal bits; float8 knows no comparison of its own."""
    return bool((x.contiguous().view(torch.uint8) == y.contiguous().view(torch.uint8)).all())


def _shapes(folder: Path) -> Iterator[tuple[str, tuple]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                yield name, (tuple(part.get_shape()), part.get_dtype())


def _lazily(folder: Path) -> Iterator[tuple[str, object]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())

        def load(name: str, path: Path = path):
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)

        for name in names:
            yield name, lambda name=name, load=load: load(name)
