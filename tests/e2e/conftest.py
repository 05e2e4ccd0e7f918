"""What the training runs of this folder share: a tiny world, and one local Ray cluster for all of them."""

from __future__ import annotations

import dapo_world
import pytest


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Directory of the tiny model and its prompts (:mod:`dapo_world`)."""
    return dapo_world.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def ray_cluster():
    """Ray, started once: executors use the cluster this process is connected to."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from alignment.rl.ray_executor import connect

    started = connect()
    yield ray
    if started:
        ray.shutdown()
