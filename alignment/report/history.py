"""One record per night: what every check said and how much of its budget it used, in one SQLite file.

SQLite and not DuckDB or Parquet: nights are appended one at a time by jobs that may be killed, which is what its
transactions are for; it comes with Python, so the file opens on the machine at hand; and ten years of nights are a few
million rows, which it reads in a second.

A night counts as *accepted* when a person said so, or when nothing in it was red; drift is watched against accepted
nights only. A check that changes its verdict on an unchanged stack and commit is *flaky*, which is a finding and never
green.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path

from alignment.errors import InputError
from alignment.files import read_json
from alignment.numerics.curves import ALPHA, CUSUM_ALARM, CUSUM_HISTORY, cusum
from alignment.numerics.verdict import Outcome, Verdict
from alignment.report.run_directory import PROVENANCE, STACK, VERDICTS, read_verdicts

SCHEMA = 1
WINDOW = 30
"""Accepted nights over which the false alarms of a check are counted."""

_RED = (Outcome.FAIL, Outcome.ERROR)
_ALARMS = {o.value for o in (Outcome.FAIL, Outcome.ERROR, Outcome.INCONCLUSIVE)}
_TABLES = """
CREATE TABLE IF NOT EXISTS about (schema INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS nights (
    run TEXT PRIMARY KEY, day TEXT NOT NULL, "commit" TEXT NOT NULL, chip TEXT NOT NULL, stack TEXT NOT NULL,
    outcome TEXT NOT NULL, accepted INTEGER, reason TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS verdicts (
    run TEXT NOT NULL REFERENCES nights(run) ON DELETE CASCADE, "check" TEXT NOT NULL, subject TEXT NOT NULL,
    device TEXT NOT NULL, outcome TEXT NOT NULL, metric TEXT NOT NULL, used REAL,
    PRIMARY KEY (run, "check", subject, device));
CREATE TABLE IF NOT EXISTS quarantine (
    "check" TEXT PRIMARY KEY, until TEXT NOT NULL, reason TEXT NOT NULL, since TEXT NOT NULL);
"""


@dataclass(frozen=True, kw_only=True)
class Night:
    """One night: ``accepted`` is what a person said, None where nobody did.

    ``run`` tells nights apart: the directory's name, the day and a digest of what the run said, since two workspaces
    may give their runs the same name. ``name`` is the directory's alone.
    """

    run: str
    day: str
    commit: str
    chip: str
    stack: str
    outcome: str
    accepted: bool | None
    reason: str = ""

    @property
    def name(self) -> str:
        """The directory of the run."""
        return self.run.rpartition("@")[0] or self.run

    @property
    def counts(self) -> bool:
        """Whether drift is measured against it."""
        return self.outcome == Outcome.PASS.value if self.accepted is None else self.accepted


@dataclass(frozen=True, kw_only=True)
class Rate:
    """In how many accepted nights a check was red (each a false alarm), beside the rate it is made for.

    A night is one alarm however many subjects of the check failed in it; an error and an inconclusive verdict are
    alarms too, since somebody looks into them.
    """

    check: str
    nights: int
    alarms: int
    design: float | None

    @property
    def observed(self) -> float:
        return self.alarms / self.nights if self.nights else math.nan

    def to_dict(self) -> dict:
        return {**asdict(self), "observed": self.observed if self.nights else None}


@dataclass(frozen=True, kw_only=True)
class Concern:
    """Something the last night shows only beside the nights before it."""

    kind: str
    check: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """What to do about a night (``page`` somebody, ``warn`` or ``ignore``) and why; known findings apart from new ones.

    A finding is a check with its subject and device: ``unit/rope [torch on npu]``.
    """

    action: str
    new: tuple[str, ...]
    known: tuple[str, ...]
    quarantined: tuple[str, ...]
    concerns: tuple[Concern, ...]


class History:
    """The nights of one file.

    Args:
        path: made where it does not exist.

    Raises:
        InputError: not a history, or one of another schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise InputError("a history is a file", where=path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as connection:
            connection.executescript(_TABLES)
            found = connection.execute("SELECT schema FROM about").fetchone()
            if found is None:
                connection.execute("INSERT INTO about VALUES (?)", (SCHEMA,))
            elif found[0] != SCHEMA:
                raise InputError("a history of another schema", where=path, expected=SCHEMA, found=found[0])

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction: everything of it is written, or nothing."""
        connection = sqlite3.connect(self.path, timeout=30.0)
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            with connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise InputError(f"the history cannot be read or written ({error})", where=self.path) from error
        finally:
            connection.close()

    def add(self, run: Path, *, day: date | None = None) -> Night:
        """Takes in a finished run of ``alignment run``; of a run that is there already a person's decision is kept.

        Raises:
            InputError: the directory holds no verdicts, or no provenance.
        """
        run = Path(run)
        verdicts = read_verdicts(run)
        if not verdicts:
            raise InputError("the run has no verdict: it says nothing about the night", where=run)
        about = read_json(run / PROVENANCE)
        if not isinstance(about, Mapping) or not about.get("commit"):
            raise InputError(
                "the run does not say what made it", where=run / PROVENANCE, expected="commit and fingerprint"
            )
        day_name = str(day or str(about.get("date", ""))[:10] or date.today())
        night = Night(
            run=f"{run.name}@{day_name}-{_digest(run)}",
            day=day_name,
            commit=str(about["commit"]),
            chip=str((about.get("fingerprint") or {}).get("chip", "")),
            stack=_stack(run, about),
            outcome=_overall(verdicts).value,
            accepted=None,
        )
        with self._open() as connection:
            connection.execute(
                'INSERT INTO nights (run, day, "commit", chip, stack, outcome, accepted) VALUES (?,?,?,?,?,?,NULL) '
                'ON CONFLICT (run) DO UPDATE SET "commit" = excluded."commit", chip = excluded.chip, '
                "stack = excluded.stack, outcome = excluded.outcome",
                (night.run, night.day, night.commit, night.chip, night.stack, night.outcome),
            )
            connection.execute("DELETE FROM verdicts WHERE run = ?", (night.run,))
            connection.executemany(
                "INSERT OR REPLACE INTO verdicts VALUES (?,?,?,?,?,?,?)",
                [(night.run, v.check, v.subject, v.device, v.outcome.value, *_used(v)) for v in verdicts],
            )
        return next(kept for kept in self.nights() if kept.run == night.run)

    def nights(self) -> list[Night]:
        """All of them, oldest first."""
        with self._open() as connection:
            rows = connection.execute(
                'SELECT run, day, "commit", chip, stack, outcome, accepted, reason FROM nights ORDER BY day, rowid'
            ).fetchall()
        names = ("run", "day", "commit", "chip", "stack", "outcome", "accepted", "reason")
        return [
            Night(**{**dict(zip(names, row)), "accepted": None if row[6] is None else bool(row[6])}) for row in rows
        ]

    def find(self, run: str) -> Night:
        """The night of ``run``, by what tells it apart or by its name where no other night has that name.

        Raises:
            InputError: no such night, or several.
        """
        nights = self.nights()
        found = [n for n in nights if n.run == run] or [n for n in nights if n.name == run]
        if not found:
            raise InputError("there is no such night", where=run, next_step="alignment history list")
        if len(found) > 1:
            raise InputError(
                "several nights have this name", where=run, expected="one of " + ", ".join(n.run for n in found)
            )
        return found[0]

    def decide(self, run: str, *, accepted: bool, reason: str) -> None:
        """A person's word on a night; ``run`` as in :meth:`find`.

        Raises:
            InputError: no such night, several, or no reason.
        """
        if not reason.strip():
            raise InputError("a decision has a reason", where="--reason", expected="why")
        key = self.find(run).run
        with self._open() as connection:
            connection.execute(
                "UPDATE nights SET accepted = ?, reason = ? WHERE run = ?", (int(accepted), reason, key)
            )

    def quarantine(self, check: str, *, until: date, reason: str, today: date | None = None) -> None:
        """Takes a check out of the night's call until a day: it still runs and is still shown.

        Raises:
            InputError: no reason, a day that is past, or further away than 30 days.
        """
        today = today or date.today()
        if not reason.strip():
            raise InputError("a quarantine has a reason", where="--reason", expected="why, and who works on it")
        if not today < until <= today + timedelta(days=30):
            raise InputError(
                "a quarantine ends",
                where="--until",
                expected=f"{today + timedelta(days=1)} … {today + timedelta(days=30)}",
                found=until,
            )
        with self._open() as connection:
            row = (check, str(until), reason, str(today))
            connection.execute("INSERT OR REPLACE INTO quarantine VALUES (?,?,?,?)", row)

    def quarantined(self, *, today: date | None = None) -> dict[str, str]:
        """Checks in quarantine today, with their reasons."""
        with self._open() as connection:
            rows = connection.execute('SELECT "check", until, reason FROM quarantine').fetchall()
        return {
            check: f"{reason} (until {until})" for check, until, reason in rows if until >= str(today or date.today())
        }

    def series(self, check: str, *, subject: str | None = None) -> list[tuple[Night, str, float | None]]:
        """Outcome and share of the budget of a check, night by night.

        Raises:
            InputError: no night has such a check.
        """
        nights = {night.run: night for night in self.nights()}
        with self._open() as connection:
            rows = connection.execute(
                'SELECT run, outcome, used FROM verdicts WHERE "check" = ? AND (? IS NULL OR subject = ?)',
                (check, subject, subject),
            ).fetchall()
        if not rows:
            raise InputError("no night has such a check", where=check, next_step="alignment history rates lists them")
        order = {run: place for place, run in enumerate(nights)}
        return [(nights[run], outcome, used) for run, outcome, used in sorted(rows, key=lambda row: order[row[0]])]

    def rates(self) -> list[Rate]:
        """Every check's alarms over the last 30 accepted nights."""
        counted = {night.run for night in [night for night in self.nights() if night.counts][-WINDOW:]}
        with self._open() as connection:
            rows = connection.execute('SELECT run, "check", outcome FROM verdicts').fetchall()
        held: dict[str, dict[str, bool]] = {}
        for run, check, outcome in rows:
            if run in counted and outcome != Outcome.UNAVAILABLE.value:
                of_check = held.setdefault(check, {})
                of_check[run] = of_check.get(run, False) or outcome in _ALARMS
        return [
            Rate(
                check=check,
                nights=len(alarms),
                alarms=sum(alarms.values()),
                design=ALPHA if check.startswith("e2e/curve") else None,
            )
            for check, alarms in sorted(held.items())
        ]

    def _until(self, run: str | None) -> list[Night]:
        """The nights up to ``run`` (the last one by default), oldest first."""
        nights = self.nights()
        if run is None or not nights:
            return nights
        key = self.find(run).run
        return nights[: 1 + next(place for place, night in enumerate(nights) if night.run == key)]

    def concerns(self, *, run: str | None = None) -> list[Concern]:
        """What a night (the last by default) shows beside the ones before it on the same chip: drift, flakiness, checks
        that stopped running."""
        nights = self._until(run)
        if not nights:
            return []
        last = nights[-1]
        nights = [night for night in nights if night.chip == last.chip]
        found = []
        with self._open() as connection:
            rows = connection.execute('SELECT run, "check", subject, device, outcome, used FROM verdicts').fetchall()
        by_key: dict[tuple, dict[str, tuple[str, float | None]]] = {}
        for of_run, check, subject, device, outcome, used in rows:
            by_key.setdefault((check, subject, device), {})[of_run] = (outcome, used)
        for key, told in sorted(by_key.items()):
            name = _name(*key)
            if last.run not in told:
                # Only what the night before could say on the same chip can be missing.
                if len(nights) > 1 and nights[-2].run in told:
                    found.append(Concern(kind="missing", check=name, detail="ran the night before and not this night"))
                continue
            found += _flaky(name, told, nights)
            found += _drift(name, told, nights)
        return found

    def call(self, *, run: str | None = None, today: date | None = None) -> Call:
        """What to do about a night, the last by default; what was red in the night before on the same chip is known.

        Raises:
            InputError: there is no night.
        """
        nights = self._until(run)
        if not nights:
            raise InputError("there is no night to judge", where=self.path, next_step="alignment history add RUN")
        last = nights[-1]
        before = [night.run for night in nights[:-1] if night.chip == last.chip][-1:]
        with self._open() as connection:
            rows = connection.execute('SELECT run, "check", subject, device, outcome FROM verdicts').fetchall()
        red = {o.value for o in _RED}
        tonight = sorted(tuple(key) for of_run, *key, outcome in rows if of_run == last.run and outcome in red)
        yesterday = {tuple(key) for of_run, *key, outcome in rows if of_run in before and outcome in red}
        kept = self.quarantined(today=today)
        out = [key for key in tonight if key[0] in kept]
        new = [key for key in tonight if key[0] not in kept and key not in yesterday]
        known = [key for key in tonight if key[0] not in kept and key in yesterday]
        concerns = tuple(c for c in self.concerns(run=last.run) if c.check.partition(" [")[0] not in kept)
        unsure = last.outcome in (Outcome.INCONCLUSIVE.value, Outcome.UNAVAILABLE.value)
        action = "page" if new or last.outcome == Outcome.ERROR.value and not (known or out) else "ignore"
        if action == "ignore" and (known or concerns or unsure):
            action = "warn"
        named = [tuple(_name(*key) for key in keys) for keys in (new, known, out)]
        return Call(action=action, new=named[0], known=named[1], quarantined=named[2], concerns=concerns)


def _name(check: str, subject: str, device: str) -> str:
    return f"{check} [{subject} on {device}]"


def _flaky(name: str, told: Mapping[str, tuple[str, float | None]], nights: Sequence[Night]) -> list[Concern]:
    """Another verdict on the same stack, commit and chip."""
    last = nights[-1]
    alike = [
        n for n in nights[:-1] if (n.stack, n.commit, n.chip) == (last.stack, last.commit, last.chip) and n.run in told
    ]
    others = [n for n in alike if told[n.run][0] != told[last.run][0]]
    if not others:
        return []
    other = others[-1]
    detail = f"{told[last.run][0]} tonight, {told[other.run][0]} in {other.name} of the same commit, stack and chip"
    return [Concern(kind="flaky", check=name, detail=detail)]


def _drift(
    name: str,
    told: Mapping[str, tuple[str, float | None]],
    nights: Sequence[Night],
) -> list[Concern]:
    """A CUSUM of the share of the budget since the accepted nights that calibrate it (Page 1954, Biometrika 41)."""
    # A night that does not count is none of the drift; the last is judged whatever it said.
    last = nights[-1]
    series = [told[n.run][1] for n in nights[:-1] if n.counts and told.get(n.run, ("", None))[1] is not None]
    if told[last.run][1] is None or len(series) < CUSUM_HISTORY:
        return []
    calibration = series[: max(CUSUM_HISTORY, len(series) // 2)]
    since = [*series[len(calibration) :], told[last.run][1]]
    try:
        # More of the budget is worse: the sum grows with falling deficits, so the sign is turned.
        sums = cusum([-v for v in calibration], [-v for v in since])
    except InputError:
        return []  # no spread, or values that are not finite: the check itself says so
    if sums[-1] < CUSUM_ALARM:
        return []
    middle, now = sum(calibration) / len(calibration), since[-1]
    detail = f"budget used rose from {middle:.0%} to {now:.0%}: CUSUM {sums[-1]:.1f} σ, alarm at {CUSUM_ALARM:g}"
    return [Concern(kind="drift", check=name, detail=detail)]


def _overall(verdicts: Sequence[Verdict]) -> Outcome:
    outcomes = {v.outcome for v in verdicts}
    for outcome in (Outcome.FAIL, Outcome.ERROR, Outcome.INCONCLUSIVE, Outcome.PASS):
        if outcome in outcomes:
            return outcome
    return Outcome.UNAVAILABLE


def _digest(run: Path) -> str:
    """Eight digits of what the run said and of what made it."""
    return hashlib.sha256((run / VERDICTS).read_bytes() + (run / PROVENANCE).read_bytes()).hexdigest()[:8]


def _used(verdict: Verdict) -> tuple[str, float | None]:
    worst = verdict.worst
    if worst is None or worst.used is None or not math.isfinite(worst.used):
        return (worst.name if worst else "", None)
    return worst.name, worst.used


def _stack(run: Path, about: Mapping) -> str:
    """What tells two stacks apart: the frozen one without its name and date, else every package."""
    if (run / STACK).is_file():
        from alignment.bisect.stack import load_stack

        return load_stack(run / STACK).digest
    return json.dumps(about.get("packages", {}), sort_keys=True)
