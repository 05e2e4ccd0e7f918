"""A general check: a law that the product obeys whatever it computes, judged without knowing any fault.

Checks compare what the product computes with something that is not the product: a float64 formula of
:mod:`alignment.faults.reference`, brute force, another implementation, or the product itself on an input that must give
the same answer. They reach the product through its modules at the moment they run (``from alignment.models import
rope``, then ``rope.rotate_interleaved``), so that they judge what is there and not what was there when they were
imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.numerics.budget import ENVELOPE_FACTOR
from alignment.numerics.precision import Precision, unit_roundoff

LAYERS = ("unit-op", "layer-logits", "layer-grad", "weight-sync", "rollout-vs-train-logprob")
"""From the cheapest to the dearest."""

HALF_THE_DIGITS = math.sqrt(unit_roundoff("float64"))
"""Relative error of a float64 result that has lost half of its digits: no rounding of a well-posed computation does
that.
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a check is run under.

    Attributes:
        seed: of the drawn inputs.
        precision: what the run declares about its arithmetic where it is not float64; what is declared is no finding.
    """

    seed: int = 0
    precision: Precision = field(default_factory=Precision)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        stage: the pipeline stage, or ``operator`` for what every stage uses.
        place: dotted path of the module, weight, field or loss term: ``self_attn.softmax_scale``.
        evidence: the numbers, and the ratio by its name where it has one.
        check: the check that found it; the runner fills it in.
    """

    stage: str
    place: str
    evidence: str
    check: str = ""

    def __str__(self) -> str:
        return f"{self.stage} · {self.place}: {self.evidence}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A named law.

    Attributes:
        name: ``topic.law``, for example ``attention.golden``.
        layer: one of :data:`LAYERS`.
        cost: seconds it takes about; within a layer the cheaper check runs first.
        run: yields what is wrong under a setting; nothing where all is right.
        kept_because: why a check without a catch of its own in the catalogue stays; empty where it has one.
    """

    name: str
    layer: str
    cost: float
    run: Callable[[Setting], Iterable[Finding]]
    kept_because: str = ""

    def __post_init__(self) -> None:
        if self.layer not in LAYERS:
            raise InputError("unknown layer", where=self.name, expected=", ".join(LAYERS), found=self.layer)

    def findings(self, setting: Setting | None = None) -> list[Finding]:
        """What is wrong, in order of computation. A crash of the product is a finding as well."""
        found: list[Finding] = []
        try:
            for finding in self.run(setting or Setting()):
                found.append(replace(finding, check=self.name))
        except Exception as error:
            found.append(_crash(error, self.name))
        return found


def differs(
    found: Tensor,
    golden: Tensor,
    *,
    stage: str,
    place: str,
    what: str = "",
    scale: float | None = None,
    bound: float | None = None,
    ratios: dict[str, int] | None = None,
) -> list[Finding]:
    """A finding if ``found`` is not ``golden`` (float64) up to ``bound``, else an empty list.

    Args:
        scale: what the error is relative to; the largest magnitude in ``golden`` by default.
        bound: relative; :data:`HALF_THE_DIGITS` by default, which is for float64 results.
        ratios: sizes of the layout by name (``{"TP": 2}``): a constant ratio found/golden equal to one of them, or to
            its inverse, is named.
    """
    label = f"{what}: " if what else ""
    if tuple(found.shape) != tuple(golden.shape):
        evidence = f"{label}shape {list(found.shape)} instead of {list(golden.shape)}"
        return [Finding(stage=stage, place=place, evidence=evidence)]
    if golden.numel() == 0:
        return []
    found, golden = found.detach().double(), golden.detach().double()
    size = scale if scale is not None else float(golden.abs().max())
    limit = (bound if bound is not None else HALF_THE_DIGITS) * (size or 1.0)
    error = float((found - golden).abs().max())
    if error <= limit:  # NaN is not
        return []
    worst = torch.nan_to_num((found - golden).abs(), nan=math.inf).flatten().argmax()
    index = [int(i) for i in torch.unravel_index(worst, golden.shape)] if golden.ndim else []
    evidence = f"{label}error {error:.3g} of {size:.3g}, bound {limit:.3g}, worst at {index}"
    named = integer_ratio(found, golden, ratios or {})
    return [Finding(stage=stage, place=place, evidence=f"{evidence}; {named}" if named else evidence)]


def integer_ratio(found: Tensor, golden: Tensor, ratios: dict[str, int]) -> str:
    """``found = TP × golden``, where the quotient of the two is a size of the layout or its inverse; else empty."""
    top = float((golden * golden).sum())
    if not top or not bool(torch.isfinite(found).all()):
        return ""
    quotient = float((found * golden).sum()) / top
    if float((found - quotient * golden).abs().max()) > HALF_THE_DIGITS * float(golden.abs().max()) * max(
        1.0, abs(quotient)
    ):
        return ""
    for name, size in ratios.items():
        for factor, text in ((float(size), f"{name} (= {size})"), (1 / size, f"1/{name} (= 1/{size})")):
            if math.isclose(quotient, factor, rel_tol=HALF_THE_DIGITS):
                return f"it is {text} times the right value"
    return f"it is {quotient:.6g} times the right value"


def allowed(precision: Precision | torch.dtype | str, reduction_length: int, *, operator: str = "matmul") -> float:
    """The relative error that the declared arithmetic explains: the envelope factor times the floor of the
    precision.
    """
    return ENVELOPE_FACTOR * Precision.of(precision).floor(reduction_length, operator=operator)


def expect(holds: bool, *, stage: str, place: str, evidence: str) -> list[Finding]:
    """A finding unless ``holds``."""
    return [] if holds else [Finding(stage=stage, place=place, evidence=evidence)]


def _crash(error: Exception, check: str) -> Finding:
    """What raised: the innermost place in the product, with the message."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        path = Path(traceback.tb_frame.f_code.co_filename)
        if "alignment" in path.parts and "faults" not in path.parts:
            parts = path.with_suffix("").parts
            place = ".".join((*parts[len(parts) - parts[::-1].index("alignment") :], traceback.tb_frame.f_code.co_name))
        traceback = traceback.tb_next
    evidence = f"{type(error).__name__}: {error}"
    return Finding(stage="operator", place=place or check, evidence=evidence, check=check)
