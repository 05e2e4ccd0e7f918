"""The stress job on a Ray cluster of several nodes."""

from __future__ import annotations

import time

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


@pytest.mark.slow
def test_a_card_of_a_cluster_that_hangs_is_given_up(monkeypatch):
    pytest.importorskip("ray")

    def hanging(node: str, device: str, rank: int, **job: float) -> str:
        while rank == 1:
            time.sleep(1)
        return "no record"

    monkeypatch.setattr(stress_cards, "_job", hanging)
    records, lost = stress_cards.on_a_cluster("cpu", address=None, per_node=2, rounds=1, minutes=0, timeout=20)
    assert records == []
    assert {card.rank: reason for card, reason in lost.items()}[1] == "no answer within 20 s"
