"""Writes rows of a capture as an msprobe dump: ``dump.json``, ``construct.json``, ``stack.json``, ``dump_tensor_data``.

The inverse of :mod:`alignment.capture.readers.msprobe`, for whoever compares with msprobe's own tools. What differs
from a dump that msprobe wrote itself:

* The mean and the norm of half precision tensors are summed in float32 or better, not in the tensor's own dtype.
* Operators are aten's (``Aten.mm.default.0.forward``), as they are recorded below the Python API.
* Parameters stand at the first call after they have changed, not at every call.
* Call stacks are not recorded; ``stack.json`` says so.
* Where there are infinities, ``Max`` and ``Min`` are both infinite: their signs are not kept.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.capture.record import TensorRow
from alignment.files import write_atomically

NO_STACK = "The call stack is not recorded."
FRAMEWORK = "pytorch"
_NUMBERS = ("int", "float", "bool")
_INTEGERS = re.compile(r"u?int\d+|bool")


@dataclass
class _Call:
    """One call by its name, its entry in ``dump.json``, and the call it belongs to: module, direction and number."""

    name: str
    entry: dict[str, Any] = field(default_factory=dict)
    within: tuple[str, str, int] | None = None
    parent: str | None = None


def write_msprobe(folder: Path, rows: Iterable[TensorRow], *, level: str, task: str) -> int:
    """Writes ``rows``, in completion order, into ``folder``; ``dump.json`` comes last, whole or not at all.

    Args:
        folder: of one step and rank; files of an earlier dump are replaced.
        level: L0, L1 or mix, as it is noted.
        task: ``statistics``, or ``tensor`` to write the tensors that the rows hold.

    Returns:
        The number of calls.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dump.json").unlink(missing_ok=True)  # its presence says that what it names is there
    data = folder / "dump_tensor_data"
    dump = _Dump(data if task == "tensor" else None)
    for row in rows:
        dump.add(row)
    calls = dump.calls()
    tree = {} if level == "L1" else {call.name: call.parent for call in calls if ".parameters_grad" not in call.name}
    head = {"task": task, "level": level, "framework": FRAMEWORK}
    where = {"dump_data_dir": str(data) if task == "tensor" else None}
    _write(folder / "construct.json", tree)
    _write(folder / "stack.json", {"0": [[call.name for call in calls], [NO_STACK]]} if calls else {})
    _write(folder / "dump.json", {**head, **where, "data": {call.name: call.entry for call in calls}})
    return len(calls)


class _Dump:
    def __init__(self, data: Path | None) -> None:
        self._data = data
        self._calls: dict[str, _Call] = {}
        self._latest: dict[str, _Call] = {}
        """Last forward call by module."""
        self._classes: dict[str, str] = {}
        self._completed: dict[tuple[str, str], int] = {}
        """Number of the next call of a module and direction to complete."""
        self._counts: dict[tuple[str, str], int] = {}
        self._operators: dict[tuple[str, str, str, int], str] = {}

    def add(self, row: TensorRow) -> None:
        if row.kind == "module" and row.module:
            call = self._module_call(row)
        elif row.kind == "operator":
            call = self._operator_call(row)
        elif row.kind in ("parameter", "parameter_gradient"):
            self._parameter(row)
            return
        else:
            return  # the root, which msprobe does not name either, and the fields of a pipeline
        steps = _steps(row.path)
        section, *path = _section(row, steps)
        self._put(call, section, path, row)

    def calls(self) -> list[_Call]:
        # Children complete before their parents, whose class is only known now.
        for call in self._calls.values():
            module, direction, number = call.within or ("", "", 0)
            name = f"Module.{module}.{self._classes.get(module, '')}.{direction}.{number}"
            call.parent = name if name in self._calls else None
        return list(self._calls.values())

    # --- calls -------------------------------------------------------------------------------------------------------

    def _module_call(self, row: TensorRow) -> _Call:
        name = f"Module.{row.module}.{row.class_name}.{row.direction}.{row.call}"
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = _Call(name, _empty(row.direction), within=self._within(row))
            self._classes[row.module] = row.class_name
            self._completed[row.module, row.direction] = row.call + 1
            if row.direction == "forward":
                self._latest[row.module] = call
        return call

    def _operator_call(self, row: TensorRow) -> _Call:
        key = (row.direction, row.parent, row.module, row.call)
        name = self._operators.get(key)
        if name is None:
            # msprobe counts the calls of an operator over the whole step, not below each module.
            operator = _operator(row.module)
            number = self._counts.get((operator, row.direction), 0)
            self._counts[operator, row.direction] = number + 1
            name = self._operators[key] = f"{operator}.{number}.{row.direction}"
            self._calls[name] = _Call(name, _empty(row.direction), within=self._within(row))
        return self._calls[name]

    def _within(self, row: TensorRow) -> tuple[str, str, int]:
        """The call of the enclosing module: forward it completes after what it holds, backward it begins before."""
        completed = self._completed.get((row.parent, row.direction), 0)
        return row.parent, row.direction, completed if row.direction == "forward" else max(0, completed - 1)

    def _parameter(self, row: TensorRow) -> None:
        owner, _, local = row.module.rpartition(".")
        owner = owner or row.parent
        if row.kind == "parameter":
            call = self._latest.get(owner)
            if call is not None:
                call.entry.setdefault("parameters", {})[local] = self._entry(row, f"{call.name}.parameters.{local}")
            return
        kind = self._classes.get(owner)
        if kind is None:
            return
        name = f"Module.{owner}.{kind}.parameters_grad.{row.call}"
        call = self._calls.setdefault(name, _Call(name))
        call.entry.setdefault(local, []).append(self._entry(row, f"{name}.{local}"))

    # --- entries -----------------------------------------------------------------------------------------------------

    def _put(self, call: _Call, section: str, path: list[str], row: TensorRow) -> None:
        saved = {"input_args": "input", "input_kwargs": "kwargs"}.get(section, section)
        entry = self._entry(row, ".".join((call.name, saved, *path)))
        if section == "input_kwargs":
            call.entry[section] = _placed(call.entry[section], path, entry)
        else:
            call.entry[section] = _placed(call.entry.get(section, []), path, entry)

    def _entry(self, row: TensorRow, name: str) -> dict[str, Any]:
        statistics = row.statistics
        if row.dtype in _NUMBERS and not row.has_tensor and row.shape == ():
            value = _number(row.dtype, statistics.max if statistics and statistics.count else 0.0)
            if statistics is not None and statistics.nan_count:
                value = math.nan
            return {"type": row.dtype, "value": value}
        entry: dict[str, Any] = {"type": "torch.Tensor", "dtype": f"torch.{row.dtype}", "shape": list(row.shape)}
        numbers: dict[str, Any] = dict.fromkeys(("Max", "Min", "Mean", "Norm"))
        if statistics is not None and statistics.count:
            if statistics.nan_count:
                numbers = dict.fromkeys(numbers, math.nan)
            elif statistics.inf_count:
                numbers = {"Max": math.inf, "Min": -math.inf, "Mean": math.nan, "Norm": math.inf}
            else:
                numbers = {"Max": statistics.max, "Min": statistics.min, "Mean": statistics.mean, "Norm": statistics.l2}
            if _INTEGERS.fullmatch(row.dtype):  # msprobe writes whole numbers, and no mean and norm of them
                kind = bool if row.dtype == "bool" else int
                numbers = {"Max": kind(numbers["Max"]), "Min": kind(numbers["Min"]), "Mean": None, "Norm": None}
        entry |= {**numbers, "requires_grad": False}
        if self._data is not None and row.has_tensor:
            entry["data_name"] = self._save(row, name)
        return entry

    def _save(self, row: TensorRow, name: str) -> str:
        import torch

        self._data.mkdir(parents=True, exist_ok=True)
        array = row.tensor()
        tensor = torch.from_numpy(array.copy()).to(getattr(torch, row.dtype))
        file = f"{name}.pt"
        if len(file) > 240:  # a file system's limit
            file = f"{name[:200]}.{zlib.crc32(name.encode()):08x}.pt"
        torch.save(tensor, self._data / file)
        return file


def _empty(direction: str) -> dict[str, Any]:
    return (
        {"input_args": [], "input_kwargs": {}, "output": []} if direction == "forward" else {"input": [], "output": []}
    )


def _steps(path: str) -> list[str]:
    return path.split(".")


def _section(row: TensorRow, steps: list[str]) -> Iterator[str]:
    """The section of an entry and the place in it."""
    head, *rest = steps
    if row.direction == "forward":
        yield {"args": "input_args", "kwargs": "input_kwargs"}.get(head, "output")
        if head not in ("args", "kwargs"):
            yield from _within_output(rest)
        else:
            yield from rest or ["0"]
    elif row.role == "input":
        yield "input"
        yield from _within_output(rest) if head == "output" else rest or ["0"]
    else:
        yield "output"
        yield from rest or ["0"]


def _within_output(rest: list[str]) -> list[str]:
    # One result is a list of one; a dictionary is the first entry of a list.
    if not rest:
        return ["0"]
    return rest if rest[0].isdecimal() else ["0", *rest]


def _placed(holder: Any, path: list[str], entry: dict[str, Any]) -> Any:
    """``holder`` with ``entry`` at ``path``; lists and dictionaries on the way are made as the path asks for."""
    if not path:
        return entry
    head, *rest = path
    if head.isdecimal() and not isinstance(holder, dict):
        index = int(head)
        holder = holder if isinstance(holder, list) else []
        holder += [None] * (index + 1 - len(holder))
        holder[index] = _placed(holder[index], rest, entry)
        return holder
    if isinstance(holder, list):  # gradients of named arguments stand behind those of the others
        return [*holder, entry]
    holder = holder if isinstance(holder, dict) and "type" not in holder else {}
    holder[head] = _placed(holder.get(head), rest, entry)
    return holder


def _operator(name: str) -> str:
    space, _, rest = name.partition(".")
    return f"{space.capitalize()}.{rest}" if space.islower() and rest else name


def _number(kind: str, value: float) -> Any:
    return {"int": int, "float": float, "bool": bool}[kind](value)


def _write(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1)  # with NaN and Infinity, as msprobe writes and reads them
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))
