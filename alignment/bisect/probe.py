"""A probe: one check, run inside an environment, translated into what it says about the stack."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alignment.bisect.observation import ABORT, BAD, GOOD, INFRASTRUCTURE, SKIP, Observation, Result, Signature, skip
from alignment.bisect.process import Finished
from alignment.bisect.providers.base import Environment, NotBuilt
from alignment.bisect.pytest_record import VARIABLE
from alignment.errors import InputError

NOTHING_COLLECTED = "nothing-collected"
# Layers of a check by the cost of running it: the cheapest one that separates the ends is the best one.
LAYERS = ("unit", "layer", "replay", "e2e")
_IMPORT = ("ImportError", "ModuleNotFoundError")
_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|cannot allocate memory", re.IGNORECASE)
_DEVICE = re.compile(
    r"device (is )?lost|no (CUDA|NPU) (device|GPU)s? (is|are) available|ERR99999|aclrt\w+ .*fail|"
    r"HCCL\w* .*(time ?out|fail)|ECC error|NPU error|error (code )?(is )?507\d{3}",
    re.IGNORECASE,
)
_DATA = re.compile(r"No such file or directory|the file does not exist|FileNotFoundError", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is run: ``kind`` pytest (node ids and options), alignment (a command of this suite) or shell.

    ``by_value``: the verdict of the probe does not count, only its value. ``timeout`` in seconds. ``check`` names the
    check that is to be followed where several run.
    """

    kind: Literal["pytest", "alignment", "shell"]
    text: str
    by_value: bool = False
    timeout: float = 3600.0
    check: str | None = None

    @property
    def identity(self) -> str:
        """What goes into the key of every result."""
        return json.dumps([self.kind, self.text, self.by_value])

    @property
    def layer(self) -> str:
        """unit, layer, replay or e2e, by where the tests lie or which part of the suite is run; e2e where nothing
        tells.
        """
        for layer in ("unit", "layer"):
            if f"tests/{layer}" in self.text or re.search(rf"--only[ =]{layer}\b", self.text):
                return layer
        return "replay" if "replay" in self.text else "e2e"

    def command(self, python: str) -> list[str]:
        """What is run inside an environment."""
        words = shlex.split(self.text)
        if self.kind == "pytest":
            # The plugin of the frozen suite, by its module: an installed copy's entry point is another name for it.
            plugins = [
                "-p",
                "no:alignment",
                "-p",
                "alignment.pytest_plugin",
                "-p",
                "alignment.bisect.pytest_record",
                "-p",
                "no:cacheprovider",
            ]
            return [python, "-m", "pytest", *plugins, "-q", *words]
        if self.kind == "alignment":
            return [python, "-m", "alignment", *words[1:], *([] if "--json" in words else ["--json"])]
        return ["bash", "-c", self.text]

    def run(self, environment: Environment, *, suite: Path, scratch: Path) -> Observation:
        """Runs the probe once. ``suite`` is the frozen tree it runs in; ``scratch`` a folder for its records."""
        began = time.monotonic()
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            record = Path(folder) / "record.json"
            variables = {VARIABLE: str(record), "PYTHONPATH": str(suite), "ALIGNMENT_BISECT_PYTHON": environment.python}
            try:
                done = environment.run(
                    self.command(environment.python), cwd=suite, variables=variables, timeout=self.timeout
                )
            except OSError as error:
                return skip("environment", f"the probe cannot be started ({error})")
            except NotBuilt as error:
                return skip(error.reason, error.detail) if not error.transient else _infrastructure(error.detail)
            data = _read(record)
        seen = self.translate(done, data)
        return _with(seen, seconds=time.monotonic() - began, output=done.tail if seen.result is not Result.GOOD else "")

    def translate(self, done: Finished, record: Any = None) -> Observation:
        """What a finished run says, by the table of codes in ``docs/bisect.md``."""
        if done.code is None:
            return skip("time-out", f"not finished after {self.timeout:.0f} s")
        if done.code < 0:
            return _infrastructure(f"ended by signal {-done.code}", reason="killed")
        seen = {"pytest": self._pytest, "alignment": self._alignment, "shell": self._shell}[self.kind](done, record)
        if self.by_value and seen.result in (Result.GOOD, Result.BAD):
            return _with(seen, result=Result.MEASURED)
        return seen

    # pytest.

    def _pytest(self, done: Finished, record: Any) -> Observation:
        if done.code == 5:
            return _abort(NOTHING_COLLECTED, "pytest collected no test")
        if done.code == 4:
            reason = (
                NOTHING_COLLECTED
                if re.search(r"not found|no tests ran|file or directory not found", done.stdout + done.stderr)
                else "probe"
            )
            return _abort(reason, f"pytest refused its arguments: {_last_line(done)}")
        if done.code == 3 or done.code >= ABORT:
            return _abort("probe", f"pytest ended with {done.code}: {_last_line(done)}")
        if not isinstance(record, Mapping):
            text = done.stdout + done.stderr
            if "No module named" in text or "ImportError" in text:
                return skip("import", _last_line(done))
            return _infrastructure(f"pytest ended with {done.code} and left no record: {_last_line(done)}")
        if done.code == 2:
            errors = record.get("collect_errors") or []
            if errors and all(any(name in e for name in _IMPORT) for e in errors):
                return skip("import", errors[0].strip().splitlines()[-1])
            return _infrastructure(f"pytest was interrupted: {_last_line(done)}")
        if done.code not in (GOOD, BAD):
            return _abort("probe", f"pytest ended with {done.code}, which it never does")
        return self._from_tests(record.get("tests", {}), done.code)

    def _from_tests(self, tests: Mapping[str, Mapping], code: int) -> Observation:
        values, passed, failures, unfit = {}, [], [], []
        for node, row in tests.items():
            value = _metric(row)
            if value is not None:
                values[node] = value
            if row["outcome"] == "passed":
                passed.append(node)
            elif row["outcome"] == "failed":
                reason = _class_of(row["exception"], row["message"], row.get("when"))
                if reason:
                    unfit.append(
                        (
                            reason,
                            f"{node}: {row['exception']}: {row['message'].splitlines()[0] if row['message'] else ''}",
                        )
                    )
                else:
                    failures.append(
                        Signature(check=node, where=_where(row), sign=int(row["properties"].get("sign", 0)))
                    )
        known = dict(
            values=values, passed=tuple(passed), failures=tuple(failures), value=next(iter(values.values()), None)
        )
        if code == GOOD:
            if not passed:
                reasons = {row["message"] for row in tests.values() if row["outcome"] == "skipped"}
                return skip("nothing-measured", "; ".join(sorted(reasons))[:400] or "no test ran", **known)
            return Observation(result=Result.GOOD, **known)
        if failures:
            return Observation(result=Result.BAD, **known)
        reason, detail = (
            unfit[0]
            if unfit
            else ("nothing-measured", "pytest failed although no test did (a device or subject was required)")
        )
        return skip(reason, detail, **known)

    # alignment.

    def _alignment(self, done: Finished, record: Any) -> Observation:
        if done.code >= ABORT:
            return _abort("probe", f"alignment ended with {done.code}")
        document = _last_json(done.stdout)
        if done.code not in (GOOD, BAD):
            # 2 is usage or environment everywhere: never bad.
            return _infrastructure(
                (document or {}).get("error") or _last_line(done) or f"alignment ended with {done.code}"
            )
        if document is None:
            return _infrastructure(f"alignment printed no JSON document: {_last_line(done)}")
        values, passed, failures = {}, [], []
        for verdict in document.get("verdicts", ()):
            check = f"{verdict['check']} [{verdict['subject']}]"
            measures = [m for m in verdict.get("measures", ()) if m.get("bound") is not None]
            worst = max(measures, key=_used, default=None)
            if worst is not None:
                values[check] = float(worst["value"])
            if verdict["outcome"] == "fail":
                place = verdict.get("where")
                where = f"{place['stage']} · {place['module']} · {place['quantity']}" if place else ""
                failures.append(Signature(check=check, where=where))
            elif verdict["outcome"] == "pass":
                passed.append(check)
        known = dict(
            values=values, passed=tuple(passed), failures=tuple(failures), value=next(iter(values.values()), None)
        )
        if done.code == GOOD:
            return Observation(result=Result.GOOD, **known)
        if failures:
            return Observation(result=Result.BAD, **known)
        return skip("nothing-measured", "alignment was not shown, and no check failed", **known)

    # shell.

    def _shell(self, done: Finished, record: Any) -> Observation:
        told = record if isinstance(record, Mapping) else _last_json(done.stdout) or {}
        value = told.get("metric")
        value = (
            float(value)
            if isinstance(value, (int, float, str)) and not isinstance(value, bool) and _is_number(value)
            else None
        )
        check = str(told.get("check") or "probe")
        known: dict[str, Any] = {
            "value": value,
            "values": {check: value} if value is not None else {},
            "detail": str(told.get("detail") or ""),
        }
        if done.code == GOOD:
            return Observation(result=Result.GOOD, passed=(check,), **known)
        if done.code == BAD:
            sign = told.get("sign")
            failure = Signature(check=check, where=str(told.get("where") or ""), sign=sign if sign in (-1, 0, 1) else 0)
            return Observation(result=Result.BAD, failures=(failure,), **known)
        known["detail"] = known["detail"] or _last_line(done)
        if done.code == SKIP:
            return Observation(result=Result.SKIP, reason=str(told.get("reason") or "probe"), **known)
        if done.code in (INFRASTRUCTURE, 2):
            return Observation(result=Result.INFRASTRUCTURE, reason="infrastructure", **known)
        if done.code in (126, 127):
            known["detail"] = f"the command cannot be run: {_last_line(done)}"
        elif done.code < ABORT:
            known["detail"] = (
                f"exit code {done.code} is not one of a probe's (0, 1, 75, 125, 128 and up): {_last_line(done)}"
            )
        return Observation(result=Result.ABORT, reason="probe", **known)


def parse_probe(text: str, *, suite: Path, **rest: Any) -> Probe:
    """The probe that a line of text means: ``pytest:``, ``alignment:`` and ``shell:`` say it; else ``alignment …`` is
    a command of this suite, a test file of the suite (with or without ``::name``) is pytest, and everything else is
    shell.

    Raises:
        InputError: nothing is asked for, or a test file that is not there.
    """
    text = text.strip()
    if not text:
        raise InputError(
            "no probe is given", where="--probe", expected="a pytest node id, an alignment command or a shell command"
        )
    prefix, _, tail = text.partition(":")
    if prefix in ("pytest", "shell") and tail.strip() and not tail.startswith(":"):
        return Probe(kind=prefix, text=tail.strip(), **rest)  # type: ignore[arg-type]
    if text.startswith("alignment ") or (prefix == "alignment" and tail.strip()):
        words = tail.strip() if prefix == "alignment" else text
        return Probe(kind="alignment", text=words if words.startswith("alignment") else f"alignment {words}", **rest)
    first = shlex.split(text)[0]
    file = first.partition("::")[0]
    if (suite / file).is_dir() and "tests" in Path(file).parts:
        return Probe(kind="pytest", text=text, **rest)
    if file.endswith(".py") and not text.startswith("python"):
        if not (suite / file).is_file():
            raise InputError(
                "there is no such test file in the suite",
                where="--probe",
                found=file,
                expected=f"a path below {suite.name}/",
            )
        return Probe(kind="pytest", text=text, **rest)
    return Probe(kind="shell", text=text, **rest)


def exit_code(seen: Observation, expected: Signature | None = None) -> int:
    """The code with which a probe answers ``git bisect run``: 0, 1 (only as the expected failure), 125 or 128."""
    if seen.result is Result.ABORT:
        return ABORT
    if seen.result is Result.GOOD:
        return GOOD
    if seen.result is Result.BAD and (expected is None or any(expected.matches(f) for f in seen.failures)):
        return BAD
    return SKIP


def _class_of(exception: str, message: str, when: str | None) -> str:
    """Why a failure of a test is no measurement; empty where it is one."""
    if exception in _IMPORT:
        return "import"
    text = f"{exception}: {message}"
    if _MEMORY.search(text):
        return "out-of-memory"
    if _DEVICE.search(text):
        return "device"
    if exception == "FileNotFoundError" or (exception == "InputError" and _DATA.search(message)):
        return "data"
    return "environment" if when in ("setup", "teardown") else ""


def _where(row: Mapping) -> str:
    for verdict in row.get("verdicts", ()):
        place = verdict.get("where")
        if verdict.get("outcome") == "fail" and place:
            return f"{place['stage']} · {place['module']} · {place['quantity']}"
    return str(row["properties"].get("where") or row["exception"])


def _metric(row: Mapping) -> float | None:
    """A test's number: the property ``metric``, else the worst measure of its verdict."""
    told = row.get("properties", {}).get("metric")
    if told is not None and _is_number(told):
        return float(told)
    measures = [m for v in row.get("verdicts", ()) for m in v.get("measures", ()) if m.get("bound") is not None]
    worst = max(measures, key=_used, default=None)
    return float(worst["value"]) if worst is not None else None


def _used(measure: Mapping) -> float:
    value, bound = abs(float(measure["value"])), float(measure["bound"])
    if value != value:
        return float("inf")
    return value / bound if bound else (0.0 if value == 0 else float("inf"))


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _last_json(text: str) -> dict | None:
    """The document that a command printed last: the whole output, the last line, or what begins with the last
    unindented brace.
    """
    text = text.strip()
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("{")]
    for candidate in (text, *("\n".join(lines[i:]) for i in reversed(starts)), *(lines[-1:])):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None


def _last_line(done: Finished) -> str:
    lines = [line for line in (done.tail or "").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def _infrastructure(detail: str, reason: str = "infrastructure") -> Observation:
    return Observation(result=Result.INFRASTRUCTURE, reason=reason, detail=detail)


def _abort(reason: str, detail: str) -> Observation:
    return Observation(result=Result.ABORT, reason=reason, detail=detail)


def _with(seen: Observation, **changes: Any) -> Observation:
    from dataclasses import replace

    return replace(seen, **changes)


def order_by_cost(probes: Sequence[Probe]) -> list[Probe]:
    """Cheapest layer first: operator, layer, replayed step, end to end."""
    return sorted(probes, key=lambda p: LAYERS.index(p.layer))
