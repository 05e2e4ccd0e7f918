"""A comparison of two captures on the terminal: plain text, a few lines per stage, without rich or torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from alignment.diagnose.capture_comparison import CaptureComparison, StageComparison
from alignment.diagnose.localise import Finding
from alignment.numerics.verdict import Outcome

SHOWN = 8
"""Findings and gaps per stage; ``--json`` has all."""
_WORDS = {Outcome.PASS: "aligned", Outcome.FAIL: "MISALIGNED", Outcome.INCONCLUSIVE: "INCONCLUSIVE"}


def comparison_lines(comparison: CaptureComparison, *, shown: int = SHOWN) -> Iterator[str]:
    """The table, the first divergence, and the headline."""
    yield f"golden  {comparison.golden}"
    yield f"target  {comparison.target}"
    yield ""
    rows = [("step", "stage", "rank", "tensors", "introduced", "inherited", "missing", "verdict")]
    for stage in comparison.stages:
        introduced = len(stage.localisation.introduced)
        rows.append(
            (
                str(stage.step), stage.stage, "all" if stage.rank is None else str(stage.rank), str(stage.pairs),
                str(introduced), str(len(stage.localisation.findings) - introduced), str(len(stage.failures)),
                _WORDS[stage.outcome],
            )
        )  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    first = comparison.first
    if first is not None:
        yield ""
        yield from stage_lines(first, shown)
    for stage in comparison.stages:
        for text in (stage.left_out, stage.declared):
            if text:
                yield f"step {stage.step} {stage.stage}: {text}"
    for gap in comparison.missing:
        yield f"MISSING  {gap}"
    yield ""
    yield headline(comparison)


def stage_lines(stage: StageComparison, shown: int) -> Iterator[str]:
    """The first stage that is not aligned, in full."""
    kind = "inconclusive" if stage.unsettled else "misaligned"
    yield f"first {kind}: step {stage.step} {stage.stage}: {stage.reason()}"
    for direction in ("forward", "backward"):
        finding = stage.localisation.first(direction)
        if finding is not None:
            yield from finding_lines(finding, direction)
    others = [
        f
        for f in stage.localisation.introduced
        if f not in (stage.localisation.first("forward"), stage.localisation.first("backward"))
    ]
    for finding in others[:shown]:
        yield f"  also introduced  {finding.module or '(root)'}: {finding.quantity}, {_size(finding)}"
    if len(others) > shown:
        yield f"  … and {len(others) - shown} more"
    for gap in stage.failures[:shown]:
        yield f"  missing   {gap}"
    if len(stage.failures) > shown:
        yield f"  … and {len(stage.failures) - shown} more"
    command = stage.next_command("")
    if command:
        yield f"  next      {command}"


def finding_lines(finding: Finding, direction: str) -> Iterator[str]:
    """What, where, how far, against which limit."""
    yield f"  {direction:9} {finding.module or '(root)'}, {finding.quantity}" + (
        f" at {finding.at or '(root)'}" if finding.at != finding.module else ""
    )
    yield f"  how far   {_size(finding)}"
    yield f"  sources   differ by {finding.sources:.3g}"
    yield f"  limit     {finding.origin}"


def _size(finding: Finding) -> str:
    if not math.isfinite(finding.value):
        return finding.reason
    times = f", {finding.excess:.3g} times its limit" if math.isfinite(finding.excess) else ", exact values expected"
    return f"{finding.reason} {finding.value:.3g}{times}"


def headline(comparison: CaptureComparison) -> str:
    """One line."""
    stages = comparison.stages
    bad, open_ = (sum(stage.outcome is kind for stage in stages) for kind in (Outcome.FAIL, Outcome.INCONCLUSIVE))
    missing = f", {len(comparison.missing)} missing" if comparison.missing else ""
    if bad or missing:
        return f"MISALIGNED: {bad} of {len(stages)} stages{missing}"
    if open_:
        return f"INCONCLUSIVE: {open_} of {len(stages)} stages hold tensors that were not compared and disagree"
    return f"ALIGNED: {len(stages)} stages, {sum(stage.pairs for stage in stages)} tensors"
