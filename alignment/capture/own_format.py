"""This suite's capture on disk: written whole or not at all, read without torch.

::

    <dir>/capture.json                        format version, level, detail, sketch size and seed, provenance
    <dir>/step<S>/<stage>/rank<R>.safetensors    ``statistics`` float64 [rows, 7], ``sketches`` float32 [n, size]
    <dir>/step<S>/<stage>/rank<R>-<part>.safetensors   tensors, where they were kept
    <dir>/step<S>/<stage>/rank<R>.json        the rows, column by column; the samples they are of, with their real
                                              tokens; the settings of modules

The ``.json`` of a rank is written last: its presence says that this stage is finished on this rank, and whatever lies
beside it without one is left over from a run that was killed. A stage that runs again in the same step (another round
of generation) and what the driver adds to it are further pieces, ``rank<R>.<piece>.json``; a reader sees one list of
rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from alignment.capture.readers import arrays
from alignment.capture.record import DIRECTIONS, KINDS, ROLES, Shard, Statistics, TensorRow
from alignment.errors import InputError
from alignment.files import read_json, write_atomically, write_json
from alignment.weights.tensor_file import StoredTensor, plan_file, read_header, write_file

FORMAT = "alignment-capture"
VERSION, READ = 3, (1, 2, 3)
"""Before version 3 samples of one sketch had their elements in the same buckets. Those sketches are not read, since no
later one can be compared with them."""
ABOUT = "capture.json"
STATISTIC_COLUMNS = ("max", "min", "mean", "l2", "nan_count", "inf_count", "count")
PART_BYTES = 256 << 20
"""Tensors go to disk in parts of about this size while the step runs, so that memory stays bounded."""

_STAGE = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_PIECE = re.compile(r"[a-z0-9]{0,20}")
_STEP_DIR = re.compile(r"step([0-9]{1,12})")
_RANK_FILE = re.compile(r"rank([0-9]{1,9})(?:\.([a-z0-9]{1,20}))?\.json")
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
    "BOOL": "?", "U16": "<u2", "U32": "<u4", "U64": "<u8",
}  # fmt: skip


_NAMES = {stored: name for name, stored in _DTYPES.items()}


@dataclass
class RowColumns:
    """The rows of one stage and rank, column by column, and what belongs to them."""

    module: list[str] = field(default_factory=list)
    class_name: list[str] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    direction: list[str] = field(default_factory=list)
    call: list[int] = field(default_factory=list)
    role: list[str] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    parent: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    shape: list[tuple[int, ...]] = field(default_factory=list)
    shard: list[tuple[int, ...] | None] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    """Index into the key groups, −1 for none."""
    statistics: list[int] = field(default_factory=list)
    """Index into the statistics, −1 for none. Rows that hold one tensor share it."""
    sketch: list[int] = field(default_factory=list)
    """First of the tensor's sketches, −1 for none."""
    sketch_count: list[int] = field(default_factory=list)
    """0: one sketch of the whole tensor; n: one per sample; −1: one of the real tokens of all samples, each at the
    place that its key names. Except for 0, statistics are of the real tokens, too."""
    tensor: list[str | None] = field(default_factory=list)
    """``<part>/<name>`` of the tensor's bytes."""

    def __len__(self) -> int:
        return len(self.module)

    def append(self, **row: Any) -> None:
        """Adds a row; every column is named."""
        for name, column in vars(self).items():
            column.append(row.pop(name))
        if row:
            raise TypeError(f"no such column: {', '.join(row)}")


_COLUMNS = tuple(vars(RowColumns()))
_CODED = ("module", "class_name", "kind", "direction", "role", "path", "parent", "dtype", "shape", "shard")


def write_about(root: Path, about: Mapping[str, Any]) -> None:
    """Writes ``capture.json``: ``about`` beside format and version."""
    write_json(Path(root) / ABOUT, {**about, "format": FORMAT, "version": VERSION})


def write_rows(
    root: Path,
    step: int,
    stage: str,
    rank: int,
    columns: RowColumns,
    *,
    piece: str = "",
    statistics: np.ndarray,
    sketches: np.ndarray,
    key_groups: Sequence[Sequence[str]] = (),
    key_bounds: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]] | None = None,
    parts: Sequence[str] = (),
    settings: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Writes one finished stage of one rank.

    Args:
        columns: the rows.
        piece: small letters and digits; empty for the first one.
        statistics: float64 [n, 7] in the order of :data:`STATISTIC_COLUMNS`.
        sketches: float32 [m, size].
        key_groups: content hashes that rows point at.
        key_bounds: of every group, (samples, tokens) and first and last + 1 real token of every sample.
        parts: names of the tensor files written before, see :func:`write_part`.
        settings: class and plain settings by module.
        about: anything more to keep, as JSON.

    Returns:
        The path of the rows.
    """
    directory = stage_directory(root, step, stage)
    arrays = {
        "statistics": np.ascontiguousarray(statistics, "<f8").reshape(-1, len(STATISTIC_COLUMNS)),
        "sketches": np.ascontiguousarray(sketches, "<f4"),
    }
    name_of_files = _file_stem(rank, piece)
    data = directory / f"{name_of_files}.safetensors"
    _write_tensors(data, {name: (("F64", "F32")[name == "sketches"], a.shape, a) for name, a in arrays.items()})
    document: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "step": step, "stage": stage, "rank": rank, "rows": len(columns),
        "data": data.name, "parts": list(parts), "key_groups": [list(group) for group in key_groups],
        "about": dict(about or {}), "columns": {},
    }  # fmt: skip
    if key_bounds is not None:
        document["key_bounds"] = [[list(shape), [list(b) for b in bounds]] for shape, bounds in key_bounds]
    if settings:
        document["settings"] = _settings_table(settings)
    for name in _COLUMNS:
        values = getattr(columns, name)
        document["columns"][name] = _encoded(values) if name in _CODED else values
    path = directory / f"{name_of_files}.json"
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    return path


def write_part(
    root: Path,
    step: int,
    stage: str,
    rank: int,
    part: int,
    tensors: Mapping[str, tuple[str, Sequence[int], Any]],
    *,
    piece: str = "",
) -> str:
    """Writes tensors, (dtype as torch names it, shape, contiguous little-endian buffer) by name.

    Returns:
        The name of the file.
    """
    path = stage_directory(root, step, stage) / f"{_file_stem(rank, piece)}-{part:05d}.safetensors"
    _write_tensors(path, {n: (stored_dtype(d), s, b) for n, (d, s, b) in tensors.items()})
    return path.name


def stored_dtype(dtype: str) -> str:
    """The name in the safetensors format of a dtype as torch names it.

    Raises:
        InputError: the format has no such dtype.
    """
    if dtype not in _DTYPES:
        raise InputError("a dtype that cannot be stored", where="dtype", expected=", ".join(_DTYPES), found=dtype)
    return _DTYPES[dtype]


def stage_directory(root: Path, step: int, stage: str) -> Path:
    """Where the ranks of a stage write.

    Raises:
        InputError: the name of the stage is no name of a folder.
    """
    if not _STAGE.fullmatch(stage) or set(stage) == {"."}:
        raise InputError(
            "this cannot be the name of a stage", where="stage", expected="letters, digits, _ . -", found=stage
        )
    return Path(root) / f"step{step}" / stage


def _file_stem(rank: int, piece: str) -> str:
    if not _PIECE.fullmatch(piece):
        raise InputError("this cannot be the name of a piece", where="piece", expected="a–z, 0–9", found=piece)
    return f"rank{rank}.{piece}" if piece else f"rank{rank}"


def is_capture(root: Path) -> bool:
    """Whether ``root`` holds a capture of this format."""
    return (Path(root) / ABOUT).is_file()


class OwnCapture:
    """Reads this suite's own captures. See :class:`~alignment.capture.record.CaptureReader`.

    Raises:
        InputError: ``capture.json`` is missing, damaged or of another version.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        about = read_json(self.root / ABOUT)
        found = about.get("format") if isinstance(about, dict) else type(about).__name__
        if found != FORMAT:
            raise InputError("this is no capture", where=self.root / ABOUT, expected=f"format {FORMAT}", found=found)
        if about.get("version") not in READ or isinstance(about.get("version"), bool):
            raise InputError(
                "a capture of another version", where=self.root / ABOUT, expected=VERSION, found=about.get("version")
            )
        self._about = about

    def describe(self) -> dict[str, Any]:
        """``capture.json``."""
        return dict(self._about)

    def steps(self) -> list[int]:
        """Steps with at least one finished stage."""
        found = []
        for path in self.root.iterdir():
            match = _STEP_DIR.fullmatch(path.name)
            if match and path.is_dir() and self.stages(int(match[1])):
                found.append(int(match[1]))
        return sorted(found)

    def stages(self, step: int) -> list[str]:
        """Finished stages in the order of the run (``stage_order`` of ``capture.json``), then by name."""
        order = self._about.get("stage_order")
        order = [s for s in order if isinstance(s, str)] if isinstance(order, list) else []
        rank = {stage: i for i, stage in enumerate(order)}
        directory = self.root / f"step{step}"
        names = [p.name for p in directory.iterdir() if p.is_dir() and self._ranks(p)] if directory.is_dir() else []
        return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))

    def ranks(self, step: int, stage: str) -> list[int]:
        """Ranks whose rows are complete."""
        return self._ranks(stage_directory(self.root, step, stage))

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        """The rows of one rank. See :class:`~alignment.capture.record.CaptureReader`."""
        directory = stage_directory(self.root, step, stage)
        pieces = [piece for found, piece in self._pieces(directory) if found == rank]
        if not pieces:
            raise InputError("the rank has no rows", where=directory, expected=f"{_file_stem(rank, '')}.json")
        offset = 0
        for piece in pieces:
            rows = _Rows(directory / f"{_file_stem(rank, piece)}.json", step=step, stage=stage, rank=rank)
            # Pieces were written one after the other, each counting from 0.
            yield from rows.iterate(offset)
            offset += rows.count

    @classmethod
    def _ranks(cls, directory: Path) -> list[int]:
        return sorted({rank for rank, _ in cls._pieces(directory)})

    @staticmethod
    def _pieces(directory: Path) -> list[tuple[int, str]]:
        """(rank, piece) of every finished file: numbered pieces in order, then the named ones."""
        if not directory.is_dir():
            return []
        found = [(int(m[1]), m[2] or "") for p in directory.iterdir() if (m := _RANK_FILE.fullmatch(p.name))]
        return sorted(
            found, key=lambda f: (f[0], not f[1].isdigit() and f[1] != "", int(f[1]) if f[1].isdigit() else -1, f[1])
        )


class _Rows:
    """One ``rank<R>.json``, checked before the first row is handed out."""

    def __init__(self, path: Path, *, step: int, stage: str, rank: int) -> None:
        self.path = path
        try:
            document = read_json(path)
        except RecursionError:
            raise self._damaged("the document", "JSON nested a few levels deep", "deeper nesting") from None
        self._is(document, dict, "the document")
        for name, expected in (
            ("format", FORMAT),
            ("step", step),
            ("stage", stage),
            ("rank", rank),
        ):
            if document.get(name) != expected or isinstance(document.get(name), bool):
                raise self._damaged(name, expected, document.get(name))
        if type(document.get("version")) is not int or document["version"] not in READ:
            raise self._damaged("version", VERSION, document.get("version"))
        self.version = document["version"]
        self.count = self._natural(document.get("rows"), "rows")
        columns = self._is(document.get("columns"), dict, "columns")
        self.columns = {name: self._column(columns.get(name), name) for name in _COLUMNS}
        self.parts = [
            self._file_name(part, f"parts[{i}]")
            for i, part in enumerate(self._is(document.get("parts"), list, "parts"))
        ]
        self.data = self._file_name(document.get("data"), "data")
        groups = self._is(document.get("key_groups"), list, "key_groups")
        self.key_groups = [self._strings(group, f"key_groups[{i}]") for i, group in enumerate(groups)]
        self.key_bounds = self._key_bounds(document.get("key_bounds"))
        self.settings = self._settings(document.get("settings", {"kinds": [], "modules": []}))
        self._open: dict[str, dict[str, StoredTensor]] = {}
        self._arrays: dict[str, np.ndarray] = {}

    def iterate(self, offset: int = 0) -> Iterator[TensorRow]:
        statistics = self._array("statistics", "F64", (None, len(STATISTIC_COLUMNS)))
        listed = statistics.tolist()
        sketches = self._array("sketches", "F32", (None, None))
        columns = self.columns
        checks = {"kind": KINDS, "direction": DIRECTIONS, "role": ROLES}
        for name, allowed in checks.items():
            unknown = set(columns[name]) - set(allowed)
            if unknown:
                raise self._damaged(f"columns.{name}", " | ".join(allowed), sorted(unknown)[0])
        comparable = self.version > 2
        for i in range(self.count):
            where = columns["statistics"][i]
            if where >= len(listed):
                raise self._damaged(f"columns.statistics[{i}]", f"an index below {len(listed)}", where)
            group = columns["keys"][i]
            if group >= len(self.key_groups):
                raise self._damaged(f"columns.keys[{i}]", f"an index below {len(self.key_groups)}", group)
            first, count = columns["sketch"][i], columns["sketch_count"][i]
            if first >= 0 and first + max(1, count) > len(sketches):
                raise self._damaged(f"columns.sketch[{i}]", f"at most {len(sketches)} sketches", first + max(1, count))
            shard, shape, tensor = columns["shard"][i], columns["shape"][i], columns["tensor"][i]
            if count and group < 0 and self.version > 1:
                raise self._damaged(f"columns.keys[{i}]", "the samples of the sketch", group)
            tokens, bounds = self.key_bounds[group] if group >= 0 else (0, None)
            yield TensorRow(
                module=columns["module"][i],
                class_name=columns["class_name"][i],
                kind=columns["kind"][i],
                direction=columns["direction"][i],
                call=columns["call"][i],
                role=columns["role"][i],
                path=columns["path"][i],
                order=columns["order"][i] + offset,
                parent=columns["parent"][i],
                dtype=columns["dtype"][i],
                shape=shape,
                shard=shard,
                statistics=self._statistics(listed[where], where) if where >= 0 else None,
                keys=self.key_groups[group] if group >= 0 else None,
                by_key=count != 0 and bounds is not None,
                bounds=bounds,
                tokens=tokens,
                load_sketch=self._sketch_loader(first, count) if first >= 0 and (not count or comparable) else None,
                load_tensor=self._tensor_loader(tensor, columns["dtype"][i], shape, i) if tensor is not None else None,
            )

        for module, (class_name, found) in self.settings:
            for name, value in found.items():
                yield TensorRow(
                    module=module, class_name=class_name, kind="setting", direction="forward", call=0, role="input",
                    path=name, order=self.count + offset, parent=module, dtype=type(value).__name__, shape=(),
                    value=value,
                )  # fmt: skip

    # --- data --------------------------------------------------------------------------------------------------------

    def _statistics(self, row: list[float], index: int) -> Statistics:
        *reals, nan_count, inf_count, count = row
        try:
            whole = [int(v) for v in (nan_count, inf_count, count)]
        except (ValueError, OverflowError):
            raise self._damaged(f"{self.data}: statistics[{index}]", "counts", row[4:]) from None
        high, low, mean, l2 = reals
        return Statistics(max=high, min=low, mean=mean, l2=l2, nan_count=whole[0], inf_count=whole[1], count=whole[2])

    def _sketch_loader(self, first: int, count: int) -> Callable[[], np.ndarray]:
        def load() -> np.ndarray:
            sketches = self._array("sketches", "F32", (None, None))
            return np.array(sketches[first : first + count] if count > 0 else sketches[first])

        return load

    def _tensor_loader(self, spec: str, dtype: str, shape: tuple[int, ...], i: int) -> Callable[[], np.ndarray]:
        def load() -> np.ndarray:
            part, _, name = spec.partition("/")
            if not part.isascii() or not part.isdecimal() or len(part) > 9 or int(part) >= len(self.parts):
                raise self._damaged(f"columns.tensor[{i}]", f"<part>/<name> with part < {len(self.parts)}", spec)
            file = self.parts[int(part)]
            stored = self._header(file).get(name)
            if stored is None:
                raise self._damaged(f"columns.tensor[{i}]", f"a tensor of {file}", name)
            if stored.shape != shape or stored.dtype != _DTYPES.get(dtype):
                raise self._damaged(f"{file}: {name}", f"{dtype} {list(shape)}", f"{stored.dtype} {list(stored.shape)}")
            return decoded(stored)

        return load

    def _array(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.ndarray:
        if name not in self._arrays:
            stored = self._header(self.data).get(name)
            if stored is None:
                raise self._damaged(self.data, f"a tensor {name}", "none")
            fits = len(stored.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, stored.shape))
            if stored.dtype != dtype or not fits:
                raise self._damaged(
                    f"{self.data}: {name}", f"{dtype} of shape {shape}", f"{stored.dtype} {stored.shape}"
                )
            self._arrays[name] = mapped(stored)
        return self._arrays[name]

    def _header(self, name: str) -> dict[str, StoredTensor]:
        if name not in self._open:
            path = self.path.parent / name
            try:
                tensors = read_header(path).tensors
            except RecursionError:
                raise self._damaged(f"{name}: header", "JSON nested a few levels deep", "deeper nesting") from None
            for tensor in tensors:
                if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in tensor.shape):
                    raise self._damaged(f"{name}: {tensor.name}", "sizes ≥ 0", tensor.shape)
            self._open[name] = {tensor.name: tensor for tensor in tensors}
        return self._open[name]

    # --- checks ------------------------------------------------------------------------------------------------------

    def _damaged(self, place: str, expected: object, found: object) -> InputError:
        found = found if isinstance(found, str) else repr(found)
        return InputError(f"the field {place} is damaged", where=self.path, expected=expected, found=found[:200])

    def _is(self, value: Any, kind: type, place: str) -> Any:
        if not isinstance(value, kind):
            raise self._damaged(place, kind.__name__, value)
        return value

    def _natural(self, value: Any, place: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
            raise self._damaged(place, "a count", value)
        return value

    def _strings(self, value: Any, place: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._damaged(place, "a list of strings", value)
        return tuple(value)

    def _file_name(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"rank[0-9]+(\.[a-z0-9]+)?(-[0-9]+)?\.safetensors", value):
            raise self._damaged(place, "the name of a file beside this one", value)
        return value

    def _column(self, column: Any, name: str) -> list:
        place = f"columns.{name}"
        if name in _CODED:
            self._is(column, dict, place)
            raw = self._is(column.get("values"), list, f"{place}.values")
            if name == "shape":
                values = [self._shape(v, place) for v in raw]
            elif name == "shard":
                values = [None if v is None else self._shard(v, place) for v in raw]
            else:
                values = list(self._strings(raw, f"{place}.values"))
            codes = self._is(column.get("codes"), list, f"{place}.codes")
            if not all(type(c) is int and 0 <= c < len(values) for c in codes):
                raise self._damaged(f"{place}.codes", f"indices below {len(values)}", codes)
            decoded_column = [values[c] for c in codes]
        else:
            decoded_column = self._is(column, list, place)
            if name == "tensor":
                if not all(v is None or isinstance(v, str) for v in decoded_column):
                    raise self._damaged(place, "names", decoded_column)
            elif not all(type(v) is int and -1 <= v < 1 << 53 for v in decoded_column):
                raise self._damaged(place, "integers ≥ −1", decoded_column)
        if len(decoded_column) != self.count:
            raise self._damaged(place, f"{self.count} rows", f"{len(decoded_column)} rows")
        return decoded_column

    def _key_bounds(self, value: Any) -> list[tuple[int, tuple[tuple[int, int], ...] | None]]:
        if value is None:
            return [(0, None)] * len(self.key_groups)
        if len(self._is(value, list, "key_bounds")) != len(self.key_groups):
            raise self._damaged("key_bounds", f"{len(self.key_groups)} groups", f"{len(value)} groups")
        found = []
        for i, entry in enumerate(value):
            place = f"key_bounds[{i}]"
            shape = self._shape(entry[0], place) if isinstance(entry, list) and len(entry) == 2 else ()
            bounds = tuple(self._shape(b, place) for b in self._is(entry[1], list, place)) if len(shape) == 2 else ()
            if len(bounds) != len(self.key_groups[i]) or not all(
                len(b) == 2 and b[0] <= b[1] <= shape[1] for b in bounds
            ):
                raise self._damaged(place, "[[samples, tokens], [[first, last + 1], …]]", entry)
            found.append((shape[1], bounds))
        return found

    def _settings(self, table: Any) -> list[tuple[str, tuple[str, dict[str, Any]]]]:
        self._is(table, dict, "settings")
        kinds = []
        for i, kind in enumerate(self._is(table.get("kinds"), list, "settings.kinds")):
            place = f"settings.kinds[{i}]"
            if not isinstance(kind, list) or len(kind) != 2 or not isinstance(kind[0], str):
                raise self._damaged(place, "[class, settings]", kind)
            for name, value in self._is(kind[1], dict, place).items():
                if value is not None and not isinstance(value, (bool, int, float, str)):
                    raise self._damaged(f"{place}.{name}", "a plain value", value)
            kinds.append((kind[0], kind[1]))
        modules = []
        for i, entry in enumerate(self._is(table.get("modules"), list, "settings.modules")):
            if not isinstance(entry, list) or [type(v) for v in entry] != [str, int]:
                raise self._damaged(f"settings.modules[{i}]", "[module, index]", entry)
            if not 0 <= entry[1] < len(kinds):
                raise self._damaged(f"settings.modules[{i}]", f"an index below {len(kinds)}", entry[1])
            modules.append((entry[0], kinds[entry[1]]))
        return modules

    def _shape(self, value: Any, place: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 1 << 53 for n in value):
            raise self._damaged(place, "a shape", value)
        return tuple(value)

    def _shard(self, value: Any, place: str) -> Shard:
        numbers = self._shape(value, place)
        if len(numbers) < 4 or len(numbers) % 2:
            raise self._damaged(place, "[dim, start, length, whole] and then a start and a length of every run", value)
        dim, start, length, whole, *rest = numbers
        return Shard(dim=dim, start=start, length=length, whole=whole, runs=tuple(zip(rest[::2], rest[1::2])))


def mapped(stored: StoredTensor) -> np.ndarray:
    """The bytes of a tensor as a read-only array backed by the file; a dtype that NumPy lacks comes as its bits."""
    dtype = np.dtype(_NUMPY.get(stored.dtype) or ("<u2" if stored.dtype == "BF16" else "u1"))
    if not math.prod(stored.shape):
        return np.empty(stored.shape, dtype)
    try:
        return np.memmap(stored.path, dtype=dtype, mode="r", offset=stored.begin, shape=stored.shape)
    except (OSError, ValueError) as error:
        raise InputError("the file cannot be read", where=f"{stored.path}: {stored.name}", found=str(error)) from None


def decoded(stored: StoredTensor) -> np.ndarray:
    """The tensor in a dtype of NumPy that holds its values exactly: bfloat16 and the 8-bit floats as float32.

    Raises:
        InputError: the dtype has no reader.
    """
    array = mapped(stored)
    if stored.dtype in _NUMPY:
        return array
    if stored.dtype not in _NAMES:
        raise InputError("a dtype without a reader", where=f"{stored.path}: {stored.name}", found=stored.dtype)
    return arrays.decoded(array, _NAMES[stored.dtype])


def _settings_table(settings: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, list]:
    """Modules of one kind have equal settings: each kind once, and which one every module is of."""
    kinds: dict[str, int] = {}
    values, modules = [], []
    for module, (class_name, found) in settings.items():
        text = json.dumps([class_name, found], sort_keys=True, allow_nan=False)
        if text not in kinds:
            kinds[text] = len(values)
            values.append([class_name, dict(found)])
        modules.append([module, kinds[text]])
    return {"kinds": values, "modules": modules}


def _encoded(values: Sequence[Any]) -> dict[str, list]:
    """A column of few different values: the values, and the index of each row's."""
    codes: dict[Any, int] = {}
    indices = [codes.setdefault(value, len(codes)) for value in values]
    return {"values": list(codes), "codes": indices}


def _write_tensors(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], Any]]) -> None:
    plan = plan_file(path, [(n, d, s) for n, (d, s, _) in tensors.items()], metadata={"format": FORMAT})

    def fill(tensor: StoredTensor, out: BinaryIO) -> None:
        data = memoryview(np.ascontiguousarray(tensors[tensor.name][2]).reshape(-1).view(np.uint8))
        done = 0
        while done < len(data):
            done += out.write(data[done:])

    write_atomically(path, lambda beside: write_file(beside, plan, fill))
