"""One record per night: what every check said and how much of its budget it used, in one SQLite file.

SQLite and not DuckDB or Parquet: nights are appended one at a time by jobs that may be killed, which is what its
transactions are for; it comes with Python, so the file opens on the machine at hand; and ten years of nights are a few
million rows, which it reads in a second.

A night counts as *accepted* when a person said so, or when nothing in it was red; drift is watched against accepted
nights only, metric by metric. A check that changes its verdict on an unchanged stack and commit is *flaky*, which is a
finding and never green. What stopped running is missed until a person accepts a night without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path

from alignment.bisect.keys import nearest
from alignment.errors import InputError
from alignment.files import read_json
from alignment.numerics.verdict import Outcome, Verdict
from alignment.report.night_watch import NOT_RUN, Concern, drift, flaky, missing, name_of
from alignment.report.run_directory import PROVENANCE, STACK, VERDICTS, read_verdicts
from alignment.report.terminal import GRAVITY

SCHEMA = 2
WINDOW = 30
"""Accepted nights over which the false alarms of a check are counted."""

HORIZON = 400
"""Nights of one chip that a night is held against."""

WATCHED = (
    "reward/before_filter", "acc/before_filter", "response_length/mean", "actor/entropy", "actor/grad_norm",
    "student/loss", "training/rollout_log_probs_abs_diff_mean",
)  # fmt: skip
"""Metrics that nothing bounds and that are watched on both sides: the first curves of a page."""

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
CREATE TABLE IF NOT EXISTS measures (
    run TEXT NOT NULL REFERENCES nights(run) ON DELETE CASCADE, "check" TEXT NOT NULL, subject TEXT NOT NULL,
    device TEXT NOT NULL, metric TEXT NOT NULL, kind TEXT NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (run, "check", subject, device, metric));
CREATE TABLE IF NOT EXISTS quarantine (
    "check" TEXT PRIMARY KEY, until TEXT NOT NULL, reason TEXT NOT NULL, since TEXT NOT NULL);
"""


@dataclass(frozen=True, kw_only=True)
class Night:
    """One night: ``accepted`` is what a person said, None where nobody did.

    ``run`` tells nights apart: the directory's name, the day and what the night calls itself (a digest of what it said
    where it does not), since two workspaces may give their runs the same name. ``name`` is the directory's alone.
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

    def among(self, nights: Sequence[Night]) -> str:
        """Its name, or what tells it apart where another of ``nights`` has the name: every night of a pipeline does."""
        return self.run if any(n.name == self.name and n.run != self.run for n in nights) else self.name

    @property
    def counts(self) -> bool:
        """Whether drift is measured against it."""
        return self.outcome == Outcome.PASS.value if self.accepted is None else self.accepted


def told_apart(nights: Iterable[Night]) -> dict[str, str]:
    """:meth:`Night.among` of each of ``nights`` by its ``run``, counted once for all of them."""
    names = {night.run: night.name for night in nights}
    bearers = Counter(names.values())
    return {run: name if bearers[name] == 1 else run for run, name in names.items()}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """In how many accepted nights a check was red (each a false alarm), beside the rate it is made for.

    A night is one alarm however many subjects of the check failed in it; an error and an inconclusive verdict are
    alarms too, since somebody looks into them. ``undecided`` are alarms since the first of these nights on which no
    person has said a word yet: each of them may be one more. ``design`` is None where none is stated.
    """

    check: str
    nights: int
    alarms: int
    design: float | None
    undecided: int = 0

    @property
    def observed(self) -> float:
        return self.alarms / self.nights if self.nights else math.nan

    @property
    def chance(self) -> float | None:
        """How likely so many alarms or more are at the design rate: small for a check that alarms too often."""
        if self.design is None or not self.nights:
            return None
        terms = (
            math.comb(self.nights, k) * self.design**k * (1 - self.design) ** (self.nights - k)
            for k in range(self.alarms)
        )
        return max(0.0, 1.0 - math.fsum(terms))

    def to_dict(self) -> dict:
        return {**asdict(self), "observed": self.observed if self.nights else None, "chance": self.chance}


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
            elif found[0] == 1:  # which kept the worst metric of a check alone
                connection.execute(
                    'INSERT OR IGNORE INTO measures SELECT run, "check", subject, device, metric, \'used\', used '
                    "FROM verdicts WHERE used IS NOT NULL"
                )
                connection.execute("UPDATE about SET schema = ?", (SCHEMA,))
            elif found[0] != SCHEMA:
                raise InputError("a history of another schema", where=path, expected=SCHEMA, found=found[0])

    @contextlib.contextmanager
    def _open(self, taken: Path | None = None) -> Iterator[sqlite3.Connection]:
        """One transaction: everything of it is written, or nothing; ``taken`` is the run that is taken in."""
        connection = sqlite3.connect(self.path, timeout=30.0)
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            with connection:
                yield connection
        except (sqlite3.DatabaseError, OverflowError, UnicodeEncodeError) as error:
            place = self.path if taken is None else f"{taken}, into {self.path}"
            raise InputError(f"the history cannot be read or written ({error})", where=place) from error
        finally:
            connection.close()

    def add(self, run: Path, *, day: date | None = None) -> Night:
        """Takes in a finished run of ``alignment run`` or a night; of one that is there already a person's decision is
        kept, and a night that was resumed stays one night.

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
            run=f"{run.name}@{day_name}-{about.get('night') or _digest(run)}",
            day=day_name,
            commit=str(about["commit"]),
            chip=str((about.get("fingerprint") or {}).get("chip", "")),
            stack=_stack(run, about),
            outcome=_overall(verdicts).value,
            accepted=None,
        )
        with self._open(run) as connection:
            connection.execute(
                'INSERT INTO nights (run, day, "commit", chip, stack, outcome, accepted) VALUES (?,?,?,?,?,?,NULL) '
                'ON CONFLICT (run) DO UPDATE SET "commit" = excluded."commit", chip = excluded.chip, '
                "stack = excluded.stack, outcome = excluded.outcome",
                (night.run, night.day, night.commit, night.chip, night.stack, night.outcome),
            )
            for table in ("verdicts", "measures"):
                connection.execute(f"DELETE FROM {table} WHERE run = ?", (night.run,))
            # The worst of one name comes last and stays: no pass may replace a failure.
            for v in sorted(verdicts, key=lambda v: GRAVITY.index(v.outcome), reverse=True):
                key = (night.run, v.check, v.subject, v.device)
                connection.execute(
                    "INSERT OR REPLACE INTO verdicts VALUES (?,?,?,?,?,?,?)", (*key, v.outcome.value, *_used(v))
                )
                connection.executemany(
                    "INSERT OR REPLACE INTO measures VALUES (?,?,?,?,?,?,?)",
                    [(*key, name, kind, value) for name, kind, value in _watched(v)],
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
        """Takes a check, or one finding of it (``check [subject on device]``), out of the night's call until a day: it
        still runs and is still shown. A renewal keeps the day on which the quarantine began.

        Raises:
            InputError: no reason, a day that is past or further away than 30 days, or a check that no night has.
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
            keys = connection.execute('SELECT DISTINCT "check", subject, device FROM verdicts').fetchall()
            names = {key[0] for key in keys} | {name_of(*key) for key in keys}
            if check not in names:
                known = nearest(check, sorted(names))
                raise InputError("no night has such a check", where="quarantine", expected=known, found=check)
            kept = connection.execute(
                'SELECT since FROM quarantine WHERE "check" = ? AND until >= ?', (check, str(today))
            ).fetchone()
            row = (check, str(until), reason, kept[0] if kept else str(today))
            connection.execute("INSERT OR REPLACE INTO quarantine VALUES (?,?,?,?)", row)

    def quarantined(self, *, today: date | None = None) -> dict[str, str]:
        """Checks in quarantine today, with their reasons."""
        with self._open() as connection:
            rows = connection.execute('SELECT "check", until, reason, since FROM quarantine').fetchall()
        return {
            check: f"{reason} (since {since}, until {until})"
            for check, until, reason, since in rows
            if until >= str(today or date.today())
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
        """Every check's alarms over the last 30 accepted nights in which it said anything."""
        from alignment.numerics.curves import ALPHA

        nights = self.nights()
        with self._open() as connection:
            rows = connection.execute('SELECT run, "check", outcome FROM verdicts').fetchall()
        held: dict[str, dict[str, bool]] = {}
        for run, check, outcome in rows:
            if outcome != Outcome.UNAVAILABLE.value:
                of_check = held.setdefault(check, {})
                of_check[run] = of_check.get(run, False) or outcome in _ALARMS
        rates = []
        for check, alarms in sorted(held.items()):
            ran = [night for night in nights if night.run in alarms]
            counted = [night for night in ran if night.counts][-WINDOW:]
            since = ran[ran.index(counted[0]) :] if counted else ran
            rates.append(Rate(
                check=check, nights=len(counted), alarms=sum(alarms[night.run] for night in counted),
                design=ALPHA if check.startswith("e2e/curve") else None,
                undecided=sum(alarms[night.run] for night in since if night.accepted is None and not night.counts),
            ))  # fmt: skip
        return rates

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
        nights = [night for night in nights if night.chip == nights[-1].chip][-HORIZON:]
        told, last = self._told(nights), nights[-1]
        found = []
        for key, of_check in sorted(told.items()):
            if last.run in of_check:
                found += flaky(name_of(*key), of_check, nights)
        return [*missing(told, nights), *found, *self._drifts(nights)]

    def _told(self, nights: Sequence[Night]) -> dict[tuple[str, str, str], dict[str, str]]:
        """Per check, subject and device what each of ``nights`` said."""
        runs = {night.run for night in nights}
        with self._open() as connection:
            rows = connection.execute('SELECT run, "check", subject, device, outcome FROM verdicts').fetchall()
        told: dict[tuple[str, str, str], dict[str, str]] = {}
        for run, check, subject, device, outcome in rows:
            if run in runs:
                told.setdefault((check, subject, device), {})[run] = outcome
        return told

    def _drifts(self, nights: Sequence[Night]) -> list[Concern]:
        """Metrics that drifted up to the last night, each watched on its own."""
        from alignment.numerics.curves import CUSUM_ALARM

        last, runs = nights[-1], {night.run for night in nights}
        with self._open() as connection:
            rows = connection.execute(
                'SELECT run, "check", subject, device, metric, kind, value FROM measures WHERE '
                '("check", subject, device, metric) IN '
                '(SELECT "check", subject, device, metric FROM measures WHERE run = ?)',
                (last.run,),
            ).fetchall()
        series: dict[tuple[str, ...], dict[str, float]] = {}
        for run, *key, value in rows:
            if run in runs:
                series.setdefault(tuple(key), {})[run] = value
        # A metric that was given a bound, or lost it, is another one from then on.
        series = {key: values for key, values in series.items() if last.run in values}
        # Thousands of metrics are watched every night; together they may alarm as rarely as one.
        alarm = CUSUM_ALARM + math.log(max(1, len(series)))
        found = []
        for (check, subject, device, metric, kind), values in sorted(series.items()):
            detail = drift(values, nights, two_sided=kind == "value", alarm=alarm)
            if detail:
                found.append(Concern(kind="drift", check=name_of(check, subject, device), detail=f"{metric}: {detail}"))
        return found

    def call(self, *, run: str | None = None, today: date | None = None) -> Call:
        """What to do about a night, the last by default.

        Known is what was red when it was last heard of on the same chip, be that some nights ago.

        Raises:
            InputError: there is no night.
        """
        nights = self._until(run)
        if not nights:
            raise InputError("there is no night to judge", where=self.path, next_step="alignment history add RUN")
        last, red = nights[-1], {o.value for o in _RED}
        nights = [night for night in nights if night.chip == last.chip][-HORIZON:]
        kept, told = self.quarantined(today=today), self._told(nights)
        new, known, out = [], [], []
        for key, of_check in sorted(told.items()):
            if of_check.get(last.run) not in red:
                continue
            if key[0] in kept or name_of(*key) in kept:
                out.append(name_of(*key))
                continue
            before = [of_check[n.run] for n in nights[:-1] if of_check.get(n.run, NOT_RUN) != NOT_RUN]
            (known if before and before[-1] in red else new).append(name_of(*key))
        concerns = tuple(
            c for c in self.concerns(run=last.run) if c.check not in kept and c.check.partition(" [")[0] not in kept
        )
        unsure = last.outcome in (Outcome.INCONCLUSIVE.value, Outcome.UNAVAILABLE.value)
        action = "page" if new or last.outcome == Outcome.ERROR.value and not (known or out) else "ignore"
        if action == "ignore" and (known or concerns or unsure):
            action = "warn"
        return Call(action=action, new=tuple(new), known=tuple(known), quarantined=tuple(out), concerns=concerns)


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


def _watched(verdict: Verdict) -> list[tuple[str, str, float]]:
    """(metric, kind, value) of what is watched for drift: uses of budgets, and curves that nothing bounds."""
    used = [(m.name, "used", m.used) for m in verdict.measures if m.used is not None and math.isfinite(m.used)]
    values = [
        (m.name, "value", m.value)
        for m in verdict.measures
        if m.bound is None and m.name in WATCHED and math.isfinite(m.value)
    ]
    return used + values


def _stack(run: Path, about: Mapping) -> str:
    """What tells two stacks apart: the frozen one without its name and date, else every package."""
    if (run / STACK).is_file():
        from alignment.bisect.stack import load_stack

        return load_stack(run / STACK).digest
    return json.dumps(about.get("packages", {}), sort_keys=True)
