"""Every operator by every subject on every device, against the stored baselines."""

from __future__ import annotations

from alignment.pytest_plugin import check_params


def pytest_generate_tests(metafunc):
    if "check" in metafunc.fixturenames:
        metafunc.parametrize("check", check_params(metafunc.config, "unit"), indirect=True)


def test_operator(check):
    check()
