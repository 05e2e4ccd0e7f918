"""Drives a night: phase after phase in processes of their own, and a verdict whatever happens to them.

While phases run the driver has loaded neither torch nor ray, holds no device and is connected to no cluster, so nothing
that a phase does to its machine takes it along. A signal ends the phase that runs, and the night says so; a full disk
costs what could not be written and never the verdict; a driver that was killed itself is continued with ``resume``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.report.night import (
    BEGUN,
    EXIT_CODES,
    LOCK,
    NIGHT,
    NOT_RUN,
    PHASE,
    SCHEMA,
    TOLD,
    NightRecord,
    PhaseRecord,
    cause_of,
    gravest,
    in_words,
    read_phase,
    utc_now,
    write_night,
)
from alignment.report.night_evidence import Evidence, gather_evidence, is_red, says
from alignment.report.night_judgement import (
    findings_of,
    graver,
    judge,
    not_carried_out,
    verdicts_of,
    worsened,
)
from alignment.report.night_matrix import STDERR, STDOUT, Matrix, Phase, Row
from alignment.report.night_nodes import LOST, TOKEN, Node, Watch, begin_store, read_nodes
from alignment.report.night_process import Ended, adopting, clear_up, run_command
from alignment.report.night_watch import names_its_code
from alignment.report.run_directory import PROVENANCE, STACK, finite, write_verdicts
from alignment.rl.forwarded import EVERY_CARD, forwarded, is_secret

PROVENANCE_PHASE = "provenance"
"""The first phase of every night: which code, which packages, which machine."""

CENSUS_SECONDS = 120.0
PROBE_SECONDS = 600.0
NODE_GRACE_SECONDS = 60.0
"""How long a phase may go on after a node was lost: long enough to say itself what it lost."""

OUTER_GRACE_SECONDS = 60.0
OWN = "_driver"
"""In the folder of a phase what the driver asked before it: the nodes, the devices. No host has a name like this."""

EARLIER = "night.earlier.json"
"""What a night said before it was resumed."""

_PROBE_BYTES = 1 << 16
_MARKER = "{folder of this node}"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class OtherCode(InputError):
    """A night is of one commit and of one set of packages: what is resumed with another is left as it is."""


@dataclass(frozen=True, kw_only=True)
class NightSetting:
    """What to drive. ``ray`` is the address of the cluster, ``history`` the file of the nights (None: none is kept),
    ``baselines`` the folder for the band behind the curves of the page."""

    matrix: Matrix
    row: Row
    out: Path
    ray: str | None = None
    history: Path | None = None
    baselines: Path | None = None
    resume: bool = False

    @property
    def uses_ray(self) -> bool:
        return any(phase.where != "head" for phase in self.matrix.phases_of(self.row))

    @property
    def again(self) -> str:
        """The command that goes on with this night, with absolute paths: who reads it may be in another folder."""
        words = ["alignment", "nightly", "run", str(self.matrix.path.absolute()), "--row", self.row.name]
        words += ["--out", str(self.out.absolute())]
        words += [] if self.ray is None else ["--ray-address", self.ray]
        words += ["--no-history"] if self.history is None else ["--history", str(self.history.absolute())]
        words += [] if self.baselines is None else ["--baseline", str(self.baselines.absolute())]
        return shlex.join([*words, "--resume"])


def run_night(
    setting: NightSetting,
    *,
    begin: Callable[[str, float], None] = lambda phase, minutes: None,
    tell: Callable[[str], None] = lambda line: None,
) -> NightRecord:
    """Runs the phases of a row in order and judges them; see :mod:`alignment.report.night`.

    Args:
        begin: gets the name of a phase that begins and the minutes it has.
        tell: gets one line when a phase has ended.

    Raises:
        InputError: the call is wrong, and nothing was run: a night lies there already, there is none to resume, it was
            begun with another matrix or code, another driver is at work, or the row needs a cluster.
    """
    _check(setting)
    with _lock(setting.out), _listening() as interrupted, adopting():
        return _Night(setting, interrupted=interrupted, begin=begin, tell=tell).run()


def _check(setting: NightSetting) -> None:
    row, out = setting.row, setting.out
    if PROVENANCE_PHASE in row.phases:
        raise InputError("every night begins with this phase", where=f"row {row.name}", found=PROVENANCE_PHASE)
    if setting.ray is None and (row.nodes > 1 or setting.uses_ray):
        raise InputError(
            "the row runs on a Ray cluster", where=f"row {row.name}", expected="--ray-address ADDRESS",
            found=f"{row.nodes} nodes, phases on the cluster: {setting.uses_ray}",
        )  # fmt: skip
    begun = (out / BEGUN).is_file() or (out / NIGHT).is_file()
    if setting.resume and not (out / BEGUN).is_file():
        raise InputError("there is no night to resume", where=out, next_step="run it without --resume")
    if begun and not setting.resume:
        raise InputError("a night lies here already", where=out, next_step="--resume, or another --out")
    if setting.resume:
        about, digest = read_json(out / BEGUN), setting.matrix.digest(row)
        if about.get("row") != row.name or about.get("digest") != digest:
            raise InputError(
                "the night was begun with another matrix", where=out / BEGUN, expected=f"{row.name} ({digest})",
                found=f"{about.get('row')} ({about.get('digest')})", next_step="begin a new night in another --out",
            )  # fmt: skip


@contextlib.contextmanager
def _lock(out: Path) -> Iterator[None]:
    """One driver per night."""
    handle = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        # A full disk is no reason to be silent: the night goes on, and says so.
        print(f"{out}: cannot be locked: {error.strerror}", file=sys.stderr)
    try:
        if handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError("another driver is at work on this night", where=out) from None
            except OSError as error:  # a store without locks
                print(f"{out}: cannot be locked: {error.strerror}", file=sys.stderr)
        yield
    finally:
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """The signals that came, in place of being ended by them."""
    came: list[str] = []
    # Who is told to ignore a signal (nohup) goes on doing so.
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {s: signal.signal(s, lambda number, _: came.append(signal.Signals(number).name)) for s in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Night:
    setting: NightSetting
    interrupted: list[str]
    begin: Callable[[str, float], None]
    tell: Callable[[str], None]
    identity: str = field(default_factory=lambda: secrets.token_hex(4))
    began: str = field(default_factory=utc_now)
    token: str = ""
    commit: str = ""
    packages: str = ""
    nodes: list[Node] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    quarantined: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> NightRecord:
        records: list[PhaseRecord] = []
        try:
            self._begin()
        except OSError as error:
            records.append(not_carried_out("begin", f"the night cannot write: {in_words(error)}"))
        records.append(self._guarded(PROVENANCE_PHASE, self._provenance))
        for phase in self.setting.matrix.phases_of(self.setting.row):
            self._say(self.begin, phase.name, phase.timeout_minutes)
            record = self._guarded(phase.name, lambda phase=phase: self._phase(phase))
            records.append(record)
            kept = " (kept)" if record.kept else ""
            ended = f"{phase.name}: {record.outcome}{kept} {record.seconds:.1f} s  {record.cause}"
            self._say(self.tell, ended.rstrip())
        return self._conclude(records)

    def _say(self, listener: Callable[..., None], *told: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever listened is gone; the night is not
            listener(*told)

    # --- the beginning -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        setting, out = self.setting, self.setting.out
        if setting.resume:
            about = read_json(out / BEGUN)
            self.identity, self.began, self.commit = about["identity"], about["began"], about.get("commit", "")
            self.packages = about.get("packages", "")
            # While it is resumed, and if it is killed then, nothing may say what it said before.
            (out / EARLIER).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (out / NIGHT).replace(out / EARLIER)
        with contextlib.suppress(InputError, OSError):
            if setting.history is not None and setting.history.is_file():
                from alignment.report.history import History

                self.quarantined = History(setting.history).quarantined()
        self._write_begun()
        self.token = begin_store(out)

    def _write_begun(self) -> None:
        row = self.setting.row
        write_json(self.setting.out / BEGUN, {
            "schema": SCHEMA, "identity": self.identity, "row": row.name, "chip": row.chip, "began": self.began,
            "digest": self.setting.matrix.digest(row), "phases": [PROVENANCE_PHASE, *row.phases], "commit": self.commit,
            "packages": self.packages, "resume": self.setting.again,
        })  # fmt: skip

    def _provenance(self) -> PhaseRecord:
        """Which code and packages: without them nobody can come back to the night."""
        out, row = self.setting.out, self.setting.row
        folder = out / PROVENANCE_PHASE
        stack = [str(row.stack)] if row.stack is not None else []
        argv = ["python", "-m", "alignment.report.night_machine", PROVENANCE_PHASE, str(folder), *stack]
        ended = self._here(argv, folder, PROBE_SECONDS)
        record = PhaseRecord(
            name=PROVENANCE_PHASE, outcome="pass", seconds=ended.seconds, exit_code=ended.code, ended=ended.text,
            folders=(PROVENANCE_PHASE,),
        )  # fmt: skip
        if ended.cut or ended.code != 0:
            why = f"{ended.text}: {_last_line(folder / STDERR)}"
            return replace(record, outcome="error", stage="environment", cause=f"provenance is missing: {why}")
        about = read_json(folder / PROVENANCE)
        commit = str(about.get("commit", ""))
        if self.commit and commit != self.commit:
            raise OtherCode(
                "the night was begun with other code", where=out / BEGUN, expected=self.commit, found=commit,
                next_step="begin a new night in another --out",
            )  # fmt: skip
        packages = _digest(about.get("packages"))
        if self.packages and packages != self.packages:
            raise OtherCode(
                "the night was begun with other packages", where=out / BEGUN, expected=self.packages,
                found=f"{packages}{_changed(out / PROVENANCE, about)}", next_step="begin a new night in another --out",
            )  # fmt: skip
        self.commit, self.packages = commit, packages
        # What tells the night apart in the history, however often it is resumed.
        about |= {"night": self.identity, "row": row.name, "date": self.began}
        about["fingerprint"] = {**about["fingerprint"], "chip": f"{row.chip} ({row.name})"}
        write_json(out / PROVENANCE, about)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(folder / STACK, out / STACK)
        self._write_begun()
        write_json(folder / PHASE, record.to_dict())
        return record

    # --- one phase ---------------------------------------------------------------------------------------------------

    def _guarded(self, name: str, run: Callable[[], PhaseRecord]) -> PhaseRecord:
        """Nothing that goes wrong in a phase ends the night."""
        if self.interrupted:
            return not_carried_out(name, f"{NOT_RUN}: interrupted by {self.interrupted[0]}")
        try:
            return run()
        except OtherCode:
            with contextlib.suppress(FileNotFoundError):
                (self.setting.out / EARLIER).replace(self.setting.out / NIGHT)
            raise
        except (OSError, InputError) as error:
            return not_carried_out(name, in_words(error), folders=self._existing(name))
        except Exception as error:
            traceback.print_exc()
            return not_carried_out(name, f"{type(error).__name__}: {error}", folders=self._existing(name))

    def _phase(self, phase: Phase) -> PhaseRecord:
        folder = self.setting.out / phase.name
        for place in (folder, *sorted((folder / OWN).glob("*"))):
            clear_up(place)
        earlier = read_phase(folder)
        if self.setting.resume and earlier is not None and self._still_whole(phase, folder, earlier):
            if names_its_code(self.commit):
                return replace(earlier, kept=True)
            why = f"commit {self.commit}" if self.commit else "a night without a commit"
            self._say(self.tell, f"{phase.name}: run again, since {why} does not name the code that made what is there")
        attempts = self._set_aside(folder)
        record = self._attempt(phase, folder)
        record = replace(record, attempt=len(attempts) + 1, earlier=attempts)
        try:
            write_json(folder / PHASE, record.to_dict())
        except OSError as error:
            why = f"what became of it cannot be written: {in_words(error)}"
            record = worsened(record, why)
        return record

    def _still_whole(self, phase: Phase, folder: Path, record: PhaseRecord) -> bool:
        """Whether a phase was carried out and what it left is still there."""
        if record.outcome in ("error", "unavailable"):
            return False
        row = self.setting.row
        places = {name: folder / name for name in record.nodes} or {"": folder}
        return not any(
            gather_evidence(phase, place, device=row.device, require=row.require, place=name).problems
            for name, place in places.items()
        )

    def _set_aside(self, folder: Path) -> tuple[str, ...]:
        """What an earlier attempt left is kept beside the new one."""
        out, name = self.setting.out, folder.name
        if folder.is_dir() and any(folder.iterdir()):
            number = 1 + sum(1 for _ in out.glob(f"{name}.attempt-*"))
            folder.rename(out / f"{name}.attempt-{number}")
        return tuple(sorted(path.name for path in out.glob(f"{name}.attempt-*")))

    def _attempt(self, phase: Phase, folder: Path) -> PhaseRecord:
        row = self.setting.row
        folder.mkdir(parents=True, exist_ok=True)
        on_cluster = phase.where != "head"
        problems: list[str] = []
        if self.setting.ray is not None:
            problems = self._take_census(folder)
        problems = problems if on_cluster else []  # it needs no cluster; the next phase that does will say so
        missing = self._missing(phase, folder)
        if missing:
            if not row.require:
                return PhaseRecord(name=phase.name, outcome="unavailable", cause=missing, where=phase.where)
            missing = f"{missing}; the row requires it"
            return not_carried_out(phase.name, missing, where=phase.where, folders=(phase.name,))
        if on_cluster and not self.nodes:
            return not_carried_out(phase.name, "; ".join(problems), where=phase.where, folders=(phase.name,))
        watch = Watch(self.nodes)
        # What runs on every node goes on where there still is one, and what runs here needs none.
        patience = _Patience(watch if phase.where == "cluster" else None, self.interrupted)
        if phase.where == "every-node":
            ended, nodes = self._on_every_node(phase, folder, patience)
        else:
            argv = self._argv(phase, folder.resolve())
            ended, nodes = self._here(argv, folder, 60 * phase.timeout_minutes, patience, phase), {}
        lost = [node.name for node in watch.lost()]
        lost += [name for name, end in nodes.items() if LOST in end.text and name not in lost]
        problems += [f"{LOST}: {name}" for name in lost]
        # What is gone stays gone: the next phase is told by its own census.
        self.nodes = [node for node in self.nodes if node.name not in lost]
        evidence = Evidence()
        places = {name: folder / name for name in nodes} or {"": folder}
        for name, place in places.items():
            end = nodes.get(name, ended)
            if name in lost:
                continue
            found = gather_evidence(phase, place, device=row.device, require=row.require, place=name)
            if end.code == 1 and not end.cut and not found.problems and not is_red(found):
                # Exit code 1 is the commands' word for misaligned; only a JUnit file has to say it too.
                if any(kind == "document" for kind, _ in phase.leaves):
                    found.verdicts.append(says(phase, None, device=row.device, place=name, aligned=False))
            problems += self._ending(end, found, place, name)
            if end.cut:
                found.problems = []  # what it did not come to is no further news
            evidence.add(found)
        problems += evidence.problems
        if problems:
            # A full disk takes the words of those who ran out of it along.
            problems = [*_no_room(folder), *problems]
        seconds = max([ended.seconds, *(end.seconds for end in nodes.values())])
        record = PhaseRecord(
            name=phase.name, outcome="pass", where=phase.where, exit_code=ended.code, ended=ended.text, seconds=seconds,
            lost_nodes=tuple(lost), counts=evidence.counts, folders=(phase.name,),
            nodes={name: {"exit_code": end.code, "ended": end.text} for name, end in nodes.items()},
            verdicts=tuple(finite(v.to_dict()) for v in evidence.verdicts),
            trainings=tuple(str(path.relative_to(self.setting.out)) for path in evidence.trainings),
        )  # fmt: skip
        findings = findings_of(
            phase.name, evidence, known=self.setting.matrix.known_failures, quarantined=self.quarantined
        )
        return judge(record, problems=problems, findings=findings)

    def _ending(self, end: Ended, found: Evidence, place: Path, name: str) -> list[str]:
        """Why an end is none that evidence can be read after."""
        at = f"{name}: " if name else ""
        if end.cut:
            return [f"{at}{end.cut}"]
        if end.code not in self.setting.matrix.exit_codes:
            return [f"{at}{end.text}: {_last_line(place / STDERR)}"]
        if end.code == 1:
            why = _last_line(place / STDERR)
            return [] if is_red(found) else [f"{at}exit code 1, and nothing in its evidence says why: {why}"]
        return [] if end.code == 0 else [f"{at}{end.text}: {_last_line(place / STDERR) or _last_line(place / STDOUT)}"]

    # --- where it runs -----------------------------------------------------------------------------------------------

    def _argv(self, phase: Phase, folder: Path | str) -> list[str]:
        setting, row = self.setting, self.setting.row
        return phase.argv(
            out=folder, night=setting.out.resolve(), row=row.name, chip=row.chip, device=row.device, stack=row.stack,
            ray=setting.ray, nodes=row.nodes, cards=row.cards, layers=" or ".join(row.layers),
            subjects=",".join(row.subjects),
        )  # fmt: skip

    def _environment(self, *, cluster: bool = False) -> dict[str, str]:
        env = {**os.environ, **self.setting.row.env, "ALIGNMENT_NIGHT": self.identity}
        env.pop("RAY_ADDRESS", None)
        if cluster and self.setting.ray is not None:
            env["RAY_ADDRESS"] = self.setting.ray
        return env

    def _here(
        self, argv: Sequence[str], folder: Path, timeout: float, patience: Callable[[], str] | None = None,
        phase: Phase | None = None,
    ) -> Ended:  # fmt: skip
        return run_command(
            argv,
            folder=folder,
            cwd=Path.cwd(),
            env=self._environment(cluster=phase is not None and phase.where == "cluster"),
            timeout=timeout,
            stop=patience or _Patience(None, self.interrupted),
        )

    def _take_census(self, folder: Path) -> list[str]:
        """Who is in the cluster now; what is wrong with that."""
        own, row = folder / OWN, self.setting.row
        target = own / "census.json"
        argv = ["python", "-m", "alignment.report.night_nodes", "census", str(self.setting.ray), str(target)]
        ended = self._here(argv, own / "census", CENSUS_SECONDS)
        if ended.cut or ended.code != 0:
            self.nodes = []
            return [f"the Ray cluster does not answer: {_last_line(own / 'census' / STDERR) or ended.text}"]
        listed = read_nodes(target)
        listed = [replace(node, name=self._name(node)) for node in listed]
        # Ray lists a node for some time after it is gone.
        gone = {node.identity for node in Watch(listed).lost()}
        self.nodes = [node for node in listed if node.identity not in gone]
        if len(self.nodes) >= row.nodes:
            return []
        names = sorted(set(self.names.values()) - {node.name for node in self.nodes})
        missing = f" (missing: {', '.join(names)})" if names else ""
        return [f"{len(self.nodes)} of {row.nodes} nodes are in the Ray cluster{missing}"]

    def _name(self, node: Node) -> str:
        """The name of a node for the whole night: several of one machine are numbered, and keep their numbers."""
        if node.identity not in self.names:
            machine, taken = node.name.rpartition(".")[0] or node.name, set(self.names.values())
            others = (f"{machine}.{number}" for number in itertools.count(1))
            self.names[node.identity] = next(n for n in itertools.chain([node.name], others) if n not in taken)
        return self.names[node.identity]

    def _missing(self, phase: Phase, folder: Path) -> str:
        """What the phase needs and this row's machines do not have."""
        kinds = [kind for kind in phase.needs if kind != "cpu"]
        emulated = self._environment().get("ALIGNMENT_EMULATE_NPU", "") not in ("", "0")
        if not kinds or (emulated and phase.where != "head"):
            return ""
        if phase.where != "head":
            wanted = self.setting.row.cards or 1
            few = [
                f"{node.name} has {node.cards(kind)} of {wanted} {kind}"
                for kind in kinds for node in self.nodes if node.cards(kind) < wanted
            ]  # fmt: skip
            return "; ".join(few)
        argv = ["python", "-m", "alignment.report.night_machine", "devices", *kinds]
        ended = self._here(argv, folder / OWN / "devices", PROBE_SECONDS)
        if ended.cut or ended.code != 0:
            return f"whether there is {', '.join(kinds)} cannot be found out: {ended.text}"
        absent = read_json(folder / OWN / "devices" / STDOUT)
        return "; ".join(f"{kind} is unavailable: {reason}" for kind, reason in absent.items())

    def _on_every_node(
        self, phase: Phase, folder: Path, patience: Callable[[], str]
    ) -> tuple[Ended, dict[str, Ended]]:
        """The command on every node, from a process that is connected to the cluster in place of this one."""
        own = folder / OWN
        plan, target = own / "plan.json", own / "nodes.json"
        env = {**EVERY_CARD, **forwarded(), **self.setting.row.env, "ALIGNMENT_NIGHT": self.identity}
        timeout = 60 * phase.timeout_minutes
        # The plan lies in a store that many read and the page links it: who runs it has the others in its environment.
        withheld, env = sorted(filter(is_secret, env)), {k: v for k, v in env.items() if not is_secret(k)}
        write_json(plan, {
            "address": self.setting.ray, "argv": self._argv(phase, _MARKER), "marker": _MARKER, "timeout": timeout,
            "folder": str(folder.resolve()), "cwd": str(Path.cwd()), "token": self.token, "env": env,
            "store": str((self.setting.out / TOKEN).resolve()), "nodes": [asdict(node) for node in self.nodes],
            "withheld": withheld,
        })  # fmt: skip
        plan.chmod(0o600)
        argv = ["python", "-m", "alignment.report.night_nodes", "run", str(plan), str(target)]
        ended = self._here(argv, own / "nodes", timeout + OUTER_GRACE_SECONDS, patience)
        answers: Mapping[str, Any] = {}
        with contextlib.suppress(InputError):
            answers = read_json(target)
        why = ended.cut or f"no answer: {_last_line(own / 'nodes' / STDERR) or ended.text}"
        silent = Ended(code=None, seconds=ended.seconds, cut=why)
        return ended, {n.name: Ended(**answers[n.name]) if n.name in answers else silent for n in self.nodes}

    def _existing(self, name: str) -> tuple[str, ...]:
        return (name,) if (self.setting.out / name).is_dir() else ()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _conclude(self, records: Sequence[PhaseRecord]) -> NightRecord:
        """The verdict, first on the disk and then in the history and on the page."""
        setting, out = self.setting, self.setting.out
        # A phase that was never come to is not one that passed.
        names = [record.name for record in records]
        records = [*records, *(
            not_carried_out(name, NOT_RUN) for name in (PROVENANCE_PHASE, *setting.row.phases) if name not in names
        )]  # fmt: skip
        night = self._verdict(records)
        write_night(self._not_yet(night), out)
        try:
            write_verdicts(out, verdicts_of(records, setting.row, resume=setting.again))
            night = self._remember(night)
        except Exception as error:  # whatever it is, the verdict stands
            night = self._with_problem(night, f"the night was not taken into the history: {in_words(error)}")
        try:
            from alignment.report.night_page import write_night_page

            page = write_night_page(night, out, baselines=setting.baselines)
            night = replace(night, page=page.name)
        except Exception as error:
            night = self._with_problem(night, f"the page was not written: {in_words(error)}")
        write_night(night, out)
        return night

    def _not_yet(self, night: NightRecord) -> NightRecord:
        """What stands on the disk until the night is held against those before it: who is killed now left no green."""
        if night.outcome != "pass":
            return night
        cause = "environment: the driver ended before it took the night into the history; resume with --resume"
        return replace(night, outcome="error", cause=cause, action=self.setting.matrix.action(EXIT_CODES["error"]))

    def _verdict(self, records: Sequence[PhaseRecord]) -> NightRecord:
        outcome = gravest(record.outcome for record in records if record.name != PROVENANCE_PHASE)
        if any(record.name == PROVENANCE_PHASE and record.outcome == "error" for record in records):
            outcome = gravest((outcome, "error"))
        if outcome == "unavailable":
            outcome = "error"
        cause = cause_of(records)
        if self.interrupted:
            cause = f"interrupted by {self.interrupted[0]}; {cause}"
            outcome = gravest((outcome, "error"))
        if not cause and outcome == "error":
            why = "; ".join(f"{r.name}: {r.cause}" for r in records if r.cause)
            cause = f"environment: nothing could be run: {why}"
        night = NightRecord(
            identity=self.identity, row=self.setting.row.name, chip=self.setting.row.chip, outcome=outcome, action="",
            cause=cause, began=self.began, ended=utc_now(), commit=self.commit, phases=tuple(records),
            history="" if self.setting.history is None else str(self.setting.history), resume=self.setting.again,
        )  # fmt: skip
        return replace(night, action=self.setting.matrix.action(night.exit_code))

    def _with_problem(self, night: NightRecord, problem: str) -> NightRecord:
        """A night that cannot be kept is not green, and says so."""
        outcome = gravest((night.outcome, "error"))
        if outcome != night.outcome or not night.cause:
            cause = f"environment: {problem}" + (f"; {night.cause}" if night.cause else "")
            night = replace(night, outcome=outcome, cause=cause)
        night = replace(night, remarks=(*night.remarks, problem))
        return replace(night, action=graver(night.action, self.setting.matrix.action(night.exit_code)))

    def _remember(self, night: NightRecord) -> NightRecord:
        """Takes the night into the history; what it shows beside the nights before it may turn green into flaky."""
        setting = self.setting
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
        return replace(night, action=graver("warn", self.setting.matrix.action(night.exit_code)))


class _Patience:
    """Why the command that runs has to end now: a signal came, or a node was lost a while ago."""

    def __init__(self, watch: Watch | None, interrupted: Sequence[str]) -> None:
        self._watch, self._interrupted = watch, interrupted
        self._since: float | None = None
        self._next = 0.0

    def __call__(self) -> str:
        if self._interrupted:
            return f"interrupted by {self._interrupted[0]}"
        now = time.monotonic()
        if self._watch is None or now < self._next:
            return ""
        lost = self._watch.lost()
        self._next = time.monotonic() + 1.0
        if not lost:
            return ""
        self._since = now if self._since is None else self._since
        if now - self._since < NODE_GRACE_SECONDS:
            return ""
        return f"{LOST}: {', '.join(node.name for node in lost)}; ended {NODE_GRACE_SECONDS:g} s later"


def _no_room(folder: Path) -> list[str]:
    """Why nothing can be written into ``folder`` any more."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x" * _PROBE_BYTES)
            probe.flush()
    except OSError as error:
        return [f"{folder}: {os.strerror(error.errno or 0)}"]
    return []


def _digest(packages: object) -> str:
    return hashlib.sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest()[:16]


def _changed(before: Path, now: Mapping[str, Any]) -> str:
    """Which packages are others than in an earlier provenance, as far as that can be read."""
    with contextlib.suppress(InputError, OSError, KeyError, TypeError, AttributeError):
        old, new = read_json(before)["packages"], now["packages"]
        other = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        more = f" and {len(other) - TOLD} more" if len(other) > TOLD else ""
        told = ", ".join(f"{name} {old.get(name, '(none)')} → {new.get(name, '(none)')}" for name in other[:TOLD])
        return f" ({told}{more})" if other else ""
    return ""


def _last_line(path: Path) -> str:
    """The last words of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4096))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    # The last bracket of a document says nothing.
    return next((line.strip()[:300] for line in reversed(lines) if any(map(str.isalpha, line))), "")

