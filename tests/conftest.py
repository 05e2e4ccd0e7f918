"""What tests of several folders start from."""

from __future__ import annotations

import pytest

from alignment.errors import UnavailableError


@pytest.fixture(scope="module")
def megatron_core():
    """Where megatron-core is not installed, every check says so."""
    from alignment.backends.megatron_model import installed_version

    try:
        installed_version()
    except UnavailableError as missing:
        pytest.skip(str(missing))
