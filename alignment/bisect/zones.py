"""Where a measured stack stands between the two ends: good, bad, in between, or not measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Zone(str, Enum):
    """AMBIGUOUS is a value between the two ends' clusters: a second cause or drift, never settled by a coin."""

    GOOD = "good"
    AMBIGUOUS = "ambiguous"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one stack was found to be. ``reason`` is the class of a skip, ``detail`` its words."""

    zone: Zone
    value: float | None = None
    reason: str = ""
    detail: str = ""
