from __future__ import annotations

import pytest
from rl_cases import build_batch


@pytest.fixture(scope="session")
def make_batch():
    """Builds a small valid batch, as the stages of a step leave it."""
    return build_batch
