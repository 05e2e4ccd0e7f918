"""Fixtures and options come from the installed plugin, ``alignment.pytest_plugin``; this file only prepares the process."""

import os

import pytest

# One thread on the CPU, here and in every process the tests start: the models are small, and the order of their sums is
# then the same on every machine. It has to be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """A listing of the tests runs none, so Hypothesis need not read the constants of every module for it."""
    if session.config.option.collectonly:
        session.config.pluginmanager.unregister(name="hypothesispytest")
