"""The stress job on a Ray cluster of several nodes."""

from __future__ import annotations

import pytest

from alignment.diagnose import stress_cards
from alignment.diagnose.stress import judge
from alignment.numerics.verdict import Outcome


@pytest.mark.slow
def test_every_node_answers():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        records, lost = stress_cards.on_a_cluster("cpu", address=cluster.address, per_node=1, rounds=1, minutes=0)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert not lost
    assert len({record.card.node for record in records}) == 2
    assert [verdict.outcome for verdict in judge(records)] == [Outcome.PASS, Outcome.PASS]
