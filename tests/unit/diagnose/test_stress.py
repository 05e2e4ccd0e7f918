"""The stress job: bits, votes, the odd card."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import multiprocessing
from pathlib import Path

import pytest
import stress_faults
import torch
from typer.testing import CliRunner

from alignment.cli import app
from alignment.devices.base import Device
from alignment.diagnose import stress, stress_cards
from alignment.diagnose.stress import OPERATIONS, Card, Record, digest, judge, run_job
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome

SMALL = tuple(op for op in OPERATIONS if op.name in ("matmul", "sum of rows", "memory 55555555"))
# What takes no time at all, for trials of several workers.
QUICK = tuple(op for op in SMALL if op.dtype == "float32")
command = importlib.import_module("alignment.cli.stress")
FAULTS = Path(stress_faults.__file__)


def card(rank: int) -> Card:
    return Card(node="n", device="cpu", rank=rank)


@pytest.fixture(scope="module")
def honest() -> Record:
    return run_job(card(0), operations=SMALL)


def like(record: Record, rank: int, **changes) -> Record:
    """What another card of the same kind would answer; ``changes`` are of (round, place)."""
    digests = [list(of_round) for of_round in record.digests]
    for place, value in changes.get("wrong", {}).items():
        digests[place[0]][place[1]] = value
    return dataclasses.replace(record, card=card(rank), digests=tuple(map(tuple, digests)))


def outcomes(verdicts) -> dict[str, Outcome]:
    return {verdict.check[-1]: verdict.outcome for verdict in verdicts}


def clean_trial(trial: int, operations=OPERATIONS) -> dict[str, Outcome]:
    """Four healthy workers compute the job of this trial anew: inputs of its own, and no record of another trial."""
    records = [run_job(card(rank), operations=operations, seed=stress.SEED + trial) for rank in range(4)]
    return outcomes(judge(records, operations=operations))


HEALTHY = {str(rank): Outcome.PASS for rank in range(4)}


def test_a_repetition_gives_the_same_bits(honest):
    assert honest.digests[0] == honest.digests[1]
    assert run_job(card(1), rounds=1, operations=SMALL).digests[0] == honest.digests[0]


def test_the_rounds_are_deterministic_and_say_so(honest, monkeypatch):
    """Kernels without a deterministic form would convict a healthy card: they are refused, and that is verified."""
    seen = []
    monkeypatch.setattr(
        stress, "observe", lambda card, operation, inputs: seen.append(torch.are_deterministic_algorithms_enabled())
        or operation.compute(*inputs),
    )  # fmt: skip
    record = run_job(card(1), rounds=1, operations=SMALL)
    assert seen == [True] * len(SMALL) and not torch.are_deterministic_algorithms_enabled()
    assert dict(record.switches)["torch.use_deterministic_algorithms"] == "True"
    assert record.digests[0] == honest.digests[0]


def test_a_digest_sees_one_bit_and_the_shape():
    x = torch.arange(6, dtype=torch.float32)
    flipped = x.clone()
    flipped.view(torch.int32)[3] ^= 1
    assert len({digest(x), digest(flipped), digest(x.reshape(2, 3)), digest(x.to(torch.bfloat16))}) == 4
    assert digest(x.reshape(2, 3).t().contiguous().t()) == digest(x.reshape(2, 3))


def test_equal_cards_pass_and_a_lone_one_says_so(honest):
    verdicts = judge([honest, like(honest, 1), like(honest, 2)], operations=SMALL)
    assert set(outcomes(verdicts).values()) == {Outcome.PASS}
    (alone,) = judge([honest], operations=SMALL)
    assert alone.outcome is Outcome.PASS and "no other card" in alone.reason


def test_the_odd_card_and_its_first_operation_are_named(honest):
    odd = like(honest, 2, wrong={(0, 3): "x", (0, 5): "y", (1, 0): "z"})
    worst, *others = judge([honest, like(honest, 1), odd, like(honest, 3)], operations=SMALL)
    assert worst.check.endswith("/2") and worst.outcome is Outcome.FAIL
    assert worst.where.quantity == SMALL[3].title and "round 1" in worst.where.detail
    assert {verdict.outcome for verdict in others} == {Outcome.PASS}


def test_a_card_that_changes_its_mind_is_found_without_any_other(honest):
    (verdict,) = judge([like(honest, 0, wrong={(1, 2): "x"})], operations=SMALL)
    assert verdict.outcome is Outcome.FAIL and "its own first round" in verdict.reason


def test_two_cards_that_disagree(honest):
    """Steady in their disagreement neither can be accused; one that also disagrees with itself is."""
    steady = like(honest, 1, wrong={(0, 2): "x", (1, 2): "x"})
    verdicts = judge([honest, steady], operations=SMALL)
    assert set(outcomes(verdicts).values()) == {Outcome.INCONCLUSIVE}
    assert "without a majority" in verdicts[0].reason
    shaky = like(honest, 1, wrong={(0, 2): "x"})
    assert outcomes(judge([honest, shaky], operations=SMALL)) == {"0": Outcome.PASS, "1": Outcome.FAIL}


def test_other_chips_are_not_compared(honest):
    other = dataclasses.replace(like(honest, 1, wrong={(0, 0): "x", (1, 0): "x"}), chip="another")
    assert set(outcomes(judge([honest, other], operations=SMALL)).values()) == {Outcome.PASS}


def test_a_card_that_gave_no_answer_is_an_error(honest):
    verdicts = judge([honest], lost={card(1): "it died"}, operations=SMALL)
    assert outcomes(verdicts) == {"0": Outcome.PASS, "1": Outcome.ERROR}
    with pytest.raises(InputError, match="no card answered"):
        judge([], operations=SMALL)


def test_records_of_another_job_are_refused(honest):
    with pytest.raises(InputError, match="same job"):
        judge([honest, run_job(card(1), rounds=1, operations=SMALL[:2])], operations=SMALL)


def test_the_default_run_is_long_enough_for_the_rate_it_promises():
    elements = 2 * sum(
        math.prod(op.compute(*(torch.empty(s, device="meta") for s in op.shapes)).shape) for op in OPERATIONS
    )
    missed = math.exp(-stress_faults.RATE * elements)
    # 19 of 20 trials is what is promised.
    assert missed < 1 / 20


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_are_found_and_placed(honest, seed):
    """At a rate scaled to the small job: about as many flips as the default run has at 1e-6."""
    others = [honest, like(honest, 1), like(honest, 3)]
    with stress_faults.flipping(2, rate=1e-5, seed=seed):
        worst, *rest = judge([*others, run_job(card(2), operations=SMALL)], operations=SMALL)
    assert worst.check.endswith("/2") and worst.outcome is Outcome.FAIL
    assert {verdict.outcome for verdict in rest} == {Outcome.PASS}
    assert run_job(card(2), rounds=1, operations=SMALL).digests[0] == honest.digests[0]


@pytest.mark.parametrize("trial", range(3))
def test_a_clean_trial_of_a_small_job_accuses_nobody(trial):
    assert clean_trial(trial, QUICK) == HEALTHY


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_a_clean_trial_of_the_default_run_accuses_nobody(trial):
    assert clean_trial(trial) == HEALTHY


def test_a_job_that_varies_now_and_then_is_accused_in_the_trial_it_varies_in():
    """One bit of one output in fifty: a trial makes 4 · 2 · 4 of them, so the second meets it, the others do not."""
    with stress_faults.unsteady(every=50):
        found = [clean_trial(trial, QUICK) for trial in range(3)]
    # Output 50 is the second trial's 18th: of its third worker, in the first round.
    assert found == [HEALTHY, {**HEALTHY, "2": Outcome.FAIL}, HEALTHY]


@pytest.mark.slow
def test_twenty_trials_with_flipped_bits_in_the_default_run():
    """Of twenty runs with one-bit flips at 1e-6 in one of four workers at least nineteen are found and placed."""
    others = [run_job(card(rank)) for rank in range(3)]
    found = 0
    for trial in range(20):
        with stress_faults.flipping(3, seed=trial):
            worst, *rest = judge([*others, run_job(card(3))])
        found += worst.check.endswith("/3") and worst.outcome is Outcome.FAIL
        assert all(verdict.outcome is Outcome.PASS for verdict in rest)
    assert found >= 19


def test_the_command_over_processes(tmp_path):
    page = tmp_path / "page.html"
    arguments = ["stress", "--device", "cpu", "--workers", "3", "--rounds", "1", "--json", "--html", str(page)]
    found = CliRunner().invoke(app, [*arguments, "--fault", f"{FAULTS}:second_card"])
    assert found.exit_code == 1, found.output
    document = json.loads(found.stdout)
    assert document["verdicts"][0]["check"].endswith("/1")
    assert [v["outcome"] for v in document["verdicts"]] == ["fail", "pass", "pass"]
    assert document["summary"]["cards"] == 3
    assert "MISALIGNED: 1 fail, 2 pass" in page.read_text()


def test_processes_that_die_are_reported_and_not_waited_for():
    dead = CliRunner().invoke(
        app, ["stress", "--device", "cpu", "--workers", "2", "--rounds", "1", "--json", "--fault", f"{FAULTS}:dying"]
    )
    assert dead.exit_code == 2, dead.output
    document = json.loads(dead.stdout)
    assert [v["outcome"] for v in document["verdicts"]] == ["error", "error"]
    assert document["summary"] == {}
    assert "no answer: its process died (exit code 9)" in document["verdicts"][0]["reason"]


def test_a_card_that_hangs_is_lost_and_its_process_killed():
    hung = CliRunner().invoke(
        app,
        ["stress", "--device", "cpu", "--workers", "2", "--rounds", "1", "--json", "--timeout", "10",
         "--fault", f"{FAULTS}:hanging"],
    )  # fmt: skip
    assert hung.exit_code == 2, hung.output
    # On a slow machine ten seconds may be too short for the healthy one as well.
    reasons = {verdict["check"][-2:]: verdict["reason"] for verdict in json.loads(hung.stdout)["verdicts"]}
    assert set(reasons) == {"/0", "/1"} and reasons["/1"] == "no answer within 10 s"
    assert multiprocessing.active_children() == []


def test_no_time_to_answer_in_is_refused():
    refused = CliRunner().invoke(app, ["stress", "--device", "cpu", "--minutes", "2", "--timeout", "100"])
    assert isinstance(refused.exception, InputError) and "more than the 120 s" in str(refused.exception)


def test_one_named_card_is_the_only_one(monkeypatch):
    asked = {}

    def on_this_machine(kind, **arguments):
        asked.update(kind=kind, **arguments)
        raise InputError("enough")

    monkeypatch.setattr(stress_cards, "on_this_machine", on_this_machine)
    monkeypatch.setattr(command, "find_device", lambda name, emulate: Device(kind="npu", index=3))
    CliRunner().invoke(app, ["stress", "--device", "npu:3"])
    assert (asked["kind"], asked["only"], asked["workers"]) == ("npu", 3, 1)
    for more in (["--workers", "2"], ["--ray", "auto"]):
        refused = CliRunner().invoke(app, ["stress", "--device", "npu:3", *more])
        assert isinstance(refused.exception, InputError)
        assert f"npu:3 with {' '.join(more[:1])}" in str(refused.exception)


def test_the_one_card_is_run_by_its_index():
    """A CPU has no index, so the process that is asked for the fourth NPU says it is not there."""
    records, lost = stress_cards.on_this_machine("npu", workers=1, rounds=1, minutes=0, only=3)
    assert records == [] and [c.device for c in lost] == ["npu:3"]
