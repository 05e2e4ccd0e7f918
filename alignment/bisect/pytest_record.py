"""A pytest plugin for probes (``-p alignment.bisect.pytest_record``): writes what every test found where a bisection
reads it.

It runs inside the environment that is probed, with whatever versions are there: standard library and pytest only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "ALIGNMENT_BISECT_RECORD"


class Recorder:
    def __init__(self, path: Path) -> None:
        self.path, self.tests, self.collect_errors, self.before = path, {}, [], 0

    def _row(self, nodeid: str) -> dict:
        return self.tests.setdefault(
            nodeid, {"outcome": "not run", "exception": "", "message": "", "properties": {}, "verdicts": []}
        )

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        ledger = _ledger(item.config)
        before = len(ledger.verdicts) if ledger else 0
        yield
        if ledger:
            self._row(item.nodeid)["verdicts"] = [_finite(v.to_dict()) for v in ledger.verdicts[before:]]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        row = self._row(item.nodeid)
        if report.failed and row["outcome"] != "failed":
            kind = call.excinfo.typename if call.excinfo is not None else ""
            row |= {
                "outcome": "failed",
                "when": report.when,
                "exception": kind,
                "message": str(call.excinfo.value)[:600] if call.excinfo else "",
            }
        elif report.skipped and row["outcome"] == "not run":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            row |= {"outcome": "skipped", "message": reason[:600]}
        elif report.passed and report.when == "call" and row["outcome"] == "not run":
            row["outcome"] = "passed"
        if report.when == "call":
            row["properties"] = {k: v for k, v in item.user_properties if isinstance(v, (int, float, str, bool))}

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors.append(str(report.longrepr)[-1500:])

    def pytest_sessionfinish(self, session, exitstatus):
        data = {"exit": int(exitstatus), "tests": self.tests, "collect_errors": self.collect_errors}
        beside = self.path.with_suffix(".partial")
        beside.write_text(json.dumps(_finite(data)), encoding="utf-8")
        os.replace(beside, self.path)


def _ledger(config):
    try:
        from alignment.pytest_plugin import LEDGER
    except ImportError:
        return None
    return config.stash.get(LEDGER, None)


def _finite(value):
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def pytest_configure(config):
    path = os.environ.get(VARIABLE)
    if path:
        config.pluginmanager.register(Recorder(Path(path)), "alignment-bisect-record")
