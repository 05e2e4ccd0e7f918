"""How far an observation is from its golden value, and whether its shape and dtype are what was declared."""

from __future__ import annotations

import math

import torch

from alignment.backends.case import DTYPES, Case, Quantity
from alignment.numerics.metrics import max_abs, relative_l2

RMS = "rms of golden"

_OF_TENSORS = {"relative_l2": "", "max_abs": RMS}
METRICS = {"real": _OF_TENSORS, "sketch": _OF_TENSORS, "table": {"max_relative": ""}, "choice": {}}
"""Metrics by kind of quantity, each with its unit."""


def root_mean_square(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def errors(quantity: Quantity, observed: torch.Tensor, golden: torch.Tensor) -> dict[str, float]:
    """Metric values of one quantity.

    ``relative_l2`` is ‖x − g‖/‖g‖. ``max_abs`` is max |x − g| in units of rms(g): one wrong row in a large tensor hides
    in the first and shows in the second. ``max_relative`` of a table is max |x_i − g_i|/|g_i| over its entries.
    """
    if quantity.kind == "choice":
        return {}
    observed, golden = observed.detach().cpu().double(), golden.double()
    if quantity.kind == "table":
        return {"max_relative": max(relative_l2(x[None], g[None]) for x, g in zip(observed, golden, strict=True))}
    size, worst = root_mean_square(golden), max_abs(observed, golden)
    in_units = worst / size if size else (0.0 if worst == 0 else math.inf)
    return {"relative_l2": relative_l2(observed, golden), "max_abs": in_units}


def size_of(quantity: Quantity, golden: torch.Tensor) -> float:
    """max |g| / rms(g): what a relative floor is multiplied with to bound ``max_abs``."""
    size = root_mean_square(golden)
    return float(golden.abs().max()) / size if size else 0.0


def flips(selected: torch.Tensor, golden: torch.Tensor, scores: torch.Tensor, *, margin: float) -> tuple[int, float]:
    """Rows of a multi-hot choice [rows, candidates] that differ from golden by more than a near-tie, and the largest gap.

    A row's gap is the largest golden-score difference between what left the choice and what entered it; within the
    margin either side may decide. It counts in both directions, since a choice limited to groups may leave out the
    better candidate.
    """
    selected, golden, scores = selected.detach().cpu() > 0, golden > 0, scores.double()
    left, entered = golden & ~selected, selected & ~golden
    gap = torch.zeros(scores.shape[:-1], dtype=torch.float64)
    for row in (left.any(-1) | entered.any(-1)).nonzero():
        row = tuple(row.tolist())
        out, new = scores[row][left[row]], scores[row][entered[row]]
        # a row that only lost or only gained candidates is no tie
        gap[row] = (out[:, None] - new[None, :]).abs().max() if len(out) == len(new) else math.inf
    return int((gap > margin).sum()), float(gap.max())


def declared_fault(case: Case, quantity: Quantity, observed: torch.Tensor, golden: torch.Tensor) -> str | None:
    """What is wrong with the shape or dtype of an observation, or None."""
    if observed.shape != golden.shape:
        return f"shape {list(observed.shape)}, expected {list(golden.shape)}"
    expected = DTYPES[quantity.dtype or case.dtype]
    if observed.dtype != expected and quantity.kind != "sketch":
        return f"dtype {observed.dtype}, expected {expected} as declared"
    return None


def worst_place(quantity: Quantity, observed: torch.Tensor, golden: torch.Tensor) -> str:
    """Where the largest error is, with both values."""
    observed, golden = observed.detach().cpu().double(), golden.double()
    if quantity.kind == "table":
        difference = (observed - golden).abs()
        # an expert without tokens has no gradient on either side
        ratio = torch.where(difference == 0, 0.0, difference / golden.abs())
        index = int(ratio.nan_to_num(math.inf, math.inf).argmax())
        return f"{quantity.labels[index]}: found {observed[index]:.6g}, golden {golden[index]:.6g}"
    flat = int((observed - golden).abs().nan_to_num(math.inf, math.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), golden.shape)]
    return f"largest error at {index}: found {observed.reshape(-1)[flat]:.6g}, golden {golden.reshape(-1)[flat]:.6g}"
