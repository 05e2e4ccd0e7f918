"""From what a phase did and left to what it says: outcome, stage, cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from alignment.numerics.verdict import Outcome, Verdict
from alignment.report.night import Finding, PhaseRecord, gravest
from alignment.report.night_evidence import Case, Evidence, in_one, worst_of_each
from alignment.report.night_matrix import ACTIONS, KnownFailure, Row


def judge(record: PhaseRecord, *, problems: Sequence[str], findings: Sequence[Finding]) -> PhaseRecord:
    """The outcome of a phase from what went wrong with it and what it found."""
    problems = list(dict.fromkeys(problems))
    outcome = gravest(["pass", *(["error"] if problems else []), *(f.outcome for f in findings)])
    if outcome == "pass":
        return replace(record, findings=tuple(findings))
    worst = [f for f in findings if f.outcome == outcome]
    if worst:
        more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
        cause, stage = f"{worst[0].check}: {worst[0].reason}{more}", worst[0].stage
        if any(f.stage == "new" for f in worst):
            stage = "new"
    if problems and outcome == "error":
        cause, stage = "; ".join(problems), "environment"
    elif problems:
        cause += f"; and not carried out whole: {'; '.join(problems)}"
    return replace(record, outcome=outcome, stage=stage, cause=cause, findings=tuple(findings))


def findings_of(
    phase: str,
    evidence: Evidence,
    *,
    known: Sequence[KnownFailure] = (),
    quarantined: Mapping[str, str] | None = None,
    today: date | None = None,
) -> list[Finding]:
    """What is not green in a phase, each classified. An error is of the environment, whoever knows about it.

    The cases of a check are classified one by one, so that neither a flaky nor a known one hides a new failure of
    another; those that are classified alike are one finding.
    """
    today = today or date.today()
    found = []
    for verdict in evidence.verdicts:
        check = verdict.check if verdict.check.startswith(f"{phase}/") else f"{phase}/{verdict.check}"
        full = f"{verdict.check} [{verdict.subject} on {verdict.device}]"
        out = (quarantined or {}).get(verdict.check) or (quarantined or {}).get(full) or ""
        alike: dict[tuple[str, str, str, str], list[str]] = {}
        for case in evidence.cases.get(verdict.check) or [Case(outcome=verdict.outcome, reason=verdict.reason)]:
            if case.flaky or case.outcome not in (Outcome.PASS, Outcome.UNAVAILABLE):
                outcome, reason = ("flaky", case.flaky) if case.flaky else (case.outcome.value, case.reason)
                told = alike.setdefault(_classified(outcome, f"{check}: {reason}", known, out, today), [])
                told += [reason] if reason not in told else []
        found += [
            Finding(
                check=check, outcome=outcome, stage=stage, reason=in_one(reasons), subject=verdict.subject,
                device=verdict.device, known=note, expired=over,
            )
            for (outcome, stage, note, over), reasons in alike.items()
        ]  # fmt: skip
    return list(dict.fromkeys(found))


def _classified(
    outcome: str, line: str, known: Sequence[KnownFailure], quarantined: str, today: date
) -> tuple[str, str, str, str]:
    """Outcome, stage, who knows about it, and who did until it expired."""
    if outcome == "error":
        return outcome, "environment", "", ""
    entries = [entry for entry in known if entry.holds(line, today=entry.expires)]
    valid = [entry for entry in entries if entry.holds(line, today=today)]
    knows = "flaky" if outcome == "flaky" else "known"
    if valid:
        return knows, "known", f"{valid[0].owner}, until {valid[0].expires}: {valid[0].reason}", ""
    if quarantined:
        return knows, "known", f"in quarantine: {quarantined}", ""
    return outcome, "new", "", f"{entries[0].expires}, {entries[0].owner}" if entries else ""


def verdicts_of(records: Sequence[PhaseRecord], row: Row, *, resume: str) -> list[Verdict]:
    """Every verdict of the night, with one per phase on whether it was carried out at all; ``resume`` is the command
    that carries out what was not."""
    own = []
    for record in records:
        carried_out = record.outcome != "error"
        outcome = Outcome.UNAVAILABLE if record.outcome == "unavailable" else Outcome.PASS
        own.append(Verdict(
            check=f"night/{record.name}", layer="e2e", stage=record.name, subject="night", device=row.device,
            outcome=outcome if carried_out else Outcome.ERROR,
            reason=(record.counted or record.ended or "carried out") if carried_out else record.cause,
            next_command=None if carried_out else resume,
        ))  # fmt: skip
    return worst_of_each([*own, *(Verdict.from_dict(v) for record in records for v in record.verdicts)])


def not_carried_out(name: str, cause: str, **more: Any) -> PhaseRecord:
    """A phase of which nothing can be said."""
    return PhaseRecord(name=name, outcome="error", stage="environment", cause=cause, **more)


def worsened(record: PhaseRecord, problem: str) -> PhaseRecord:
    """``record`` with a further reason why it was not carried out."""
    outcome = gravest((record.outcome, "error"))
    stage = "environment" if outcome == "error" else record.stage
    return replace(record, outcome=outcome, stage=stage, cause="; ".join(filter(None, (record.cause, problem))))


def graver(*actions: str) -> str:
    """The one that asks most of people."""
    return max(actions, key=ACTIONS.index)
