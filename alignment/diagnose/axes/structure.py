"""Axis 5: the model's structure, its weights, and what the engines really hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alignment.diagnose.axes import AXES, AxisReport, Finding, overrides, read_answer, report
from alignment.diagnose.garbled import Garbled
from alignment.diagnose.run_stages import RunData, StageVerdict
from alignment.errors import InputError
from alignment.files import read_json
from alignment.numerics.verdict import Outcome

AXIS = AXES[4]
_ACTOR = "actor_rollout_ref.actor."
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
WEIGHTS = "weights.json"
SYNC = f"alignment run --only weight_sync --json > RUN/{WEIGHTS}, or pytest tests/e2e/test_weight_sync.py"
WHOLE = 1 << 30
"""Bytes of a checkpoint up to which its values go through a conversion, and not only its names and shapes."""


def check(dut: RunData, baseline: RunData, stages: Sequence[StageVerdict], garbled: Garbled | None) -> AxisReport:
    """Garbled text first (it is a symptom of wrong weights), then the configuration, the tensors, the conversion to the
    layout of the run and back, and what the engines hold after a sync (``weights.json``, the answer of ``alignment run
    --only weight_sync --json`` in the run's folder).
    """
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
        again = f"run again with {overrides(baseline.config, [_MODEL])}" if folders[0] != folders[1] else ""
        different = [*_config(*folders), *_tensors(*folders)]
        findings += [dataclasses.replace(finding, next_command=again) for finding in different]
        compared.append("configuration and tensors of the first weights agree")
        lost, told = _round_trip(dut, folders[0])
        findings += lost
        compared += told
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
    held = read_answer(dut.directory / WEIGHTS, command="alignment run --only weight_sync --json")
    for verdict in held:
        if verdict.outcome is Outcome.FAIL:
            where = f" ({verdict.where})" if verdict.where else ""
            findings.append(
                Finding(
                    axis=AXIS,
                    cause=f"what the engine holds: {verdict.check}",
                    evidence=f"{verdict.reason}{where}",
                    weight=4,
                    next_command=verdict.next_command or SYNC,
                )
            )
    if held and all(verdict.outcome is Outcome.PASS for verdict in held):
        compared.append(f"{len(held)} checks of what the engines hold after a sync pass")
    synced = [stage for stage in stages if stage.stage == "weight_sync"]
    if synced:
        compared.append(f"{len(synced)} weight syncs leave engine and trainer as close as the baseline's")
    return report(
        AXIS,
        findings,
        compared="; ".join(compared),
        unseen="" if compared else "neither checkpoints nor hashes nor log-probs of both runs are there",
        next_command="" if held else SYNC,
    )


def _round_trip(run: RunData, folder: Path) -> tuple[list[Finding], list[str]]:
    """The checkpoint, cut for every rank of the run's megatron layout and put together again.

    Values are compared up to :data:`WHOLE` bytes, names and shapes always. Nothing where the run has no such layout.
    """
    from alignment.weights.checkpoint import expected_shapes, iter_tensors, load_config
    from alignment.weights.megatron_layout import fetch_from, local_parameters, places, to_hugging_face, to_megatron

    sizes = _layout(run)
    if sizes is None:
        return [], []
    try:
        config = load_config(folder)
        sizes.check(config)
        wanted = expected_shapes(config)
        whole = sum(path.stat().st_size for path in folder.glob("*.safetensors")) <= WHOLE
        held = {
            name: tensor
            for name, tensor in (iter_tensors(folder) if whole else _on_no_device(folder))
            if name in wanted
        }
        states = {
            place: {(local.chunk, local.name): part for local, part in to_megatron(config, sizes, place, held.items())}
            for place in places(sizes)
        }
        back = dict(to_hugging_face(config, fetch_from(config, sizes, states)))
    except InputError as error:
        return [Finding(axis=AXIS, cause="the conversion to the layout of the run", evidence=str(error), weight=4)], []
    names = sorted(held.keys() ^ back.keys())
    odd = names or [n for n in held if held[n].shape != back[n].shape or whole and not _equal(held[n], back[n])]
    if odd:
        evidence = f"{odd[0]} does not come back ({len(odd)} such)"
        return [Finding(axis=AXIS, cause="the conversion to the layout of the run", evidence=evidence, weight=4)], []
    ranks = sum(1 for place in states if list(local_parameters(config, sizes, place)))
    what = "bit for bit" if whole else "in names and shapes"
    return [], [f"{len(held)} tensors come back {what} from the parts of {ranks} ranks"]


def _layout(run: RunData):
    """The parallel sizes of a run on megatron-core, None for any other."""
    from alignment.weights.megatron_layout import ParallelSizes

    engine = run.config.get("engine.train") if run.engine == "alignment" else run.config.get(f"{_ACTOR}strategy")
    if engine != "megatron":
        return None
    names = [field.name for field in dataclasses.fields(ParallelSizes)]
    found = {}
    for name in names:
        for prefix in (f"{_ACTOR}megatron.", f"{_ACTOR}megatron.override_transformer_config."):
            value = run.config.get(prefix + name)
            if value is not None:
                found[name] = int(value)
    return ParallelSizes(**found)


def _on_no_device(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for name, (shape, _) in _shapes(folder):
        yield name, torch.empty(shape, device="meta")


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
    # flat first: what has no dimensions, as the scale of a quantised cache, cannot be viewed as bytes
    x, y = (t.contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
    return bool((x == y).all())


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
