"""The terminal says what, where, how far, against what, and what to do next."""

import io
import math

import pytest

from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict, exit_code
from alignment.report.terminal import explain, grouped, headline, percent_of_budget, print_verdicts


def verdict(outcome, check="unit/attention.tiny", value=3.0, **kwargs):
    kwargs.setdefault("reason", "the error is above its budget")
    return Verdict(
        check=check, layer="unit", stage="operator", subject="torch", device="cpu", outcome=outcome,
        measures=(Measure(name="output relative L2", value=value, bound=2.0, origin="measured noise"),), **kwargs,
    )


def test_a_finding_says_everything():
    text = explain(
        verdict(
            Outcome.FAIL,
            where=Divergence(stage="actor_update", module="model.layers.0.self_attn", quantity="output"),
            baseline="cpu/epyc unit/attention.tiny of 2026-11-29",
            next_command="alignment run --only unit",
        )
    )
    assert "the error is above its budget" in text
    assert "actor_update · model.layers.0.self_attn · output" in text
    assert "output relative L2 = 3, bound 2 (150 %)" in text
    assert "measured noise" in text
    assert "cpu/epyc unit/attention.tiny of 2026-11-29" in text
    assert "alignment run --only unit" in text


def test_the_table_takes_the_gravest_outcome_of_a_row_and_lists_only_findings():
    from rich.console import Console

    stream = io.StringIO()
    rows = [verdict(Outcome.PASS, value=1.0), verdict(Outcome.FAIL, check="unit/attention.yarn"),
            verdict(Outcome.UNAVAILABLE, check="unit/norm.x", reason="torch_npu is not installed")]
    print_verdicts(Console(file=stream, width=140), rows)
    text = stream.getvalue()
    assert [line.split()[:5] for line in text.splitlines() if line.startswith("unit")] == [
        ["unit", "attention", "torch", "2", "fail"],
        ["unit", "norm", "torch", "1", "unavailable"],
    ]
    assert text.count("FAIL  unit/attention.yarn") == 1
    assert "FAIL  unit/attention.tiny" not in text
    assert "not run: torch: torch_npu is not installed" in text
    assert "MISALIGNED: 1 fail, 1 unavailable, 1 pass" in text


@pytest.mark.parametrize(
    ("outcomes", "word", "code"),
    [
        ([Outcome.PASS], "ALIGNED", 0),
        ([Outcome.PASS, Outcome.UNAVAILABLE], "ALIGNED", 0),
        ([Outcome.PASS, Outcome.INCONCLUSIVE], "NOT SHOWN TO BE ALIGNED", 1),
        ([Outcome.INCONCLUSIVE], "NOT SHOWN TO BE ALIGNED", 1),
        ([Outcome.INCONCLUSIVE, Outcome.UNAVAILABLE], "NOT SHOWN TO BE ALIGNED", 1),
        ([Outcome.INCONCLUSIVE, Outcome.ERROR], "NOT CARRIED OUT", 2),
        ([Outcome.PASS, Outcome.ERROR], "NOT CARRIED OUT", 2),
        ([Outcome.ERROR, Outcome.FAIL], "MISALIGNED", 1),
        ([Outcome.UNAVAILABLE], "NOT CARRIED OUT", 2),
        ([], "NOT CARRIED OUT", 2),
    ],
)
def test_the_headline_and_the_exit_code_agree(outcomes, word, code):
    verdicts = [verdict(o) for o in outcomes]
    assert headline(verdicts).startswith(word + ":")
    assert exit_code(verdicts) == code


def test_what_was_required_and_is_unavailable_is_an_error():
    verdicts = [verdict(Outcome.PASS), verdict(Outcome.UNAVAILABLE)]
    assert exit_code(verdicts, require=True) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.0000001])
def test_nothing_outside_its_bound_is_within_it(value):
    assert not Measure(name="x", value=value, bound=2.0).within


def test_an_exact_bound_allows_nothing_and_a_verdict_survives_json():
    assert Measure(name="x", value=0.0, bound=0.0).within
    assert not Measure(name="x", value=5e-324, bound=0.0).within
    found = verdict(Outcome.FAIL, where=Divergence(stage="rollout", module="m", quantity="q"))
    assert Verdict.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    ("value", "bound", "said"),
    [
        (1.0, 0.0, "exact: differs"), (0.0, 0.0, "exact"), (math.inf, 2.0, "infinite"), (math.nan, 2.0, "NaN"),
        (1.0, 2.0, "50 %"), (100.0, 2.0, "50 times"),
    ],
)  # fmt: skip
def test_how_much_of_a_budget_was_used_is_said_in_words_where_it_is_no_number(value, bound, said):
    assert percent_of_budget(Measure(name="a", value=value, bound=bound)) == said


def test_the_name_of_a_phase_of_a_night_is_kept_whole_and_those_of_its_checks_are_grouped():
    def told(check: str, stage: str, subject: str = "pytest", layer: str = "e2e") -> Verdict:
        return Verdict(
            check=check, layer=layer, stage=stage, subject=subject, device="cpu", outcome=Outcome.PASS, reason=""
        )

    verdicts = [
        told("night/weight-sync", "weight-sync", "night"),
        told("night/emulated-npu", "emulated-npu", "night"),
        told("emulated-npu/tests.unit.rope::test_a", "emulated-npu"),
        told("emulated-npu/tests.unit.norm::test_b", "emulated-npu"),
        told("e2e/curve-dapo-tiny-reward", "curve", "golden"),
        told("stress/host-1/npu:0", "stress", "torch"),
        told("unit/rope.yarn-float32", "operator", "torch", "unit"),
    ]
    assert {group: len(members) for (_, group, _), members in grouped(verdicts).items()} == {
        "night/weight-sync": 1, "night/emulated-npu": 1, "emulated-npu/tests": 2, "curve": 1, "stress/host": 1,
        "rope": 1,
    }  # fmt: skip
