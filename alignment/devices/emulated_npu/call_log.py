"""What the code under test really handed to a fused operator: name, arguments, shapes and dtypes, in call order.

A wrapper can compute the right softmax scale and pass the wrong one; only the value that reaches the kernel counts
(MindSpeed's flash-attention adaptor did exactly that for MLA: 1/sqrt(d) instead of ``config.softmax_scale``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

# A training run makes millions of calls; the process-wide log keeps the newest of them.
_KEPT = 4096


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a fused operator.

    ``arguments`` holds every non-tensor argument by its parameter name, defaults included; ``shapes`` and ``dtypes``
    hold the tensors by parameter name (a list of tensors gives a tuple; dtypes are named as in ``"bfloat16"``).
    ``call["scale"]`` is short for ``call.arguments["scale"]``.
    """

    name: str
    arguments: Mapping[str, Any]
    shapes: Mapping[str, Any]
    dtypes: Mapping[str, Any]

    def __getitem__(self, argument: str) -> Any:
        if argument not in self.arguments:
            raise KeyError(f"{self.name} has no argument {argument!r}; it was called with {sorted(self.arguments)}")
        return self.arguments[argument]


class CallLog:
    """Calls in the order they were made. Iterable, indexable, with a length."""

    def __init__(self, *, kept: int | None = None) -> None:
        self._calls: deque[Call] = deque(maxlen=kept)

    def append(self, call: Call) -> None:
        self._calls.append(call)

    def clear(self) -> None:
        self._calls.clear()

    def named(self, name: str) -> list[Call]:
        """The calls of one operator."""
        return [call for call in self._calls if call.name == name]

    def only(self, name: str) -> Call:
        """The one call of an operator; an AssertionError that lists what was called if there was none or several."""
        found = self.named(name)
        if len(found) != 1:
            called = ", ".join(call.name for call in self._calls) or "nothing"
            raise AssertionError(f"expected exactly one call of {name}, found {len(found)}; called: {called}")
        return found[0]

    def __iter__(self) -> Iterator[Call]:
        return iter(tuple(self._calls))

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: int) -> Call:
        return self._calls[index]


calls = CallLog(kept=_KEPT)
_open: list[CallLog] = [calls]


@contextlib.contextmanager
def recorded_calls() -> Iterator[CallLog]:
    """Collect the fused-operator calls made inside the block, in all threads.

    >>> with recorded_calls() as log:          # doctest: +SKIP
    ...     model(input_ids)
    >>> log.only("npu_fusion_attention")["scale"]  # doctest: +SKIP
    """
    log = CallLog()
    _open.append(log)
    try:
        yield log
    finally:
        _open[:] = [other for other in _open if other is not log]


def record(call: Call) -> None:
    """Append ``call`` to the process-wide log and to every open ``recorded_calls`` block."""
    for log in tuple(_open):
        log.append(call)
