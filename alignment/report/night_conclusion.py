"""How a night ends: its verdict, first on the disk and then in the history and on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from alignment.errors import InputError
from alignment.report.night import EXIT_CODES, NightRecord, cause_of, gravest, in_words, write_night
from alignment.report.night_judgement import graver, verdicts_of
from alignment.report.night_setting import PROVENANCE_PHASE, NightSetting
from alignment.report.run_directory import PROVENANCE, write_verdicts


def conclude(
    night: NightRecord,
    setting: NightSetting,
    *,
    interrupted: Sequence[str],
    remember: Callable[[NightRecord], NightRecord],
) -> NightRecord:
    """Judges a night whose phases have ended, and writes it.

    Args:
        night: what is known of it but the verdict.
        interrupted: the signals that came.
        remember: takes it into the history, see :func:`remembered`.
    """
    out = setting.out
    night = _judged(night, setting, interrupted)
    write_night(_not_yet(night, setting), out)
    try:
        write_verdicts(out, verdicts_of(night.phases, setting.row, resume=setting.again))
        night = remember(night)
    except Exception as error:  # whatever it is, the verdict stands
        night = _with_problem(night, setting, f"the night was not taken into the history: {in_words(error)}")
    try:
        from alignment.report.night_page import write_night_page

        page = write_night_page(night, out, baselines=setting.baselines)
        night = replace(night, page=page.name)
    except Exception as error:
        night = _with_problem(night, setting, f"the page was not written: {in_words(error)}")
    write_night(night, out)
    return night


def remembered(night: NightRecord, setting: NightSetting) -> NightRecord:
    """Takes the night into the history; what it shows beside the nights before it may turn green into flaky.

    Raises:
        InputError: the night has no provenance, or the history cannot take it.
    """
    if setting.history is None:
        return night
    if not (setting.out / PROVENANCE).is_file():
        raise InputError("the night has no provenance", where=setting.out / PROVENANCE)
    from alignment.report.history import History

    history = History(setting.history)
    taken = history.add(setting.out)
    concerns = tuple(
        {"kind": c.kind, "check": c.check, "detail": c.detail} for c in history.call(run=taken.run).concerns
    )
    if not concerns:
        return night
    flaky = [c for c in concerns if c["kind"] == "flaky"]
    outcome = gravest((night.outcome, "flaky")) if flaky else night.outcome
    cause = night.cause or (f"flaky: {flaky[0]['check']}: {flaky[0]['detail']}" if flaky else "")
    night = replace(night, outcome=outcome, cause=cause, concerns=concerns)
    return replace(night, action=graver("warn", setting.matrix.action(night.exit_code)))


def _judged(night: NightRecord, setting: NightSetting, interrupted: Sequence[str]) -> NightRecord:
    records = night.phases
    outcome = gravest(record.outcome for record in records if record.name != PROVENANCE_PHASE)
    if any(record.name == PROVENANCE_PHASE and record.outcome == "error" for record in records):
        outcome = gravest((outcome, "error"))
    if outcome == "unavailable":
        outcome = "error"
    cause = cause_of(records)
    if interrupted:
        cause = f"interrupted by {interrupted[0]}; {cause}"
        outcome = gravest((outcome, "error"))
    if not cause and outcome == "error":
        why = "; ".join(f"{r.name}: {r.cause}" for r in records if r.cause)
        cause = f"environment: nothing could be run: {why}"
    night = replace(night, outcome=outcome, cause=cause)
    return replace(night, action=setting.matrix.action(night.exit_code))


def _not_yet(night: NightRecord, setting: NightSetting) -> NightRecord:
    """What stands on the disk until the night is held against those before it: who is killed now left no green."""
    if night.outcome != "pass":
        return night
    cause = "environment: the driver ended before it took the night into the history; resume with --resume"
    return replace(night, outcome="error", cause=cause, action=setting.matrix.action(EXIT_CODES["error"]))


def _with_problem(night: NightRecord, setting: NightSetting, problem: str) -> NightRecord:
    """A night that cannot be kept is not green, and says so."""
    outcome = gravest((night.outcome, "error"))
    if outcome != night.outcome or not night.cause:
        cause = f"environment: {problem}" + (f"; {night.cause}" if night.cause else "")
        night = replace(night, outcome=outcome, cause=cause)
    night = replace(night, remarks=(*night.remarks, problem))
    return replace(night, action=graver(night.action, setting.matrix.action(night.exit_code)))
