"""Probes on the nodes of a Ray cluster."""

from __future__ import annotations

import sys

import pytest

from alignment.bisect.frozen_suite import freeze_suite
from alignment.bisect.observation import Result
from alignment.bisect.probe import Probe
from alignment.bisect.providers.command import CommandProvider
from alignment.bisect.ray_nodes import RayMeasure
from alignment.bisect.stack import stack_from_data


@pytest.fixture(scope="module")
def cluster():
    """Two nodes in this machine, with a resource of their own each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def suite(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "told").write_text("7")
    return freeze_suite(tmp_path / "suite", source=source)


STACK = stack_from_data({"schema": 1, "define": {"x": {"external": True}}, "components": {"x": "1"}})
PROVIDER = CommandProvider(activation="true", python=sys.executable)


@pytest.mark.slow
def test_probes_run_on_both_nodes_with_the_suite(tmp_path, cluster, suite):
    from concurrent.futures import ThreadPoolExecutor

    measure = RayMeasure(suite)
    assert measure.nodes == 2
    script = 'sleep 1; echo "{\\"metric\\": $(cat told), \\"check\\": \\"$RAY_NODE_ID\\"}"'
    probe = Probe(kind="shell", text=script)

    def one(slot):
        return measure(PROVIDER, probe, STACK, slot, suite.folder, tmp_path / "scratch")

    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(one, range(4)))
    assert [o.result for o in seen] == [Result.GOOD] * 4 and {o.value for o in seen} == {7.0}


@pytest.mark.slow
def test_a_lost_node_is_infrastructure(tmp_path, cluster, suite):
    measure = RayMeasure(suite)
    probe = Probe(kind="shell", text="kill -9 $PPID")
    seen = measure(PROVIDER, probe, STACK, 0, suite.folder, tmp_path / "scratch")
    assert seen.result is Result.INFRASTRUCTURE
