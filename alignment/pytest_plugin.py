"""The pytest side of alignment: markers, options, a device per check, and an honest word on what was not run.

The plugin is loaded by its entry point, so it imports neither torch nor any other part of alignment at top level: what
a run does not use costs it nothing.
"""

from __future__ import annotations

import ast
import difflib
import gc
import itertools
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

MARKERS = {
    "unit": "one operator or one rule (set by itself in tests/unit)",
    "layer": "one decoder layer or the small whole model (set by itself in tests/layer)",
    "e2e": "the training pipeline (set by itself in tests/e2e)",
    "npu": "runs on an Ascend NPU, real or emulated",
    "gpu": "runs on a CUDA GPU",
    "engine": "needs an optional engine (Megatron, vLLM); only with -m engine",
    "slow": "for the nightly; only with -m slow",
    "docs": "executes the commands of the documentation; only with -m docs",
}
LAYERS = ("unit", "layer", "e2e")
BY_NAME_ONLY = ("engine", "slow", "docs")
DEVICE_MARKERS = {"cuda": "gpu", "npu": "npu"}
KIND_NAMES = ("cpu", "cuda", "npu")
UNAVAILABLE = "unavailable: "


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("alignment")
    group.addoption(
        "--device",
        action="append",
        metavar="NAME",
        help="run device checks on these only: auto, cpu, cuda, npu, cuda:1, … (comma separated or repeated); "
        "without it on the cpu and on every device present",
    )
    group.addoption(
        "--subject",
        action="append",
        metavar="NAME",
        help="judge these implementations only: torch, torch_npu, transformers, … (comma separated or repeated)",
    )
    group.addoption("--baseline", metavar="DIR", help="read baselines from this folder in place of baselines/")
    group.addoption(
        "--record-baselines", action="store_true", help="record the baselines of the selected checks, then review them"
    )
    group.addoption(
        "--require",
        action="store_true",
        help="an unavailable device, subject or baseline fails in place of being skipped",
    )
    group.addoption(
        "--emulate-npu",
        action="store_true",
        default=os.environ.get("ALIGNMENT_EMULATE_NPU", "") not in ("", "0"),
        help="install the emulated NPU, so that npu checks run on a CPU machine (or ALIGNMENT_EMULATE_NPU=1)",
    )
    for plugin, option in (("MindSpeed", "--mindspeed-src"), ("vLLM-Ascend", "--vllm-ascend-src")):
        group.addoption(
            option,
            action="append",
            metavar="SOURCE",
            help=f"drive this source of {plugin} on the emulated NPU: a tree, REPOSITORY@REVISION, a wheel or "
            "index:VERSION (comma separated or repeated); without it what is installed",
        )


@dataclass
class Ledger:
    """What a run asked for, what it executed and what it could not, for the closing lines and the exit code."""

    selected: MarkExpression
    devices: tuple[str, ...]
    subjects: tuple[str, ...]
    require: bool
    emulate_npu: bool
    baseline: Path | None = None
    executed: Counter = field(default_factory=Counter)
    unavailable: dict[str, Counter] = field(default_factory=dict)
    left_out: Counter = field(default_factory=Counter)
    record: bool = False
    verdicts: list = field(default_factory=list)
    changes: list = field(default_factory=list)
    availability: dict[str, tuple[bool, str]] = field(default_factory=dict)

    @property
    def asked_kinds(self) -> tuple[str, ...]:
        """Device kinds asked for by name, with --device or -m."""
        by_option = {name.split(":")[0] for name in self.devices}
        return tuple(
            kind
            for kind in KIND_NAMES
            if kind in by_option or (kind in DEVICE_MARKERS and self.selected.asks_for(DEVICE_MARKERS[kind]))
        )

    def note_unavailable(self, what: str, reason: str) -> None:
        self.unavailable.setdefault(what, Counter())[reason] += 1

    @property
    def absent_subjects(self) -> list[str]:
        """Subjects that --subject names and that judged nothing."""
        return [name for name in self.subjects if not any(v.subject == name for v in self.verdicts)]

    def unmet(self) -> list[str]:
        """Device kinds for which this run promised a check and executed none."""
        unmet = [
            kind
            for kind in DEVICE_MARKERS
            if kind in {name.split(":")[0] for name in self.devices} and not self.executed[kind]
        ]
        demanded = [kind for kind, marker in DEVICE_MARKERS.items() if self.selected.asks_for(marker)]
        if (
            demanded
            and self.selected.impossible_without([DEVICE_MARKERS[kind] for kind in demanded])
            and not any(self.executed[kind] for kind in demanded)
        ):
            unmet += [kind for kind in demanded if kind not in unmet]
        return unmet


class MarkExpression:
    """The ``-m`` expression, read for one question: which markers does it ask for?"""

    def __init__(self, text: str) -> None:
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body if text.strip() else None
        except SyntaxError:  # pytest itself tells the user about a malformed -m
            self._tree = None
        self.names = frozenset(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name)) if self._tree else frozenset()

    def _holds(self, chosen: frozenset[str], node: ast.AST | None = None) -> bool:
        node = self._tree if node is None else node
        if isinstance(node, ast.BoolOp):
            parts = [self._holds(chosen, value) for value in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if isinstance(node, ast.UnaryOp):
            return not self._holds(chosen, node.operand)
        if isinstance(node, ast.Call):
            return self._holds(chosen, node.func)
        return isinstance(node, ast.Name) and node.id in chosen

    def _assignments(self, names: frozenset[str]):
        for flags in itertools.product((False, True), repeat=len(names)):
            yield frozenset(name for name, flag in zip(sorted(names), flags) if flag)

    def asks_for(self, name: str) -> bool:
        """True when a test can be selected because it carries ``name`` (so not for ``not name``)."""
        if self._tree is None or name not in self.names:
            return False
        others = self._assignments(self.names - {name})
        return any(self._holds(chosen | {name}) and not self._holds(chosen) for chosen in others)

    def impossible_without(self, names: list[str]) -> bool:
        """True when no test without any of ``names`` can be selected."""
        return self._tree is not None and not any(map(self._holds, self._assignments(self.names - set(names))))


LEDGER = pytest.StashKey[Ledger]()


def _listed(values: list[str] | None) -> tuple[str, ...]:
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    option = config.option
    devices = _listed(option.device)
    for name in devices:
        if name.split(":")[0] not in (*KIND_NAMES, "auto"):
            raise pytest.UsageError(f"--device {name}: no such device; expected auto, cpu, cuda, npu or one like cuda:1")
    if option.emulate_npu:
        _install_emulated_npu()
    subjects = _listed(option.subject)
    if subjects:
        _require_known_subjects(subjects)
    config.stash[LEDGER] = Ledger(
        selected=MarkExpression(option.markexpr),
        devices=devices,
        subjects=subjects,
        require=option.require,
        emulate_npu=option.emulate_npu,
        baseline=Path(option.baseline) if option.baseline else None,
        record=option.record_baselines,
    )
    if option.baseline and not option.record_baselines and not Path(option.baseline).is_dir():
        raise pytest.UsageError(f"--baseline {option.baseline}: there is no such folder")


def _install_emulated_npu() -> None:
    from alignment.devices import emulated_npu
    from alignment.errors import InputError

    try:
        emulated_npu.install()
    except InputError as error:
        raise pytest.UsageError(f"--emulate-npu: {error}") from None


def _require_known_subjects(names: tuple[str, ...]) -> None:
    from alignment.backends.subject import SUBJECTS

    known = list(dict.fromkeys(entry.name for entry in SUBJECTS))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise pytest.UsageError(
                f"--subject {name}: no such subject; expected one of {', '.join(known)}"
                + (f"; did you mean {near[0]}?" if near else "")
            )


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.stash[LEDGER].emulate_npu:
        from alignment.devices import emulated_npu

        return [f"alignment: {emulated_npu.banner()}"]
    return []


# Which tests, and on which devices.


def _availability(config: pytest.Config, kind: str) -> tuple[bool, str]:
    ledger = config.stash[LEDGER]
    if kind not in ledger.availability:
        from alignment.devices.base import availability

        found = availability(kind)
        ledger.availability[kind] = (found.available, found.reason)
    return ledger.availability[kind]


def device_names(config: pytest.Config) -> list[str]:
    """The devices a device-generic check is run on: what --device names, else the cpu and all that is there or asked for."""
    ledger = config.stash[LEDGER]
    if ledger.devices:
        names = []
        for name in ledger.devices:
            if name == "auto":
                from alignment.devices.base import get_device

                name = get_device("auto").kind
            names.append(name)
        return list(dict.fromkeys(names))
    asked = ledger.asked_kinds
    return ["cpu", *(kind for kind in DEVICE_MARKERS if kind in asked or _availability(config, kind)[0])]


def _device_param(name: str):
    marker = DEVICE_MARKERS.get(name.split(":")[0])
    return pytest.param(name, id=name, marks=[getattr(pytest.mark, marker)] if marker else [])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Collection makes thousands of objects and no garbage: looking for it, then and at the end, costs a sixth of the time.

    What was collected lives as long as the session, so later searches pass it over.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames and not _parametrized(metafunc, "device"):
        metafunc.parametrize("device", [_device_param(name) for name in device_names(metafunc.config)], indirect=True)


def _parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    return any(
        name in (marker.args[0] if not isinstance(marker.args[0], str) else marker.args[0].replace(" ", "").split(","))
        for marker in metafunc.definition.iter_markers("parametrize")
        if marker.args
    )


@pytest.fixture
def device(request: pytest.FixtureRequest):
    """The :class:`alignment.devices.base.Device` a device-generic check runs on, one test per device."""
    from alignment.devices.base import get_device

    return get_device(getattr(request, "param", "cpu"))


@dataclass(frozen=True)
class CheckParameter:
    """One check of one subject on one device; called, it judges (or records) and fails with the whole finding."""

    case: object
    subject: str
    device: str


def check_params(config: pytest.Config, layer: str) -> list:
    """A parameter for the fixture ``check`` per case of a layer, subject and device, each with its device's marker.

    Subjects that are not made for a device, or do not compute a case, make no parameter; those that are not installed do,
    and say so when they are run.
    """
    from alignment.backends.catalogue import cases
    from alignment.backends.subject import subject_entries

    params = []
    for name in device_names(config):
        kind = name.split(":")[0]
        for entry in subject_entries(layer, names=config.stash[LEDGER].subjects):
            if kind not in entry.kinds:
                continue
            subject = entry.load()
            markers = [*([DEVICE_MARKERS[kind]] if kind in DEVICE_MARKERS else []), *(["engine"] if entry.engine else [])]
            params += [
                pytest.param(
                    CheckParameter(case, entry.name, name),
                    id=f"{case.id}-{entry.name}-{name}",
                    marks=[getattr(pytest.mark, marker) for marker in markers],
                )
                for case in cases(layer)
                if subject.supports(case)
            ]
    return params


@pytest.fixture
def baseline_store(pytestconfig: pytest.Config):
    """The baselines of this run: the folder of --baseline, else the repository's."""
    from alignment.baseline.store import BaselineStore, default_root

    return BaselineStore(pytestconfig.stash[LEDGER].baseline or default_root())


@pytest.fixture
def check(request: pytest.FixtureRequest, baseline_store):
    """Judges one parameter of :func:`check_params` when called; with --record-baselines it records it instead."""
    from alignment.backends.subject import get_subject
    from alignment.devices.base import get_device

    parameter, config = request.param, request.config
    subject = get_subject(parameter.subject, parameter.case.layer)
    device = get_device(parameter.device)
    available = subject.available(device)
    if not available.available:
        _unavailable(config, f"subject {subject.name}", available.reason)
    run = _record if config.stash[LEDGER].record else _judge
    return lambda: run(config, parameter.case, subject, device, baseline_store)


def _judge(config: pytest.Config, case, subject, device, store) -> None:
    from alignment.baseline.check import check_case
    from alignment.numerics.verdict import Outcome
    from alignment.report.terminal import explain

    verdict = check_case(case, subject, device, store)
    config.stash[LEDGER].verdicts.append(verdict)
    if verdict.outcome is not Outcome.PASS:
        pytest.fail(explain(verdict), pytrace=False)


def _record(config: pytest.Config, case, subject, device, store) -> None:
    from alignment.baseline.record import record
    from alignment.errors import InputError

    try:
        recording = record([case], device, store, subjects=[subject.name])
    except InputError as error:
        pytest.fail(str(error), pytrace=False)
    config.stash[LEDGER].changes += recording.changes


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ledger = config.stash[LEDGER]
    unasked = [name for name in BY_NAME_ONLY if name not in ledger.selected.names]
    above: dict[pytest.Collector, frozenset[str]] = {}
    kept, left_out = [], []
    for item in items:
        parent = item.parent
        if parent not in above:
            above[parent] = _marked_by_layer(parent)
        by_name = [name for name in unasked if name in above[parent] or any(m.name == name for m in item.own_markers)]
        if by_name:
            ledger.left_out[by_name[0]] += 1
            left_out.append(item)
        else:
            kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _marked_by_layer(parent: pytest.Collector) -> frozenset[str]:
    """The names of the marks that all items below have, with that of the layer whose folder they are in.

    It is put on the file: seven thousand items would each pay for one of their own.
    """
    file = parent.getparent(pytest.File) or parent
    parts = file.path.parts
    for layer in LAYERS:
        if ("tests", layer) in zip(parts, parts[1:]) and file.get_closest_marker(layer) is None:
            file.add_marker(layer)
    return frozenset(mark.name for mark in parent.iter_markers())


# What cannot run here is skipped with its reason, or fails with --require.


def _kinds_of(item: pytest.Item) -> list[str]:
    return [kind for kind, marker in DEVICE_MARKERS.items() if item.get_closest_marker(marker)]


def _unavailable(config: pytest.Config, what: str, reason: str) -> None:
    ledger = config.stash[LEDGER]
    ledger.note_unavailable(what, reason)
    if ledger.require:
        pytest.fail(f"{what} is unavailable and --require was given: {reason}", pytrace=False)
    pytest.skip(f"{UNAVAILABLE}{what}: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for kind in _kinds_of(item):
        available, reason = _availability(item.config, kind)
        if not available:
            _unavailable(item.config, kind, reason)


def _translate(config: pytest.Config, outcome) -> None:
    from alignment.errors import UnavailableError

    if outcome.excinfo is not None and issubclass(outcome.excinfo[0], UnavailableError):
        error = outcome.excinfo[1]
        try:
            _unavailable(config, str(error.where or "something"), error.problem)
        except BaseException as verdict:  # skip and fail are outcomes that pytest raises
            outcome.force_exception(verdict)


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    _translate(pyfuncitem.config, (yield))


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request: pytest.FixtureRequest):
    _translate(request.config, (yield))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = (yield).get_result()
    ledger = item.config.stash[LEDGER]
    if report.when == "call" and not report.skipped:
        for kind in _kinds_of(item):
            ledger.executed[kind] += 1
    if ledger.require and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("engine"):
        # An engine check that skips itself (importorskip) is as unavailable as one that says so.
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome, report.longrepr = "failed", f"--require was given and this engine check was skipped: {reason}"


# The closing words.


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.option.collectonly:
        return
    ledger = session.config.stash[LEDGER]
    quiet = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if quiet and (ledger.unmet() or (ledger.require and ledger.absent_subjects)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    ledger = config.stash[LEDGER]
    lines = [*_baseline_lines(config), *_not_run_lines(ledger)]
    if not config.option.collectonly:
        lines += [f"subject {name}: no check was executed" for name in ledger.absent_subjects]
        for kind in ledger.unmet():
            available, reason = _availability(config, kind)
            advice = " (on a CPU machine: --emulate-npu)" if kind == "npu" and not available else ""
            why = "no test of this selection runs on it" if available else reason
            lines.append(f"{kind}: no check was executed, so this run is not a pass: {why}{advice}")
    if lines:
        terminalreporter.section("alignment")
        for line in lines:
            terminalreporter.write_line(line)


def _not_run_lines(ledger: Ledger) -> list[str]:
    lines = [
        f"{what}: {count} check{'s' * (count != 1)} not run: {reason}"
        for what, reasons in ledger.unavailable.items()
        for reason, count in reasons.items()
    ]
    lines += [
        f"{name}: {count} test{'s' * (count != 1)} not selected; add -m {name}" for name, count in ledger.left_out.items()
    ]
    return lines


def _baseline_lines(config: pytest.Config) -> list[str]:
    """Against which baselines the checks were judged, how much of the budgets they used, and what recording changed."""
    ledger = config.stash[LEDGER]
    from alignment.report.terminal import percent_of_budget

    if ledger.record:
        if not ledger.changes:
            return ["baselines recorded: no value changed"]
        return [f"baselines recorded, {len(ledger.changes)} values changed; review them:", *map(str, ledger.changes)]
    lines = []
    judged = [v for v in ledger.verdicts if v.baseline]
    for device, subject in dict.fromkeys((v.device, v.subject) for v in judged):
        own = [v for v in judged if (v.device, v.subject) == (device, subject)]
        steps = Counter(v.baseline.rsplit("(", 1)[1].rstrip(")") for v in own)
        by = ", ".join(f"{count} by {step}" for step, count in steps.items())
        line = f"{subject} on {device}: {len(own)} checks against baselines ({by})"
        measured = [v for v in own if v.worst is not None]
        if measured:
            worst = max(measured, key=lambda v: math.inf if math.isnan(v.worst.value) else v.worst.used)
            line += f"; most of a budget used: {percent_of_budget(worst.worst)} ({worst.check}: {worst.worst.name})"
        lines.append(line)
    if judged:
        from alignment.baseline.verify import unused
        from alignment.baseline.store import BaselineStore, default_root

        store = BaselineStore(ledger.baseline or default_root())
        lines += [f"unused baseline: {key}" for key in unused(store)]
    return lines
