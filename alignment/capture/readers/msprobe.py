"""msprobe dumps of PyTorch: ``[step<N>/]{rank<R>,proc<PID>}/`` with ``dump.json``, ``construct.json``, ``stack.json``
and ``dump_tensor_data``.

Levels L0, L1 and mix, tasks ``statistics`` and ``tensor`` (the files it writes are those of ``mindstudio-probe`` 26.2).
``dump.json`` is streamed, one call at a time; tensors are read when a row is asked for them. torch is not imported.

How a dump maps onto rows:

* ``Module.<path>.<Class>.forward.<n>``: inputs ``args.<i>`` and ``kwargs.<name>``, outputs ``output`` where there is
  one, else ``output.<i>``; what a module returns in a dictionary is ``output.<key>``.
* ``Module.….backward.<n>``: ``input`` are the gradients of the outputs, ``output`` those of the inputs.
* ``parameters`` and ``parameters_grad`` are rows of their own, named by the parameter.
* ``Functional.linear.<n>.forward`` and the like are operators. Python numbers among the arguments are rows of shape ()
  whose dtype is ``int``, ``float`` or ``bool``: a wrong scale or k shows in them.
* msprobe writes no mean and norm of integers: they are NaN. It keeps no counts of NaN and Inf: one is counted where a
  maximum or minimum is not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from alignment.capture.readers import json_stream
from alignment.capture.readers.arrays import StoredArray
from alignment.capture.readers.foreign import inside, named_inside, numbered
from alignment.capture.readers.torch_file import read_torch
from alignment.capture.record import Statistics, TensorRow
from alignment.errors import InputError

DUMP, CONSTRUCT, STACK, TENSORS = "dump.json", "construct.json", "stack.json", "dump_tensor_data"
STAGE = "model"
"""msprobe has no stages: its calls are those of one model."""

_MODULE = re.compile(r"Module\.(?P<path>.+)\.(?P<cls>[^.]+)\.(?P<what>forward|backward)\.(?P<call>[0-9]{1,9})")
_GRADIENTS = re.compile(r"Module\.(?P<path>.+)\.(?P<cls>[^.]+)\.parameters_grad(\.(?P<call>[0-9]{1,9}))?")
_OPERATOR = re.compile(r"(?P<name>[A-Za-z]+\..+)\.(?P<call>[0-9]{1,9})\.(?P<what>forward|backward)")
_SCALARS = {"int": int, "float": (int, float), "bool": bool}
_DEEPEST = 16
_INTEGER = frozenset({int})


class MsprobeDump:
    """A dump folder, the folder of one step, or that of one rank. See :class:`~alignment.capture.record.CaptureReader`.

    Args:
        root: the folder.
        stage: what its calls are a stage of; msprobe itself does not say.

    Raises:
        InputError: there is no dump, or both ranks and processes.
    """

    def __init__(self, root: Path, *, stage: str = STAGE) -> None:
        self.root, self.stage = Path(root), stage
        if (self.root / DUMP).is_file():
            self._steps = {0: {0: self.root}}
        else:
            steps = numbered(self.root, "step") or {0: self.root}
            self._steps = {step: ranks for step, folder in steps.items() if (ranks := _ranks(folder))}
        if not self._steps:
            raise InputError(
                "there is no msprobe dump", where=self.root, expected=f"rank<R>/{DUMP} or step<N>/rank<R>/{DUMP}"
            )

    def steps(self) -> list[int]:
        """See :class:`~alignment.capture.record.CaptureReader`."""
        return list(self._steps)

    def stages(self, step: int) -> list[str]:
        """The one stage."""
        return [self.stage] if step in self._steps else []

    def ranks(self, step: int, stage: str) -> list[int]:
        """Ranks; processes of a run without ranks count from 0 in the order of their ids."""
        return list(self._steps.get(step, {})) if stage == self.stage else []

    def describe(self) -> dict[str, Any]:
        """Format, task, level and framework, from the first dump."""
        folder = next(iter(next(iter(self._steps.values())).values()))
        about: dict[str, Any] = {"format": "msprobe", "steps": len(self._steps)}
        return {**about, **_header(folder / DUMP)}

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        """See :class:`~alignment.capture.record.CaptureReader`."""
        folder = self._folder(step, stage, rank)
        return _Dump(folder).rows()

    def call_stack(self, step: int, stage: str, rank: int, call: str) -> list[str]:
        """The Python stack of a call by msprobe's name, innermost frame first; empty where it was not kept."""
        path = self._folder(step, stage, rank) / STACK
        if not path.is_file():
            return []
        for _, group, value in json_stream.members(path, what="call stacks"):
            names, frames = value if isinstance(value, list) and len(value) == 2 else (None, None)
            if not isinstance(names, list) or not isinstance(frames, list):
                raise InputError("the field is damaged", where=f"{path}: {group}", expected="[calls, frames]")
            if call in names:
                return [str(frame) for frame in frames]
        return []

    def _folder(self, step: int, stage: str, rank: int) -> Path:
        folder = self._steps.get(step, {}).get(rank) if stage == self.stage else None
        if folder is None:
            raise InputError(
                "the dump has no such step, stage and rank", where=self.root, found=f"step {step}, {stage}, rank {rank}"
            )
        return folder


def is_dump(root: Path) -> bool:
    """Whether ``root`` is a dump folder, or that of a step or a rank."""
    root = Path(root)
    if (root / DUMP).is_file():
        return True
    return any(_ranks(folder) for folder in (root, *numbered(root, "step").values()))


def _ranks(folder: Path) -> dict[int, Path]:
    ranks = {r: p for r, p in numbered(folder, "rank").items() if (p / DUMP).is_file()}
    processes = [p for p in numbered(folder, "proc").values() if (p / DUMP).is_file()]
    if ranks and processes:
        raise InputError(
            "a step has dumps both by rank and by process", where=folder, next_step="dump into an empty folder"
        )
    return ranks or dict(enumerate(processes))


def _header(path: Path) -> dict[str, Any]:
    header: dict[str, Any] = {}
    for inner, name, value in json_stream.members(path, descend="data", what="dump"):
        if inner is not None:
            break
        if name in ("task", "level", "framework") and isinstance(value, (str, type(None))):
            header[name] = value
    return header


class _Dump:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / DUMP
        self._parents: Mapping[str, Any] | None = None
        self._order = -1
        self._shared: dict[Any, Any] = {}
        self._shapes: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}

    def rows(self) -> Iterator[TensorRow]:
        found = False
        for inner, name, value in json_stream.members(self.path, descend="data", what="dump"):
            if inner is None:
                found = found or name == "data"
                if name == "framework" and value not in ("pytorch", None):
                    raise InputError(
                        "a dump of another framework", where=f"{self.path}: framework", expected="pytorch", found=value
                    )
                continue
            found = True
            rows: list[TensorRow] = []
            self._call(rows, name, value)
            yield from rows
        # An empty "data" is a dump of nothing and fine; one without it was not written by msprobe.
        if not found and "data" not in _top_level(self.path):
            raise InputError("the field is missing", where=f"{self.path}: data", expected="the calls of the dump")

    def _call(self, rows: list[TensorRow], name: str, entry: Any) -> None:
        """Adds the rows of one call."""
        if not isinstance(entry, dict):
            raise self._damaged(name, "an object", entry)
        if match := _GRADIENTS.fullmatch(name):
            self._gradients(rows, name, match, entry)
        elif match := _MODULE.fullmatch(name):
            common = {"kind": "module", "module": match["path"], "class_name": match["cls"]}
            common["parent"] = self._module_parent(name, match["path"])
            self._directed(rows, name, match, entry, common)
        elif match := _OPERATOR.fullmatch(name):
            common = {"kind": "operator", "module": match["name"], "class_name": match["name"].partition(".")[0]}
            common["parent"] = self._operator_parent(name)
            self._directed(rows, name, match, entry, common)
        else:
            raise self._damaged(name, "the name of a module's or an operator's call", name)

    def _directed(
        self, rows: list[TensorRow], name: str, match: re.Match, entry: dict, common: dict[str, Any]
    ) -> None:
        call, direction = int(match["call"]), match["what"]
        common = {**common, "direction": direction, "call": call}
        if direction == "forward":
            row = {**common, "role": "input"}
            for i, value in enumerate(self._list(name, entry, "input_args")):
                self._values(rows, f"{name}.input_args[{i}]", value, f"args.{i}", row)
            kwargs = entry.get("input_kwargs") or {}
            if not isinstance(kwargs, dict):
                raise self._damaged(f"{name}.input_kwargs", "an object", kwargs)
            for key, value in kwargs.items():
                self._values(rows, f"{name}.input_kwargs.{key}", value, f"kwargs.{key}", row)
            self._outputs(rows, name, entry, "output", {**common, "role": "output"})
            parameters = entry.get("parameters") or {}
            if not isinstance(parameters, dict):
                raise self._damaged(f"{name}.parameters", "an object", parameters)
            for key, value in parameters.items():
                row = {**common, "kind": "parameter", "module": f"{common['module']}.{key}", "class_name": ""}
                row |= {"role": "input", "parent": common["module"]}
                self._values(rows, f"{name}.parameters.{key}", value, key, row)
        else:
            self._outputs(rows, name, entry, "input", {**common, "role": "input"})
            row = {**common, "role": "output"}
            for i, value in enumerate(self._list(name, entry, "output")):
                self._values(rows, f"{name}.output[{i}]", value, f"args.{i}", row)

    def _outputs(self, rows: list[TensorRow], name: str, entry: dict, field: str, row: dict[str, Any]) -> None:
        values = self._list(name, entry, field)
        for i, value in enumerate(values):
            path = "output" if len(values) == 1 else f"output.{i}"
            self._values(rows, f"{name}.{field}[{i}]", value, path, row)

    def _gradients(self, rows: list[TensorRow], name: str, match: re.Match, entry: dict) -> None:
        for parameter, value in entry.items():
            row = {
                "kind": "parameter_gradient", "module": f"{match['path']}.{parameter}", "class_name": "",
                "direction": "backward", "call": int(match["call"] or 0), "role": "output",
                "parent": match["path"],
            }  # fmt: skip
            values = value if isinstance(value, list) else [value]
            for item in values:
                self._values(rows, f"{name}.{parameter}", item, parameter, row)

    def _values(
        self, rows: list[TensorRow], place: str, value: Any, path: str, row: dict[str, Any], depth: int = 0
    ) -> None:
        if value is None:
            return
        if depth > _DEEPEST:
            raise self._damaged(place, f"at most {_DEEPEST} levels", "deeper nesting")
        if isinstance(value, list):
            for i, item in enumerate(value):
                self._values(rows, f"{place}[{i}]", item, _joined(path, i), row, depth + 1)
        elif isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and "shape" in value and "dtype" in value:
                rows.append(self._tensor(place, value, path, row))
            elif isinstance(kind, str) and "value" in value:
                scalar = self._scalar(kind, value["value"], path, row)
                if scalar is not None:
                    rows.append(scalar)
            elif isinstance(kind, str):
                return  # an object of which msprobe notes only the type
            else:
                for key, item in value.items():
                    self._values(rows, f"{place}.{key}", item, _joined(path, key), row, depth + 1)
        # Anything else is a plain value that msprobe wrote as such (a string, a number): there is no tensor in it.

    def _tensor(self, place: str, value: dict, path: str, row: dict[str, Any]) -> TensorRow:
        dtype, shape = value["dtype"], value["shape"]
        if not isinstance(dtype, str):
            raise self._damaged(f"{place}.dtype", "a dtype", dtype)
        # True and 1.0 equal the 1 of a shape that is known.
        if not isinstance(shape, list) or not _INTEGER.issuperset(map(type, shape)):
            raise self._damaged(f"{place}.shape", "a shape", shape)
        # A dump of many rows has few shapes, dtypes and paths.
        known = self._shapes.get(tuple(shape))
        if known is None:
            if len(shape) > 64 or not all(0 <= n < 1 << 53 for n in shape):
                raise self._damaged(f"{place}.shape", "a shape", shape)
            known = self._shapes[tuple(shape)] = tuple(shape), math.prod(shape)
        shape, count = known
        shared = self._shared.setdefault
        dtype, path = shared(dtype, dtype.removeprefix("torch.")), shared(path, path)
        load = None
        if value.get("data_name") is not None:
            load = self._loader(place, value["data_name"], dtype, shape)
        self._order += 1
        return TensorRow(
            **row,
            order=self._order,
            path=path,
            dtype=dtype,
            shape=shape,
            statistics=self._statistics(place, value, count),
            load_tensor=load,
        )

    def _statistics(self, place: str, value: dict, count: int) -> Statistics | None:
        get = value.get
        high, low, mean, l2 = get("Max"), get("Min"), get("Mean"), get("Norm")
        if type(high) is type(low) is type(mean) is type(l2) is float:
            if (high - high) + (low - low) + (mean - mean) + (l2 - l2) == 0.0:  # finite, as nearly always
                return Statistics(max=high, min=low, mean=mean, l2=l2, nan_count=0, inf_count=0, count=count)
        numbers = {}
        for key in ("Max", "Min", "Mean", "Norm"):
            found = value.get(key)
            if isinstance(found, str):  # JSON has no NaN, and some versions write it as text
                found = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(found.lower(), found)
            if isinstance(found, (dict, list, str)) or (isinstance(found, int) and abs(found) > 1 << 64):
                raise self._damaged(f"{place}.{key}", "a number", found)
            numbers[key] = found
        if numbers["Max"] is None or numbers["Min"] is None:
            if count:
                return None
            return Statistics(max=0.0, min=0.0, mean=0.0, l2=0.0, nan_count=0, inf_count=0, count=0)
        high, low = float(numbers["Max"]), float(numbers["Min"])
        nan_count = int(math.isnan(high) or math.isnan(low))
        inf_count = int(math.isinf(high)) + int(math.isinf(low))
        finite = {k: math.nan if n is None else float(n) for k, n in numbers.items()}
        if nan_count or inf_count:  # the elements that are finite are not known
            finite = {k: n if math.isfinite(n) else 0.0 for k, n in finite.items()}
        return Statistics(
            max=finite["Max"], min=finite["Min"], mean=finite["Mean"], l2=finite["Norm"], nan_count=nan_count,
            inf_count=inf_count, count=count,
        )  # fmt: skip

    def _scalar(self, kind: str, value: Any, path: str, row: dict[str, Any]) -> TensorRow | None:
        if kind not in _SCALARS or not isinstance(value, _SCALARS[kind]):
            return None
        if isinstance(value, int) and abs(value) > 1 << 64:
            return None
        number = float(value)
        statistics = Statistics(
            max=number if math.isfinite(number) else 0.0, min=number if math.isfinite(number) else 0.0,
            mean=number if math.isfinite(number) else 0.0, l2=abs(number) if math.isfinite(number) else 0.0,
            nan_count=int(math.isnan(number)), inf_count=int(math.isinf(number)), count=1,
        )  # fmt: skip
        self._order += 1
        return TensorRow(**row, order=self._order, path=path, dtype=kind, shape=(), statistics=statistics)

    def _loader(self, place: str, name: Any, dtype: str, shape: tuple[int, ...]):
        where = f"{self.path}: data.{place}.data_name"
        named_inside(self.folder / TENSORS, name, where=where)

        def load():
            path = inside(self.folder / TENSORS, name, where=where)
            found = read_torch(path)
            if not isinstance(found, StoredArray):
                raise InputError("the file holds no tensor", where=path, found=type(found).__name__)
            if found.shape != shape or found.dtype != dtype:
                raise InputError(
                    "the file holds another tensor than the dump says", where=path, expected=f"{dtype} {list(shape)}",
                    found=f"{found.dtype} {list(found.shape)}",
                )  # fmt: skip
            return found.load()

        return load

    # --- parents -----------------------------------------------------------------------------------------------------

    def _module_parent(self, name: str, path: str) -> str:
        parents = self._construct()
        if name in parents:
            return _path_of(parents[name])
        return path.rpartition(".")[0]

    def _operator_parent(self, name: str) -> str:
        return _path_of(self._construct().get(name))

    def _construct(self) -> Mapping[str, Any]:
        if self._parents is None:
            path = self.folder / CONSTRUCT
            found = json_stream.load(path, what="module tree") if path.is_file() else {}
            if not isinstance(found, dict):
                raise InputError(
                    "the module tree is damaged", where=path, expected="an object", found=type(found).__name__
                )
            self._parents = found
        return self._parents

    # --- checks ------------------------------------------------------------------------------------------------------

    def _list(self, name: str, entry: dict, field: str) -> list:
        value = entry.get(field)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._damaged(f"{name}.{field}", "a list", value)
        return value

    def _damaged(self, place: str, expected: object, found: object) -> InputError:
        return InputError(
            "the field is damaged", where=f"{self.path}: data.{place[:300]}", expected=expected, found=repr(found)[:120]
        )


def _top_level(path: Path) -> set[str]:
    return {name for inner, name, _ in json_stream.members(path, what="dump") if inner is None}


@lru_cache(maxsize=4096)
def _parent_match(name: str) -> str:
    match = _MODULE.fullmatch(name)
    return match["path"] if match else ""


def _path_of(name: Any) -> str:
    # A later version nests [name, …]; the first is the direct parent.
    if isinstance(name, list):
        name = name[0] if name else None
    return _parent_match(name) if isinstance(name, str) else ""


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
