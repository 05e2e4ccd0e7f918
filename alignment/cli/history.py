"""The nights."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated, Optional

import typer

from alignment.cli.options import HISTORY, JsonOption, console_on
from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED, MISALIGNED

history_app = typer.Typer(no_args_is_help=True, help="One record per night: calls, drift, false alarms, quarantine.")

FileOption = Annotated[Path, typer.Option("--history", help="The SQLite file of the nights.")]
CheckArgument = Annotated[str, typer.Argument(help="Id of a check, as the verdicts spell it.")]


@history_app.command("add")
def add(
    run: Annotated[Path, typer.Argument(help="The directory of a finished alignment run.")],
    history: FileOption = HISTORY,
    as_json: JsonOption = False,
) -> None:
    """Take a night in and say what to do about that night: page (exit 1), warn or ignore (exit 0)."""
    from alignment.report.history import History

    nights = History(history)
    night = nights.add(run)
    call = nights.call(run=night.run)
    if as_json:
        print(json.dumps({"night": {**asdict(night), "name": night.name}, **asdict(call)}, indent=1))
    else:
        print(f"{call.action.upper()}  {night.name}  {night.day}  {night.outcome}  {night.chip}  {night.commit[:12]}")
        for title, checks in (("new", call.new), ("known", call.known), ("in quarantine", call.quarantined)):
            for check in checks:
                print(f"  {title}: {check}")
        for check, reason in nights.quarantined().items():
            print(f"  quarantine: {check}: {reason}")
        for concern in call.concerns:
            print(f"  {concern.kind}: {concern.check}: {concern.detail}")
    raise typer.Exit(MISALIGNED if call.action == "page" else ALIGNED)


@history_app.command("list")
def list_nights(history: FileOption = HISTORY, as_json: JsonOption = False) -> None:
    """Every night, oldest first."""
    from alignment.report.history import History, told_apart

    nights = _existing(history, History).nights()
    if as_json:
        print(json.dumps([{**asdict(n), "name": n.name, "counts": n.counts} for n in nights], indent=1))
        return
    names = told_apart(nights)
    _table(
        ("day", "run", "verdict", "counts", "chip", "commit", "said"),
        [
            (n.day, names[n.run], n.outcome, "yes" if n.counts else "no", n.chip, n.commit[:12], n.reason)
            for n in nights
        ],
    )


@history_app.command("show")
def show(
    check: CheckArgument,
    subject: Annotated[Optional[str], typer.Option(help="Only this implementation.")] = None,
    history: FileOption = HISTORY,
    as_json: JsonOption = False,
) -> None:
    """One check, night by night: verdict and share of the budget."""
    from alignment.report.history import History, told_apart

    series = _existing(history, History).series(check, subject=subject)
    if as_json:
        rows = [{"run": n.run, "name": n.name, "day": n.day, "outcome": o, "used": u} for n, o, u in series]
        print(json.dumps(rows, indent=1))
        return
    names = told_apart(n for n, _, _ in series)
    _table(
        ("day", "run", "verdict", "budget used"),
        [(n.day, names[n.run], o, "" if u is None else f"{u:.0%}") for n, o, u in series],
    )


@history_app.command("rates")
def rates(history: FileOption = HISTORY, as_json: JsonOption = False) -> None:
    """False alarms of each check over the last 30 accepted nights, beside the rate it is made for."""
    from alignment.report.history import History

    found = _existing(history, History).rates()
    if as_json:
        print(json.dumps([rate.to_dict() for rate in found], indent=1))
        return
    _table(
        ("check", "accepted nights", "alarms", "observed", "design", "not decided"),
        [
            (
                r.check,
                str(r.nights),
                str(r.alarms),
                f"{r.observed:.1%}",
                "none stated" if r.design is None else f"{r.design:.1%}",
                str(r.undecided),
            )
            for r in found
        ],
    )


@history_app.command("decide")
def decide(
    run: Annotated[str, typer.Argument(help="The night, by the name of its run.")],
    accept: Annotated[bool, typer.Option("--accept/--reject", help="Whether drift is measured against this night.")],
    reason: Annotated[str, typer.Option(help="Why.")],
    history: FileOption = HISTORY,
    as_json: JsonOption = False,
) -> None:
    """A person's word on a night: it counts, or it does not."""
    from alignment.report.history import History

    nights = _existing(history, History)
    nights.decide(run, accepted=accept, reason=reason)
    name, decision = nights.find(run).name, "accepted" if accept else "rejected"
    print(json.dumps({"name": name, "decision": decision, "reason": reason}) if as_json else f"{name}: {decision}")


@history_app.command("quarantine")
def quarantine(
    check: CheckArgument,
    until: Annotated[str, typer.Option(help="The last day, at most 30 days from now: 2027-01-31.")],
    reason: Annotated[str, typer.Option(help="Why, and who works on it.")],
    history: FileOption = HISTORY,
    as_json: JsonOption = False,
) -> None:
    """Take a check out of the night's call for a while; it still runs and is still shown."""
    from alignment.report.history import History

    try:
        day = date.fromisoformat(until)
    except ValueError:
        raise InputError("not a day", where="--until", expected="YYYY-MM-DD", found=until) from None
    _existing(history, History).quarantine(check, until=day, reason=reason)
    if as_json:
        print(json.dumps({"check": check, "until": day.isoformat(), "reason": reason}))
    else:
        print(f"{check}: in quarantine until {day}")


def _existing(path: Path, history_type):
    if not path.is_file():
        raise InputError("there is no history", where=path, next_step="alignment history add RUN")
    return history_type(path)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    console_on(False).print(table)
