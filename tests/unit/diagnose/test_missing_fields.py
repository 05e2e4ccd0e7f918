"""A field of the pipeline that only one side has is missed, or a remark where only some engines have it."""

from __future__ import annotations

import numpy as np
import pytest
from comparison_rows import MemoryCapture, chain, row

from alignment.diagnose.capture_comparison import compare_captures
from alignment.report.comparison_view import comparison_lines

FIELDS = ("responses", "old_log_probs", "advantages", "rollout_log_probs", "entropys")


def fields(*left_out, modules=True):
    """A stage with modules and fields of the pipeline."""
    values = np.linspace(-3.0, -0.1, 64)
    common = {"kind": "value", "parent": "", "class_name": "", "detail": "tensor"}
    kept = [name for name in FIELDS if name not in left_out]
    return [*(chain() if modules else ()), *(row(name, values, order=90 + i, **common) for i, name in enumerate(kept))]


def both_ways(golden, target, **options):
    """(stage, the side that has more) of golden against target and of target against golden."""
    yield compare_captures(golden, target, **options).stages[0], "golden", "target"
    yield compare_captures(target, golden, **options).stages[0], "target", "golden"


@pytest.mark.parametrize("name", ["responses", "old_log_probs", "advantages"])
def test_a_field_of_the_pipeline_that_is_gone_fails(name):
    for stage, more, less in both_ways(MemoryCapture(fields()), MemoryCapture(fields(name))):
        assert stage.failures == [f"value {name} only in {more}, missing in {less} (value, forward)"]
        assert not stage.aligned


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rollout_log_probs", "an engine that samples need not say how probable its tokens were to it"),
        ("entropys", "fused kernels give log-probabilities without the entropy of their distribution"),
    ],
)
def test_a_field_that_only_some_engines_have_is_a_remark_that_is_printed(name, why):
    golden, target = MemoryCapture(fields()), MemoryCapture(fields(name))
    for stage, more, _ in both_ways(golden, target):
        assert stage.aligned and stage.declared == f"{name} only in {more}: {why}"
    assert f"step 0 train: {name} only in golden: {why}" in list(comparison_lines(compare_captures(golden, target)))


def test_fields_of_a_side_that_records_none_are_not_missed():
    for stage, _, _ in both_ways(MemoryCapture(fields()), MemoryCapture(fields(*FIELDS))):
        assert stage.aligned and len(stage.unpaired) == len(FIELDS)


def test_fields_of_these_names_elsewhere_are_compared():
    common = {"kind": "value", "parent": "", "class_name": "", "detail": "tensor", "order": 99}
    sides = [MemoryCapture([*fields(), row("perf/score", np.full(4, v), **common)]) for v in (1.0, 2.0)]
    assert compare_captures(*sides).stages[0].first.quantity == "value perf/score"
