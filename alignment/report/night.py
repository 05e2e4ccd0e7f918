"""What a night says: one outcome per phase and one for the whole, with the stage at which it went wrong.

=============  ====  ================================================================================================
outcome        exit  meaning
=============  ====  ================================================================================================
pass           0     every phase was carried out and nothing is misaligned
unavailable    0     of a phase: what it needs is not here and the row does not require it; of a night it is ``error``
fail           1     something new is misaligned
inconclusive   1     a statistical check could not decide
error          3     a phase was not carried out: killed, lost node, full disk, missing or damaged evidence
flaky          4     a check said two things about the same code and stack; never green
known          4     only failures are left that somebody already works on; never green
=============  ====  ================================================================================================

Exit code 2 is a wrong call: nothing was run. A failure outweighs an error, since what was found misaligned stays found;
an error outweighs everything else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json, write_atomically
from alignment.report.run_directory import finite

SCHEMA = 1
NIGHT, BEGUN, PHASE, LOCK = "night.json", "begun.json", "phase.json", ".lock"
NOT_RUN = "not run"
"""How the cause of a phase begins that the night did not come to."""

TOLD = 8
"""Concerns of one kind that a terminal shows."""

ORDER = ("fail", "error", "inconclusive", "flaky", "known", "unavailable", "pass")
"""Outcomes, the gravest first."""

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 1, "error": 3, "unavailable": 3, "flaky": 4, "known": 4}
HEADLINES = {
    "pass": "ALIGNED", "fail": "MISALIGNED", "inconclusive": "NOT SHOWN TO BE ALIGNED", "error": "ERROR",
    "unavailable": "ERROR", "flaky": "FLAKY", "known": "KNOWN FAILURES",
}  # fmt: skip
STAGES = ("", "environment", "known", "new")
"""What a phase that is not green failed at: the machines, something known, or something new."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not green. ``known`` says who works on it and until when; ``expired`` that this is over."""

    check: str
    outcome: str
    stage: str
    reason: str
    subject: str = ""
    device: str = ""
    known: str = ""
    expired: str = ""


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """What became of one phase.

    ``cause`` is one line on why it is not green. ``attempt`` counts runs of the phase in this night, ``kept`` says that
    it was finished before the night was resumed. ``folders`` are what it left, relative to the night, ``nodes`` how its
    command ended where it ran on several.
    """

    name: str
    outcome: str
    stage: str = ""
    cause: str = ""
    where: str = "head"
    exit_code: int | None = None
    ended: str = ""
    seconds: float = 0.0
    attempt: int = 1
    kept: bool = False
    lost_nodes: tuple[str, ...] = ()
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    verdicts: tuple[Mapping[str, Any], ...] = ()
    folders: tuple[str, ...] = ()
    trainings: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()

    @property
    def counted(self) -> str:
        """How much of what it did, for people."""
        return ", ".join(f"{n} {what}" for what, n in self.counts.items())

    @property
    def again(self) -> str:
        """Whether it is of an earlier run of the night, or of a later one."""
        return "kept" if self.kept else f"attempt {self.attempt}" if self.attempt > 1 else ""

    def to_dict(self) -> dict[str, Any]:
        return finite(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: object = PHASE) -> PhaseRecord:
        """The inverse of :meth:`to_dict`.

        Raises:
            InputError: not a record of this version.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or set(data) - names or data.get("outcome") not in ORDER:
            raise InputError("not the record of a phase", where=where, expected=", ".join(sorted(names)))
        try:
            lists = {k: tuple(v) for k, v in data.items() if isinstance(v, list)}
            findings = tuple(Finding(**finding) for finding in data.get("findings", ()))
            record = cls(**{**data, **lists, "findings": findings})
            nothing = [what for what, count in record.counts.items() if not count > 0]
        except (TypeError, AttributeError) as error:
            raise InputError(f"not the record of a phase ({error})", where=where) from None
        if record.outcome == "pass" and nothing:
            problem = f"{record.name} is said to have passed with no {nothing[0]}"
            raise InputError(problem, where=where, expected="at least one", found=record.counts[nothing[0]])
        return record


@dataclass(frozen=True, kw_only=True)
class NightRecord:
    """The verdict of a night: what ``night.json`` holds and ``alignment nightly show`` tells."""

    identity: str
    row: str
    chip: str
    outcome: str
    action: str
    cause: str = ""
    began: str = ""
    ended: str = ""
    commit: str = ""
    phases: tuple[PhaseRecord, ...] = ()
    concerns: tuple[Mapping[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    page: str = ""
    history: str = ""
    resume: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def line(self) -> str:
        """The night in one line."""
        green = sum(phase.outcome == "pass" for phase in self.phases)
        text = f"{HEADLINES[self.outcome]}  {self.row}  {self.began[:10]}  [{self.action}]  "
        text += f"{green} of {len(self.phases)} phases green"
        if self.cause:
            text += f"; {self.cause}"
        if self.concerns:
            kinds = ", ".join(dict.fromkeys(c["kind"] for c in self.concerns))
            text += f"; beside earlier nights: {kinds} ({len(self.concerns)})"
        return text

    def to_dict(self) -> dict[str, Any]:
        data = {**asdict(self), "phases": [phase.to_dict() for phase in self.phases]}
        for phase in data["phases"]:
            del phase["verdicts"]  # they are in verdicts.json, and in phase.json beside what they were read from
        return finite({"schema": SCHEMA, "exit_code": self.exit_code, "line": self.line, **data})

    @classmethod
    def from_dict(cls, data: Any, *, where: object = NIGHT) -> NightRecord:
        """The inverse of :meth:`to_dict`.

        Raises:
            InputError: not the record of a night, or of another schema.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise InputError("not the record of a night", where=where, expected=f"schema {SCHEMA}", found=found)
        names = {f.name for f in fields(cls)}
        known = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in names}
        try:
            phases = tuple(PhaseRecord.from_dict(phase, where=where) for phase in data["phases"])
            record = cls(**{**known, "phases": phases})
        except (KeyError, TypeError) as error:
            raise InputError(f"not the record of a night ({error})", where=where) from None
        if record.outcome not in ORDER:
            raise InputError("no such outcome", where=where, expected=", ".join(ORDER), found=record.outcome)
        told = [phase.outcome for phase in phases if phase.outcome not in ("pass", "unavailable")]
        if record.outcome == "pass" and (told or "pass" not in {phase.outcome for phase in phases}):
            raise InputError(
                "the night is said to have passed, and its phases have not", where=where,
                expected="a phase that passed",
                found=", ".join(f"{phase.name} {phase.outcome}" for phase in phases) or "no phase",
            )  # fmt: skip
        return record


def gravest(outcomes: Iterable[str]) -> str:
    """The outcome of several; nothing at all is an error, and so is a night in which nothing was available."""
    told = set(outcomes)
    worst = next((outcome for outcome in ORDER if outcome in told), "error")
    return "pass" if worst == "unavailable" and "pass" in told else worst


def cause_of(phases: Sequence[PhaseRecord]) -> str:
    """Which phases are not green, gravest first, and why the first is not."""
    bad = sorted(
        (p for p in phases if p.outcome not in ("pass", "unavailable")), key=lambda p: ORDER.index(p.outcome)
    )
    if not bad:
        return ""
    gravest_of = [p for p in bad if p.outcome == bad[0].outcome]
    first = next((p for p in gravest_of if not p.cause.startswith(NOT_RUN)), bad[0])
    text = f"{first.name}: {first.stage}: {first.cause}"
    others = [p for p in bad if p is not first]
    also = ", ".join(f"{p.name} {p.outcome}" for p in others if not p.cause.startswith(NOT_RUN))
    idle = ", ".join(p.name for p in others if p.cause.startswith(NOT_RUN))
    return text + (f" (also {also})" if also else "") + (f"; {NOT_RUN}: {idle}" if idle else "")


def write_night(record: NightRecord, folder: Path, *, elsewhere: Sequence[Path] | None = None) -> Path | None:
    """Writes ``night.json`` whole: in the folder of the night, or where that is full in the first other place that is
    not. Where none is left the record goes to standard error: a verdict is never lost.

    Returns:
        Where it lies now, None where it is only on standard error.
    """
    text = json.dumps(record.to_dict(), sort_keys=True, indent=1, allow_nan=False) + "\n"
    places = [Path(folder) / NIGHT]
    others = [Path(tempfile.gettempdir()), Path("/dev/shm"), Path.cwd()] if elsewhere is None else elsewhere
    places += [place / f"night-{record.row}-{record.identity}.json" for place in others]
    failures = []
    for path in places:
        try:
            write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))
        except OSError as error:
            failures.append(f"{path}: {error.strerror or error}")
            continue
        for failure in failures:
            print(f"the verdict was not written: {failure}", file=sys.stderr)
        if failures:
            print(f"the verdict lies in {path}", file=sys.stderr)
        return path
    print("the verdict could not be written anywhere; it follows:", *failures, sep="\n", file=sys.stderr)
    print(text, file=sys.stderr, flush=True)
    return None


def read_night(folder: Path) -> NightRecord:
    """The verdict of a night; of a night whose driver was killed, what can be said without it.

    Raises:
        InputError: no night was ever begun there, or its record is damaged.
    """
    folder = Path(folder)
    if (folder / NIGHT).is_file():
        return NightRecord.from_dict(read_json(folder / NIGHT), where=folder / NIGHT)
    if not (folder / BEGUN).is_file():
        raise InputError("no night was run here", where=folder, expected=f"{NIGHT} or {BEGUN}")
    begun = read_json(folder / BEGUN)
    phases = []
    for name in begun["phases"]:
        record = read_phase(folder / name)
        phases.append(record or PhaseRecord(
            name=name, outcome="error", stage="environment",
            cause="the driver of the night ended while it ran" if (folder / name).is_dir() else NOT_RUN,
        ))  # fmt: skip
    missing = next((p.name for p in phases if p.outcome == "error"), "the verdict")
    cause = f"the driver of the night was killed before its verdict, at {missing}; resume with --resume"
    resume = begun.get("resume", "")
    if _at_work(folder):
        cause, resume = f"the night is still running, at {missing}", ""
    return NightRecord(
        identity=begun["identity"], row=begun["row"], chip=begun["chip"], began=begun["began"], outcome="error",
        action="page", phases=tuple(phases), cause=cause, resume=resume,
    )  # fmt: skip


def _at_work(folder: Path) -> bool:
    """Whether a driver holds the night."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def read_phase(folder: Path) -> PhaseRecord | None:
    """The record of a finished phase; None where there is none that can be read."""
    with contextlib.suppress(InputError, OSError):
        return PhaseRecord.from_dict(read_json(folder / PHASE))
    return None


def told(record: NightRecord) -> list[str]:
    """A night for a terminal: its line, one line per phase, what is not green, what to look at."""
    lines = [record.line, ""]
    width = max((len(p.name) for p in record.phases), default=0)
    for phase in record.phases:
        why = phase.cause or phase.counted
        again = f" ({phase.again})" if phase.again else ""
        lines.append(f"  {phase.name:<{width}}  {phase.outcome:<12} {phase.seconds:7.1f} s{again}  {why}")
    for stage in reversed(STAGES):
        for phase in record.phases:
            for finding in phase.findings:
                if finding.stage == stage:
                    note = finding.known or (finding.expired and f"was known until it expired: {finding.expired}")
                    lines.append(f"  {stage}: {finding.check}: {finding.reason}" + (f" [{note}]" if note else ""))
    for kind in dict.fromkeys(c["kind"] for c in record.concerns):
        of_kind = [c for c in record.concerns if c["kind"] == kind]
        lines += [f"  {kind}: {c['check']}: {c['detail']}" for c in of_kind[:TOLD]]
        if len(of_kind) > TOLD:
            lines.append(f"  {kind}: and {len(of_kind) - TOLD} more, on the page and in {NIGHT}")
    lines += [f"  remark: {remark}" for remark in record.remarks]
    if record.page:
        lines.append(f"  page: {record.page}")
    if record.resume and "error" in (record.outcome, *(phase.outcome for phase in record.phases)):
        lines.append(f"  next: {record.resume}")
    return lines


def utc_now() -> str:
    """Now, to the second."""
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def in_words(error: BaseException) -> str:
    """An error in one line; one of the system with its file."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or ''}: {os.strerror(error.errno)}".lstrip(": ")
    return " ".join(str(error).split())
