"""What the precision collector left on disk: layer dumps by stage, and the key data of every step.

::

    <dump_path>/<stage>/[step<S>/]rank<R>/{construct.json, dump.json, stack.json}
    <dump_path>/data/<key>/step<S>/rank<R>/[micro_step<M>/]<name><i>.npy and .json

All spellings of ``<name><i>`` in use are read: ``responses0``, ``response0``, ``responses.0`` (a list that msprobe
saved) and ``responses`` (a single tensor); the statistics are in a ``.json`` beside the ``.npy`` of the same name, or
together in ``<key>.json``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alignment.capture.readers import json_stream
from alignment.capture.readers.arrays import StoredArray
from alignment.capture.readers.foreign import numbered
from alignment.capture.readers.msprobe import MsprobeDump, is_dump
from alignment.capture.readers.npy_file import read_npy
from alignment.capture.record import Statistics, TensorRow
from alignment.errors import InputError

DATA, DATA_STAGE = "data", "data"
OF_ROLLOUT = frozenset({"responses", "prompts", "input_ids", "attention_mask", "position_ids"})
"""Keys whose rows are the samples of one generation round."""
LAYER_STAGES = (
    "actor_generate_sequences",
    "actor_compute_log_prob",
    "reference_compute_log_prob",
    "critic_compute_values",
    "critic_update",
    "actor_update",
)
"""In the order of a training step."""


@dataclass(frozen=True, kw_only=True)
class KeyDatum:
    """One stored value: ``index`` within its list, ``micro_step`` within its step and rank."""

    key: str
    micro_step: int
    index: int
    path: Path


class CollectorDump:
    """A ``dump_path``. See :class:`~alignment.capture.record.CaptureReader`.

    Raises:
        InputError: the collector left nothing there.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._layers = {
            stage: MsprobeDump(self.root / stage, stage=stage)
            for stage in LAYER_STAGES
            if (self.root / stage).is_dir() and is_dump(self.root / stage)
        }
        self._data = _data_folders(self.root)
        if not self._layers and not self._data:
            raise InputError(
                "the collector left nothing here", where=root, expected=f"{DATA}/<key>/step<S> or {LAYER_STAGES[0]}/…"
            )

    def steps(self) -> list[int]:
        """Steps of any stage."""
        found = {s for dump in self._layers.values() for s in dump.steps()}
        return sorted(found | {s for steps in self._data.values() for s in steps})

    def stages(self, step: int) -> list[str]:
        """Key data first, then the layer dumps in the order of a training step."""
        data = [DATA_STAGE] if any(step in steps for steps in self._data.values()) else []
        return data + [stage for stage, dump in self._layers.items() if step in dump.steps()]

    def ranks(self, step: int, stage: str) -> list[int]:
        """See :class:`~alignment.capture.record.CaptureReader`."""
        if stage == DATA_STAGE:
            return sorted({rank for steps in self._data.values() for rank in steps.get(step, {})})
        return self._layers[stage].ranks(step, stage) if stage in self._layers else []

    def describe(self) -> dict[str, Any]:
        """Format, stages and keys."""
        return {"format": "precision collector", "stages": list(self._layers), "keys": list(self._data)}

    def keys(self) -> list[str]:
        """Names of the key data."""
        return list(self._data)

    def key_data(self, step: int, rank: int) -> list[KeyDatum]:
        """What is stored of a step and rank, by key, micro step and index."""
        found = []
        for key, steps in self._data.items():
            if rank in steps.get(step, {}):
                found += _stored(key, steps[step][rank])
        return found

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        """Key data are values: ``call`` is the micro step, ``path`` the place in the list where there are several."""
        if stage != DATA_STAGE:
            if stage not in self._layers:
                raise InputError("the collector dumped no such stage", where=self.root, found=stage)
            yield from self._layers[stage].rows(step, stage, rank)
            return
        data = self.key_data(step, rank)
        keys = _sample_keys(data)
        for order, datum in enumerate(data):
            array = read_npy(datum.path)
            named = keys.get((datum.micro_step, datum.index)) if datum.key in OF_ROLLOUT else None
            yield TensorRow(
                module=datum.key, class_name="", kind="value", direction="forward", call=datum.micro_step,
                role="output", path=f"{datum.key}.{datum.index}" if datum.index else datum.key, order=order, parent="",
                dtype=array.dtype, shape=array.shape, statistics=_statistics(datum, array), load_tensor=array.load,
                keys=named if named is not None and array.shape[:1] == (len(named),) else None,
            )  # fmt: skip


def is_collector(root: Path) -> bool:
    """Whether ``root`` is a ``dump_path``."""
    root = Path(root)
    layers = any((root / stage).is_dir() and is_dump(root / stage) for stage in LAYER_STAGES)
    return layers or bool(_data_folders(root))


def _data_folders(root: Path) -> dict[str, dict[int, dict[int, Path]]]:
    """Folder by key, step and rank."""
    base = Path(root) / DATA
    if not base.is_dir() or base.is_symlink():
        return {}
    found: dict[str, dict[int, dict[int, Path]]] = {}
    for folder in sorted(p for p in base.iterdir() if p.is_dir() and not p.is_symlink()):
        steps = {s: ranks for s, p in numbered(folder, "step").items() if (ranks := numbered(p, "rank"))}
        if steps:
            found[folder.name] = steps
    return found


def _sample_keys(data: list[KeyDatum]) -> dict[tuple[int, int], tuple[str, ...]]:
    """By micro step and index, a name for every sample: its prompt's tokens, and which sample of the prompt it is.

    Two devices that ask the same prompts in another order are paired by them.
    """
    arrays = {(d.key, d.micro_step, d.index): d for d in data if d.key in ("prompts", "attention_mask")}
    named: dict[tuple[int, int], tuple[str, ...]] = {}
    for (key, *place), datum in arrays.items():
        prompts = read_npy(datum.path).load() if key == "prompts" else np.empty(0)
        if prompts.ndim != 2 or prompts.dtype.kind not in "iu":
            continue
        mask = arrays.get(("attention_mask", *place))
        kept = None if mask is None else read_npy(mask.path).load()
        fits = kept is not None and kept.ndim == 2 and len(kept) == len(prompts) and kept.shape[1] >= prompts.shape[1]
        met: dict[str, int] = {}
        names = []
        for i, row in enumerate(prompts.astype(np.int64)):
            real = row[kept[i, : prompts.shape[1]] != 0] if fits else row
            name = hashlib.sha256(np.ascontiguousarray(real).tobytes()).hexdigest()[:16]
            names.append(f"{name}-{met.setdefault(name, 0)}")
            met[name] += 1
        named[tuple(place)] = tuple(names)
    return named


def _stored(key: str, folder: Path) -> list[KeyDatum]:
    found = []
    for micro_step, place in (numbered(folder, "micro_step") or {0: folder}).items():
        for path in sorted(place.iterdir()):
            if path.suffix == ".npy" and not path.is_symlink():
                index = _index(key, path.stem)
                if index is None:
                    raise InputError("a file of another name", where=path, expected=f"{key}<i>.npy", found=path.name)
                found.append(KeyDatum(key=key, micro_step=micro_step, index=index, path=path))
    return sorted(found, key=lambda d: (d.micro_step, d.index))


def _index(key: str, stem: str) -> int | None:
    """The <i> of a file name, 0 where there is none; None where the name is not the key's."""
    for name in dict.fromkeys((key, key.removesuffix("s"))):
        if match := re.fullmatch(re.escape(name) + r"(?:\.?([0-9]{1,9}))?", stem):
            return int(match[1] or 0)
    return None


def _statistics(datum: KeyDatum, array: StoredArray) -> Statistics | None:
    own, joint = datum.path.with_suffix(".json"), datum.path.with_name(f"{datum.key}.json")
    path = own if own.is_file() else joint
    if not path.is_file():
        return None
    found = json_stream.load(path, what="statistics", largest=1 << 24)
    if isinstance(found, dict) and "data" in found:
        found = found["data"]
    if isinstance(found, list):
        if datum.index >= len(found):
            raise InputError(
                "the statistics are of fewer values",
                where=path,
                expected=f"entry {datum.index}",
                found=f"{len(found)} entries",
            )
        found = found[datum.index]
    if not isinstance(found, Mapping):
        raise InputError("the statistics are damaged", where=path, expected="max, min, mean, norm, shape")
    numbers = {}
    for name in ("max", "min", "mean", "norm"):
        value = found.get(name)
        if isinstance(value, bool):
            value = int(value)
        if value is not None and not isinstance(value, (int, float)) or isinstance(value, int) and abs(value) > 1 << 64:
            raise InputError(
                "the field is damaged", where=f"{path}: {name}", expected="a number", found=repr(value)[:80]
            )
        numbers[name] = float("nan") if value is None else float(value)
    if "shape" in found and found["shape"] != list(array.shape):
        raise InputError(
            "the statistics are of another tensor", where=f"{path}: shape", expected=list(array.shape),
            found=repr(found["shape"])[:80],
        )  # fmt: skip
    nan_count, inf_count = found.get("nan_count", 0), found.get("inf_count", 0)
    if not all(type(n) is int and n >= 0 for n in (nan_count, inf_count)):
        raise InputError("the field is damaged", where=f"{path}: nan_count", expected="a count")
    count = 1
    for size in array.shape:
        count *= size
    return Statistics(
        max=numbers["max"], min=numbers["min"], mean=numbers["mean"], l2=numbers["norm"], nan_count=nan_count,
        inf_count=inf_count, count=count,
    )  # fmt: skip
