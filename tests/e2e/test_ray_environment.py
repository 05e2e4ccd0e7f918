"""A worker on a cluster that was there before has the variables of the driver, and Ray shows none that is a secret."""

from __future__ import annotations

import os

from alignment.rl import ray_executor
from alignment.rl.ray_executor import Rank, call_on_every_card


def seen(node: str, device: str, rank: int) -> tuple[str | None, str | None, dict]:
    import ray

    told = ray.get_runtime_context().runtime_env.get("env_vars", {})
    return os.environ.get("VLLM_API_KEY"), os.environ.get("VLLM_SEED_OF_A_TEST"), dict(told)


def test_a_secret_reaches_the_worker_and_not_what_ray_shows(ray_cluster, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_SEED_OF_A_TEST", "7")
    [(_, _, _, answer)] = call_on_every_card(seen, kind="cpu", per_node=1)
    key, seed, told = answer
    assert (key, seed) == ("hunter2", "7")
    assert told["VLLM_SEED_OF_A_TEST"] == "7" and "VLLM_API_KEY" not in told


def test_what_is_not_withheld_would_be_shown(ray_cluster, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setattr(ray_executor, "without_secrets", lambda environment: (environment, {}))
    [(_, _, _, (_, _, told))] = call_on_every_card(seen, kind="cpu", per_node=1)
    assert told["VLLM_API_KEY"] == "hunter2"


def test_an_actor_of_a_run_is_handed_it_when_it_is_built(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    found = []
    monkeypatch.setattr(ray_executor, "Worker", lambda *arguments, **more: found.append(os.environ.get("VLLM_API_KEY")))
    rank = Rank()
    try:
        rank.build(None, (), 0, 1, None, None, {"VLLM_API_KEY": "hunter2"})
    finally:
        os.environ.pop("VLLM_API_KEY", None)
    assert found == ["hunter2"]
