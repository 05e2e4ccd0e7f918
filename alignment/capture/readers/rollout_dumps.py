"""What verl keeps of rollouts: the JSON lines of ``trainer.rollout_data_dir``, and the batches of skip-rollout.

* ``<dir>/<step>.jsonl``: one line per sample with ``input``, ``output``, ``gts``, ``score``, ``step`` and what the
  reward function added. A numeric column is a tensor. A text column is one of content hashes (52 bits, exact in
  float64), with a second row ``<name>.length`` of its lengths in characters.
* ``…/<step>/gen_batch.dp``, ``…/genstep_<step>/{new_batch,gen_batch}.dp``, ``…/<step>/<i>/tq_batch.pt``: pickles of
  verl's ``DataProto``, read as data without verl and without running anything
  (:mod:`alignment.capture.readers.pickled`).
* ``step_<step>_<attempt>.safetensors``: the rollouts that this suite records (``rollout.skip``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alignment.capture.readers.arrays import ITEM_BYTES, StoredArray
from alignment.capture.readers.foreign import files_below, reading, require_regular
from alignment.capture.readers.pickled import Name, Record, run, walk
from alignment.capture.readers.tensor_folder import TensorFolder
from alignment.capture.readers.torch_file import read_torch
from alignment.capture.record import Statistics, TensorRow
from alignment.errors import InputError

STAGE = "rollout"
LARGEST_LINE = 1 << 27
"""Characters of one line: a prompt and its response."""
LARGEST_BATCH = 1 << 36

_LINES = re.compile(r"(\d{1,9})\.jsonl")
_STEP = re.compile(r"(?:genstep_)?(\d{1,9})")
_RECORDED = re.compile(r"step_(\d{6})_(\d{2})\.safetensors")
_BATCHES = ("new_batch.dp", "gen_batch.dp", "tq_batch.pt")
_TEXT_BITS = 52
_OF_TENSORDICT = re.compile(r"(^|\.)(?:\d+\._tensordict\.|0\.(?=(?:values|offsets)$))")
"""What stands in front of a field's own name in a TensorDict and in a nested tensor."""
_TRANSFER_RECORDS = ("tensordict.", "transfer_queue.", "torch.nested._internal.", "torch._dynamo.decorators.")
"""What a batch of verl's transfer queue is made of beside tensors; a nested tensor comes as its parts."""


class _DriverFiles:
    """What both kinds of rollouts are: files by step, of one stage and of the driver alone."""

    root: Path
    _files: dict[int, Any]

    def steps(self) -> list[int]:
        """See :class:`~alignment.capture.record.CaptureReader`."""
        return list(self._files)

    def stages(self, step: int) -> list[str]:
        """The one stage."""
        return [STAGE] if step in self._files else []

    def ranks(self, step: int, stage: str) -> list[int]:
        """The driver."""
        return [0] if step in self._files and stage == STAGE else []

    def _require(self, step: int, stage: str, rank: int) -> None:
        if rank not in self.ranks(step, stage):
            raise InputError(
                "there is no such step, stage and rank", where=self.root, found=f"step {step}, {stage}, rank {rank}"
            )


class RolloutLines(_DriverFiles):
    """``rollout_data_dir``, or one of its files. See :class:`~alignment.capture.record.CaptureReader`.

    Raises:
        InputError: there are no such files.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._files = _line_files(self.root)
        if not self._files:
            raise InputError("there are no rollouts", where=root, expected="<step>.jsonl")

    def describe(self) -> dict[str, Any]:
        """Format and steps."""
        return {"format": "verl rollout_data_dir", "steps": len(self._files)}

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        """A row per column; ``keys`` are hashes of the prompt, so that samples in another order are paired."""
        self._require(step, stage, rank)
        path = self._files[step]
        columns, keys = _columns(path)
        order = 0
        for name, values in columns.items():
            for suffix, dtype, array in _arrays(f"{path}: {name}", values):
                yield _value_row(
                    name + suffix, dtype, array.shape, order, lambda array=array: array, keys=keys, array=array
                )
                order += 1


class SkippedRollouts(_DriverFiles):
    """Batches of skip-rollout below a folder. See :class:`~alignment.capture.record.CaptureReader`.

    Raises:
        InputError: there are none, or those of two runs.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._files: dict[int, list[Path]] = {}
        runs = set()
        for path in files_below(self.root, deepest=5) if self.root.is_dir() else [self.root]:
            found = _step_of(path, self.root)
            if found is not None:
                step, run_folder = found
                runs.add(run_folder)
                self._files.setdefault(step, []).append(path)
        if not self._files:
            raise InputError("there are no skip-rollout batches", where=root, expected=" or ".join(_BATCHES))
        if len(runs) > 1:
            raise InputError(
                "the folder holds the batches of several runs", where=root, found=", ".join(sorted(map(str, runs))[:4]),
                next_step="name the folder of one of them",
            )  # fmt: skip
        self._files = dict(sorted(self._files.items()))

    def describe(self) -> dict[str, Any]:
        """Format and steps."""
        return {"format": "skip-rollout", "steps": len(self._files)}

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        """A row per tensor and per array of numbers; ``call`` is the number of the batch within the step."""
        self._require(step, stage, rank)
        order = 0
        for call, path in enumerate(
            p for p in self._files[step] if p.name != "new_batch.dp" or len(self._files[step]) == 1
        ):
            for name, dtype, shape, load in _batch_tensors(path):
                yield _value_row(name, dtype, shape, order, load, call=call)
                order += 1


def is_lines(root: Path) -> bool:
    """Whether ``root`` is a ``rollout_data_dir``, or one of its files."""
    return bool(_line_files(Path(root)))


def is_skipped(root: Path) -> bool:
    """Whether batches of skip-rollout lie below ``root``."""
    root = Path(root)
    paths = files_below(root, deepest=5) if root.is_dir() else [root]
    return any(_step_of(path, root) is not None for path in paths)


def read_batch(path: Path) -> dict[str, StoredArray | np.ndarray]:
    """Tensors and arrays by name of a ``DataProto`` that verl saved with ``save_to_disk``.

    Raises:
        InputError: the file is missing, damaged or holds something else.
    """
    size = require_regular(path, "batch")
    if size > LARGEST_BATCH:
        raise InputError("the batch is too large", where=path, found=f"{size} bytes")
    with reading(path, "batch"):
        with open(path, "rb") as file:
            value = run(file, where=str(path), records=("verl.protocol.DataProto", "tensordict."))
        if not isinstance(value, Record) or str(value.kind) != "verl.protocol.DataProto":
            raise InputError("this is no DataProto", where=path, found=type(value).__name__)
        if not isinstance(value.state, tuple) or len(value.state) != 3:
            raise InputError("the DataProto has an unknown state", where=path)
        batch, others, _ = value.state
        if isinstance(batch, bytes):
            batch = _tensordict(read_torch(batch, where=f"{path}: batch", records=("tensordict.",)), str(path))
        elif batch is not None and not isinstance(batch, (tuple, dict, Record)):
            raise InputError("the DataProto has an unknown batch", where=path, found=type(batch).__name__)
        found = {name: leaf for name, leaf in walk(batch) if isinstance(leaf, (StoredArray, np.ndarray))}
        for name, array in (others or {}).items():
            if isinstance(array, np.ndarray):
                found.setdefault(str(name), array)
        return found


def _tensordict(value: Any, where: str) -> Any:
    """The tensors of a consolidated TensorDict: dtype, shape and bytes of every leaf of one storage."""
    if not isinstance(value, Record) or not value.kind.name.startswith("_rebuild_tensordict_files_consolidated"):
        return value
    metadata, storage = value.arguments[:2]
    if not isinstance(storage, StoredArray) or storage.dtype != "uint8" or not isinstance(metadata, dict):
        raise InputError("the batch has an unknown layout", where=where)

    def leaves(level: dict, depth: int) -> dict[str, Any]:
        if depth > 8 or not isinstance(level, dict):
            raise InputError("the batch is nested too deeply", where=where)
        found: dict[str, Any] = {}
        for name, place in (level.get("leaves") or {}).items():
            dtype, shape, begin, stop, pad = place
            dtype = str(dtype).removeprefix("torch.")
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, stop)) or dtype not in ITEM_BYTES:
                raise InputError(
                    "a tensor of the batch has an unknown place", where=f"{where}: {name}", found=str(place)[:80]
                )
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            if begin + nbytes > storage.nbytes or nbytes > stop - begin:
                raise InputError(
                    "a tensor of the batch reaches beyond its bytes", where=f"{where}: {name}", found=str(place)[:80]
                )
            found[str(name)] = StoredArray(
                source=storage.source, where=f"{where}: {name}", begin=storage.begin + begin, nbytes=nbytes,
                dtype=dtype, shape=tuple(shape), big_endian=storage.big_endian,
            )  # fmt: skip
        for name, below in level.items():
            if isinstance(below, dict) and "leaves" in below and name not in ("leaves", "non_tensors", "cls_metadata"):
                found[str(name)] = leaves(below, depth + 1)
        return found

    return leaves(metadata, 0)


def _batch_tensors(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], np.ndarray]]]:
    if path.suffix == ".safetensors":
        for row in TensorFolder(path).rows(0, "tensors", 0):
            yield row.module, row.dtype, row.shape, row.load_tensor
        return
    if path.suffix == ".pt":
        with reading(path, "batch"):
            tree = read_torch(path, records=_TRANSFER_RECORDS)
            found: dict[str, Any] = {}
            for name, leaf in walk(_tensordict(tree.get("tensordict"), str(path)) if isinstance(tree, dict) else tree):
                if "_metadata_cache" not in name:  # sizes that a nested tensor remembers
                    found[_OF_TENSORDICT.sub(r"\1", name)] = leaf
    else:
        found = read_batch(path)
    for name, leaf in found.items():
        if isinstance(leaf, StoredArray):
            yield name, leaf.dtype, leaf.shape, leaf.load
        elif isinstance(leaf, np.ndarray):
            values = leaf.tolist() if leaf.dtype == object else None
            pieces = [("", _dtype_name(leaf), leaf)] if values is None else _arrays(f"{path}: {name}", values)
            for suffix, dtype, array in pieces:
                if array.dtype.kind in "biuf":
                    yield name + suffix, dtype, array.shape, lambda array=array: array


def _dtype_name(array: np.ndarray) -> str:
    return "bool" if array.dtype == bool else array.dtype.name


def _columns(path: Path) -> tuple[dict[str, list[Any]], tuple[str, ...]]:
    """The columns of a file, and a key for every sample: the hash of its prompt and which sample of it this is."""
    require_regular(path, "rollouts")
    columns: dict[str, list[Any]] = {}
    keys: list[str] = []
    seen: dict[str, int] = {}
    count = 0
    with reading(path, "rollouts"), open(path, encoding="utf-8") as file:
        for number, line in enumerate(iter(lambda: file.readline(LARGEST_LINE), ""), start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                sample = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"a line is torn or not JSON ({error})", where=where) from None
            if not isinstance(sample, dict):
                raise InputError("a line is no sample", where=where, expected="an object", found=type(sample).__name__)
            if count and sample.keys() != columns.keys():
                raise InputError(
                    "the samples have different fields", where=where, expected=", ".join(sorted(columns)),
                    found=", ".join(sorted(sample)),
                )  # fmt: skip
            for name, value in sample.items():
                columns.setdefault(name, []).append(value)
            prompt = hashlib.sha256(str(sample.get("input", "")).encode("utf-8", "surrogatepass")).hexdigest()[:16]
            keys.append(f"{prompt}-{seen.setdefault(prompt, 0)}")
            seen[prompt] += 1
            count += 1
    return columns, tuple(keys)


def _arrays(where: str, values: list[Any]) -> Iterator[tuple[str, str, np.ndarray]]:
    """(suffix of the name, dtype, values) of a column."""
    if values and all(isinstance(v, bool) for v in values):
        yield "", "bool", np.array(values)
    elif values and all(isinstance(v, (int, float)) and (isinstance(v, float) or abs(v) < 1 << 63) for v in values):
        array = np.array(values, dtype=np.float64 if any(isinstance(v, float) for v in values) else np.int64)
        yield "", array.dtype.name, array
    elif values:
        try:
            texts = [v if isinstance(v, str) else json.dumps(_plain(v), sort_keys=True, default=str) for v in values]
        except (ValueError, RecursionError, TypeError) as error:
            raise InputError(f"a value that cannot be compared ({type(error).__name__})", where=where) from None
        yield "", "text", np.array([_text_hash(t) for t in texts], dtype=np.int64)
        yield ".length", "int64", np.array([len(t) for t in texts], dtype=np.int64)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return [str(value.kind), *map(_plain, value.arguments)]
    return value.tolist() if isinstance(value, np.ndarray) else str(value) if isinstance(value, Name) else value


def _text_hash(text: str) -> int:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _TEXT_BITS)


def _value_row(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    order: int,
    load: Callable[[], np.ndarray],
    *,
    call: int = 0,
    keys: tuple[str, ...] | None = None,
    array: np.ndarray | None = None,
) -> TensorRow:
    statistics = None
    if array is not None and dtype != "text":
        wide = array.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        statistics = Statistics(
            max=float(finite.max()) if finite.size else 0.0, min=float(finite.min()) if finite.size else 0.0,
            mean=float(finite.mean()) if finite.size else 0.0, l2=float(np.linalg.norm(finite)),
            nan_count=int(np.isnan(wide).sum()), inf_count=int(np.isinf(wide).sum()), count=wide.size,
        )  # fmt: skip
    return TensorRow(
        module=name, class_name="", kind="value", direction="forward", call=call, role="output", path=name, order=order,
        parent="", dtype=dtype, shape=tuple(shape), statistics=statistics, keys=keys, load_tensor=load,
    )  # fmt: skip


def _line_files(root: Path) -> dict[int, Path]:
    if root.is_file():
        candidates = [root]
    else:
        candidates = sorted(p for p in root.iterdir() if not p.is_symlink() and p.is_file()) if root.is_dir() else []
    found = {int(m[1]): p for p in candidates if (m := _LINES.fullmatch(p.name))}
    return dict(sorted(found.items()))


def _step_of(path: Path, root: Path) -> tuple[int, Path] | None:
    """Step and folder of the run of a batch, or None where the file is none."""
    if match := _RECORDED.fullmatch(path.name):
        return int(match[1]), path.parent
    if path.name not in _BATCHES:
        return None
    folder = path.parent
    if path.name == "tq_batch.pt" and folder.name.isdecimal() and folder.parent.name.isdecimal() and folder != root:
        folder = folder.parent
    match = _STEP.fullmatch(folder.name)
    return (int(match[1]), folder.parent) if match else (0, folder)
