"""The nights: calls, false alarms, drift, flakiness and quarantine."""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from datetime import date, timedelta

import pytest
from typer.testing import CliRunner

from alignment.cli import app
from alignment.errors import InputError
from alignment.files import write_json
from alignment.numerics.curves import CUSUM_ALARM
from alignment.numerics.random import portable_normal
from alignment.numerics.verdict import Measure, Outcome, Verdict
from alignment.report.history import History, Night, told_apart
from alignment.report.night_watch import drift
from alignment.report.run_directory import write_verdicts

CHECKS = ("unit/rope", "unit/router", "e2e/curve.dapo")
FIRST = date(2026, 1, 1)
ROPE = "unit/rope [torch on npu]"


def verdict(check: str, outcome: Outcome = Outcome.PASS, used: float = 0.4, subject: str = "torch") -> Verdict:
    measures = (Measure(name="relative_l2", value=used, bound=1.0),)
    return Verdict(
        check=check, layer=check.partition("/")[0], stage="operator", subject=subject, device="npu", outcome=outcome,
        reason="", measures=measures,
    )  # fmt: skip


@pytest.fixture
def nights(tmp_path):
    """Adds nights one after the other; ``red`` checks fail, ``used`` is by check."""
    history = History(tmp_path / "history.sqlite")
    count = iter(range(10_000))

    def add(*, red=(), used=None, commit="c0ffee", checks=CHECKS, chip="910B", outcome=Outcome.FAIL, packages=None,
        more=(),
    ):  # fmt: skip
        number = next(count)
        run = tmp_path / f"night-{number:03d}"
        told = [verdict(c, outcome if c in red else Outcome.PASS, (used or {}).get(c, 0.4)) for c in checks]
        told += more
        write_verdicts(run, told)
        day = FIRST + timedelta(days=number)
        about = {"date": f"{day}T02:00", "commit": commit, "fingerprint": {"chip": chip}, "packages": packages or {}}
        write_json(run / "provenance.json", about)
        return history.add(run)

    return history, add


def test_a_quiet_night_is_ignored_and_a_new_red_one_pages(nights):
    history, add = nights
    add(commit="a")
    assert history.call().action == "ignore"
    add(red=("unit/rope",), commit="b")
    call = history.call()
    assert (call.action, call.new, call.known) == ("page", (ROPE,), ())
    add(red=("unit/rope",), commit="c")
    call = history.call()
    assert (call.action, call.new, call.known) == ("warn", (), (ROPE,))
    add(red=("unit/rope", "unit/router"), commit="d")
    assert history.call().new == ("unit/router [torch on npu]",)


def test_another_subject_of_a_known_check_is_new(nights):
    history, add = nights
    failing = verdict("unit/rope", Outcome.FAIL, subject="vllm")
    add(red=("unit/rope",), commit="a")
    add(commit="b", more=[failing])
    call = history.call()
    assert (call.action, call.new, call.known) == ("page", ("unit/rope [vllm on npu]",), ())


def test_the_night_before_is_one_of_the_same_chip(nights):
    history, add = nights
    add(red=("unit/rope",), commit="a")
    add(chip="310P", commit="b", checks=CHECKS[1:])
    add(red=("unit/rope",), commit="c")
    assert history.call().known == (ROPE,)
    add(red=("unit/rope",), commit="d", chip="310P")
    assert history.call().new == (ROPE,)
    add(checks=CHECKS[1:], commit="e")
    assert [c.kind for c in history.call().concerns] == ["missing"]


def test_a_night_is_judged_by_those_before_it(nights):
    history, add = nights
    older = add(red=("unit/rope",), commit="a")
    add(commit="b")
    assert history.call().action == "ignore"
    call = history.call(run=older.run)
    assert (call.action, call.new) == ("page", (ROPE,))


def test_a_run_taken_in_again_keeps_what_a_person_said(nights, tmp_path):
    history, add = nights
    night = add(red=("unit/rope",))
    history.decide(night.name, accepted=True, reason="known defect of the baseline")
    again = history.add(tmp_path / night.name)
    assert (again.accepted, again.reason) == (True, "known defect of the baseline")
    assert history.nights() == [again]


def test_runs_of_one_name_are_two_nights(nights, tmp_path):
    history, add = nights
    first = add()
    other = tmp_path / "elsewhere" / first.name
    write_verdicts(other, [verdict("unit/rope", used=0.7)])
    write_json(other / "provenance.json", {"date": f"{FIRST}T03:00", "commit": "c", "fingerprint": {"chip": "910B"}})
    second = history.add(other)
    assert [n.name for n in history.nights()] == [first.name] * 2 and first.run != second.run
    with pytest.raises(InputError, match=f"(?s)several nights have this name.*{second.run}"):
        history.decide(first.name, accepted=True, reason="why")
    history.decide(second.run, accepted=False, reason="why")
    assert [n.counts for n in history.nights()] == [True, False]


def test_errors_page_and_inconclusive_nights_warn(nights):
    history, add = nights
    add(red=("unit/rope",), outcome=Outcome.ERROR)
    assert history.call().action == "page"
    add(red=("unit/router",), outcome=Outcome.INCONCLUSIVE, commit="b")
    assert history.call().action == "warn"


def test_quarantine_keeps_a_check_out_of_the_call_and_ends(nights):
    history, add = nights
    add(red=("unit/rope",))
    today = date(2026, 2, 1)
    history.quarantine("unit/rope", until=today + timedelta(days=7), reason="driver bug 12, Wei", today=today)
    call = history.call(today=today)
    assert (call.action, call.quarantined, call.new) == ("ignore", (ROPE,), ())
    assert history.call(today=today + timedelta(days=8)).action == "page"
    for until, reason in ((today, "why"), (today + timedelta(days=31), "why"), (today + timedelta(days=1), " ")):
        with pytest.raises(InputError, match="a quarantine"):
            history.quarantine("unit/rope", until=until, reason=reason, today=today)


def test_another_verdict_on_the_same_stack_is_flaky_and_never_green(nights):
    history, add = nights
    add(red=("unit/router",))
    add()
    call = history.call()
    assert call.action == "warn"
    (concern,) = call.concerns
    assert concern.kind == "flaky" and concern.check.startswith("unit/router")
    add(commit="another")
    assert history.call().concerns == ()


def test_other_packages_are_another_stack(nights):
    history, add = nights
    add(red=("unit/router",), packages={"torch": "2.7.1"})
    add(packages={"torch": "2.8.0"})
    assert history.call().concerns == ()


def test_a_check_that_stopped_running_is_missed(nights):
    history, add = nights
    add()
    add(checks=CHECKS[:2])
    (concern,) = history.call().concerns
    assert (concern.kind, concern.check) == ("missing", "e2e/curve.dapo [torch on npu]")
    assert history.call().action == "warn"


def test_a_check_that_is_skipped_is_missed_and_one_that_never_ran_is_not(nights):
    history, add = nights
    absent, present = verdict("unit/mla", Outcome.UNAVAILABLE), verdict("unit/mla")
    add(more=[absent])
    assert add(more=[absent]).outcome == "pass" and history.call().concerns == ()
    add(more=[present])
    add(more=[absent])
    (concern,) = history.call().concerns
    assert (concern.kind, concern.check) == ("missing", "unit/mla [torch on npu]")
    assert concern.detail == "ran the night before and is skipped or unavailable this night"
    assert history.call().action == "warn"


def test_what_a_night_did_not_come_to_is_nothing_that_ran(nights):
    history, add = nights
    lost = verdict("night/dapo", Outcome.ERROR, subject="night")
    add(more=[lost])
    add()
    assert history.call().concerns == ()
    add(more=[verdict("night/dapo", subject="night")])
    add(more=[lost])
    assert history.call().concerns == ()  # it is an error by itself
    add()
    (concern,) = history.call().concerns
    assert (concern.kind, concern.check) == ("missing", "night/dapo [night on npu]")
    assert concern.detail == "ran 2 nights ago and not this night"


def small_noise(number: int) -> float:
    return 0.4 + 0.01 * ((number * 7) % 5 - 2)


def test_a_slow_rise_of_the_budget_is_drift_before_anything_fails(nights):
    history, add = nights
    for number in range(24):
        add(used={"unit/rope": small_noise(number), "unit/router": small_noise(number + 3)}, commit=f"c{number}")
    assert history.call().concerns == ()
    for number in range(12):
        add(
            used={"unit/rope": small_noise(number) + 0.004 * number, "unit/router": small_noise(number)},
            commit=f"d{number}",
        )
    (concern,) = history.call().concerns
    assert concern.kind == "drift" and concern.check.startswith("unit/rope")
    assert history.call().action == "warn"


def test_a_bad_night_is_no_drift_once_it_is_repaired(nights):
    history, add = nights
    for number in range(24):
        add(used={"unit/rope": small_noise(number), "unit/router": small_noise(number + 3)}, commit=f"c{number}")
    add(used={"unit/rope": 1.5}, red=("unit/rope",), commit="bad")
    assert any(c.kind == "drift" and c.check == ROPE for c in history.call().concerns)
    add(used={"unit/rope": small_noise(1), "unit/router": small_noise(2)}, commit="repaired")
    assert history.call().concerns == ()


def test_drift_that_went_away_alarms_no_longer(nights):
    history, add = nights
    for number in range(24):
        add(used={"unit/rope": small_noise(number)}, commit=f"c{number}")
    add(used={"unit/rope": 0.6}, commit="high")
    assert [c.kind for c in history.call().concerns] == ["drift"]
    for number in range(20):
        add(used={"unit/rope": 0.38}, commit=f"d{number}")
    assert history.call().concerns == ()


def test_drift_is_watched_metric_by_metric(nights):
    """A small metric that rises is not hidden below a larger one that does not."""
    history, add = nights

    def two(small: float) -> list[Verdict]:
        measures = tuple(Measure(name=n, value=v, bound=1.0) for n, v in (("large", 0.9), ("small", small)))
        return [dataclasses.replace(verdict("unit/mla"), measures=measures)]

    for number in range(20):
        add(commit=f"c{number}", more=two(small_noise(number) / 2))
    assert history.call().concerns == ()
    for number in range(10):
        add(commit=f"d{number}", more=two(small_noise(number) / 2 + 0.05))
    (concern,) = history.call().concerns
    assert (concern.kind, concern.check) == ("drift", "unit/mla [torch on npu]")
    assert concern.detail.startswith("small: budget used rose from 20% to ")


def test_what_repeats_to_the_bit_may_rise_by_a_thousandth_and_not_by_a_tenth(nights):
    history, add = nights
    for number in range(12):
        add(used={"unit/rope": 0.4}, commit=f"c{number}")
    add(used={"unit/rope": 0.401}, commit="d")
    assert history.call().concerns == ()
    add(used={"unit/rope": 0.5}, commit="e")
    assert [c.detail[:40] for c in history.call().concerns] == ["relative_l2: budget used rose from 40% t"]


def test_a_person_who_accepts_drift_takes_it_as_the_new_normal(nights):
    history, add = nights
    for number in range(12):
        add(used={"unit/rope": small_noise(number)}, commit=f"c{number}")
    higher = [add(used={"unit/rope": 0.3 + small_noise(number)}, commit=f"d{number}") for number in range(3)]
    assert [c.kind for c in history.call().concerns] == ["drift"]
    history.decide(higher[0].run, accepted=True, reason="the fused kernel came, the error is that of its order")
    assert history.call().concerns == ()
    for number in range(12):
        add(used={"unit/rope": 0.3 + small_noise(number)}, commit=f"e{number}")
    assert history.call().concerns == ()
    add(used={"unit/rope": 0.95}, commit="f")
    assert [c.kind for c in history.call().concerns] == ["drift"]


def test_independent_nights_alarm_no_more_often_than_the_watch_promises():
    """100 series that only vary: how many of them alarm within 90 nights, held to the promised rate."""
    draws = portable_normal((100, 110), seed=5, stream="nights").tolist()
    about = {"day": "", "commit": "", "chip": "", "stack": "", "outcome": "pass", "accepted": None}
    nights = [Night(run=str(i), **about) for i in range(110)]

    def alarms(series: list[float], alarm: float) -> bool:
        values = {str(i): 0.5 + value / 20 for i, value in enumerate(series)}
        return any(drift(values, nights[: last + 1], two_sided=False, alarm=alarm) for last in range(20, 110, 10))

    # Each series alarms once in 900 nights at the design rate; more than 3 σ of the count above that is another rate.
    expected = 100 * (1 - math.exp(-90 / 900))
    assert sum(alarms(series, CUSUM_ALARM) for series in draws) <= expected + 3 * math.sqrt(expected)
    shifted = [[v + 3 * (i > 50) for i, v in enumerate(series)] for series in draws]
    assert sum(alarms(series, CUSUM_ALARM) for series in shifted) == len(draws)
    assert not any(alarms(series, CUSUM_ALARM + math.log(len(draws))) for series in draws)


def test_curves_that_nothing_bounds_are_watched_on_both_sides(nights):
    history, add = nights

    def curve(value: float) -> list[Verdict]:
        return [dataclasses.replace(verdict("dapo/metrics"), measures=(Measure(name="actor/entropy", value=value),))]

    for number in range(20):
        add(commit=f"c{number}", more=curve(1 + small_noise(number)))
    assert history.call().concerns == ()
    add(commit="low", more=curve(1.0))
    (concern,) = history.call().concerns
    assert concern.kind == "drift" and concern.detail.startswith("actor/entropy: moved from 1.4 to 1: CUSUM")


def test_a_metric_that_loses_its_bound_begins_anew(nights):
    history, add = nights

    def entropy(value: float, bound: float | None) -> list[Verdict]:
        measures = (Measure(name="actor/entropy", value=value, bound=bound),)
        return [dataclasses.replace(verdict("dapo/metrics"), measures=measures)]

    for number in range(20):
        add(commit=f"c{number}", more=entropy(small_noise(number), 1.0))
    add(commit="first without", more=entropy(3.0, None))
    assert history.call().concerns == ()
    for number in range(20):
        add(commit=f"d{number}", more=entropy(3 + small_noise(number), None))
    add(commit="low", more=entropy(1.0, None))
    assert [c.detail[:27] for c in history.call().concerns] == ["actor/entropy: moved from 3"]


def test_rejected_nights_do_not_calibrate(nights):
    history, add = nights
    for number in range(9):
        add(used={"unit/rope": small_noise(number)}, commit=f"c{number}")
    strange = add(red=("unit/rope",), commit="x")
    history.decide(strange.run, accepted=True, reason="known defect of the baseline")
    assert [n.counts for n in history.nights()][-1] is True
    history.decide(strange.run, accepted=False, reason="the node was overheated")
    assert history.nights()[-1].counts is False and history.nights()[-1].reason == "the node was overheated"
    with pytest.raises(InputError, match="no such night"):
        history.decide("night-999", accepted=True, reason="why")
    with pytest.raises(InputError, match="has a reason"):
        history.decide(strange.run, accepted=True, reason="")


def test_false_alarms_are_counted_over_accepted_nights_only(nights):
    history, add = nights
    for number in range(40):
        night = add(red=("e2e/curve.dapo",) if number % 10 == 0 else (), commit=f"c{number}")
        if number % 10 == 0:
            history.decide(night.run, accepted=True, reason="the next run of it was green")
    rates = {rate.check: rate for rate in history.rates()}
    assert (rates["e2e/curve.dapo"].nights, rates["e2e/curve.dapo"].alarms) == (30, 3)
    assert rates["e2e/curve.dapo"].design == 0.01 and rates["unit/rope"].design is None
    assert rates["unit/rope"].observed == 0.0


def test_a_night_is_one_alarm_however_many_subjects_were_red(nights):
    history, add = nights
    red = [verdict("unit/rope", Outcome.ERROR, subject=s) for s in ("vllm", "megatron")]
    night = add(commit="a", more=red)
    history.decide(night.run, accepted=True, reason="the next run of it was green")
    add(commit="b", more=[verdict("unit/rope", subject="vllm")])
    rate = next(rate for rate in history.rates() if rate.check == "unit/rope")
    assert (rate.nights, rate.alarms) == (2, 1)


def test_a_night_without_provenance_or_verdicts_is_refused(nights, tmp_path):
    history, _ = nights
    write_verdicts(tmp_path / "bare", [verdict("unit/rope")])
    with pytest.raises(InputError, match="provenance.json"):
        history.add(tmp_path / "bare")
    write_verdicts(tmp_path / "empty", [])
    with pytest.raises(InputError, match="no verdict"):
        history.add(tmp_path / "empty")
    assert history.nights() == []


def test_a_check_stays_missing_until_a_person_accepts_that(nights):
    history, add = nights
    add()
    add(checks=CHECKS[:2])
    last = add(checks=CHECKS[:2])
    (concern,) = history.call().concerns
    assert (concern.kind, concern.detail) == ("missing", "ran 2 nights ago and not this night")
    history.decide(last.run, accepted=True, reason="the check was renamed")
    assert history.call().concerns == ()
    add(checks=CHECKS[:2])
    assert history.call().action == "ignore"


def test_what_an_error_kept_from_running_is_told_once(nights):
    history, add = nights
    add(commit="a")
    add(checks=(), commit="b", more=[verdict("night/dapo", Outcome.ERROR)])
    (concern,) = [c for c in history.call().concerns if c.kind == "missing"]
    assert concern.check == "3 checks" and concern.detail.startswith("did not run this night, in which 1 were errors")


def test_a_failure_is_known_across_a_night_that_did_not_run_it(nights):
    history, add = nights
    add(red=("unit/rope",), commit="a")
    add(checks=CHECKS[1:], commit="b")
    add(red=("unit/rope",), commit="c")
    assert (history.call().new, history.call().known) == ((), (ROPE,))
    add(commit="d")
    add(red=("unit/rope",), commit="e")
    assert history.call().new == (ROPE,)


def test_errors_and_dirty_commits_make_nothing_flaky(nights):
    history, add = nights
    add(red=("unit/router",), outcome=Outcome.ERROR)
    add()
    assert history.call().concerns == ()
    add(red=("unit/router",), commit="c0ffee-dirty")
    add(commit="c0ffee-dirty")
    assert history.call().concerns == ()


def test_a_resumed_night_is_one_night(nights, tmp_path):
    history, _ = nights
    run = tmp_path / "night"
    for outcome in (Outcome.ERROR, Outcome.PASS):
        write_verdicts(run, [verdict("unit/rope", outcome)])
        about = {"date": f"{FIRST}T02:00", "commit": "c", "fingerprint": {"chip": "910B"}, "night": "1f2e3d4c"}
        write_json(run / "provenance.json", about)
        history.add(run)
    (only,) = history.nights()
    assert (only.run, only.outcome) == (f"night@{FIRST}-1f2e3d4c", "pass")
    other = dataclasses.replace(only, run=f"night@{FIRST}-5b6a7988")
    assert only.among([only]) == "night" and only.among([only, other]) == f"night@{FIRST}-1f2e3d4c"


def test_nights_of_one_name_are_told_apart_all_at_once(nights):
    history, add = nights
    first, second = add(), add()
    twin = dataclasses.replace(second, run=f"{second.name}@{FIRST}-5b6a7988")
    for among in ([first], [first, second], [first, second, twin], [second, second], []):
        assert told_apart(among) == {n.run: n.among(among) for n in among}
    assert told_apart([first, second, twin]) == {first.run: first.name, second.run: second.run, twin.run: twin.run}


@pytest.mark.parametrize("asked", [("list",), ("show", "unit/rope")])
def test_a_table_of_nights_looks_at_each_a_fixed_number_of_times(nights, monkeypatch, asked):
    history, add = nights
    looks, name = [], Night.name.fget
    monkeypatch.setattr(Night, "name", property(lambda night: looks.append(night.run) or name(night)))

    def looked() -> int:
        looks.clear()
        shown = CliRunner().invoke(app, ["history", *asked, "--history", str(history.path)])
        assert shown.exit_code == 0, shown.output
        return len(looks)

    counts = []
    for _ in range(2):
        for _ in range(4):
            add()
        counts.append(looked())
    assert 0 < counts[0] and counts[1] == 2 * counts[0]


def test_no_pass_hides_a_failure_of_the_same_name(nights):
    history, add = nights
    add(more=[verdict("unit/mla", Outcome.FAIL), verdict("unit/mla", Outcome.PASS)])
    assert [outcome for _, outcome, _ in history.series("unit/mla")] == ["fail"]


def test_alarms_nobody_has_spoken_on_are_counted_beside_the_rate(nights):
    history, add = nights
    for number in range(10):
        add(red=("e2e/curve.dapo",) if number in (4, 7) else (), commit=f"c{number}")
    rate = next(rate for rate in history.rates() if rate.check == "e2e/curve.dapo")
    assert (rate.nights, rate.alarms, rate.undecided, rate.chance) == (8, 0, 2, 1.0)
    for night in [n for n in history.nights() if n.outcome == "fail"]:
        history.decide(night.run, accepted=True, reason="the next run of it was green")
    rate = next(rate for rate in history.rates() if rate.check == "e2e/curve.dapo")
    assert (rate.nights, rate.alarms, rate.undecided) == (10, 2, 0)
    # P(X >= 2) of 10 nights at 1 %, by hand: 1 - 0.99^10 - 10 * 0.01 * 0.99^9; each of its operations rounds once.
    assert abs(rate.chance - (1 - 0.99**10 - 0.1 * 0.99**9)) <= 10 * math.ulp(1.0)


def test_a_quarantine_is_of_a_check_there_is_and_keeps_its_first_day(nights):
    history, add = nights
    failing = verdict("unit/rope", Outcome.FAIL, subject="vllm")
    add(red=("unit/rope",), more=[failing])
    today = date(2026, 2, 1)
    with pytest.raises(InputError, match=r"no night has such a check; expected unit/rope.*found unit/ropes"):
        history.quarantine("unit/ropes", until=today + timedelta(days=3), reason="why", today=today)
    for day in (today, today + timedelta(days=2)):
        history.quarantine(ROPE, until=day + timedelta(days=3), reason="driver bug 12, Wei", today=day)
    kept = history.quarantined(today=today + timedelta(days=4))
    assert kept == {ROPE: "driver bug 12, Wei (since 2026-02-01, until 2026-02-06)"}
    call = history.call(today=today + timedelta(days=4))
    assert (call.quarantined, call.new) == ((ROPE,), ("unit/rope [vllm on npu]",))


def test_a_history_of_the_first_schema_is_read_on(nights):
    history, add = nights
    for number in range(24):
        add(used={"unit/rope": small_noise(number)}, commit=f"c{number}")
    with sqlite3.connect(history.path) as connection:
        connection.execute("DROP TABLE measures")
        connection.execute("UPDATE about SET schema = 1")
    again = History(history.path)
    assert again.concerns() == []
    add(used={"unit/rope": 0.6}, commit="high")
    assert [c.kind for c in again.concerns()] == ["drift"]


def test_a_killed_writer_leaves_whole_nights(nights, monkeypatch, tmp_path):
    history, add = nights
    add()
    with pytest.raises(KeyboardInterrupt), history._open() as connection:
        connection.execute("DELETE FROM nights")
        raise KeyboardInterrupt
    assert len(history.nights()) == 1


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("this is no database, but it is long enough to look at" * 40)
    with pytest.raises(InputError, match="cannot be read"):
        History(tmp_path / "text")
    History(tmp_path / "old")
    with sqlite3.connect(tmp_path / "old") as connection:
        connection.execute("UPDATE about SET schema = 99")
    with pytest.raises(InputError, match="(?s)another schema.*99"):
        History(tmp_path / "old")


def test_the_commands(nights, tmp_path):
    history, add = nights
    add(commit="a")
    run = add(red=("unit/rope",), commit="b").name
    file = ["--history", str(history.path)]

    def call(*arguments: str):
        return CliRunner().invoke(app, ["history", *arguments, *file])

    paged = call("add", str(tmp_path / run))
    assert paged.exit_code == 1 and paged.output.startswith(f"PAGE  {run} ") and f"new: {ROPE}" in paged.output
    assert call("list").exit_code == 0 and run in call("list").output
    assert [row["outcome"] for row in json.loads(call("show", "unit/rope", "--json").output)] == ["pass", "fail"]
    assert any(row["check"] == "unit/rope" for row in json.loads(call("rates", "--json").output))
    assert call("decide", run, "--accept", "--reason", "known").exit_code == 0
    soon = str(date.today() + timedelta(days=3))
    assert call("quarantine", "unit/rope", "--until", soon, "--reason", "known").exit_code == 0
    ignored = call("add", str(tmp_path / run))
    said = f"quarantine: unit/rope: known (since {date.today()}, until {soon})"
    assert ignored.exit_code == 0 and said in ignored.output
    assert "not decided" in call("rates").output
    missing = CliRunner().invoke(app, ["history", "list", "--history", str(tmp_path / "none")])
    assert isinstance(missing.exception, InputError)
