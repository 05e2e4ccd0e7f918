"""Operators below the modules: every aten call with its tensors and numbers, under the module that made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.capture.hooks import ModuleHooks
from alignment.capture.leaves import leaves
from alignment.capture.record import holds_samples
from alignment.capture.stage import StageRecord

_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view", "_unsafe_view", "t", "transpose", "permute", "expand", "detach", "alias", "as_strided", "unsqueeze",
        "squeeze", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "_reshape_alias",
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "is_same_size",
    )
)  # fmt: skip
"""They compute nothing: their results are their inputs, or memory that nobody has written yet."""


class OperatorRecorder(TorchDispatchMode):
    """Records operators while it is entered.

    Forward operators belong to the innermost running module. Backward operators belong to the module whose forward
    pass made the node of the graph that is running.

    Args:
        record: takes the rows.
        hooks: of the models; they know which module is running.
        takes: which modules' operators are captured, by name; operators outside any module count as "".
    """

    def __init__(self, record: StageRecord, *, hooks: Sequence[ModuleHooks], takes: Callable[[str], bool]) -> None:
        super().__init__()
        self._record, self._hooks, self._takes = record, hooks, takes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        record = self._record
        name = str(func)
        if not record.active or name.rsplit(".", 1)[0] in _VIEWS:
            return func(*args, **kwargs)
        backward = torch._C._current_graph_task_id() != -1
        parent = self._owner_of_node() if backward else self._running()
        if not self._takes(parent):
            return func(*args, **kwargs)
        direction = "backward" if backward else "forward"
        with record.own_work():
            call = record.next_call(f"{direction}\0{parent}\0{name}")
            # Before the operator runs: it may write into what it was given.
            by_sample = holds_samples(parent)
            inputs = [(path, t, record.reduce(t, by_sample=by_sample)) for path, t in self._tensors(args, kwargs)]
        output = func(*args, **kwargs)
        if not record.active:
            return output
        with record.own_work():
            for path, t, reduced in inputs:
                record.row(name, name, "operator", direction, call, "input", path, parent, t, reduced)
            for path, value in _numbers(args, kwargs):
                record.number(name, "operator", direction, call, path, parent, value)
            for path, t in leaves(output, "output"):
                reduced = record.reduce(t, by_sample=by_sample)
                record.row(name, name, "operator", direction, call, "output", path, parent, t, reduced)
        return output

    def _running(self) -> str:
        return next((h.innermost.name for h in self._hooks if h.innermost is not None), "")

    def _owner_of_node(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        sequence = node._sequence_nr()
        return next(filter(None, (h.owner_of(sequence) for h in self._hooks)), "")

    @staticmethod
    def _tensors(args: tuple, kwargs: dict) -> list[tuple[str, Tensor]]:
        found = [leaf for i, value in enumerate(args) for leaf in leaves(value, f"args.{i}")]
        return found + [leaf for name, value in kwargs.items() for leaf in leaves(value, f"kwargs.{name}")]


def _numbers(args: tuple, kwargs: dict) -> list[tuple[str, float]]:
    found = [(f"args.{i}", v) for i, v in enumerate(args) if isinstance(v, (bool, int, float))]
    return found + [(f"kwargs.{n}", v) for n, v in kwargs.items() if isinstance(v, (bool, int, float))]
