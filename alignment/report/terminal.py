"""A run on the terminal: one short table, then each finding in full."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from alignment.numerics.verdict import Measure, Outcome, Verdict

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.ERROR: "bold red",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.UNAVAILABLE: "dim",
}
# The order in which a row of several checks takes the outcome of its worst member.
GRAVITY = [Outcome.FAIL, Outcome.ERROR, Outcome.INCONCLUSIVE, Outcome.UNAVAILABLE, Outcome.PASS]


def headline(verdicts: Iterable[Verdict]) -> str:
    """One line: how many checks said what."""
    verdicts = list(verdicts)
    counts = {o: sum(v.outcome is o for v in verdicts) for o in GRAVITY}
    said = ", ".join(f"{n} {outcome.value}" for outcome, n in counts.items() if n)
    if counts[Outcome.FAIL]:
        word = "MISALIGNED"
    elif counts[Outcome.ERROR]:
        word = "NOT CARRIED OUT"
    elif counts[Outcome.INCONCLUSIVE]:
        word = "NOT SHOWN TO BE ALIGNED"
    else:
        word = "ALIGNED" if counts[Outcome.PASS] else "NOT CARRIED OUT"
    return f"{word}: {said or 'no check was carried out'}"


def percent_of_budget(measure: Measure | None) -> str:
    """How much of its budget the worst measure used, for people."""
    if measure is None or measure.used is None:
        return ""
    if math.isnan(measure.value):
        return "NaN"
    if math.isinf(measure.used):
        return "exact: differs" if not measure.bound else "infinite"
    if not measure.bound:
        return "exact"
    return f"{100 * measure.used:.0f} %" if measure.used < 10 else f"{measure.used:.3g} times"


def explain(verdict: Verdict) -> str:
    """A finding in full: what, where, how far, against which baseline, what to run next."""
    lines = [f"{verdict.outcome.value.upper()}  {verdict.check}  [{verdict.subject} on {verdict.device}, {verdict.stage}]"]
    lines.append(f"  what      {verdict.reason}")
    if verdict.where is not None:
        lines.append(f"  where     {verdict.where}")
    worst = verdict.worst
    if worst is not None:
        used = percent_of_budget(worst)
        found = f"{worst.value:.6g} {worst.unit}".rstrip()
        lines.append(f"  how far   {worst.name} = {found}, bound {worst.bound:.6g} ({used})")
        if worst.origin:
            lines.append(f"  bound     {worst.origin}")
    if verdict.baseline:
        lines.append(f"  baseline  {verdict.baseline}")
    if verdict.next_command:
        lines.append(f"  next      {verdict.next_command}")
    return "\n".join(lines)


def print_verdicts(console: Console, verdicts: Iterable[Verdict]) -> None:
    """The table (one row per group of checks), the findings, the headline."""
    from rich.markup import escape
    from rich.table import Table

    verdicts = list(verdicts)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (
        ("layer", "left"), ("check", "left"), ("subject", "left"), ("checks", "right"), ("verdict", "left"),
        ("budget used", "right"), ("worst quantity", "left"),
    ):
        table.add_column(column, justify=justify)
    for (layer, group, subject), members in grouped(verdicts).items():
        outcome = min((v.outcome for v in members), key=GRAVITY.index)
        judged = [v.worst for v in members if v.worst is not None]
        worst = max(judged, key=lambda m: math.inf if math.isnan(m.value) else m.used, default=None)
        table.add_row(
            layer, escape(group), escape(subject), str(len(members)),
            f"[{_STYLE[outcome]}]{outcome.value}[/]", percent_of_budget(worst), escape(worst.name) if worst else "",
        )
    console.print(table)
    for verdict in verdicts:
        if verdict.outcome in (Outcome.FAIL, Outcome.ERROR, Outcome.INCONCLUSIVE):
            console.print()
            console.print(explain(verdict), markup=False, highlight=False, soft_wrap=True)
    unavailable = {(v.subject, v.reason) for v in verdicts if v.outcome is Outcome.UNAVAILABLE}
    for subject, reason in sorted(unavailable):
        console.print(f"not run: {subject}: {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(headline(verdicts), markup=False, style="bold")


def grouped(verdicts: list[Verdict]) -> dict[tuple[str, str, str], list[Verdict]]:
    """Verdicts by layer, group of checks and subject: the rows of a table."""
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        name = verdict.check.removeprefix(f"{verdict.layer}/")
        # The name of a phase of a night is a whole one, dashes included.
        whole = name if verdict.subject == "night" else f"{verdict.stage}/"
        group = whole if name.startswith(whole) else ""
        group += re.split(r"[.-]", name[len(group):])[0]
        groups.setdefault((verdict.layer, group, verdict.subject), []).append(verdict)
    return groups
