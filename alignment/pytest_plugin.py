"""The pytest side of alignment: markers, options, a device per check, and an honest word on what was not run.

The plugin is loaded by its entry point, so it imports neither torch nor any other part of alignment at top level: what
a run does not use costs it nothing.
"""

from __future__ import annotations

import ast
import itertools
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
}
LAYERS = ("unit", "layer", "e2e")
BY_NAME_ONLY = ("engine", "slow")
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
        from alignment.devices import emulated_npu
        from alignment.errors import InputError

        try:
            emulated_npu.install()
        except InputError as error:
            raise pytest.UsageError(f"--emulate-npu: {error}") from None
    config.stash[LEDGER] = Ledger(
        selected=MarkExpression(option.markexpr),
        devices=devices,
        subjects=_listed(option.subject),
        require=option.require,
        emulate_npu=option.emulate_npu,
        baseline=Path(option.baseline) if option.baseline else None,
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.stash[LEDGER].emulate_npu:
        return ["alignment: the npu of this run is emulated on the CPU; its results are labelled 'npu (emulated)'"]
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ledger = config.stash[LEDGER]
    kept, left_out = [], []
    for item in items:
        parts = item.path.parts
        for layer in LAYERS:
            if ("tests", layer) in zip(parts, parts[1:]):
                item.add_marker(getattr(pytest.mark, layer))
        by_name = [name for name in BY_NAME_ONLY if item.get_closest_marker(name) and name not in ledger.selected.names]
        if by_name:
            ledger.left_out[by_name[0]] += 1
            left_out.append(item)
        else:
            kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


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
    quiet = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if quiet and session.config.stash[LEDGER].unmet():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    ledger = config.stash[LEDGER]
    lines = []
    for what, reasons in ledger.unavailable.items():
        for reason, count in reasons.items():
            lines.append(f"{what}: {count} check{'s' * (count != 1)} not run: {reason}")
    for name, count in ledger.left_out.items():
        lines.append(f"{name}: {count} test{'s' * (count != 1)} not selected; add -m {name}")
    if not config.option.collectonly:
        for kind in ledger.unmet():
            available, reason = _availability(config, kind)
            advice = " (on a CPU machine: --emulate-npu)" if kind == "npu" and not available else ""
            why = "no test of this selection runs on it" if available else reason
            lines.append(f"{kind}: no check was executed, so this run is not a pass: {why}{advice}")
    if lines:
        terminalreporter.section("alignment")
        for line in lines:
            terminalreporter.write_line(line)
