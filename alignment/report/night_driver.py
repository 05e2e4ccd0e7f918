"""Drives a night: phase after phase in processes of their own, and a verdict whatever happens to them.

While phases run the driver has loaded neither torch nor ray, holds no device and is connected to no cluster, so nothing
that a phase does to its machine takes it along. A signal ends the phase that runs, and the night says so; a full disk
costs what could not be written and never the verdict; a driver that was killed itself is continued with ``resume``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.report.night import (
    BEGUN,
    NIGHT,
    NOT_RUN,
    PHASE,
    SCHEMA,
    NightRecord,
    PhaseRecord,
    in_words,
    read_phase,
    utc_now,
)
from alignment.report.night_code import OtherCode, changed, digest
from alignment.report.night_conclusion import conclude, remembered
from alignment.report.night_evidence import Evidence, gather_evidence, is_red, says
from alignment.report.night_interruption import Patience, listening
from alignment.report.night_judgement import findings_of, judge, not_carried_out, worsened
from alignment.report.night_lock import lock as _lock
from alignment.report.night_matrix import STDERR, STDOUT, Phase
from alignment.report.night_nodes import LOST, TOKEN, Node, Watch, begin_store, read_nodes
from alignment.report.night_process import Ended, adopting, clear_up, run_command
from alignment.report.night_setting import PROVENANCE_PHASE, NightSetting, check_setting
from alignment.report.night_traces import last_line, no_room
from alignment.report.night_watch import names_its_code
from alignment.report.run_directory import PROVENANCE, STACK, finite
from alignment.rl.forwarded import EVERY_CARD, forwarded, is_secret

CENSUS_SECONDS = 120.0
PROBE_SECONDS = 600.0
OUTER_GRACE_SECONDS = 60.0
OWN = "_driver"
"""In the folder of a phase what the driver asked before it: the nodes, the devices. No host has a name like this."""

EARLIER = "night.earlier.json"
"""What a night said before it was resumed."""

_MARKER = "{folder of this node}"


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
    check_setting(setting)
    with _lock(setting.out), listening() as interrupted, adopting():
        return _Night(setting, interrupted=interrupted, begin=begin, tell=tell).run()


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
            why = f"{ended.text}: {last_line(folder / STDERR)}"
            return replace(record, outcome="error", stage="environment", cause=f"provenance is missing: {why}")
        about = read_json(folder / PROVENANCE)
        commit = str(about.get("commit", ""))
        if self.commit and commit != self.commit:
            raise OtherCode(
                "the night was begun with other code", where=out / BEGUN, expected=self.commit, found=commit,
                next_step="begin a new night in another --out",
            )  # fmt: skip
        packages = digest(about.get("packages"))
        if self.packages and packages != self.packages:
            raise OtherCode(
                "the night was begun with other packages", where=out / BEGUN, expected=self.packages,
                found=f"{packages}{changed(out / PROVENANCE, about)}", next_step="begin a new night in another --out",
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
        patience = Patience(watch if phase.where == "cluster" else None, self.interrupted)
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
            problems = [*no_room(folder), *problems]
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
            return [f"{at}{end.text}: {last_line(place / STDERR)}"]
        if end.code == 1:
            why = last_line(place / STDERR)
            return [] if is_red(found) else [f"{at}exit code 1, and nothing in its evidence says why: {why}"]
        return [] if end.code == 0 else [f"{at}{end.text}: {last_line(place / STDERR) or last_line(place / STDOUT)}"]

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
            stop=patience or Patience(None, self.interrupted),
        )

    def _take_census(self, folder: Path) -> list[str]:
        """Who is in the cluster now; what is wrong with that."""
        own, row = folder / OWN, self.setting.row
        target = own / "census.json"
        argv = ["python", "-m", "alignment.report.night_nodes", "census", str(self.setting.ray), str(target)]
        ended = self._here(argv, own / "census", CENSUS_SECONDS)
        if ended.cut or ended.code != 0:
            self.nodes = []
            return [f"the Ray cluster does not answer: {last_line(own / 'census' / STDERR) or ended.text}"]
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
        why = ended.cut or f"no answer: {last_line(own / 'nodes' / STDERR) or ended.text}"
        silent = Ended(code=None, seconds=ended.seconds, cut=why)
        return ended, {n.name: Ended(**answers[n.name]) if n.name in answers else silent for n in self.nodes}

    def _existing(self, name: str) -> tuple[str, ...]:
        return (name,) if (self.setting.out / name).is_dir() else ()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _conclude(self, records: Sequence[PhaseRecord]) -> NightRecord:
        setting = self.setting
        # A phase that was never come to is not one that passed.
        names = [record.name for record in records]
        records = [*records, *(
            not_carried_out(name, NOT_RUN) for name in (PROVENANCE_PHASE, *setting.row.phases) if name not in names
        )]  # fmt: skip
        night = NightRecord(
            identity=self.identity, row=setting.row.name, chip=setting.row.chip, outcome="", action="", cause="",
            began=self.began, ended=utc_now(), commit=self.commit, phases=tuple(records),
            history="" if setting.history is None else str(setting.history), resume=setting.again,
        )  # fmt: skip
        return conclude(night, setting, interrupted=self.interrupted, remember=self._remember)

    def _remember(self, night: NightRecord) -> NightRecord:
        return remembered(night, self.setting)
