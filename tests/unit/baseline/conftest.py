"""A small recorded store, from a commit that is given."""

from __future__ import annotations

import pytest

from alignment.backends.catalogue import find_cases
from alignment.baseline.record import record
from alignment.baseline.store import BaselineStore
from alignment.devices.base import get_device

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECORDED = ("rms_norm-float32", "swiglu")


@pytest.fixture
def commit(monkeypatch):
    """Sources of a known, clean commit."""
    monkeypatch.setenv("ALIGNMENT_COMMIT", COMMIT)
    return COMMIT


@pytest.fixture
def cpu():
    return get_device("cpu")


@pytest.fixture
def recorded(commit, cpu, tmp_path):
    """A store that holds three cases."""
    store = BaselineStore(tmp_path / "baselines")
    record(find_cases(RECORDED, "unit"), cpu, store)
    return store


@pytest.fixture
def the():
    """The case with this id."""

    def find(case_id):
        (case,) = find_cases([case_id])
        return case

    return find
