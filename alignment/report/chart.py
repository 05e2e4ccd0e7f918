"""A curve as the script of the page draws it: a line, another beside it, and a band behind both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from alignment.report.answer import number


def chart(
    name: str,
    steps: Sequence[Any],
    line: Sequence[Any],
    *,
    caption: str,
    band: tuple[str, str, Sequence[Any], Sequence[Any]] | None = None,
    beside: tuple[str, Sequence[Any]] | None = None,
    log: bool = False,
) -> dict[str, Any]:
    """The data of one chart, in the form in which a training has its metrics.

    Args:
        caption: what is drawn, under the name.
        band: what it is in a word, what it is in full, and its lower and upper edge per step; no values, no band.
        beside: name and values of a second, dashed line.
        log: powers of ten upwards, for what grows by orders of magnitude; zeros stand on the ground.
    """
    told: dict[str, Any] = {
        "name": name,
        "caption": caption,
        "steps": list(steps),
        "metrics": {name: numbers(line)},
        "band": None,
        "beside": None,
        "log": log,
    }
    if band is not None and band[3]:
        word, label, low, high = band
        edges = {"steps": list(steps), "low": numbers(low), "high": numbers(high)}
        told["band"] = {"metric": name, "word": word, "label": label, **edges}
    if beside is not None:
        told["beside"] = {"name": beside[0], "values": numbers(beside[1])}
    return told


def numbers(line: Iterable[Any]) -> list[float | None]:
    """The values of a line, None where there is no finite number."""
    return [number(value) for value in line]


def least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
